"""Ops whose local kernel would not do: written as other global ops.

A decomposition takes (call, run): `run(op, ...)` does an op on global tensors, `run.plain` the op itself by its rule,
`run.redistribute` moves several tensors together. It stands below autograd, so it may do what it likes. Here are
reductions of which a part does not know enough (how many elements there are, what the maximum is) and losses.
"""
from __future__ import annotations

import math
from typing import Any

import torch

from globaltensor.algorithms.run import replayable
from globaltensor.layouts.layout import Layout, layout, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import partial_max
from globaltensor.rules.call import Call
from globaltensor.rules.families import MEAN, SUM, dims_of, option
from globaltensor.runtime.agreement import agree_on, checking
from globaltensor.runtime.dtypes import accumulation_dtype

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
    return run.redistribute(tensors, [broadcast_on(t) for t in tensors], op)


def broadcast_on(x: Any) -> Layout:
    """All broadcast on the placement of x."""
    return x.spec.layout.replicated


def as_global(run: Any, t: Any, like: Any, op: str) -> Any:
    """An operand beside a global one; a plain one counts as broadcast."""
    if hasattr(t, "spec"):
        return t
    if checking():
        agree_on(t, f"a plain operand of {op}")
    own = spec(like.spec.layout.replicated, tuple(t.shape), t.stride(), t.dtype)
    return run.wrap(own, dict.fromkeys(like.shards, t))


def cast(run: Any, x: Any, dtype: torch.dtype | None) -> Any:
    """x in another dtype, where it is another."""
    return x if dtype is None or x.dtype == dtype else run(aten._to_copy.default, x, dtype=dtype)


# ------------------------------------------------------------------------------------------------- means and norms


@replayable
def mean(call: Call, run: Any) -> Any:
    """mean = sum / count, with the global count."""
    x = call.tensors[0]
    dtype = call.get("dtype") or x.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return run.plain(call)
    dims = dims_of(call, x.dim()) if x.dim() else []
    total = run(aten.sum.dim_IntList, x, dims, bool(call.get("keepdim", False)), dtype=accumulation_dtype(dtype))
    return cast(run, run(aten.div.Tensor, total, float(count(call)) if count(call) else math.nan), dtype)


@replayable
def of_all_dims(call: Call, run: Any) -> Any:
    """No dims given are all dims; torch's meta kernel of nansum takes them for none."""
    return run(call.func, *[None if name == "dim" else value for name, value in call.values.items() if name != "dtype"],
               dtype=call["dtype"])


@replayable
def variance(call: Call, run: Any) -> Any:
    """Two passes, as exact as one device: the mean, then the mean square of what is left."""
    x = call.tensors[0]
    dims, keep = dims_of(call, x.dim()), bool(call.get("keepdim", False))
    correction, n = option(call, "correction", 1), count(call)
    dtype = x.dtype
    x = cast(run, x, accumulation_dtype(dtype))
    middle = run(aten.mean.dim, x, dims, True)
    apart = run(aten.sub.Tensor, x, middle)
    total = run(aten.sum.dim_IntList, run(aten.mul.Tensor, apart, apart), dims, keep)
    var = run(aten.div.Tensor, total, float(max(n - correction, 0)))
    name = call.func._schema.name
    if "std" in name:
        var = run(aten.sqrt.default, var)
    var = cast(run, var, dtype)
    if "mean" not in name:
        return var
    return var, cast(run, middle if keep else run(aten.squeeze.dims, middle, dims), dtype)


@replayable
def vector_norm(call: Call, run: Any) -> Any:
    """(sum |x|^p)^(1/p), the sum reduced before the root; max and min of |x| for infinite p."""
    x, p = call.tensors[0], float(option(call, "ord", option(call, "p", 2)))
    dims, keep = dims_of(call, x.dim()), bool(call.get("keepdim", False))
    dtype = call.get("dtype") or x.dtype
    size = run(aten.abs.default, cast(run, cast(run, x, call.get("dtype")), accumulation_dtype(dtype)))
    dtype = dtype.to_real() if dtype.is_complex else dtype
    if math.isinf(p):
        return cast(run, run(aten.amax.default if p > 0 else aten.amin.default, size, dims, keep), dtype)
    return cast(run, root(run, run(aten.sum.dim_IntList, powers(run, size, p), dims, keep), p), dtype)


def powers(run: Any, size: Any, p: float) -> Any:
    """size^p, where it is not negative."""
    if p == 0:
        return run(aten._to_copy.default, run(aten.ne.Scalar, size, 0), dtype=size.dtype)
    return size if p == 1 else run(aten.mul.Tensor, size, size) if p == 2 else run(aten.pow.Tensor_Scalar, size, p)


def root(run: Any, total: Any, p: float) -> Any:
    """total^(1/p)"""
    if p in (0, 1):
        return total
    return run(aten.sqrt.default, total) if p == 2 else run(aten.pow.Tensor_Scalar, total, 1 / p)


@replayable
def whole_extremum(call: Call, run: Any) -> Any:
    """max() and min() of everything, empty parts or not."""
    x = call.tensors[0]
    over = aten.amax.default if call.func is aten.max.default else aten.amin.default
    return run(over, x, list(range(x.dim())), False)


@replayable
def logsumexp(call: Call, run: Any) -> Any:
    """log(sum(exp(x - m))) + m, with m the maximum, or 0 where that is infinite."""
    x, dims, keep = call.tensors[0], dims_of(call, call.tensors[0].dim()), bool(call["keepdim"])
    most = _finite(run, run(aten.amax.default, x, dims, True))
    total = run(aten.sum.dim_IntList, run(aten.exp.default, run(aten.sub.Tensor, x, most)), dims, keep)
    return run(aten.add.Tensor, run(aten.log.default, total), most if keep else run(aten.squeeze.dims, most, dims))


def _finite(run: Any, x: Any) -> Any:
    return run(aten.masked_fill.Scalar, x, run(aten.isinf.default, x), 0.0)


# ------------------------------------------------------------------------------------------------------- softmax


@replayable
def log_softmax(call: Call, run: Any) -> Any:
    """Along a split dim: two small reductions (the maximum and the sum of exponentials), nothing gathered."""
    x, dtype, dim = *_softmax_operand(call, run), call["dim"]
    shifted = run(aten.sub.Tensor, x, run(aten.amax.default, x, [dim], True))
    total = run(aten.sum.dim_IntList, run(aten.exp.default, shifted), [dim], True)
    return cast(run, run(aten.sub.Tensor, shifted, run(aten.log.default, total)), dtype)


@replayable
def softmax(call: Call, run: Any) -> Any:
    x, dtype, dim = *_softmax_operand(call, run), call["dim"]
    raised = run(aten.exp.default, run(aten.sub.Tensor, x, run(aten.amax.default, x, [dim], True)))
    return cast(run, run(aten.div.Tensor, raised, run(aten.sum.dim_IntList, raised, [dim], True)), dtype)


@replayable
def safe_softmax(call: Call, run: Any) -> Any:
    """softmax, but 0 where all of a row is -inf."""
    x, dim = cast(run, call.tensors[0], accumulation_dtype(call["dtype"] or call.tensors[0].dtype)), call["dim"]
    most = _finite(run, run(aten.amax.default, x, [dim], True))
    raised = run(aten.exp.default, run(aten.sub.Tensor, x, most))
    total = run(aten.sum.dim_IntList, raised, [dim], True)
    total = run(aten.masked_fill.Scalar, total, run(aten.eq.Scalar, total, 0), 1.0)
    return cast(run, run(aten.div.Tensor, raised, total), call["dtype"] or call.tensors[0].dtype)


def _softmax_operand(call: Call, run: Any) -> tuple[Any, torch.dtype]:
    """The operand as wide as kernels compute in, and the dtype of the result."""
    x = call.tensors[0]
    wider = cast(run, x, accumulation_dtype(x.dtype))
    return wider, wider.dtype if call["half_to_float"] else x.dtype


@replayable
def log_softmax_backward(call: Call, run: Any) -> Any:
    """grad - exp(output) * sum(grad)"""
    grad, output = (cast(run, call[name], accumulation_dtype(call[name].dtype)) for name in ("grad_output", "output"))
    total = run(aten.sum.dim_IntList, grad, [call["dim"]], True)
    found = run(aten.sub.Tensor, grad, run(aten.mul.Tensor, run(aten.exp.default, output), total))
    return cast(run, found, call["input_dtype"])


@replayable
def softmax_backward(call: Call, run: Any) -> Any:
    """output * (grad - sum(grad * output))"""
    grad, output = (cast(run, call[name], accumulation_dtype(call[name].dtype)) for name in ("grad_output", "output"))
    total = run(aten.sum.dim_IntList, run(aten.mul.Tensor, grad, output), [call["dim"]], True)
    return cast(run, run(aten.mul.Tensor, output, run(aten.sub.Tensor, grad, total)), call["input_dtype"])


# -------------------------------------------------------------------------------------------------------- losses


def is_mean(call: Call) -> bool:
    """A mean-reduced loss of operands that are cut: its kernel would divide by the local numel."""
    return call["reduction"] == MEAN and is_split_or_partial(call)


def _summed(call: Call) -> list[Any]:
    """The arguments of the same loss, summed."""
    return [SUM if name == "reduction" else value for name, value in call.values.items()]


@replayable
def mean_loss(call: Call, run: Any) -> Any:
    """loss(mean) = loss(sum) / global numel"""
    return run(aten.div.Tensor, run(call.func, *_summed(call)), float(_numel(call)))


@replayable
def mean_loss_backward(call: Call, run: Any) -> Any:
    """backward(mean) of grad = backward(sum) of grad / global numel"""
    args = _summed(call)
    args[0] = run(aten.div.Tensor, args[0], float(_numel(call)))
    return run(call.func, *args)


def _numel(call: Call) -> int:
    return max((math.prod(t.shape) for t in call.tensors), default=1) or math.nan


@replayable
def nll_mean(call: Call, run: Any) -> Any:
    """The sum and the weight of the targets, both reduced in one go, then their quotient."""
    total, weight = broadcast_all(run, list(run(call.func, *_summed(call))), "nll_loss")
    return run(aten.div.Tensor, total, weight), weight


@replayable
def foreach_norm(call: Call, run: Any) -> Any:
    """The norms of many tensors: sums of powers of the parts, all reduced in one go, then the roots."""
    p = float(call["ord"])
    if math.isinf(p) or p == 0:
        return [run(aten.linalg_vector_norm.default, x, p, None, False, dtype=call["dtype"]) for x in call.tensors]
    held = run.redistribute(call.tensors, [x.spec.layout.without_partials for x in call.tensors], "foreach_norm")
    held = [cast(run, x, call["dtype"]) for x in held]
    sums = [run(aten.sum.dim_IntList, powers(run, run(aten.abs.default, x), p), list(range(x.dim())), False)
            for x in held]
    home = broadcast_on(call.tensors[0])             # norms of several pipeline stages meet on the first one's
    return [root(run, total, p) for total in run.redistribute(sums, [home] * len(sums), "foreach_norm")]


def unscale(call: Call, run: Any) -> Any:
    """What GradScaler does with gradients: times `inv_scale`, in place; `found_inf`, a plain tensor that every process
    has, becomes 1 where any part of any gradient on any rank is not finite."""
    flags: dict[placement, dict[int, torch.Tensor]] = {}
    for grad in call["self"]:
        for rank, shard in grad.shards.items():
            flag = flags.setdefault(grad.placement, {}).setdefault(rank, torch.zeros((), device=shard.device))
            call.func([shard], flag, call["inv_scale"].to(shard.device))
    for where in dict.fromkeys(grad.placement for grad in call["self"]):      # also where this process has no part
        of = layout(where, (partial_max,) * where.ndim)
        seen = run(aten._local_scalar_dense.default, run.wrap(spec(of, (), None, torch.float32), flags.get(where, {})))
        if seen:
            call["found_inf"].fill_(1.0)
