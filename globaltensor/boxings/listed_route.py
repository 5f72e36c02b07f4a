"""One step of a boxing whose sources are not parts of paths: the holders of every rank's region are looked up.

For windows (rank_regions.py) that are summed into a layout, and for a sum that is shared by ranks of another placement,
where each piece stays with a rank that holds it. As `BoxingRoute` for all else, but for all ranks at once that may take
something from each other, each in the time that the holders of its own region take.
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from math import prod
from typing import NamedTuple

from globaltensor.boxings.roles import kept_partial, summed_axes
from globaltensor.layouts.layout import Layout, Shape
from globaltensor.layouts.rank_regions import exchanging_axes
from globaltensor.layouts.regions import Range, Region, intersect

Term = tuple[int, ...]                               # of a pending sum: the coordinates on its axes
Held = dict[Region, dict[Term, list[int]]]           # region -> the ranks that hold it, by term
Cell = tuple[Region, list[list[int]]]                # a piece of what is wanted, and the ranks that hold it, per term
ANY = -1                                             # of a coordinate: all terms are wanted


class SourcedRegion(NamedTuple):
    """`region` of the global tensor is the reduction of the parts of these ranks, in this order."""

    region: Region
    sources: tuple[int, ...]


class ListedRoute:
    """One step. Ranks that may take something from each other are a group, of which all pieces are listed at once."""

    def __init__(self, src: Layout, dst: Layout, shape: Shape) -> None:
        self._step = src, dst, shape
        self._kept = kept_partial(src, dst)
        ops = {s.op for s, k in zip(src.sbp, self._kept) if s.is_partial and not k}
        assert len(ops) <= 1, f"one step cannot reduce {src.sbp}"
        self.op = ops.pop() if ops else ""
        self._loose = summed_axes(src, dst)
        self._axes = range(src.placement.ndim) if self._loose else exchanging_axes(src, dst)
        self._pieces: dict[int, tuple[SourcedRegion, ...]] = {}
        self._takers: dict[int, list[tuple[int, Region]]] = {}

    def pieces(self, rank: int) -> tuple[SourcedRegion, ...]:
        """What this rank of dst takes."""
        if rank not in self._pieces:
            self._list_group(rank)
        return self._pieces[rank]

    def takers(self, rank: int) -> list[tuple[int, Region]]:
        """The other ranks that have this one of src as a source, each with what it takes from it, region by region."""
        if rank not in self._takers:
            self._list_group(rank)
        return self._takers[rank]

    def _list_group(self, rank: int) -> None:
        src, dst, shape = self._step
        givers, wanting = ((of.placement.ranks_along(self._axes, rank) for of in (src, dst))
                           if src.placement == dst.placement else (src.placement.flat, dst.placement.flat))
        holders = _Holders(src, shape, givers)
        sharing = _sharing(dst, self._loose)
        turns: dict[tuple[Region, Term], int] = {}   # as many ranks have wanted the same
        cells: dict[tuple[Region, Term], list[Cell]] = {}
        takers: dict[int, list[tuple[int, Region]]] = {giver: [] for giver in givers}
        for taker in wanting:
            # A sum that stays pending is not added up: the rank keeps the term of its own coordinate there.
            fixed = tuple([src.placement.coords[taker][axis] if keep else ANY
                           for axis, (s, keep) in enumerate(zip(src.sbp, self._kept)) if s.is_partial])
            key = dst.region(shape, taker), fixed
            if key not in cells:
                cells[key], turns[key] = holders.cells(*key), len(cells)
            turns[key] += 1
            pieces = self._pieces[taker] = _take_pieces(cells[key], taker, turns[key], sharing.get(taker, []))
            for region, sources in pieces:
                for source in {*sources} - {taker}:
                    takers[source].append((taker, region))
        self._takers.update(takers)


def _sharing(dst: Layout, loose: tuple[int, ...]) -> dict[int, list[list[int]]]:
    """Per destination rank, the ranks whose sum is the value there, itself among them: each piece goes to one.

    Only where dst has axes that become a pending sum. Copies of the sum (on broadcast axes) must be divided alike, so
    the lists are sets of ranks that take the same pieces. (Maxima of equal values need no such care.)
    """
    if not loose:
        return {}
    groups: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    # Ranks of one group hold terms of the same elements: those that differ only where dst is pending or broadcast.
    for rank, at in dst.placement.coords.items():
        group = tuple(0 if axis in loose or s.is_broadcast or s.op in ("max", "min") else i
                      for axis, (i, s) in enumerate(zip(at, dst.sbp)))
        groups.setdefault(group, {}).setdefault(tuple(at[axis] for axis in loose), []).append(rank)
    return {rank: list(sets.values()) for sets in groups.values() for ranks in sets.values() for rank in ranks}


class _Holders:
    """What these ranks hold of src, to be looked up by regions."""

    def __init__(self, src: Layout, shape: Shape, ranks: Sequence[int]) -> None:
        self.held: Held = {}
        self.order: dict[Term, int] = {}             # in which terms are added up
        for rank in ranks:
            term = tuple(i for i, s in zip(src.placement.coords[rank], src.sbp) if s.is_partial)
            self.order.setdefault(term, len(self.order))
            self.held.setdefault(src.region(shape, rank), {}).setdefault(term, []).append(rank)
        self.dims = [_SortedRanges({region[d] for region in self.held}) for d in range(len(shape))]

    def cells(self, wanted: Region, fixed: Term) -> list[Cell]:
        """`wanted` divided along the parts that ranks hold of the terms with these coordinates."""
        parts_of = self._within(wanted, fixed)
        edges = [sorted({at for parts in parts_of for part, _ in parts for at in part[d]}) for d in range(len(wanted))]
        return [(cell, [ranks for parts in parts_of if (ranks := [
            r for part, some in parts if intersect(part, cell) is not None for r in some])])
            for cell in product(*map(pairwise, edges))]

    def _within(self, wanted: Region, fixed: Term) -> list[list[tuple[Region, list[int]]]]:
        """The parts of this region that are held, each with its ranks: a list per term that has any."""
        near = [ranges.near(ends) for ranges, ends in zip(self.dims, wanted)]
        regions = (self.held.keys() if prod(map(len, near)) > len(self.held) else
                   [region for region in product(*near) if region in self.held])
        parts_of: dict[Term, list[tuple[Region, list[int]]]] = {}
        for region in regions:
            if (part := intersect(region, wanted)) is not None:
                for term, ranks in self.held[region].items():
                    if all(f in (ANY, i) for f, i in zip(fixed, term)):
                        parts_of.setdefault(term, []).append((part, ranks))
        return [parts_of[term] for term in sorted(parts_of, key=self.order.__getitem__)]


class _SortedRanges:
    """Ranges along a dim, to be looked up by what they overlap."""

    def __init__(self, ranges: set[Range]) -> None:
        self.ranges = sorted(ranges)
        self.starts = [start for start, _ in self.ranges]
        self.stops = [*accumulate((stop for _, stop in self.ranges), max)]     # the last of those up to each

    def near(self, ends: Range) -> list[Range]:
        """All that overlap it, and perhaps some more."""
        first, last = bisect_left(self.stops, ends[0]), bisect_left(self.starts, ends[1])
        return self.ranges[first:max(last, first)]


def _take_pieces(cells: list[Cell], rank: int, turn: int, sharing: list[list[int]]) -> tuple[SourcedRegion, ...]:
    """What a rank takes of these cells: of each one source per term, itself where it holds it; else ranks that want the
    same take from different ones, in turns.

    Of ranks that share a pending sum, one that holds a piece takes it.
    """
    return tuple([SourcedRegion(cell, tuple([rank if rank in ranks else ranks[turn % len(ranks)] for ranks in holding]))
                  for i, (cell, holding) in enumerate(cells) if holding and (
                      not sharing or rank in _takers(sharing, {r for ranks in holding for r in ranks}, i))])


def _takers(sharing: list[list[int]], holding: set[int], turn: int) -> list[int]:
    """The set of ranks of which most hold the piece; where that is a tie, they take turns."""
    near = [sum(r in holding for r in ranks) for ranks in sharing]
    most = max(near)
    best = [ranks for ranks, n in zip(sharing, near) if n == most]
    return best[turn % len(best)]
