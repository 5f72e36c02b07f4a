"""Ops along a split dim whose result depends on the order of its parts: cumulative sums, the place of a maximum, topk.

Each rank does its own part and hands on a *summary* of it that is one element long (k for topk) along the dim. The
summaries of all parts, put side by side in the order of the parts, are a small tensor that is split as the operand
is; gathered, it tells every rank what it needs.

    cumsum    summary: the sum of the part      result: own cumulative sum + the sums of the parts before it
    argmax    summary: the maximum and where    result: the first of the largest summaries
    topk      summary: the k largest and where  result: the k largest of the summaries
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from globaltensor.algorithms.decompositions import reduces_split
from globaltensor.algorithms.local_impls import least, most
from globaltensor.algorithms.run import Run
from globaltensor.layouts.layout import Layout, spec
from globaltensor.layouts.sbp import broadcast, split
from globaltensor.rules.call import Call

aten = torch.ops.aten


def _axes(x: Any, dim: int) -> list[int]:
    """The placement axes that split this dim."""
    return [axis for axis, s in enumerate(x.spec.sbp) if s.is_split and s.dim == dim]


def _ready(run: Run, x: Any) -> Any:
    """Without pending sums."""
    if not x.spec.layout.partial:
        return x
    dst = x.spec.layout.without_partials
    return run.redistribute([x], [dst], "reduce")[0]


def _place(x: Any, dim: int, rank: int) -> int:
    """How many parts of the dim come before this rank's."""
    place, at = 0, x.spec.placement.coords[rank]
    for axis in _axes(x, dim):
        place = place * x.spec.placement.shape[axis] + at[axis]
    return place


def _gathered(where: Layout, dim: int) -> Layout:
    return where.with_sbp(tuple(broadcast if s.is_split and s.dim == dim else s for s in where.sbp))


def _summaries(run: Run, x: Any, dim: int, made: list[dict[int, Tensor]], dtypes: list[torch.dtype], length: int,
               op: str) -> list[Any]:
    """The summaries of all parts, `length` long each, side by side along `dim`: a global tensor for each kind."""
    shape = list(x.shape)
    shape[dim] = x.spec.layout.num_parts(dim) * length
    side = [run.wrap(spec(x.spec.layout, tuple(shape), None, dtype), shards) for shards, dtype in zip(made, dtypes)]
    return run.redistribute(side, [_gathered(x.spec.layout, dim)] * len(side), op)


# ------------------------------------------------------------------------------------------------ cumulative sums


def cumulative(join: Callable[..., Tensor], total: Callable[..., Tensor]) -> Callable[[Call, Any], Any]:
    """cumsum and cumprod: join(own, what came before), where `total` reduces a part along the dim."""

    def decomposition(call: Call, run: Run) -> Any:
        x = _ready(run, call.tensors[0])
        dim = call["dim"] % x.dim()
        dtype = call["dtype"] or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)
        ends = {r: total(t, dim, keepdim=True, dtype=dtype) for r, t in x.shards.items()}
        all_ends, = _summaries(run, x, dim, [ends], [dtype], 1, str(call.func))
        made = {r: join(call.func(t, dim, dtype=dtype),
                        total(all_ends.shards[r].narrow(dim, 0, _place(x, dim, r)), dim, keepdim=True, dtype=dtype))
                for r, t in x.shards.items()}
        return run.wrap(spec(x.spec.layout, tuple(x.shape), None, dtype), {r: t.contiguous() for r, t in made.items()})

    return decomposition


cumsum = cumulative(torch.add, torch.sum)
cumprod = cumulative(torch.mul, torch.prod)


# -------------------------------------------------------------------------------------------------- extreme values


def along_split(call: Call) -> bool:
    """Has it a dim, and is that split?"""
    return call["dim"] is not None and reduces_split(call)


def extreme(call: Call, run: Run) -> Any:
    """max.dim, min.dim, argmax and argmin along a split dim."""
    x = _ready(run, call.tensors[0])
    dim, keep = call["dim"] % x.dim(), bool(call["keepdim"])
    over = torch.max if "max" in call.func._schema.name else torch.min
    worst = least(x.dtype) if over is torch.max else most(x.dtype)
    values, places = {}, {}
    for r, t in x.shards.items():
        if t.shape[dim]:
            values[r], places[r] = over(t, dim, keepdim=True)
            places[r] = places[r] + x.spec.region(r)[dim][0]
        else:
            row = [1 if i == dim else n for i, n in enumerate(t.shape)]
            values[r], places[r] = t.new_full(row, worst), t.new_zeros(row, dtype=torch.int64)
    both = _summaries(run, x, dim, [values, places], [x.dtype, torch.int64], 1, str(call.func))
    best: list[dict[int, Tensor]] = [{}, {}]
    for r in x.shards:
        value, which = over(both[0].shards[r], dim, keepdim=True)
        place = both[1].shards[r].gather(dim, which)
        best[0][r], best[1][r] = (value, place) if keep else (value.squeeze(dim), place.squeeze(dim))
    return _reduced(run, x, both[0].spec.layout, dim, keep, best, "arg" in call.func._schema.name)


def _reduced(run: Run, x: Any, where: Layout, dim: int, keep: bool, best: list[dict[int, Tensor]], places: bool) -> Any:
    """Values and places as global tensors, the dim reduced; only the places of argmax."""
    shape = tuple(1 if i == dim else n for i, n in enumerate(x.shape) if keep or i != dim)
    if not keep:
        where = where.with_sbp(tuple(split(s.dim - 1) if s.is_split and s.dim > dim else s for s in where.sbp))
    value, place = (run.wrap(spec(where, shape, None, dtype), shards)
                    for shards, dtype in zip(best, (x.dtype, torch.int64)))
    return place if places else (value, place)


def topk(call: Call, run: Run) -> Any:
    """The k largest of each part's k largest; parts shorter than k are filled up with what any value beats."""
    x, k = _ready(run, call.tensors[0]), call["k"]
    dim = call["dim"] % x.dim()
    worst = least(x.dtype) if call["largest"] else most(x.dtype)
    values, places = {}, {}
    for r, t in x.shards.items():
        value, place = t.topk(min(k, t.shape[dim]), dim, call["largest"], True)
        missing = list(t.shape)
        missing[dim] = k - value.shape[dim]
        values[r] = torch.cat([value, value.new_full(missing, worst)], dim)
        places[r] = torch.cat([place + x.spec.region(r)[dim][0], place.new_full(missing, -1)], dim)
    both = _summaries(run, x, dim, [values, places], [x.dtype, torch.int64], k, str(call.func))
    shape = tuple(k if i == dim else n for i, n in enumerate(x.shape))
    best: list[dict[int, Tensor]] = [{}, {}]
    for r in x.shards:
        value, place = both[0].shards[r], both[1].shards[r]
        order = value.sort(dim=dim, descending=call["largest"], stable=True).indices
        order = order.gather(dim, (place.gather(dim, order) < 0).to(torch.uint8).sort(dim=dim, stable=True).indices)
        order = order.narrow(dim, 0, k)              # fillers last, however small the values are
        best[0][r], best[1][r] = value.gather(dim, order), place.gather(dim, order)
    return tuple(run.wrap(spec(both[0].spec.layout, shape, None, dtype), shards)
                 for shards, dtype in zip(best, (x.dtype, torch.int64)))
