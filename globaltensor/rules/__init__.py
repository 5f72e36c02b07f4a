"""What is legal: the rule language, and the families of ops that write rules in it.

    language    Rule, Signature: what a rule means, and the signatures that follow from it
    parse       from the text of a rule to a Rule
    call        an op's call as rules see it
    families    rules of arithmetic; shapes: of views; indices: of indexing; layers: of networks' own ops

Nothing here moves data or runs an op.
"""
