"""Doing boxings: tensors in other layouts, one or many together.

    move_shards     shards in, shards out: the one place through which every boxing of this library goes
    redistribute    the same for global tensors

Where the native kernel reaches all shards, it does each boxing in one pass (native.py). Elsewhere the steps of a plan
are done one after the other (plan.py, run_steps.py), the first steps of all tensors together, then the second: many
small tensors cost as many messages as one, and are planned so.
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from globaltensor.boxings import native, watch
from globaltensor.boxings.plan import BoxingPlan, plan, plan_bytes
from globaltensor.boxings.run_steps import Move as Move, RunningBoxing
from globaltensor.errors import where
from globaltensor.layouts.layout import Layout, Shards
from globaltensor.runtime.memory import refuse_fake_mode
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import in_fake_mode, without_fake_mode
from globaltensor.runtime.world import world


def move_shards(moves: Sequence[Move], op: str = watch.EXPLICIT, purpose: str = "") -> list[Shards]:
    """The shards of every tensor in its new layout, moved together. `op` says what for, and `purpose`, in more words,
    what all ranks must mean alike. Never aliases the old ones, except where a layout does not change.

    Raises BoxingError where a `gt.boxing` block does not allow it, before anything moves.
    """
    if in_fake_mode():
        for move in moves:
            refuse_fake_mode(move.dst.placement, f"the boxing for {purpose or op}")
        with without_fake_mode():
            return move_shards(moves, op, purpose)
    boxings = _native_boxings(moves)
    if boxings is not None:
        if not any(boxings):
            return [move.shards for move in moves]
        if not watch.watched():
            return _run_native(moves, boxings, purpose or op)
    # Plans are needed to count bytes as well, for whoever watches; nothing else needs them beside the native kernel.
    plans = plan_together(moves)
    changing = [k for k, move in enumerate(moves) if move.spec.layout is not move.dst]
    if not changing:
        return [move.shards for move in moves]
    watched, first = watch.watched(), moves[changing[0]]
    if watched:
        began, nbytes, place = time.perf_counter(), _most_received(moves, plans), where()
        watch.permit(op, first.spec.layout, first.dst, nbytes)
    if boxings is not None:
        shards, calls = _run_native(moves, boxings, purpose or op), []
    else:
        running = RunningBoxing(moves, plans, purpose or op)
        shards, calls = running.finish(), running.calls
    if watched and watch.recording():
        watch.note(watch.BoxingRecord(op, place, first.spec.layout, first.dst, nbytes, time.perf_counter() - began,
                                      len(changing), tuple(calls)))
    return shards


def plan_together(moves: Sequence[Move]) -> list[BoxingPlan]:
    """The plan of each of these tensors, which move together: they share the latency of their steps, so that each is
    planned as if it were as large as all."""
    machine = world().machine
    nbytes = sum(move.spec.nbytes for move in moves if move.spec.layout is not move.dst)
    return [plan(move.spec.layout, move.dst, move.spec.shape, nbytes, machine) for move in moves]


def redistribute(tensors: Sequence[Any], dsts: Sequence[Layout], op: str) -> list[Any]:
    """Global tensors in other layouts, moved together; one whose layout does not change is itself."""
    moved = move_shards([Move(t.spec, t.shards, dst) for t, dst in zip(tensors, dsts)], op)
    return [t if t.spec.layout is dst else type(t).wrap(t.spec.moved(dst), shards)
            for t, dst, shards in zip(tensors, dsts, moved)]


def _native_boxings(moves: Sequence[Move]) -> list[Any] | None:
    """What the native kernel would run for each tensor (None: nothing to do); None unless it can do all of them."""
    if torch_ext is None or not moves:
        return None
    boxings = [None if m.spec.layout is m.dst else native.find_boxing(m.spec, m.dst) for m in moves]
    return boxings if all(b is not None or m.spec.layout is m.dst for b, m in zip(boxings, moves)) else None


def _run_native(moves: Sequence[Move], boxings: list[Any], purpose: str) -> list[Shards]:
    todo = [(boxing, move.shards) for boxing, move in zip(boxings, moves) if boxing is not None]
    moved = iter(torch_ext.move_shards(todo, purpose))
    return [m.shards if boxing is None else next(moved) for boxing, m in zip(boxings, moves)]


_plan_bytes = lru_cache(10_000)(plan_bytes)


def _most_received(moves: Sequence[Move], plans: Sequence[BoxingPlan]) -> int:
    """Bytes received by the rank that receives most."""
    total: dict[int, int] = {}
    for move, its in zip(moves, plans):
        for rank, n in _plan_bytes(its, move.spec.shape, move.spec.dtype.itemsize).items():
            total[rank] = total.get(rank, 0) + n
    return max(total.values(), default=0)
