"""q, k and v of one matrix (GPT-2's and nanoGPT's `c_attn`), each dealt out by heads.

    y = c_attn(x)                     [b, t, 3 c], split along its last dim: rank 0 has q and the first half of k
    q, k, v = y.split(c, dim=2)       each split along that dim, so that every rank has heads of all three

The matrix is split along its outputs as it stands: checkpoints and optimizers have what they have on one device.
What the module gives is marked: `split` and `chunk` of it move each element at most once, from the rank that has it to
the one whose head it belongs to, in one all-to-all forward and one backward. On n ranks each receives less than 1/n of
y. (Left whole, every rank would compute all of y, and all heads.) These parts are tensors of their own, no views: a
write to one is not seen in y, which models that take it apart do not use again. All else that is done with y is done
as with any split tensor.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from globaltensor.boxings.redistribute import Move, move_shards
from globaltensor.layouts.layout import Layout, Spec, spec
from globaltensor.layouts.rank_regions import RankRegions, regions_by
from globaltensor.layouts.regions import Region
from globaltensor.runtime.torch_internals import compiling, transforms_active
from globaltensor.tensors.redistribution import to_layout
from globaltensor.tracebacks import torch_boundary

_BOXING = "parts of one matrix"                      # as gt.record names it


def with_dealt_parts(self: Any) -> Any:
    """x itself, of which `split` and `chunk` now deal out the parts. In a graph another one: a graph holds what is
    called, and no attributes."""
    x = self.view_as(self) if compiling() else self
    x.deals_parts = True
    return x


@torch_boundary
def split_parts(self: Any, split_size: Any, dim: int = 0) -> Any:
    """x.split"""
    parts = _dealt(self, split_size, dim) if self.deals_parts else None
    return Tensor.split(self, split_size, dim) if parts is None else parts


@torch_boundary
def chunk_parts(self: Any, chunks: int, dim: int = 0) -> Any:
    """x.chunk"""
    if self.deals_parts and chunks > 0 and -self.dim() <= dim < self.dim():
        return self.split(max(-(-self.shape[dim] // chunks), 1), dim)
    return Tensor.chunk(self, chunks, dim)


def _dealt(y: Any, split_size: int | Sequence[int], dim: int) -> tuple[Any, ...] | None:
    """What y.split(split_size, dim) gives, each part split along that dim as y is. None where y is not, and where the
    call is not one that torch takes."""
    own: Spec = y.spec
    if own.layout.partial or not -own.ndim <= dim < own.ndim or own.symbolic or transforms_active():
        return None                                  # regions are numbers: a graph for many sizes does without
    dim %= own.ndim
    n = own.shape[dim]
    if not isinstance(split_size, int):
        sizes = list(split_size)
    else:
        sizes = [min(split_size, n - at) for at in range(0, n, split_size)] if split_size > 0 else []
    if sum(sizes) != n or min(sizes, default=-1) < 0 or not any(s.is_split and s.dim == dim for s in own.sbp):
        return None
    return DealtParts.apply(y, dim, tuple(sizes))


class DealtParts(torch.autograd.Function):
    """Parts of a tensor along a dim that is split, each split along it."""

    @staticmethod
    def forward(ctx: Any, y: Any, dim: int, sizes: tuple[int, ...]) -> tuple[Any, ...]:
        ctx.own, ctx.dim, ctx.sizes = y.spec, dim, sizes
        own, moves = y.spec, []
        for held, shape, start in _held_parts(own.layout, own.shape, dim, sizes):
            shards = {rank: _narrowed(shard, dim, own.region(rank), held.region(shape, rank), start)
                      for rank, shard in y.shards.items()}
            moves.append(Move(spec(held, shape, None, own.dtype), shards, own.layout, y.lineage))
        return tuple(y.wrap(spec(own.layout, move.spec.shape, None, own.dtype), shards)
                     for move, shards in zip(moves, move_shards(moves, _BOXING)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None]:
        if transforms_active():                      # these ask for no parts
            joined: Any = torch.cat(grads, ctx.dim)
            return to_layout(joined, ctx.own.layout), None, None
        return JoinedParts.apply(ctx.own, ctx.dim, *grads), None, None


class JoinedParts(torch.autograd.Function):
    """The tensor of these parts, laid out as it was."""

    @staticmethod
    def forward(ctx: Any, own: Spec, dim: int, *parts: Any) -> Any:
        ctx.own, ctx.dim, ctx.sizes = own, dim, tuple(part.shape[dim] for part in parts)
        moves = [Move(part.spec, part.shards, held, part.lineage)
                 for part, (held, _, _) in zip(parts, _held_parts(own.layout, own.shape, dim, ctx.sizes))]
        moved = move_shards(moves, _BOXING)
        return parts[0].wrap(spec(own.layout, own.shape, None, parts[0].dtype),
                             {rank: torch.cat([shards[rank] for shards in moved], dim) for rank in moved[0]})

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        grad = to_layout(grad, ctx.own.layout)
        parts = Tensor.split(grad, ctx.sizes, ctx.dim) if transforms_active() else DealtParts.apply(
            grad, ctx.dim, ctx.sizes)
        return None, None, *parts


def _held_parts(own: Layout, shape: tuple[int, ...], dim: int, sizes: Sequence[int]
                ) -> list[tuple[RankRegions, tuple[int, ...], int]]:
    """Of each part what ranks hold of it in a tensor of this layout, its shape, and where it starts."""
    return [(regions_by(own.placement, _HeldPart(own, shape, dim, start, size)),
             (*shape[:dim], size, *shape[dim + 1:]), start)
            for start, size in zip(accumulate(sizes, initial=0), sizes)]


class _HeldPart(NamedTuple):
    """What a rank holds of a part of a dim, counted from where the part starts."""

    own: Layout
    shape: tuple[int, ...]
    dim: int
    start: int
    size: int

    def region(self, rank: int) -> Region:
        region = self.own.region(self.shape, rank)
        first, last = (min(max(at - self.start, 0), self.size) for at in region[self.dim])
        return (*region[:self.dim], (first, last), *region[self.dim + 1:])


def _narrowed(shard: Tensor, dim: int, region: Region, part: Region, start: int) -> Tensor:
    """What a shard that holds a region has of a part that starts there."""
    first, last = part[dim]
    at = first + start - region[dim][0] if first < last else 0
    return shard.narrow(dim, at, last - first)
