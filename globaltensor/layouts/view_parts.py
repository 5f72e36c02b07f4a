"""Which elements of a view lie in a region of its base.

A chain of view ops comes to sizes, strides and an offset in the memory of the base. Mostly every dim of the view then
runs along a dim of the base, none along two (`Straight`): what a rank holds of the view is a range of each dim. The
diagonal, or a part of a flattened tensor, is not like that; such elements are found one by one (`scattered_elements`).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from globaltensor.layouts.layout import Shape, Spec
from globaltensor.layouts.regions import Region


class Strided(NamedTuple):
    """Elements of a memory: index i is at offset + sum(i * stride)."""

    shape: Shape
    stride: Shape
    offset: int = 0


class Straight(NamedTuple):
    """A view whose dims run along dims of the base.

    start     per dim of the base, the index of the view's first element
    dims      per dim of the view, the dim of the base; None for one of size 1
    steps     per dim of the view, how far apart in the base its elements are
    """

    shape: Shape
    start: Shape
    dims: tuple[int | None, ...]
    steps: Shape

    def part(self, region: Region) -> Region | None:
        """The range of each dim of the view that lies in a region of the base; None where nothing does."""
        if any(d not in self.dims and not low <= self.start[d] < high for d, (low, high) in enumerate(region)):
            return None
        part = []
        for n, d, step in zip(self.shape, self.dims, self.steps):
            if d is None:
                part.append((0, 1))
                continue
            low, high = region[d]
            # -(a // step) with the sign of a turned is the division rounded up: the first index at or beyond each end
            first, last = max(-((self.start[d] - low) // step), 0), min(-((self.start[d] - high) // step), n)
            if first >= last:
                return None
            part.append((first, last))
        return tuple(part)

    def slice_of(self, region: Region, part: Region) -> Slice:
        """That part of the view in the shard that holds the region."""
        start = [first - low for first, (low, _) in zip(self.start, region)]
        for (first, _), d, step in zip(part, self.dims, self.steps):
            if d is not None:
                start[d] += first * step
        return Slice(tuple(start), tuple(stop - first for first, stop in part), self.dims, self.steps)


class Slice(NamedTuple):
    """A view of a shard.

    start     per dim of the shard, the index of the first element
    size, dims, steps   per dim of the view, as in Straight
    """

    start: Shape
    size: Shape
    dims: tuple[int | None, ...]
    steps: Shape

    def of(self, shard: Tensor) -> Tensor:
        """The view. (Not by as_strided, which a graph does not take for a view of a view that is written to.)"""
        if 0 in self.size:
            return shard.new_empty(self.size)
        along = {d: (n, step) for n, d, step in zip(self.size, self.dims, self.steps) if d is not None}
        view = shard[tuple(slice(i, i + (along[d][0] - 1) * along[d][1] + 1, along[d][1]) if d in along else i
                           for d, i in enumerate(self.start))]
        kept = sorted(along)
        view = view.permute([kept.index(d) for d in self.dims if d is not None])
        for nth, d in enumerate(self.dims):
            view = view.unsqueeze(nth) if d is None else view
        return view


class ViewSlices:
    """What ranks hold of a view: the slices of the shards of this process, and the view's spec there, in a layout with
    a region per rank, which is made when the view is first read."""

    def __init__(self, of_rank: dict[int, Slice], make_held: Callable[[], Spec]) -> None:
        self.of_rank, self._make_held = of_rank, make_held

    @cached_property
    def held(self) -> Spec:
        return self._make_held()


def overlaps_itself(of: Strided) -> bool:
    """Does one element stand for several indices, as in an expanded tensor?"""
    return any(n > 1 and step == 0 for n, step in zip(of.shape, of.stride))


def repeats_elements(of: Strided) -> bool:
    """Does one element stand for several indices, as in windows that `unfold` takes in small steps?"""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(of.shape, of.stride) if n > 1):
        if step <= reach:                            # maybe: looked for in what they are
            places = _offsets_in_memory(of._replace(offset=0))
            return places.unique().numel() < places.numel()
        reach += (n - 1) * step
    return False


def extent_in_memory(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Over how many elements of memory a tensor extends, gaps included."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride))


def laid_out(whole: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A copy in memory of its own with these strides: elements that are one there, as in windows, are one."""
    return whole.new_empty(extent_in_memory(shape, stride)).as_strided(shape, stride).copy_(whole)


def _offsets_in_memory(of: Strided) -> Tensor:
    """Where each element is in memory."""
    place = torch.tensor(of.offset, device="cpu")
    for n, step in zip(of.shape, of.stride):
        place = place.unsqueeze(-1) + torch.arange(n, device="cpu") * step
    return place


def straight(base: Strided, view: Strided) -> Straight | None:
    """The view's dims as they run along those of the base; None where they do not."""
    if overlaps_itself(base):
        return None
    order = _outermost_first(base)
    start, rest = [0] * len(base.shape), view.offset - base.offset
    for d in order:
        start[d], rest = divmod(rest, base.stride[d])
    dims: list[int | None] = []
    steps = []
    for n, step in zip(view.shape, view.stride):
        # the outermost dim that the steps are multiples of; that they do not run beyond its end is checked below
        along = [d for d in order if 0 < step and step % base.stride[d] == 0] if n > 1 else []
        dims.append(along[0] if along else None)
        if n > 1:
            if not along or along[0] in dims[:-1]:
                return None
            step //= base.stride[along[0]]
            if start[along[0]] + (n - 1) * step >= base.shape[along[0]]:
                return None
        steps.append(step)
    return Straight(view.shape, tuple(start), tuple(dims), tuple(steps))


def scattered_elements(base: Strided, view: Strided, region: Region) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Which elements of the view lie in a region of the base, as a mask; and of all elements, their indices in the
    shard that holds it, which mean something where the mask is set."""
    place = _offsets_in_memory(view._replace(offset=view.offset - base.offset))
    inside = torch.ones_like(place, dtype=torch.bool)
    index = [torch.zeros_like(place)] * len(base.shape)
    for d in _outermost_first(base):
        index[d] = place.div(base.stride[d], rounding_mode="floor")
        place = place % base.stride[d]
    for d, (low, high) in enumerate(region):
        inside &= (index[d] >= low) & (index[d] < high)
    return inside, tuple(i - low for i, (low, _) in zip(index, region))


def _outermost_first(base: Strided) -> list[int]:
    """The dims that have more than one element, by falling stride."""
    return sorted((d for d, n in enumerate(base.shape) if n > 1), key=lambda d: -base.stride[d])
