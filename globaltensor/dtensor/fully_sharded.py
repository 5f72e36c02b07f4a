"""torch's `fully_shard`: parameters split along a mesh, gathered a layer at a time, in gt.zero's way of stage 3.

    for block in model.blocks: fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())

Every rank gives the outermost module its own rows, plain, and takes its own, plain; inside they are the parts of one
global batch, split along the mesh. As in torch, what rows give is averaged: the gradient of a parameter is the mean
over the ranks of the gradients of what they compute of their rows. What is already one for all ranks, such as the mean
over the whole batch that a model itself returns, is taken as it is.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from globaltensor.dtensor.api import distribute_tensor, on_mesh
from globaltensor.dtensor.device_mesh import DeviceMesh, init_device_mesh
from globaltensor.dtensor.rows import batch_of, rows_of
from globaltensor.errors import ArgumentError, expect
from globaltensor.parallel.zero3 import ShardedLayer, ShardedLayers, unshard
from globaltensor.runtime.world import world_size
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.parameter_swap import convert
from globaltensor.tracebacks import api_boundary

_running: list[nn.Module] = []                       # the outermost module that is at work, if one is
_doors: weakref.WeakSet[nn.Module] = weakref.WeakSet()           # the modules that were sharded
_inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()          # those of them that were run inside of another


@api_boundary
def fully_shard(module: nn.Module, *, mesh: DeviceMesh | None = None, reshard_after_forward: bool | int | None = None,
                shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None, mp_policy: Any = None,
                offload_policy: Any = None, ignored_params: set[nn.Parameter] | None = None,
                dp_mesh_dims: Any = None) -> nn.Module:
    """Split a module's parameters along a mesh; of two dims along the second (torch's hybrid sharding).

    mesh                    default: all ranks, on CPUs
    shard_placement_fn      which dim of a parameter to split; default: the first that nothing else splits
    reshard_after_forward   torch's choice of memory or time; here a layer is always freed, and gathered again
    mp_policy, offload_policy, dp_mesh_dims   refused with ArgumentError, but for policies that ask for nothing, as
                            torch's defaults; torch.autocast is for the one, and mesh["dp"] for the last
    Call it before the optimizer is made. Returns the module. Raises ArgumentError for parameters that are global
    already.
    """
    expect(module, nn.Module, "fully_shard of no module", "fully_shard(model, mesh=mesh)")
    for name, policy, instead in (("mp_policy", mp_policy, "torch.autocast(..., torch.bfloat16) around the forward"),
                                  ("offload_policy", offload_policy, "no offload_policy"),
                                  ("dp_mesh_dims", dp_mesh_dims, 'mesh=mesh["dp"]')):
        if policy is not None and not (name != "dp_mesh_dims" and policy == _default_policy(policy)):
            raise ArgumentError(f"fully_shard({name}={policy})", "it is not taken here", instead)
    mesh = mesh or init_device_mesh("cpu", (world_size(),))
    done: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        for key, p in owner._parameters.items():
            if p is None or ignored_params and p in ignored_params or on_mesh(p) and p.placement == mesh:
                continue
            if isinstance(p, GlobalTensor):
                raise ArgumentError(f"fully_shard of a parameter on {p.spec.placement}", "it is split already",
                                    "gt.parallelize(model, placement, gt.Plan.of_styles(model, styles)), whose other "
                                    'axis is "dp", and gt.zero(optimizer, "dp", stage=3, model=model)')
            if id(p) not in done:
                chosen = shard_placement_fn(p) if shard_placement_fn is not None else None
                done[id(p)] = convert(p, partial(_sharded, mesh=mesh, chosen=chosen))
            owner._parameters[key] = done[id(p)]     # type: ignore[assignment]  # a Parameter still
        for key, b in owner._buffers.items():
            if b is not None and not on_mesh(b):
                owner._buffers[key] = distribute_tensor(b, mesh, src_data_rank=None)
    _Door(module, mesh)
    return module


def _default_policy(policy: Any) -> Any:
    """torch's default of `mp_policy` and `offload_policy`; None of anything else."""
    return type(policy)() if type(policy).__name__ in ("MixedPrecisionPolicy", "OffloadPolicy") else None


def _sharded(t: torch.Tensor, mesh: DeviceMesh, chosen: Shard | None) -> GlobalTensor:
    """A plain tensor, taken to be the same on all ranks, split along the mesh; of two dims along the second."""
    along: list[Placement] = [Replicate()] * mesh.ndim
    if t.dim():
        along[-1] = chosen or Shard(0)
    return distribute_tensor(t, mesh, along, src_data_rank=None)


class _Door:
    """What goes into the outermost module, and what comes out.

    Inside, weights are whole, so that ops are done where rows lie, and what comes out are each rank's own rows.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.module, self.mesh = module, mesh
        self.layers: ShardedLayers | None = None
        self.others: ShardedLayer                    # the parameters that are in no layer: they stay gathered
        _doors.add(module)
        module.register_forward_pre_hook(api_boundary(self._enter), prepend=True, with_kwargs=True)
        module.register_forward_hook(api_boundary(self._leave), always_call=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        recomputed = module in _inside and any(map(on_mesh, (*args, *named.values())))       # in backward
        if _running or recomputed:
            return args, named
        if self.layers is None:
            axis, inner = self.mesh.names[-1], [m for m in module.modules() if m in _doors and m is not module]
            _inside.update(inner)
            self.layers = ShardedLayers(module, axis, inner)
            self.others = ShardedLayer(module, axis, {id(p) for one in self.layers.layers for p, _ in one.parameters})
        unshard(self.others)
        self.others.swap_in_unsharded(0, partial(unshard, self.others))
        _running.append(module)
        return tuple(self._whole(x) for x in args), {key: self._whole(x) for key, x in named.items()}

    def _leave(self, module: nn.Module, args: Any, out: Any) -> Any:
        if not _running or _running[0] is not module:
            return out
        _running.clear()
        self.others.swap_out_unsharded()
        self.others.unsharded = None                 # freed with what autograd has saved of it
        if isinstance(out, (tuple, list)):
            return type(out)(rows_of(x) for x in out)
        if isinstance(out, dict):
            for key, x in out.items():
                out[key] = rows_of(x)
            return out
        return rows_of(out)

    def _whole(self, x: Any) -> Any:
        """A rank's own rows as a part of the batch."""
        if not isinstance(x, torch.Tensor) or isinstance(x, GlobalTensor) or not x.dim():
            return x
        return batch_of(x, self.mesh)
