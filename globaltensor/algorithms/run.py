"""What algorithms are written in: decompositions, and the `Run` that does their steps.

A decomposition is an op on global tensors, done by other ops, boxings and local kernels. It takes (call, run): the call
to do, and what does it. It stands below autograd, so its steps need no gradients of their own.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from globaltensor.boxings.rows import RowExchange
from globaltensor.layouts.global_like import GlobalLike
from globaltensor.layouts.layout import Layout, Shape, Shards, Spec
from globaltensor.layouts.regions import Range
from globaltensor.rules.call import Call
from globaltensor.runtime.torch_internals import OpOverload


class Run(Protocol):
    """Does the steps of a decomposition. `op` names the op that they are for, to whoever watches boxings."""

    def __call__(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """An op on global tensors, dispatched as if it came from torch, decompositions and all."""

    def plain(self, call: Call) -> Any:
        """The call itself, by the op's rule."""

    def redistribute(self, tensors: Sequence[GlobalLike], dsts: Sequence[Layout], op: str, keep: bool = False
                     ) -> list[GlobalLike]:
        """The same values in other layouts, moved together. `keep` them beside tensors that were pending, for ops that
        come later (completed.py); nobody may write to them then."""

    def gather_regions(self, tensors: Sequence[GlobalLike], dsts: Sequence[Layout], op: str) -> list[Shards]:
        """What every rank gets of each tensor, in layouts that may be a region per rank; moved together."""

    def scatter_add_regions(self, parts: Shards, held: Layout, of: Spec, op: str) -> GlobalLike:
        """The tensor that is the sum of what ranks have of their regions, as this spec tells."""

    def row_exchange(self, axes: tuple[int, ...], held: Mapping[int, Range], wanted: Mapping[int, Tensor],
                     row: Mapping[int, Shape], op: str, src: Layout, dst: Layout) -> RowExchange:
        """Single rows between ranks, picked by their numbers (`boxings/rows.py`)."""

    def wrap(self, own: Spec, shards: Shards) -> GlobalLike:
        """A global tensor of these shards."""


Decomposition = Callable[[Call, Run], Any]
T = TypeVar("T")


_traceable: set[Any] = set()


def traceable(decomposition: T) -> T:
    """Mark a decomposition, or a class of them, that works by `run(op, ...)` and `run.redistribute` alone and decides
    by specs and arguments only. What it did once may be done again for every call with these (dispatch/trace.py)."""
    _traceable.add(decomposition)
    return decomposition


def is_traceable(decomposition: Decomposition | None) -> bool:
    """Is it marked so?"""
    return decomposition in _traceable or type(decomposition) in _traceable


_of_values: set[Decomposition] = set()


def of_values(decomposition: Decomposition) -> Decomposition:
    """Mark a decomposition that looks at values. A graph and the meta device have none: there the op runs by its
    rule."""
    _of_values.add(decomposition)
    return decomposition


def looks_at_values(decomposition: Decomposition) -> bool:
    """Is it marked so?"""
    return decomposition in _of_values
