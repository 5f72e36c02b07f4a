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

from globaltensor.boxings.route import reduced_innermost, route
from globaltensor.layouts.layout import Layout, Shape
from globaltensor.layouts.regions import Region, subtract, volume

DIMS = 8                                             # GT_DIMS: tensors of more take the way through Python
SHARED_FROM = 32 * 1024                              # bytes of all terms of a sum from which it is made in parts
OPS = {"": 0, "sum": 0, "max": 1, "min": 2}          # enum gt_op
I_READ, IT_READS, I_WRITE, IT_WRITES = 1, 2, 4, 8    # enum gt_tie

_region = struct.Struct(f"=6i{DIMS}q")               # ndim, sources, targets, part, parts, first, size
_corner = struct.Struct(f"={1 + DIMS}q")             # shard, start


class KernelProgram(NamedTuple):
    """What a process runs. `partners` (as in the tables of shards, ascending) and what ties it to each, a set of enum
    gt_tie, are for a process that drives one rank, else empty."""

    regions: bytes                                   # gt_region[count]
    corners: bytes                                   # gt_corner[]
    count: int
    op: int                                          # enum gt_op
    partners: tuple[int, ...]
    ties: tuple[int, ...]


class RegionJob(NamedTuple):
    """A region as `rank` does it: part `part` of `parts` of a box, in ranks instead of indices of shards."""

    rank: int
    region: Region
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    part: int = 0
    parts: int = 1


def compile_program(src: Layout, dst: Layout, shape: Shape, itemsize: int, mine: Collection[int],
                    index: Mapping[int, int] | None = None, shared: bool = False) -> KernelProgram:
    """The direct step from src to dst, as the process that drives the ranks `mine` does it; for the caller to keep.

    `index[rank]` is the place of a rank in the tables of shards (None: the rank itself). `shared` says that every rank
    can store into the results of the others. All processes must be given the same, but for `mine` and `index`. Of the
    ranks in `mine`, each must be able to read the shards of all the others.
    """
    assert len(shape) <= DIMS, f"{len(shape)} dims are too many for the kernel"
    everything = region_jobs(src, dst, shape, itemsize, shared and len(mine) == 1)
    here = [job for job in everything if job.rank in mine]
    here = _merged(here, src) if len(mine) > 1 else _rotated(here)
    place = index.__getitem__ if index is not None else int
    regions, corners = bytearray(), bytearray()
    first, pad = 0, (0,) * (DIMS - len(shape))
    for job in here:
        size = tuple(stop - start for start, stop in job.region)
        regions += _region.pack(len(shape), len(job.sources), len(job.targets), job.part, job.parts, first, *size, *pad)
        first += len(job.sources) + len(job.targets)
        for held, ranks in ((src, job.sources), (dst, job.targets)):
            for rank in ranks:
                start = (a - b for (a, _), (b, _) in zip(job.region, held.region(shape, rank)))
                corners += _corner.pack(place(rank), *start, *pad)
    bits = ties(everything, *mine) if len(mine) == 1 else {}
    partners = sorted((place(rank), tie) for rank, tie in bits.items())
    return KernelProgram(bytes(regions), bytes(corners), len(here), OPS[route(src, dst, shape).op],
                   tuple(p for p, _ in partners), tuple(tie for _, tie in partners))


def direct_steps(src: Layout, dst: Layout) -> list[Layout]:
    """The layouts of the fewest steps from src to dst: [src, dst], but where sums and maxima are pending at once."""
    if src is dst:
        return [src]
    between = reduced_innermost(src)
    return [src, dst] if between is None else [src, *direct_steps(between, dst)]


@lru_cache(20_000)
def region_jobs(src: Layout, dst: Layout, shape: Shape, itemsize: int, shared: bool) -> tuple[RegionJob, ...]:
    """What all ranks do, those of other processes too: every element of every new shard is made once."""
    same = set(src.placement.flat) == set(dst.placement.flat)
    made: list[RegionJob] = []
    sums: dict[tuple, list[RegionJob]] = {}                # those that are equal, made of copies of the same terms
    for rank, pieces in route(src, dst, shape).pieces.items():
        rest = [dst.region(shape, rank)]
        for region, sources in pieces:
            rest = [left for whole in rest for left in subtract(whole, region)]
            job = RegionJob(rank, region, sources, (rank,))
            large = volume(region) * itemsize * len(sources) >= SHARED_FROM
            if shared and large and len(sources) > 1:
                sums.setdefault((region, _terms(src, sources)), []).append(job)
            else:
                made.append(job)
        made += [RegionJob(rank, region, (), (rank,)) for region in rest if volume(region)]
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


def ties(made: Sequence[RegionJob], me: int) -> dict[int, int]:
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


def _merged(made: list[RegionJob], src: Layout) -> list[RegionJob]:
    """In a process that drives several ranks, what they want alike of several sources is made once."""
    found: dict[tuple, RegionJob] = {}
    for job in made:
        key = (job.region, _terms(src, job.sources), job.rank if len(job.sources) == 1 else None)
        same = found.get(key)
        found[key] = job if same is None else same._replace(targets=same.targets + job.targets)
    return list(found.values())


def _rotated(made: list[RegionJob]) -> list[RegionJob]:
    """What one rank does, from its own part on, so that not all ranks read the same one first."""
    ranks = sorted({rank for job in made for rank in (job.rank, *job.sources)})
    turn = {rank: (i - ranks.index(made[0].rank)) % len(ranks) for i, rank in enumerate(ranks)}
    return sorted(made, key=lambda job: turn[job.sources[0]] if job.sources else 0)
