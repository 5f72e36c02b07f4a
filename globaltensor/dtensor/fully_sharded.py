"""torch's `fully_shard`: parameters split along a mesh, gathered a layer at a time, in gt.zero's way of stage 3.

    for block in model.blocks: fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())

As in torch, each rank runs the model on its own batch, in plain torch, as if it were alone: what goes in and what comes
out is the rank's own, whatever it is made of, and so is a loss inside. The gradient of a parameter is the mean over the
ranks. Buffers stay each rank's own. A process that drives several ranks runs one program: there weights are global, and
a plain tensor that is given to the outermost module is the whole batch, and split along the mesh.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from globaltensor.dtensor.api import distribute_tensor, on_mesh
from globaltensor.dtensor.device_mesh import DeviceMesh, init_device_mesh
from globaltensor.dtensor.fsdp_module import Sharding, become_fsdp, shardings
from globaltensor.dtensor.mixed_precision import precision_of, set_precision
from globaltensor.dtensor.own_weights import OwnLayer, OwnLayers
from globaltensor.errors import ArgumentError, GlobalTensorError, expect
from globaltensor.parallel.zero3 import ShardedLayer, ShardedLayers, unshard
from globaltensor.runtime.torch_internals import tree_leaves
from globaltensor.runtime.world import world, world_size
from globaltensor.tensors.convert import from_full
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.parameter_swap import convert, weights_made_again
from globaltensor.tracebacks import api_boundary

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

_running: list[nn.Module] = []                       # the outermost module that is at work, if one is
_inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()          # those sharded that were run inside of another


@api_boundary
def fully_shard(module: Any, *, mesh: DeviceMesh | None = None, reshard_after_forward: bool | int | None = None,
                shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None, mp_policy: Any = None,
                offload_policy: Any = None, ignored_params: set[nn.Parameter] | None = None,
                dp_mesh_dims: Any = None) -> Any:
    """Split the parameters of a module, or of each of a list, along a mesh; of two dims along the second (torch's
    hybrid sharding).

    mesh                    default: all ranks, on CPUs
    shard_placement_fn      which dim of a parameter to split; default: the first that nothing else splits
    reshard_after_forward   torch's choice of memory or time; here a layer is always freed, and gathered again
    mp_policy               torch's MixedPrecisionPolicy (mixed_precision.py)
    offload_policy          torch's CPUOffloadPolicy on CPUs, where it asks for nothing; refused on other devices
    dp_mesh_dims            refused: mesh["dp"]
    Call it before the optimizer is made. Returns the module, which is an `FSDPModule` from now on, or the list. Raises
    ArgumentError for parameters that are global already, and for no modules.
    """
    modules = module if isinstance(module, (list, tuple)) and module else [module]
    for one in modules:
        expect(one, nn.Module, "fully_shard of no module", "fully_shard(model, mesh=mesh)")
    if dp_mesh_dims is not None:
        raise ArgumentError(f"fully_shard(dp_mesh_dims={dp_mesh_dims})", "it is not taken here", 'mesh=mesh["dp"]')
    precision = precision_of(mp_policy)
    mesh = mesh or init_device_mesh("cpu", (world_size(),))
    asks_for_nothing = ["NoneType", "OffloadPolicy", *(["CPUOffloadPolicy"] if mesh.type == "cpu" else [])]
    if type(offload_policy).__name__ not in asks_for_nothing:
        raise ArgumentError(f"fully_shard(offload_policy={offload_policy})", f"it is not taken here, on {mesh.type}",
                            'no offload_policy; or gt.zero(optimizer, "dp", 3, model, offload="cpu") in its place')
    for one in modules:
        _shard(one, mesh, shard_placement_fn, ignored_params or set(), precision)
    return module


def _shard(module: nn.Module, mesh: DeviceMesh, choose: Callable[[nn.Parameter], Shard | None] | None,
           ignored: set[nn.Parameter], precision: MixedPrecisionPolicy | None) -> None:
    one_program = len(world().local_ranks) > 1
    with weights_made_again(module):
        own = _shard_parameters(module, mesh, choose, ignored, one_program)
    for owner in module.modules():
        for key, b in owner._buffers.items():
            if b is not None and not on_mesh(b):
                owner._buffers[key] = distribute_tensor(b, mesh, src_data_rank=None) if one_program else (
                    b if b.is_meta else b.to(world().device(mesh.type, world().rank)))
    shardings[module] = Sharding(mesh, None if precision is None else precision.param_dtype)
    (_DoorOfAll if one_program else _Door)(module, mesh)
    if precision is not None:
        set_precision(module, precision, own)
    become_fsdp(module)


def _shard_parameters(module: nn.Module, mesh: DeviceMesh, choose: Callable[[nn.Parameter], Shard | None] | None,
                      ignored: set[nn.Parameter], one_program: bool) -> list[GlobalTensor]:
    """Those that were not split before."""
    done: dict[int, Any] = {}
    others = {part for m in module.modules() if m in shardings for part in m.modules()} if not one_program else set()
    for owner in module.modules():
        for key, p in owner._parameters.items():
            if p is None or p in ignored or on_mesh(p) and (
                    owner in others or p.placement.of_type(mesh.type) == mesh):
                continue
            if isinstance(p, GlobalTensor):
                raise ArgumentError(f"fully_shard of a parameter on {p.spec.placement}", "it is split already",
                                    "gt.parallelize(model, placement, gt.Plan.of_styles(model, styles)), whose other "
                                    'axis is "dp", and gt.zero(optimizer, "dp", stage=3, model=model)')
            if id(p) not in done:
                chosen = choose(p) if choose is not None else None
                done[id(p)] = convert(p, partial(_sharded, mesh=mesh, chosen=chosen))
            owner._parameters[key] = done[id(p)]     # a Parameter still
    return [*done.values()]


def _sharded(t: torch.Tensor, mesh: DeviceMesh, chosen: Shard | None) -> GlobalTensor:
    """A plain tensor, taken to be the same on all ranks, split along the mesh; of two dims along the second."""
    along: list[Placement] = [Replicate()] * mesh.ndim
    if t.dim():
        along[-1] = chosen or Shard(0)
    return distribute_tensor(t, mesh, along, src_data_rank=None)


class _Door:
    """The way into a module and out of it, where each rank runs it by itself."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.module, self.mesh = module, mesh
        self.layers: OwnLayers | None = None
        self.depth = 0                               # of its calls, which may be of itself
        module.register_forward_pre_hook(api_boundary(self._enter), prepend=True, with_kwargs=True)
        module.register_forward_hook(api_boundary(self._leave), always_call=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if module is not self.module:
            raise GlobalTensorError(f"a copy of a {type(module).__name__} that fully_shard was called for",
                                    "the original's parameters would be gathered for it",
                                    "fully_shard(copy.deepcopy(model)), of the model from before; and load_state_dict")
        if module in _inside:                        # those around it, or it was in one before, have it as a layer
            return
        if any(isinstance(t, GlobalTensor) for t in tree_leaves((args, named))):
            raise ArgumentError("a global tensor, given to a model under fully_shard",
                                "each rank runs the model on its own batch, which is plain", "model(x.to_local())")
        if world().rank not in self.mesh.coords:
            raise ArgumentError(f"a model under fully_shard, run on rank {world().rank}", f"{self.mesh} leaves it out",
                                "if mesh.get_coordinate() is not None: model(x)")
        if self.layers is None:
            self.layers = self._layers()
        if not self.depth:
            self.layers.enter()
        self.depth += 1

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.layers is None or not self.depth:
            return
        self.depth -= 1
        if not self.depth:
            self.layers.leave(out)

    def _layers(self) -> OwnLayers:
        """Each module with the parameters of modules that are in none inside of it."""
        modules = [m for m in self.module.modules() if m in shardings]
        _inside.update(modules[1:])
        layers = []
        for module in modules:
            inner = {m for one in modules if one is not module and one in {*module.modules()} for m in one.modules()}
            layers.append(OwnLayer(module, shardings[module], [m for m in module.modules() if m not in inner]))
        return OwnLayers(layers[1:], layers[0])


class _DoorOfAll:
    """The way into a module and out of it in a process that drives several ranks.

    Inside, weights are whole, so that ops are done where rows lie.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.module, self.mesh = module, mesh
        self.layers: ShardedLayers | None = None
        self.others: ShardedLayer                    # the parameters that are in no layer: they stay gathered
        module.register_forward_pre_hook(api_boundary(self._enter), prepend=True, with_kwargs=True)
        module.register_forward_hook(api_boundary(self._leave), always_call=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        recomputed = module in _inside and any(map(on_mesh, (*args, *named.values())))       # in backward
        if _running or recomputed:
            return args, named
        if self.layers is None:
            axis, inner = self.mesh.names[-1], [m for m in module.modules() if m in shardings and m is not module]
            _inside.update(inner)
            self.layers = ShardedLayers.of(module, axis, inner)
            self.others = ShardedLayer(module, axis, {id(p) for one in self.layers.layers for p, _ in one.parameters})
            for layer in (*self.layers.layers, self.others):
                layer.dtype = shardings.get(layer.module, shardings[module]).dtype
        unshard(self.others)
        self.others.swap_in_unsharded(0, partial(unshard, self.others))
        _running.append(module)
        return tuple(self._split(x) for x in args), {key: self._split(x) for key, x in named.items()}

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if not _running or _running[0] is not module:
            return
        _running.clear()
        self.others.swap_out_unsharded()
        self.others.unsharded = None                 # freed with what autograd has saved of it

    def _split(self, x: Any) -> Any:
        """A batch, split along the mesh."""
        if not isinstance(x, torch.Tensor) or isinstance(x, GlobalTensor) or not x.dim():
            return x
        return from_full(x, self.mesh, [Shard(0)] * self.mesh.ndim)
