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

from collections.abc import Iterable, Sequence
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
    ranks = tuple(sorted(items[0].step.ranks))
    first = items[0].shard
    if name == "all_reduce":
        buffer = _end_to_end([shard for _, shard in items], first)
        return Collective(name, ranks, buffer, buffer)
    if name == "all_to_all":
        taken = [[shard[slices(part, step.src.region(step.shape, rank))] for step, shard in items
                  if (part := _shared(step, rank, taker)) is not None] for taker in ranks]
        sent = tuple(sum(t.numel() for t in parts) for parts in taken)
        received = tuple(sum(volume(part) for step, _ in items if (part := _shared(step, holder, rank)) is not None)
                         for holder in ranks)
        source = torch.cat([t.reshape(-1) for parts in taken for t in parts] or [first.new_empty(0)])
        return Collective(name, ranks, source, first.new_empty(sum(received)), sent, received)
    longest = max(_row_length(name, items, r) for r in ranks)
    if name == "all_gather":
        source = _end_to_end([shard for _, shard in items], first, longest)
        return Collective(name, ranks, source, first.new_empty(longest * len(ranks)))
    rows = [_end_to_end([shard[slices(step.dst.region(step.shape, r), step.src.region(step.shape, rank))]
                         for step, shard in items], first, longest) for r in ranks]
    return Collective(name, ranks, torch.cat(rows), first.new_empty(longest))


def unpack_collective(call: Collective, items: Sequence[Item], rank: int, into: Sequence[torch.Tensor | None]
                      ) -> list[torch.Tensor]:
    """The new shards: of reductions views of the one result, which lives as long as one of them does; else in the
    memory that is given, if any."""
    shapes = [step.dst.local_shape(step.shape, rank) for step, _ in items]
    if call.name in ("all_reduce", "reduce_scatter"):
        return _read_row(call.result, shapes)
    shards = [shard.new_empty(shape) if own is None else own for shape, (_, shard), own in zip(shapes, items, into)]
    if call.name == "all_gather":
        for row, holder in zip(call.result.view(len(call.ranks), -1), call.ranks):
            parts = [step.src.region(step.shape, holder) for step, _ in items]
            for shard, part, piece in zip(shards, parts, _read_row(row, map(_lengths, parts))):
                shard[slices(part, tuple((0, n) for n in shard.shape))].copy_(piece)
        return shards
    at = 0
    for holder in call.ranks:
        for shard, (step, _) in zip(shards, items):
            if (shared := _shared(step, holder, rank)) is not None:
                piece = call.result[at:at + volume(shared)].view(_lengths(shared))
                shard[slices(shared, step.dst.region(step.shape, rank))].copy_(piece)
                at += volume(shared)
    return shards


def _shared(step: GroupStep, holder: int, taker: int) -> Region | None:
    """What `taker` gets from `holder` in an all-to-all."""
    return intersect(step.src.region(step.shape, holder), step.dst.region(step.shape, taker))


def _row_length(name: str, items: Sequence[Item], rank: int) -> int:
    """Elements of what `rank` gives to an all-gather, or gets of a reduce-scatter."""
    return sum(_padded(prod((step.src if name == "all_gather" else step.dst).local_shape(step.shape, rank)))
               for step, _ in items)


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _end_to_end(parts: Sequence[torch.Tensor], like: torch.Tensor, length: int | None = None) -> torch.Tensor:
    """Tensors in one new buffer of zeros, each from a multiple of `_ALIGNED` on."""
    sizes = [t.numel() for t in parts]
    rows = [_padded(size) for size in sizes]
    end = sum(rows)
    buffer = like.new_empty(end if length is None else length)
    places = buffer[:end].split_with_sizes(rows)
    for t, place, size, row in zip(parts, places, sizes, rows):
        (place if row == size else place[:size]).view(t.shape).copy_(t)
        if row > size:
            place[size:] = 0
    if length is not None:
        buffer[end:] = 0
    return buffer


def _read_row(row: torch.Tensor, shapes: Iterable[Shape]) -> list[torch.Tensor]:
    """The tensors that `_end_to_end` put there."""
    shapes = list(shapes)
    sizes = [prod(shape) for shape in shapes]
    rows = [_padded(size) for size in sizes]
    return [(place if len(place) == size else place[:size]).view(shape)
            for place, size, shape in zip(row[:sum(rows)].split_with_sizes(rows), sizes, shapes)]


def _lengths(region: Region) -> Shape:
    return tuple(stop - start for start, stop in region)
