"""Layer norm and RMS norm of features that are split, as on a grid of ranks: only statistics are communicated.

With y = (x - mean) * r and r = 1 / sqrt(var + eps), for layer norm (RMS norm has neither the mean nor its term):

    forward    out = y * weight + bias
    backward   with g = grad * weight, means over the features:
               grad_x = r * (g - mean(g) - y * mean(g y)),  grad_weight = sum(grad y),  grad_bias = sum(grad)
"""
from __future__ import annotations

from math import prod

import torch

from globaltensor.algorithms.decompositions import cast, contiguous_operand
from globaltensor.algorithms.offer import Offer, Offers, PricedBoxing, boxings_to, largest_part
from globaltensor.algorithms.run import Run, traceable
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import Spec
from globaltensor.layouts.sbp import Sbp, broadcast, partial_sum, split
from globaltensor.rules.call import Call
from globaltensor.runtime.dtypes import accumulation_dtype

aten = torch.ops.aten


def offer_statistics(boxings: int = 0, *, together: int = 0) -> Offers:
    """What the norm takes where features are split along the last axis that splits anything, and samples along an
    earlier one; or where it is over several dims, as of images: so many boxings of a number per sample, or one of
    several `together`.

    Then it is on a grid of ranks (`parallel/grids.py`), or space is cut, and the layers that follow want features to
    stay so. If one dim of features alone is split, by a parameter that ZeRO cut, say, the plain rule moves the
    activations back to split samples.
    """

    def offer(call: Call, operands: list[Spec]) -> Offer | None:
        specs = dict(zip(call.names, operands))
        first = call["input"].dim() - len(call["normalized_shape"])
        cut = [specs[name] for name in ("input", "grad_out") if name in specs and _cuts_features(specs[name], first)]
        if not cut:
            return None
        own = cut[0]
        home = own.layout.without_partials
        per_sample, per_feature, pending = (home.with_sbp(tuple(change(s, first) for s in home.sbp))
                                            for change in (_of_sample, _of_feature, _of_gradient))
        shape = (*own.shape[:first], *[1] * (own.ndim - first))
        terms = home.with_sbp(tuple(partial_sum if s.is_split and s.dim >= first else s for s in home.sbp))
        statistic = PricedBoxing(terms, per_sample, shape,
                                 prod(shape) * accumulation_dtype(own.dtype).itemsize)
        wants = tuple(per_feature if name in ("weight", "bias") else per_sample if name in ("mean", "rstd") else home
                      for name in call.names)
        gives = (home, *[per_sample] * (len(call.func._schema.returns) - 1))
        if together:
            gives = tuple(to for to, wanted in zip((home, pending, pending), call["output_mask"]) if wanted)
        turns = [(statistic,) * together] if together else [(statistic,)] * boxings
        return Offer("statistics of the parts", wants, gives, 8 * largest_part(home, own.shape),
                     (boxings_to(operands, wants), *turns))

    return offer


def _cuts_features(own: Spec, first: int) -> bool:
    cuts = [s.dim for s in own.sbp if s.is_split]
    return bool(cuts) and cuts[-1] >= first and (min(cuts) < first or own.ndim > first + 1)


def _of_sample(s: Sbp, first: int) -> Sbp:
    return broadcast if s.is_split and s.dim >= first else s


def _of_feature(s: Sbp, first: int) -> Sbp:
    return split(s.dim - first) if s.is_split and s.dim >= first else broadcast


def _of_gradient(s: Sbp, first: int) -> Sbp:
    """Of a parameter: a sum over the samples."""
    return _of_feature(s, first) if not s.is_split or s.dim >= first else partial_sum


def _samples_and_features(call: Call) -> tuple[list[int], list[int]]:
    """The dims of samples and those of features."""
    ndim = call["input"].dim()
    first = ndim - len(call["normalized_shape"])
    return list(range(first)), list(range(first, ndim))


def _statistics_dtype(call: Call) -> torch.dtype:
    """The dtype of the statistics that are returned, as torch's kernels choose it."""
    x = call["input"]
    if x.device.type != "cpu":
        return accumulation_dtype(x.dtype)
    return next((t.dtype for t in (call["weight"], call.get("bias")) if t is not None), x.dtype)


def _scaled(run: Run, y: GlobalLike, weight: GlobalLike | None) -> GlobalLike:
    """y * weight, in the dtype of y."""
    return y if weight is None else run(aten.mul.Tensor, y, cast(run, weight, y.dtype))


def _means(call: Call, run: Run, tensors: list[GlobalLike]) -> list[GlobalLike]:
    """Means over the features, all reduced in one boxing; those of a plain gradient are there."""
    means = [run(aten.mean.dim, t, _samples_and_features(call)[1], True) for t in tensors]
    pending = [t for t in means if is_global(t)]
    reduced = iter(run.redistribute(pending, [t.spec.layout.without_partials for t in pending], str(call.func)))
    return [next(reduced) if is_global(t) else t for t in means]


@traceable
def layer_norm(call: Call, run: Run) -> tuple[GlobalLike, ...]:
    """native_layer_norm: the output, means and inverse deviations."""
    x = contiguous_operand(run, call["input"])
    full = cast(run, x, accumulation_dtype(x.dtype))
    mean, = _means(call, run, [full])
    # Two reductions: mean(x^2) - mean^2 in one would cancel to noise where the mean is large.
    deviation = run(aten.sub.Tensor, full, mean)
    var, = _means(call, run, [run(aten.mul.Tensor, deviation, deviation)])
    inverse = run(aten.rsqrt.default, run(aten.add.Scalar, var, call["eps"]))
    out = _scaled(run, run(aten.mul.Tensor, deviation, inverse), call["weight"])
    if call["bias"] is not None:
        out = run(aten.add.Tensor, out, cast(run, call["bias"], out.dtype))
    kept = _statistics_dtype(call)
    return cast(run, out, x.dtype), cast(run, mean, kept), cast(run, inverse, kept)


@traceable
def rms_norm(call: Call, run: Run) -> tuple[GlobalLike, ...]:
    """_fused_rms_norm: the output and inverse roots of mean squares."""
    x = contiguous_operand(run, call["input"])
    full = cast(run, x, accumulation_dtype(x.dtype))
    square, = _means(call, run, [run(aten.mul.Tensor, full, full)])
    eps = call["eps"] if call["eps"] is not None else torch.finfo(full.dtype).eps
    inverse = run(aten.rsqrt.default, run(aten.add.Scalar, square, eps))
    out = _scaled(run, run(aten.mul.Tensor, full, inverse), call["weight"])
    return cast(run, out, x.dtype), cast(run, inverse, _statistics_dtype(call))


def _backward_parts(call: Call, run: Run, centered: bool) -> tuple[GlobalLike, GlobalLike, GlobalLike]:
    """grad_x; and grad * y and grad in the accumulation dtype, which are still to be summed over the samples."""
    x = call["input"]
    dtype = accumulation_dtype(x.dtype)
    grad, y = (cast(run, contiguous_operand(run, t), dtype) for t in (call["grad_out"], x))
    if centered:
        y = run(aten.sub.Tensor, y, cast(run, call["mean"], dtype))
    inverse = cast(run, call["rstd"], dtype)
    y = run(aten.mul.Tensor, y, inverse)
    g = _scaled(run, grad, call["weight"])
    # mean(g y) and mean(g) share a boxing: what costs is latency, for one number per sample
    means = _means(call, run, [run(aten.mul.Tensor, g, y), g] if centered else [run(aten.mul.Tensor, g, y)])
    inner = run(aten.sub.Tensor, g, run(aten.mul.Tensor, y, means[0]))
    if centered:
        inner = run(aten.sub.Tensor, inner, means[1])
    return cast(run, run(aten.mul.Tensor, inner, inverse), x.dtype), run(aten.mul.Tensor, grad, y), grad


def _over_samples(call: Call, run: Run, t: GlobalLike) -> GlobalLike:
    """Summed over the samples, in the dtype of the parameters."""
    samples, _ = _samples_and_features(call)
    # left pending where samples are split, as all gradients of parameters are: they are reduced once, when they are
    # read
    total = run(aten.sum.dim_IntList, t, samples) if samples else t
    return cast(run, total, call["weight"].dtype if call["weight"] is not None else call["input"].dtype)


@traceable
def layer_norm_backward(call: Call, run: Run) -> tuple[GlobalLike | None, ...]:
    """Gradients of input, weight and bias, those that are wanted."""
    grad_x, weighted, grad = _backward_parts(call, run, centered=True)
    mask = call["output_mask"]
    return (grad_x if mask[0] else None, _over_samples(call, run, weighted) if mask[1] else None,
            _over_samples(call, run, grad) if mask[2] else None)


@traceable
def rms_norm_backward(call: Call, run: Run) -> tuple[GlobalLike | None, ...]:
    """Gradients of input and weight, those that are wanted."""
    grad_x, weighted, _ = _backward_parts(call, run, centered=False)
    mask = call["output_mask"]
    return grad_x if mask[0] else None, _over_samples(call, run, weighted) if mask[1] else None
