"""One step of a boxing, compiled to torch ops and messages: what is done where the native kernel cannot be.

A step is compiled, once per pair of layouts and shape, to what this process has to do: the parts that it sends to
other processes, and for each rank that it drives the pieces of the new shard. Ranks of this process are read in place;
the rest comes by messages, all tensors of one step in one message per peer. Terms of a sum are added in the order of
their ranks, in float32 for the 16-bit floats, so that every rank gets the same bits.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from globaltensor.boxings.route import route
from globaltensor.layouts.layout import Layout, Shape, Shards, Spec, dense
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.regions import Region, slices, volume
from globaltensor.runtime.dtypes import SIGNED, accumulation_dtype
from globaltensor.runtime.memory import flat_bytes
from globaltensor.runtime.world import local_ranks_of, world

Index = tuple[slice, ...]


class SourcePart(NamedTuple):
    """A part of the shard of `rank`; `at` None is the whole shard. Another process has it where `owner` is not None."""

    rank: int
    at: Index | None
    size: int
    owner: int | None


class Fill(NamedTuple):
    """Where in the new shard (None: all of it) the reduction of some parts goes, and its shape."""

    at: Index | None
    shape: Shape
    parts: tuple[SourcePart, ...]


class TorchProgram(NamedTuple):
    """One step as this process does it."""

    shapes: dict[int, tuple[Shape, bool]]            # per driven rank: its new shard, and whether to zero it first
    fills: dict[int, tuple[Fill, ...]]
    outgoing: dict[int, tuple[SourcePart, ...]]      # per peer process, in the order that both sides agree on
    op: str


@remembered
def compile_step(src: Layout, dst: Layout, shape: Shape) -> TorchProgram:
    """One step from src to dst as the ranks of this process do it."""
    mine = set(world().local_ranks)
    shapes: dict[int, tuple[Shape, bool]] = {}
    fills: dict[int, tuple[Fill, ...]] = {}
    outgoing: dict[int, list[SourcePart]] = {}
    step = route(src, dst, shape)

    def part(source: int, region: Region) -> SourcePart:
        held = src.region(shape, source)
        return SourcePart(source, None if held == region else slices(region, held), volume(region),
                          None if source in mine else source)

    if not world().single_process:
        for source in local_ranks_of(src.placement):
            for rank, region in step.takers(source):
                outgoing.setdefault(rank, []).append(part(source, region))
    for rank in local_ranks_of(dst.placement):
        held = dst.region(shape, rank)
        covered, filled = 0, []
        for region, sources in step.pieces(rank):
            covered += volume(region)
            parts = tuple(part(source, region) for source in sources)
            at = None if region == held else slices(region, held)
            filled.append(Fill(at, tuple(b - a for a, b in region), parts))
        # what no piece covers is zero: of a broadcast that becomes a pending sum, all ranks' but one
        shapes[rank] = (dst.local_shape(shape, rank), covered < volume(held))
        fills[rank] = tuple(filled)
    return TorchProgram(shapes, fills, {r: tuple(parts) for r, parts in outgoing.items()}, step.op)


class ByteStream:
    """Bytes from one peer, read front to back as tensors."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.at = data, 0

    def read(self, shape: Shape, size: int, dtype: torch.dtype) -> torch.Tensor:
        end = self.at + size * dtype.itemsize
        part, self.at = self.data[self.at:end], (end + 15) // 16 * 16
        return part.view(dtype).view(shape)


def pack(programs: Sequence[TorchProgram], shards: Sequence[Shards]) -> dict[int, list[torch.Tensor]]:
    """Per peer the bytes that it gets, to be laid end to end; parts start on 16-byte boundaries."""
    outgoing: dict[int, list[torch.Tensor]] = {}
    for program, held in zip(programs, shards):
        for peer, parts in program.outgoing.items():
            for p in parts:
                data = flat_bytes(_source(held, p).contiguous())
                gap = -data.numel() % 16
                outgoing.setdefault(peer, []).extend([data, data.new_empty(gap)] if gap else [data])
    return outgoing


def incoming_bytes(programs: Sequence[TorchProgram], dtypes: Sequence[torch.dtype]) -> dict[int, int]:
    """Per peer how many bytes come from it: the lengths of what the other side packs."""
    incoming: dict[int, int] = {}
    for program, dtype in zip(programs, dtypes):
        for fills in program.fills.values():
            for fill in fills:
                for p in fill.parts:
                    if p.owner is not None:
                        incoming[p.owner] = incoming.get(p.owner, 0) + (p.size * dtype.itemsize + 15) // 16 * 16
    return incoming


def build_shards(program: TorchProgram, held: Shards, of: Spec, dst: Layout, received: Mapping[int, ByteStream],
                 into: Mapping[int, torch.Tensor] = MappingProxyType({})) -> Shards:
    """The new shards of this process's ranks, in this memory where there is any, from those that it holds of a tensor
    and the bytes that came."""
    built: Shards = {}
    for rank, (shape, zero) in program.shapes.items():
        device = world().device(dst.placement.type, rank)
        shard = into[rank] if rank in into else torch.empty_strided(
            shape, dense(shape, of.stride), dtype=of.dtype, device=device)
        if zero:
            shard.zero_()
        for at, size, parts in program.fills[rank]:
            terms = [_source(held, p) if p.owner is None else received[p.owner].read(size, p.size, of.dtype)
                     for p in parts]
            _reduce(shard if at is None else shard[at], terms, program.op)
        built[rank] = shard
    return built


def _source(held: Shards, part: SourcePart) -> torch.Tensor:
    shard = held[part.rank] if part.at is None else held[part.rank][part.at]
    return shard.resolve_conj().resolve_neg()        # what is sent is memory


def _reduce(into: torch.Tensor, terms: list[torch.Tensor], op: str) -> None:
    """Copy one term, or reduce several in order."""
    if len(terms) == 1:
        into.copy_(terms[0])
    elif op == "sum":
        if into.dtype in SIGNED:
            into, terms = into.view(SIGNED[into.dtype]), [term.view(SIGNED[term.dtype]) for term in terms]
        # the first two at once: a copy of the first, to add to, would cost a pass over memory
        dtype = accumulation_dtype(into.dtype)
        first, second, *rest = (term.to(into.device, dtype) for term in terms)
        total = torch.add(first, second, out=into) if dtype is into.dtype else torch.add(first, second)
        for term in rest:
            total += term
        if total is not into:
            into.copy_(total)
    else:
        pick = torch.maximum if op == "max" else torch.minimum
        best = terms[0].to(into.device)
        for term in terms[1:]:
            best = pick(best, term.to(into.device))
        into.copy_(best)
