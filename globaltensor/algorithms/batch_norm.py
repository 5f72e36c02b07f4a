"""Batch normalization of a batch that is split: statistics of the whole batch, of which only sums are sent.

    forward    mean = sum(x) / n,  var = sum((x - mean)^2) / n,  out = (x - mean) / sqrt(var + eps) * weight + bias
    backward   with c = x - mean, i = 1 / sqrt(var + eps), and sums over all but the channels:
               grad_bias = sum(g),  grad_weight = i * sum(g c)
               grad_x = weight * i * (g - grad_bias / n - c * i^2 * sum(g c) / n)

Each part finds its own mean and sum of squares around it in one pass; the parts' are joined (Chan, Golub and LeVeque,
1979) by two reductions as long as there are channels. So is the backward, by one. Kernels write out in one pass.
"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from globaltensor.algorithms.decompositions import cast, is_split_or_partial
from globaltensor.layouts.layout import layout, spec
from globaltensor.layouts.sbp import broadcast, partial_sum, split
from globaltensor.rules.call import Call
from globaltensor.rules.families import option
from globaltensor.runtime.dtypes import accumulation_dtype

aten = torch.ops.aten


def in_training(call: Call) -> bool:
    """Statistics of its own, and anything cut? (The kernel writes running statistics, which must not be a copy.)"""
    return bool(call["training"]) and is_split_or_partial(call)


def trained(call: Call) -> bool:
    """The gradient of statistics over dims that are split, or over sums that are pending?"""
    return bool(call["train"]) and any(s.is_partial or s.is_split and s.dim != 1
                                       for name in ("input", "grad_out") if hasattr(call[name], "spec")
                                       for s in call[name].spec.sbp)


def _settled(run: Any, tensors: list[Any]) -> list[Any]:
    """All in the layout of the first, without pending sums."""
    own = tensors[0].spec
    dst = own.layout.without_partials
    return run.redistribute(tensors, [dst] * len(tensors), "batch_norm")


def _sums(run: Any, x: Any, terms: list[dict[int, Tensor]], dtype: torch.dtype) -> list[Any]:
    """Per-channel sums of the parts of x, added up over all parts."""
    own = x.spec
    pending = layout(own.placement, tuple(split(0) if s.is_split and s.dim == 1 else partial_sum if s.is_split
                                          else broadcast for s in own.sbp))
    done = pending.without_partials
    sums = [run.wrap(spec(pending, (own.shape[1],), None, dtype), shards) for shards in terms]
    return run.redistribute(sums, [done] * len(sums), "batch_norm")


def _over(x: Any) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _row(run: Any, per_channel: Any, like: Any) -> Any:
    """A tensor of channels, shaped to broadcast over `like`."""
    return run(aten.view.default, per_channel, [1, like.shape[1], *[1] * (like.dim() - 2)])


def _moments(run: Any, x: Any, n: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Mean and biased variance per channel of the whole batch."""
    dims = _over(x)
    own_mean, own_squares, counts = {}, {}, {}
    for r, t in x.shards.items():
        counts[r] = t.numel() // max(t.shape[1], 1)
        if counts[r]:
            own_squares[r], own_mean[r] = torch.var_mean(t.to(dtype), dims, correction=0)
        else:
            own_squares[r], own_mean[r] = t.new_zeros(2, t.shape[1], dtype=dtype)
    total, = _sums(run, x, [{r: m * counts[r] for r, m in own_mean.items()}], dtype)
    mean = run(aten.div.Tensor, total, float(n))
    squares = {r: (own_squares[r] + (own_mean[r] - mean.shards[r]) ** 2) * counts[r] for r in own_mean}
    squared, = _sums(run, x, [squares], dtype)
    return mean, run(aten.div.Tensor, squared, float(n))


def forward(call: Call, run: Any) -> tuple[Any, Any, Any]:
    """native_batch_norm in training; the running statistics are updated in place."""
    x, = _settled(run, [call["input"]])
    dtype = accumulation_dtype(x.dtype)
    n = x.numel() // max(x.shape[1], 1)
    mean, var = _moments(run, x, n, dtype)
    eps = call["eps"]
    _update(call, run, mean, run(aten.mul.Tensor, var, n / (n - 1) if n > 1 else math.nan))
    invstd = run(aten.rsqrt.default, run(aten.add.Scalar, var, eps))
    out = run(aten.native_batch_norm.default, x, call["weight"], call["bias"], mean, var, False, 0.0, eps)[0]
    return out, mean, invstd


def _update(call: Call, run: Any, mean: Any, unbiased: Any) -> None:
    """running = (1 - momentum) * running + momentum * new"""
    for running, new in ((call["running_mean"], mean), (call["running_var"], unbiased)):
        if running is not None:
            run(aten.lerp_.Scalar, running, cast(run, new, running.dtype), call["momentum"])


def as_native(call: Call, run: Any) -> tuple[Any, ...]:
    """Other names of native_batch_norm; some return a reserve for their gradient, which ours does not need."""
    momentum = option(call, "momentum", call.get("exponential_average_factor"))
    found = run(aten.native_batch_norm.default, call["input"], call["weight"], call["bias"], call.get("running_mean"),
                call.get("running_var"), call.get("training", True), momentum, option(call, "eps", call.get("epsilon")))
    reserve = len(call.func._schema.returns) - len(found)
    return (*found, *[run(aten.new_empty.default, call["input"], [0], dtype=torch.uint8) for _ in range(reserve)])


def as_native_backward(call: Call, run: Any) -> tuple[Any, ...]:
    """Other names of native_batch_norm_backward."""
    grad = option(call, "grad_output", call.get("grad_out"))
    return run(aten.native_batch_norm_backward.default, grad, call["input"], call["weight"],
               call["running_mean"], call["running_var"], call["save_mean"], call["save_var"], call.get("update", True),
               option(call, "eps", call.get("epsilon")),
               list(option(call, "output_mask", (True, True, True))))


def backward(call: Call, run: Any) -> tuple[Any, Any, Any]:
    """native_batch_norm_backward in training."""
    x, grad = _settled(run, [call["input"], call["grad_out"]])
    dtype, weight, dims = accumulation_dtype(x.dtype), call["weight"], _over(x)
    n = float(x.numel() // max(x.shape[1], 1))
    mean, invstd = call["save_mean"], call["save_invstd"]
    wide_grad = cast(run, grad, dtype)
    centered = run(aten.sub.Tensor, cast(run, x, dtype), _row(run, mean, x))
    sums = [run(aten.sum.dim_IntList, t, dims) for t in (wide_grad, run(aten.mul.Tensor, wide_grad, centered))]
    done = [s.spec.layout.without_partials for s in sums]
    grad_bias, dot = run.redistribute(sums, done, "batch_norm")
    scale = invstd if weight is None else run(aten.mul.Tensor, invstd, cast(run, weight, dtype))
    slope = run(aten.mul.Tensor, run(aten.mul.Tensor, dot, run(aten.mul.Tensor, invstd, invstd)), 1 / n)
    inner = run(aten.sub.Tensor, wide_grad, _row(run, run(aten.mul.Tensor, grad_bias, 1 / n), x))
    inner = run(aten.sub.Tensor, inner, run(aten.mul.Tensor, centered, _row(run, slope, x)))
    grad_x = cast(run, run(aten.mul.Tensor, inner, _row(run, scale, x)), x.dtype)
    own = dtype if weight is None else weight.dtype
    found = (grad_x, cast(run, run(aten.mul.Tensor, dot, invstd), own), cast(run, grad_bias, own))
    return tuple(t if wanted else None for t, wanted in zip(found, call["output_mask"]))
