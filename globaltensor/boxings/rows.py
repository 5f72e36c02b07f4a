"""Rows that the ranks pick: an all-to-all of single rows, named by numbers that only the running program knows.

What an nd-sbp says is known before a program runs, so a boxing is planned once and cached. Which tokens go to which
expert is not, so rows have a primitive of their own. Dim 0 of a tensor is split over the ranks of a *group*: each rank
holds a range of its rows, and names the rows that it needs, ascending and every row once.

    gather         rank 0 holds [0:4), needs 1 5     it gets rows 1 and 5, the second of them from rank 1
    scatter_add    rank 0 has values for 1 5         they are sent back, and added up where the rows are held

Each is the transpose of the other, and so its gradient. A row is sent once to every rank that needs it and does not
hold it, in one message from each rank to each other one; no rank gets rows that it did not name. Ranks of this process
are read in place, the others reached by `exchange`. Nothing is cached between calls.
"""
from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from globaltensor.boxings.seen import seen, shown
from globaltensor.layouts.layout import Layout, Shards
from globaltensor.layouts.placement import placement
from globaltensor.layouts.regions import Range
from globaltensor.runtime.dtypes import accumulation_dtype
from globaltensor.runtime.exchange import exchange
from globaltensor.runtime.memory import flat_bytes


class RowExchange(NamedTuple):
    """Which rows each rank needs, and which ranks hold them; the same on all ranks.

    held     rank -> the range of rows that it holds; ranges of one group do not overlap
    wanted   rank -> the rows that it needs, on the CPU
    row      rank -> the shape of a row there
    parts    rank -> owner -> (start, stop): these of the rank's wanted rows are held by the owner
    op, src, dst   for records: what causes the exchange, and how the rows are laid out before and after
    """

    held: Mapping[int, Range]
    wanted: Mapping[int, Tensor]
    row: Mapping[int, tuple[int, ...]]
    parts: dict[int, dict[int, Range]]
    op: str
    src: Layout
    dst: Layout

    def gather(self, shards: Shards) -> Shards:
        """The rows that each rank needs."""
        gathered = {rank: t.new_empty((len(self.wanted[rank]), *t.shape[1:])) for rank, t in shards.items()}
        outgoing: dict[int, Tensor] = {}
        incoming: dict[int, Tensor] = {}
        with _recorded(self, shards, back=False):
            for rank, parts in self.parts.items():
                for owner, (start, stop) in parts.items():
                    # Wanted rows ascend and each owner holds a range, so what comes from one owner is one slice: it is
                    # received in place.
                    into = gathered[rank][start:stop] if rank in gathered else None
                    if owner in shards and into is None:
                        outgoing[rank] = _pick_rows(shards[owner], _local_rows(self, rank, owner))
                    elif owner in shards:
                        _pick_rows(shards[owner], _local_rows(self, rank, owner), into)
                    elif into is not None:
                        incoming[owner] = into
            _exchange_rows(self, outgoing, incoming)
        return gathered

    def scatter_add(self, values: Shards) -> Shards:
        """The sum, where each row is held, of the values that all ranks have for it; zeros where none has. Terms are
        added in the order of the ranks, in float32 for the 16-bit floats."""
        sums: Shards = {}
        outgoing: dict[int, Tensor] = {}
        incoming: dict[int, Tensor] = {}
        with _recorded(self, values, back=True):
            for rank, parts in self.parts.items():
                for owner, (start, stop) in parts.items():
                    if rank in values and owner not in values:
                        outgoing[owner] = values[rank][start:stop]
                    elif owner in values and rank not in values:
                        incoming[rank] = values[owner].new_empty((stop - start, *values[owner].shape[1:]))
            _exchange_rows(self, outgoing, incoming)
            for owner, t in values.items():
                start, stop = self.held[owner]
                sums[owner] = t.new_zeros((stop - start, *t.shape[1:]), dtype=accumulation_dtype(t.dtype))
                for rank, parts in self.parts.items():
                    if owner in parts:
                        term = values[rank][slice(*parts[owner])] if rank in values else incoming[rank]
                        numbers = _local_rows(self, rank, owner).to(t.device)
                        # No row comes twice in a term, so the order of additions is that of the ranks, whatever a
                        # kernel does.
                        sums[owner].index_add_(0, numbers, term.to(t.device, sums[owner].dtype))
        return {owner: t.to(values[owner].dtype) for owner, t in sums.items()}


def row_exchange(axes: tuple[int, ...], held: Mapping[int, Range], wanted: Mapping[int, Tensor],
                 row: Mapping[int, tuple[int, ...]], op: str, src: Layout, dst: Layout) -> RowExchange:
    """An exchange of rows between ranks that differ along these axes of the placement only."""
    group = peers_along(src.placement, axes)
    bounds = torch.tensor([held[rank] for rank in src.placement.flat], device="cpu").reshape(-1)
    places: dict[int, list[int]] = {}                # id of a tensor of numbers: ranks with the same one look up once
    parts = {}
    for rank in src.placement.flat:
        numbers = wanted[rank]
        if id(numbers) not in places:
            # one search for all owners: starts and stops of their ranges in turn
            places[id(numbers)] = torch.searchsorted(numbers, bounds).tolist()
        edges = dict(zip(src.placement.flat, zip(places[id(numbers)][::2], places[id(numbers)][1::2])))
        parts[rank] = {owner: edges[owner] for owner in group[rank] if edges[owner][0] < edges[owner][1]}
    return RowExchange(held, wanted, row, parts, op, src, dst)


def peers_along(of: placement, axes: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """rank -> the ranks that differ from it along these axes only, itself among them."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, at in of.coords.items():
        alike.setdefault(tuple(-1 if axis in axes else i for axis, i in enumerate(at)), []).append(rank)
    return {rank: tuple(ranks) for ranks in alike.values() for rank in ranks}


def _local_rows(of: RowExchange, rank: int, owner: int) -> Tensor:
    """Which rows of the owner's shard a rank needs, counted from the first of that shard."""
    return of.wanted[rank][slice(*of.parts[rank][owner])] - of.held[owner][0]


def _pick_rows(shard: Tensor, numbers: Tensor, into: Tensor | None = None) -> Tensor:
    """These rows, copied into `into`; without it, a view where they are contiguous."""
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first + 1 == len(numbers):
        picked = shard[first:last + 1]
    elif into is not None and into.device == shard.device:
        return torch.index_select(shard, 0, numbers.to(shard.device), out=into)
    else:
        picked = shard.index_select(0, numbers.to(shard.device))
    return picked if into is None else into.copy_(picked)


def _exchange_rows(of: RowExchange, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
    """Rows to and from other processes, of which each drives one rank."""
    # Without the numbers of rows: each rank names its own, and others do not know them before they are asked. (1 to 7
    # are tags of what is neither rows nor a boxing.)
    tag = zlib.crc32(f"rows {of.op} {of.src} {of.dst}".encode()) & 0x3FFFFFFF | 8
    if outgoing or incoming:
        exchange({r: flat_bytes(t.contiguous()) for r, t in outgoing.items()},
                 {r: flat_bytes(t) for r, t in incoming.items()}, f"the rows for {of.op}", tag)


@contextmanager
def _recorded(of: RowExchange, held: Shards, back: bool) -> Iterator[None]:
    """Around an exchange: whoever looks at boxings sees it as one."""
    if not seen():
        yield
        return
    itemsize = next(iter(held.values())).element_size()
    received = dict.fromkeys(of.parts, 0)
    for rank, parts in of.parts.items():
        for owner, (start, stop) in parts.items():
            if owner != rank:
                received[owner if back else rank] += (stop - start) * prod(of.row[rank]) * itemsize
    with shown(of.op, of.src, of.dst, max(received.values()), ()):
        yield
