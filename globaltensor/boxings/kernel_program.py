"""One direct step of a boxing, compiled to what the native kernel runs: packed regions and corners.

`csrc/kernels/region.h` is the other side of this file. A region is a box that is read from the shards of some ranks,
reduced in their order, and stored into the shards of some ranks. The pieces of `route.py` become regions like this:

    S(0) -> B   a copy                        each rank pulls it
    P -> S(0)   a sum that one rank wants     that rank pulls it
    P -> B      a sum that several want       small: each of them makes it for itself
                                              large: it is cut into parts; each makes one and stores it into all of them
                                              in one process that drives them all: made once, stored into all of them
    B -> P      what no piece covers          zeros

So where ranks can reach each other's memory, one pass makes what takes two steps of a plan (reduce-scatter and
all-gather), with the same bytes: an element of a sum of n parts for m ranks is read n - 1 times and stored m - 1 times
across ranks, if a rank makes it that holds one of the parts and wants the sum.
"""
from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from globaltensor.boxings.route import route
from globaltensor.layouts.layout import Box, Layout, Shape, layout, meet, volume
from globaltensor.layouts.sbp import Sbp, broadcast

DIMS = 8                                             # GT_DIMS: tensors of more take the way through Python
SHARED_FROM = 32 * 1024                              # bytes of all terms of a sum from which it is made in parts
OPS = {"": 0, "sum": 0, "max": 1, "min": 2}          # enum gt_op
I_READ, IT_READS, I_WRITE, IT_WRITES = 1, 2, 4, 8    # enum gt_tie

_region = struct.Struct(f"=6i{DIMS}q")               # ndim, sources, targets, part, parts, first, size
_corner = struct.Struct(f"={1 + DIMS}q")             # shard, start


class Program(NamedTuple):
    """What a process runs. `partners` (as in the tables of shards, ascending) and what ties it to each, a set of enum
    gt_tie, are for a process that drives one rank, else empty."""

    regions: bytes                                   # gt_region[count]
    corners: bytes                                   # gt_corner[]
    count: int
    op: int                                          # enum gt_op
    partners: tuple[int, ...]
    ties: tuple[int, ...]


class Job(NamedTuple):
    """A region as `rank` does it: part `part` of `parts` of a box, in ranks instead of indices of shards."""

    rank: int
    box: Box
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    part: int = 0
    parts: int = 1


def compile_program(src: Layout, dst: Layout, shape: Shape, itemsize: int, mine: Collection[int],
                    index: Mapping[int, int] | None = None, shared: bool = False) -> Program:
    """The direct step from src to dst, as the process that drives the ranks `mine` does it; for the caller to keep.

    `index[rank]` is the place of a rank in the tables of shards (None: the rank itself). `shared` says that every rank
    can store into the results of the others. All processes must be given the same, but for `mine` and `index`. Of the
    ranks in `mine`, each must be able to read the shards of all the others.
    """
    assert len(shape) <= DIMS, f"{len(shape)} dims are too many for the kernel"
    everything = jobs(src, dst, shape, itemsize, shared and len(mine) == 1)
    here = [job for job in everything if job.rank in mine]
    here = _merged(here, src) if len(mine) > 1 else _rotated(here)
    place = index.__getitem__ if index is not None else int
    regions, corners = bytearray(), bytearray()
    first, pad = 0, (0,) * (DIMS - len(shape))
    for job in here:
        size = tuple(stop - start for start, stop in job.box)
        regions += _region.pack(len(shape), len(job.sources), len(job.targets), job.part, job.parts, first, *size, *pad)
        first += len(job.sources) + len(job.targets)
        for held, ranks in ((src, job.sources), (dst, job.targets)):
            for rank in ranks:
                start = (a - b for (a, _), (b, _) in zip(job.box, held.box(shape, rank)))
                corners += _corner.pack(place(rank), *start, *pad)
    bits = ties(everything, *mine) if len(mine) == 1 else {}
    partners = sorted((place(rank), tie) for rank, tie in bits.items())
    return Program(bytes(regions), bytes(corners), len(here), OPS[route(src, dst, shape).op],
                   tuple(p for p, _ in partners), tuple(tie for _, tie in partners))


def direct(src: Layout, dst: Layout) -> list[Layout]:
    """The layouts of the fewest direct steps from src to dst: [src, dst], but where sums and maxima are mixed.

    These do not commute: the innermost pending axes of one op are reduced first.
    """
    if src is dst:
        return [src]
    ops = [s.op for s in src.sbp if s.is_partial]
    if len(set(ops)) < 2:
        return [src, dst]
    state: list[Sbp] = list(src.sbp)
    for axis in reversed(range(len(state))):
        if state[axis].is_partial:
            if state[axis].op != ops[-1]:
                break
            state[axis] = broadcast
    return [src, *direct(layout(src.placement, tuple(state)), dst)]


@lru_cache(20_000)
def jobs(src: Layout, dst: Layout, shape: Shape, itemsize: int, shared: bool) -> tuple[Job, ...]:
    """What all ranks do, those of other processes too: every element of every new shard is made once."""
    same = set(src.placement.flat) == set(dst.placement.flat)
    made: list[Job] = []
    sums: dict[tuple, list[Job]] = {}                # those that are equal, made of copies of the same terms
    for rank, pieces in route(src, dst, shape).pieces.items():
        rest = [dst.box(shape, rank)]
        for box, sources in pieces:
            rest = [left for whole in rest for left in _without(whole, box)]
            job = Job(rank, box, sources, (rank,))
            large = volume(box) * itemsize * len(sources) >= SHARED_FROM
            if shared and large and len(sources) > 1:
                sums.setdefault((box, _terms(src, sources)), []).append(job)
            else:
                made.append(job)
        made += [Job(rank, box, (), (rank,)) for box in rest if volume(box)]
    for alike in sums.values():
        # Those that hold a term read one less than the others. Between placements these might be too few.
        makers = [job for job in alike if same and job.rank in job.sources] or alike
        ranks = tuple(job.rank for job in alike)
        made += [job._replace(targets=ranks, part=i, parts=len(makers)) for i, job in enumerate(makers)]
    return tuple(made)


def _terms(src: Layout, sources: tuple[int, ...]) -> tuple:
    """What the shards of these ranks are: which terms of the pending sum. Two ranks may hold copies of one."""
    coords = src.placement.coords
    return tuple(tuple(i for i, s in zip(coords[rank], src.sbp) if s.is_partial) for rank in sources)


def ties(made: Sequence[Job], me: int) -> dict[int, int]:
    """Rank -> what ties rank `me` to it, a set of bits."""
    bits: dict[int, int] = {}
    for job in made:
        if job.rank == me:
            for ranks, bit in ((job.sources, I_READ), (job.targets, I_WRITE)):
                for rank in ranks:
                    bits[rank] = bits.get(rank, 0) | bit
        else:
            for ranks, bit in ((job.sources, IT_READS), (job.targets, IT_WRITES)):
                if me in ranks:
                    bits[job.rank] = bits.get(job.rank, 0) | bit
    bits.pop(me, None)
    return bits


def _merged(made: list[Job], src: Layout) -> list[Job]:
    """In a process that drives several ranks, what they want alike of several sources is made once."""
    found: dict[tuple, Job] = {}
    for job in made:
        key = (job.box, _terms(src, job.sources), job.rank if len(job.sources) == 1 else None)
        same = found.get(key)
        found[key] = job if same is None else same._replace(targets=same.targets + job.targets)
    return list(found.values())


def _rotated(made: list[Job]) -> list[Job]:
    """What one rank does, from its own part on, so that not all ranks read the same one first."""
    ranks = sorted({rank for job in made for rank in (job.rank, *job.sources)})
    turn = {rank: (i - ranks.index(made[0].rank)) % len(ranks) for i, rank in enumerate(ranks)}
    return sorted(made, key=lambda job: turn[job.sources[0]] if job.sources else 0)


def _without(box: Box, cut: Box) -> list[Box]:
    """`box` without `cut`, as boxes."""
    inner = meet(box, cut)
    if inner is None:
        return [box]
    rest = []
    for d, ((start, stop), (low, high)) in enumerate(zip(box, inner)):
        rest += [(*inner[:d], side, *box[d + 1:]) for side in ((start, low), (high, stop)) if side[0] < side[1]]
    return rest
