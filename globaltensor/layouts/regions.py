"""Ranges of indices: which elements of a tensor, as (start, stop) along each dim.

    ((0, 4), (2, 6))    is x[0:4, 2:6]; () is all of a 0-dim tensor; a region with start == stop along some dim is empty

Regions are plain tuples, so that they compare, hash and sort as they are.
"""
from __future__ import annotations

from math import prod

Range = tuple[int, int]
Region = tuple[Range, ...]


def split_range(n: int, parts: int, index: int) -> Range:
    """Start and stop of part `index` of n things in `parts` parts: n // parts + (index < n % parts) of them. (Where n
    is a symbol of torch.compile's, the graph is one for sizes that divide evenly, or else for this size alone.)"""
    if n % parts == 0:
        return index * (n // parts), (index + 1) * (n // parts)
    size, more = divmod(int(n), parts)
    start = index * size + min(index, more)
    return start, start + size + (index < more)


def intersect(a: Region, b: Region) -> Region | None:
    """The elements that two regions share, or None."""
    both = []
    for (a0, a1), (b0, b1) in zip(a, b):
        low, high = (a0 if a0 > b0 else b0), (a1 if a1 < b1 else b1)
        if low >= high:
            return None
        both.append((low, high))
    return tuple(both)


def subtract(region: Region, removed: Region) -> list[Region]:
    """`region` without the elements of `removed`, as regions that do not overlap: two at most per dim."""
    inner = intersect(region, removed)
    if inner is None:
        return [region]
    rest = []
    for d, ((start, stop), (low, high)) in enumerate(zip(region, inner)):
        rest += [(*inner[:d], side, *region[d + 1:]) for side in ((start, low), (high, stop)) if side[0] < side[1]]
    return rest


def volume(region: Region) -> int:
    """How many elements there are."""
    return prod(stop - start for start, stop in region)


def slices(region: Region, within: Region) -> tuple[slice, ...]:
    """The index of `region` in a shard that holds `within`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(region, within))
