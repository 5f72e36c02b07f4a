"""Ops along a split dim whose result depends on the order of its parts: cumulative sums, argmax, topk.

Each rank does its own part and publishes a *summary* of it, one element long (k for topk) along the dim. The summaries
of all parts, concatenated in the order of the parts, are a small tensor that is split as the operand is; gathered, it
tells every rank all that it needs.

    cumsum    summary: the sum of the part          result: own cumulative sum + the sums of the parts before it
    prod      summary: the product of the part      result: the product of the summaries
    argmax    summary: the maximum and its index    result: the first of the largest summaries (of all dims as well)
    topk      summary: the k largest and indices    result: the k largest of the summaries
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from globaltensor.algorithms.run import Decomposition, Run
from globaltensor.layouts.global_like import GlobalLike
from globaltensor.layouts.layout import Layout, Shards, spec
from globaltensor.layouts.sbp import broadcast, split
from globaltensor.rules.call import Call
from globaltensor.rules.families import dims_of
from globaltensor.runtime.dtypes import highest_value, lowest_value


def _split_axes(x: GlobalLike, dim: int) -> list[int]:
    """The placement axes that split this dim."""
    return [axis for axis, s in enumerate(x.spec.sbp) if s.is_split and s.dim == dim]


def _reduced(run: Run, x: GlobalLike) -> GlobalLike:
    """x, its pending sums reduced."""
    return run.redistribute([x], [x.spec.layout.without_partials], "reduce")[0] if x.spec.layout.partial else x


def _parts_before(x: GlobalLike, dim: int, rank: int) -> int:
    """How many parts of the dim come before this rank's."""
    before, coords = 0, x.spec.placement.coords[rank]
    for axis in _split_axes(x, dim):
        before = before * x.spec.placement.shape[axis] + coords[axis]
    return before


def _unsplit(where: Layout, dims: list[int]) -> Layout:
    """The same layout, but these dims whole."""
    return where.with_sbp(tuple(broadcast if s.is_split and s.dim in dims else s for s in where.sbp))


def _gather_summaries(run: Run, x: GlobalLike, dims: list[int], summaries: list[Shards], dtypes: list[torch.dtype],
                      length: int, op: str) -> list[GlobalLike]:
    """The summaries of all parts, `length` long each, concatenated along `dims`: a global tensor for each kind."""
    shape = tuple(x.spec.layout.num_parts(d) * length if d in dims else n for d, n in enumerate(x.shape))
    split_up = [run.wrap(spec(x.spec.layout, shape, None, dtype), shards)
                for shards, dtype in zip(summaries, dtypes)]
    return run.redistribute(split_up, [_unsplit(x.spec.layout, dims)] * len(split_up), op)


# ------------------------------------------------------------------------------------------------ cumulative sums


def cumulative(join: Callable[..., Tensor], total: Callable[..., Tensor]) -> Decomposition:
    """cumsum and cumprod: join(own, what came before), where `total` reduces a part along the dim."""

    def decomposition(call: Call, run: Run) -> GlobalLike:
        x = _reduced(run, call.tensors[0])
        dim = call["dim"] % x.dim()
        dtype = call["dtype"] or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)
        totals = {r: total(t, dim, keepdim=True, dtype=dtype) for r, t in x.shards.items()}
        gathered, = _gather_summaries(run, x, [dim], [totals], [dtype], 1, str(call.func))
        shards = {}
        for rank, part in x.shards.items():
            before = gathered.shards[rank].narrow(dim, 0, _parts_before(x, dim, rank))
            own = call.func(part, dim, dtype=dtype)
            shards[rank] = join(own, total(before, dim, keepdim=True, dtype=dtype)).contiguous()
        return run.wrap(spec(x.spec.layout, tuple(x.shape), None, dtype), shards)

    return decomposition


cumsum = cumulative(torch.add, torch.sum)
cumprod = cumulative(torch.mul, torch.prod)


def split_product(call: Call, run: Run) -> GlobalLike:
    """prod: every rank multiplies its part, and the products are multiplied, once they are gathered."""
    x = _reduced(run, call.tensors[0])
    dims = dims_of(call, x.dim())
    dtype = call["dtype"] or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)
    parts: Shards = dict(x.shards)
    for d in dims:
        parts = {rank: torch.prod(part, d, keepdim=True, dtype=dtype) for rank, part in parts.items()}
    shape = tuple(x.spec.layout.num_parts(d) if d in dims else n for d, n in enumerate(x.shape))
    summary: Any = run.wrap(spec(x.spec.layout, shape, None, dtype), parts)
    args, kwargs = call.arguments_with([summary])
    return run.plain(Call(call.func, args, kwargs))


# -------------------------------------------------------------------------------------------------- extreme values


def extreme(call: Call, run: Run) -> GlobalLike | tuple[GlobalLike, GlobalLike]:
    """max.dim, min.dim, argmax and argmin along a split dim."""
    x = _reduced(run, call.tensors[0])
    if call["dim"] is None:
        return _extreme_of_all(call, run, x)
    dim, keep = call["dim"] % x.dim(), bool(call["keepdim"])
    reduce = torch.max if "max" in call.func._schema.name else torch.min
    worst = lowest_value(x.dtype) if reduce is torch.max else highest_value(x.dtype)
    values, indices = {}, {}
    for rank, part in x.shards.items():
        if part.shape[dim]:
            values[rank], indices[rank] = reduce(part, dim, keepdim=True)
            indices[rank] = indices[rank] + x.spec.region(rank)[dim][0]
        else:                                        # an empty part has a summary that never wins
            size = [1 if i == dim else n for i, n in enumerate(part.shape)]
            values[rank], indices[rank] = part.new_full(size, worst), part.new_zeros(size, dtype=torch.int64)
    summaries = _gather_summaries(run, x, [dim], [values, indices], [x.dtype, torch.int64], 1, str(call.func))
    best_values, best_indices = {}, {}
    for rank in x.shards:
        value, winner = reduce(summaries[0].shards[rank], dim, keepdim=True)
        index = summaries[1].shards[rank].gather(dim, winner)
        best_values[rank], best_indices[rank] = (value, index) if keep else (value.squeeze(dim), index.squeeze(dim))
    where = summaries[0].spec.layout
    shape = tuple(1 if i == dim else n for i, n in enumerate(x.shape) if keep or i != dim)
    if not keep:                                     # later dims move up by one
        where = where.with_sbp(tuple(split(s.dim - 1) if s.is_split and s.dim > dim else s for s in where.sbp))
    best = run.wrap(spec(where, shape, None, torch.int64), best_indices)
    if "arg" in call.func._schema.name:
        return best
    return run.wrap(spec(where, shape, None, x.dtype), best_values), best


def _extreme_of_all(call: Call, run: Run, x: GlobalLike) -> GlobalLike:
    """argmax and argmin of all elements: the first in the order of the whole."""
    reduce = torch.max if "max" in call.func._schema.name else torch.min
    worst, n = lowest_value(x.dtype) if reduce is torch.max else highest_value(x.dtype), x.numel()
    values, indices = {}, {}
    for rank, part in x.shards.items():
        value, index = part.new_full((), worst), part.new_full((), n, dtype=torch.int64)    # of an empty part
        if part.numel():
            value, at = reduce(part.reshape(-1), 0)
            index, step = torch.zeros_like(at), 1
            for d in reversed(range(x.dim())):       # from the place in the part to that in the whole
                index = index + (at % part.shape[d] + x.spec.region(rank)[d][0]) * step
                at, step = at // part.shape[d], step * x.shape[d]
        values[rank], indices[rank] = (t.reshape([1] * x.dim()) for t in (value, index))
    summaries = _gather_summaries(run, x, list(range(x.dim())), [values, indices], [x.dtype, torch.int64], 1,
                                  str(call.func))
    firsts = {}
    for rank in x.shards:
        value, index = (t.shards[rank] for t in summaries)
        best = reduce(value)                         # nan, if there is one
        first = index.masked_fill((value != best) & (value == value), n).min()
        firsts[rank] = first.reshape([1] * x.dim()) if call["keepdim"] else first
    shape = (1,) * x.dim() if call["keepdim"] else ()
    return run.wrap(spec(x.spec.layout.replicated, shape, None, torch.int64), firsts)


def topk(call: Call, run: Run) -> tuple[GlobalLike, ...]:
    """The k largest of each part's k largest; parts shorter than k are filled up with values that never win."""
    x, k = _reduced(run, call.tensors[0]), call["k"]
    dim = call["dim"] % x.dim()
    worst = lowest_value(x.dtype) if call["largest"] else highest_value(x.dtype)
    values, indices = {}, {}
    for rank, part in x.shards.items():
        value, index = part.topk(min(k, part.shape[dim]), dim, call["largest"], True)
        missing = list(part.shape)
        missing[dim] = k - value.shape[dim]
        values[rank] = torch.cat([value, value.new_full(missing, worst)], dim)
        indices[rank] = torch.cat([index + x.spec.region(rank)[dim][0], index.new_full(missing, -1)], dim)
    summaries = _gather_summaries(run, x, [dim], [values, indices], [x.dtype, torch.int64], k, str(call.func))
    best_values, best_indices = {}, {}
    for rank in x.shards:
        value, index = summaries[0].shards[rank], summaries[1].shards[rank]
        order = value.sort(dim=dim, descending=call["largest"], stable=True).indices
        # fillers last, even among values that equal them: a stable sort by whether it is one
        order = order.gather(dim, (index.gather(dim, order) < 0).to(torch.uint8).sort(dim=dim, stable=True).indices)
        order = order.narrow(dim, 0, k)
        best_values[rank], best_indices[rank] = value.gather(dim, order), index.gather(dim, order)
    shape = tuple(k if i == dim else n for i, n in enumerate(x.shape))
    return tuple(run.wrap(spec(summaries[0].spec.layout, shape, None, dtype), shards)
                 for shards, dtype in ((best_values, x.dtype), (best_indices, torch.int64)))
