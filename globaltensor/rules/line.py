"""A line of the table: an op's rule, and where it needs one, a third column that says how the local run differs."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from globaltensor.layouts.layout import Spec
from globaltensor.rules.call import Call
from globaltensor.rules.families import Family

Patched = Iterable[tuple[int | str, Any]]
Patch = Callable[[Call, list[Spec], list[Spec], int], Patched]


@dataclass(frozen=True)
class Line:
    """family    writes the rule
    patch     (call, operand specs, output specs, rank) -> [(position, value)]: arguments that differ on a rank
    runner    replaces the local op: (recipe, rank, args, kwargs) -> result
    rewrite   the op as other global ops: (call, run) -> result, taken `when` the call needs it
    """

    family: Family
    patch: Patch | None = None
    runner: Callable[..., Any] | None = None
    rewrite: Callable[[Call, Any], Any] | None = None
    when: Callable[[Call], bool] = lambda call: True


def replayable(rewrite: Callable[[Call, Any], Any]) -> Callable[[Call, Any], Any]:
    """Mark a rewrite that works by `run(op, ...)` and `run.box` alone and decides by nothing but specs and arguments.

    What it did once may then be done again for every call alike (dispatch/trace.py).
    """
    rewrite.replayable = True
    return rewrite


def sized(name: str) -> Patch:
    """Argument `name` is the output's size: locally, the size of this rank's part."""
    return lambda call, operands, outputs, rank: [(call.position(name), list(outputs[0].local_shape(rank)))]


def strided(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> Patched:
    """new_empty_strided: a size and strides; a part is contiguous where the whole is."""
    size = outputs[0].local_shape(rank)
    order = sorted(range(len(size)), key=lambda i: outputs[0].stride[i])
    stride, step = [1] * len(size), 1
    for i in order:
        stride[i] = step
        step *= max(size[i], 1)
    return [(call.position("size"), list(size)), (call.position("stride"), stride)]


def shifted_diagonal(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> Patched:
    """tril, triu of a part: element (i, j) of it is element (i + row, j + column) of the whole."""
    (row, _), (column, _) = outputs[0].box(rank)[-2:]
    return [(call.position("diagonal"), call["diagonal"] + row - column)]


def scaled(name: str, operand: int = 0, dim: int = 1) -> Patch:
    """Argument `name` counts groups along a dim of an operand: locally, the groups of this rank's part."""
    def patch(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> Patched:
        own = operands[operand]
        n = own.shape[dim]
        return [(call.position(name), max(call[name] * own.local_shape(rank)[dim] // max(n, 1), 1))]

    return patch


def group_counts(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> Patched:
    """group_norm is told the sizes of its operand (the first but for gradients: all of one shape)."""
    own = operands[0]
    n, c, *_ = own.local_shape(rank)
    return [(call.position("N"), n), (call.position("C"), c),
            (call.position("group"), call["group"] * c // max(own.shape[1], 1))]
