"""Calls that name devices of another type than their operands are on: x.cpu(), torch.zeros_like(x, device="cpu").

The result is on the same ranks' devices of that type, laid out as the operand is, with nothing pending. On the meta
device an op is done without values. What else names a device is refused: the placement says where a tensor is.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from globaltensor.algorithms.run import Run
from globaltensor.errors import PlacementError
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import layout, replicated, spec
from globaltensor.layouts.placement import placement
from globaltensor.rules.call import Call
from globaltensor.runtime.world import local_ranks_of, world

aten = torch.ops.aten
_LIKE = {getattr(aten, name).default for name in ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty",
                                                  "new_zeros", "new_ones", "new_full")}


def decide_elsewhere(call: Call, where: placement) -> Callable[[Call, Run], Any] | None:
    """How a call runs that names devices of another type than those of its operands; None for others."""
    device = call.get("device")
    if device is None or torch.device(device).type == where.type:
        return None
    if torch.device(device).type == "meta":
        return _without_memory
    if where.type == "meta":                         # where there are no values to move
        return _allocate if call.func is aten.empty_like.default else None
    return _moved_to_devices if call.func is aten._to_copy.default else _like_elsewhere if call.func in _LIKE else None


def _without_memory(call: Call, run: Run) -> Any:
    """An op whose result shall be on "meta": done on operands that are there, laid out as they were."""
    moved: list[Any] = []
    for t in call.tensors:
        if is_global(t):
            own, where = t.spec, t.spec.placement
            on_meta = layout(where.of_type("meta"), own.sbp)
            moved.append(run.wrap(spec(on_meta, own.shape, own.stride, own.dtype),
                                  {r: shard.to("meta") for r, shard in t.shards.items()}))
        else:
            moved.append(t.to("meta"))
    args, kwargs = call.arguments_with(moved)
    return run(call.func, *args, **kwargs)


def _allocate(call: Call, run: Run) -> Any:
    """Memory on devices of another type, as `module.to_empty(device=...)` asks for it of tensors on the meta device: on
    the same ranks, in the same layout, with nothing pending, each rank its own part."""
    own = call.tensors[0].spec
    where = own.placement.of_type(torch.device(call["device"]).type)
    dtype = call["dtype"] or own.dtype
    shards = {r: torch.empty(own.local_shape(r), dtype=dtype, device=world().device(where.type, r))
              for r in local_ranks_of(where)}
    dst = layout(where, own.layout.without_partials.sbp)
    return run.wrap(spec(dst, own.shape, None, dtype), shards)


def _like_elsewhere(call: Call, run: Run) -> Any:
    """torch.zeros_like(x, device="cpu"), x.new_zeros(size, device="cpu"): on the same ranks' devices of that type."""
    args, kwargs = call.arguments_with([_allocate(call, run)])
    return run(call.func, *args, **{name: value for name, value in kwargs.items() if name != "device"})


def _moved_to_devices(call: Call, run: Run) -> Any:
    """x.cpu(), x.to("cuda"): the same ranks' devices of that type, laid out as it was, and nothing pending. A scalar is
    whole on all of them: so torch brings the norms of gradients together, where some parameters are on the host."""
    own = call.tensors[0].spec
    where = own.placement.of_type(torch.device(call["device"]).type)
    dst = layout(where, own.layout.without_partials.sbp) if own.ndim else replicated(where)
    moved, = run.redistribute(call.tensors, [dst], str(call.func))
    rest = {name: call[name] for name in ("dtype", "memory_format") if call[name] is not None}
    return run(call.func, moved, **rest) if rest else moved


def check_device(call: Call, where: placement) -> None:
    """`x.to("cuda")` and similar calls: a global tensor is where its placement says."""
    device = call.get("device")
    if device is not None and torch.device(device).type != where.type:
        raise PlacementError(f"{call.func} to device {device} of a tensor on {where}",
                             "the placement of a global tensor says on which devices it is",
                             f'x.to_global(gt.placement("{torch.device(device).type}", {list(where.flat)}))')
