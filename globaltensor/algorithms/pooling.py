"""Pooling of images whose rows are split, by windows as a convolution (halo.py): only rows at the seams cross ranks.

    maximum    where a window extends over the edge, it holds the lowest number. Positions are counted in the plane of
               the whole image: those that a rank finds in its window are shifted by where that begins, and shifted back
               for the gradient
    mean       where a window extends over the edge, it is zero; kernels that reach there divide by other numbers

In the backward pass only the size of the image is needed: nothing but the halo of the gradient moves.
"""
from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from globaltensor.algorithms.decompositions import as_global
from globaltensor.algorithms.halo import (
    Slide,
    empty_parts,
    grad_of_image,
    local_op,
    local_padding,
    result_shapes,
    result_specs,
    slides_of,
    window_of,
    wrap_dense,
)
from globaltensor.algorithms.run import Run
from globaltensor.layouts.global_like import GlobalLike
from globaltensor.layouts.layout import Layout, Shape
from globaltensor.layouts.regions import Range, Region
from globaltensor.rules.call import Call


class Pooling(NamedTuple):
    """How a pooling runs. Its image and its result are laid out as `own`; `plane` is the spatial shape of the image."""

    own: Layout
    window: Layout
    slides: tuple[Slide, ...]
    padding: list[int]                               # that is left to the kernel
    plane: Shape

    def space(self, region: Region) -> Region:
        """A region without batch and channels."""
        return region[-len(self.slides):]


def _pooling(call: Call, out_shape: Shape) -> Pooling:
    """How `call["self"]` is pooled to a result of this shape."""
    own, shape, slides = call["self"].spec.layout.without_partials, call["self"].spec.shape, slides_of(call)
    n = len(slides)
    window = window_of(own, shape, out_shape[-n:], slides)
    return Pooling(own, window, slides, local_padding(own, len(shape), slides), shape[-n:])


def _fill_edge(part: Tensor, region: Region, shape: Shape) -> Tensor:
    """A window with the lowest number where it is over the edge; in place, as it is a copy that nobody else has."""
    lowest = float("-inf") if part.is_floating_point() else torch.iinfo(part.dtype).min
    for d, ((start, stop), n) in enumerate(zip(region, shape)):
        size = stop - start
        before, inside = min(max(-start, 0), size), min(max(n - start, 0), size)
        if before:
            part.narrow(d, 0, before).fill_(lowest)
        if inside < size:
            part.narrow(d, inside, size - inside).fill_(lowest)
    return part


def _shifted(positions: Tensor, region: Region, plane: Shape, slides: tuple[Slide, ...], back: bool = False) -> Tensor:
    """Positions in a window, which is `region` of a plane, as positions in that plane; or, `back`, the other way.

    Where a window holds only the lowest number, the kernel takes its first row, over the edge or not. Within the plane,
    that is the first row which is not over the edge.
    """
    sizes = tuple(stop - start for start, stop in region)
    before, after, sign = (plane, sizes, -1) if back else (sizes, plane, 1)
    if region[1:] == tuple((0, n) for n in plane[1:]):      # only the outermost dim is cut: one shift for all
        row = prod(plane[1:])
        shifted = positions + sign * region[0][0] * row
        if back or region[0][0] >= 0:
            return shifted
        return torch.where(shifted < 0, shifted % (slides[0].dilation * row), shifted)
    shifted = torch.zeros_like(positions)
    for n, (start, _), slide, stride in reversed([*zip(before, region, slides, _strides(after))]):
        at = positions % n + sign * start            # along this dim
        shifted += torch.where(at < 0, at % slide.dilation, at) * stride
        positions = positions // n
    return shifted


def _strides(sizes: Shape) -> list[int]:
    """Of a contiguous tensor."""
    return [*accumulate(reversed(sizes[1:]), int.__mul__, initial=1)][::-1]


def max_pool(call: Call, run: Run) -> tuple[GlobalLike, ...]:
    """Maxima, and their positions in the plane of the whole image."""
    x, (shape, _) = call["self"], result_shapes(call)
    pooling = _pooling(call, shape)
    specs = result_specs(call, pooling.own, pooling.own)
    parts, = run.gather_regions([x], [pooling.window], str(call.func))
    maxima, positions = {}, {}
    for rank, part in parts.items():
        region = pooling.window.region(x.spec.shape, rank)
        if part.numel():
            values, at = local_op(call, self=_fill_edge(part, region, x.spec.shape), padding=pooling.padding)
            maxima[rank] = values
            positions[rank] = _shifted(at, pooling.space(region), pooling.plane, pooling.slides)
        else:
            maxima[rank] = part.new_empty(pooling.own.local_shape(shape, rank))
            positions[rank] = maxima[rank].long()
    return tuple(wrap_dense(run, own, shards) for own, shards in zip(specs, (maxima, positions)))


def max_pool_backward(call: Call, run: Run) -> GlobalLike:
    """Each rank's gradients go to the positions in its window that `max_pool` returned."""
    x, op = call["self"], str(call.func)
    grad, indices = (as_global(run, call[name], x, op) for name in ("grad_output", "indices"))
    pooling = _pooling(call, grad.spec.shape)
    grads, positions = run.gather_regions([grad, indices], [pooling.own, pooling.own], op)
    parts = empty_parts(x, pooling.window)
    for rank, part in parts.items():
        if part.numel():
            region = pooling.space(pooling.window.region(x.spec.shape, rank))
            at = _shifted(positions[rank], region, pooling.plane, pooling.slides, back=True)
            parts[rank] = local_op(call, self=part, grad_output=grads[rank], indices=at, padding=pooling.padding)
    return grad_of_image(run, parts, pooling.window, result_specs(call, pooling.own)[0], len(pooling.slides), op)


def _counts(slide: Slide, ends: Range, rows: int, padded: bool) -> Tensor:
    """How many rows each of some output rows is the mean of, with those of the padding or without."""
    start = torch.arange(*ends, device="cpu") * slide.stride - slide.padding
    if padded:
        return (start + slide.kernel).clamp(max=rows + slide.padding) - start
    return (start + slide.kernel).clamp(max=rows) - start.clamp(min=0)


def _are_whole(slide: Slide, ends: Range, rows: int, padded: bool) -> bool:
    """Are these rows all means of a whole kernel? Told by numbers: a graph that is traced could not ask a tensor."""
    first, last = (n * slide.stride - slide.padding for n in (ends[0], ends[1] - 1))
    return ends[0] == ends[1] or last + slide.kernel <= rows + padded * slide.padding and (padded or first >= 0)


def _edge_counts(call: Call, pooling: Pooling, out_region: Region) -> Tensor | None:
    """Of how many rows and columns each mean in this part of the output is; None where each is of a whole kernel, as
    none reaches over the edge, and where the call itself says the divisor."""
    if call["divisor_override"] is not None:
        return None
    padded = call["count_include_pad"]
    rows = [*zip(pooling.slides, pooling.space(out_region), pooling.plane)]
    if all(_are_whole(slide, ends, n, padded) for slide, ends, n in rows):
        return None
    total = torch.ones((), dtype=torch.int64, device="cpu")
    for slide, ends, n in rows:                      # the outer product over the spatial dims
        total = total.unsqueeze(-1) * _counts(slide, ends, n, padded)
    return total


def _edge_factors(call: Call, pooling: Pooling, out_region: Region, like: Tensor) -> Tensor | None:
    """The factors, for this part of the output, from means over whole kernels to means over what counts; None if all
    are 1."""
    counts = _edge_counts(call, pooling, out_region)
    return None if counts is None else (_divisor(call, pooling) / counts.double()).to(like)


def _divisor(call: Call, pooling: Pooling) -> int:
    """The number by which the kernel divides all its sums."""
    # The same for all: a rank's kernel would take the end of its window for the edge of the image.
    return call["divisor_override"] or prod(slide.kernel for slide in pooling.slides)


def avg_pool(call: Call, run: Run) -> GlobalLike:
    """Means over whole kernels, with zeros over the edge; corrected where those do not count."""
    x, (shape,) = call["self"], result_shapes(call)
    pooling = _pooling(call, shape)
    parts, = run.gather_regions([x], [pooling.window], str(call.func))
    means = {}
    for rank, part in parts.items():
        if part.numel():
            means[rank] = _means_of_part(call, pooling, part, pooling.own.region(shape, rank))
        else:
            means[rank] = part.new_empty(pooling.own.local_shape(shape, rank))
    return wrap_dense(run, result_specs(call, pooling.own)[0], means)


def _means_of_part(call: Call, pooling: Pooling, part: Tensor, out_region: Region) -> Tensor:
    """The means in one part of the output."""
    if not part.is_floating_point() and (counts := _edge_counts(call, pooling, out_region)) is not None:
        # a mean of integers is rounded, and cannot be corrected
        sums = local_op(call, self=part, padding=pooling.padding, divisor_override=1)
        return torch.div(sums, counts.to(sums.device), rounding_mode="trunc")
    mean = local_op(call, self=part, padding=pooling.padding, divisor_override=_divisor(call, pooling))
    factors = _edge_factors(call, pooling, out_region, part)
    return mean if factors is None else mean * factors


def avg_pool_backward(call: Call, run: Run) -> GlobalLike:
    """Each rank's gradients are spread over its window."""
    x, op = call["self"], str(call.func)
    grad = as_global(run, call["grad_output"], x, op)
    pooling = _pooling(call, grad.spec.shape)
    grads, = run.gather_regions([grad], [pooling.own], op)
    parts = empty_parts(x, pooling.window)
    for rank, part in parts.items():
        if part.numel():
            factors = _edge_factors(call, pooling, pooling.own.region(grad.spec.shape, rank), part)
            own = grads[rank] if factors is None else grads[rank] * factors
            parts[rank] = local_op(call, self=part, grad_output=own, padding=pooling.padding,
                                     divisor_override=_divisor(call, pooling))
    return grad_of_image(run, parts, pooling.window, result_specs(call, pooling.own)[0], len(pooling.slides), op)
