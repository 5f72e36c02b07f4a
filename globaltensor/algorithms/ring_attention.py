"""Attention over a split sequence, one block of keys at a time: ring attention (Liu et al., arXiv:2310.01889).

A query needs all keys, but not at once. Each block of keys and values gives a partial result and the logarithm of its
sum of exponentials, and two partial results combine into one:

    log = log(exp(log1) + exp(log2)),    out = out1 exp(log1 - log) + out2 exp(log2 - log)              (`_merge`)

So every rank keeps its queries, and blocks of k and v are passed around the ring, straight from their owners:

                rank 0    rank 1    rank 2
    step 0      0         1         2              the owner of the block that each rank has; one in brackets is behind
    step 1      (2)       0         1              the causal mask, and is neither communicated nor computed
    step 2      (1)       (2)       0

The backward pass takes the same steps. From out and log of all keys, the kernel computes a block's exact share of dq,
dk and dv; the shares of dk and dv go back to the block's owner, which adds them up.

    per rank, of n      receives forward            receives backward                       holds besides its own
    ring                (n-1)/n (k + v)             (n-1)/n (k + v) + (n-1)/n (dk + dv)     one block of k and v

Known imperfections. Causal work is uneven: the last rank computes n blocks, the first one only one. To balance that,
each rank would need an early and a late piece of the sequence; S(2) cuts it in order, so a program that wants balance
permutes its sequence itself. And no block is fetched while another is computed.
"""
from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan, prod
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from globaltensor.algorithms.decompositions import as_global
from globaltensor.algorithms.offer import Offer, boxings_to, largest_part
from globaltensor.algorithms.run import Run
from globaltensor.layouts.global_like import GlobalLike, is_global, spec_of
from globaltensor.layouts.layout import Layout, Shape, Shards, Spec, layout, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.rank_regions import regions_by
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.regions import Range, Region, volume
from globaltensor.layouts.sbp import Sbp, broadcast, partial_sum, split
from globaltensor.rules.call import Call
from globaltensor.runtime.dtypes import accumulation_dtype
from globaltensor.runtime.meta import Asking
from globaltensor.runtime.torch_internals import is_of_a_trace

SEQUENCE = split(2)                                  # of [batch, heads, sequence, features]
EXTRA = 0.1                                          # the ring may take this share more time, for less memory


# -------------------------------------------------------------------------------------------------- what it would take


def _ring_offer(call: Call, operands: list[Spec], backward: bool = False) -> Offer | None:
    """What the ring takes, beside the signatures of the rule:

        k and v are whole              nothing moves. But a causal kernel must know the positions of its queries: then a
                                       ring of one block
        heads or samples can be split  all of q, k and v moves once, 1/n of it to each rank (DeepSpeed-Ulysses): the
                                       better of the two by bytes, latency and work. The result may stay split so
        neither can be split           k and v are gathered, and for causal attention q too, which every rank then
                                       computes whole: the ring, but for short sequences that are not causal, where
                                       n - 1 moves take longer than one
    """
    q, k, v = (call[name] for name in ("query", "key", "value"))
    own = spec_of(q)
    if own is None or not _fits(q, k, v) or call["is_causal"] and call["attn_mask"] is not None:
        return None
    ring = [axis for axis, parts in enumerate(own.placement.shape) if own.sbp[axis] == SEQUENCE and parts > 1]
    if not ring or not call["is_causal"] and all(_is_whole(t, axis) for t in (k, v) for axis in ring):
        return None
    queries = _query_layout(call)
    keys = _key_layout(call, queries)
    blocks, ends = keys.num_parts(2), queries.num_parts(2)
    kv = 2 * largest_part(keys, tuple(k.shape)) * k.dtype.itemsize
    # multiply-adds of all pairs of rows and columns; and which share of them is computed, and by the last rank, which
    # takes longest
    work = 2.0 * q.numel() * k.shape[2] * (2.5 if backward else 1)
    computed, of_last = (0.5, 1 - 0.5 / ends) if call["is_causal"] else (1.0, 1.0)
    wants = _wanted_layouts(call, queries, keys)
    of_keys = _key_grad_layout(queries, keys)
    return Offer("ring attention", tuple(wants[name] for name in call.names),
                 (queries, of_keys, of_keys) if backward else (queries, queries),
                 work * of_last * largest_part(queries, tuple(q.shape)) / q.numel(),
                 (boxings_to(operands, tuple(wants[name] for name in call.names)),),
                 # starts are counted as forward, so that what goes around forward is seldom gathered backward
                 exchanges=blocks - 1, received=kv * (blocks - 1) * (1 + backward),
                 op_work=work * computed, extra=inf if call["is_causal"] else EXTRA, returns=False)


def offer_forward(call: Call, operands: list[Spec]) -> Offer | None:
    """Of the ring, for the output."""
    return _ring_offer(call, operands)


def offer_backward(call: Call, operands: list[Spec]) -> Offer | None:
    """Of the ring, for the gradients: as many moves again, of those of keys and values."""
    return _ring_offer(call, operands, backward=True)


def _fits(q: GlobalLike, k: GlobalLike, v: GlobalLike) -> bool:
    """Are the operands of sizes that the kernel takes, and not empty? (It raises the errors for others itself.)"""
    return bool(q.dim() == k.dim() == 4 and q.numel() and k.numel() and k.shape == v.shape
                and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3]))


def _is_whole(t: Tensor | GlobalLike, axis: int) -> bool:
    """Does every rank along this axis hold all of it? (A plain tensor counts as broadcast.)"""
    return not is_global(t) or t.spec.sbp[axis].is_broadcast


# --------------------------------------------------------------------------------------------------------- layouts


def _query_layout(call: Call) -> Layout:
    """Of queries: cut along samples, heads and sequence as they are; what cannot stay is cut along the sequence."""
    own, heads = call["query"].spec, call["key"].shape[1]
    nd: list[Sbp] = []
    for s, parts in zip(own.sbp, own.placement.shape):
        if s == split(1) and heads % parts == 0:
            heads //= parts
        elif s != split(0) and not s.is_broadcast:
            s = SEQUENCE
        nd.append(s)
    return layout(own.placement, tuple(nd))


def _key_layout(call: Call, queries: Layout) -> Layout:
    """Of keys and values: as the queries; but whole along the sequence where they are whole already."""
    return queries.with_sbp(tuple(broadcast if s == SEQUENCE and _is_whole(call["key"], axis) and
                                  _is_whole(call["value"], axis) else s for axis, s in enumerate(queries.sbp)))


def _key_grad_layout(queries: Layout, keys: Layout) -> Layout:
    """Of the gradients of keys and values: as those; but pending where each rank computes the terms of its queries."""
    return queries.with_sbp(tuple(partial_sum if s == SEQUENCE and k.is_broadcast else k
                                  for s, k in zip(queries.sbp, keys.sbp)))


def _mask_layout(shape: Shape, queries: Layout) -> Layout:
    """Of a mask that broadcasts to [batch, heads, queries, keys]: cut as the queries, where it has such a dim."""
    dims = [s.dim - 4 + len(shape) if s.is_split else -1 for s in queries.sbp]
    return queries.with_sbp(tuple(split(d) if d >= 0 and shape[d] > 1 else broadcast for d in dims))


def _wanted_layouts(call: Call, queries: Layout, keys: Layout) -> dict[str, Layout]:
    """Of all operands."""
    wanted = {name: keys if name in ("key", "value") else queries for name in call.names}
    if "attn_mask" in wanted:
        wanted["attn_mask"] = _mask_layout(tuple(call["attn_mask"].shape), queries)
    return wanted


class _PassedBlock(NamedTuple):
    """Which part of keys and values a rank has after so many steps: of the block that is as far back in the ring, what
    is not behind the causal mask."""

    queries: Layout
    keys: Layout
    q_shape: Shape
    k_shape: Shape
    causal: bool
    ring: tuple[int, ...]
    distance: int

    def region(self, rank: int) -> Region:
        where = self.keys.placement
        *_, rows, _ = held = self.queries.region(self.q_shape, rank)
        *outer, (start, stop), features = self.keys.region(self.k_shape, self._owner(where, rank))
        if not volume(held):
            stop = start
        elif self.causal:
            stop = max(start, min(stop, rows[1]))
        return (*outer, (start, stop), features)

    def _owner(self, where: placement, rank: int) -> int:
        """The rank so many steps before this one, on the axes of the ring as one row."""
        at, left = list(where.coords[rank]), -self.distance
        for axis in reversed(self.ring):
            left, at[axis] = divmod(at[axis] + left, where.shape[axis])
        return where.flat[sum(map(mul, at, where.strides))]


class RingStep(NamedTuple):
    """The blocks of one step: `kv`, the part of keys and values that each rank has then; `dkv`, that of their gradients
    that it computes."""

    kv: Layout
    dkv: Layout


@remembered
def ring_steps(queries: Layout, keys: Layout, q_shape: Shape, k_shape: Shape, causal: bool) -> tuple[RingStep, ...]:
    """All steps, for queries and keys of these layouts and shapes. In the first, each rank has its own block.

    Steps in which nobody receives anything are left out, and so is what of a block is behind the causal mask.
    """
    where, ring = queries.placement, tuple(axis for axis, s in enumerate(keys.sbp) if s == SEQUENCE)
    pending = tuple(partial_sum if s == SEQUENCE else broadcast for s in queries.sbp)
    # of what other axes cut, the first rank has as much as any
    longest = where.ranks_along([axis for axis, s in enumerate(queries.sbp) if s == SEQUENCE], where.flat[0])
    steps = [RingStep(keys, _key_grad_layout(queries, keys))]
    for distance in range(1, prod(where.shape[axis] for axis in ring)):
        block = _PassedBlock(queries, keys, q_shape, k_shape, causal, ring, distance)
        if any(volume(block.region(rank)) for rank in reversed(longest)):
            steps.append(RingStep(regions_by(where, block, None, keys, ring),
                                  regions_by(where, block, pending, keys, ring)))
    return tuple(steps)


class Tile(NamedTuple):
    """Rows (of a rank's queries) and columns (of a block of keys) that are computed in one call of the kernel."""

    rows: slice
    columns: slice
    causal: bool


def tiles(rows: Range, columns: Range, causal: bool) -> list[Tile]:
    """What of a block is computed: all of it; or, if causal, what is left of the diagonal, and what the diagonal
    crosses."""
    (a, b), (c, d) = rows, columns
    corner = max(a, c)                               # the first row, and the first column, of the crossed part
    parts = ([(rows, (c, min(d, a)), False), ((corner, b), (corner, min(d, b)), True)] if causal
             else [(rows, columns, False)])
    return [Tile(slice(r0 - a, r1 - a), slice(c0 - c, c1 - c), diagonal)
            for (r0, r1), (c0, c1), diagonal in parts if r0 < r1 and c0 < c1]


# ------------------------------------------------------------------------------------------------------- the op itself


class _Block(NamedTuple):
    """Keys and values that a rank has in a step, and what of them it computes, each tile with its mask."""

    k: Tensor
    v: Tensor
    tiles: list[tuple[Tile, Tensor | None]]


class RingCall:
    """An attention call with its operands redistributed for the ring."""

    def __init__(self, call: Call, run: Run) -> None:
        self.call, self.run, self.op, self.causal = call, run, str(call.func), bool(call["is_causal"])
        self.queries = _query_layout(call)
        self.keys = _key_layout(call, self.queries)
        wanted = _wanted_layouts(call, self.queries, self.keys)
        operands = [as_global(run, call[name], call["query"], self.op) for name in wanted]
        moved = run.redistribute(operands, list(wanted.values()), self.op)
        self.operands = dict(zip(wanted, moved))
        self.mask = self.operands.pop("attn_mask", None)
        self.ranks = list(self.operands["query"].shards)
        self.dtype = accumulation_dtype(self.operands["query"].dtype)

    def results(self) -> list[Tensor]:
        """What the op returns, as meta tensors."""
        operands = [torch.empty_strided(t.spec.shape, t.spec.stride, dtype=t.dtype, device="meta")
                    for t in self.operands.values()]
        with Asking():
            return list(self.kernel(*operands, causal=self.causal, mask=None))

    def kernel(self, *tensors: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, ...]:
        """torch's own kernel of the op."""
        return self.call.func(*tensors, 0.0, causal, attn_mask=mask, scale=self.call["scale"])

    def steps(self) -> Iterator[tuple[RingStep, dict[int, _Block]]]:
        """Step by step, the blocks of this process's ranks. Whoever pops a block frees it before the next step."""
        q, k, v = (self.operands[name] for name in ("query", "key", "value"))
        for step in ring_steps(self.queries, self.keys, q.spec.shape, k.spec.shape, self.causal):
            k_step, v_step = self.run.redistribute([k, v], [step.kv] * 2, self.op)
            blocks = {}
            for rank in self.ranks:
                rows, columns = q.spec.region(rank)[2], step.kv.region(k.spec.shape, rank)[2]
                computed = tiles(rows, columns, self.causal) if q.shards[rank].numel() else []
                blocks[rank] = _Block(k_step.shards[rank], v_step.shards[rank],
                                      [(tile, self._mask_of(rank, tile, columns[0])) for tile in computed])
            del k_step, v_step                       # so that the blocks hold the only references
            yield step, blocks

    def _mask_of(self, rank: int, tile: Tile, start: int) -> Tensor | None:
        """The mask of a tile of a block that starts at column `start`; dims of size 1 stay, to be broadcast."""
        if self.mask is None:
            return None
        mask = self.mask.shards[rank]
        rows = tile.rows if mask.shape[-2] > 1 else slice(None)
        columns = slice(start + tile.columns.start, start + tile.columns.stop)
        return mask[..., rows, columns if mask.shape[-1] > 1 else slice(None)]

    def wrap(self, result: Tensor, where: Layout, shards: Shards) -> GlobalLike:
        """A result like this meta tensor, from shards in the accumulation dtype."""
        return self.run.wrap(spec(where, tuple(result.shape), result.stride(), result.dtype),
                             {rank: shard.to(result.dtype) for rank, shard in shards.items()})


def ring_forward(call: Call, run: Run) -> tuple[GlobalLike, GlobalLike]:
    """out and logsumexp, laid out as the queries. With dropout, the plain rule: its masks would depend on the steps."""
    if call["dropout_p"] > 0:
        return run.plain(call)
    ring = RingCall(call, run)
    results, queries = ring.results(), ring.operands["query"].shards
    out = {rank: torch.zeros_like(q, dtype=ring.dtype) for rank, q in queries.items()}
    log = {rank: torch.full(q.shape[:3], -inf, dtype=ring.dtype, device=q.device) for rank, q in queries.items()}
    for _, blocks in ring.steps():
        for rank in ring.ranks:
            _attend(ring, queries[rank], blocks.pop(rank), out[rank], log[rank])
    for total in log.values():                       # of a row that sees nothing, the kernel says 0: out, and logarithm
        total.masked_fill_(total == -inf, 0.0)
    return ring.wrap(results[0], ring.queries, out), ring.wrap(results[1], ring.queries, log)


def _attend(ring: RingCall, q: Tensor, block: _Block, out: Tensor, log: Tensor) -> None:
    """Merge what a block gives into `out` and `log`."""
    for (rows, columns, causal), mask in block.tiles:
        k, v = block.k[:, :, columns], block.v[:, :, columns]
        part, more = ring.kernel(q[:, :, rows], k, v, causal=causal, mask=mask)
        silent = more == 0                           # so says the kernel of a row that sees nothing, or only NaN
        # a graph that is traced could not ask, and of an accelerator one would wait for the answer
        if is_of_a_trace(k) or k.device.type != "cpu" or silent.any() and k.isnan().any():
            more = more.masked_fill(silent & k.isnan().any(), nan)
        if mask is not None:
            more = more.masked_fill(mask.isneginf().all(-1), -inf)
        _merge(out[:, :, rows], log[:, :, rows], part, more)


def _merge(out: Tensor, log: Tensor, part: Tensor, more: Tensor) -> None:
    """Merge a partial result, and the logarithm of its sum of exponentials, into `out` and `log`."""
    share = torch.sigmoid(more - log).masked_fill_(more == -inf, 0.0)        # exp(more) / (exp(log) + exp(more))
    out.lerp_(part.to(out.dtype), share.unsqueeze(-1))
    log.copy_(torch.logaddexp(log, more))


def ring_backward(call: Call, run: Run) -> tuple[GlobalLike, GlobalLike, GlobalLike]:
    """dq, laid out as the queries, dk and dv, as keys and values."""
    if call["dropout_p"] > 0:
        return run.plain(call)
    ring = RingCall(call, run)
    results, home = ring.results(), _key_grad_layout(ring.queries, ring.keys)
    operands = [ring.operands[name].shards for name in ("grad_out", "query", "out", "logsumexp")]
    dq = {rank: torch.zeros_like(q, dtype=ring.dtype) for rank, q in operands[1].items()}
    totals: list[Shards] = []                        # of dk and dv, for the ranks' own blocks
    for step, blocks in ring.steps():
        terms: list[Shards] = [{}, {}]
        for rank in ring.ranks:
            terms[0][rank], terms[1][rank] = _gradients(ring, [t[rank] for t in operands], blocks.pop(rank), dq[rank])
        if not totals:                               # step 0: every rank has its own block
            totals = terms
            continue
        sent = [ring.wrap(result, step.dkv, term) for result, term in zip(results[1:], terms)]
        for total, received in zip(totals, run.redistribute(sent, [home] * 2, ring.op)):
            for rank, term in received.shards.items():
                total[rank] += term
    return (ring.wrap(results[0], ring.queries, dq), ring.wrap(results[1], home, totals[0]),
            ring.wrap(results[2], home, totals[1]))


def _gradients(ring: RingCall, operands: list[Tensor], block: _Block, dq: Tensor) -> tuple[Tensor, Tensor]:
    """A rank's terms of the gradients of a block; that of its queries is added to `dq`."""
    dk, dv = (torch.zeros_like(t, dtype=ring.dtype) for t in (block.k, block.v))
    for (rows, columns, causal), mask in block.tiles:
        grad, q, out, log = (t[:, :, rows] for t in operands)
        grads = ring.kernel(grad, q, block.k[:, :, columns], block.v[:, :, columns], out, log, causal=causal, mask=mask)
        for total, at, term in zip((dq, dk, dv), (rows, columns, columns), grads):
            total[:, :, at] += term
    return dk, dv
