"""One step of a boxing whose sources are no parts of paths: every rank's region is compared with every holder's.

For windows (rank_regions.py) that are summed into a layout, and for a sum that is shared by ranks of another placement,
where each piece stays with a rank that holds it. As `BoxingRoute` for all else, but in the time of ranks times holders.
"""
from __future__ import annotations

from itertools import pairwise, product
from typing import NamedTuple

from globaltensor.boxings.roles import kept_partial, summed_axes
from globaltensor.layouts.layout import Layout, Shape
from globaltensor.layouts.regions import Region, intersect, volume

Term = dict[Region, list[int]]                       # of a pending sum: region -> ranks that hold it


class SourcedRegion(NamedTuple):
    """`region` of the global tensor is the reduction of the parts of these ranks, in this order."""

    region: Region
    sources: tuple[int, ...]


class ListedRoute:
    """One step, all pieces of all ranks at once."""

    def __init__(self, src: Layout, dst: Layout, shape: Shape) -> None:
        kept = kept_partial(src, dst)
        ops = {s.op for s, k in zip(src.sbp, kept) if s.is_partial and not k}
        assert len(ops) <= 1, f"one step cannot reduce {src.sbp}"
        self.op = ops.pop() if ops else ""
        holders = _holders(src, shape)
        sharing = _sharing(dst, summed_axes(src, dst))
        load: dict[int, int] = {}                    # elements that each rank sends so far
        self._pieces: dict[int, tuple[SourcedRegion, ...]] = {}
        for rank in dst.placement.flat:
            # A sum that stays pending is not added up: the rank keeps the term of its own coordinate there.
            fixed = [src.placement.coords[rank][axis] if keep else None
                     for axis, (s, keep) in enumerate(zip(src.sbp, kept)) if s.is_partial]
            terms = [held for at, held in holders.items() if all(f is None or f == i for f, i in zip(fixed, at))]
            self._pieces[rank] = tuple(_overlay(dst.region(shape, rank), rank, terms, sharing.get(rank, []), load))

    def pieces(self, rank: int) -> tuple[SourcedRegion, ...]:
        """What this rank of dst takes."""
        return self._pieces[rank]

    def takers(self, rank: int) -> list[tuple[int, Region]]:
        """The other ranks that have this one as a source, each with what it takes from it, region by region."""
        return [(taker, region) for taker, pieces in self._pieces.items() if taker != rank
                for region, sources in pieces if rank in sources]


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


def _holders(src: Layout, shape: Shape) -> dict[tuple[int, ...], Term]:
    """The coordinates on the pending axes name a term of the sum."""
    holders: dict[tuple[int, ...], Term] = {}
    for rank in src.placement.flat:
        at = tuple(i for i, s in zip(src.placement.coords[rank], src.sbp) if s.is_partial)
        holders.setdefault(at, {}).setdefault(src.region(shape, rank), []).append(rank)
    return holders


def _overlay(wanted: Region, rank: int, terms: list[Term], sharing: list[list[int]],
             load: dict[int, int]) -> list[SourcedRegion]:
    """`wanted` divided along the regions of all terms, each piece with one source per term that has it.

    Of ranks that share a pending sum, one that holds a piece takes it.
    """
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
    most = max(near)
    best = [ranks for ranks, n in zip(sharing, near) if n == most]
    return best[turn % len(best)]


def _pick(ranks: list[int], rank: int, size: int, load: dict[int, int]) -> int:
    """The rank itself if it holds the part, else the one that has sent least."""
    if rank in ranks:
        return rank
    sender = min(ranks, key=lambda r: load.get(r, 0))
    load[sender] = load.get(sender, 0) + size
    return sender
