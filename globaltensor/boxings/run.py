"""Doing a boxing: the steps of a plan, for one tensor or many at once.

Each step is compiled, once per pair of layouts and shape, to what this process has to do: the parts it sends to
other processes, and for each rank that it drives the pieces of the new shard. Ranks of this process are read in
place; the rest comes by `exchange`, all tensors of one step in one message per peer. Terms of a sum are added
in the order of their ranks, in float32 for the 16-bit floats, so every rank gets the same bits.
"""
from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from globaltensor.boxings import native, watch
from globaltensor.boxings.plan import bytes_received, plan
from globaltensor.boxings.route import route
from globaltensor.errors import where
from globaltensor.layouts.layout import Layout, Shape, Spec, slices, spec, volume
from globaltensor.runtime.exchange import exchange
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.world import world

Shards = dict[int, torch.Tensor]
Index = tuple[slice, ...]


class Part(NamedTuple):
    """A part of the shard of `rank`; `at` None is the whole shard. Of another process where `owner` is not None."""

    rank: int
    at: Index | None
    size: int
    owner: int | None


class Fill(NamedTuple):
    """Where in the new shard (None: all of it) the reduction of some parts goes, and the shape of it."""

    at: Index | None
    shape: Shape
    parts: tuple[Part, ...]


class Program(NamedTuple):
    """One step as this process does it."""

    shapes: dict[int, tuple[Shape, bool]]            # per driven rank: its new shard, and whether to zero it first
    fills: dict[int, tuple[Fill, ...]]
    outgoing: dict[int, tuple[Part, ...]]            # per peer process, in the order both sides agree on
    op: str
    tag: int                                         # the same on all ranks, and seldom that of another step


class Boxed(NamedTuple):
    """A tensor to move: its spec, its shards on this process, and the layout to reach."""

    spec: Spec
    shards: Shards
    dst: Layout


def box(items: Sequence[Boxed], op: str = watch.EXPLICIT) -> list[Shards]:
    """The shards of every item in its new layout, moved together. `op` says what for. Never aliases the old ones,
    except where a layout does not change.

    Raises BoxingError where a `gt.boxing` block does not allow it, before anything moves.
    """
    found = []
    if torch_ext is not None:
        found = [None if i.spec.layout is i.dst else native.find_boxing(i.spec, i.dst) for i in items]
    if found and all(f is not None or i.spec.layout is i.dst for f, i in zip(found, items)):
        if not any(found):
            return [item.shards for item in items]
        if not watch.watched():
            return _natively(items, found, op)
    else:
        found = []
    machine = world().machine
    plans = [plan(i.spec.layout, i.dst, i.spec.shape, i.spec.nbytes, machine).layouts for i in items]
    moves = [k for k, steps in enumerate(plans) if len(steps) > 1]
    if not moves:
        return [item.shards for item in items]
    watched = watch.watched()
    if watched:
        began, nbytes, place = time.perf_counter(), _most_received(items, plans), where()
        watch.permit(op, items[moves[0]].spec.layout, items[moves[0]].dst, nbytes)
    shards = _natively(items, found, op) if found else [item.shards for item in items]
    for step in () if found else range(max(map(len, plans)) - 1):
        now = [k for k in moves if len(plans[k]) > step + 1]
        programs = [_compile(plans[k][step], plans[k][step + 1], items[k].spec.shape) for k in now]
        received = _exchange(programs, [shards[k] for k in now], [items[k].spec.dtype for k in now], op)
        for k, program in zip(now, programs):
            shards[k] = _build(program, shards[k], items[k], plans[k][step + 1], received)
    if watched and watch.recording():
        first = items[moves[0]]
        watch.note(watch.Move(op, place, first.spec.layout, first.dst, nbytes, time.perf_counter() - began, len(moves)))
    return shards


def boxed(tensors: Sequence[Any], dsts: Sequence[Layout], op: str) -> list[Any]:
    """Global tensors in other layouts, moved together; one that lies there already is itself."""
    moved = box([Boxed(t.spec, t.shards, dst) for t, dst in zip(tensors, dsts)], op)
    return [t if t.spec.layout is dst else type(t).wrap(spec(dst, t.spec.shape, None, t.spec.dtype), shards)
            for t, dst, shards in zip(tensors, dsts, moved)]


def _natively(items: Sequence[Boxed], found: list[Any], op: str) -> list[Shards]:
    made = iter(torch_ext.move_shards([(f, i.shards) for f, i in zip(found, items) if f is not None], op))
    return [i.shards if f is None else next(made) for f, i in zip(found, items)]


def _most_received(items: Sequence[Boxed], plans: list[tuple[Layout, ...]]) -> int:
    total: dict[int, int] = {}
    for item, steps in zip(items, plans):
        for rank, n in _received(steps, item.spec.shape, item.spec.dtype.itemsize).items():
            total[rank] = total.get(rank, 0) + n
    return max(total.values(), default=0)


_received = lru_cache(10_000)(bytes_received)


@lru_cache(20_000)
def _compile(src: Layout, dst: Layout, shape: Shape) -> Program:
    mine = set(world().local_ranks)
    shapes: dict[int, tuple[Shape, bool]] = {}
    fills: dict[int, tuple[Fill, ...]] = {}
    outgoing: dict[int, list[Part]] = {}
    way = route(src, dst, shape)

    def part(source: int, box: tuple) -> Part:
        held = src.box(shape, source)
        return Part(source, None if held == box else slices(box, held), volume(box),
                    None if source in mine else source)

    for rank, pieces in way.pieces.items():
        if rank not in mine:
            for box, sources in pieces:
                for source in sources:
                    if source in mine:
                        outgoing.setdefault(rank, []).append(part(source, box))
            continue
        held = dst.box(shape, rank)
        covered, filled = 0, []
        for box, sources in pieces:
            covered += volume(box)
            parts = tuple(part(source, box) for source in sources)
            filled.append(Fill(None if box == held else slices(box, held), tuple(b - a for a, b in box), parts))
        shapes[rank] = (dst.local_shape(shape, rank), covered < volume(held))
        fills[rank] = tuple(filled)
    tag = zlib.crc32(f"{src} {dst} {shape}".encode())
    return Program(shapes, fills, {r: tuple(parts) for r, parts in outgoing.items()}, way.op, tag)


class _Stream:
    """Bytes from one peer, read front to back as tensors."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.at = data, 0

    def take(self, shape: Shape, size: int, dtype: torch.dtype) -> torch.Tensor:
        end = self.at + size * dtype.itemsize
        part, self.at = self.data[self.at:end], (end + 15) // 16 * 16
        return part.view(dtype).view(shape)


def _packed(programs: list[Program], shards: list[Shards]) -> dict[int, list[torch.Tensor]]:
    """Per peer the bytes it gets, to be laid end to end; parts start on 16-byte boundaries."""
    outgoing: dict[int, list[torch.Tensor]] = {}
    for program, held in zip(programs, shards):
        for peer, parts in program.outgoing.items():
            for p in parts:
                data = _read(held, p).contiguous().view(-1).view(torch.uint8)
                gap = -data.numel() % 16
                outgoing.setdefault(peer, []).extend([data, data.new_empty(gap)] if gap else [data])
    return outgoing


def _expected(programs: list[Program], dtypes: list[torch.dtype]) -> dict[int, int]:
    """Per peer how many bytes come from it."""
    incoming: dict[int, int] = {}
    for program, dtype in zip(programs, dtypes):
        for fills in program.fills.values():
            for fill in fills:
                for p in fill.parts:
                    if p.owner is not None:
                        incoming[p.owner] = incoming.get(p.owner, 0) + (p.size * dtype.itemsize + 15) // 16 * 16
    return incoming


def _exchange(programs: list[Program], shards: list[Shards], dtypes: list[torch.dtype], op: str) -> dict[int, _Stream]:
    """Send what other processes want of these tensors, and get what they send."""
    outgoing, incoming = _packed(programs, shards), _expected(programs, dtypes)
    if not outgoing and not incoming:
        return {}
    device = next(iter(next(s for s in shards if s).values())).device if any(shards) else "cpu"
    buffers = {peer: torch.empty(n, dtype=torch.uint8, device=device) for peer, n in incoming.items()}
    tag = sum(k * program.tag + dtype.itemsize for k, (program, dtype) in enumerate(zip(programs, dtypes), 1))
    exchange({peer: torch.cat(parts) if len(parts) > 1 else parts[0] for peer, parts in outgoing.items()}, buffers,
                  f"the boxing for {op}", tag & 0x3FFFFFFF | 8)
    return {peer: _Stream(data) for peer, data in buffers.items()}


class Letter:
    """One step of a boxing of many tensors whose two sides do not meet: what is sent is written by one and read, later,
    by the other. The tensors have these specs, and go to these layouts."""

    def __init__(self, specs: Sequence[Spec], dsts: Sequence[Layout]) -> None:
        self.specs, self.dsts = specs, dsts
        self.programs = [_compile(s.layout, dst, s.shape) for s, dst in zip(specs, dsts)]

    def write(self, shards: list[Shards]) -> dict[int, list[torch.Tensor]]:
        """Per peer the bytes it gets, to be laid end to end."""
        return _packed(self.programs, shards)

    def sizes(self) -> dict[int, int]:
        """Per peer how many bytes come from it."""
        return _expected(self.programs, [s.dtype for s in self.specs])

    def read(self, received: dict[int, torch.Tensor]) -> list[Shards]:
        """The new shards, of the bytes that came: parts of the same memory where they came in one piece."""
        streams = {peer: _Stream(data) for peer, data in received.items()}
        return [_built(p, s, dst, streams) for p, s, dst in zip(self.programs, self.specs, self.dsts)]


def _built(program: Program, of: Spec, dst: Layout, received: dict[int, _Stream]) -> Shards:
    (rank, fills), *others = program.fills.items() or [(-1, ())]
    if not others and len(fills) == 1 and fills[0].at is None and len(fills[0].parts) == 1:
        (_, shape, (part,)), = fills
        return {rank: received[part.owner].take(shape, part.size, of.dtype)}
    return _build(program, {}, Boxed(of, {}, dst), dst, received)


def _read(held: Shards, part: Part) -> torch.Tensor:
    return held[part.rank] if part.at is None else held[part.rank][part.at]


def _build(program: Program, held: Shards, item: Boxed, dst: Layout, received: dict[int, _Stream]) -> Shards:
    dtype, built = item.spec.dtype, {}
    for rank, (shape, zero) in program.shapes.items():
        device = world().device(dst.placement.type, rank)
        made = (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=device)
        for at, size, parts in program.fills[rank]:
            terms = [_read(held, p) if p.owner is None else received[p.owner].take(size, p.size, dtype) for p in parts]
            _reduce(made if at is None else made[at], terms, program.op)
        built[rank] = made
    return built


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in: float32 for the 16-bit floats."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _reduce(into: torch.Tensor, terms: list[torch.Tensor], op: str) -> None:
    """Copy one term, or reduce several in order."""
    if len(terms) == 1:
        into.copy_(terms[0])
    elif op == "sum":
        total = torch.add(*(term.to(into.device, wide(into.dtype)) for term in terms[:2]))
        for term in terms[2:]:
            total += term.to(into.device)
        into.copy_(total)
    else:
        pick = torch.maximum if op == "max" else torch.minimum
        best = terms[0].to(into.device)
        for term in terms[1:]:
            best = pick(best, term.to(into.device))
        into.copy_(best)
