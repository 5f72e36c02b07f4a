"""Fused attention on devices whose kernels return more than tensors: lengths, states of random generators.

Such an op runs as it is on every rank, on operands that are cut along batch and heads only, all alike:

    query, key, value, out, gradients   [batch, heads, ...]   S(0) or S(1), as the query is cut; else B
    bias                                [batch or 1, heads or 1, ...]   B where it is repeated
    everything else                     each rank's own, as its kernel returned it

A result is recognised by its first two sizes. Backends differ in what else they return, and need no line each.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from globaltensor.algorithms.run import Run
from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import Layout, layout, spec
from globaltensor.layouts.sbp import Sbp, broadcast
from globaltensor.rules.call import Call, arguments
from globaltensor.runtime.meta import Asking

BIAS = "attn_bias"


def rank_by_rank(call: Call, run: Run) -> tuple[Any, ...]:
    """The op on every rank's heads. Raises GlobalTensorError for dropout, which would depend on the layout."""
    if call["dropout_p"] > 0:
        raise GlobalTensorError("dropout inside a fused attention kernel", "its random numbers depend on the layout",
                                "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): ...")
    query = next(t for t in call.tensors if is_global(t))
    where = _split_layout(call, query.spec.layout)
    part_of = {name: _parts(name, t, where, call, run) for name, t in zip(call.names, call.tensors)}
    results = {rank: _run_locally(call, {name: part(rank) for name, part in part_of.items()}) for rank in query.shards}
    local_sizes: Sequence[tuple[int, ...]]
    if results:
        rank, sample = next(iter(results.items()))
        local_sizes = [where.local_shape((batch, heads), rank) for batch, heads in _sizes(call)]
    else:                                            # a process without a part asks the meta kernel
        with Asking():
            sample = _run_locally(call, {name: torch.empty_like(t, device="meta")
                                   for name, t in zip(call.names, call.tensors)})
        local_sizes = _sizes(call)
    return tuple(_joined(result, {r: out[k] for r, out in results.items()}, local_sizes, where, call, run)
                 for k, result in enumerate(sample))


def _run_locally(call: Call, tensors: dict[str, Tensor]) -> tuple[Any, ...]:
    """The op itself, on these operands."""
    values = {**call.values, **tensors}
    schema = arguments(call.func)
    return call.func(*[values[a.name] for a in schema if not a.keyword],
                     **{a.name: values[a.name] for a in schema if a.keyword})


def _sizes(call: Call) -> list[tuple[int, int]]:
    """Batch and heads, of queries and of keys."""
    return [(call[name].shape[0], call[name].shape[1]) for name in ("query", "key")]


def _split_layout(call: Call, own: Layout) -> Layout:
    """The query's layout along batch and heads; but heads are cut evenly, and no part is empty."""
    # Heads of keys: several of queries may share one, so that a cut of these is one of queries, but not the other way.
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


def _parts(name: str, t: Tensor | GlobalLike, where: Layout, call: Call, run: Run) -> Callable[[int], Tensor]:
    """rank -> what this operand is there."""
    if not is_global(t):
        return lambda rank: t
    per_head = t.dim() > 2 and tuple(t.shape[:2]) in _sizes(call)
    if name == BIAS:
        where = where.with_sbp(tuple(broadcast if s.is_split and t.shape[s.dim] == 1 else s for s in where.sbp))
    elif not per_head:
        return t.shards.__getitem__
    return run.redistribute([t], [where], str(call.func))[0].shards.__getitem__


def _joined(sample: Any, parts: dict[int, Any], local_sizes: Sequence[tuple[int, ...]], where: Layout, call: Call,
            run: Run) -> Any:
    """One result of all ranks. `sample` is one rank's, whose batch and heads have these sizes for queries and keys."""
    if not isinstance(sample, Tensor):
        return sample
    for own, whole in zip(local_sizes, _sizes(call)):
        if sample.dim() > 2 and tuple(sample.shape[:2]) == own:
            return run.wrap(spec(where, (*whole, *sample.shape[2:]), None, sample.dtype), parts)
    # Called broadcast though ranks differ (a generator's state, lengths): only the op's own gradient reads it, rank by
    # rank.
    return run.wrap(spec(where.replicated, tuple(sample.shape), sample.stride(), sample.dtype), parts)
