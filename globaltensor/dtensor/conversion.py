"""torch's DTensor and DeviceMesh, and back: `gt.from_dtensor(d)`, `x.to_dtensor()`, `gt.from_mesh`, `gt.to_mesh`.

    DTensor                 here
    mesh, a sub-mesh too    placement, the same ranks in the same order, dims' names as axes' names
    Shard(d)                S(d)
    Replicate()             B
    Partial("sum")          P; "max" and "min" likewise; "avg" is the sum of what ranks hold, divided by their number

The part of a rank stays where it is, in its memory. Only where a dim does not divide evenly the two may cut differently
(4 rows over 3 ranks are 2, 1 and 1 here, and 2, 2 and 0 there): then rows move.
"""
from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard

from globaltensor.boxings.redistribute import Move, move_shards
from globaltensor.errors import GlobalTensorError, PlacementError, SbpError, expect
from globaltensor.layouts.layout import Layout, Shape, Shards, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.rank_regions import rank_regions
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.regions import Region
from globaltensor.layouts.sbp import NdSbp, Sbp, broadcast, partial_sum, read_sbp
from globaltensor.runtime import lineage
from globaltensor.runtime.agreement import gather_objects
from globaltensor.runtime.world import world
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.linear_maps import layout_of, row_by_row
from globaltensor.tensors.redistribution import box_gradient, resolve_layout, to_layout
from globaltensor.tracebacks import api_boundary

_meshes: dict[placement, DeviceMesh] = {}            # a mesh has process groups, which all ranks make once, together


@api_boundary
def from_mesh(mesh: DeviceMesh) -> placement:
    """The placement of torch's device mesh: its ranks, and its dims' names as names of the axes.

    A sub-mesh, `mesh["tp"]`, is the placement of the ranks that it has in this process, and others in others'. Not
    collective.
    """
    expect(mesh, DeviceMesh, "from_mesh of no DeviceMesh", 'gt.from_mesh(init_device_mesh("cpu", (2, 2)))')
    where = placement(mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names)
    if _meshes.get(where) is None:
        _meshes[where] = mesh
    return where


@api_boundary
def to_mesh(placement: placement) -> DeviceMesh:
    """torch's device mesh of a placement. The first of a placement makes its process groups, for which all processes
    of the world call it; the mesh that `from_mesh` was given is given back.

    Collective, for the first of a placement. Raises GlobalTensorError in a process that drives several ranks.
    """
    resolve_layout(placement, broadcast, 0)
    mesh = _meshes.get(placement)
    if mesh is None:
        _one_rank("gt.to_mesh")
        gather_objects(None, f"gt.to_mesh of {placement}")       # a rank that does something else raises, not waits
        mesh = _meshes[placement] = DeviceMesh(placement.type, torch.tensor(placement.ranks, device="cpu"),
                                               mesh_dim_names=placement.axis_names)
    return mesh


@api_boundary
def from_dtensor(d: DTensor) -> GlobalTensor:
    """The same value as a global tensor, in the memory of the DTensor's own part; differentiable. Collective.

    Raises SbpError for a DTensor's placement that has no sbp, GlobalTensorError in a process that drives several ranks.
    """
    expect(d, DTensor, "from_dtensor of no DTensor", "gt.from_dtensor(distribute_tensor(t, mesh, [Shard(0)]))")
    _one_rank("gt.from_dtensor")
    return lineage.begin_lineage(FromDTensor.apply(d) if d.requires_grad and torch.is_grad_enabled() else _as_global(d))


@api_boundary
def to_dtensor(x: GlobalTensor, mesh: DeviceMesh | None = None) -> DTensor:
    """The same value as torch's DTensor, in the memory of x's own part; differentiable.

    mesh   of x's ranks; default: `gt.to_mesh(x.placement)`
    A process whose rank is none of x's gets a DTensor without elements. Raises PlacementError for a mesh of other
    ranks or names, GlobalTensorError in a process that drives several ranks.
    """
    _one_rank("x.to_dtensor()")
    if mesh is None:
        mesh = to_mesh(x.placement)
    elif from_mesh(mesh) != x.placement:
        raise PlacementError(f"to_dtensor on another mesh, {mesh}", f"x is on {x.placement}",
                             "x.to_global(gt.from_mesh(mesh)).to_dtensor(mesh)")
    return ToDTensor.apply(x, mesh) if x.requires_grad and torch.is_grad_enabled() else _hand_over(x, mesh)


class FromDTensor(torch.autograd.Function):
    """Its gradient is a DTensor of the same placements, without pending sums."""

    @staticmethod
    def forward(ctx: Any, d: DTensor) -> GlobalTensor:
        x = _as_global(d)
        ctx.mesh, ctx.layout = d.device_mesh, x.spec.layout
        return x

    @staticmethod
    @api_boundary
    @row_by_row
    def backward(ctx: Any, grad: Any) -> DTensor:
        return to_dtensor(to_layout(grad, ctx.layout.without_partials), ctx.mesh)


class ToDTensor(torch.autograd.Function):
    """Its gradient, a DTensor of any placements, is boxed to lie dual to x."""

    @staticmethod
    def forward(ctx: Any, x: GlobalTensor, mesh: DeviceMesh) -> DTensor:
        ctx.layout = layout_of(x)
        return _hand_over(x, mesh)

    @staticmethod
    @api_boundary
    @row_by_row
    def backward(ctx: Any, grad: DTensor) -> tuple[GlobalTensor, None]:
        return box_gradient(from_dtensor(grad), ctx.layout, None), None


def _one_rank(name: str) -> None:
    if len(world().local_ranks) > 1:
        raise GlobalTensorError(f"{name} in a process that drives {len(world().local_ranks)} ranks",
                                "a DTensor has one rank per process",
                                f"globaltensor run -n {world().size} ..., or torchrun")


def _as_global(d: DTensor) -> GlobalTensor:
    """A global tensor of a DTensor's part."""
    where, how = from_mesh(d.device_mesh), d.placements
    dst = resolve_layout(where, tuple(sbp_of(p) for p in how), d.dim())
    with torch.no_grad():
        local: Any = d.to_local()
    if isinstance(local, GlobalTensor):
        raise GlobalTensorError("a DTensor whose part is a global tensor has no value here",
                                "each rank's part is a plain tensor, and a global tensor is the whole value",
                                "x.to_dtensor(), or DTensor.from_local(x.to_local(), ...)")
    local = getattr(local, "wait", lambda: local)()  # torch may still be moving it
    averaged = prod(n for p, n in zip(how, where.shape) if _is_average(p))
    return wrap_part(local / averaged if averaged > 1 else local, dst, tuple(d.shape))


def wrap_part(local: torch.Tensor, dst: Layout, shape: Shape, by_torch: bool = True) -> GlobalTensor:
    """A global tensor of this process's part, cut as torch cuts; rows move where this library cuts elsewhere."""
    of = spec(dst, shape, None, local.dtype)
    shards = {world().rank: local.contiguous()} if world().rank in dst.placement.coords else {}
    cut = torch_cut(dst, shape) if by_torch else None
    if cut is not None:
        shards, = move_shards([Move(spec(cut, shape, None, local.dtype), shards, dst)], "from_dtensor")
    return GlobalTensor.wrap(of, shards)


def _hand_over(x: GlobalTensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor of this process's part."""
    local = part_by_torch(x)
    if local is None:
        local = torch.empty(0, dtype=x.dtype, device=x.device)
    return DTensor.from_local(local.detach().contiguous(), mesh, placements_of(x.sbp), run_check=False, shape=x.shape,
                              stride=spec(x.spec.layout, x.spec.shape, None, x.dtype).stride)


def part_by_torch(x: GlobalTensor) -> torch.Tensor | None:
    """This process's part, cut as torch cuts; None outside of the mesh."""
    shards: Shards = x.shards
    cut = torch_cut(x.spec.layout, x.spec.shape)
    if cut is not None:
        shards, = move_shards([Move(x.spec, shards, cut, x.lineage)], "to_dtensor")
    return shards.get(world().rank)


@remembered
def torch_cut(of: Layout, shape: Shape) -> Layout | None:
    """How torch cuts a tensor of this shape, as `torch.chunk` does; None where that is how this library does."""
    where = of.placement
    regions = {r: _chunks(of.sbp, where, shape, r) for r in where.flat}
    if all(of.region(shape, r) == region for r, region in regions.items()):
        return None
    return rank_regions(where, regions, tuple(s if s.is_partial else broadcast for s in of.sbp))


def _chunks(sbp: NdSbp, where: placement, shape: Shape, rank: int) -> Region:
    region = [(0, n) for n in shape]
    for s, parts, index in zip(sbp, where.shape, where.coords[rank]):
        if s.is_split:
            start, stop = region[s.dim]
            rows = -(-(stop - start) // parts)
            region[s.dim] = min(start + index * rows, stop), min(start + (index + 1) * rows, stop)
    return tuple(region)


def sbp_of(p: Placement) -> Sbp:
    """The sbp that one of torch's placements means. Raises SbpError where there is none."""
    s = partial_sum if _is_average(p) else read_sbp(p)
    if s is None:
        raise SbpError(f"a DTensor that lies as {p} has no sbp", "here a tensor is split in order of the axes, whole, "
                       "or a pending sum, maximum, minimum or average",
                       "d.redistribute(placements=[Shard(0), ...]) or [Replicate(), ...] first")
    return s


def _is_average(p: Placement) -> bool:
    return type(p) is Partial and p.reduce_op == "avg"


def placements_of(sbp: NdSbp) -> list[Placement]:
    """torch's placements for an nd-sbp."""
    return [Shard(s.dim) if s.is_split else Replicate() if s.is_broadcast else Partial(s.op) for s in sbp]
