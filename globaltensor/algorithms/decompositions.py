"""Reductions and losses whose local kernel would be wrong on a part, written as other global ops.

A part does not know how many elements there are in all (means, variances, mean losses), nor their maximum (softmax,
logsumexp). So each is made of ops whose rules hold for parts; dispatch reduces what is pending between them. The
helpers that other algorithms share are here too.
"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from globaltensor.algorithms.run import Decomposition, Run, traceable
from globaltensor.errors import warnings_at_program
from globaltensor.layouts.global_like import GlobalLike, is_global, spec_of
from globaltensor.layouts.layout import Layout, layout, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import Sbp, partial_max
from globaltensor.layouts.symbols import has_symbols
from globaltensor.rules.call import Call
from globaltensor.rules.families import MEAN, SUM, broadcast_shape, dims_of, option
from globaltensor.runtime.agreement import compare_plain
from globaltensor.runtime.dtypes import accumulation_dtype
from globaltensor.runtime.torch_internals import call_kernel

aten = torch.ops.aten


def reduces_split(call: Call) -> bool:
    """Does the op reduce or work along a dim that is split?"""
    own = spec_of(call.tensors[0])
    return own is not None and any(s.is_split and s.dim in dims_of(call, own.ndim) for s in own.sbp)


def is_split_or_partial(call: Call) -> bool:
    """Is any operand anything but broadcast, along an axis of several ranks? (Along one of a single rank every sbp is
    the same, and the op runs as it is.)"""
    return any(not s.is_broadcast for t in call.tensors if is_global(t) for s in sbps_of_several(t.spec.layout))


def sbps_of_several(of: Layout) -> list[Sbp]:
    """The sbps along axes of more than one rank."""
    return [s for s, n in zip(of.sbp, of.placement.shape) if n > 1]


def reduced_numel(call: Call) -> int:
    """How many elements a reduction puts together for one of its results."""
    shape = call.tensors[0].shape
    return math.prod(shape[d] for d in dims_of(call, len(shape))) if len(shape) else 1


def divisor(count: int | float, of: Tensor) -> Any:
    """A number of elements, NaN for none, to divide by. A symbol divides as a tensor: of one that stands for a scalar
    torch makes a number."""
    if has_symbols([count]):
        return torch.full((), count, dtype=of.dtype, device=of.device)
    return float(count or math.nan)


def as_global(run: Run, t: Tensor | GlobalLike, like: GlobalLike, op: str) -> GlobalLike:
    """An operand beside the global `like`: itself, or a plain one as broadcast on the same placement."""
    if is_global(t):
        return t
    # a trace takes over after the second use, and does not come here, but on a rank whose boxings are watched
    compare_plain(t, f"a plain operand of {op}", like.spec.placement.flat, once=True)
    own = spec(like.spec.layout.replicated, tuple(t.shape), t.stride(), t.dtype)
    return run.wrap(own, dict.fromkeys(like.shards, t))


def cast(run: Run, x: GlobalLike, dtype: torch.dtype | None) -> GlobalLike:
    """x in a dtype; itself, where it has that or there is none."""
    return x if dtype is None or x.dtype == dtype else run(aten._to_copy.default, x, dtype=dtype)


def contiguous_operand(run: Run, x: Any) -> Any:
    """x, contiguous in memory, as results of many kernels are whatever their operands: elementwise ops keep it so."""
    return x if x.is_contiguous() else run(aten.clone.default, x, memory_format=torch.contiguous_format)


# ------------------------------------------------------------------------------------------------- means and norms


@traceable
def mean(call: Call, run: Run) -> Any:
    """mean = sum / count, with the global count."""
    x = call.tensors[0]
    dtype = call.get("dtype") or x.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return run.plain(call)                       # torch's own error
    dims = dims_of(call, x.dim()) if x.dim() else []
    total = run(aten.sum.dim_IntList, x, dims, bool(call.get("keepdim", False)), dtype=accumulation_dtype(dtype))
    return cast(run, run(aten.div.Tensor, total, divisor(reduced_numel(call), total)), dtype)


@traceable
def of_all_dims(call: Call, run: Run) -> Any:
    """nansum over dim=[], which means all dims; torch's meta kernel takes it for none of them."""
    return run(call.func, *[None if name == "dim" else value for name, value in call.values.items() if name != "dtype"],
               dtype=call["dtype"])


@traceable
def variance(call: Call, run: Run) -> Any:
    """var, std, var_mean, std_mean in two passes, as exact as one device: the mean, then the mean square of deviations.
    (One pass, E[x^2] - E[x]^2, would cancel.)"""
    x = call.tensors[0]
    dims, keep = dims_of(call, x.dim()), bool(call.get("keepdim", False))
    correction, n = option(call, "correction", 1), reduced_numel(call)
    if n <= correction:                              # torch divides by 0 what it will, and warns
        with warnings_at_program():
            return run.plain(call)
    dtype, x = x.dtype, cast(run, x, accumulation_dtype(x.dtype))
    center = run(aten.mean.dim, x, dims, True)
    deviation = run(aten.sub.Tensor, x, center)
    deviation = run(aten.abs.default, deviation) if dtype.is_complex else deviation
    total = run(aten.sum.dim_IntList, run(aten.mul.Tensor, deviation, deviation), dims, keep)
    var = run(aten.div.Tensor, total, float(n - correction))
    name = call.func._schema.name
    var = run(aten.sqrt.default, var) if "std" in name else var
    var = cast(run, var, dtype.to_real() if dtype.is_complex else dtype)
    return (var, cast(run, center if keep else run(aten.squeeze.dims, center, dims), dtype)) if "mean" in name else var


@traceable
def empty_distances_backward(call: Call, run: Run) -> Any:
    """Where there is no distance, torch gives zeros of the shape that the points have before they are broadcast."""
    return run(aten.zeros_like.default, call.tensors[1])


@traceable
def vector_norm(call: Call, run: Run) -> Any:
    """(sum |x|^p)^(1/p), the sum reduced before the root; max and min of |x| for infinite p."""
    x, p = call.tensors[0], float(option(call, "ord", option(call, "p", 2)))
    dims, keep = dims_of(call, x.dim()), bool(call.get("keepdim", False))
    dtype = call.get("dtype") or x.dtype
    magnitude = run(aten.abs.default, cast(run, cast(run, x, call.get("dtype")), accumulation_dtype(dtype)))
    dtype = dtype.to_real() if dtype.is_complex else dtype
    if math.isinf(p):
        return cast(run, run(aten.amax.default if p > 0 else aten.amin.default, magnitude, dims, keep), dtype)
    return cast(run, root(run, run(aten.sum.dim_IntList, powers(run, magnitude, p), dims, keep), p), dtype)


def powers(run: Run, magnitude: GlobalLike, p: float) -> GlobalLike:
    """magnitude^p, with 0^0 = 0: the 0-norm counts what is not 0."""
    if p == 0:
        return run(aten._to_copy.default, run(aten.ne.Scalar, magnitude, 0), dtype=magnitude.dtype)
    if p in (1, 2):
        return magnitude if p == 1 else run(aten.mul.Tensor, magnitude, magnitude)
    return run(aten.pow.Tensor_Scalar, magnitude, p)


def root(run: Run, total: GlobalLike, p: float) -> GlobalLike:
    """total^(1/p); the 0-norm is the count itself."""
    if p in (0, 1):
        return total
    return run(aten.sqrt.default, total) if p == 2 else run(aten.pow.Tensor_Scalar, total, 1 / p)


@traceable
def whole_extremum(call: Call, run: Run) -> Any:
    """max() and min() of everything. Those of an empty part would raise; amax and amin have a local_impl for it."""
    x = call.tensors[0]
    reduce = aten.amax.default if call.func is aten.max.default else aten.amin.default
    return run(reduce, x, list(range(x.dim())), False)


def extrema(run: Run, x: GlobalLike, dims: list[int], keep: bool = False) -> tuple[GlobalLike, GlobalLike]:
    """The least and the greatest elements along dims."""
    return run(aten.amin.default, x, dims, keep), run(aten.amax.default, x, dims, keep)


@traceable
def both_extrema(call: Call, run: Run) -> Any:
    """aminmax: of the parts, both left pending."""
    x, keep = call.tensors[0], bool(call["keepdim"])
    dims = dims_of(call, x.dim())
    return extrema(run, x, dims, keep)


@traceable
def logsumexp(call: Call, run: Run) -> Any:
    """log(sum(exp(x - m))) + m, with m the maximum, or 0 where that is infinite; of integers as of floats."""
    x, dims, keep = call.tensors[0], dims_of(call, call.tensors[0].dim()), bool(call["keepdim"])
    x = x if x.dtype.is_floating_point or x.dtype.is_complex else cast(run, x, torch.get_default_dtype())
    if not has_symbols(x.shape) and not x.numel():   # of nothing there is no maximum, but a sum, of which the log is
        return run(aten.log.default, run(aten.sum.dim_IntList, run(aten.exp.default, x), dims, keep))
    most = _finite(run, run(aten.amax.default, x, dims, True))
    total = run(aten.sum.dim_IntList, run(aten.exp.default, run(aten.sub.Tensor, x, most)), dims, keep)
    return run(aten.add.Tensor, run(aten.log.default, total), most if keep else run(aten.squeeze.dims, most, dims))


def _finite(run: Run, x: GlobalLike) -> GlobalLike:
    """x with 0 where it is infinite: inf - inf would be nan."""
    return run(aten.masked_fill.Scalar, x, run(aten.isinf.default, x), 0.0)


# ------------------------------------------------------------------------------------------------------- softmax


@traceable
def log_softmax(call: Call, run: Run) -> Any:
    """Along a split dim: two small reductions (the maximum and the sum of exponentials), nothing gathered."""
    x, dtype, dim = *_softmax_operand(call, run), call["dim"]
    shifted = run(aten.sub.Tensor, x, run(aten.amax.default, x, [dim], True))
    total = run(aten.sum.dim_IntList, run(aten.exp.default, shifted), [dim], True)
    return cast(run, run(aten.sub.Tensor, shifted, run(aten.log.default, total)), dtype)


@traceable
def softmax(call: Call, run: Run) -> Any:
    """As log_softmax: the maximum and the sum of exponentials are all that is reduced."""
    x, dtype, dim = *_softmax_operand(call, run), call["dim"]
    exponentials = run(aten.exp.default, run(aten.sub.Tensor, x, run(aten.amax.default, x, [dim], True)))
    total = run(aten.sum.dim_IntList, exponentials, [dim], True)
    return cast(run, run(aten.div.Tensor, exponentials, total), dtype)


@traceable
def safe_softmax(call: Call, run: Run) -> Any:
    """softmax, but 0 where all of a row is -inf."""
    x, dim = cast(run, call.tensors[0], accumulation_dtype(call["dtype"] or call.tensors[0].dtype)), call["dim"]
    highest = run(aten.amax.default, x, [dim], True)
    highest = run(aten.masked_fill.Scalar, highest, run(aten.eq.Scalar, highest, -math.inf), 0.0)
    exponentials = run(aten.exp.default, run(aten.sub.Tensor, x, highest))
    total = run(aten.sum.dim_IntList, exponentials, [dim], True)
    total = run(aten.masked_fill.Scalar, total, run(aten.eq.Scalar, total, 0), 1.0)      # of such a row: 0 / 1
    return cast(run, run(aten.div.Tensor, exponentials, total), call["dtype"] or call.tensors[0].dtype)


def _softmax_operand(call: Call, run: Run) -> tuple[GlobalLike, torch.dtype]:
    """The operand, contiguous as the result will be and in the dtype that kernels compute in; the result's dtype."""
    x = contiguous_operand(run, call.tensors[0])
    wide = cast(run, x, accumulation_dtype(x.dtype))
    return wide, wide.dtype if call["half_to_float"] else x.dtype


@traceable
def log_softmax_backward(call: Call, run: Run) -> Any:
    """grad_input = grad - exp(output) * sum(grad)"""
    grad, output = (cast(run, call[name], accumulation_dtype(call[name].dtype)) for name in ("grad_output", "output"))
    total = run(aten.sum.dim_IntList, grad, [call["dim"]], True)
    grad_input = run(aten.sub.Tensor, grad, run(aten.mul.Tensor, run(aten.exp.default, output), total))
    return cast(run, grad_input, call["input_dtype"])


@traceable
def softmax_backward(call: Call, run: Run) -> Any:
    """grad_input = output * (grad - sum(grad * output))"""
    grad, output = (cast(run, call[name], accumulation_dtype(call[name].dtype)) for name in ("grad_output", "output"))
    total = run(aten.sum.dim_IntList, run(aten.mul.Tensor, grad, output), [call["dim"]], True)
    return cast(run, run(aten.mul.Tensor, output, run(aten.sub.Tensor, grad, total)), call["input_dtype"])


def by_torch(key: str) -> Decomposition:
    """An op that torch makes of others, in its kernel of that key."""
    return lambda call, run: call_kernel(call.func, key, *call.full_arguments())


def holds_number(call: Call, run: Run) -> Any:
    """isin of a number: does any element equal it? `invert`: does none?"""
    anywhere = run(aten.any.default, run(aten.eq.Scalar, call["test_elements"], call["element"]))
    return run(aten.logical_not.default, anywhere) if call["invert"] else anywhere


def trace(call: Call, run: Run) -> Any:
    """The sum of the diagonal, which tensors of more dims have, too."""
    if call["self"].dim() != 2:
        raise RuntimeError(f"trace: expected a matrix, but got tensor with dim {call['self'].dim()}")
    return run(aten.sum.default, run(aten.diagonal.default, call["self"]))


def equal(call: Call, run: Run) -> bool:
    """torch.equal: parts are compared where they lie."""
    a, b = call.tensors
    if a.shape != b.shape:
        return False
    return bool(run(aten._local_scalar_dense.default, run(aten.all.default, run(aten.eq.Tensor, a, b))))


# -------------------------------------------------------------------------------------------------------- losses


def is_mean(call: Call) -> bool:
    """Is it the mean of a loss of operands that are cut? Its kernel would divide by the number of local elements."""
    return call["reduction"] == MEAN and is_split_or_partial(call)


def _as_sum(call: Call) -> list[Any]:
    """The arguments of the same loss, with a sum for its mean."""
    return [SUM if name == "reduction" else value for name, value in call.values.items()]


@traceable
def mean_loss(call: Call, run: Run) -> Any:
    """loss(mean) = loss(sum) / global numel"""
    return _sum_over(_numel(call), call, run)


@traceable
def mean_loss_backward(call: Call, run: Run) -> Any:
    """backward(mean) of grad = backward(sum) of grad / global numel"""
    return _backward_of_sum_over(_numel(call), call, run)


@traceable
def mean_of_rows(call: Call, run: Run) -> Any:
    """The mean of a loss that each row [c] of its operand has: the sum by the number of rows."""
    return _sum_over(_rows_of_loss(call), call, run)


@traceable
def mean_of_rows_backward(call: Call, run: Run) -> Any:
    """backward(mean) of grad = backward(sum) of grad / number of rows"""
    return _backward_of_sum_over(_rows_of_loss(call), call, run)


def _sum_over(count: int, call: Call, run: Run) -> Any:
    """The loss with a sum for its mean, by a count; what else the op returns stays."""
    (total, *more), dtype = _sums(call, run)
    mean = cast(run, run(aten.div.Tensor, total, divisor(count, total)), dtype)
    return (mean, *[cast(run, t, dtype) for t in more]) if more else mean


def _sums(call: Call, run: Run) -> tuple[list[Any], torch.dtype | None]:
    """What the same loss returns with a sum for its mean, of floats as wide as kernels add them up; and the dtype of
    these floats, None where they have several: then the op's own."""
    dtypes = {x.dtype for x in call.tensors if x.dtype.is_floating_point}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    results = run(call.func, *[cast(run, x, dtype and accumulation_dtype(dtype)) if is_global(x) and x.dtype == dtype
                               else x for x in _as_sum(call)])
    return list(results) if isinstance(results, tuple) else [results], dtype


def _backward_of_sum_over(count: int, call: Call, run: Run) -> Any:
    args = _as_sum(call)
    args[0] = run(aten.div.Tensor, args[0], divisor(count, args[0]))
    return run(call.func, *args)


def _rows_of_loss(call: Call) -> int:
    return int(call["self"].shape[0]) if call["self"].dim() > 1 else 1


def _numel(call: Call) -> int:
    """The global number of elements of operands that are broadcast to each other."""
    return math.prod(broadcast_shape([t.shape for t in call.tensors]))


@traceable
def nll_mean(call: Call, run: Run) -> Any:
    """The sum of the loss and that of the targets' weights, both reduced in one go; then their quotient."""
    sums, dtype = _sums(call, run)
    total, weight = run.redistribute(sums, [t.spec.layout.replicated for t in sums], "nll_loss")
    return cast(run, run(aten.div.Tensor, total, weight), dtype), cast(run, weight, dtype)


@traceable
def foreach_norm(call: Call, run: Run) -> Any:
    """The norms of many tensors: sums of powers of the parts, all reduced in one go, then the roots."""
    p = float(call["ord"])
    if p in (0, math.inf, -math.inf) or not all(x.is_floating_point() or x.is_complex() for x in call.tensors):
        return [run(aten.linalg_vector_norm.default, x, p, None, False, dtype=call["dtype"]) for x in call.tensors]
    reduced = run.redistribute(call.tensors, [x.spec.layout.without_partials for x in call.tensors], "foreach_norm")
    dtypes = [call["dtype"] or x.dtype for x in reduced]
    operands = [cast(run, x, accumulation_dtype(dtype)) for x, dtype in zip(reduced, dtypes)]
    sums = [run(aten.sum.dim_IntList, powers(run, run(aten.abs.default, x), p), list(range(x.dim())), False)
            for x in operands]
    home = call.tensors[0].spec.layout.replicated    # the norms of all pipeline stages go to the first one's placement
    norms = [root(run, total, p) for total in run.redistribute(sums, [home] * len(sums), "foreach_norm")]
    return [cast(run, x, dtype.to_real() if dtype.is_complex else dtype) for x, dtype in zip(norms, dtypes)]


def packed_sequence(call: Call, run: Run) -> Any:
    """The rows of sequences, step by step. The batch size of each step stays a plain tensor: RNNs read it."""
    rows, batch_sizes = run.plain(call)
    sizes = next(iter(batch_sizes.shards.values()), None)
    if sizes is None:                                # of a process that holds nothing of the rows
        lengths = call["lengths"]
        sizes = (lengths > torch.arange(int(lengths.max()), device="cpu").unsqueeze(1)).sum(1)
    return rows, sizes


def unscale(call: Call, run: Run) -> Any:
    """GradScaler's step on gradients: multiplied by `inv_scale` in place. `found_inf`, a plain tensor that every
    process has, becomes 1 if any part of any gradient on any rank is not finite."""
    flags: dict[placement, dict[int, torch.Tensor]] = {}
    grads = [grad for grad in call["self"] if is_global(grad)]
    if len(grads) < len(call["self"]):
        call.func([grad for grad in call["self"] if not is_global(grad)], call["found_inf"], call["inv_scale"])
    for grad in grads:
        for rank, shard in grad.shards.items():
            zero = torch.zeros((), dtype=torch.float32, device=shard.device)
            flag = flags.setdefault(grad.placement, {}).setdefault(rank, zero)
            call.func([shard], flag, call["inv_scale"].to(shard.device))
    for where in dict.fromkeys(grad.placement for grad in grads):      # also where this process has no part
        pending = spec(layout(where, (partial_max,) * where.ndim), (), None, torch.float32)
        if run(aten._local_scalar_dense.default, run.wrap(pending, flags.get(where, {}))):
            call["found_inf"].fill_(1.0)
