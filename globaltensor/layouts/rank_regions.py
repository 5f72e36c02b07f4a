"""A region of its own for every rank: layouts that no nd-sbp can say.

Regions may overlap (the rows beside a rank's own that a convolution needs), come out of order (the part of a sequence
whose turn it is in ring attention) or leave elements out (the panel of a matrix that SUMMA multiplies next). Boxing
moves tensors from and to such layouts; tensors themselves never have one.
"""
from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from struct import pack, unpack_from
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from globaltensor.layouts.layout import Layout, Shape, replicated
from globaltensor.layouts.placement import placement
from globaltensor.layouts.regions import Region
from globaltensor.layouts.sbp import NdSbp

Axes = tuple[int, ...]


class RegionRule(Protocol):
    """Which region each rank has. Rules that give the same are equal, and hash alike."""

    def region(self, rank: int) -> Region:
        """That of a rank of the placement."""


_interned: WeakValueDictionary[tuple[placement, NdSbp, type, RegionRule, Layout | None, Axes, Layout | None],
                               RankRegions] = WeakValueDictionary()


class RankRegions(Layout):
    """A region per rank, made by `regions_by()` or `rank_regions()`. On pending axes the value is the sum of what the
    ranks hold, zero where none holds any; on broadcast axes several ranks may hold the same elements.

    `like`, where it is known, is a layout from which they differ along `axes` only. `base` is that of the tensor of
    which they are a view, if they are one.
    """

    __slots__ = ("axes", "base", "like", "rule")

    def __init__(self, where: placement, sbp: NdSbp, rule: RegionRule, like: Layout | None, axes: Axes,
                 base: Layout | None) -> None:
        super().__init__(where, sbp)
        self.rule, self.like, self.axes, self.base = rule, like, axes, base

    def __repr__(self) -> str:
        return f"{self.placement} regions"

    def region(self, shape: Shape, rank: int) -> Region:
        return self.rule.region(rank)

    def with_sbp(self, sbp: NdSbp) -> RankRegions:
        """The same regions; `sbp` has B and P only."""
        return regions_by(self.placement, self.rule, sbp, self.like, self.axes, self.base)


class _Listed(NamedTuple):
    """The regions of all ranks: both ends of each dim, rank by rank, as the bytes of so many numbers each. They are one
    object, as caches weigh what they hold."""

    where: placement
    numbers: int
    ends: bytes

    def region(self, rank: int) -> Region:
        ends = unpack_from(f"{self.numbers}q", self.ends, 8 * self.numbers * self.where.positions[rank])
        return tuple(zip(ends[::2], ends[1::2]))


def regions_by(where: placement, rule: RegionRule, sbp: NdSbp | None = None, like: Layout | None = None,
               axes: Axes = (), base: Layout | None = None) -> RankRegions:
    """The one RankRegions object for the regions that this rule gives; `sbp` has B and P only (None: all B)."""
    sbp = sbp or replicated(where).sbp
    key = where, sbp, type(rule), rule, like, axes, base    # rules of two kinds may be equal as tuples
    known = _interned.get(key)
    if known is None:
        known = _interned[key] = RankRegions(where, sbp, rule, like, axes, base)
    return known


def rank_regions(where: placement, regions: Mapping[int, Region], sbp: NdSbp | None = None,
                 base: Layout | None = None) -> RankRegions:
    """The same for these regions, one per rank of the placement."""
    numbers = 2 * len(regions[where.flat[0]])
    ends = [*chain.from_iterable(chain.from_iterable(regions[rank] for rank in where.flat))]
    return regions_by(where, _Listed(where, numbers, pack(f"{len(ends)}q", *ends)), sbp, base=base)


def exchanging_axes(src: Layout, dst: Layout) -> Axes:
    """The axes along which ranks may take something from each other in a step between regions of theirs and another
    layout of one placement: who differs from a rank on any other has nothing that it wants. That is known where the
    other layout is cut as that from which the regions differ, and no sum changes along other axes."""
    of, other = (src, dst) if isinstance(src, RankRegions) else (dst, src)
    everywhere = tuple(range(other.placement.ndim))
    if not isinstance(of, RankRegions) or of.like is None or of.placement != other.placement:
        return everywhere
    for axis in everywhere:
        cuts = [s if s.is_split else None for s in (of.like.sbp[axis], other.sbp[axis])]
        sums = [s if s.is_partial else None for s in (src.sbp[axis], dst.sbp[axis])]
        if cuts[0] != cuts[1] or axis not in of.axes and sums[0] != sums[1]:
            return everywhere
    return of.axes
