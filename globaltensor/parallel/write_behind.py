"""Parameters that are written to while the program goes on: how ZeRO 1 and 2 gather over a link.

After a step every parameter is gathered from its parts. Where a link between hosts is what that waits for, it is only
begun: some parameters at a time, in the optimizer's order, which is mostly that of the next forward pass. Whoever reads
one first waits for those that come with it, so that this pass hides the others.

A rank may read parameters that other ranks do not read, or before they do. So to wait must be its own affair, as it is
for gathers of one step that collectives do: all ranks have begun them. And nobody may see an old value, or half of a
new one, through another tensor of the same memory. So where anything else holds a parameter's memory, it is waited for
at once.
"""
from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from threading import RLock
from typing import Any

import torch

from globaltensor.algorithms.aliasing import note_uncounted_write
from globaltensor.boxings.graph_op import any_of_a_trace
from globaltensor.boxings.redistribute import (
    BegunBoxing,
    Move,
    finish_boxings,
    link_seconds,
    move_shards,
    plans_of_begun,
    redistribute,
)
from globaltensor.boxings.run_steps import moves_program
from globaltensor.boxings.watch import watched
from globaltensor.layouts.layout import Shards
from globaltensor.runtime import trace_order
from globaltensor.runtime.memory_writes import shard_versions, writes_of
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import foreach_copy_, in_fake_mode, storage_use_count, without_modes
from globaltensor.runtime.world import world
from globaltensor.tensors.gradients import BUCKETS, TIMES_LATENCY

LEAST = 2e-3                                         # seconds that a piece is sent: to begin one takes a core 0.8 ms
_order = count()


def write_behind(tensors: Sequence[Any], targets: Sequence[Any], op: str) -> list[WriteBehind]:
    """Write tensors into others of their shapes and dtypes that are laid out otherwise: what of it is under way still,
    in their order, of which some cannot wait; the rest is done, in one move. On each process new values go where they
    shall lie as soon as they come, if they come in messages."""
    times = _times_behind(tensors, targets)
    at_once = [k for k in range(len(targets)) if k not in times]
    write_redistributed([tensors[k] for k in at_once], [targets[k] for k in at_once], op)
    return [WriteBehind([tensors[k] for k in piece], [targets[k] for k in piece], op)
            for piece in _cut_by_time(times)]


def write_redistributed(tensors: Sequence[Any], targets: Sequence[Any], op: str) -> None:
    """The same, all of it at once."""
    moves = _writes(tensors, targets)
    # in a trace a write is an op; and one to a boxed view has to reach what that is a view of
    if any_of_a_trace(moves) or any(target.origin is not None for target in targets):
        foreach_copy_([*targets], redistribute(tensors, [target.spec.layout for target in targets], op))
    elif moves:
        _copy_to_targets(move_shards(moves, op), moves)
        _note_written(tensors, targets)


class WriteBehind:
    """Tensors that are written to others, together. `writes`: by the id of each target what stays equal until someone
    writes to it, once it is there."""

    def __init__(self, tensors: Sequence[Any], targets: Sequence[Any], op: str) -> None:
        is_held = any(map(_is_held_elsewhere, targets))
        self.moves, self.op = _writes(tensors, targets), op
        self.boxing: BegunBoxing | None = BegunBoxing(self.moves, op, check=True)
        self.can_wait = self.boxing.running.program.waits_alone and not is_held
        _note_written(tensors, targets)
        self._counted = [writes_of(target) for target in targets]
        self.writes: dict[int, Any] = dict.fromkeys(map(id, targets))
        self.one_at_a_time, self.order = RLock(), next(_order)
        for target, move in zip(targets, self.moves):
            target.arriving = ArrivingTarget(self, move.into or {})

    def take(self, moved: Sequence[Shards]) -> None:
        """These have come."""
        _copy_to_targets(moved, self.moves)
        for key, counted, move in zip(self.writes, self._counted, self.moves):
            self.writes[key] = counted, shard_versions(move.into or {})
        self.boxing, self.moves = None, []


class ArrivingTarget:
    """The shards of a tensor that is written to: whoever reads them first waits for it."""

    def __init__(self, of: WriteBehind, shards: Shards) -> None:
        self._of, self._shards = of, shards

    def read(self) -> Shards:
        finish_writes([self._of])
        return self._shards


def finish_urgent_writes(begun: Sequence[WriteBehind]) -> None:
    """Wait for those now; for all where someone records, who sees one boxing, here.

    Raises BoxingError where a `gt.boxing` block does not allow it: they may be waited for outside of it.
    """
    finish_writes([one for one in begun if watched() or not one.can_wait])


def finish_writes(several: Sequence[WriteBehind]) -> None:
    """Wait until all of them are there."""
    with ExitStack() as locks, without_modes(), torch.inference_mode(False), torch.no_grad():
        for one in sorted(several, key=lambda one: one.order):       # alike on all threads: none waits for another
            locks.enter_context(one.one_at_a_time)
        boxings = {one: one.boxing for one in several if one.boxing is not None}
        if boxings:
            *moved, _ = finish_boxings([*boxings.values()], [], several[0].op)
            for one, shards in zip(boxings, moved, strict=True):
                one.take(shards)


def _copy_to_targets(moved: Sequence[Shards], moves: Sequence[Move]) -> None:
    """What has come in other memory than it shall lie in."""
    elsewhere = [(move.into[rank], shard) for move, shards in zip(moves, moved) if move.into
                 for rank, shard in shards.items() if shard is not move.into[rank]]
    if elsewhere:
        foreach_copy_([own for own, _ in elsewhere], [shard for _, shard in elsewhere])


def _note_written(tensors: Sequence[Any], targets: Sequence[Any]) -> None:
    """The targets have the values of these tensors now."""
    for t, target in zip(tensors, targets):
        note_uncounted_write(target)
        target.lineage = t.lineage


def _times_behind(tensors: Sequence[Any], targets: Sequence[Any]) -> dict[int, tuple[float, float]]:
    """Latency and transfer, in seconds, of those that a link carries while the program goes on, by their number."""
    if torch_ext is None or world().single_process or in_fake_mode() or any(
            target.traced or target.origin is not None for target in targets):
        return {}
    links = [link_seconds(t.spec, target.spec.layout, world().machine) for t, target in zip(tensors, targets)]
    if not any(links):
        return {}
    ends = [(t.spec, target.spec.layout) for t, target in zip(tensors, targets)]
    plans = plans_of_begun([Move(of, {}, dst) for of, dst in ends])
    return {k: link for k, ((of, dst), its, link) in enumerate(zip(ends, plans, links))
            if link is not None and moves_program((of,), (dst,), (its,)).waits_alone}


def _cut_by_time(times: Mapping[int, tuple[float, float]]) -> Iterator[list[int]]:
    """Pieces of them that take so long to be sent that each is worth it."""
    least = max(LEAST, sum(transfer for _, transfer in times.values()) / BUCKETS)
    piece, taken = [], 0.0
    for k, (latency, transfer) in times.items():
        piece.append(k)
        taken += transfer
        if taken >= max(least, TIMES_LATENCY * latency):
            yield piece
            piece, taken = [], 0.0
    if piece:
        yield piece


def _writes(tensors: Sequence[Any], targets: Sequence[Any]) -> list[Move]:
    return [Move(t.spec, t.shards, target.spec.layout, trace_order.of(t), target.shards)
            for t, target in zip(tensors, targets)]


def _is_held_elsewhere(target: Any) -> bool:
    """Does anything but this tensor hold its shards, or their memory?"""
    fresh = type(target).wrap(target.spec, {rank: shard.new_empty(0) for rank, shard in target.shards.items()})
    return _references(target) != _references(fresh)


def _references(t: Any) -> list[tuple[int, ...]]:
    """How often C++ and Python hold each of its shards, and its memory."""
    counts: list[tuple[int, ...]] = []
    shards = t.shards
    while shards:
        _, shard = shards.popitem()
        memory = shard.untyped_storage()
        counts.append((shard._use_count(), sys.getrefcount(shard), storage_use_count(memory._cdata),
                       sys.getrefcount(memory)))
    return counts
