"""A region of its own for every rank: layouts that no nd-sbp can say.

Regions may overlap (the rows beside a rank's own that a convolution needs), come out of order (the part of a sequence
whose turn it is in ring attention) or leave elements out (the panel of a matrix that SUMMA multiplies next). Boxing
moves tensors from and to such layouts; tensors themselves never have one.
"""
from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakValueDictionary

from globaltensor.layouts.layout import Layout, Shape, replicated
from globaltensor.layouts.placement import placement
from globaltensor.layouts.regions import Region
from globaltensor.layouts.sbp import NdSbp

_interned: WeakValueDictionary[tuple[placement, NdSbp, tuple[Region, ...]], RankRegions] = WeakValueDictionary()


class RankRegions(Layout):
    """A region per rank, made by `rank_regions()`. On pending axes the value is the sum of what the ranks hold, zero
    where none holds any; on broadcast axes several ranks may hold the same elements."""

    __slots__ = ("regions",)

    def __init__(self, where: placement, sbp: NdSbp, regions: tuple[Region, ...]) -> None:
        super().__init__(where, sbp)
        self.regions = dict(zip(where.flat, regions))

    def __repr__(self) -> str:
        return f"{self.placement} regions"

    def region(self, shape: Shape, rank: int) -> Region:
        return self.regions[rank]


def rank_regions(where: placement, regions: Mapping[int, Region], sbp: NdSbp | None = None) -> RankRegions:
    """The one RankRegions object for these regions, one per rank of the placement; `sbp` has B and P only (None: all
    B)."""
    key = (where, sbp or replicated(where).sbp, tuple(regions[rank] for rank in where.flat))
    known = _interned.get(key)
    if known is None:
        known = _interned[key] = RankRegions(*key)
    return known
