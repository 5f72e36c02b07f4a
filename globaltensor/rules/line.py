"""A line of the table: an op's rule, and where it needs one, a third column that says how the local run differs."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from globaltensor.layout import Spec
from globaltensor.rules.call import Call
from globaltensor.rules.families import Family


@dataclass(frozen=True)
class Line:
    """family    writes the rule
    patch     (call, output specs, rank) -> [(position, value)]: arguments that are local sizes
    runner    replaces the local op: (recipe, rank, args, kwargs) -> result
    rewrite   the op as other global ops: (call, run) -> result, taken `when` the call needs it
    """

    family: Family
    patch: Callable[[Call, list[Spec], int], Iterable[tuple[int | str, Any]]] | None = None
    runner: Callable[..., Any] | None = None
    rewrite: Callable[[Call, Any], Any] | None = None
    when: Callable[[Call], bool] = lambda call: True


def sized(name: str) -> Callable[[Call, list[Spec], int], list[tuple[int | str, Any]]]:
    """Argument `name` is the output's size: locally, the size of this rank's part."""
    return lambda call, outputs, rank: [(call.position(name), list(outputs[0].local_shape(rank)))]


def whole_dims_split(call: Call, dims: Iterable[int]) -> bool:
    """Is the first operand split, or about to be short, along one of these dims?"""
    own = getattr(call.tensors[0], "spec", None)
    return own is not None and any(s.is_split and s.dim in set(dims) for s in own.sbp)
