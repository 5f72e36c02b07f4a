"""Scalars on other placements than the rest of an op's operands, such as the norms of a pipeline's stages.

`nn.utils.clip_grad_norm_` stacks the norms of all gradients and multiplies each gradient by a quotient of their norm.
On one device torch does so with one list of all gradients (foreach.py); of several devices, or without lists, one after
the other. The scalars go to where the other operands are, or to the first of them.
"""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.algorithms.run import Run
from globaltensor.errors import MixedPlacementError
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import replicated
from globaltensor.layouts.placement import placement
from globaltensor.rules.call import Call, written


def placement_of_scalars(call: Call) -> placement | None:
    """Where the scalars go; None where all operands are on one placement, or scalars are not all that is elsewhere."""
    operands = [t for t in call.tensors if is_global(t)]
    places = dict.fromkeys(t.spec.placement for t in operands)
    if len(places) < 2 or any(where.type == "meta" for where in places):
        return None
    of_others = dict.fromkeys(t.spec.placement for t in operands if t.dim())
    home = next(iter(of_others or places))
    targets = written(call) if call.func._schema.is_mutable else []
    stay = all(t.spec.placement == home for t in targets if is_global(t))
    return home if stay and len(of_others) < 2 else None


def bring_scalars(call: Call, run: Run) -> Any:
    """Bring them there, whole on every rank. Gradients would not find back."""
    home = placement_of_scalars(call)
    assert home is not None                          # which is why it was decided so
    elsewhere: dict[int, Any] = {k: t for k, t in enumerate(call.tensors)
                                 if is_global(t) and t.spec.placement != home}
    if torch.is_grad_enabled() and (k := next((k for k, t in elsewhere.items() if t.requires_grad), None)) is not None:
        first = next(j for j, t in enumerate(call.tensors) if is_global(t) and t.spec.placement == home)
        raise mixed_placements(call, first, k)
    moved = run.redistribute([*elsewhere.values()], [replicated(home)] * len(elsewhere), str(call.func))
    operands = list(call.tensors)
    for k, t in zip(elsewhere, moved):
        operands[k] = t
    args, kwargs = call.arguments_with(operands)
    return run(call.func, *args, **kwargs)


def mixed_placements(call: Call, first: int, second: int) -> MixedPlacementError:
    """The error of two operands that are not on one placement; each with its name."""
    (a, b), (one, other) = map(call.operand, (first, second)), (call.tensors[q] for q in (first, second))
    return MixedPlacementError(f"{call.func}: {a} is on {one.placement}, {b} on {other.placement}",
                               "the operands of one op live on one placement", _fix_by_moving(a, one, b, other))


def _fix_by_moving(a: str, one: Any, b: str, other: Any) -> str:
    """What to type to bring one of two operands to the other. A module takes no other tensor for its parameter."""
    to_one, to_other = f"to_global(gt.{one.placement})", f"to_global(gt.{other.placement})"
    if not isinstance(other, torch.nn.Parameter):
        return f"{b}.{to_one}"
    module = f"module.{to_one} for the module of {b}"
    return module if isinstance(one, torch.nn.Parameter) else f"{a}.{to_other}, or {module}"
