"""Group norm of images that are cut along space, or between channels of a group: statistics are summed, nothing else is
sent.

With y = (x - mean) * r and r = 1 / sqrt(var + eps), of each group of n elements:

    forward    out = y * weight + bias
    backward   with g = grad * weight, and means over the group:
               grad_x = r * (g - mean(g) - y * mean(g y)),  grad_weight = sum(grad y),  grad_bias = sum(grad)

All sums are made of sums over the space of a sample's channel, so a group may be cut anyhow: these are boxed, and what
follows from them is no larger.
"""
from __future__ import annotations

from math import prod

import torch

from globaltensor.algorithms.decompositions import cast
from globaltensor.algorithms.offer import Offer, Offers, PricedBoxing, boxings_to, largest_part
from globaltensor.algorithms.run import Run, traceable
from globaltensor.layouts.global_like import GlobalLike
from globaltensor.layouts.layout import Layout, Spec
from globaltensor.layouts.sbp import Sbp, broadcast, partial_sum
from globaltensor.rules.call import Call
from globaltensor.runtime.dtypes import accumulation_dtype

aten = torch.ops.aten


def offer_group_norm(boxings: int = 0, *, together: int = 0) -> Offers:
    """What the norm takes where a group is cut: so many boxings of a number per sample and channel, or one of several
    `together`."""

    def offer(call: Call, operands: list[Spec]) -> Offer | None:
        at = call.names.index("input")
        own = operands[at]
        home = own.layout.without_partials
        if not own.numel or not any(s.is_split and s.dim > 0 for s in home.sbp):
            return None
        samples, terms = (_of_channels_of_samples(home, cut) for cut in (broadcast, partial_sum))
        wants = tuple(home if of.ndim == own.ndim and of.shape == own.shape else samples if of.ndim == 2 else
                      home.replicated for of in operands)
        shape = own.shape[:2]
        statistic = PricedBoxing(terms, samples, shape, prod(shape) * accumulation_dtype(own.dtype).itemsize)
        of_parameter = home.with_sbp(tuple(partial_sum if s.is_split and s.dim == 0 else broadcast for s in home.sbp))
        gives = (home, *[of_parameter if together else samples] * 2)
        if together:
            gives = tuple(to for to, wanted in zip(gives, call["output_mask"]) if wanted)
        turns = [(statistic,) * together] if together else [(statistic,)] * boxings
        return Offer("statistics of the parts", wants, gives, 8 * largest_part(home, own.shape),
                     (boxings_to(operands, wants), *turns))

    return offer


def _of_channels_of_samples(home: Layout, cut: Sbp) -> Layout:
    """The layout of a number per sample and channel: `cut` where a sample is."""
    return home.with_sbp(tuple(s if not s.is_split or s.dim == 0 else cut for s in home.sbp))


def _sums_over_space(call: Call, run: Run, tensors: list[GlobalLike]) -> list[GlobalLike]:
    """Sums per sample and channel, all boxed in one go."""
    space = list(range(2, tensors[0].dim()))
    sums = [run(aten.sum.dim_IntList, t, space) if space else t for t in tensors]
    return run.redistribute(sums, [_of_channels_of_samples(t.spec.layout.without_partials, broadcast) for t in sums],
                            str(call.func))


def _means_of_groups(call: Call, run: Run, sums: GlobalLike) -> GlobalLike:
    """[samples, groups], of sums per channel."""
    n, c, groups = call["N"], call["C"], call["group"]
    total = run(aten.sum.dim_IntList, run(aten.view.default, sums, [n, groups, c // groups]), [2])
    return run(aten.div.Tensor, total, float(c // groups * call["HxW"]))


def _to_channels(call: Call, run: Run, of_groups: GlobalLike) -> GlobalLike:
    """[samples, channels], of a number per group."""
    n, c, groups = call["N"], call["C"], call["group"]
    wide = run(aten.expand.default, run(aten.unsqueeze.default, of_groups, 2), [n, groups, c // groups])
    return run(aten.view.default, run(aten.clone.default, wide, memory_format=torch.contiguous_format), [n, c])


def _over_space(run: Run, x: GlobalLike, ndim: int) -> GlobalLike:
    """A number per channel, or per sample and channel, with dims of size 1 behind, to broadcast over space."""
    for _ in range(ndim - 2):
        x = run(aten.unsqueeze.default, x, -1)
    return x


@traceable
def group_norm_forward(call: Call, run: Run) -> tuple[GlobalLike, ...]:
    """native_group_norm: the output, means and inverse deviations."""
    x = call["input"]
    x, = run.redistribute([x], [x.spec.layout.without_partials], str(call.func), keep=True)
    full, ndim = cast(run, x, accumulation_dtype(x.dtype)), x.dim()
    mean = _means_of_groups(call, run, _sums_over_space(call, run, [full])[0])
    deviation = run(aten.sub.Tensor, full, _over_space(run, _to_channels(call, run, mean), ndim))
    # two boxings: mean(x^2) - mean^2 in one would cancel to noise where the mean is large
    squares, = _sums_over_space(call, run, [run(aten.mul.Tensor, deviation, deviation)])
    inverse = run(aten.rsqrt.default, run(aten.add.Scalar, _means_of_groups(call, run, squares), call["eps"]))
    scale = _to_channels(call, run, inverse)
    if call["weight"] is not None:
        scale = run(aten.mul.Tensor, scale, cast(run, call["weight"], full.dtype))
    out = run(aten.mul.Tensor, deviation, _over_space(run, scale, ndim))
    if call["bias"] is not None:
        out = run(aten.add.Tensor, out, _over_space(run, cast(run, call["bias"], full.dtype), ndim))
    # as of torch's kernels, which may run backward
    kept = next((t.dtype for t in (call["weight"], call["bias"]) if t is not None), x.dtype)
    return cast(run, out, x.dtype), cast(run, mean, kept), cast(run, inverse, kept)


@traceable
def group_norm_backward(call: Call, run: Run) -> tuple[GlobalLike | None, ...]:
    """Gradients of input, weight and bias, those that are wanted."""
    x, mask = call["input"], call["output_mask"]
    home = x.spec.layout.without_partials
    x, grad = run.redistribute([x, call["grad_out"]], [home] * 2, str(call.func), keep=True)
    dtype, ndim, weight = accumulation_dtype(x.dtype), x.dim(), call["weight"]
    grad, mean, inverse = (cast(run, t, dtype) for t in (grad, call["mean"], call["rstd"]))
    scale = _to_channels(call, run, inverse)
    deviation = run(aten.sub.Tensor, cast(run, x, dtype), _over_space(run, _to_channels(call, run, mean), ndim))
    sums = _sums_over_space(call, run, [run(aten.mul.Tensor, grad, deviation), grad])
    weighted = run(aten.mul.Tensor, sums[0], scale)      # sums of grad * y
    grad_x = None
    if mask[0]:
        wide = None if weight is None else cast(run, weight, dtype)
        products, grads = (_to_channels(call, run, _means_of_groups(call, run, t if wide is None else
                                                                    run(aten.mul.Tensor, t, wide)))
                           for t in (weighted, sums[1]))
        slope = run(aten.mul.Tensor, run(aten.mul.Tensor, scale, scale), products)
        shift = run(aten.mul.Tensor, scale, grads)
        factor = scale if wide is None else run(aten.mul.Tensor, scale, wide)
        grad_x = run(aten.sub.Tensor, run(aten.mul.Tensor, grad, _over_space(run, factor, ndim)),
                     run(aten.mul.Tensor, deviation, _over_space(run, slope, ndim)))
        grad_x = cast(run, run(aten.sub.Tensor, grad_x, _over_space(run, shift, ndim)), x.dtype)
    of_parameters = [cast(run, run(aten.sum.dim_IntList, t, [0]), call["mean"].dtype) if yes else None
                     for t, yes in zip((weighted, sums[1]), mask[1:])]
    return grad_x, *of_parameters
