"""Layer norm and RMS norm of features that are split, as a grid of ranks splits them: only the statistics are summed.

With y = (x - mean) * r and r = 1 / sqrt(var + eps), for layer norm (for RMS norm leave the mean out, and its term):

    forward    out = y * weight + bias
    backward   with g = grad * weight, means over the features:
               grad_x = r * (g - mean(g) - y * mean(g y)),  grad_weight = sum(grad y),  grad_bias = sum(grad)
"""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.algorithms.decompositions import cast
from globaltensor.algorithms.run import replayable
from globaltensor.rules.call import Call
from globaltensor.runtime.dtypes import accumulation_dtype

aten = torch.ops.aten


def features_cut(call: Call) -> bool:
    """Are the features split along the last axis that splits anything, and samples along one before it?

    So it is on a grid of ranks (grids.py), where what follows wants them to stay so. Where features alone are split, as
    by a parameter that ZeRO cut, the plain rule brings the activations back to a split of the samples.
    """
    first = call["input"].dim() - len(call["normalized_shape"])
    for name in ("input", "grad_out"):
        own = getattr(call.get(name), "spec", None)
        cuts = [s.dim for s in own.sbp if s.is_split] if own is not None else []
        if cuts and cuts[-1] >= first and min(cuts) < first:
            return True
    return False


def _dims(call: Call) -> tuple[list[int], list[int]]:
    """The dims of samples and those of features."""
    ndim = call["input"].dim()
    first = ndim - len(call["normalized_shape"])
    return list(range(first)), list(range(first, ndim))


def _kept(call: Call) -> torch.dtype:
    """The dtype of statistics, as the kernels keep them."""
    x, weight = call["input"], call["weight"]
    if x.device.type != "cpu":
        return accumulation_dtype(x.dtype)
    return x.dtype if weight is None else weight.dtype


def _scaled(run: Any, y: Any, weight: Any) -> Any:
    return y if weight is None else run(aten.mul.Tensor, y, cast(run, weight, y.dtype))


def _means(call: Call, run: Any, tensors: list[Any]) -> list[Any]:
    """Means over the features, all summed up in one move."""
    found = [run(aten.mean.dim, t, _dims(call)[1], True) for t in tensors]
    return run.redistribute(found, [t.spec.layout.without_partials for t in found], str(call.func))


@replayable
def layer_norm(call: Call, run: Any) -> tuple[Any, Any, Any]:
    """native_layer_norm: the output, means and inverse deviations."""
    x = call["input"]
    full = cast(run, x, accumulation_dtype(x.dtype))
    mean, = _means(call, run, [full])
    apart = run(aten.sub.Tensor, full, mean)
    var, = _means(call, run, [run(aten.mul.Tensor, apart, apart)])
    inverse = run(aten.rsqrt.default, run(aten.add.Scalar, var, call["eps"]))
    out = _scaled(run, run(aten.mul.Tensor, apart, inverse), call["weight"])
    if call["bias"] is not None:
        out = run(aten.add.Tensor, out, cast(run, call["bias"], out.dtype))
    return cast(run, out, x.dtype), cast(run, mean, _kept(call)), cast(run, inverse, _kept(call))


@replayable
def rms_norm(call: Call, run: Any) -> tuple[Any, Any]:
    """_fused_rms_norm: the output and inverse roots of mean squares."""
    x = call["input"]
    full = cast(run, x, accumulation_dtype(x.dtype))
    square, = _means(call, run, [run(aten.mul.Tensor, full, full)])
    eps = call["eps"] if call["eps"] is not None else torch.finfo(full.dtype).eps
    inverse = run(aten.rsqrt.default, run(aten.add.Scalar, square, eps))
    out = _scaled(run, run(aten.mul.Tensor, full, inverse), call["weight"])
    return cast(run, out, x.dtype), cast(run, inverse, _kept(call))


def _backward(call: Call, run: Any, centered: bool) -> tuple[Any, Any, Any]:
    """grad_x, grad * y and grad, in the dtype that is computed in."""
    x = call["input"]
    dtype = accumulation_dtype(x.dtype)
    grad, y = cast(run, call["grad_out"], dtype), cast(run, x, dtype)
    if centered:
        y = run(aten.sub.Tensor, y, cast(run, call["mean"], dtype))
    inverse = cast(run, call["rstd"], dtype)
    y = run(aten.mul.Tensor, y, inverse)
    g = _scaled(run, grad, call["weight"])
    means = _means(call, run, [run(aten.mul.Tensor, g, y), g] if centered else [run(aten.mul.Tensor, g, y)])
    inner = run(aten.sub.Tensor, g, run(aten.mul.Tensor, y, means[0]))
    if centered:
        inner = run(aten.sub.Tensor, inner, means[1])
    return cast(run, run(aten.mul.Tensor, inner, inverse), x.dtype), run(aten.mul.Tensor, grad, y), grad


def _over_samples(call: Call, run: Any, t: Any) -> Any:
    """Summed over the samples, in the dtype of the parameters."""
    samples, _ = _dims(call)
    total = run(aten.sum.dim_IntList, t, samples) if samples else t
    return cast(run, total, call["weight"].dtype if call["weight"] is not None else call["input"].dtype)


@replayable
def layer_norm_backward(call: Call, run: Any) -> tuple[Any, Any, Any]:
    """Gradients of input, weight and bias, those that are wanted."""
    of_input, weighted, grad = _backward(call, run, centered=True)
    mask = call["output_mask"]
    return (of_input if mask[0] else None, _over_samples(call, run, weighted) if mask[1] else None,
            _over_samples(call, run, grad) if mask[2] else None)


@replayable
def rms_norm_backward(call: Call, run: Any) -> tuple[Any, Any]:
    """Gradients of input and weight, those that are wanted."""
    of_input, weighted, _ = _backward(call, run, centered=False)
    mask = call["output_mask"]
    return of_input if mask[0] else None, _over_samples(call, run, weighted) if mask[1] else None
