"""What is legal: the rule language, the families of ops that write rules in it, and the judge of rules.

    language    Rule, Signature: what a rule means, and the signatures that follow from it
    parse       from the text of a rule to a Rule
    call        an op's call as rules see it
    families    rules of arithmetic; shapes: of views; indices: of indexing; layers: of networks' own ops
    proof       `check`: a rule proved by brute force

Nothing here moves data between ranks.
"""
from __future__ import annotations

from globaltensor.rules.proof import Verdict, check

__all__ = ["Verdict", "check"]
