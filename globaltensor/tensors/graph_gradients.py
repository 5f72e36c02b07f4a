"""Gradients that a compiled graph takes: they are read before torch compares them with those that it was made for.

torch looks at `p.grad` as backward left it, mostly a pending sum (gradients.py). But the graph takes what a read of
`p.grad` gives. So a graph that was made of what lies there would fit no call, and be made again and again.

torch asks a tensor for its spec when it makes a graph, and again, in a guard, before it calls one. Then the gradients
are read, all in one boxing:

    a graph is made           of any tensor: a parameter may be asked for its gradient
    a graph is to be called   with a gradient that waits. What takes parameters alone, such as a forward pass between
                              micro-batches, leaves sums pending

Every rank comes to this with the same sums, whether it finds a graph that fits or makes one. An error in a guard is to
torch a graph that does not fit: it is kept, and raised where the next graph is made. (The parts of parameters that ZeRO
steps have no gradient before it is handed over to them; that is done by a hook before the step, parallel/zero.py.)
"""
from __future__ import annotations

from typing import Any

from globaltensor.runtime.torch_internals import without_modes
from globaltensor.tensors import gradients

_lost: list[BaseException] = []                      # of guards


def read_for_new_graph() -> None:
    """Before a graph is made of a tensor."""
    if gradients.pending:
        if _lost:
            raise _lost.pop()
        with without_modes():
            gradients.reduce_pending()


def read_for_guard(x: Any) -> None:
    """Before torch compares x with what a graph was made for."""
    if gradients.pending and not x.requires_grad and (leaf := _leaf_of_pending(x)) is not None:
        _lost.clear()
        try:
            gradients.reduce_pending(beside=leaf)
        except BaseException as error:
            _lost.append(error)
            raise


def _leaf_of_pending(x: Any) -> Any:
    """The parameter of which this is the gradient, still to be reduced; None where it is no such gradient."""
    return next((leaf for leaf in list(gradients.pending.values()) if gradients.raw_grad(leaf) is x), None)
