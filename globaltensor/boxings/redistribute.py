"""Doing boxings: tensors in other layouts, one or many together.

    move_shards     shards in, shards out: the one place through which every boxing of this library goes
    redistribute    the same for global tensors

Where the native kernel reaches all shards, it does each boxing in one pass (native.py). Elsewhere the steps of a plan
are done one after the other (plan.py, torch_program.py), the first steps of all tensors together, then the second:
many small tensors cost as many messages as one.
"""
from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from globaltensor.boxings import native, watch
from globaltensor.boxings.plan import bytes_received, plan
from globaltensor.boxings.torch_program import (
    ByteStream,
    TorchProgram,
    build_shards,
    compile_step,
    incoming_bytes,
    pack,
)
from globaltensor.errors import call_site, where
from globaltensor.layouts.layout import Layout, Shards, Spec
from globaltensor.runtime.exchange import exchange
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.world import world


class Move(NamedTuple):
    """A tensor to move: its spec, its shards on this process, and the layout to reach."""

    spec: Spec
    shards: Shards
    dst: Layout


def move_shards(moves: Sequence[Move], op: str = watch.EXPLICIT, purpose: str = "") -> list[Shards]:
    """The shards of every tensor in its new layout, moved together. `op` says what for, and `purpose`, in more words,
    what all ranks must mean alike. Never aliases the old ones, except where a layout does not change.

    Raises BoxingError where a `gt.boxing` block does not allow it, before anything moves.
    """
    boxings = _native_boxings(moves)
    if boxings is not None:
        if not any(boxings):
            return [move.shards for move in moves]
        if not watch.watched():
            return _run_native(moves, boxings, purpose or op)
    # Plans are needed to count bytes as well, for whoever watches; nothing else needs them beside the native kernel.
    machine = world().machine
    plans = [plan(m.spec.layout, m.dst, m.spec.shape, m.spec.nbytes, machine).layouts for m in moves]
    changing = [k for k, layouts in enumerate(plans) if len(layouts) > 1]
    if not changing:
        return [move.shards for move in moves]
    watched, first = watch.watched(), moves[changing[0]]
    if watched:
        began, nbytes, place = time.perf_counter(), _most_received(moves, plans), where()
        watch.permit(op, first.spec.layout, first.dst, nbytes)
    run = _run_plans if boxings is None else _run_native
    shards = run(moves, plans if boxings is None else boxings, purpose or op)
    if watched and watch.recording():
        watch.note(watch.BoxingRecord(op, place, first.spec.layout, first.dst, nbytes, time.perf_counter() - began,
                                      len(changing)))
    return shards


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


def _run_plans(moves: Sequence[Move], plans: list[tuple[Layout, ...]], purpose: str) -> list[Shards]:
    """Step by step, a step of all tensors at a time."""
    shards = [move.shards for move in moves]
    for step in range(max(map(len, plans)) - 1):
        now = [k for k, layouts in enumerate(plans) if len(layouts) > step + 1]
        programs = [compile_step(plans[k][step], plans[k][step + 1], moves[k].spec.shape) for k in now]
        received = _exchange(programs, [shards[k] for k in now], [moves[k] for k in now], purpose)
        for k, program in zip(now, programs):
            shards[k] = build_shards(program, shards[k], moves[k].spec, plans[k][step + 1], received)
    return shards


def _exchange(programs: Sequence[TorchProgram], shards: Sequence[Shards], moves: Sequence[Move],
              purpose: str) -> Mapping[int, ByteStream]:
    """Send what other processes need of these tensors, and get what they send."""
    dtypes = [move.spec.dtype for move in moves]
    outgoing, incoming = pack(programs, shards), incoming_bytes(programs, dtypes)
    if not outgoing and not incoming:
        return {}
    device = next(iter(next(s for s in shards if s).values())).device if any(shards) else "cpu"
    buffers = {peer: torch.empty(n, dtype=torch.uint8, device=device) for peer, n in incoming.items()}
    # k makes the tag depend on the order: ranks that box the same tensors in another order disagree.
    tag = sum(k * program.tag + dtype.itemsize for k, (program, dtype) in enumerate(zip(programs, dtypes), 1))
    tag += call_site() if purpose == watch.EXPLICIT else zlib.crc32(purpose.encode())
    exchange({peer: torch.cat(parts) if len(parts) > 1 else parts[0] for peer, parts in outgoing.items()}, buffers,
             _wait_text(purpose, moves[0].spec, moves[0].dst), tag & 0x3FFFFFFF | 8)    # 1 to 7 are not for boxings
    return {peer: ByteStream(data) for peer, data in buffers.items()}


@lru_cache(10_000)
def _wait_text(purpose: str, of: Spec, dst: Layout) -> str:
    return f"the boxing for {purpose} of {of} -> {dst}"


_received = lru_cache(10_000)(bytes_received)


def _most_received(moves: Sequence[Move], plans: list[tuple[Layout, ...]]) -> int:
    """Bytes received by the rank that receives most."""
    total: dict[int, int] = {}
    for move, layouts in zip(moves, plans):
        for rank, n in _received(layouts, move.spec.shape, move.spec.dtype.itemsize).items():
            total[rank] = total.get(rank, 0) + n
    return max(total.values(), default=0)
