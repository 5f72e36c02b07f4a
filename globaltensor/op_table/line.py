"""A line of the table: an op's rule, and the columns that say how a rank's local run differs from the global op.

Most ops need the rule alone: every rank runs the op itself on its shards. Below are the local arguments of those that
name a size, an offset or a number of groups, which are other ones for a shard.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from globaltensor.algorithms.offer import Offers
from globaltensor.algorithms.run import Decomposition
from globaltensor.layouts.layout import Spec
from globaltensor.rules import proof
from globaltensor.rules.call import Call
from globaltensor.rules.families import Family, of_numbers
from globaltensor.rules.language import Rule, sized_rule
from globaltensor.runtime.torch_internals import OpOverload

ArgValues = Iterable[tuple[int | str, Any]]
LocalArgs = Callable[[Call, list[Spec], list[Spec], int], ArgValues]


@dataclass(frozen=True)
class Line:
    """family          writes the rule of a call
    local_args      (call, operand specs, output specs, rank) -> [(position, value)]: arguments that differ on a rank
    local_impl      runs on every rank instead of the op: (recipe, rank, args, kwargs) -> result
    decomposition   the op by other global ops: (call, run) -> result
    offer           what that takes: (call, operand specs) -> Offer or None; then it competes with the rule's signatures
    applies         without an offer, the calls for which the decomposition is taken, whatever the rule allows
    """

    family: Family
    local_args: LocalArgs | None = None
    local_impl: Callable[..., Any] | None = None
    decomposition: Decomposition | None = None
    applies: Callable[[Call], bool] = lambda call: True
    offer: Offers | None = None

    def rule(self, call: Call) -> Rule:
        """The rule of a call, for operands of these sizes and the numbers in it."""
        return sized_rule(of_numbers(self.family(call), call), call.shapes)


TABLE: dict[OpOverload, Line] = {}                   # filled by table.py, and by users through `gt.rule`
proof.look_lines_up_in(TABLE)                        # the judge is in a room below


def _op(name: str) -> OpOverload:
    """aten.add.Tensor from "add.Tensor", aten.relu.default from "relu", prims.item.default from "prims::item"."""
    namespace, _, name = name.rpartition("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace or "aten"), packet), overload or "default")


def lines(names: str, family: Family, **columns: Any) -> None:
    """The same line for several ops, whose names are separated by spaces."""
    for name in names.split():
        TABLE[_op(name)] = Line(family, **columns)


def always_decomposed(call: Call) -> Rule:
    """The family of an op that is always decomposed: nothing may ask for its rule."""
    raise AssertionError(f"{call.func} is always decomposed")


def decomposed(names: str, decomposition: Decomposition) -> None:
    """The line of several ops that are decomposed on every call."""
    lines(names, always_decomposed, decomposition=decomposition)


def sized(name: str) -> LocalArgs:
    """Argument `name` is the size of the output: locally, that of the rank's part."""
    return lambda call, operands, outputs, rank: [(call.position(name), list(outputs[0].local_shape(rank)))]


def image_sized(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> ArgValues:
    """col2im takes the size of the image that it makes: locally, that of the rank's part."""
    return [(call.position("output_size"), list(outputs[0].local_shape(rank)[-2:]))]


def grid_sized(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> ArgValues:
    """affine_grid_generator takes the size of a batch of images: locally, of the rank's part."""
    return [(call.position("size"), [outputs[0].local_shape(rank)[0], *call["size"][1:]])]


def strided(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> ArgValues:
    """new_empty_strided: the size of the rank's part, and strides in the order of the whole's, without its gaps."""
    size = outputs[0].local_shape(rank)
    order = sorted(range(len(size)), key=lambda i: outputs[0].stride[i])
    stride, step = [1] * len(size), 1
    for i in order:
        stride[i] = step
        step *= max(size[i], 1)
    return [(call.position("size"), list(size)), (call.position("stride"), stride)]


def shifted_diagonal(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> ArgValues:
    """tril, triu: element (i, j) of a part is element (i + row, j + column) of the whole: its diagonal is shifted."""
    (row, _), (column, _) = outputs[0].region(rank)[-2:]
    return [(call.position("diagonal"), call["diagonal"] + row - column)]


def scaled(name: str, operand: int = 0, dim: int = 1) -> LocalArgs:
    """Argument `name` counts groups along a dim of an operand: locally, those in the rank's part."""

    def local_args(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> ArgValues:
        own = operands[operand]
        n = own.shape[dim]
        return [(call.position(name), max(call[name] * own.local_shape(rank)[dim] // max(n, 1), 1))]

    return local_args


def own_channels(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> ArgValues:
    """convolution_backward counts groups, and takes the size of the bias as a number: that of the output's channels."""
    bias = [] if call["bias_sizes"] is None else [(call.position("bias_sizes"), [operands[0].local_shape(rank)[1]])]
    return [*scaled("groups")(call, operands, outputs, rank), *bias]


def group_counts(call: Call, operands: list[Spec], outputs: list[Spec], rank: int) -> ArgValues:
    """group_norm takes the sizes of its operand as numbers. (In the gradient, operand 0 is that of the output: of the
    same shape.)"""
    own = operands[0]
    n, c, *_ = own.local_shape(rank)
    return [(call.position("N"), n), (call.position("C"), c),
            (call.position("group"), call["group"] * c // own.shape[1] if own.shape[1] else call["group"])]
