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
        raise mixed_placements(call, (home, call.names[first]), (call.tensors[k].spec.placement, call.names[k]))
    moved = run.redistribute([*elsewhere.values()], [replicated(home)] * len(elsewhere), str(call.func))
    operands = list(call.tensors)
    for k, t in zip(elsewhere, moved):
        operands[k] = t
    args, kwargs = call.arguments_with(operands)
    return run(call.func, *args, **kwargs)


def mixed_placements(call: Call, one: tuple[placement, str], other: tuple[placement, str]) -> MixedPlacementError:
    """The error of operands that are not on one placement; each with its name."""
    (first, a), (second, b) = one, other
    return MixedPlacementError(f"{call.func}: {a} is on {first}, {b} on {second}",
                               "the operands of one op live on one placement", f"{b}.to_global(gt.{first})")
