"""One step of a boxing: what every rank takes, and from which ranks.

A step from layout `src` to layout `dst` is specified from the side of the destination. Rank r needs a region of the
global tensor; each *piece* of that region is the reduction of the parts that some source ranks hold of it:

    S(0) -> B   on 2 ranks    r0: [0:4] from r0, [4:8] from r1          a piece each, one source each (all-gather)
    P -> S(0)   on 2 ranks    r0: [0:4] from r0 + r1                    one piece, summed             (reduce-scatter)
    S(0) -> S(1)              r0: [0:4, 0:3] from r0, [4:8, 0:3] from r1                              (all-to-all)

So one kind of step serves every pair of layouts, of one placement or two, and the bytes that it moves follow from it
(traffic.py). A rank takes its own part where it holds one; which of several ranks that hold the same sends it, the
roles of the axes say (roles.py). What no piece covers is zero: a rank's share of a pending sum.

Every region is a product of ranges, a range per dim, so each dim is looked at alone: the parts that src has of it are a
*path* of axes (layouts/paths.py), of which those that overlap a range are computed. So the pieces of one rank take no
longer where there are more ranks that it has nothing to do with. Layouts with a region per rank as sources have no such
paths: listed_route.py lists their holders.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from operator import mul
from types import MappingProxyType

from globaltensor.boxings.listed_route import ListedRoute, SourcedRegion
from globaltensor.boxings.roles import roles, summed_axes
from globaltensor.layouts.layout import Layout, Shape
from globaltensor.layouts.paths import part_at, parts_within
from globaltensor.layouts.placement import placement
from globaltensor.layouts.rank_regions import RankRegions, exchanging_axes
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.regions import Range, Region, intersect
from globaltensor.layouts.sbp import broadcast


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


GROUP = -1                                           # in a path between two placements: the copies that share


class BoxingRoute:
    """One step for a tensor of one shape: made by `route()`.

    Per dim, `paths` lists the axes of src that split what a source sends, outermost first, those that share last, and
    `sizes` into how many parts each.
    """

    def __init__(self, src: Layout, dst: Layout, shape: Shape) -> None:
        self.src, self.dst, self.shape = src, dst, shape
        self.roles = does = roles(src, dst, shape)
        self.op = does.op
        self.strides, self.dst_strides = src.placement.strides, dst.placement.strides
        self.num_terms = prod(src.placement.shape[axis] for axis in does.reduced)
        self.paths = [(*cut, *sharing) for cut, sharing in zip(does.cut, does.sharing)]
        self.sizes = [tuple(src.placement.shape[axis] for axis in path) for path in self.paths]
        self.dst_sizes = [tuple(dst.placement.shape[axis] for axis in path) for path in does.cut_by_dst]
        if not does.same and shape:
            self._divide_among_copies()
        self.holding = [axis for path in does.cut for axis in path]
        decided = {*does.reduced, *(axis for path in self.paths for axis in path)}
        self.own_axes = [axis for axis in range(src.placement.ndim) if axis not in decided] if does.same else []
        cutting = {axis for path in does.cut_by_dst for axis in path}
        self.uncut = [axis for axis in range(dst.placement.ndim) if axis not in cutting]
        self.exchanging = exchanging_axes(src, dst) if isinstance(dst, RankRegions) else ()
        self._pieces: dict[int, tuple[SourcedRegion, ...]] = {}

    @cached_property
    def terms(self) -> list[int]:
        """Where, in src's row of ranks, the sources of the terms of a sum are, counted from the first."""
        return [sum(at) for at in product(*(
            range(0, self.src.placement.shape[axis] * self.strides[axis], self.strides[axis])
            for axis in self.roles.reduced))]

    def _divide_among_copies(self) -> None:
        """Copies that share divide the dim that dst splits most beyond src; of equals, the longest."""
        shares = prod(self.src.placement.shape[axis] for axis in self.roles.copies) // self.roles.groups
        if shares > 1:
            d = max(range(len(self.shape)),
                    key=lambda d: (prod(self.dst_sizes[d]) / prod(self.sizes[d]), self.shape[d]))
            self.paths[d], self.sizes[d] = (*self.paths[d], GROUP), (*self.sizes[d], shares)

    def wanted(self, rank: int) -> Region | None:
        """What a rank of dst takes: its region, or its part of that where ranks share a sum; None where another takes
        all."""
        at = self.dst.placement.coords[rank]
        if any(at[axis] for axis in self.roles.first):
            return None
        if isinstance(self.dst, RankRegions):
            return self.dst.region(self.shape, rank)
        return tuple(part_at(n, sizes, [at[axis] for axis in path])
                     for n, sizes, path in zip(self.shape, self.dst_sizes, self.roles.cut_by_dst))

    def pieces(self, rank: int) -> tuple[SourcedRegion, ...]:
        """What this rank of dst takes; kept, as several of this process ask."""
        known = self._pieces.get(rank)
        if known is None:
            known = self._pieces[rank] = tuple(self._list_pieces(rank))
        return known

    def _list_pieces(self, rank: int) -> Iterable[SourcedRegion]:
        own, ranks = self.src.placement.coords.get(rank), self.src.placement.flat
        mine = self.terms.index(self.own_term(own)) if own is not None else 0
        for region, base, held in self.cells(rank):
            sources = [ranks[base + term] for term in self.terms]
            if held:
                sources[mine] = rank
            yield SourcedRegion(region, tuple(sources))

    def own_term(self, at: Sequence[int]) -> int:
        """Of the terms of a sum, the one at these coordinates of src."""
        return sum(at[axis] * self.strides[axis] for axis in self.roles.reduced)

    def cells(self, rank: int, fixed: Mapping[int, int] = MappingProxyType({})) -> Iterable[tuple[Region, int, bool]]:
        """The regions of the pieces of a rank; where, in src's row of ranks, the source of the first term is; and is it
        a part that the rank itself holds? With `fixed` digits of the paths, those regions only."""
        at, own, wanted = self.dst.placement.coords[rank], self.src.placement.coords.get(rank), self.wanted(rank)
        if wanted is None:
            return
        does = self.roles
        fixed = {**{axis: at[axis] for axis in does.loose}, **fixed}
        dims = []                                    # per dim: a range, where its source is, is it held, and its share
        for n, within, path, sizes, cut in zip(self.shape, wanted, self.paths, self.sizes, does.cut):
            weights = [self.strides[axis] if axis != GROUP else 0 for axis in path]
            own_digits = tuple(own[axis] for axis in cut) if own is not None else None
            dims.append([(ends, sum(map(mul, digits, weights)), digits[:len(cut)] == own_digits,
                          digits[-1] if GROUP in path else 0)
                         for ends, digits in parts_within((0, n), sizes, [fixed.get(axis) for axis in path], within)])
        rest = sum(at[axis] * self.strides[axis] for axis in self.own_axes)
        group = 0 if does.same else flat_index(at, does.free, self.dst.placement) % does.groups
        for cell in product(*dims):
            base = rest + sum(offset for _, offset, _, _ in cell)
            if not does.same:
                base += self._copy_offset(sum(share for *_, share in cell) * does.groups + group)
            held = own is not None and all(held for _, _, held, _ in cell)
            yield tuple(ends for ends, *_ in cell), base, held

    def _copy_offset(self, copy: int) -> int:
        """Where, in src's row of ranks, copy number `copy` is, counted from the first."""
        offset = 0
        for axis in reversed(self.roles.copies):
            copy, i = divmod(copy, self.src.placement.shape[axis])
            offset += i * self.strides[axis]
        return offset

    def source_part(self, at: Sequence[int]) -> Region:
        """What the rank at these coordinates of src sends to whoever wants it: what it holds, or its share of that."""
        digits = [*at, 0 if self.roles.same else self._copy(at) // self.roles.groups]        # the last one is GROUP
        return tuple(part_at(n, sizes, [digits[axis] for axis in path])
                     for n, sizes, path in zip(self.shape, self.sizes, self.paths))

    def _copy(self, at: Sequence[int]) -> int:
        """Between two placements: the number of the copy at these coordinates of src."""
        return flat_index(at, self.roles.copies, self.src.placement)

    def takers(self, rank: int) -> list[tuple[int, Region]]:
        """The other ranks that have this one of src as a source, each with what it takes from it: one region."""
        at, does = self.src.placement.coords[rank], self.roles
        by_rank = isinstance(self.dst, RankRegions)
        if not self.takers_alike(at):
            return []
        dims: list[list[tuple[Range, int]]] = []     # per dim: a range, and where the ranks are that want it
        for d, (n, part) in enumerate(zip(self.shape, self.source_part(at))):
            path = does.cut_by_dst[d]
            dims.append([(ends, sum(i * self.dst_strides[axis] for axis, i in zip(path, digits)))
                         for ends, digits in parts_within((0, n), self.dst_sizes[d], self.taking(at, d), part)])
        among = [[i * self.dst_strides[axis] for i in self._taking_digits(at, axis)] for axis in self.uncut]
        takers = []
        for cell in product(*dims):
            region, base = tuple(ends for ends, _ in cell), sum(offset for _, offset in cell)
            for offsets in product(*among):
                taker = self.dst.placement.flat[base + sum(offsets)]
                if taker == rank or self._holds_alike(taker, at) or not self._takes_copy(taker, at):
                    continue
                taken = intersect(region, self.dst.region(self.shape, taker)) if by_rank and region else region
                if taken is not None:
                    takers.append((taker, taken))
        return takers

    def taking(self, at: Sequence[int], d: int) -> list[int | None]:
        """The digits of the ranks that take from the source at these coordinates, on the axes that split dim d of dst:
        its own where axes are matched."""
        does = self.roles
        return [at[axis] if does.same and axis in does.copies and axis not in does.sharing[d] else None
                for axis in does.cut_by_dst[d]]

    def _taking_digits(self, at: Sequence[int], axis: int) -> range:
        """The same on an axis that does not split dst."""
        does = self.roles
        own = does.same and axis not in does.reduced and (
            axis in does.loose or not self.src.sbp[axis].is_split
            or isinstance(self.dst, RankRegions) and axis not in self.exchanging)
        digits = range(at[axis], at[axis] + 1) if own else range(self.dst.placement.shape[axis])
        return range(0 in digits) if axis in does.first else digits

    def takers_alike(self, at: Sequence[int]) -> int:
        """How many ranks want each element of what the source at these coordinates sends."""
        alike = prod(len(self._taking_digits(at, axis)) for axis in self.uncut)
        if self.roles.same:
            return alike
        # A tensor without dims cannot be shared: the first of those that share sends it.
        return alike // self.roles.groups if self.shape or self._copy(at) < self.roles.groups else 0

    def _holds_alike(self, rank: int, at: Sequence[int]) -> bool:
        """Does this rank hold the same, the same term of a sum, as the source at these coordinates?"""
        own = self.src.placement.coords.get(rank)
        return own is not None and all(own[axis] == at[axis] for axis in (*self.holding, *self.roles.reduced))

    def _takes_copy(self, taker: int, at: Sequence[int]) -> bool:
        """Is the source at these coordinates among the copies from which this rank takes?"""
        if self.roles.same:
            return True
        group = flat_index(self.dst.placement.coords[taker], self.roles.free, self.dst.placement)
        return (self._copy(at) - group) % self.roles.groups == 0


def flat_index(at: Sequence[int], axes: Sequence[int], of: placement) -> int:
    """The coordinates on some axes as one number."""
    index = 0
    for axis in axes:
        index = index * of.shape[axis] + at[axis]
    return index


@remembered
def route(src: Layout, dst: Layout, shape: Shape) -> BoxingRoute | ListedRoute:
    """One step. All pending axes of src that do not stay pending must share one op."""
    return (ListedRoute if is_listed(src, dst) else BoxingRoute)(src, dst, shape)


def is_listed(src: Layout, dst: Layout) -> bool:
    """Must the holders of each piece be searched for?"""
    return isinstance(src, RankRegions) or (
        src.placement != dst.placement and bool(summed_axes(src, dst)) and not disjoint(src.placement, dst.placement))


@lru_cache(1_000)
def disjoint(a: placement, b: placement) -> bool:
    """Have two placements no rank in common?"""
    return a.coords.keys().isdisjoint(b.coords)
