"""`DTensor`, `distribute_tensor`, `distribute_module`, `local_map` and `loss_parallel`, as torch has them.

Three things differ from the functions of `gt`: a tensor is scattered from one rank (`distribute_tensor`), parts are
taken as they are, without a word to others where torch cuts as this library does (`DTensor.from_local`), and the
gradient of a part belongs to that rank alone, so that what is broadcast has the same gradient on every rank, which is
not summed (`to_local`).
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import Placement

from globaltensor.boxings.redistribute import Move, move_shards
from globaltensor.dtensor.conversion import part_by_torch, placements_of, torch_cut, wrap_part
from globaltensor.dtensor.device_mesh import DeviceMesh, mesh_or_current
from globaltensor.errors import ArgumentError, ShapeError, counted, expect, warn
from globaltensor.layouts.layout import Layout, Shape, layout, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.rank_regions import rank_regions
from globaltensor.layouts.sbp import broadcast, split
from globaltensor.runtime import lineage
from globaltensor.runtime.torch_internals import is_of_a_trace
from globaltensor.runtime.world import local_ranks_of, world
from globaltensor.tensors import convert
from globaltensor.tensors.factories import empty
from globaltensor.tensors.flatten import called_in_graphs
from globaltensor.tensors.full_value import FromFull, no_gradient_placements, plain_gradient
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.linear_maps import row_by_row
from globaltensor.tensors.redistribution import resolve_layout, to_layout, to_local
from globaltensor.tracebacks import api_boundary

Placements = Sequence[Placement]


def on_mesh(x: object) -> TypeGuard[GlobalTensor]:
    """Is this a global tensor on a `DeviceMesh`?"""
    return isinstance(x, GlobalTensor) and isinstance(x.placement, DeviceMesh)


class _OnAMesh(type):
    def __instancecheck__(cls, x: object) -> bool:
        return on_mesh(x)


class DTensor(metaclass=_OnAMesh):
    """A global tensor on a `DeviceMesh`. Made by `distribute_tensor` and `DTensor.from_local`."""

    @staticmethod
    @called_in_graphs
    def from_local(local_tensor: torch.Tensor, device_mesh: DeviceMesh | None = None,
                   placements: Placements | None = None, *, run_check: bool = False, shape: Shape | None = None,
                   stride: Any = None, grad_placements: Placements | None = None) -> GlobalTensor:
        """This rank's own part of a tensor, in its memory; differentiable.

        shape             of the whole (default: as many times the part's as the mesh has ranks along what is split)
        run_check         compare the parts of all ranks of the world, and take the first rank's where they are to be
                          copies; in a process that drives several ranks it always does
        grad_placements   how the gradient lies whose part is the gradient of the part (default: as the tensor)
        Raises ShapeError for parts that are cut neither all as this library cuts `shape` nor all as torch does, and
        without `shape` outside of the mesh for what `to_local` gives there, from which no shape follows.
        """
        expect(local_tensor, torch.Tensor, "from_local of no tensor", "DTensor.from_local(t, mesh, [Shard(0)])")
        device_mesh = mesh_or_current(device_mesh, "DTensor.from_local")
        if shape is None and local_tensor.shape == (0,) and not local_ranks_of(device_mesh):
            raise ShapeError(f"DTensor.from_local on rank {world().rank} of a part without elements",
                             f"{device_mesh} leaves this rank out, so it cannot know how large the whole is",
                             "DTensor.from_local(..., shape=x.shape), or local_map")
        dst = _layout_on_mesh(device_mesh, placements, local_tensor.dim())
        whole = tuple(shape) if shape is not None else tuple(
            n * dst.num_parts(d) for d, n in enumerate(local_tensor.shape))
        if local_tensor.is_meta:
            return _memoryless(dst, whole, local_tensor.dtype)
        if run_check or len(world().local_ranks) > 1:
            if grad_placements is not None:
                raise ArgumentError("DTensor.from_local(grad_placements=...) of parts that are compared",
                                    "all ranks' parts make one tensor, whose gradient each gets a part of",
                                    "run_check=False, in a process for each rank; or no grad_placements")
            return convert.from_local(local_tensor, device_mesh, dst.sbp)
        back = None if grad_placements is None else _layout_on_mesh(device_mesh, grad_placements, local_tensor.dim())
        by_torch = _is_cut_by_torch(local_tensor, dst, whole)
        return lineage.begin_lineage(OwnPart.apply(local_tensor, dst, whole, back, by_torch))


@called_in_graphs
def distribute_tensor(tensor: torch.Tensor, device_mesh: DeviceMesh | None = None,
                      placements: Placements | None = None, *, src_data_rank: int | None = 0) -> GlobalTensor:
    """A tensor of which every rank has one of that shape becomes one on the mesh. A leaf.

    src_data_rank   the rank of the mesh (0: its first) whose values count, which it sends to the others; None: each
                    rank cuts its part from its own, and nothing moves
    Raises SbpError for placements that do not fit, ArgumentError for a rank that the mesh lacks.
    """
    expect(tensor, torch.Tensor, "distribute_tensor of no tensor", "distribute_tensor(t, mesh, [Shard(0)])")
    device_mesh = mesh_or_current(device_mesh, "distribute_tensor")
    dst = _layout_on_mesh(device_mesh, placements, tensor.dim())
    if isinstance(tensor, GlobalTensor):
        return tensor.to_global(device_mesh, dst.sbp)
    with torch.no_grad():
        if tensor.is_meta:
            x = _memoryless(dst, tuple(tensor.shape), tensor.dtype)
        elif src_data_rank is None:
            x = lineage.begin_lineage(FromFull.of(tensor.detach().contiguous(), dst))    # others' may lie otherwise
        else:
            x = _from_rank(tensor.detach(), dst, src_data_rank)
    return x.requires_grad_(tensor.requires_grad)


def _memoryless(dst: Layout, shape: Shape, dtype: torch.dtype) -> GlobalTensor:
    """On the meta device of the ranks of a mesh: `torch.empty_like(x, device=...)` gives it memory there."""
    return empty(shape, placement=dst.placement.of_type("meta"), sbp=dst.sbp, dtype=dtype)


def _from_rank(t: torch.Tensor, dst: Layout, index: int) -> GlobalTensor:
    """The tensor of one rank of the mesh, in a layout there."""
    mesh = dst.placement
    if not 0 <= index < len(mesh.flat):
        raise ArgumentError(f"src_data_rank={index} of a mesh of {len(mesh.flat)} ranks", "it is a rank of the mesh",
                            "src_data_rank=0")
    source = mesh.flat[index]
    if is_of_a_trace(t):
        return _from_rank_in_graph(t, dst, source)
    src = layout(placement(mesh.type, [source]), (broadcast,))
    shards = {r: t.to(world().device(mesh.type, r)).contiguous() for r in local_ranks_of(src.placement)}
    return to_layout(lineage.begin_lineage(GlobalTensor.wrap(spec(src, tuple(t.shape), None, t.dtype), shards)), dst)


def _from_rank_in_graph(t: torch.Tensor, dst: Layout, source: int) -> GlobalTensor:
    """The same in a graph, where every process needs a part of what is moved: but the one rank's, parts are empty."""
    if not t.dim():
        return _from_rank_in_graph(t.reshape(1), dst, source).reshape(())
    mesh, shape = dst.placement, tuple(t.shape)
    held = {r: tuple((0, n if r == source else 0) for n in shape) for r in mesh.flat}
    none = t[(slice(0),) * t.dim()]
    shards = {r: (t if r == source else none).to(world().device(mesh.type, r)).contiguous()
              for r in local_ranks_of(mesh)}
    own = spec(rank_regions(mesh, held), shape, None, t.dtype)
    moved, = move_shards([Move(own, shards, dst)], "distribute_tensor")
    return lineage.begin_lineage(GlobalTensor.wrap(own.moved(dst), moved))


@api_boundary
def distribute_module(module: nn.Module, device_mesh: DeviceMesh | None = None,
                      partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
                      input_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
                      output_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None) -> nn.Module:
    """Let `partition_fn` distribute the parameters of every submodule; those that are plain still are broadcast.

    input_fn, output_fn   what to do with a module's positional arguments, and with what it gives; those that do not
                          take the module, as in torch 2.1, warn
    Raises ArgumentError for functions of other numbers of arguments.
    """
    expect(module, nn.Module, "distribute_module of no module", "distribute_module(model, mesh)")
    device_mesh = mesh_or_current(device_mesh, "distribute_module")
    for name, owner in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, owner, device_mesh)
        for key, p in owner._parameters.items():
            if p is not None and not isinstance(p, GlobalTensor):
                set_parameter(owner, key, distribute_tensor(p, device_mesh))
        for key, b in owner._buffers.items():
            if b is not None and not isinstance(b, GlobalTensor):
                owner._buffers[key] = distribute_tensor(b, device_mesh)
    if input_fn is not None:
        to_inputs = _with_module(input_fn, "input_fn", "inputs")
        module.register_forward_pre_hook(api_boundary(lambda own, args: to_inputs(own, args, device_mesh)))
    if output_fn is not None:
        to_outputs = _with_module(output_fn, "output_fn", "outputs")
        module.register_forward_hook(api_boundary(lambda own, args, out: to_outputs(own, out, device_mesh)))
    return module


def _with_module(function: Callable[..., Any], name: str, values: str) -> Callable[[nn.Module, Any, DeviceMesh], Any]:
    """A function of a module, values and a mesh, of one that may not take the module."""
    taken = len(inspect.signature(function).parameters)
    if taken == 3:
        return function
    wanted = f"def {name}(module, {values}, device_mesh): ..."
    if taken != 2:
        raise ArgumentError(f"{name} of {counted(taken, 'argument')}",
                            f"it is called with a module, its {values} and the mesh", wanted)
    warn(f"{name} without the module is deprecated: {wanted}", FutureWarning)
    return lambda _, values, mesh: function(values, mesh)


def set_parameter(owner: nn.Module, key: str, value: torch.Tensor) -> None:
    """A new parameter of this value in the place of the old one."""
    old = owner._parameters[key]
    owner.register_parameter(key, nn.Parameter(value.detach(), requires_grad=old is None or old.requires_grad))


@contextmanager
def loss_parallel() -> Iterator[None]:
    """torch's block in which cross entropy takes logits that are split along the classes. Here it always does, so the
    block changes nothing: only maxima, sums and the targets' logits move."""
    yield


@api_boundary
def local_map(func: Callable[..., Any] | None = None, out_placements: Any = None, in_placements: Any = None,
              in_grad_placements: Any = None, device_mesh: DeviceMesh | None = None, *,
              redistribute_inputs: bool = False) -> Callable[..., Any]:
    """A function of parts made one of whole tensors: it is called with each rank's own, and gives its own; outside of
    the mesh with zeros like the first rank's, as shapes follow from what it gives. Without `func`, a decorator.

    out_placements, in_placements, in_grad_placements   for each result, argument, or gradient of one, its placements,
                                                        None where it is not a tensor; one for a function of one result
    redistribute_inputs   bring arguments that lie otherwise to lie so, where else they are refused with ArgumentError
    """

    if func is None:
        return partial(local_map, out_placements=out_placements, in_placements=in_placements,
                       in_grad_placements=in_grad_placements, device_mesh=device_mesh,
                       redistribute_inputs=redistribute_inputs)

    @api_boundary
    def mapped(*args: Any, **kwargs: Any) -> Any:
        mesh, parts = device_mesh, []
        for i, x in enumerate(args):
            if on_mesh(x):
                mesh = mesh or x.spec.placement  # type: ignore[assignment]  # it is a mesh
                want = in_placements[i] if in_placements is not None else None
                if want is not None and (dst := _layout_on_mesh(mesh, want, x.dim())) is not x.spec.layout:
                    if not redistribute_inputs:
                        raise ArgumentError(f"local_map: argument {i} lies {x.sbp}", f"in_placements say {dst.sbp}",
                                            "redistribute_inputs=True, or x.redistribute(placements=...)")
                    x = to_layout(x, dst)
                back = in_grad_placements[i] if in_grad_placements is not None else None
                x = local_part(x, back, zeros=True)
            parts.append(x)
        out = func(*parts, **kwargs)
        several = isinstance(out, tuple)
        how = out_placements if several else [out_placements]
        if mesh is None:
            raise ArgumentError("local_map without a mesh", "no argument is on one", "device_mesh=mesh")
        whole = [t if p is None else DTensor.from_local(t, mesh, p) for t, p in zip(out if several else [out], how)]
        return tuple(whole) if several else whole[0]

    return mapped


# ------------------------------------------------------------------------------------------- what a tensor is asked


@api_boundary
def local_part(x: GlobalTensor, grad_placements: Placements | None = None, zeros: bool = False) -> torch.Tensor:
    """This rank's part, in its memory; without elements in a process outside the mesh, or `zeros` like the first. Its
    gradient lies as the part does, unless `grad_placements` say otherwise; a pending sum's is whole on every rank."""
    own = x.spec.layout
    if len(world().local_ranks) > 1:
        return to_local(x)                           # which refuses
    back = own.without_partials if grad_placements is None else _layout_on_mesh(own.placement, grad_placements, x.dim())
    return PartOnMesh.apply(x, back, zeros)


class PartOnMesh(torch.autograd.Function):
    """The part of a tensor on a mesh, cut as here or `by_torch`. Its gradient is the part of the tensor's, in the
    layout `back`."""

    @staticmethod
    def forward(ctx: Any, x: GlobalTensor, back: Layout, zeros: bool, by_torch: bool = False) -> torch.Tensor:
        ctx.back, ctx.of = back, x.spec.layout
        ctx.shape, ctx.by_torch = tuple(x.shape), by_torch
        if (part := part_by_torch(x) if by_torch else x.shards.get(world().rank)) is not None:
            return part.view_as(part)
        shape = ctx.of.local_shape(ctx.shape, ctx.of.placement.flat[0]) if zeros else (0,)
        return torch.zeros(shape, dtype=x.dtype, device=x.device)

    @staticmethod
    @api_boundary
    @row_by_row
    def backward(ctx: Any, grad: Any) -> tuple[GlobalTensor, None, None, None]:
        grad = plain_gradient(grad)
        if torch.is_grad_enabled() and grad.requires_grad:           # it is differentiated itself
            x = OwnPart.apply(grad, ctx.back, ctx.shape, None, ctx.by_torch)
        else:
            x = wrap_part(grad, ctx.back, ctx.shape, ctx.by_torch)
        return lineage.begin_lineage(x), None, None, None


class OwnPart(torch.autograd.Function):
    """A tensor on a mesh of this rank's part, cut as here or `by_torch`. The part's gradient is the part of the
    tensor's."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, dst: Layout, shape: Shape, back: Layout | None = None,
                by_torch: bool = False) -> GlobalTensor:
        ctx.back, ctx.by_torch = back or dst.without_partials, by_torch
        ctx.outside = None if world().rank in dst.placement.coords else t.shape
        return wrap_part(t.detach(), dst, shape, by_torch)

    @staticmethod
    @api_boundary
    @row_by_row
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor, None, None, None, None]:
        x = to_layout(grad, ctx.back)
        part = PartOnMesh.apply(x, x.spec.layout.without_partials, False, ctx.by_torch)
        return part if ctx.outside is None else part.new_zeros(ctx.outside), None, None, None, None


def _is_cut_by_torch(t: torch.Tensor, dst: Layout, shape: Shape) -> bool:
    """Are the parts of the ranks, of which this one has `t`, cut as torch cuts, and not as here? A part may fit both,
    at other rows, so where these differ the ranks tell each other how theirs fit, and decide alike.

    Raises ShapeError where they are cut neither way."""
    mesh, rank, cut = dst.placement, world().rank, torch_cut(dst, shape)
    if rank not in mesh.coords:
        return False
    own, torchs = dst.local_shape(shape, rank), (cut or dst).local_shape(shape, rank)
    fit = fits = (own == t.shape) + 2 * (torchs == t.shape)
    if cut is not None and not is_of_a_trace(t):     # a graph has no values to decide by
        each = spec(dst.with_sbp((split(0),) * len(dst.sbp)), (len(mesh.flat),), None, torch.uint8)
        mine = {rank: torch.tensor([fit], dtype=torch.uint8, device=t.device)}
        seen, = move_shards([Move(each, mine, dst.replicated)], "DTensor.from_local")
        for fit in seen[rank].tolist():
            fits &= fit
    if not fits:
        raise ShapeError(f"a part of {list(t.shape)} on rank {rank}, of {list(shape)} in all, {dst.sbp}",
                         f"its part would be {list(own)}" + (f", or {list(torchs)}, as torch cuts, on all ranks alike"
                                                             if cut is not None else ""), "shape=... of the whole")
    return not fits & 1


def _layout_on_mesh(mesh: Any, placements: Placements | None, ndim: int) -> Layout:
    """The layout that a mesh and torch's placements mean; without placements, broadcast."""
    expect(mesh, DeviceMesh, "no DeviceMesh of gt.dtensor", 'init_device_mesh("cpu", (2,)), of globaltensor.dtensor')
    return resolve_layout(mesh, tuple(placements) if placements is not None else broadcast, ndim)


@api_boundary
def _to_local(x: GlobalTensor, *, grad_placements: Placements | None = None) -> torch.Tensor:
    """This rank's part, sharing its memory; differentiable. On a `DeviceMesh` of gt.dtensor as torch has it: the
    gradient is that of the part alone, in `grad_placements`, and outside of the mesh the part has no elements. On a
    placement the gradients of the parts lie dual to x. Raises GlobalTensorError in a process that drives several ranks,
    or, on a placement, none of x's.
    """
    if isinstance(x.spec.placement, DeviceMesh):
        return local_part(x, grad_placements)
    if grad_placements is not None:
        raise ArgumentError("to_local(grad_placements=...) of a tensor on a placement",
                            "it is for tensors on a mesh of gt.dtensor", "x.to_global(grad_sbp=...).to_local()")
    return to_local(x)


@api_boundary
def _redistribute(x: GlobalTensor, device_mesh: DeviceMesh | None = None, placements: Placements | None = None, *,
                  async_op: bool = False, forward_dtype: torch.dtype | None = None,
                  backward_dtype: torch.dtype | None = None) -> GlobalTensor:
    """A boxing to a mesh, or to other placements on its own (default: all broadcast).

    async_op         return while it moves between processes; the first use of a value waits for it
    forward_dtype    in which it moves, and what comes out is; so does its gradient
    backward_dtype   refused with ArgumentError where it is another one
    """
    moved = forward_dtype or x.dtype
    if backward_dtype not in (None, moved):
        raise ArgumentError(f"redistribute(backward_dtype={backward_dtype}) of what moves as {moved}",
                            "a gradient moves in the dtype of its tensor", f"forward_dtype={backward_dtype}")
    return x.to(moved).to_global(device_mesh or x.placement, tuple(placements) if placements is not None else broadcast,
                                 wait=not async_op)


def _full_with_gradient(x: GlobalTensor, grad_placements: Placements) -> torch.Tensor:
    return local_part(_redistribute(x), grad_placements) if on_mesh(x) else no_gradient_placements(x, grad_placements)


def _teach_global_tensors() -> None:
    """What torch's programs ask a DTensor."""
    learner: Any = GlobalTensor                      # a class learns attributes, which its stubs cannot know
    learner.to_local, learner.redistribute = _to_local, _redistribute
    learner._full_with_gradient = _full_with_gradient
    learner.device_mesh = property(lambda x: x.placement)
    learner.placements = property(lambda x: tuple(placements_of(x.sbp)))


_teach_global_tensors()
