"""Who looks at boxings while they are done: recorders and policies (watch.py), torch's profiler, and counts.

    with torch.profiler.profile() as prof: step()    each boxing is a range: what for, layouts, bytes, the user's line
    gt.metrics()                                     how many bytes and seconds they took

A profiler and counts leave boxings to native code, which asks here how a range is called and what it moves. Where none
of them looks, a boxing pays for a look at flags.
"""
from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from globaltensor.boxings import watch
from globaltensor.boxings.plan import BoxingPlan, plan, plan_bytes
from globaltensor.boxings.run_steps import Move
from globaltensor.errors import where
from globaltensor.layouts.layout import Layout, Spec, sbp_text
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.layouts.recent import remembered
from globaltensor.runtime import counters
from globaltensor.runtime.machine import Machine
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import profiling, record_function
from globaltensor.runtime.world import world
from globaltensor.tracebacks import api_boundary


def seen() -> bool:
    """Does anyone look?"""
    return watch.watched() or profiling() or counters.counting()


def range_name(op: str, src: Layout, dst: Layout, tensors: int, nbytes: int, place: str) -> str:
    """How a profiler shows a boxing: `boxing for aten.mm.default: placement('cpu', [0, 1]) S(0) -> B, 32 bytes,
    train.py:7`. Where the layouts are of two placements, both are told. Without what torch, which writes names as they
    are, would write as JSON that nobody can read."""
    to = sbp_text(dst.sbp) if src.placement == dst.placement and not isinstance(dst, RankRegions) else dst
    many = f" x{tensors}" if tensors > 1 else ""
    name = f"boxing for {op}: {src}{many} -> {to}, {nbytes:,} bytes, {place}"
    return name.replace('"', "'").replace("\\", "/")


@contextmanager
def shown(op: str, src: Layout, dst: Layout, nbytes: int, moved: Sequence[watch.MovedTensor],
          seconds: float = 0.0) -> Iterator[list[str]]:
    """Around a boxing that moves something, where someone looks: whoever watches permits it first, and gets its record.
    The list is for the collectives that do it; `seconds` went into it before."""
    calls: list[str] = []
    tensors = max(len(moved), 1)
    place = where() if watch.recording() or profiling() else ""
    watch.permit(op, src, dst, nbytes)
    with record_function(range_name(op, src, dst, tensors, nbytes, place)) if profiling() else nullcontext():
        at, began = time.time() - seconds, time.perf_counter() - seconds
        yield calls
        seconds = time.perf_counter() - began
    counters.add(boxings=1, bytes=nbytes, seconds=seconds)
    if watch.recording():
        watch.note(watch.BoxingRecord(op, place, src, dst, nbytes, seconds, tensors, tuple(calls), at,
                                      tuple(moved)))


@contextmanager
def seen_moves(op: str, moves: Sequence[Move], plans: Sequence[BoxingPlan], seconds: float = 0.0
               ) -> Iterator[list[str]]:
    """The same around tensors that move together."""
    if not seen():
        yield []
        return
    moved = [watch.MovedTensor(move.spec, move.dst, its) for move, its in zip(moves, plans)
             if move.spec.layout is not move.dst]
    with shown(op, _shown_source(moved[0].spec), moved[0].dst, most_received(moves, plans), moved, seconds) as calls:
        yield calls


def _shown_source(of: Spec) -> Layout:
    """Whence it moves, as a program knows it: the slices of a view by the layout of its base."""
    return of.layout.base or of.layout if isinstance(of.layout, RankRegions) else of.layout


def plan_together(moves: Sequence[Move | watch.MovedTensor], machine: Machine | None = None) -> tuple[BoxingPlan, ...]:
    """The plan of each of these tensors, which move together: they share the latency of their steps, so that each is
    planned as if it were as large as all. `machine`: of another world than this one."""
    return _plan_together(tuple((move.spec, move.dst) for move in moves), machine or world().machine)


@remembered
def _plan_together(moves: tuple[tuple[Spec, Layout], ...], machine: Machine) -> tuple[BoxingPlan, ...]:
    nbytes = sum(of.nbytes for of, dst in moves if of.layout is not dst)
    return tuple(plan(of.layout, dst, of.shape, nbytes, machine) for of, dst in moves)


_plan_bytes = remembered(plan_bytes)


def most_received(moves: Sequence[Move | watch.MovedTensor], plans: Sequence[BoxingPlan]) -> int:
    """Bytes received by the rank that receives most."""
    total: dict[int, int] = {}
    for move, its in zip(moves, plans):
        for rank, n in _plan_bytes(its, move.spec.shape, move.spec.dtype.itemsize).items():
            total[rank] = total.get(rank, 0) + n
    return max(total.values(), default=0)


def _bytes_of(specs: list[tuple[Spec, Spec]]) -> int:
    """What a boxing in native code moves; of each tensor the spec before and after."""
    moves = [Move(before, {}, after.layout) for before, after in specs]
    return most_received(moves, plan_together(moves))


def _name_of(purpose: str, specs: list[tuple[Spec, Spec]]) -> str:
    """How its range is called. A purpose is an op, with the numbers of its arguments in brackets."""
    before, after = specs[0]
    return range_name(purpose.partition("(")[0], _shown_source(before), after.layout, len(specs), _bytes_of(specs),
                      where())


if torch_ext is not None:
    torch_ext.on_seen_boxing(api_boundary(_name_of), api_boundary(_bytes_of))
