"""The one table: every op that runs split, a line each, and the variants that follow from it."""
