"""One step of a boxing: what every rank takes, and from which ranks.

A step from layout `src` to layout `dst` is specified from the side of the destination. Rank r needs a region of the
global tensor; each *piece* of that region is the reduction of the parts that some source ranks hold of it:

    S(0) -> B   on 2 ranks    r0: [0:4] from r0, [4:8] from r1          a piece each, one source each (all-gather)
    P -> S(0)   on 2 ranks    r0: [0:4] from r0 + r1                    one piece, summed             (reduce-scatter)
    S(0) -> S(1)              r0: [0:4, 0:3] from r0, [4:8, 0:3] from r1                              (all-to-all)

So one kind of step serves every pair of layouts, of one placement or two, and the bytes that it moves follow from it.
A rank takes its own part where it holds one; where several ranks hold the same, the one that has sent least sends. What
no piece covers is zero: a rank's share of a pending sum.
"""
from __future__ import annotations

from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

from globaltensor.layouts.layout import Layout, Shape
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.layouts.regions import Region, intersect, volume
from globaltensor.layouts.sbp import broadcast

Holders = dict[tuple[int, ...], dict[Region, list[int]]]         # term of a pending sum -> region -> ranks that hold it


class SourcedRegion(NamedTuple):
    """`region` of the global tensor is the reduction of the parts of these ranks, in this order."""

    region: Region
    sources: tuple[int, ...]


class BoxingRoute(NamedTuple):
    """What every destination rank takes: `pieces[rank]`, reduced by `op` where a piece has several sources."""

    pieces: dict[int, tuple[SourcedRegion, ...]]
    op: str


class StepTraffic(NamedTuple):
    """Elements that cross between ranks in one step: by the rank that receives most, and sends most."""

    received: int
    sent: int
    touched: int                                     # by the rank that reads most, its own part included


def reduced_innermost(src: Layout) -> Layout | None:
    """Sums and maxima do not commute: where axes of several ops are pending, src once the innermost ones of one op are
    reduced. None where all pending axes share an op, which one step can reduce."""
    ops = [s.op for s in src.sbp if s.is_partial]
    if len(set(ops)) < 2:
        return None
    sbp = list(src.sbp)
    for axis in reversed(range(len(sbp))):
        if sbp[axis].is_partial:
            if sbp[axis].op != ops[-1]:
                break
            sbp[axis] = broadcast
    return src.with_sbp(tuple(sbp))


def kept_partial(src: Layout, dst: Layout) -> tuple[bool, ...]:
    """Per axis of src: does a pending sum stay pending?"""
    same = src.placement == dst.placement
    return tuple(same and a.is_partial and a == b for a, b in zip(src.sbp, dst.sbp if same else src.sbp))


@lru_cache(20_000)
def route(src: Layout, dst: Layout, shape: Shape) -> BoxingRoute:
    """The pieces of one step. All pending axes of src that do not stay pending must share one op."""
    kept = kept_partial(src, dst)
    ops = {s.op for s, k in zip(src.sbp, kept) if s.is_partial and not k}
    assert len(ops) <= 1, f"one step cannot reduce {src.sbp}"
    holders = _holders(src, shape)
    sharing = _sharing(src, dst, kept)
    cover = _overlay if isinstance(src, RankRegions) else _cover
    pieces: dict[int, tuple[SourcedRegion, ...]] = {}
    load: dict[int, int] = {}                        # elements that each rank sends so far
    for rank in dst.placement.flat:
        # A sum that stays pending is not added up: the rank keeps the term of its own coordinate there.
        fixed = [src.placement.coords[rank][axis] if keep else None
                 for axis, (s, keep) in enumerate(zip(src.sbp, kept)) if s.is_partial]
        terms = [held for at, held in holders.items() if all(f is None or f == i for f, i in zip(fixed, at))]
        pieces[rank] = tuple(cover(dst.region(shape, rank), rank, terms, holders, sharing.get(rank, []), load))
    return BoxingRoute(pieces, ops.pop() if ops else "")


def _sharing(src: Layout, dst: Layout, kept: tuple[bool, ...]) -> dict[int, list[list[int]]]:
    """Per destination rank, the ranks whose sum is the value there, itself among them: each piece goes to one.

    Only where dst has axes that become a pending sum. Copies of the sum (on broadcast axes) must be divided alike, so
    the lists are sets of ranks that take the same pieces. (Maxima of equal values need no such care.)
    """
    same = src.placement == dst.placement
    loose = [axis for axis, s in enumerate(dst.sbp) if s.is_partial and s.op == "sum" and not (same and kept[axis])]
    if not loose:
        return {}
    groups: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    # Ranks of one group hold terms of the same elements: those that differ only where dst is pending or broadcast.
    for rank, at in dst.placement.coords.items():
        group = tuple(0 if axis in loose or s.is_broadcast or s.op in ("max", "min") else i
                      for axis, (i, s) in enumerate(zip(at, dst.sbp)))
        groups.setdefault(group, {}).setdefault(tuple(at[axis] for axis in loose), []).append(rank)
    return {rank: list(sets.values()) for sets in groups.values() for ranks in sets.values() for rank in ranks}


def _holders(src: Layout, shape: Shape) -> Holders:
    """The coordinates on the pending axes name a term of the sum."""
    holders: Holders = {}
    for rank in src.placement.flat:
        at = tuple(i for i, s in zip(src.placement.coords[rank], src.sbp) if s.is_partial)
        holders.setdefault(at, {}).setdefault(src.region(shape, rank), []).append(rank)
    return holders


def _cover(wanted: Region, rank: int, terms: list[dict[Region, list[int]]], holders: Holders, sharing: list[list[int]],
           load: dict[int, int]) -> list[SourcedRegion]:
    """`wanted` divided along the regions that src holds, each piece with one source per term of the reduction.

    Of ranks that share a pending sum, one that holds a piece takes it: B -> P leaves the value with the first rank
    of the axis, S -> P leaves each rank what it has.
    """
    pieces = []
    for i, region in enumerate(terms[0]):
        part = intersect(region, wanted) if region else wanted       # a 0-dim tensor has the empty region ()
        if part is None:
            continue
        if sharing and rank not in _takers(sharing, {r for held in holders.values() for r in held[region]}, i):
            continue
        pieces.append(SourcedRegion(part, tuple(_pick(held[region], rank, volume(part), load) for held in terms)))
    return pieces


def _overlay(wanted: Region, rank: int, terms: list[dict[Region, list[int]]], holders: Holders,
             sharing: list[list[int]], load: dict[int, int]) -> list[SourcedRegion]:
    """The same where the terms are not divided alike: `wanted` divided along the regions of all of them."""
    parts_of = [[(part, ranks) for region, ranks in held.items() if (part := intersect(region, wanted)) is not None]
                for held in terms]
    edges = [sorted({at for parts in parts_of for part, _ in parts for at in part[d]}) for d in range(len(wanted))]
    pieces = []
    for i, cell in enumerate(product(*map(pairwise, edges))):
        holding = [[r for part, ranks in parts if intersect(part, cell) is not None for r in ranks]
                   for parts in parts_of]
        if sharing and rank not in _takers(sharing, {r for ranks in holding for r in ranks}, i):
            continue
        sources = tuple(_pick(ranks, rank, volume(cell), load) for ranks in holding if ranks)
        if sources:
            pieces.append(SourcedRegion(cell, sources))
    return pieces


def _takers(sharing: list[list[int]], holding: set[int], turn: int) -> list[int]:
    """The set of ranks of which most hold the piece; where that is a tie, they take turns."""
    near = [sum(r in holding for r in ranks) for ranks in sharing]
    best = [ranks for ranks, n in zip(sharing, near) if n == max(near)]
    return best[turn % len(best)]


def _pick(ranks: list[int], rank: int, size: int, load: dict[int, int]) -> int:
    """The rank itself if it holds the part, else the one that has sent least."""
    if rank in ranks:
        return rank
    sender = min(ranks, key=lambda r: load.get(r, 0))
    load[sender] = load.get(sender, 0) + size
    return sender


@lru_cache(100_000)
def traffic(src: Layout, dst: Layout, shape: Shape) -> StepTraffic:
    """What this step moves for a tensor of `shape`."""
    sent: dict[int, int] = {}
    most = touched = 0
    for rank, pieces in route(src, dst, shape).pieces.items():
        crossed = read = 0
        for region, sources in pieces:
            size = volume(region)
            for source in sources:
                read += size
                if source != rank:
                    crossed += size
                    sent[source] = sent.get(source, 0) + size
        most, touched = max(most, crossed), max(touched, read)
    return StepTraffic(most, max(sent.values(), default=0), touched)


def elements_received(src: Layout, dst: Layout, shape: Shape) -> dict[int, int]:
    """Elements that each destination rank receives from others in this step."""
    return {rank: sum(volume(region) for region, sources in pieces for source in sources if source != rank)
            for rank, pieces in route(src, dst, shape).pieces.items()}
