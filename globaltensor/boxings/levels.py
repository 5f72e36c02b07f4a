"""Boxings in two levels: within hosts, over memory, and between hosts, over a slower link.

    P -> B of [n] on [0, 1, 2, 3], two ranks on each of two hosts

    within     (P, P) -> (P, S(0))      each rank has the sum of half of the tensor, as its host knows it
    across     (P, S(0)) -> (B, S(0))   half of the tensor per rank crosses the link, the least that can
    within     (B, S(0)) -> (B, B)

An axis that passes from host to host is divided, into one *across* hosts and one *within* them, whether its ranks come
host by host or in turns. A dim that both split is viewed as several dims, one for each, so that the axes can change one
after the other, in any order:

    S(0) -> B of [8] is (S(0), S(1)) -> (B, B) of [2, 2, 2]

That takes splits into equal parts; where they are not, a boxing stays in one level. What is scattered within a host
while the rest crosses is a choice; plan.py prices all of them.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from globaltensor.layouts.layout import Layout, Shape, layout
from globaltensor.layouts.placement import placement, with_ranks
from globaltensor.layouts.sbp import NdSbp, Sbp, broadcast, split

_MOST_DIMS = 2                                       # dims to scatter along that are worth pricing, the longest ones


class DividedAxis(NamedTuple):
    """An axis, or a part of one: which axis of the placement it is of, its size, and does it lead to other hosts?"""

    of: int
    size: int
    across: bool


class DividedPlacement(NamedTuple):
    """A placement's axes in their order, divided, and its ranks on these axes, in two orders of them."""

    axes: tuple[DividedAxis, ...]
    across_first: placement
    within_first: placement


class Levels(NamedTuple):
    """A boxing of the `view` of a tensor of that shape: within hosts, across, and within again, from one layout to
    another each."""

    view: Shape
    ends: tuple[tuple[Layout, Layout], ...]


@lru_cache(1_000)
def divide_axes(of: placement, hosts: tuple[int, ...]) -> DividedPlacement | None:
    """The axes divided at the borders of hosts; None where no host has several of the ranks, or one has all."""
    axes: list[DividedAxis] = []
    for axis, size in enumerate(of.shape):
        counts = [n for n in range(size, 0, -1) if size % n == 0]
        in_rows = next(n for n in counts if _in_one_host(of, axis, hosts, [i // n for i in range(size)]))
        in_turns = next(n for n in counts if _in_one_host(of, axis, hosts, [i % (size // n) for i in range(size)]))
        parts = [(size // in_rows, True), (in_rows, False)]
        if in_turns > in_rows:
            parts = [(in_turns, False), (size // in_turns, True)]
        axes += [DividedAxis(axis, n, across) for n, across in parts if n > 1]
    if len({one.across for one in axes}) < 2:
        return None
    at = {coords: rank for rank, coords in of.coords.items()}
    return DividedPlacement(tuple(axes), *(_rearranged(of, at, axes, first) for first in (True, False)))


def _in_one_host(of: placement, axis: int, hosts: tuple[int, ...], groups: Sequence[int]) -> bool:
    """Are ranks on one host that differ on this axis only, and are of one group of its coordinates?"""
    first: dict[tuple[int, ...], int] = {}
    return all(first.setdefault((*at[:axis], groups[at[axis]], *at[axis + 1:]), hosts[rank]) == hosts[rank]
               for rank, at in of.coords.items())


def _rearranged(of: placement, at: dict[tuple[int, ...], int], axes: Sequence[DividedAxis], first: bool) -> placement:
    """The same ranks on the divided axes, those across hosts first, or those within."""
    order = in_order(axes, first)

    def rank(digits: Sequence[int]) -> int:
        own = [0] * of.ndim
        for k, i in sorted(zip(order, digits)):
            own[axes[k].of] = own[axes[k].of] * axes[k].size + i
        return at[tuple(own)]

    def nested(digits: tuple[int, ...]) -> object:
        if len(digits) == len(order):
            return rank(digits)
        return [nested((*digits, i)) for i in range(axes[order[len(digits)]].size)]

    return with_ranks(of, nested(()))


def in_order(axes: Sequence[DividedAxis], across_first: bool) -> list[int]:
    """The numbers of the axes across hosts, then those of the others, or the reverse."""
    return sorted(range(len(axes)), key=lambda k: axes[k].across != across_first)


def boxings_in_levels(src: Layout, dst: Layout, shape: Shape, hosts: tuple[int, ...]) -> Iterator[Levels]:
    """The ways to do a boxing on one placement in two levels, none where it has to stay in one."""
    divided = divide_axes(src.placement, hosts)
    viewed = _viewed(src.sbp, dst.sbp, shape, divided.axes) if divided is not None else None
    if divided is None or viewed is None:
        return
    axes, (view, before, after) = divided.axes, viewed
    cut = {s.dim for s in (*before, *after) if s.is_split}
    free = sorted(set(range(len(view))) - cut, key=lambda d: -view[d])[:_MOST_DIMS]
    within = [k for k, one in enumerate(axes) if not one.across]
    for chosen in product(*(dict.fromkeys([*map(split, free), before[k], after[k]]) for k in within)):
        scattered = dict(zip(within, chosen))
        one, other = (tuple(scattered.get(k, s) for k, s in enumerate(sbp)) for sbp in (before, after))
        yield Levels(view, tuple((_on(divided, a, first), _on(divided, b, first)) for a, b, first in (
            (before, one, True), (one, other, False), (other, after, True))))


def _on(divided: DividedPlacement, sbp: NdSbp, across_first: bool) -> Layout:
    where = divided.across_first if across_first else divided.within_first
    return layout(where, tuple(sbp[k] for k in in_order(divided.axes, across_first)))


def _viewed(src: NdSbp, dst: NdSbp, shape: Shape, axes: Sequence[DividedAxis]) -> tuple[Shape, NdSbp, NdSbp] | None:
    """The shape of the view in which no two axes split one dim, and both sbps, an entry per divided axis."""
    view: list[int] = []
    new: tuple[list[Sbp], list[Sbp]] = ([], [])
    for sbps, of in zip(new, (src, dst)):
        sbps += [broadcast if of[one.of].is_split else of[one.of] for one in axes]
    for d, n in enumerate(shape):
        paths = [[k for k, one in enumerate(axes) if sbp[one.of].is_split and sbp[one.of].dim == d]
                 for sbp in (src, dst)]
        short, long = sorted(paths, key=len)
        if long[:len(short)] != short:
            return None
        sizes = [axes[k].size for k in long]
        even = n % prod(sizes) == 0
        if len(long) > 1 and not even:
            return None
        for sbps, path in zip(new, paths):
            for place, k in enumerate(path):
                sbps[k] = split(len(view) + place)
        view += [*sizes, n // prod(sizes)] if even and long else [n]
    return tuple(view), tuple(new[0]), tuple(new[1])
