"""Parameters and the parts of them that an optimizer steps in their place: two tensors, one value.

A step writes parts, and all of them are written into their parameters behind it, in one move. Between steps a program
may write to either: it loads weights, clips them, averages them; SAM and LBFGS move the parts, run the model, and move
them again. Whoever reads the other one first has it brought up to date, with all that wait for that: so both read like
the one tensor that they are on one device. Every rank runs the same program, so all read the same ones.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from threading import RLock
from typing import Any

import torch

from globaltensor.algorithms.aliasing import note_uncounted_write
from globaltensor.boxings.redistribute import Move, move_shards, redistribute
from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.layout import Shards
from globaltensor.parallel.write_behind import (
    ArrivingTarget,
    WriteBehind,
    finish_urgent_writes,
    finish_writes,
    write_behind,
    write_redistributed,
)
from globaltensor.runtime import trace_order
from globaltensor.runtime.memory_writes import MemoryWrites, current_version, shard_versions, watched_writes, writes_of
from globaltensor.runtime.torch_internals import end_graph, without_modes
from globaltensor.tensors import gradients
from globaltensor.tensors.global_tensor import GlobalTensor

_WHOLE, _PART = 0, 1                                 # of a pair


class MasterParams:
    """Pairs (parameter, part), by their numbers. `watch` comes when all of them are in it.

    They are held by whoever has one of the two, such as an optimizer's groups, and gone with it: when differs from rank
    to rank. So what is moved together are those that the optimizer steps, and those that differ, which are held."""

    def __init__(self) -> None:
        self._parts: dict[int, weakref.ref[Any]] = {}            # each knows its parameter, for its gradient
        self._number = count()
        self.behind: Sequence[WriteBehind] = ()      # of the last step, what may not have arrived yet
        self.writes: dict[int, Any] = {}             # by the id of a parameter: what had been written to it
        self.newer: dict[int, tuple[int, Any]] = {}  # of pairs that differ: which of the two was written to; the part
        self.memories: dict[int, tuple[MemoryWrites, MemoryWrites]] = {}             # of each pair, watched
        self._versions: dict[int, int] = {}          # by the id of a part, before a step
        self._callbacks: dict[int, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._one_at_a_time = RLock()
        self._writing = False

    def append(self, p: Any, part: Any) -> None:
        gradients.share_grad(p, part)
        self._parts[next(self._number)] = weakref.ref(part)

    def has(self, part: Any) -> bool:
        return any(part is one for _, one in self.pairs().values())

    def pairs(self) -> dict[int, tuple[Any, Any]]:
        """Those that someone holds."""
        held = {k: part for k, alive in self._parts.items() if (part := alive()) is not None}
        if len(held) < len(self._parts):
            for kept in (self._parts, self.memories, self._callbacks):
                for k in kept.keys() - held.keys():
                    del kept[k]
        return {k: (gradients.notes_of(part).whole, part) for k, part in held.items()}

    def watch(self) -> None:
        """Notice the next write to any of them, but to those that wait for what was written to the other one."""
        me, pairs = weakref.ref(self), self.pairs()
        waiting = {key for one in self.behind for key in one.writes} | {id(pairs[k][_WHOLE]) for k in self.newer}
        before, self.writes = self.writes, {}
        for k, (p, part) in pairs.items():
            if k not in self._callbacks:
                self._callbacks[k] = partial(_note_newer, me, k, _WHOLE), partial(_note_newer, me, k, _PART)
                self.memories[k] = watched_writes(p), watched_writes(part)
            if id(p) in before:
                self.writes[id(p)] = before[id(p)]
            if id(p) not in waiting:
                writes = writes_of(p)
                self.writes[id(p)] = writes, shard_versions(p.shards)
                self.memories[k] = writes[1], watched_writes(part)
            for memory, callback in zip(self.memories[k], self._callbacks[k]):
                memory.await_next(callback)

    @contextmanager
    def _as_writer(self) -> Iterator[None]:
        """Inside, what is written to one makes the other no older."""
        with self._one_at_a_time, without_modes(), torch.inference_mode(False), torch.no_grad():
            before, self._writing = self._writing, True
            try:
                yield
            finally:
                self._writing = before
                self.watch()

    def note_newer(self, k: int, side: int) -> None:
        """Someone wrote to one of a pair: the other one is brought up to date when it is read."""
        part = self._parts[k]() if k in self._parts else None
        if self._writing or k in self.newer or part is None:     # or it is gone, and another has its memory
            return
        self._outdate(part if side == _WHOLE else gradients.notes_of(part).whole)
        self.newer[k] = side, part

    def _outdate(self, older: Any) -> None:
        older.arriving = _Outdated(self, older.shards)

    def update(self) -> None:
        """Bring up to date what is not."""
        with self._as_writer():
            self._arrive()
            self._equalize({k: side for k, (side, _) in self.newer.items()})

    def _equalize(self, newer: Mapping[int, int]) -> None:
        """Write the newer of these pairs to the others: all parts in one move, and all parameters."""
        pairs = self.pairs()
        for k, side in newer.items():
            pairs[k][1 - side].arriving = None
        try:
            parts, wholes = ([pairs[k] for k in sorted(newer) if newer[k] == side] for side in (_PART, _WHOLE))
            _write_to_parameters(parts)
            _write_to_parts(wholes)
        except BaseException:                        # it is not allowed here, or a rank has failed: they are as before
            for k, side in newer.items():
                self._outdate(pairs[k][1 - side])
            raise
        for k in newer:
            self.newer.pop(k, None)

    def _arrive(self) -> None:
        finish_writes(self.behind)
        for one in self.behind:
            self.writes |= one.writes
        self.behind = ()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Parts as their parameters are now, and their gradients handed over: a compiled step compares them with those
        that it was made for before it reads any.

        Raises GlobalTensorError where `gt.zero` was called for another optimizer of these parameters since, and for one
        whose dtype or placement is another now that its part cannot follow."""
        end_graph("before a step of an optimizer under gt.zero, its parts and gradients are brought up to date, which "
                  "is not an op of a graph")
        self._arrive()
        pairs = self._in_groups(optimizer)
        if wholes := {k: _WHOLE for k, (p, _) in pairs.items() if self._is_whole_newer(k, p)}:
            with self._as_writer():
                self._equalize(wholes)
        for p, part in pairs.values():
            if gradients.part_of(p) is not part:
                raise GlobalTensorError(f"a step of an optimizer whose parameter of shape {list(p.shape)} another one "
                                        "has taken over", "gt.zero was called for that since, and gradients go to its "
                                        "parts", "one optimizer under gt.zero for each parameter")
            if torch.promote_types(p.dtype, part.dtype) != part.dtype or p.placement != part.placement:
                raise GlobalTensorError(f"a step of a parameter of {p.dtype} on {p.placement} under gt.zero",
                                        f"it has more digits than the part of {part.dtype} that is stepped, or lies "
                                        "elsewhere: it was changed after gt.zero", "model.to(...) before gt.zero(...)")
            gradients.read_grad(part)
        self._versions = {id(part): current_version(part) for _, part in pairs.values()}

    def _is_whole_newer(self, k: int, p: Any) -> bool:
        if k in self.newer:
            return self.newer[k][0] == _WHOLE
        return bool((writes_of(p), shard_versions(p.shards)) != self.writes[id(p)])      # by a shard of its own

    def _in_groups(self, optimizer: torch.optim.Optimizer) -> dict[int, tuple[Any, Any]]:
        """Of those that are in its groups now, in the order of the groups."""
        numbers = {id(part): (k, p) for k, (p, part) in self.pairs().items()}
        parts = [t for group in optimizer.param_groups for t in group["params"] if id(t) in numbers]
        return {k: (p, part) for part in parts for k, p in (numbers[id(part)],)}

    def gather(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the parts that a step wrote to into their parameters, all in one move; or while the program goes on.

        All ranks know which: those with a gradient, or another version, which is also counted where nothing is held. A
        part that was written to unseen by these is newer, as between steps."""
        with self._as_writer():
            held = self._in_groups(optimizer)
            stepped = [k for k, (_, part) in held.items() if gradients.raw_grad(part) is not None
                       or current_version(part) != self._versions.get(id(part))]
            self._equalize({k: side for k, (side, _) in self.newer.items() if side == _WHOLE})
            for k in self.newer.keys() & {*stepped}:
                held[k][_WHOLE].arriving = None
                del self.newer[k]
            pairs = [held[k] for k in stepped]
            self.behind = write_behind([part.detach().to(p.dtype) for p, part in pairs], [p for p, _ in pairs], "zero")
            sent = {key: one for one in self.behind for key in one.writes}
            for p, part in pairs:
                if id(p) in sent:                    # who writes to the part meanwhile waits
                    part.arriving = ArrivingTarget(sent[id(p)], part.shards)
        finish_urgent_writes(self.behind)

    def saved_masters(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[int, Any]]:
        """What belongs to the optimizer's state: the parts that say more than their parameters do, those of 16 bits, if
        there are any; by the numbers that `state` has, as which parameters have a part depends on their layouts."""
        masters = {k: part.detach() for k, (_, part) in self._wide(optimizer).items()}
        return {"masters": masters} if masters else {}

    def load(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Take saved ones. Where there is none, as of one device or of a parameter that had no part, the parameter says
        what it was; a saved one of a parameter without a part is left, as its value is that, rounded."""
        numbers = [k for group in state["param_groups"] for k in group["params"]]
        if len(numbers) != sum(len(group["params"]) for group in optimizer.param_groups):
            return                                   # torch refuses it behind this, and nothing is to be written then
        wide, masters = self._wide(optimizer), state.get("masters") or {}
        saved = {k: masters[numbers[k]] for k in wide if numbers[k] in masters}
        whole = {k: p for k, (p, _) in wide.items() if k not in saved}
        for k, master in saved.items():
            part = wide[k][_PART]
            if tuple(master.shape) != tuple(part.shape):
                raise GlobalTensorError(f"the state of an optimizer has {list(master.shape)} as parameter {k}, the "
                                        f"optimizer under gt.zero {list(part.shape)}", "its master weights, which "
                                        "have more digits than the parameters of 16 bits, are of another model",
                                        "the optimizer of the model that was saved")
        moved = {k: t for k, t in (saved | whole).items() if isinstance(t, GlobalTensor)}
        with torch.no_grad():
            parts = redistribute([*moved.values()], [wide[k][_PART].spec.layout for k in moved], "zero")
            for k, value in {**saved, **dict(zip(moved, parts))}.items():
                wide[k][_PART].copy_(value)

    def _wide(self, optimizer: torch.optim.Optimizer) -> dict[int, tuple[Any, Any]]:
        """Pairs whose part has more digits than the parameter, by the place of the part in the optimizer's groups."""
        pairs = {id(part): (p, part) for p, part in self._in_groups(optimizer).values() if part.dtype != p.dtype}
        stepped = [t for group in optimizer.param_groups for t in group["params"]]
        return {k: pairs[id(t)] for k, t in enumerate(stepped) if id(t) in pairs}


class _Outdated:
    """The shards of a tensor that is older than the other one of its pair. Who reads them has them written first."""

    def __init__(self, pairs: MasterParams, shards: Shards) -> None:
        self._pairs, self._shards = weakref.ref(pairs), shards

    def read(self) -> Shards:
        pairs = self._pairs()
        if pairs is not None:                        # else its optimizer is gone, and what it wrote with it
            pairs.update()
        return self._shards


def _note_newer(pairs: weakref.ref[MasterParams], k: int, side: int) -> None:
    alive = pairs()
    if alive is not None:
        alive.note_newer(k, side)


def _cast_shards(t: Any, dtype: torch.dtype) -> Any:
    """A tensor in another dtype, below all that ops go through: it is needed in the midst of one."""
    if t.dtype == dtype:
        return t
    return GlobalTensor.wrap(t.spec.cast(dtype), {rank: shard.detach().to(dtype) for rank, shard in t.shards.items()})


def _write_to_parameters(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Write parts into their parameters, whose lineage stays: a rank that holds nothing of them does not come here."""
    before = [p.lineage for p, _ in pairs]
    write_redistributed([_cast_shards(part, p.dtype) for p, part in pairs], [p for p, _ in pairs], "zero")
    for (p, _), own in zip(pairs, before):
        p.lineage = own


def _write_to_parts(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Make parts of their parameters anew; where an element is the rounded part still, the part is what it was."""
    moves = [Move(p.spec, p.shards, part.spec.layout, trace_order.of(p)) for p, part in pairs]
    for (p, part), moved in zip(pairs, move_shards(moves, "zero") if moves else (), strict=True):
        for rank, now in moved.items():
            own = part.shards[rank].detach()
            own.copy_(torch.where(own.to(p.dtype) == now, own, now.to(own.dtype)))
        note_uncounted_write(part)
