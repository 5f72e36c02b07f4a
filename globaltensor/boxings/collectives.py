"""Steps of boxings that are collectives of torch.distributed: where a group shares no memory, they are done by these.

    P -> B       all_reduce         the whole region of the group, added up; the two steps of a plan as one
    P -> S       reduce_scatter     NCCL's only: gloo reduces all of it and throws most away, twice the bytes
    S -> B       all_gather         uneven parts are padded to the largest
    S(i) -> S(j) all_to_all         of any number of elements from each rank to each other

Trees, rings and switches that add are the engine's business, not ours. Many tensors of one dtype go through one call.
All else (maxima, whose NaN gloo loses; several axes that change in several ways; two placements) has no such name, and
is done by messages of our own (torch_program.py), as is everything where an engine is not torch's own, since its groups
are not ours to make. So are, over gloo, small sums, as its ring takes a message per rank one after the other and wakes
threads of its own; and those of 16-bit floats, as it rounds after each addition.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch

from globaltensor.boxings.group_step import GroupStep
from globaltensor.layouts.layout import Shape
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.regions import Region, intersect, slices, volume
from globaltensor.runtime.accelerators import engine_class
from globaltensor.runtime.collectives import Collective
from globaltensor.runtime.torch_internals import foreach_copy_
from globaltensor.runtime.world import world

# gloo adds numbers of these, in any order; in two ranks also those of 16 bits, as one addition is rounded once
ADDED = {torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8}
_SIXTEEN = {torch.float16, torch.bfloat16}
_ALIGNED = 4                                         # elements: where a tensor may start in a common buffer
_SMALL = 4096                                        # bytes that two ranks add up by messages


class Item(NamedTuple):
    """A tensor in a step of this process: its group's step, and its shard before it."""

    step: GroupStep
    shard: torch.Tensor


@partial(remembered, kept=20_000)
def collective_name(step: GroupStep, dtype: torch.dtype, merged: bool = True, nbytes: int = 0) -> str | None:
    """The collective that does this step of a tensor of that dtype, the same on all ranks of the group; else None.

    `merged`: the plan has two steps for it, as it has where more than two ranks add up what is not small. `nbytes` is
    the size of all tensors that move with it.
    """
    src, dst = step.src.sbp, step.dst.sbp
    gloo = step.src.placement.type == "cpu" or world().staged
    if not gloo and engine_class(world().engine) is None:
        return None
    if all(s.is_partial for s in src):
        n = len(step.ranks)
        if {s.op for s in src} != {"sum"} or not (dtype in ADDED or dtype in _SIXTEEN and (n == 2 or not gloo)):
            return None
        if all(t.is_broadcast for t in dst):
            return None if gloo and not merged and (n > 2 or nbytes <= _SMALL) else "all_reduce"
        return "reduce_scatter" if not gloo and all(t.is_split for t in dst) else None
    if not all(s.is_split for s in src):
        return None
    if all(t.is_broadcast for t in dst):
        return "all_gather"
    return "all_to_all" if all(t.is_split for t in dst) else None


def pack_collective(name: str, items: Sequence[Item], rank: int) -> Collective:
    """The call that does these steps of one group, tensors of one dtype."""
    steps = tuple(step for step, _ in items)
    ranks = tuple(sorted(steps[0].ranks))
    first = items[0].shard
    if name == "all_reduce":
        buffer = _end_to_end([shard for _, shard in items], _placed(_shard_shapes(steps, rank)), first)
        return Collective(name, ranks, buffer, buffer)
    if name == "all_to_all":
        taken = [[shard[slices(part, step.src.region(step.shape, rank))] for step, shard in items
                  if (part := _shared(step, rank, taker)) is not None] for taker in ranks]
        sent = tuple(sum(t.numel() for t in parts) for parts in taken)
        received = tuple(sum(volume(part) for step, _ in items if (part := _shared(step, holder, rank)) is not None)
                         for holder in ranks)
        source = torch.cat([t.reshape(-1) for parts in taken for t in parts] or [first.new_empty(0)])
        return Collective(name, ranks, source, first.new_empty(sum(received)), sent, received)
    longest = _longest(steps, name == "reduce_scatter")
    if name == "all_gather":
        source = _end_to_end([shard for _, shard in items], _placed(_shard_shapes(steps, rank), longest), first)
        return Collective(name, ranks, source, first.new_empty(longest * len(ranks)))
    rows = [_end_to_end([shard[slices(step.dst.region(step.shape, r), step.src.region(step.shape, rank))]
                         for step, shard in items], _placed(_shard_shapes(steps, r, True), longest), first)
            for r in ranks]
    return Collective(name, ranks, torch.cat(rows), first.new_empty(longest))


def unpack_collective(call: Collective, items: Sequence[Item], rank: int, into: Sequence[torch.Tensor | None]
                      ) -> list[torch.Tensor]:
    """The new shards: of reductions views of the one result, which lives as long as one of them does; else in the
    memory that is given, if any."""
    steps = tuple(step for step, _ in items)
    shapes = _shard_shapes(steps, rank, True)
    if call.name in ("all_reduce", "reduce_scatter"):
        return _placed(shapes, len(call.result)).read(call.result)
    shards = [shard.new_empty(shape) if own is None else own for shape, (_, shard), own in zip(shapes, items, into)]
    if call.name == "all_gather":
        _read_gathered(call, steps, shards)
        return shards
    at = 0
    for holder in call.ranks:
        for shard, step in zip(shards, steps):
            if (shared := _shared(step, holder, rank)) is not None:
                piece = call.result[at:at + volume(shared)].view(_lengths(shared))
                shard[slices(shared, step.dst.region(step.shape, rank))].copy_(piece)
                at += volume(shared)
    return shards


def _read_gathered(call: Collective, steps: tuple[GroupStep, ...], shards: Sequence[torch.Tensor]) -> None:
    """Bring what each rank gave to its places: by one copy for a tensor, where all are split evenly."""
    rows = call.result.view(len(call.ranks), -1)
    evenly = _even_views(steps, call.ranks)
    if evenly is not None:
        pieces = _placed(_shard_shapes(steps, call.ranks[0]), rows.shape[1]).read(rows)
        foreach_copy_([shard.view(shape).movedim(dim, 0) for shard, (shape, dim) in zip(shards, evenly)], pieces)
        return
    for row, holder in zip(rows, call.ranks):
        for shard, step, piece in zip(shards, steps, _placed(_shard_shapes(steps, holder), len(row)).read(row)):
            shard[slices(step.src.region(step.shape, holder), tuple((0, n) for n in shard.shape))].copy_(piece)


@remembered
def _even_views(steps: tuple[GroupStep, ...], ranks: tuple[int, ...]) -> tuple[tuple[Shape, int], ...] | None:
    """Where all tensors are split into equal parts, one after the other for these ranks: the shape of each as that of
    its parts, and the dim that counts them."""
    views = []
    for of in steps:
        dim, n = of.src.sbp[0].dim, len(ranks)
        if len(of.src.sbp) > 1 or of.src.placement.flat != ranks or of.shape[dim] % n:
            return None
        views.append((of.shape[:dim] + (n, of.shape[dim] // n) + of.shape[dim + 1:], dim))
    return tuple(views)


def _shared(step: GroupStep, holder: int, taker: int) -> Region | None:
    """What `taker` gets from `holder` in an all-to-all."""
    return intersect(step.src.region(step.shape, holder), step.dst.region(step.shape, taker))


@remembered
def _shard_shapes(steps: tuple[GroupStep, ...], rank: int, after: bool = False) -> tuple[Shape, ...]:
    """Of the shards that `rank` has before these steps, or after them."""
    return tuple((step.dst if after else step.src).local_shape(step.shape, rank) for step in steps)


@remembered
def _longest(steps: tuple[GroupStep, ...], after: bool) -> int:
    """Elements that the shards of the rank take up that has most."""
    return max(_placed(_shard_shapes.__wrapped__(steps, rank, after)).length for rank in steps[0].ranks)


class Rows(NamedTuple):
    """Where tensors lie in a flat buffer of `length`, end to end, each from a multiple of `_ALIGNED` on: the lengths
    into which to cut it, and which of these pieces are the tensors, and which are gaps."""

    shapes: tuple[Shape, ...]
    length: int
    cuts: list[int]
    at: list[int]
    gaps: list[int]

    def read(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in this buffer, or in each of several such ones: [*n, length] -> [*n, *shape]."""
        pieces = buffer.split_with_sizes(self.cuts, -1)
        return [pieces[k].view(buffer.shape[:-1] + shape) for k, shape in zip(self.at, self.shapes)]


@remembered
def _placed(shapes: tuple[Shape, ...], length: int | None = None) -> Rows:
    """These tensors end to end; `length`: that of the buffer, which may be longer."""
    cuts: list[int] = []
    at, gaps = [], []
    for shape in shapes:
        at.append(len(cuts))
        cuts.append(prod(shape))
        if gap := -cuts[-1] % _ALIGNED:
            gaps.append(len(cuts))
            cuts.append(gap)
    if length is not None and length > sum(cuts):
        gaps.append(len(cuts))
        cuts.append(length - sum(cuts))
    return Rows(shapes, sum(cuts), cuts, at, gaps)


def _end_to_end(parts: list[torch.Tensor], rows: Rows, like: torch.Tensor) -> torch.Tensor:
    """Tensors in one new buffer, with zeros between them."""
    pieces = (buffer := like.new_empty(rows.length)).split_with_sizes(rows.cuts)
    foreach_copy_([pieces[k].view(shape) for k, shape in zip(rows.at, rows.shapes)], parts)
    for k in rows.gaps:
        pieces[k].zero_()
    return buffer


def _lengths(region: Region) -> Shape:
    return tuple(stop - start for start, stop in region)
