"""`torch.nn.attention.flex_attention` of global tensors: each rank does its batches, heads and queries.

The score and the mask are functions of indices (batch, head, query, key), which torch traces and hands to an op that
takes functions. On a rank indices count from the rank's own part, so the functions are called with its start added.

    query, out, logsumexp   [b, heads, queries, ...]   S(0), S(1) or S(2) as the query is cut
    key, value              [b or 1, heads, keys, d]   S(0) and S(1) alike; B where the query is S(2), or b is 1 here
    tensors of functions    B: they are indexed by the whole's indices

Heads are cut evenly only, and by groups where several heads of queries share one of keys. A block mask is cut with the
batches and heads. Where queries are cut, its rows of blocks are, if cuts fall between blocks; else the mask function is
asked for every element.

The gradients of keys, values and of the functions' tensors are pending sums along axes that cut what they are not cut
by. This stands above autograd, as torch's own op does: it is one function of autograd, whose backward is torch's op for
that, on every rank.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from globaltensor.boxings.redistribute import redistribute
from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Layout, Spec, dense, dense_in_order, layout, replicated, spec
from globaltensor.layouts.regions import Region
from globaltensor.layouts.sbp import Sbp, broadcast, partial_sum
from globaltensor.runtime.torch_internals import (
    OWN_KEY,
    TRACED_KEY,
    block_mask_of_rows,
    derivative_of_score,
    flex_attention,
    flex_attention_backward,
    pass_higher_order_ops,
    take_higher_order_op,
)
from globaltensor.tensors.full_value import FromFull
from globaltensor.tensors.linear_maps import row_by_row
from globaltensor.tracebacks import api_boundary

Function = Callable[..., Any]

NAME = "flex_attention"                              # as those who watch boxings are told

# Of torch's tuple that tells of a block mask: two lengths, then these tensors, with rows of blocks of queries or of
# keys; and at its end the sizes of a block and the mask function.
_BY_QUERIES, _BY_KEYS = slice(2, 6), slice(6, 10)


def attend(query: Any, key: Any, value: Any, score: Function, block_mask: tuple[Any, ...], scale: float,
           options: dict[str, Any], score_tensors: tuple[Any, ...] = (), mask_tensors: tuple[Any, ...] = ()) -> Any:
    """torch's op for `flex_attention`, of which an operand is global: (out, logsumexp, largest scores)."""
    where = _flex_layout(query, key, value)
    query, key, value = (x if is_global(x) else FromFull.of(x, where.replicated) for x in (query, key, value))
    device = where.placement.type
    if torch.is_autocast_enabled(device):            # which comes below this
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    joint = None
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, *_only_tensors(score_tensors))):
        sample = next(iter(query.shards.values()), torch.empty(0, dtype=query.dtype, device="cpu"))
        joint = derivative_of_score(score, sample, score_tensors)
    with torch.autocast(device, enabled=False):
        call = _Call(where, _layout_of_keys(where, query, key), score, joint, block_mask, scale, options,
                     _everywhere([_detached(t) for t in score_tensors], where), _everywhere(mask_tensors, where))
        return _FlexAttention.apply(query, key, value, call, *score_tensors)


class _FlexAttention(torch.autograd.Function):
    """The op with its gradient."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, call: _Call, *score_tensors: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, where = call, call.where
        query, key, value = redistribute([query, key, value], [where, call.of_keys, call.of_keys], NAME)
        results = call.on_every_rank(flex_attention, query, key, value)
        shape, precise = tuple(query.shape[:3]), torch.promote_types(query.dtype, torch.float32)
        out = spec(where, (*shape, value.shape[-1]), dense((*shape, value.shape[-1]), query.spec.stride), query.dtype)
        statistic = spec(where, shape, None, precise)
        wrapped = [_joined_results(query, own, results, nth) for nth, own in enumerate((out, statistic, statistic))]
        ctx.mark_non_differentiable(wrapped[2])
        ctx.save_for_backward(query, key, value, *wrapped[:2])
        ctx.wanted = [isinstance(t, torch.Tensor) and t.requires_grad for t in score_tensors]
        return tuple(wrapped)

    @staticmethod
    @row_by_row
    @once_differentiable                             # as torch's kernel
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, logsumexp = ctx.saved_tensors
        call, where = ctx.call, ctx.call.where
        reached = [g if is_global(g) else FromFull.of(g, where) for g in grads[:2] if g is not None]
        moved = iter(redistribute(reached, [where] * len(reached), NAME))
        grads = tuple(None if g is None else next(moved) for g in grads[:2])
        results = call.on_every_rank(flex_attention_backward, query, key, value, out, logsumexp, *grads,
                                     wanted=ctx.wanted)
        of_keys = _pending_where_whole(where, call.of_keys)
        wrapped = [_joined_results(query, x.spec.on(dst), results, nth)
                   for nth, (x, dst) in enumerate([(query, where), (key, of_keys), (value, of_keys)])]
        others = {rank: result[3] for rank, result in results.items()}
        everywhere = _pending_where_whole(where, where.replicated)
        return *wrapped, None, *(_joined_results(query, spec(everywhere, tuple(t.shape), None, t.dtype), others, nth)
                                 if wanted else None
                                 for nth, (t, wanted) in enumerate(zip(call.score_tensors, ctx.wanted)))


def _joined_results(like: Any, own: Spec, results: dict[int, Any], nth: int) -> Any:
    """The nth results of all ranks as one tensor."""
    return like.wrap(own, {rank: dense_in_order(result[nth], own.stride) for rank, result in results.items()})


def _pending_where_whole(where: Layout, of: Layout) -> Layout:
    """The layout of a gradient of what lies as `of`, where the work is split as `where`."""
    return layout(where.placement, tuple(partial_sum if s.is_split and k.is_broadcast else k
                                         for s, k in zip(where.sbp, of.sbp)))


def _only_tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [t for t in values if isinstance(t, torch.Tensor)]


def _detached(t: Any) -> Any:
    return t.detach() if isinstance(t, torch.Tensor) else t


class _Call:
    """What is alike forward and backward: the functions, with their tensors, and the mask."""

    def __init__(self, where: Layout, of_keys: Layout, score: Function, joint: Function | None,
                 block_mask: tuple[Any, ...], scale: float, options: dict[str, Any], score_tensors: Sequence[Any],
                 mask_tensors: Sequence[Any]) -> None:
        self.where, self.of_keys, self.score, self.joint = where, of_keys, score, joint
        self.mask, self.mask_function = _everywhere(block_mask[:-1], where), block_mask[-1]
        self.scale, self.options = scale, options
        self.score_tensors, self.mask_tensors = score_tensors, mask_tensors

    def on_every_rank(self, op: Any, query: Any, *operands: Any, wanted: Sequence[bool] = ()) -> dict[int, Any]:
        """The op of torch on the shards of every rank; of the score's tensors those `wanted` get a gradient."""
        results: dict[int, Any] = {}
        for rank, shard in query.shards.items():
            region = query.spec.region(rank)
            starts = [start for start, _ in region[:3]]
            tensors = [_held_by(t, rank) for t in self.score_tensors]
            for nth, want in enumerate(wanted):
                tensors[nth] = tensors[nth].detach().requires_grad_() if want else tensors[nth]
            functions = [_counted_from(starts, self.score, 1)]
            if op is flex_attention_backward:
                functions.append(_counted_from(starts, self.joint, 1))
            mask = _part_of_mask([_held_by(t, rank) for t in self.mask], region,
                                 _counted_from(starts, self.mask_function, 0))
            results[rank] = op(shard, *(None if x is None else x.shards[rank] for x in operands), *functions, mask,
                               self.scale, self.options, tuple(tensors),
                               tuple(_held_by(t, rank) for t in self.mask_tensors))
        return results


def _counted_from(starts: Sequence[int], function: Any, before: int) -> Any:
    """A function of (..., batch, head, query, key, ...), called with indices that count from these starts."""
    if not any(starts):
        return function

    def shifted(*args: Any) -> Any:
        indices = [index + start for index, start in zip(args[before:before + 3], starts)]
        return function(*args[:before], *indices, *args[before + 3:])

    return shifted


def _held_by(t: Any, rank: int) -> Any:
    return t.shards[rank] if is_global(t) else t


def _everywhere(tensors: Sequence[Any], where: Layout) -> list[Any]:
    """The same, those that are tensors whole on every rank."""
    moved = [i for i, t in enumerate(tensors) if isinstance(t, torch.Tensor)]
    whole = [t if is_global(t) else FromFull.of(t.detach(), where.replicated) for t in (tensors[i] for i in moved)]
    placed = dict(zip(moved, redistribute(whole, [where.replicated] * len(whole), NAME)))
    return [placed.get(i, t) for i, t in enumerate(tensors)]


def _flex_layout(query: Any, key: Any, value: Any) -> Layout:
    """The layout of the query for the call: its own, or that of the keys where it is whole, as far as they can be."""
    first = next((x for x in (query, key, value) if is_global(x)), None)
    if first is None:
        raise GlobalTensorError("flex_attention of plain queries, keys and values with a global tensor in a function",
                                "it has no layout to run in", "gt.from_full(query, placement, sbp), and so on")
    placement = first.spec.placement
    own = [x.spec.layout.sbp if is_global(x) else replicated(placement).sbp for x in (query, key, value)]
    batches, heads, queries = key.shape[0], key.shape[1], query.shape[2]
    chosen: list[Sbp] = []
    for parts, mine, *others in zip(placement.shape, *own):
        s = mine if mine.is_split else next((o for o in others if o.is_split and o.dim < 2), broadcast)
        if s.is_split and s.dim == 0 and query.shape[0] >= parts and batches in (1, query.shape[0]):
            pass
        elif s.is_split and s.dim == 1 and heads % parts == 0:
            heads //= parts
        elif s.is_split and s.dim == 2 and queries >= parts:
            queries //= parts
        else:
            s = broadcast
        chosen.append(s)
    return layout(placement, tuple(chosen))


def _layout_of_keys(where: Layout, query: Any, key: Any) -> Layout:
    cut = {0, 1} if key.shape[0] == query.shape[0] else {1}
    return layout(where.placement, tuple(s if s.is_split and s.dim in cut else broadcast for s in where.sbp))


def _part_of_mask(mask: Sequence[Any], region: Region, function: Function) -> tuple[Any, ...]:
    """torch's tuple for the part of a block mask that belongs to these batches, heads and queries."""
    block_q, block_kv = mask[-2:]
    (first, last), (start, stop) = region[2], region[0]
    queries = mask[0]
    of_rows = tuple(_part_along(_part_along(t, 0, region[0]), 1, region[1]) for t in mask[_BY_QUERIES])
    if last - first == queries or block_q >= queries and start == stop:
        by_keys = (_part_along(_part_along(t, 0, region[0]), 1, region[1]) for t in mask[_BY_KEYS])
        return (*mask[:2], *of_rows, *by_keys, *mask[_BY_KEYS.stop:], function)
    lengths = (last - first, mask[1])
    if first % block_q == 0 and (last % block_q == 0 or last == queries):
        blocks = (first // block_q, -(-last // block_q))
        rows = [_part_along(t, 2, blocks) for t in of_rows]
    else:                                            # one block, which is not full
        device = mask[2].device
        rows = [torch.ones(1, 1, 1, dtype=torch.int32, device=device),
                torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device), None, None]
        block_q = block_kv = max(lengths) + block_q - max(lengths) % block_q
    return block_mask_of_rows(*rows, BLOCK_SIZE=(block_q, block_kv), mask_mod=function, seq_lengths=lengths)


def _part_along(t: Any, dim: int, part: tuple[int, int]) -> Any:
    """A part of a mask's tensor along a dim; the whole of one that repeats itself there."""
    return t if t is None or t.shape[dim] == 1 else t.narrow(dim, part[0], part[1] - part[0])


def take_flex_attention() -> None:
    """Let torch's op come here, if an operand is global. Other ops that take functions go on to their operands."""
    pass_higher_order_ops(OWN_KEY)
    for key in (OWN_KEY, TRACED_KEY):
        take_higher_order_op(flex_attention, key, api_boundary(attend))
