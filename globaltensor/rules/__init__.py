"""What is legal: the rule language, and the families that write rules."""
