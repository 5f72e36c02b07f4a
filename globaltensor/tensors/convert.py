"""From plain tensors to global ones: `from_full`, `from_local`, `from_shards`, and `to_global` of a plain tensor."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from globaltensor.boxings.redistribute import Move, move_shards
from globaltensor.errors import ArgumentError, GlobalTensorError, ShapeError, expect
from globaltensor.layouts.layout import Layout, Shape, Spec, dense, dense_in_order, layout, sbp_text, spec
from globaltensor.layouts.placement import placement as Placement
from globaltensor.layouts.rank_regions import rank_regions
from globaltensor.layouts.regions import Range
from globaltensor.layouts.sbp import NdSbp, SbpLike, broadcast, nd_sbp
from globaltensor.runtime import custom_ops, lineage
from globaltensor.runtime.agreement import OF_A_MODEL, Advice, agree_on, checksum, gather_objects
from globaltensor.runtime.codec import message
from globaltensor.runtime.memory import missing, require
from globaltensor.runtime.torch_internals import break_graph, compiling, modes_active
from globaltensor.runtime.world import local_ranks_of, world
from globaltensor.tensors.flatten import called_in_graphs
from globaltensor.tensors.full_value import FromFull
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.linear_maps import LinearMap, innermost, layout_of
from globaltensor.tensors.redistribution import Part, box_from, resolve_layout, to_layout
from globaltensor.tracebacks import api_boundary


@called_in_graphs
@api_boundary
def from_full(t: torch.Tensor, placement: Placement, sbp: SbpLike) -> GlobalTensor:
    """Every process holds the same whole tensor `t`; each keeps its part. Collective; moves nothing. Differentiable.

    Raises SbpError for an sbp that does not fit, DisagreementError on every rank where `t` is not the same everywhere,
    in the same order in memory, which its parts keep.
    """
    expect(t, torch.Tensor, "from_full of no tensor", "gt.from_full(torch.tensor(...), placement, sbp)")
    return _whole_alike(t, placement, sbp)


def from_full_of_model(t: torch.Tensor, name: str, placement: Placement, sbp: SbpLike) -> GlobalTensor:
    """The same of a model's parameter or buffer of this name, which errors tell."""
    return _whole_alike(t, placement, sbp, f"{name or 'a tensor'} of a model", OF_A_MODEL)


def _whole_alike(t: torch.Tensor, placement: Placement, sbp: SbpLike, name: str = "from_full",
                 *advice: Advice) -> GlobalTensor:
    dst = resolve_layout(placement, sbp, t.dim())
    if compiling():                                  # no values to compare
        return FromFull.of(t, dst)
    require(innermost(t), f"{name} on {dst}")
    whole = innermost(t)
    order = "" if whole.is_contiguous() else f" with strides {list(dense(tuple(whole.shape), whole.stride()))}"
    agree_on(whole, f"{name} on {dst}{order}", None, *advice)
    return lineage.begin_lineage(FromFull.of(t, dst))


@called_in_graphs
@api_boundary
def from_local(t: torch.Tensor, placement: Placement, sbp: SbpLike) -> GlobalTensor:
    """Each rank's own part: S concatenates, P sums, B takes the first rank's.

    A process that drives several ranks gives `t` to each of them. The parts must be cut as this library cuts (as
    equal as can be, larger first). Collective. Differentiable. Raises ShapeError on every rank where they do not fit
    together.
    """
    expect(t, torch.Tensor, "from_local of no tensor", "gt.from_local(torch.tensor(...), placement, sbp)")
    mine = _mine(placement)
    if any(s.is_split and not -t.dim() <= s.dim < t.dim() for s in nd_sbp(sbp, placement.names, placement.ndim)):
        join_parts({r: t.detach() for r in mine}, placement, sbp)    # the others' parts may have the dim: all raise
    return lineage.begin_lineage(FromLocal.of(t, resolve_layout(placement, sbp, t.dim())))


class FromLocal(LinearMap):
    """Each rank's own part, checked, and made one tensor."""

    op = custom_ops.from_local

    @staticmethod
    def forward(t: torch.Tensor, dst: Layout) -> GlobalTensor:
        return FromLocal.call_op(t, dst) if modes_active() else join_alike(t, dst)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor, None]:
        dst, = ctx.how
        return Part.of(to_layout(grad, dst.without_partials), dst, ctx.shape).to(ctx.device), None


def join_alike(t: torch.Tensor, dst: Layout) -> GlobalTensor:
    """`t` as the part of every rank that this process drives."""
    if compiling():
        break_graph(FromLocal.op)                    # all ranks tell their shapes first
    return join_parts({r: t.detach() for r in _mine(dst.placement)}, dst.placement, dst.sbp)


@called_in_graphs
@api_boundary
def from_shards(shards: Mapping[int, torch.Tensor], placement: Placement, sbp: SbpLike) -> GlobalTensor:
    """`{rank: part}` for the ranks this process drives: S concatenates, P sums, B takes the first rank's.

    Collective. Raises ShapeError on every rank where the parts do not fit together, GlobalTensorError for a missing
    rank.
    """
    expect(shards, Mapping, "from_shards of no dict", "gt.from_shards({0: part, 1: other}, placement, sbp)")
    mine = _mine(placement)
    missing = [r for r in mine if r not in shards]
    if missing:
        raise GlobalTensorError(f"from_shards without a part for ranks {missing}",
                                f"this process drives ranks {mine} of the placement", "{rank: tensor} for each of them")
    for r, part in shards.items():
        if r not in placement.coords:
            raise ArgumentError(f"from_shards with a part for rank {r!r}", f"it is none of the ranks of {placement}",
                                f"the keys {list(placement.flat)}")
        expect(part, torch.Tensor, f"from_shards of no tensor for rank {r}", "{rank: torch.tensor(...)}")
    return lineage.begin_lineage(join_parts({r: shards[r].detach() for r in mine}, placement, sbp))


def _mine(where: Any) -> list[int]:
    """The ranks of a placement that this process drives."""
    return list(local_ranks_of(resolve_layout(where, broadcast, 0).placement))


@message
class PartInfo(NamedTuple):
    """What the others must know of one rank's part. `stride` is () where it is contiguous, `checksum` 0 where no rank
    has to hold the same, `missing` says why it cannot be read."""

    shape: Shape
    stride: Shape
    dtype: torch.dtype
    checksum: int
    missing: tuple[str, str] | None


def join_parts(mine: dict[int, torch.Tensor], where: Any, sbp: Any) -> GlobalTensor:
    """A global tensor whose shards are the parts of all ranks of the placement; `mine` are those of this process.

    All checks are made on what all ranks said, so an error is raised by all of them or by none.
    """
    nd = nd_sbp(sbp, where.names, where.ndim)
    what = f"from_local on {where} {sbp_text(nd)}"
    parts = _all_parts({r: part_info(t, has_copies(where, nd)) for r, t in mine.items()}, what)
    dst, shape = fit_parts(parts, where, nd, what)
    cut = {r: dst.local_shape(shape, r) for r in parts}
    if any(cut[r] != p.shape for r, p in parts.items()):
        raise _misfit(str(dst), {r: list(p.shape) for r, p in parts.items()},
                      f"a tensor of {list(shape)} would be cut as:" + _rank_lines({r: list(n) for r, n in cut.items()}),
                      "parts as equal as can be, the larger ones first; or gt.from_full of the whole")
    of, heads = spec(dst, shape, _stride_of(parts, shape), parts[where.flat[0]].dtype), heads_of(dst)
    shards = on_devices(mine, of)
    # mostly they are equal, and nothing moves
    if any(parts[r].checksum != parts[head].checksum for r, head in heads.items()):
        shards = _from_heads(shards, heads, of)
    return GlobalTensor.wrap(of, shards)


def join_rows(mine: dict[int, torch.Tensor], parts: Mapping[int, PartInfo], where: Any, nd: NdSbp,
              what: str) -> GlobalTensor:
    """As `join_parts`, of parts split along dim 0 alone, of which any rank may have any number of rows: rows move where
    the library cuts elsewhere. `parts` are those of all ranks. Raises ShapeError where they differ in other dims."""
    dst, shape = fit_parts(parts, where, nd, what)
    first = parts[where.flat[0]]
    of = spec(dst, shape, _stride_of(parts, shape), first.dtype)
    if any(p.shape[1:] != first.shape[1:] for p in parts.values()):
        raise _misfit(f"{where} {sbp_text(nd)}", {r: list(p.shape) for r, p in parts.items()},
                      "the rows of one tensor have one shape", "a collate_fn that pads to a fixed length")
    rows: dict[int, Range] = {}
    stop, heads = 0, heads_of(dst)
    for r, head in heads.items():
        if head == r:
            start, stop = stop, stop + parts[r].shape[0]
            rows[r] = (start, stop)
    held = {r: rows[head] if parts[r]._replace(stride=()) == parts[head]._replace(stride=()) else (stop, stop)
            for r, head in heads.items()}
    shards = on_devices({r: t[:held[r][1] - held[r][0]] for r, t in mine.items()}, of)
    if any(dst.local_shape(shape, r)[0] != last - start for r, (start, last) in held.items()):
        src = rank_regions(where, {r: (ends, *((0, n) for n in shape[1:])) for r, ends in held.items()})
        shards, = move_shards([Move(of.on(src), shards, dst)])
    return lineage.begin_lineage(GlobalTensor.wrap(of, shards))


def has_copies(where: Any, nd: NdSbp) -> bool:
    """Do several ranks of the placement hold the same part?"""
    return any(s.is_broadcast and n > 1 for s, n in zip(nd, where.shape))


def fit_parts(parts: Mapping[int, PartInfo], where: Any, nd: NdSbp, what: str) -> tuple[Layout, Shape]:
    """The layout and the global shape of these parts of all ranks. Raises ShapeError where they differ in the number of
    dims or the dtype, GlobalTensorError for one without memory."""
    first = parts[where.flat[0]]
    for p in parts.values():
        if p.missing:
            raise GlobalTensorError(f"{what}: {p.missing[0]}", "a part is read from its memory, and one has none",
                                    p.missing[1])
    if any((len(p.shape), p.dtype) != (len(first.shape), first.dtype) for p in parts.values()):
        raise _misfit(f"{where} {sbp_text(nd)}", {r: f"{list(p.shape)} {p.dtype}" for r, p in parts.items()},
                      "parts of one tensor have the same number of dims and the same dtype",
                      "the same dtype on every rank: shard.to(torch.float32)"
                      if all(len(p.shape) == len(first.shape) for p in parts.values()) else
                      "the same number of dims on every rank: shard.unsqueeze(0), or shard.flatten()")
    dst = resolve_layout(where, nd, len(first.shape))
    return dst, _global_shape({r: p.shape for r, p in parts.items()}, dst)


def _stride_of(parts: Mapping[int, PartInfo], shape: Shape) -> Shape | None:
    """The strides of the tensor of these parts, as the first tells that is not contiguous; None where all are."""
    first = next((p for _, p in sorted(parts.items()) if p.stride and 0 not in p.shape), None)
    return None if first is None else dense(shape, first.stride)


def on_devices(mine: Mapping[int, torch.Tensor], of: Spec) -> dict[int, torch.Tensor]:
    """The parts of this process on the devices of their ranks, in the order in memory that the spec tells, none of
    which share memory."""
    shards: dict[int, torch.Tensor] = {}
    for r, t in mine.items():
        t = dense_in_order(t.to(world().device(of.placement.type, r)), of.stride)
        # one tensor may be given for several ranks; in one memory, a write to one shard would be a write to all
        shards[r] = t.clone() if t.data_ptr() in [s.data_ptr() for s in shards.values()] else t
    return shards


def part_info(t: torch.Tensor, copies: bool) -> PartInfo:
    """What the others must know of this part; `copies`: some of them are to hold the same."""
    if (no_memory := missing(t)) is not None:
        return PartInfo((), (), t.dtype, 0, no_memory)
    stride = () if t.is_contiguous() else tuple(t.stride())
    return PartInfo(tuple(t.shape), stride, t.dtype, checksum(t) if copies else 0, None)


def _all_parts(mine: dict[int, PartInfo], what: str) -> dict[int, PartInfo]:
    """The parts of all ranks, from all processes."""
    return {r: part for parts in gather_objects(mine, what) for r, part in parts.items()}


def _misfit(layout: str, parts: Mapping[int, Any], why: str, fix: str) -> ShapeError:
    return ShapeError(f"parts that do not fit together as {layout}:{_rank_lines(parts)}", why, fix)


def _rank_lines(of: Mapping[int, Any]) -> str:
    return "".join(f"\n    rank {r}: {value}" for r, value in sorted(of.items()))


def heads_of(dst: Layout) -> dict[int, int]:
    """rank -> the first of the ranks that are to hold the same part."""
    at = {index: r for r, index in dst.placement.coords.items()}
    return {r: at[tuple(0 if s.is_broadcast else i for s, i in zip(dst.sbp, index))]
            for r, index in dst.placement.coords.items()}


def _from_heads(shards: dict[int, torch.Tensor], heads: dict[int, int], of: Spec) -> dict[int, torch.Tensor]:
    """Every rank's part from the first rank that has it: a boxing from a placement of those alone."""
    dst = of.layout
    firsts = tuple(slice(0, 1) if s.is_broadcast else slice(None) for s in dst.sbp)
    ranks = torch.tensor(dst.placement.ranks, device="cpu")[firsts]
    src = layout(type(dst.placement)(dst.placement.type, ranks, dst.placement.axis_names), dst.sbp)
    held = {r: t for r, t in shards.items() if heads[r] == r}
    return move_shards([Move(of.on(src), held, dst)])[0]


def _global_shape(shapes: dict[int, Shape], dst: Layout) -> Shape:
    """Sizes added up along split dims, taken from the first rank along others."""
    total = list(shapes[dst.placement.flat[0]])
    for d in {s.dim for s in dst.sbp if s.is_split}:
        keep = [axis for axis, s in enumerate(dst.sbp) if s.is_split and s.dim == d]
        total[d] = sum(shapes[r][d] for r, at in dst.placement.coords.items()
                       if all(i == 0 for axis, i in enumerate(at) if axis not in keep))
    return tuple(total)


@api_boundary
def plain_to_global(t: torch.Tensor, placement: Any = None, sbp: Any = None, grad_sbp: Any = None, wait: bool = True
                    ) -> GlobalTensor:
    """A plain tensor becomes global: `from_local`, which moves nothing. Where torch.func wraps a global one it is a
    boxing."""
    if layout_of(t) is not None:
        return box_from(t, placement, sbp, grad_sbp, wait)
    if placement is None or sbp is None:
        raise GlobalTensorError("a plain tensor has no placement and sbp of its own to keep",
                                "it becomes each rank's part of a global one", "t.to_global(placement, sbp)")
    return from_local(t, placement, sbp)
