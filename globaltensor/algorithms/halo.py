"""Convolution of images whose rows are split: only the rows at the seams, the *halo*, cross ranks.

A kernel slides along a dim: output row i reads the input rows

    i * stride - padding + dilation * (0, 1, ..., kernel - 1)

Each rank makes its own part [a, b) of the output rows, and asks for a *window* of the input: the rows from
a * stride - padding to (b - 1) * stride - padding + dilation * (kernel - 1). It holds most of them. A window may extend
over the edge of the image: there it is zero, which is the padding.

    10 rows on 2 ranks, kernel 3, padding 1     rank 0 makes rows 0 to 4 of -1 to 5, rank 1 makes 5 to 9 of 4 to 10:
                                                one row goes each way

In the backward pass each rank makes the gradient of its window from the gradient of its own output rows. Where windows
overlap, gradients are summed: the rows of the halo go back to their owners. The gradient of the weight is left pending,
as with a split batch. Along the other axes of the placement a convolution is cut as its rule would cut it:

    BATCH     each rank has its own images                 INPUTS   ... some channels of the input, and a term of a sum
    OUTPUTS   each makes some channels of the output       GROUPS   ... some groups of channels
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from globaltensor.algorithms.decompositions import as_global
from globaltensor.algorithms.run import Run
from globaltensor.layouts.global_like import GlobalLike, spec_of
from globaltensor.layouts.layout import Layout, Shape, Shards, Spec, dense_in_order, layout, spec
from globaltensor.layouts.rank_regions import RankRegions, regions_by
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.regions import Region
from globaltensor.layouts.sbp import Sbp, broadcast, partial_sum, split
from globaltensor.rules.call import Call
from globaltensor.runtime.meta import as_on, meta
from globaltensor.runtime.torch_internals import OpOverload, without_modes


class Slide(NamedTuple):
    """How a kernel slides along one dim."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    def reads(self, first: int, last: int) -> tuple[int, int]:
        """Start and stop of the input rows, padding included, that output rows [first, last) read."""
        if first == last:
            return 0, 0
        start = first * self.stride - self.padding
        return start, start + (last - 1 - first) * self.stride + self.dilation * (self.kernel - 1) + 1


class AxisSbps(NamedTuple):
    """The sbps of a convolution's operands and output along one axis."""

    x: Sbp
    weight: Sbp
    bias: Sbp
    out: Sbp

    @property
    def gradient(self) -> AxisSbps:
        """Those of their gradients."""
        # Where nothing is cut, every rank computes the whole gradient: it is broadcast, not a sum of terms.
        return self if self == WHOLE else AxisSbps(*(s.dual for s in self))


class ConvLayouts(NamedTuple):
    """The same along all axes."""

    x: Layout
    weight: Layout
    bias: Layout
    out: Layout


BATCH = AxisSbps(split(0), broadcast, broadcast, split(0))
OUTPUTS = AxisSbps(broadcast, split(0), split(0), split(1))
# the bias too: added by all terms, it would count often
INPUTS = AxisSbps(split(1), split(1), partial_sum, partial_sum)
GROUPS = AxisSbps(split(1), split(0), split(0), split(1))
WHOLE = AxisSbps(broadcast, broadcast, broadcast, broadcast)


def cuts_space(call: Call) -> bool:
    """Is the image of a convolution or a pooling cut along a spatial dim?

    It then stays cut as the user laid it out, but where splitting the batch instead is cheaper (halo_offers.py). A
    transposed convolution is left to its rule: each of its input rows makes several rows of the output.
    """
    own = spec_of(_image(call))
    return own is not None and not call.get("transposed") and bool(_split_space(own.layout, own.ndim, _space(call)))


def _image(call: Call) -> Any:
    return call["self"] if "self" in call.values else call["input"]


def _space(call: Call) -> int:
    """The number of spatial dims, which are the last ones. In a convolution they follow batch and channels; a pooling,
    which may have no batch, has the number in its name: max_pool2d."""
    name = call.func._schema.name
    return call["input"].dim() - 2 if "convolution" in name else next(int(c) for c in name if c.isdigit())


def _split_space(own: Layout, ndim: int, space: int) -> set[int]:
    """The spatial dims that are cut."""
    return {s.dim for s in own.sbp if s.is_split and s.dim >= ndim - space}


def _per_dim(value: int | list[int] | tuple[int, ...], n: int) -> list[int]:
    """One number per spatial dim; one alone is for all."""
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]
    return numbers * n if len(numbers) == 1 else numbers


def slides_of(call: Call) -> tuple[Slide, ...]:
    """How the kernel slides along each spatial dim."""
    n = _space(call)
    kernel = _per_dim(call["kernel_size"], n) if "kernel_size" in call.values else list(call["weight"].shape[2:])
    return tuple(map(Slide, kernel, _per_dim(call["stride"] or kernel, n), _per_dim(call["padding"], n),
                     _per_dim(call.get("dilation", 1), n)))


def local_padding(own: Layout, ndim: int, slides: tuple[Slide, ...]) -> list[int]:
    """The padding that the local op still has to do: along the dims that are not cut. The others' is in the windows."""
    cut = _split_space(own, ndim, len(slides))
    return [0 if d in cut else slide.padding for d, slide in enumerate(slides, ndim - len(slides))]


class _Window(NamedTuple):
    """Which part of an image a rank reads, to make its part of an output with these spatial dims."""

    own: Layout
    shape: Shape
    out_space: Shape
    slides: tuple[Slide, ...]

    def region(self, rank: int) -> Region:
        lead = len(self.shape) - len(self.slides)
        cut = _split_space(self.own, len(self.shape), len(self.slides))
        out_region = self.own.region((*self.shape[:lead], *self.out_space), rank)   # the output is cut as the image is
        return tuple(self.slides[d - lead].reads(*out_region[d]) if d in cut else ends
                     for d, ends in enumerate(self.own.region(self.shape, rank)))


@remembered
def window_of(own: Layout, shape: Shape, out_space: Shape, slides: tuple[Slide, ...]) -> Layout:
    """What each rank reads of an image laid out as `own`, to make its part of an output with these spatial dims.

    `own` itself, if every rank reads just what it has.
    """
    where, cut = own.placement, _split_space(own, len(shape), len(slides))
    axes = tuple(axis for axis, s in enumerate(own.sbp) if s.is_split and s.dim in cut)
    window = _Window(own, shape, out_space, slides)
    if all(window.region(rank) == own.region(shape, rank) for rank in where.ranks_along(axes, where.flat[0])):
        return own
    return regions_by(where, window, None, own, axes)


def empty_parts(like: GlobalLike, window: Layout) -> Shards:
    """Tensors of the sizes of the ranks' windows, for an op that reads only the size."""
    return {rank: t.new_empty(window.local_shape(like.spec.shape, rank)) for rank, t in like.shards.items()}


def grad_of_image(run: Run, grads: Shards, window: Layout, own: Spec, space: int, op: str) -> GlobalLike:
    """The gradient of an image, of this spec, from the gradients of the ranks' windows."""
    if not isinstance(window, RankRegions):
        return wrap_dense(run, own, grads)
    dst = own.layout
    cut = _split_space(dst, own.ndim, space)
    # Windows overlap, so a rank's gradient of a row at the seam is a term of a sum, of which others have the rest.
    pending = tuple(s if s.is_partial else partial_sum if s.is_split and s.dim in cut else broadcast for s in dst.sbp)
    return run.scatter_add_regions(grads, window.with_sbp(pending), own, op)


def wrap_dense(run: Run, own: Spec, shards: Shards) -> GlobalLike:
    """A global tensor of these shards, which lie in memory as its strides tell."""
    return run.wrap(own, {rank: dense_in_order(t, own.stride) for rank, t in shards.items()})


def local_op(call: Call, **changed: Any) -> Any:
    """The op itself, with some arguments changed."""
    return call.func(*{**call.values, **changed}.values())


class _TensorArgument(NamedTuple):
    """What of a tensor the shape and the strides of a result depend on."""

    shape: Shape
    stride: Shape
    dtype: torch.dtype


def result_specs(call: Call, *layouts: Layout) -> list[Spec]:
    """The specs of the op's results in these layouts, of those that are wanted. A user's mistake is torch's own error,
    about global shapes."""
    results = _meta_results(layouts[0].placement.type, call.func, _remembered_arguments(call))
    return [spec(where, *result) for where, result in zip(layouts, results)]


def result_shapes(call: Call) -> list[Shape]:
    """Their shapes."""
    return [shape for shape, *_ in _meta_results("meta", call.func, _remembered_arguments(call))]


def _remembered_arguments(call: Call) -> tuple[Any, ...]:
    return tuple(_TensorArgument(tuple(v.shape), v.stride(), v.dtype) if isinstance(v, Tensor) else
                 tuple(v) if isinstance(v, list) else v for v in call.values.values())


@remembered
def _meta_results(device: str, func: OpOverload, values: tuple[Any, ...]) -> list[tuple[Shape, Shape, torch.dtype]]:
    tensors = [v for v in values if isinstance(v, _TensorArgument)]
    with without_modes():                            # that of a trace would make fake tensors of these
        left = [torch.empty_strided(own.shape, own.stride, dtype=own.dtype, device="meta") for own in tensors]
        results = meta(func, [left.pop(0) if isinstance(v, _TensorArgument) else v for v in values], {})
        every = as_on(device, func, tensors, results)
    return [(tuple(t.shape), t.stride(), t.dtype) for t in (every if isinstance(every, tuple) else [every])
            if t is not None]


# --------------------------------------------------------------------------------------------------- convolution


def _axis_sbps(x: Layout, weight: Layout, channels: int, groups: int) -> list[AxisSbps]:
    """How a convolution is cut along each axis: as the image is, else as the weight is."""
    axes = []
    left = groups if groups > 1 else channels        # that later axes can still cut
    for s, w, parts in zip(x.sbp, weight.sbp, x.placement.shape):
        sbps = WHOLE
        if s.is_split and s.dim != 1:
            sbps = BATCH if s.dim == 0 else AxisSbps(s, broadcast, broadcast, s)
        elif groups > 1 and left % parts == 0 and (s == split(1) or w == split(0)):
            sbps, left = GROUPS, left // parts
        elif groups == 1 and w == split(0):
            sbps = OUTPUTS
        elif groups == 1 and left >= parts and s == w == split(1):
            sbps, left = INPUTS, left // parts
        axes.append(sbps)
    return axes


@remembered
def conv_layouts(x: Layout, weight: Layout, channels: int, groups: int) -> tuple[ConvLayouts, ConvLayouts]:
    """The layouts of operands and output, and those of their gradients."""
    axes = _axis_sbps(x, weight, channels, groups)
    forward, backward = (ConvLayouts(*(layout(x.placement, nd) for nd in zip(*sbps)))
                         for sbps in (axes, [sbps.gradient for sbps in axes]))
    return forward, backward


def _local_groups(call: Call, part: Tensor) -> int:
    """The number of groups in the channels of a part of the image."""
    return max(call["groups"] * part.shape[1] // call["input"].shape[1], 1)


def convolution(call: Call, run: Run) -> GlobalLike:
    """Each rank convolves its window."""
    op, x, slides = str(call.func), call["input"], slides_of(call)
    operands = [as_global(run, t, x, op) for t in call.tensors]
    want, _ = conv_layouts(x.spec.layout.without_partials, operands[1].spec.layout, x.shape[1], call["groups"])
    own, = result_specs(call, want.out)
    window = window_of(want.x, x.spec.shape, own.shape[2:], slides)
    images, *parameters = run.gather_regions(operands, [window, want.weight, want.bias][:len(operands)], op)
    padding, out = local_padding(want.x, x.dim(), slides), {}
    for rank, part in images.items():
        weight, *bias = (t[rank] for t in parameters)
        if part.numel() and weight.numel():
            out[rank] = local_op(call, input=part, weight=weight, bias=bias[0] if bias else None, padding=padding,
                                 groups=_local_groups(call, part))
        else:                                        # kernels refuse empty operands
            out[rank] = part.new_zeros(own.local_shape(rank))
    return wrap_dense(run, own, out)


def convolution_backward(call: Call, run: Run) -> tuple[GlobalLike | None, ...]:
    """Gradients of the image, the weight and the bias, those that are wanted."""
    op, x, slides, wanted = str(call.func), call["input"], slides_of(call), call["output_mask"]
    grad, weight = (as_global(run, call[name], x, op) for name in ("grad_output", "weight"))
    forward, backward = conv_layouts(x.spec.layout.without_partials, weight.spec.layout, x.shape[1], call["groups"])
    window = window_of(forward.x, x.spec.shape, tuple(grad.shape[2:]), slides)
    # the image itself is read for the gradient of the weight only
    grads, weights, *images = run.gather_regions([grad, weight, x][:2 + wanted[1]],
                                                 [backward.out, forward.weight, window], op)
    parts = images[0] if images else empty_parts(x, window)
    padding = local_padding(forward.x, x.dim(), slides)
    local_grads: list[Shards] = [{}, {}, {}]         # of image, weight and bias
    for rank, g in grads.items():
        part, w = parts[rank], weights[rank]
        if g.numel() and part.numel() and w.numel():
            sizes = [w.shape[0]] if wanted[2] else call["bias_sizes"]
            results = local_op(call, grad_output=g, input=part, weight=w, bias_sizes=sizes, padding=padding,
                               groups=_local_groups(call, part))
        else:
            results = part.new_zeros(part.shape), w.new_zeros(w.shape), g.sum([d for d in range(g.dim()) if d != 1])
        for shards, result in zip(local_grads, results):
            shards[rank] = result
    specs = iter(result_specs(call, *(one for one, want in zip((backward.x, backward.weight, backward.bias), wanted)
                                      if want)))
    return (grad_of_image(run, local_grads[0], window, next(specs), len(slides), op) if wanted[0] else None,
            wrap_dense(run, next(specs), local_grads[1]) if wanted[1] else None,
            run.wrap(next(specs), local_grads[2]) if wanted[2] else None)
