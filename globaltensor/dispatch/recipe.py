"""What was decided for an op, ready to be done again: looked up by op, specs and static arguments."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from globaltensor.layouts.layout import Layout, Spec, layout, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import broadcast
from globaltensor.rules.call import Slot
from globaltensor.rules.language import Signature

RankArgs = dict[int, tuple[tuple[int | str, Any], ...]]


@dataclass(slots=True)
class Recipe:
    """How to run one op on operands of these specs.

    ranks      the ranks of the placement that this process drives
    slots      where the operands stand; `wants` the layout each must have, None where it has it already
    outputs    the spec of each result in order, None for one that is no tensor; None instead of the list where only
               running the op tells (all outputs are then broadcast)
    written    operands the op writes to; returned in place of results that alias them
    local_args      per rank, arguments that are sizes of the local output instead of the global one
    local_impl      what replaces the op itself on a rank: local_impl(recipe, rank, args, kwargs) -> result
    decomposition   the op in terms of other global ops: decomposition(call, run) -> result; nothing else counts then
    simple     the fast path: operands are positional global tensors as they lie; `single`: one tensor comes out
    """

    func: OpOverload
    ranks: tuple[int, ...] = ()
    slots: tuple[Slot, ...] = ()
    wants: tuple[Layout | None, ...] = ()
    outputs: list[Spec | None] | None = None
    written: tuple[int, ...] = ()
    local_args: RankArgs = field(default_factory=dict)
    local_impl: Any = None
    decomposition: Any = None
    simple: tuple[int, ...] | None = None
    single: Spec | None = None
    home: Layout | None = None                       # all broadcast on the placement
    signature: tuple[Signature, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()         # of the operands, and the box each rank has of them
    boxes: tuple[dict[int, Any], ...] = ()
    guarded: tuple[int, ...] = ()
    is_view: bool = False
    seeded: bool = False                             # draws random numbers that no rule takes care of


def static(value: Any, cls: type) -> Any:
    """The part of a cache key for one argument: specs for tensors, types for floats and generators, values else."""
    kind = type(value)
    if kind is cls:
        return value.spec
    if kind is float or kind is complex or kind is torch.Generator:
        return kind
    if kind is int or kind is bool:
        return kind, value
    if kind is list or kind is tuple:
        return (list, *[static(v, cls) for v in value])
    if isinstance(value, torch.Tensor):
        return "plain", tuple(value.shape), value.stride(), value.dtype, value.device
    if kind is dict:
        return (dict, *[(k, static(v, cls)) for k, v in value.items()])
    return value


def put(args: list[Any], kwargs: dict[str, Any], slots: Any, tensors: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Set each slot to its tensor; lists are copied before they change."""
    copied: set[int | str] = set()
    for (at, index), tensor in zip(slots, tensors):
        holder: Any = args if isinstance(at, int) else kwargs
        if index is None:
            holder[at] = tensor
        else:
            if at not in copied:
                holder[at] = list(holder[at])
                copied.add(at)
            holder[at][index] = tensor
    return args, kwargs


def spec_of_plain(t: torch.Tensor, where: placement) -> Spec:
    """A plain tensor counts as broadcast."""
    return spec(layout(where, (broadcast,) * where.ndim), tuple(t.shape), t.stride(), t.dtype)


def output_spec(result: Any, where: Layout) -> Spec | None:
    """The spec of a result that lies like this; None for what is no tensor."""
    if not isinstance(result, torch.Tensor):
        return None
    return spec(where, tuple(result.shape), result.stride(), result.dtype)


def moved_spec(of: Spec, dst: Layout) -> Spec:
    """The spec after a boxing: new shards are contiguous."""
    return of if dst is of.layout else spec(dst, of.shape, None, of.dtype)
