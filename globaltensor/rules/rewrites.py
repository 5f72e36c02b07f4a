"""Ops whose local kernel would not do: written as other global ops, or with a local run of their own.

A rewrite takes (call, run): `run(op, ...)` does an op on global tensors, `run.plain` the op itself by its rule,
`run.box` moves several tensors together. It stands below autograd, so it may do what it likes.
"""
from __future__ import annotations

import math
from typing import Any

import torch

from globaltensor.layout import layout
from globaltensor.rules.call import Call
from globaltensor.rules.families import dims_of
from globaltensor.sbp import broadcast

aten = torch.ops.aten


def reduces_split(call: Call) -> bool:
    """Does the op reduce or work along a dim that is split?"""
    own = getattr(call.tensors[0], "spec", None)
    return own is not None and any(s.is_split and s.dim in dims_of(call, own.ndim) for s in own.sbp)


def is_split_or_partial(call: Call) -> bool:
    return any(not s.is_broadcast for t in call.tensors if hasattr(t, "spec") for s in t.spec.sbp)


def count(call: Call) -> int:
    """How many elements a reduction puts together."""
    shape = call.tensors[0].shape
    return math.prod(shape[d] for d in dims_of(call, len(shape))) if len(shape) else 1


def broadcast_all(run: Any, tensors: list[Any], op: str) -> list[Any]:
    """Tensors made broadcast, moved together."""
    return run.box(tensors, [layout(t.spec.placement, (broadcast,) * t.spec.placement.ndim) for t in tensors], op)


def mean(call: Call, run: Any) -> Any:
    """mean = sum / count, with the global count."""
    x = call.tensors[0]
    dtype = call.get("dtype") or x.dtype
    dims = dims_of(call, x.dim()) if x.dim() else []
    total = run(aten.sum.dim_IntList, x, dims, bool(call.get("keepdim", False)), dtype=dtype)
    return run(aten.div.Tensor, total, float(count(call)) if count(call) else math.nan)


def log_softmax(call: Call, run: Any) -> Any:
    """Along a split dim: two small reductions (the maximum and the sum of exponentials), nothing gathered."""
    x, dim = call.tensors[0], call["dim"]
    if call["half_to_float"]:
        x = run(aten._to_copy.default, x, dtype=torch.float32)
    shifted = run(aten.sub.Tensor, x, run(aten.amax.default, x, [dim], True))
    total = run(aten.sum.dim_IntList, run(aten.exp.default, shifted), [dim], True)
    return run(aten.sub.Tensor, shifted, run(aten.log.default, total))


def softmax(call: Call, run: Any) -> Any:
    x, dim = call.tensors[0], call["dim"]
    if call["half_to_float"]:
        x = run(aten._to_copy.default, x, dtype=torch.float32)
    raised = run(aten.exp.default, run(aten.sub.Tensor, x, run(aten.amax.default, x, [dim], True)))
    return run(aten.div.Tensor, raised, run(aten.sum.dim_IntList, raised, [dim], True))


def log_softmax_backward(call: Call, run: Any) -> Any:
    """grad - exp(output) * sum(grad)"""
    grad, output = call["grad_output"], call["output"]
    total = run(aten.sum.dim_IntList, grad, [call["dim"]], True)
    found = run(aten.sub.Tensor, grad, run(aten.mul.Tensor, run(aten.exp.default, output), total))
    return _as(run, found, call["input_dtype"])


def softmax_backward(call: Call, run: Any) -> Any:
    """output * (grad - sum(grad * output))"""
    grad, output = call["grad_output"], call["output"]
    total = run(aten.sum.dim_IntList, run(aten.mul.Tensor, grad, output), [call["dim"]], True)
    return _as(run, run(aten.mul.Tensor, output, run(aten.sub.Tensor, grad, total)), call["input_dtype"])


def _as(run: Any, x: Any, dtype: torch.dtype) -> Any:
    return x if x.dtype == dtype else run(aten._to_copy.default, x, dtype=dtype)


MEAN, SUM = 1, 2


def loss_needs_global_count(call: Call) -> bool:
    """A mean-reduced loss of split operands: its kernel would divide by the local numel."""
    return call["reduction"] == MEAN and any(not s.is_broadcast for t in call.tensors if hasattr(t, "spec")
                                             for s in t.spec.sbp)


def mean_loss(call: Call, run: Any) -> Any:
    """loss(mean) = loss(sum) / global numel"""
    args = [SUM if name == "reduction" else value for name, value in call.values.items()]
    return run(aten.div.Tensor, run(call.func, *args), float(_numel(call)))


def mean_loss_backward(call: Call, run: Any) -> Any:
    """backward(mean) = backward(sum) of grad / global numel"""
    args = [SUM if name == "reduction" else value for name, value in call.values.items()]
    args[0] = run(aten.div.Tensor, args[0], float(_numel(call)))
    return run(call.func, *args)


def _numel(call: Call) -> int:
    return max((math.prod(t.shape) for t in call.tensors), default=1)


def nll_mean(call: Call, run: Any) -> Any:
    """The sum and the weight of the targets, both reduced in one go, then their quotient."""
    args = [SUM if name == "reduction" else value for name, value in call.values.items()]
    total, weight = broadcast_all(run, list(run(call.func, *args)), "nll_loss")
    return run(aten.div.Tensor, total, weight), weight


def nll_is_mean(call: Call) -> bool:
    return call["reduction"] == MEAN and is_split_or_partial(call)


def vector_norm(call: Call, run: Any) -> Any:
    """(sum |x|^p)^(1/p), the sum reduced before the root; max and min of |x| for infinite p."""
    x, p = call.tensors[0], float(call["ord"])
    dims = dims_of(call, x.dim())
    keep = bool(call["keepdim"])
    if call["dtype"] is not None:
        x = run(aten._to_copy.default, x, dtype=call["dtype"])
    size = run(aten.abs.default, x)
    if math.isinf(p):
        return run(aten.amax.default if p > 0 else aten.amin.default, size, dims, keep)
    if p == 0:
        return run(aten.sum.dim_IntList, run(aten._to_copy.default, run(aten.ne.Scalar, x, 0), dtype=size.dtype),
                   dims, keep)
    powers = size if p == 1 else run(aten.mul.Tensor, size, size) if p == 2 else run(aten.pow.Tensor_Scalar, size, p)
    total = run(aten.sum.dim_IntList, powers, dims, keep)
    return total if p == 1 else run(aten.sqrt.default, total) if p == 2 else run(
        aten.pow.Tensor_Scalar, total, 1 / p)


def whole_max(call: Call, run: Any) -> Any:
    """max() and min() of everything, empty shards or not."""
    over = aten.amax.default if call.func in (aten.max.default,) else aten.amin.default
    x = call.tensors[0]
    return run(over, x, list(range(x.dim())), False)


def variance(call: Call, run: Any) -> Any:
    """Two passes, as exact as one device: the mean, then the mean square of what is left."""
    x = call.tensors[0]
    dims, keep = dims_of(call, x.dim()), bool(call.get("keepdim", False))
    correction = call.get("correction", 1)
    correction = 1 if correction is None else correction
    n = count(call)
    middle = run(aten.mean.dim, x, dims, True)
    apart = run(aten.sub.Tensor, x, middle)
    total = run(aten.sum.dim_IntList, run(aten.mul.Tensor, apart, apart), dims, keep)
    var = run(aten.div.Tensor, total, float(max(n - correction, 0)))
    name = call.func._schema.name
    if "std" in name:
        var = run(aten.sqrt.default, var)
    return (var, run(aten.mean.dim, x, dims, keep)) if "mean" in name else var
