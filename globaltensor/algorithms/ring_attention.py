"""Attention over a split sequence, one block of keys at a time: ring attention (Liu et al., arXiv:2310.01889).

A query needs all keys, but not at once. Each block of keys and values gives a result and the logarithm of its sum of
exponentials, and two such partial results make one:

    log = log(exp(log1) + exp(log2)),    out = out1 exp(log1 - log) + out2 exp(log2 - log)              (`_merge`)

So every rank keeps its queries, and blocks of k and v come to it in turns, straight from their owners:

                rank 0    rank 1    rank 2
    turn 0      0         1         2              whose block each rank has; one in brackets lies behind the causal
    turn 1      (2)       0         1              mask, and is neither moved nor computed
    turn 2      (1)       (2)       0

Backward takes the same turns. The kernel needs no more than out and log of all keys to give a block's exact share of
dq, dk and dv; those of dk and dv go back to the block's owner, who adds them up.

    per rank, of n      receives forward            receives backward                       holds besides its own
    ring                (n-1)/n (k + v)             (n-1)/n (k + v) + (n-1)/n (dk + dv)     one block of k and v

Known imperfections. Causal work is uneven: the last rank computes n blocks, the first one. Ring attention evens that
out where each rank has an early and a late piece of the sequence; S(2) cuts it in order, so a program that wants that
permutes its sequence itself. And a block is not fetched while another is computed.
"""
from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import inf, nan, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from globaltensor.algorithms.decompositions import as_global
from globaltensor.algorithms.run import Run
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Layout, Shape, layout, spec
from globaltensor.layouts.rank_regions import rank_regions
from globaltensor.layouts.regions import volume
from globaltensor.layouts.sbp import Sbp, broadcast, partial_sum, split
from globaltensor.rules.call import Call
from globaltensor.runtime.dtypes import accumulation_dtype
from globaltensor.runtime.meta import Asking
from globaltensor.runtime.world import world

Ends = tuple[int, int]                               # start and stop along the sequence

SEQUENCE = split(2)                                  # of [batch, heads, sequence, features]
EXTRA = 0.1                                          # share of its time that attention may wait longer for less memory


# ------------------------------------------------------------------------------------------------------ when it pays


def pays(call: Call) -> bool:
    """Are turns the way to run this call? Forward and backward answer alike, by how q, k and v lie.

    What else could be done, and what is compared, in seconds on the machine:

        k and v lie whole              nothing moves. Causal queries must know which they are: a turn of one block
        heads or samples are dealt     all of q, k and v moves once, 1/n of it to each rank (DeepSpeed-Ulysses): the
                                       better of the two by bytes, latency and work
        neither can be dealt           k and v are gathered, and of causal attention q too, which every rank then
                                       computes whole: turns, but for short sequences that are not causal, whose
                                       n - 1 moves take longer than one
    """
    q, k, v = (call[name] for name in ("query", "key", "value"))
    own = getattr(q, "spec", None)
    if own is None or not _fits(q, k, v) or call["is_causal"] and call["attn_mask"] is not None:
        return False
    ring = [axis for axis, parts in enumerate(own.placement.shape) if own.sbp[axis] == SEQUENCE and parts > 1]
    if not ring:
        return False
    if all(_is_whole(t, axis) for t in (k, v) for axis in ring):
        return bool(call["is_causal"])
    in_turns, dealt, gathered = _seconds(call, _lie(call), ring)
    if dealt < inf:
        return in_turns < dealt
    return bool(call["is_causal"]) or in_turns <= gathered * (1 + EXTRA)


def _fits(q: Any, k: Any, v: Any) -> bool:
    """Is there something of each, of the sizes that the kernel takes? (What does not fit is for it to refuse.)"""
    return bool(q.dim() == k.dim() == 4 and q.numel() and k.numel() and k.shape == v.shape
                and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3]))


def _seconds(call: Call, lie: Layout, ring: list[int]) -> tuple[float, float, float]:
    """Of attention in turns, with heads or samples dealt (infinite where they cannot be), and with k and v gathered."""
    where, machine = lie.placement, world().machine
    n = prod(where.shape[axis] for axis in ring)
    latency, bandwidth = machine.link(where.flat)
    others = prod(parts for axis, (s, parts) in enumerate(zip(lie.sbp, where.shape)) if s.is_split and axis not in ring)
    q, kv = (sum(call[name].numel() * call[name].dtype.itemsize for name in names) / others / bandwidth * (n - 1) / n
             for names in (("query",), ("key", "value")))
    work = 2 * call["query"].numel() * call["key"].shape[2] / others / machine.work
    seen, last = (0.5, 1 - 0.5 / n) if call["is_causal"] else (1.0, 1.0)     # of all pairs, of those of the last rank
    share = _largest_share(call, lie, ring)
    return ((n - 1) * latency + kv + work / n * last,
            latency + (q + kv + work * seen) * share if share is not None else inf,
            latency + kv + work / n * last)


def _largest_share(call: Call, lie: Layout, ring: list[int]) -> float | None:
    """What one rank gets of q, k and v where their heads, evenly, or else samples are dealt along the ring."""
    samples, heads = call["key"].shape[:2]
    for axis, (s, parts) in enumerate(zip(lie.sbp, lie.placement.shape)):
        if axis not in ring and s.is_split:
            samples, heads = (samples // parts if s.dim == 0 else samples, heads // parts if s.dim == 1 else heads)
    share = 1.0
    for axis in ring:
        parts = lie.placement.shape[axis]
        if heads % parts == 0:
            heads, share = heads // parts, share / parts
        elif samples >= parts:
            share *= -(-samples // parts) / samples
            samples //= parts
        else:
            return None
    return share


def _is_whole(t: Any, axis: int) -> bool:
    """Does every rank along this axis hold all of it? (A plain tensor counts as broadcast.)"""
    return not is_global(t) or t.spec.sbp[axis].is_broadcast


# ------------------------------------------------------------------------------------------------- where things lie


def _lie(call: Call) -> Layout:
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


def _keys(call: Call, lie: Layout) -> Layout:
    """Of keys and values: as the queries; but whole along the sequence where they are whole already."""
    return lie.with_sbp(tuple(broadcast if s == SEQUENCE and _is_whole(call["key"], axis) and
                              _is_whole(call["value"], axis) else s for axis, s in enumerate(lie.sbp)))


def _owed(lie: Layout, keys: Layout) -> Layout:
    """Of the gradients of keys and values: as they; but pending where each rank has computed those of its queries."""
    return lie.with_sbp(tuple(partial_sum if s == SEQUENCE and k.is_broadcast else k
                              for s, k in zip(lie.sbp, keys.sbp)))


def _of_mask(shape: Shape, lie: Layout) -> Layout:
    """Of a mask that broadcasts to [batch, heads, queries, keys]: cut as the queries, where it has such a dim."""
    dims = [s.dim - 4 + len(shape) if s.is_split else -1 for s in lie.sbp]
    return lie.with_sbp(tuple(split(d) if d >= 0 and shape[d] > 1 else broadcast for d in dims))


class Turn(NamedTuple):
    """The blocks of one turn: `come` is what of k and v each rank gets, `go` what of their gradients it has then."""

    come: Layout
    go: Layout


@lru_cache(1000)
def turns(lie: Layout, keys: Layout, queries: Shape, shape: Shape, causal: bool) -> tuple[Turn, ...]:
    """Every turn, for queries and for k and v of these shapes. In the first, each rank has its own block.

    Turns that bring nothing are left out; of a block, what lies behind the causal mask is not asked for.
    """
    where, ring = lie.placement, [axis for axis, s in enumerate(keys.sbp) if s == SEQUENCE]
    groups: dict[tuple[int, ...], list[int]] = {}    # ranks whose blocks make one sequence, in its order
    for rank in where.flat:
        groups.setdefault(tuple(i for axis, i in enumerate(where.coords[rank]) if axis not in ring), []).append(rank)
    pending = tuple(partial_sum if s == SEQUENCE else broadcast for s in lie.sbp)
    found = [Turn(keys, _owed(lie, keys))]
    for turn in range(1, prod(where.shape[axis] for axis in ring)):
        regions = {}
        for group in groups.values():
            for i, rank in enumerate(group):
                *outer, (start, stop), features = keys.region(shape, group[i - turn])
                rows = lie.region(queries, rank)
                if not volume(rows):
                    stop = start
                elif causal:
                    stop = max(start, min(stop, rows[2][1]))
                regions[rank] = (*outer, (start, stop), features)
        if any(map(volume, regions.values())):
            found.append(Turn(rank_regions(where, regions), rank_regions(where, regions, pending)))
    return tuple(found)


class Tile(NamedTuple):
    """Rows (of a rank's queries) and columns (of a block of keys) that are computed in one go."""

    rows: slice
    columns: slice
    causal: bool


def tiles(rows: Ends, columns: Ends, causal: bool) -> list[Tile]:
    """What of a block is seen: all; or, causal, what lies left of the rows' diagonal, and what that crosses."""
    (a, b), (c, d) = rows, columns
    edge = max(a, c)                                 # the first row, and the first column, of the crossed part
    seen = [(rows, (c, min(d, a)), False), ((edge, b), (edge, min(d, b)), True)] if causal else [(rows, columns, False)]
    return [Tile(slice(r0 - a, r1 - a), slice(c0 - c, c1 - c), diagonal)
            for (r0, r1), (c0, c1), diagonal in seen if r0 < r1 and c0 < c1]


# ------------------------------------------------------------------------------------------------------- the op itself


class _Block(NamedTuple):
    """Keys and values that a rank has in a turn, and what of them it computes, each tile with its mask."""

    k: Tensor
    v: Tensor
    tiles: list[tuple[Tile, Tensor | None]]


class _Spread:
    """An attention call with its operands where they are worked on."""

    def __init__(self, call: Call, run: Run) -> None:
        self.call, self.run, self.op, self.causal = call, run, str(call.func), bool(call["is_causal"])
        self.lie = _lie(call)
        self.keys = _keys(call, self.lie)
        wanted = {name: self.keys if name in ("key", "value") else self.lie for name in call.names}
        if "attn_mask" in wanted:
            wanted["attn_mask"] = _of_mask(tuple(call["attn_mask"].shape), self.lie)
        operands = [as_global(run, call[name], call["query"], self.op) for name in wanted]
        moved = run.redistribute(operands, list(wanted.values()), self.op)
        self.held = dict(zip(wanted, moved))
        self.mask = self.held.pop("attn_mask", None)
        self.ranks = list(self.held["query"].shards)
        self.dtype = accumulation_dtype(self.held["query"].dtype)  # of what is added up

    def results(self) -> list[Tensor]:
        """What the op returns, as meta tensors."""
        operands = [torch.empty_strided(t.spec.shape, t.spec.stride, dtype=t.dtype, device="meta")
                    for t in self.held.values()]
        with Asking():
            return list(self.local(*operands, causal=self.causal, mask=None))

    def local(self, *tensors: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, ...]:
        """The op's own kernel."""
        return self.call.func(*tensors, 0.0, causal, attn_mask=mask, scale=self.call["scale"])

    def turns(self) -> Iterator[tuple[Turn, dict[int, _Block]]]:
        """Turn by turn, what every rank of this process has to do. Who takes a block out frees it before the next."""
        q, k, v = (self.held[name] for name in ("query", "key", "value"))
        for turn in turns(self.lie, self.keys, q.spec.shape, k.spec.shape, self.causal):
            come = self.run.redistribute([k, v], [turn.come] * 2, self.op)
            blocks = {}
            for rank in self.ranks:
                rows, columns = q.spec.region(rank)[2], turn.come.region(k.spec.shape, rank)[2]
                found = tiles(rows, columns, self.causal) if q.shards[rank].numel() else []
                blocks[rank] = _Block(come[0].shards[rank], come[1].shards[rank],
                                      [(tile, self._mask_of(rank, tile, columns[0])) for tile in found])
            del come
            yield turn, blocks

    def _mask_of(self, rank: int, tile: Tile, start: int) -> Tensor | None:
        """The mask of a tile of a block that starts there; dims of size 1 stay."""
        if self.mask is None:
            return None
        mask = self.mask.shards[rank]
        rows = tile.rows if mask.shape[-2] > 1 else slice(None)
        columns = slice(start + tile.columns.start, start + tile.columns.stop)
        return mask[..., rows, columns if mask.shape[-1] > 1 else slice(None)]

    def wrap(self, told: Tensor, where: Layout, shards: dict[int, Tensor]) -> Any:
        """A result, in the dtype it is told to have."""
        return self.run.wrap(spec(where, tuple(told.shape), told.stride(), told.dtype),
                             {rank: shard.to(told.dtype) for rank, shard in shards.items()})


def forward(call: Call, run: Run) -> tuple[Any, Any]:
    """out and logsumexp, as the queries lie. Dropout is not for turns."""
    if call["dropout_p"] > 0:
        return run.plain(call)
    own = _Spread(call, run)
    told, queries = own.results(), own.held["query"].shards
    out = {rank: torch.zeros_like(q, dtype=own.dtype) for rank, q in queries.items()}
    log = {rank: torch.full(q.shape[:3], -inf, dtype=own.dtype, device=q.device) for rank, q in queries.items()}
    for _, blocks in own.turns():
        for rank in own.ranks:
            _attend(own, queries[rank], blocks.pop(rank), out[rank], log[rank])
    for total in log.values():                       # a row that sees nothing is 0, and to the kernel its logarithm too
        total.masked_fill_(total == -inf, 0.0)
    return own.wrap(told[0], own.lie, out), own.wrap(told[1], own.lie, log)


def _attend(own: _Spread, q: Tensor, block: _Block, out: Tensor, log: Tensor) -> None:
    """Take what a block gives into `out` and `log`."""
    for (rows, columns, causal), mask in block.tiles:
        k, v = block.k[:, :, columns], block.v[:, :, columns]
        part, more = own.local(q[:, :, rows], k, v, causal=causal, mask=mask)
        silent = more == 0                           # also what the kernel says of a row that sees nothing, or only NaN
        if silent.any() and k.isnan().any():
            more = more.masked_fill(silent, nan)
        if mask is not None:
            more = more.masked_fill(mask.isneginf().all(-1), -inf)
        _merge(out[:, :, rows], log[:, :, rows], part, more)


def _merge(out: Tensor, log: Tensor, part: Tensor, more: Tensor) -> None:
    """Take a partial result, and the logarithm of its sum of exponentials, into `out` and `log`."""
    share = torch.sigmoid(more - log).masked_fill_(more == -inf, 0.0)        # exp(more) / (exp(log) + exp(more))
    out.lerp_(part.to(out.dtype), share.unsqueeze(-1))
    log.copy_(torch.logaddexp(log, more))


def backward(call: Call, run: Run) -> tuple[Any, Any, Any]:
    """dq, as the queries lie, dk and dv, as keys and values."""
    if call["dropout_p"] > 0:
        return run.plain(call)
    own = _Spread(call, run)
    told, home = own.results(), _owed(own.lie, own.keys)
    held = [own.held[name].shards for name in ("grad_out", "query", "out", "logsumexp")]
    dq = {rank: torch.zeros_like(q, dtype=own.dtype) for rank, q in held[1].items()}
    totals: list[dict[int, Tensor]] = []             # of dk and dv of the ranks' own blocks
    for turn, blocks in own.turns():
        shares: list[dict[int, Tensor]] = [{}, {}]
        for rank in own.ranks:
            shares[0][rank], shares[1][rank] = _gradients(own, [t[rank] for t in held], blocks.pop(rank), dq[rank])
        if not totals:
            totals = shares
            continue
        going = [own.wrap(t, turn.go, share) for t, share in zip(told[1:], shares)]
        for total, came in zip(totals, run.redistribute(going, [home] * 2, own.op)):
            for rank, share in came.shards.items():
                total[rank] += share
    return own.wrap(told[0], own.lie, dq), *(own.wrap(t, home, total) for t, total in zip(told[1:], totals))


def _gradients(own: _Spread, held: list[Tensor], block: _Block, dq: Tensor) -> tuple[Tensor, Tensor]:
    """A rank's share of the gradients of a block; that of its queries is added to `dq`."""
    dk, dv = (torch.zeros_like(t, dtype=own.dtype) for t in (block.k, block.v))
    for (rows, columns, causal), mask in block.tiles:
        grad, q, out, log = (t[:, :, rows] for t in held)
        found = own.local(grad, q, block.k[:, :, columns], block.v[:, :, columns], out, log, causal=causal, mask=mask)
        for total, at, share in zip((dq, dk, dv), (rows, columns, columns), found):
            total[:, :, at] += share
    return dk, dv
