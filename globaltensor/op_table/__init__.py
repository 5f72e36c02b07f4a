"""The one table of ops: every op that runs split has a line, and its variants follow from that.

    line        what a line says: a rule, and how a rank's local run differs
    table       the lines; those of losses and of mathematics are beside it
    variants    in-place, out= and foreach forms, from the line of the functional op
"""
