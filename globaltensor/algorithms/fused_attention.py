"""Fused attention on devices whose kernels return more than tensors: lengths, states of random generators.

Such an op is run rank by rank as it is, on operands that are cut along batch and heads only, all alike:

    query, key, value, out, gradients   [batch, heads, ...]   S(0) or S(1), as the query lies; else B
    bias                                [batch or 1, heads or 1, ...]   B where it is repeated
    everything else                     each rank's own, as its kernel made it

What comes out is recognized by its first two sizes. Backends differ in what else they return, and need no line each.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from globaltensor.algorithms.run import Run
from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Layout, layout, spec
from globaltensor.layouts.sbp import Sbp, broadcast
from globaltensor.rules.call import Call, arguments
from globaltensor.runtime.meta import Asking

BIAS = "attn_bias"


def rank_by_rank(call: Call, run: Run) -> tuple[Any, ...]:
    """The op on every rank's heads. Raises GlobalTensorError for dropout, which would differ with the layout."""
    if call["dropout_p"] > 0:
        raise GlobalTensorError("dropout inside a fused attention kernel", "its random numbers depend on the layout",
                                "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): ...")
    query = next(t for t in call.tensors if is_global(t))
    where = _cut(call, query.spec.layout)
    moved = {name: _moved(name, t, where, call, run) for name, t in zip(call.names, call.tensors)}
    results = {rank: _run(call, {name: of(rank) for name, of in moved.items()}) for rank in query.shards}
    if results:
        rank, told = next(iter(results.items()))
        held = [where.local_shape((batch, heads), rank) for batch, heads in _sizes(call)]
    else:                                            # a process without a part asks the meta kernel
        with Asking():
            told = _run(call, {name: torch.empty_like(t, device="meta") for name, t in zip(call.names, call.tensors)})
        held = _sizes(call)
    return tuple(_joined(result, {r: out[k] for r, out in results.items()}, held, where, call, run)
                 for k, result in enumerate(told))


def _run(call: Call, tensors: dict[str, Tensor]) -> tuple[Any, ...]:
    """The op itself, on these operands."""
    values = {**call.values, **tensors}
    told = arguments(call.func)
    return call.func(*[values[a.name] for a in told if not a.keyword],
                     **{a.name: values[a.name] for a in told if a.keyword})


def _sizes(call: Call) -> list[tuple[int, int]]:
    """Batch and heads, of queries and of keys."""
    return [tuple(call[name].shape[:2]) for name in ("query", "key")]


def _cut(call: Call, own: Layout) -> Layout:
    """As the first operand lies along batch and heads; heads are cut evenly, and no part is empty."""
    batch, heads = _sizes(call)[1]
    nd: list[Sbp] = []
    for s, parts in zip(own.sbp, own.placement.shape):
        if s.is_split and s.dim == 0 and batch >= parts:
            batch //= parts
        elif s.is_split and s.dim == 1 and heads % parts == 0:
            heads //= parts
        else:
            s = broadcast
        nd.append(s)
    return layout(own.placement, tuple(nd))


def _moved(name: str, t: Any, where: Layout, call: Call, run: Run) -> Any:
    """rank -> what this operand is there."""
    if not is_global(t):
        return lambda rank: t
    per_head = t.dim() > 2 and tuple(t.shape[:2]) in _sizes(call)
    if name == BIAS:
        where = where.with_sbp(tuple(broadcast if s.is_split and t.shape[s.dim] == 1 else s for s in where.sbp))
    elif not per_head:
        return t.shards.__getitem__
    return run.redistribute([t], [where], str(call.func))[0].shards.__getitem__


def _joined(told: Any, parts: dict[int, Any], held: list[tuple[int, ...]], where: Layout, call: Call, run: Run) -> Any:
    """One result of all ranks; `told` is what it is where batch and heads have these sizes, of queries and of keys."""
    if not isinstance(told, Tensor):
        return told
    for own, whole in zip(held, _sizes(call)):
        if told.dim() > 2 and tuple(told.shape[:2]) == own:
            return run.wrap(spec(where, (*whole, *told.shape[2:]), None, told.dtype), parts)
    home = where.replicated
    return run.wrap(spec(home, tuple(told.shape), told.stride(), told.dtype), parts)
