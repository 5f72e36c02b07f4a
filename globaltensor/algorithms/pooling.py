"""Pooling of images whose rows are split, by windows as a convolution (halo.py): only rows at the seams cross ranks.

    maximum    over the edge a window is as low as can be. Places are counted in the plane of the whole image, so those
               that a rank finds in its window are shifted by where that begins, and shifted back for the gradient
    mean       over the edge a window is zero; kernels that reach there divide by other numbers than the rest

Backward, of the image only the size is needed: nothing but the halo of the gradient moves.
"""
from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from globaltensor.algorithms.halo import (
    Slide,
    as_global,
    blank,
    inner_padding,
    locally,
    shapes_of,
    slides_of,
    summed,
    window_of,
)
from globaltensor.layouts.layout import Layout, Shape, spec
from globaltensor.layouts.regions import Region
from globaltensor.rules.call import Call


class Pooling(NamedTuple):
    """How a pooling runs: its image and what it makes lie as `own`; `plane` is the space of the image."""

    own: Layout
    window: Layout
    slides: tuple[Slide, ...]
    padding: list[int]                               # that is left to the kernel
    plane: Shape

    def rows(self, region: Region) -> Region:
        """A box without batch and channels."""
        return region[-len(self.slides):]


def _pooling(call: Call, made: Shape) -> Pooling:
    """Of `call["self"]`, to something of shape `made`."""
    own, shape, slides = call["self"].spec.layout.without_partials, call["self"].spec.shape, slides_of(call)
    n = len(slides)
    window = window_of(own, shape, made[-n:], slides)
    return Pooling(own, window, slides, inner_padding(own, len(shape), slides), shape[-n:])


def _lowest(part: Tensor, region: Region, shape: Shape) -> Tensor:
    """A window with the lowest number where it is over the edge, in place: it is nobody else's."""
    low = float("-inf") if part.is_floating_point() else torch.iinfo(part.dtype).min
    for d, ((start, stop), n) in enumerate(zip(region, shape)):
        size = stop - start
        before, inside = min(max(-start, 0), size), min(max(n - start, 0), size)
        if before:
            part.narrow(d, 0, before).fill_(low)
        if inside < size:
            part.narrow(d, inside, size - inside).fill_(low)
    return part


def _positions(found: Tensor, region: Region, plane: Shape, slides: tuple[Slide, ...], back: bool = False) -> Tensor:
    """Positions in a window, which is `box` of a plane, as positions in that plane; or `back`.

    Where all is as low as it can be, the kernel takes the first row, over the edge or not: that is the first one
    which is not.
    """
    sizes = tuple(stop - start for start, stop in region)
    before, after, sign = (plane, sizes, -1) if back else (sizes, plane, 1)
    if region[1:] == tuple((0, n) for n in plane[1:]):  # only the outermost dim is cut
        row = prod(plane[1:])
        moved = found + sign * region[0][0] * row
        return moved if back or region[0][0] >= 0 else torch.where(moved < 0, moved % (slides[0].dilation * row), moved)
    moved = torch.zeros_like(found)
    for n, (start, _), slide, step in reversed([*zip(before, region, slides, _steps(after))]):
        at = found % n + sign * start
        moved += torch.where(at < 0, at % slide.dilation, at) * step
        found = found // n
    return moved


def _steps(sizes: Shape) -> list[int]:
    """How far apart the neighbours along each dim lie."""
    return [*accumulate(reversed(sizes[1:]), int.__mul__, initial=1)][::-1]


def max_pool(call: Call, run: Any) -> tuple[Any, Any]:
    """Maxima, and where in the plane of the whole image they are."""
    x, (shape, _) = call["self"], shapes_of(call)
    how = _pooling(call, shape)
    parts, = run.gather_regions([x], [how.window], str(call.func))
    most, places = {}, {}
    for rank, part in parts.items():
        region = how.window.region(x.spec.shape, rank)
        if part.numel():
            found = locally(call, self=_lowest(part, region, x.spec.shape), padding=how.padding)
            most[rank] = found[0].contiguous()
            places[rank] = _positions(found[1].contiguous(), how.rows(region), how.plane, how.slides)
        else:
            most[rank] = part.new_empty(how.own.local_shape(shape, rank))
            places[rank] = most[rank].long()
    return tuple(run.wrap(spec(how.own, shape, None, dtype), shards)
                 for dtype, shards in ((x.dtype, most), (torch.int64, places)))


def max_pool_backward(call: Call, run: Any) -> Any:
    """Each rank's gradients go to where in its window the maxima are, as `max_pool` found them."""
    x, op = call["self"], str(call.func)
    grad, places = (as_global(run, call[name], x, op) for name in ("grad_output", "indices"))
    how = _pooling(call, grad.spec.shape)
    grads, places = run.gather_regions([grad, places], [how.own, how.own], op)
    parts = blank(x, how.window)
    for rank, part in parts.items():
        if part.numel():
            region = how.rows(how.window.region(x.spec.shape, rank))
            at = _positions(places[rank], region, how.plane, how.slides, back=True)
            parts[rank] = locally(call, self=part, grad_output=grads[rank], indices=at, padding=how.padding)
    return summed(run, parts, how.window, x, how.own, len(how.slides), op)


def _counts(slide: Slide, ends: tuple[int, int], rows: int, padded: bool) -> Tensor:
    """How many rows each of some output rows is the mean of, with those of the padding or without."""
    start = torch.arange(*ends) * slide.stride - slide.padding
    if padded:
        return (start + slide.kernel).clamp(max=rows + slide.padding) - start
    return (start + slide.kernel).clamp(max=rows) - start.clamp(min=0)


def _corrections(call: Call, how: Pooling, made: Region, like: Tensor) -> Tensor | None:
    """What means over whole kernels must be multiplied with, where kernels reach over the edge: [*rows], or None.

    `made` is the part of the output that the rank has.
    """
    if call["divisor_override"] is not None:
        return None
    padded = call["count_include_pad"]
    counts = [_counts(slide, ends, n, padded) for slide, ends, n in zip(how.slides, how.rows(made), how.plane)]
    if all(bool((n == slide.kernel).all()) for n, slide in zip(counts, how.slides)):
        return None
    found = torch.ones((), dtype=torch.float64)
    for n, slide in zip(counts, how.slides):
        found = found.unsqueeze(-1) * (slide.kernel / n.double())
    return found.to(like)


def _divisor(call: Call, how: Pooling) -> int:
    """By which the kernel divides all its sums."""
    return call["divisor_override"] or prod(slide.kernel for slide in how.slides)


def avg_pool(call: Call, run: Any) -> Any:
    """Means over whole kernels, with zeros over the edge; put right where those do not count."""
    x, (shape,) = call["self"], shapes_of(call)
    how = _pooling(call, shape)
    parts, = run.gather_regions([x], [how.window], str(call.func))
    means = {}
    for rank, part in parts.items():
        if part.numel():
            mean = locally(call, self=part, padding=how.padding, divisor_override=_divisor(call, how)).contiguous()
            times = _corrections(call, how, how.own.region(shape, rank), part)
            means[rank] = mean if times is None else mean * times
        else:
            means[rank] = part.new_empty(how.own.local_shape(shape, rank))
    return run.wrap(spec(how.own, shape, None, x.dtype), means)


def avg_pool_backward(call: Call, run: Any) -> Any:
    """Each rank's gradients are shared out over its window; of the image only the size is needed."""
    x, op = call["self"], str(call.func)
    grad = as_global(run, call["grad_output"], x, op)
    how = _pooling(call, grad.spec.shape)
    grads, = run.gather_regions([grad], [how.own], op)
    parts = blank(x, how.window)
    for rank, part in parts.items():
        if part.numel():
            times = _corrections(call, how, how.own.region(grad.spec.shape, rank), part)
            g = grads[rank] if times is None else grads[rank] * times
            parts[rank] = locally(call, self=part, grad_output=g, padding=how.padding,
                                   divisor_override=_divisor(call, how))
    return summed(run, parts, how.window, x, how.own, len(how.slides), op)
