"""Batch normalization of a batch that is split: statistics of the whole batch; only their sums are communicated.

    forward    mean = sum(x) / n,  var = sum((x - mean)^2) / n,  out = (x - mean) / sqrt(var + eps) * weight + bias
    backward   with c = x - mean, i = 1 / sqrt(var + eps), and sums over all but the channels:
               grad_bias = sum(g),  grad_weight = i * sum(g c)
               grad_x = weight * i * (g - grad_bias / n - c * i * grad_weight / n)

Forward takes two all-reduces of one number per channel each, as squares are summed around the mean of the whole batch;
backward takes one, of two numbers. The output is written by the kernel of evaluation mode.
"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from globaltensor.algorithms.decompositions import cast, is_split_or_partial, sbps_of_several
from globaltensor.algorithms.run import Run, traceable
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import replicated, spec
from globaltensor.layouts.sbp import broadcast, split
from globaltensor.rules.call import Call
from globaltensor.rules.families import option
from globaltensor.runtime import custom_ops
from globaltensor.runtime.dtypes import accumulation_dtype
from globaltensor.runtime.world import local_ranks_of

aten = torch.ops.aten


def in_training(call: Call) -> bool:
    """Are there statistics to compute, and is anything cut? (Running ones are written in place: no copies will do, and
    plain ones, which are one tensor for all ranks of a process, are written once.)"""
    running = [call[name] for name in ("running_mean", "running_var") if call[name] is not None]
    return bool(call["training"]) and (is_split_or_partial(call) or not all(map(is_global, running)))


def trained(call: Call) -> bool:
    """Is it the gradient of an input whose statistics are over dims that are split, or over pending sums?"""
    return bool(call["train"] and call["output_mask"][0]) and any(
        s.is_partial or s.is_split and s.dim != 1
        for name in ("input", "grad_out") if is_global(call[name])
        for s in sbps_of_several(call[name].spec.layout))


def _reduced_alike(call: Call, run: Run, names: list[str]) -> list[GlobalLike]:
    """Operands in the layout of the first, without pending sums; plain ones are broadcast."""
    where = next(t for t in call.tensors if is_global(t)).spec.placement
    tensors = [call[name] if is_global(call[name]) else
               run.wrap(spec(replicated(where), tuple(call[name].shape), call[name].stride(), call[name].dtype),
                        dict.fromkeys(local_ranks_of(where), call[name])) for name in names]
    dst = tensors[0].spec.layout.without_partials
    return run.redistribute(tensors, [dst] * len(tensors), "batch_norm", keep=True)


def _reduced_dims(x: GlobalLike | Tensor) -> list[int]:
    """All but the channels."""
    return [d for d in range(x.dim()) if d != 1]


def _of_channels(run: Run, x: GlobalLike, values: list[GlobalLike]) -> list[GlobalLike]:
    """Numbers per channel, where the ranks have those channels of x; plain ones as they are."""
    own = x.spec.layout
    dst = own.with_sbp(tuple(split(0) if s.is_split and s.dim == 1 else broadcast for s in own.sbp))
    spread = [t for t in values if is_global(t)]
    moved = iter(run.redistribute(spread, [dst] * len(spread), "batch_norm"))
    return [next(moved) if is_global(t) else t for t in values]


def _mean(run: Run, sums: GlobalLike, n: int) -> GlobalLike:
    """Over the whole batch, of what ranks have summed up."""
    total, = run.redistribute([sums], [sums.spec.layout.without_partials], "batch_norm")
    return run(aten.div.Tensor, total, float(n))


def _moments(run: Run, x: GlobalLike, n: int, dtype: torch.dtype) -> tuple[GlobalLike, GlobalLike]:
    """Mean and biased variance per channel of the whole batch."""
    mean = _mean(run, run(aten.sum.dim_IntList, x, _reduced_dims(x), dtype=dtype), n)
    return mean, _mean(run, run(custom_ops.squares_around, x, mean), n)


@traceable
def whole_batch_forward(call: Call, run: Run) -> tuple[GlobalLike, ...]:
    """native_batch_norm in training; the running statistics are updated in place."""
    channels = call["input"].size(1)                 # torch's error, where there is no such dim
    x, = _reduced_alike(call, run, ["input"])
    dtype = accumulation_dtype(x.dtype)
    n = x.numel() // max(channels, 1)
    mean, var = _moments(run, x, n, dtype)
    eps = call["eps"]
    _update(call, run, mean, run(aten.mul.Tensor, var, n / (n - 1) if n > 1 else math.nan))
    invstd = run(aten.rsqrt.default, run(aten.add.Scalar, var, eps))
    # torch's kernel takes statistics that are wider than its input, with parameters that are as wide
    weight, bias = (None if call[name] is None else cast(run, call[name], dtype) for name in ("weight", "bias"))
    out = run(aten.native_batch_norm.default, x, weight, bias, mean, var, False, 0.0, eps)[0]
    # as torch's kernel keeps them, which may run backward
    alike = x.device.type == "cpu" and all(t.dtype == x.dtype for t in call.tensors)
    return out, *(cast(run, t, x.dtype if alike else dtype) for t in (mean, invstd))


def _update(call: Call, run: Run, mean: GlobalLike, unbiased: GlobalLike) -> None:
    """running = (1 - momentum) * running + momentum * new, for the mean and the unbiased variance"""
    for running, new in ((call["running_mean"], mean), (call["running_var"], unbiased)):
        if running is not None:
            run(aten.lerp_.Scalar, running, cast(run, new, running.dtype), call["momentum"])


def as_native(call: Call, run: Run) -> tuple[Any, ...]:
    """Other names of native_batch_norm; some return a reserve for their gradient, which ours does not need."""
    momentum = option(call, "momentum", call.get("exponential_average_factor"))
    normed = run(aten.native_batch_norm.default, call["input"], call["weight"], call["bias"], call.get("running_mean"),
                 call.get("running_var"), call.get("training", True), momentum,
                 option(call, "eps", call.get("epsilon")))
    reserve = len(call.func._schema.returns) - len(normed)
    return (*normed, *[run(aten.new_empty.default, call["input"], [0], dtype=torch.uint8) for _ in range(reserve)])


def as_native_backward(call: Call, run: Run) -> tuple[Any, ...]:
    """Other names of native_batch_norm_backward."""
    grad = option(call, "grad_output", call.get("grad_out"))
    return run(aten.native_batch_norm_backward.default, grad, call["input"], call["weight"],
               call["running_mean"], call["running_var"], call["save_mean"], call["save_var"], call.get("update", True),
               option(call, "eps", call.get("epsilon")),
               list(option(call, "output_mask", (True, True, True))))


@traceable
def whole_batch_backward(call: Call, run: Run) -> tuple[GlobalLike | None, ...]:
    """native_batch_norm_backward in training."""
    x, grad = _reduced_alike(call, run, ["input", "grad_out"])
    dtype, weight, n = accumulation_dtype(x.dtype), call["weight"], x.numel() // max(x.shape[1], 1)
    wide_x, wide_grad = cast(run, x, dtype), cast(run, grad, dtype)
    mean, invstd, *scales = _of_channels(run, x, [cast(run, t, dtype) for t in (
        call["save_mean"], call["save_invstd"], weight) if t is not None])
    wide_weight = scales[0] if scales else None
    # torch's kernel, told the statistics of the whole batch, sums over the part of a rank
    # (on a GPU it makes sums for a weight only where there is one; they do not depend on it)
    sums = run(aten.native_batch_norm_backward.default, wide_grad, wide_x, invstd, None, None, mean, invstd, True,
               call["eps"], [False, True, True])[1:]
    grad_weight, grad_bias = run.redistribute(sums, [s.spec.layout.without_partials for s in sums], "batch_norm")
    slope = run(aten.mul.Tensor, run(aten.mul.Tensor, grad_weight, invstd), 1 / n)
    scale = invstd if wide_weight is None else run(aten.mul.Tensor, invstd, wide_weight)
    shift = run(aten.mul.Tensor, grad_bias, 1 / n)
    grad_x = run(custom_ops.norm_gradient, grad, x, mean, shift, slope, scale)
    weight_dtype = dtype if weight is None else weight.dtype
    grads = (grad_x, cast(run, grad_weight, weight_dtype), cast(run, grad_bias, weight_dtype))
    return tuple(grad if wanted else None for grad, wanted in zip(grads, call["output_mask"]))
