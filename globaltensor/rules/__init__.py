"""What is legal: the rule language, the families that write rules, the table of ops, and their local rewrites."""
