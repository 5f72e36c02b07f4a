"""Convolution of images whose rows are split: only the rows at the seams, the *halo*, cross ranks.

A kernel slides along a dim: output row i reads the input rows

    i * stride - padding + dilation * (0, 1, ..., kernel - 1)

Each rank makes its own part [a, b) of the output rows, and asks for a *window* of the input: the rows from
a * stride - padding to (b - 1) * stride - padding + dilation * (kernel - 1). Most of them it has. A window may reach
over the edge of the image: there it is zero, which is the padding.

    10 rows on 2 ranks, kernel 3, padding 1     rank 0 makes 0 to 4 of -1 to 5, rank 1 makes 5 to 9 of 4 to 10:
                                                a row goes each way

Backward, each rank makes the gradient of its window from the gradient of its own output rows. Where windows overlap
it is summed; the rows of the halo go back to whose they are. The gradient of the weight is left pending, as that of
a split batch is. Along the other axes of the placement a convolution is cut as its rule would cut it:

    BATCH     each rank has its own images                 INPUTS   ... some channels of the input, and terms of a sum
    OUTPUTS   each makes some channels of the output       GROUPS   ... some groups of channels
"""
from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from globaltensor.algorithms.decompositions import as_global
from globaltensor.layouts.layout import Layout, Shape, layout, spec
from globaltensor.layouts.rank_regions import RankRegions, rank_regions
from globaltensor.layouts.regions import Region
from globaltensor.layouts.sbp import Sbp, broadcast, partial_sum, split
from globaltensor.rules.call import Call
from globaltensor.runtime.meta import meta

Parts = dict[int, Tensor]                            # rank -> its own


class Slide(NamedTuple):
    """How a kernel slides along one dim."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    def reads(self, first: int, last: int) -> tuple[int, int]:
        """Start and stop of the input rows, padding included, that output rows [first, last) are made of."""
        if first == last:
            return 0, 0
        start = first * self.stride - self.padding
        return start, start + (last - 1 - first) * self.stride + self.dilation * (self.kernel - 1) + 1


class Along(NamedTuple):
    """How the operands of a convolution and what it gives lie along one axis."""

    x: Sbp
    weight: Sbp
    bias: Sbp
    out: Sbp

    @property
    def gradient(self) -> Along:
        """How their gradients lie."""
        return self if self == WHOLE else Along(*(s.dual for s in self))


BATCH = Along(split(0), broadcast, broadcast, split(0))
OUTPUTS = Along(broadcast, split(0), split(0), split(1))
INPUTS = Along(split(1), split(1), partial_sum, partial_sum)
GROUPS = Along(split(1), split(0), split(0), split(1))
WHOLE = Along(broadcast, broadcast, broadcast, broadcast)


def cuts_space(call: Call) -> bool:
    """Is the image of a convolution or a pooling cut along a dim of space?

    It stays cut as the user laid it, small as it may be, even where splitting the batch instead would move less. A
    transposed convolution is left to its rule: each of its input rows makes several of the output.
    """
    own = getattr(_image(call), "spec", None)
    return own is not None and not call.get("transposed") and bool(_cut(own.layout, own.ndim, _space(call)))


def _image(call: Call) -> Any:
    return call["self"] if "self" in call.values else call["input"]


def _space(call: Call) -> int:
    """How many dims of space there are: the last ones. Convolutions have them after batch and channels; the name of
    a pooling tells."""
    name = call.func._schema.name
    return call["input"].dim() - 2 if "convolution" in name else next(int(c) for c in name if c.isdigit())


def _cut(own: Layout, ndim: int, space: int) -> set[int]:
    """The dims of space that are cut."""
    return {s.dim for s in own.sbp if s.is_split and s.dim >= ndim - space}


def _each(value: Any, n: int) -> list[int]:
    """One number per dim of space, where one may stand for all."""
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    return found * n if len(found) == 1 else found


def slides_of(call: Call) -> tuple[Slide, ...]:
    """Along each dim of space."""
    n = _space(call)
    kernel = _each(call["kernel_size"], n) if "kernel_size" in call.values else list(call["weight"].shape[2:])
    return tuple(map(Slide, kernel, _each(call["stride"] or kernel, n), _each(call["padding"], n),
                     _each(call.get("dilation", 1), n)))


def inner_padding(own: Layout, ndim: int, slides: tuple[Slide, ...]) -> list[int]:
    """The padding that is left to the op itself: along the dims that are not cut."""
    cut = _cut(own, ndim, len(slides))
    return [0 if d in cut else slide.padding for d, slide in enumerate(slides, ndim - len(slides))]


@lru_cache(10_000)
def window_of(own: Layout, shape: Shape, made: Shape, slides: tuple[Slide, ...]) -> Layout:
    """What each rank reads of an image that lies as `own`, to make its part of an output whose space is `made`.

    `own` itself, where no rank needs anything else than what it has.
    """
    lead = len(shape) - len(slides)
    cut = _cut(own, len(shape), len(slides))
    regions: dict[int, Region] = {}
    for rank in own.placement.flat:
        rows = own.region((*shape[:lead], *made), rank)
        regions[rank] = tuple(slides[d - lead].reads(*rows[d]) if d in cut else ends
                              for d, ends in enumerate(own.region(shape, rank)))
    if all(region == own.region(shape, rank) for rank, region in regions.items()):
        return own
    return rank_regions(own.placement, regions)


def blank(like: Any, window: Layout) -> Parts:
    """Something of the size of each rank's window, where values do not matter."""
    return {rank: t.new_empty(window.local_shape(like.spec.shape, rank)) for rank, t in like.shards.items()}


def summed(run: Any, parts: Parts, window: Layout, of: Any, dst: Layout, space: int, op: str) -> Any:
    """The gradient of an image from those of its windows."""
    shape, dtype = of.spec.shape, of.spec.dtype
    if not isinstance(window, RankRegions):
        return run.wrap(spec(dst, shape, None, dtype), {rank: t.contiguous() for rank, t in parts.items()})
    cut = _cut(dst, len(shape), space)
    pending = tuple(s if s.is_partial else partial_sum if s.is_split and s.dim in cut else broadcast for s in dst.sbp)
    return run.scatter_add_regions(parts, rank_regions(dst.placement, window.regions, pending), shape, dtype, dst, op)


def locally(call: Call, **other: Any) -> Any:
    """The op itself, with other arguments."""
    return call.func(*{**call.values, **other}.values())


class _Tensor(NamedTuple):
    shape: Shape
    dtype: torch.dtype


def shapes_of(call: Call) -> list[Shape]:
    """Of what the op returns. A user's mistake is torch's own error, about global shapes."""
    return _told(call.func, tuple(_Tensor(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else
                                  tuple(v) if isinstance(v, list) else v for v in call.values.values()))


@lru_cache(10_000)
def _told(func: OpOverload, given: Iterable[Any]) -> list[Shape]:
    made = meta(func, [torch.empty(v.shape, dtype=v.dtype, device="meta") if isinstance(v, _Tensor) else v
                       for v in given], {})
    return [tuple(t.shape) for t in (made if isinstance(made, tuple) else [made])]


# --------------------------------------------------------------------------------------------------- convolution


def _sides(x: Layout, weight: Layout, channels: int, groups: int) -> tuple[Along, ...]:
    """How a convolution is cut along each axis: as the image lies, else as the weight does."""
    found = []
    left = groups if groups > 1 else channels        # that can still be cut
    for s, w, parts in zip(x.sbp, weight.sbp, x.placement.shape):
        side = WHOLE
        if s.is_split and s.dim != 1:
            side = BATCH if s.dim == 0 else Along(s, broadcast, broadcast, s)
        elif groups > 1 and left % parts == 0 and (s == split(1) or w == split(0)):
            side, left = GROUPS, left // parts
        elif groups == 1 and w == split(0):
            side = OUTPUTS
        elif groups == 1 and left >= parts and s == w == split(1):
            side, left = INPUTS, left // parts
        found.append(side)
    return tuple(found)


@lru_cache(10_000)
def _convolved(x: Layout, weight: Layout, channels: int, groups: int) -> tuple[Along, Along]:
    """The layouts of operands and output, and of their gradients, in the places of their sbps."""
    sides = _sides(x, weight, channels, groups)
    return tuple(Along(*(layout(x.placement, nd) for nd in zip(*how)))
                 for how in (sides, [side.gradient for side in sides]))


def _groups(call: Call, part: Tensor) -> int:
    """How many groups the channels of a part of the image are."""
    return max(call["groups"] * part.shape[1] // call["input"].shape[1], 1)


def convolution(call: Call, run: Any) -> Any:
    """Each rank convolves its window. What comes out is contiguous."""
    op, x, slides, (shape,) = str(call.func), call["input"], slides_of(call), shapes_of(call)
    operands = [as_global(run, t, x, op) for t in call.tensors]
    held, _ = _convolved(x.spec.layout.without_partials, operands[1].spec.layout, x.shape[1], call["groups"])
    window = window_of(held.x, x.spec.shape, shape[2:], slides)
    moved = run.gather_regions(operands, [window, held.weight, held.bias][:len(operands)], op)
    padding, out = inner_padding(held.x, x.dim(), slides), {}
    for rank, part in moved[0].items():
        weight, *bias = (t[rank] for t in moved[1:])
        if part.numel() and weight.numel():
            out[rank] = locally(call, input=part, weight=weight, bias=bias[0] if bias else None, padding=padding,
                                groups=_groups(call, part)).contiguous()
        else:
            out[rank] = part.new_zeros(held.out.local_shape(shape, rank))
    return run.wrap(spec(held.out, shape, None, x.dtype), out)


def convolution_backward(call: Call, run: Any) -> tuple[Any, Any, Any]:
    """Gradients of the image, the weight and the bias, those that are wanted."""
    op, x, slides, wanted = str(call.func), call["input"], slides_of(call), call["output_mask"]
    grad, weight = (as_global(run, call[name], x, op) for name in ("grad_output", "weight"))
    held, give = _convolved(x.spec.layout.without_partials, weight.spec.layout, x.shape[1], call["groups"])
    window = window_of(held.x, x.spec.shape, tuple(grad.shape[2:]), slides)
    grads, weights, *parts = run.gather_regions([grad, weight, x][:2 + wanted[1]], [give.out, held.weight, window], op)
    parts = parts[0] if parts else blank(x, window)
    padding = inner_padding(held.x, x.dim(), slides)
    found: list[Parts] = [{}, {}, {}]
    for rank, g in grads.items():
        part, w = parts[rank], weights[rank]
        if g.numel() and part.numel() and w.numel():
            sizes = [w.shape[0]] if wanted[2] else call["bias_sizes"]
            made = locally(call, grad_output=g, input=part, weight=w, bias_sizes=sizes, padding=padding,
                           groups=_groups(call, part))
        else:
            made = part.new_zeros(part.shape), w.new_zeros(w.shape), g.sum([d for d in range(g.dim()) if d != 1])
        for into, t in zip(found, made):
            into[rank] = t
    of_weight = spec(give.weight, weight.spec.shape, None, weight.dtype)
    of_bias = spec(give.bias, (grad.shape[1],), None, grad.dtype)
    return (summed(run, found[0], window, x, give.x, len(slides), op) if wanted[0] else None,
            run.wrap(of_weight, {r: t.contiguous() for r, t in found[1].items()}) if wanted[1] else None,
            run.wrap(of_bias, found[2]) if wanted[2] else None)
