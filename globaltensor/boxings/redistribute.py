"""Doing boxings: tensors in other layouts, one or many together.

    move_shards     shards in, shards out: the one place through which every boxing of this library goes
    redistribute    the same for global tensors

Where a kernel of ours reaches all shards, it does each boxing in one pass: the CPU's (native.py), or those of devices
(device_boxing.py, process_boxing.py). Elsewhere the steps of a plan are done one after the other (plan.py,
run_steps.py), the first steps of all tensors together, then the second: many small tensors cost as many messages as
one, and are planned so.
"""
from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from threading import RLock
from typing import Any

import torch

from globaltensor.boxings import native, watch
from globaltensor.boxings.device_boxing import find_device_boxing, run_device_boxings
from globaltensor.boxings.graph_op import any_of_a_trace, box_in_graph, implement_box
from globaltensor.boxings.plan import BoxingPlan, plan
from globaltensor.boxings.process_boxing import find_meeting, run_process_boxings
from globaltensor.boxings.run_steps import Move as Move, RunningBoxing
from globaltensor.boxings.seen import plan_together, seen, seen_moves
from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.layout import Layout, Shards, Spec, dense
from globaltensor.layouts.recent import remembered
from globaltensor.runtime import trace_order
from globaltensor.runtime.accelerators import before_captures, is_capturing, on_stream
from globaltensor.runtime.machine import Machine
from globaltensor.runtime.memory import refuse_fake_mode
from globaltensor.runtime.memory_writes import writes_of
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import (
    in_fake_mode,
    modes_active,
    without_fake_mode,
    without_modes,
)
from globaltensor.runtime.world import local_ranks_of, world

_LARGE = 25 << 20                                    # bytes: as if so many were planned as one
BEGINNING = 250e-6                                   # seconds in which a host begins what devices do


def move_shards(moves: Sequence[Move], op: str = watch.EXPLICIT, purpose: str = "") -> list[Shards]:
    """The shards of every tensor in its new layout, moved together. `op` says what for, and `purpose`, in more words,
    what all ranks must mean alike. Never aliases the old ones, except where a layout does not change.

    Raises BoxingError where a `gt.boxing` block does not allow it, before anything moves.
    """
    if any_of_a_trace(moves):
        return box_in_graph(moves, op, purpose or op)
    if in_fake_mode():
        for move in moves:
            refuse_fake_mode(move.dst.placement, f"the boxing for {purpose or op}")
        with without_fake_mode():
            return move_shards(moves, op, purpose)
    if all(move.spec.layout is move.dst for move in moves):
        return [move.shards for move in moves]
    run = _in_one_pass(moves, purpose or op)
    if run is not None and not seen():
        return run()
    # Plans are needed to count bytes as well, for whoever watches; nothing else needs them beside kernels of ours.
    plans = plan_together(moves)
    with seen_moves(op, moves, plans) as calls:
        if run is not None:
            return run()
        if all(move.dst.placement.type == "meta" for move in moves):
            return [_moved_on_meta(move) for move in moves]
        running = RunningBoxing(moves, plans, purpose or op)
        shards = running.finish()
        calls += running.calls
        return shards


class BegunBoxing:
    """Tensors whose boxing goes on while the program does something else. `seconds`: how long it took to begin it.

    check   that all ranks mean the same: now, while it goes on; else once it is waited for, together with others
    """

    def __init__(self, moves: Sequence[Move], op: str, check: bool = False) -> None:
        began = time.perf_counter()
        self.moves, self.plans = moves, plans_of_begun(moves)
        self.stream = _stream_of(moves)
        self.running = RunningBoxing(moves, self.plans, op, check)
        self.seconds = time.perf_counter() - began
        self._shards: list[Shards] | None = None
        if self.stream is not None:
            _finish_before_captures()
            _on_devices.add(self)

    def finish(self) -> list[Shards]:
        """Wait for it: the new shards. What comes next on the stream that began it sees them, too."""
        if self._shards is None:
            with on_stream(self.stream):
                self._shards = self.running.finish()
            _on_devices.discard(self)
        return self._shards


_on_devices: weakref.WeakSet[BegunBoxing] = weakref.WeakSet()    # what devices have begun


@cache
def _finish_before_captures() -> None:
    before_captures(_finish_on_devices)


def _finish_on_devices() -> None:
    for one in list(_on_devices):
        one.finish()


def plans_of_begun(moves: Sequence[Move]) -> tuple[BoxingPlan, ...]:
    """The plans of what is only begun. On devices that is the first step: so there a host is no level of its own, and
    the engine reduces over hosts as it likes."""
    of_devices = any(move.spec.placement.type != "cpu" for move in moves)
    return plan_together(moves, _without_hosts(world().machine) if of_devices else None)


def _stream_of(moves: Sequence[Move]) -> torch.Stream | None:
    """The current stream of the device where the new shards of this process's rank will lie, or its old ones lie."""
    rank = world().rank
    for move in moves:
        for where in (move.dst.placement, move.spec.placement):
            if where.type not in ("cpu", "meta") and rank in where.coords:
                return torch.accelerator.current_stream(world().device(where.type, rank))
    return None


@lru_cache(4)
def _without_hosts(machine: Machine) -> Machine:
    return replace(machine, hosts=())


def finish_boxings(begun: Sequence[BegunBoxing], moves: Sequence[Move], op: str) -> list[list[Shards]]:
    """Wait for boxings, and do one more with them: the shards of each, and of `moves`. Whoever watches sees them now,
    as one.

    Raises BoxingError where a `gt.boxing` block does not allow them; they can be waited for again then.
    """
    if not begun:
        return [move_shards(moves, op)]
    plans = plan_together(moves)
    together = [*(move for one in begun for move in one.moves), *moves]
    with seen_moves(op, together, [*(of for one in begun for of in one.plans), *plans],
                    sum(one.seconds for one in begun)) as calls:
        # begun before the others are waited for, as what it checks is theirs too
        last = [RunningBoxing(moves, plans, op)] if moves else []
        shards = [*(one.finish() for one in begun), *(one.finish() for one in last)]
        calls += [call for one in (*(one.running for one in begun), *last) for call in one.calls]
    return shards if moves else [*shards, []]


class ArrivingShards:
    """The shards of a tensor in another layout, which move while the program goes on: whoever reads them first waits.

    Every rank that has a part in them begins and reads the same ones in the same order. `make_room` comes before.
    """

    def __init__(self, x: Any, dst: Layout) -> None:
        self._same = x.detach()
        self._writes = writes_of(x)
        self._begun = BegunBoxing([Move(x.spec, x.shards, dst, trace_order.of(x))], watch.EXPLICIT, check=True)
        self._shards: Shards | None = None
        self._written_to = False                     # what they are made of, meanwhile
        self._one_at_a_time = RLock()
        _arriving[-1] = self

    def await_all(self) -> Shards:
        """The shards, in whatever state."""
        with self._one_at_a_time:
            if self._shards is None:
                with without_modes(), torch.inference_mode(self._same.is_inference()), torch.no_grad():
                    ((self._shards,), _) = finish_boxings([self._begun], [], watch.EXPLICIT)
                self._written_to = writes_of(self._same) != self._writes
                _arriving[_arriving.index(self)] = None
            return self._shards

    def read(self) -> Shards:
        """The shards. Raises GlobalTensorError where someone wrote to what they are made of."""
        shards = self.await_all()
        if self._written_to:
            raise GlobalTensorError("a tensor was written to while its boxing went on",
                                    "what has arrived may be its value from before or after",
                                    "read the result first, or to_global without wait=False")
        return shards


UNDER_WAY = 16
_arriving: deque[ArrivingShards | None] = deque(maxlen=UNDER_WAY)   # of the last calls, what nobody has read yet


def make_room() -> None:
    """Before a call that begins a boxing, or does it at once: wait for what was begun `UNDER_WAY` calls ago, whether or
    not its tensor is still there. (A message that nobody waits for needs its memory.) All ranks count the same calls,
    but not the same boxings: those that have no part in one may begin what others do at once."""
    if len(_arriving) == UNDER_WAY and (oldest := _arriving[0]) is not None:
        oldest.await_all()
    _arriving.append(None)


def moves_meanwhile(x: Any, dst: Layout) -> bool:
    """Is there anything to gain by it: does this boxing go from process to process, so that a program can go on? Not
    where someone looks at ops. Who watches boxings sees it where it is waited for: a rank that watches alone does as
    the others do, which may move something else before that."""
    if modes_active() or in_fake_mode() or world().single_process or is_capturing(x.spec.placement.type):
        return False
    types = {x.spec.placement.type, dst.placement.type}
    return "meta" not in types and dst is not x.spec.layout and _in_one_pass([Move(x.spec, x.shards, dst)], "") is None


def redistribute(tensors: Sequence[Any], dsts: Sequence[Layout], op: str) -> list[Any]:
    """Global tensors in other layouts, moved together; one whose layout does not change is itself."""
    moved = move_shards([Move(t.spec, t.shards, dst, trace_order.of(t)) for t, dst in zip(tensors, dsts)], op)
    return [t if t.spec.layout is dst else in_layout(t, dst, shards) for t, dst, shards in zip(tensors, dsts, moved)]


def in_layout(t: Any, dst: Layout, shards: Shards, dtype: torch.dtype | None = None) -> Any:
    """A tensor of the value of `t`, and so of its lineage, in another layout; and of another dtype, if one is named."""
    moved = type(t).wrap((t.spec if dtype is None else t.spec.cast(dtype)).moved(dst), shards)
    moved.lineage = t.lineage
    return moved


def link_seconds(of: Spec, dst: Layout, machine: Machine) -> tuple[float, float] | None:
    """Latency and transfer, in seconds, of a boxing that passes a link between processes, which goes on while a core or
    a device computes; None for any other. A graph of kernels that is captured may end before what was begun in it."""
    return None if is_capturing(of.placement.type) else _link_seconds(of, dst, machine)


@remembered
def _link_seconds(of: Spec, dst: Layout, machine: Machine) -> tuple[float, float] | None:
    type = of.placement.type
    on_devices = type not in ("cpu", "meta")
    if world().single_process or type == "meta" or on_devices and (world().staged or dst.placement.type != type):
        return None
    if native.find_boxing(of, dst) is not None or on_devices and find_meeting([Move(of, {}, dst)]) is not None:
        return None
    own = plan(of.layout, dst, of.shape, _LARGE, machine)
    return own.fixed + BEGINNING * on_devices, own.rate * of.nbytes


def _in_one_pass(moves: Sequence[Move], purpose: str) -> Callable[[], list[Shards]] | None:
    """What does all of these moves by kernels of ours, those of the CPU or those of devices; None where none can."""
    changing = [move for move in moves if move.spec.layout is not move.dst]
    if torch_ext is not None:
        boxings = [native.find_boxing(move.spec, move.dst) for move in changing]
        if all(boxing is not None for boxing in boxings):
            return lambda: _among_unmoved(moves, _run_native(changing, boxings, purpose))
    if (meeting := find_meeting(changing)) is not None:
        return lambda: _among_unmoved(moves, run_process_boxings(meeting, changing, purpose))
    on_devices = []
    for move in changing:
        boxing = find_device_boxing(move.spec, move.dst)
        if boxing is None:
            return None
        on_devices.append((boxing, move.shards))
    return lambda: _among_unmoved(moves, run_device_boxings(on_devices))


def _run_native(moves: Sequence[Move], boxings: list[Any], purpose: str) -> list[Shards]:
    return torch_ext.move_shards([(boxing, move.shards) for boxing, move in zip(boxings, moves)], purpose,
                                 [move.lineage for move in moves])


def _among_unmoved(moves: Sequence[Move], moved: Sequence[Shards]) -> list[Shards]:
    """The shards of all moves, from those of the moves that change a layout."""
    new = iter(moved)
    return [move.shards if move.spec.layout is move.dst else next(new) for move in moves]


def _moved_on_meta(move: Move) -> Shards:
    """On the meta device nothing moves: each process makes what its ranks would hold."""
    if move.spec.layout is move.dst:
        return move.shards
    own = move.spec.moved(move.dst)
    sizes = {rank: own.local_shape(rank) for rank in local_ranks_of(move.dst.placement)}
    return {rank: torch.empty_strided(size, dense(size, own.stride), dtype=own.dtype, device="meta")
            for rank, size in sizes.items()}


implement_box(move_shards)
