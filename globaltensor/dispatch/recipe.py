"""What was decided for an op, ready to be done again: looked up by op, specs and static arguments."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from globaltensor.layout import Layout, Spec
from globaltensor.rules.call import Slot
from globaltensor.rules.language import Signature

Patches = dict[int, tuple[tuple[int | str, Any], ...]]


@dataclass(slots=True)
class Recipe:
    """How to run one op on operands of these specs.

    ranks      the ranks of the placement that this process drives
    slots      where the operands stand; `wants` the layout each must have, None where it has it already
    outputs    the spec of each result in order, None for one that is no tensor; None instead of the list where only
               running the op tells (all outputs are then broadcast)
    written    operands the op writes to; returned in place of results that alias them
    patches    per rank, arguments that are sizes of the local output instead of the global one
    runner     a local op that replaces the op itself: runner(call args, kwargs, rank) -> result
    rewrite    the op in terms of other global ops: rewrite(args, kwargs) -> result; nothing else counts then
    simple     the fast path: operands are positional global tensors as they lie; `single`: one tensor comes out
    """

    func: OpOverload
    ranks: tuple[int, ...] = ()
    slots: tuple[Slot, ...] = ()
    wants: tuple[Layout | None, ...] = ()
    outputs: list[Spec | None] | None = None
    written: tuple[int, ...] = ()
    patches: Patches = field(default_factory=dict)
    runner: Any = None
    rewrite: Any = None
    simple: tuple[int, ...] | None = None
    single: Spec | None = None
    home: Layout | None = None                       # all broadcast on the placement
    signature: tuple[Signature, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()         # of the operands, and the box each rank has of them: for runners
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
