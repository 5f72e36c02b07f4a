"""What a decomposition is: an op on global tensors, done by other ops, boxings and local kernels.

It takes (call, run): the call to do, and `run`, which does an op on global tensors, the op itself by its rule
(`run.plain`), and boxings of several tensors at once. It stands below autograd, so its ops need no gradients.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from globaltensor.rules.call import Call

Decomposition = Callable[[Call, Any], Any]


def replayable(decomposition: Decomposition) -> Decomposition:
    """Mark a decomposition that works by `run(op, ...)` and `run.redistribute` alone, and decides by specs and
    arguments only.

    What it did once may then be done again for every call alike (dispatch/trace.py).
    """
    decomposition.replayable = True
    return decomposition
