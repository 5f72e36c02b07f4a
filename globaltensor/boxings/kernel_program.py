"""One direct step of a boxing, compiled to what the native kernel runs: packed regions and corners.

`csrc/kernels/region.h` is the other side of this file. The kernel reads a region from the shards of some ranks,
reduces these in their order, and stores the result into the shards of some ranks. Who does what follows from the
pieces of `route.py`:

    S(0) -> B   a copy                          each rank pulls it
    P -> S(0)   a sum that one rank needs       that rank pulls it
    P -> B      a sum that several ranks need   small: each computes it for itself
                                                large: it is split; each computes a part and stores it into all of them
                                                in one process that drives them all: computed once, stored into all
    B -> P      what no piece covers            zeros

So where ranks can reach each other's memory, one pass does what takes two steps of a plan (reduce-scatter and
all-gather), with the same bytes: an element of a sum of n terms for m ranks is read n - 1 times and stored m - 1 times
across ranks, if it is computed by a rank that holds one of the terms and needs the sum.
"""
from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from globaltensor.boxings.listed_route import SourcedRegion
from globaltensor.boxings.route import reduced_innermost, route
from globaltensor.layouts.layout import Layout, Shape
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.regions import Region, subtract, volume

DIMS = 8                                             # GT_DIMS: tensors of more dims are boxed in Python
SHARED_FROM = 32 * 1024                              # bytes of all terms of a sum, from which it is split
OPS = {"": 0, "sum": 0, "max": 1, "min": 2}          # enum gt_op
I_READ, IT_READS, I_WRITE, IT_WRITES = 1, 2, 4, 8    # enum gt_tie

_region = struct.Struct(f"=6i{DIMS}q")               # ndim, sources, targets, part, parts, first, size
_corner = struct.Struct(f"={1 + DIMS}q")             # shard, start

Terms = tuple[tuple[int, ...], ...]                  # per source its coordinates on the pending axes


class KernelProgram(NamedTuple):
    """What a process runs. `partners` (indices into the tables of shards, ascending) and what ties it to each, a set of
    enum gt_tie, are for a process that drives one rank, else empty."""

    regions: bytes                                   # gt_region[region_count]
    corners: bytes                                   # gt_corner[]
    region_count: int
    op: int                                          # enum gt_op
    partners: tuple[int, ...]
    ties: tuple[int, ...]
    reusable: bool = False                           # new shards may be the old ones: an element is read where written
    unmoved: bool = False                            # each rank's new shard has what its old one has


class RegionJob(NamedTuple):
    """What `rank` computes: part `part` of `parts` of a region, reduced from the shards of `sources` and stored into
    those of `targets`."""

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
    can store into the results of the others. All processes must pass the same arguments, but for `mine` and `index`. Of
    the ranks in `mine`, each must be able to read the shards of all the others.
    """
    assert len(shape) <= DIMS, f"{len(shape)} dims are too many for the kernel"
    all_jobs = region_jobs(src, dst, shape, itemsize, shared and len(mine) == 1)
    jobs = [job for job in all_jobs if job.rank in mine]
    jobs = _merge_targets(jobs, src) if len(mine) > 1 else _rotate(jobs)
    place = index.__getitem__ if index is not None else int
    regions, corners = bytearray(), bytearray()
    first = 0
    for job in jobs:
        size = tuple(stop - start for start, stop in job.region)
        regions += pack_region(len(job.sources), len(job.targets), job.part, job.parts, first, size)
        first += len(job.sources) + len(job.targets)
        for held, ranks in ((src, job.sources), (dst, job.targets)):
            for rank in ranks:
                start = [a - b for (a, _), (b, _) in zip(job.region, held.region(shape, rank))]
                corners += pack_corner(place(rank), start)
    bits = ties(all_jobs, *mine) if len(mine) == 1 else {}
    if isinstance(src, RankRegions) and not isinstance(dst, RankRegions):
        # Ranks that hold the parts of a view say by that which part they mean. One that only gives must ask the others
        # whether they mean the same: of x[0] and of x[7], each might give and none take.
        bits = {rank: bit | I_READ | IT_READS for rank, bit in bits.items()}
    partners = sorted((place(rank), tie) for rank, tie in bits.items())
    return KernelProgram(bytes(regions), bytes(corners), len(jobs), OPS[route(src, dst, shape).op],
                         tuple(p for p, _ in partners), tuple(tie for _, tie in partners),
                         _reads_what_it_writes(all_jobs if len(mine) == 1 else jobs, src, dst, shape),
                         all(job.sources == job.targets == (job.rank,) for job in all_jobs)
                         and _same_regions(src, dst, shape))


def _reads_what_it_writes(jobs: Sequence[RegionJob], src: Layout, dst: Layout, shape: Shape) -> bool:
    """Is all that is read of a shard also written in its place, by the one job that reads it? Each element of the new
    shards is written once, and jobs read before they write, so these may be the old ones."""
    if not any(len(job.sources) > 1 for job in jobs):
        return False                                 # a copy in its place would be none
    return _same_regions(src, dst, shape) and all(set(job.sources) <= set(job.targets) for job in jobs)


def _same_regions(src: Layout, dst: Layout, shape: Shape) -> bool:
    """Of all ranks, those with no job too: a new shard may be empty."""
    return src.placement.flat == dst.placement.flat and all(
        src.region(shape, rank) == dst.region(shape, rank) for rank in src.placement.coords)


def pack_region(sources: int, targets: int, part: int, parts: int, first: int, size: Sequence[int]) -> bytes:
    """A gt_region: its corners are those from `first` on."""
    return _region.pack(len(size), sources, targets, part, parts, first, *size, *(0,) * (DIMS - len(size)))


def pack_corner(shard: int, start: Sequence[int]) -> bytes:
    """A gt_corner: a place in a table of shards, and where in that shard the region begins."""
    return _corner.pack(shard, *start, *(0,) * (DIMS - len(start)))


def direct_steps(src: Layout, dst: Layout) -> list[Layout]:
    """The layouts of the fewest steps from src to dst: [src, dst], but where sums and maxima are pending at once."""
    if src is dst:
        return [src]
    between = reduced_innermost(src)
    return [src, dst] if between is None else [src, *direct_steps(between, dst)]


@remembered
def region_jobs(src: Layout, dst: Layout, shape: Shape, itemsize: int, shared: bool) -> tuple[RegionJob, ...]:
    """What all ranks do, those of other processes too: every element of every new shard is written once."""
    same = set(src.placement.flat) == set(dst.placement.flat)
    jobs: list[RegionJob] = []
    sums: dict[tuple[Region, Terms], list[RegionJob]] = {}       # equal sums, of copies of the same terms
    step = route(src, dst, shape)
    for rank in dst.placement.flat:
        wanted, pieces = dst.region(shape, rank), step.pieces(rank)
        for region, sources in pieces:
            job = RegionJob(rank, region, sources, (rank,))
            large = volume(region) * itemsize * len(sources) >= SHARED_FROM
            if shared and large and len(sources) > 1:
                sums.setdefault((region, _terms(src, sources)), []).append(job)
            else:
                jobs.append(job)
        if sum(volume(region) for region, _ in pieces) < volume(wanted):
            jobs += [RegionJob(rank, region, (), (rank,)) for region in _uncovered(wanted, pieces)]
    for equal in sums.values():
        # A rank that holds a term reads one shard less than the others. Between placements these might be too few.
        workers = [job for job in equal if same and job.rank in job.sources] or equal
        ranks = tuple(job.rank for job in equal)
        jobs += [job._replace(targets=ranks, part=i, parts=len(workers)) for i, job in enumerate(workers)]
    return tuple(jobs)


def _uncovered(wanted: Region, pieces: Sequence[SourcedRegion]) -> list[Region]:
    """What no piece covers."""
    rest = [wanted]
    for region, _ in pieces:
        rest = [left for uncovered in rest for left in subtract(uncovered, region)]
    return [region for region in rest if volume(region)]


@remembered
def _terms(src: Layout, sources: tuple[int, ...]) -> Terms:
    """What the shards of these ranks are: which terms of the pending sum. Two ranks may hold copies of one."""
    coords = src.placement.coords
    return tuple(tuple(i for i, s in zip(coords[rank], src.sbp) if s.is_partial) for rank in sources)


def ties(jobs: Sequence[RegionJob], me: int) -> dict[int, int]:
    """Rank -> what ties rank `me` to it, a set of bits."""
    bits: dict[int, int] = {}
    for job in jobs:
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


def _merge_targets(jobs: list[RegionJob], src: Layout) -> list[RegionJob]:
    """In a process that drives several ranks, a reduction that several of them need is computed once."""
    merged: dict[tuple[Region, Terms, int | None], RegionJob] = {}
    for job in jobs:
        # Copies are not merged: each rank pulls its own.
        key = (job.region, _terms(src, job.sources), job.rank if len(job.sources) == 1 else None)
        same = merged.get(key)
        merged[key] = job if same is None else same._replace(targets=same.targets + job.targets)
    return list(merged.values())


def _rotate(jobs: list[RegionJob]) -> list[RegionJob]:
    """What one rank does, beginning with its own part, so that not all ranks read the same one first."""
    ranks = sorted({rank for job in jobs for rank in (job.rank, *job.sources)})
    turn = {rank: (i - ranks.index(jobs[0].rank)) % len(ranks) for i, rank in enumerate(ranks)}
    return sorted(jobs, key=lambda job: turn[job.sources[0]] if job.sources else 0)
