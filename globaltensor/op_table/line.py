"""A line of the table: an op's rule, and the columns that say how a rank's local run differs from it."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from globaltensor.algorithms.run import Decomposition
from globaltensor.layouts.layout import Spec
from globaltensor.rules import proof
from globaltensor.rules.call import Call
from globaltensor.rules.families import Family

ArgValues = Iterable[tuple[int | str, Any]]
LocalArgs = Callable[[Call, list[Spec], list[Spec], int], ArgValues]


@dataclass(frozen=True)
class Line:
    """family          writes the rule
    local_args      (call, operand specs, output specs, rank) -> [(position, value)]: arguments that differ on a rank
    local_impl      replaces the local op: (recipe, rank, args, kwargs) -> result
    decomposition   the op as other global ops: (call, run) -> result, taken where it `applies` to the call
    """

    family: Family
    local_args: LocalArgs | None = None
    local_impl: Callable[..., Any] | None = None
    decomposition: Decomposition | None = None
    applies: Callable[[Call], bool] = lambda call: True


TABLE: dict[OpOverload, Line] = {}                   # filled by table.py, and by users through `gt.rule`
proof.look_lines_up_in(TABLE)                        # the judge is in a room below


def sized(name: str) -> LocalArgs:
    """Argument `name` is the output's size: locally, the size of this rank's part."""
    return lambda call, operands, outputs, rank: [(call.position(name), list(outputs[0].local_shape(rank)))]


def strided(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> ArgValues:
    """new_empty_strided: a size and strides; a part is contiguous where the whole is."""
    size = outputs[0].local_shape(rank)
    order = sorted(range(len(size)), key=lambda i: outputs[0].stride[i])
    stride, step = [1] * len(size), 1
    for i in order:
        stride[i] = step
        step *= max(size[i], 1)
    return [(call.position("size"), list(size)), (call.position("stride"), stride)]


def shifted_diagonal(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> ArgValues:
    """tril, triu of a part: element (i, j) of it is element (i + row, j + column) of the whole."""
    (row, _), (column, _) = outputs[0].box(rank)[-2:]
    return [(call.position("diagonal"), call["diagonal"] + row - column)]


def scaled(name: str, operand: int = 0, dim: int = 1) -> LocalArgs:
    """Argument `name` counts groups along a dim of an operand: locally, the groups of this rank's part."""
    def local_args(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> ArgValues:
        own = operands[operand]
        n = own.shape[dim]
        return [(call.position(name), max(call[name] * own.local_shape(rank)[dim] // max(n, 1), 1))]

    return local_args


def group_counts(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> ArgValues:
    """group_norm is told the sizes of its operand (the first but for gradients: all of one shape)."""
    own = operands[0]
    n, c, *_ = own.local_shape(rank)
    return [(call.position("N"), n), (call.position("C"), c),
            (call.position("group"), call["group"] * c // max(own.shape[1], 1))]
