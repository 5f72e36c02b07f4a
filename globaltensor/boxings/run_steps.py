"""Boxings done step by step, a step of many tensors at a time: where the native kernel does not reach all ranks.

Each step of a plan is what this process's group of ranks does in it (group_step.py), and goes the best way there is:

    ranks that share memory        the native kernel, several tensors in one call
    a pattern that has a name      a collective of torch.distributed (collectives.py), tensors of one dtype in one call
    all else                       messages of our own (torch_program.py), what goes to one peer in one message

A step is begun for all tensors before any of them is waited for. All members of a group come to the same way, as it
follows from the group, the layouts and the dtype; and every rank begins the steps in the same order.
"""
from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from globaltensor.boxings import native, watch
from globaltensor.boxings.collectives import Item, collective_name, pack_collective, unpack_collective
from globaltensor.boxings.group_step import GroupStep, group_step
from globaltensor.boxings.plan import BoxingPlan
from globaltensor.boxings.torch_program import ByteStream, build_shards, compile_step, incoming_bytes, pack
from globaltensor.errors import call_site
from globaltensor.layouts.layout import Layout, Shape, Shards, Spec, contiguous, dense_in_order, spec
from globaltensor.layouts.recent import remembered
from globaltensor.runtime import collectives
from globaltensor.runtime.exchange import begin_exchange
from globaltensor.runtime.lineage import of_boxing
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.world import world


class Step(NamedTuple):
    """One step of a plan, or two of them that one call does at once: then it is `merged`."""

    src: Layout
    dst: Layout
    merged: bool = False


class NamedCall(NamedTuple):
    """A collective of torch.distributed, and the steps of a group that it does, by the numbers of their tensors."""

    name: str
    steps: tuple[tuple[int, GroupStep], ...]


class DividedStep(NamedTuple):
    """How this process does a step of many tensors, by their numbers: by boxings in memory, collectives, messages."""

    in_memory: tuple[tuple[int, Any], ...]
    named: tuple[NamedCall, ...]
    others: tuple[int, ...]


class MovesProgram(NamedTuple):
    """Of many tensors: the shapes that they move in, the steps of each, how each step is done, and the strides of those
    that shall not be contiguous."""

    shapes: tuple[Shape, ...]
    steps: tuple[list[Step], ...]
    divided: tuple[DividedStep, ...]
    strides: tuple[Shape | None, ...]

    @property
    def waits_alone(self) -> bool:
        """Is it no other rank's affair when this one waits? All of it is begun, and nothing is sent from the memory of
        the tensors that move: it is one step, of collectives, which copy."""
        return len(self.divided) == 1 and not self.divided[0].others


class Move(NamedTuple):
    """A tensor to move: its spec, its shards on this process, the layout to reach, and its lineage (lineage.py).

    `into`: memory of the new shards, which may be used or not; none of it is the old ones'.
    """

    spec: Spec
    shards: Shards
    dst: Layout
    lineage: int = 0
    into: Shards | None = None


class RunningBoxing:
    """Boxings of many tensors, by their plans; the first step that takes a link is begun when this is made.

    `purpose` says what for: all ranks must mean the same, which is checked at once, or, without `check`, when others
    are (collectives.py). `calls` names the collectives that ran, in order.
    """

    def __init__(self, moves: Sequence[Move], plans: Sequence[BoxingPlan], purpose: str, check: bool = True) -> None:
        self.calls: list[str] = []
        self._check = check
        self._moves, self._plans, self._purpose = moves, plans, purpose
        specs, dsts = tuple(move.spec for move in moves), tuple(move.dst for move in moves)
        self.program = moves_program(specs, dsts, tuple(plans))
        self._shards = [_view_shards(move.shards, plan.steps[0][0], plan.view) if plan.view else move.shards
                        for move, plan in zip(moves, plans)]
        self._tag = boxing_tag(moves, purpose)
        self._run = self._run_steps()
        next(self._run, None)

    def finish(self) -> list[Shards]:
        """Wait for it: the new shards of every tensor."""
        for _ in self._run:
            pass
        every = zip(self._moves, self._plans, self.program.strides, self.program.steps, self._shards)
        return [_settle_shards(move, plan, stride, shards) if steps else move.shards
                for move, plan, stride, steps, shards in every]

    def _run_steps(self) -> Iterator[None]:
        for number, parts in enumerate(self.program.divided):
            tag = (self._tag + number) & 0x3FFFFFFF | 8        # 1 to 7 are not for boxings
            done, sending = self._run_native(parts.in_memory), bool(parts.named or parts.others)
            wait_for_named = self._begin_collectives(parts.named, number, tag)
            wait_for_others = self._begin_messages(parts.others, number, tag)
            if sending:                              # what memory alone did is done
                yield
            for k, shards in (*done, *wait_for_named(), *wait_for_others()):
                self._shards[k] = shards

    def _run_native(self, todo: Sequence[tuple[int, Any]]) -> list[tuple[int, Shards]]:
        if not todo:
            return []
        held = [{rank: shard.resolve_conj().resolve_neg() for rank, shard in self._shards[k].items()} for k, _ in todo]
        moved = torch_ext.move_shards([(boxing, shards) for (_, boxing), shards in zip(todo, held)], self._purpose,
                                      [self._moves[k].lineage for k, _ in todo])
        return [(k, shards) for (k, _), shards in zip(todo, moved)]

    def _into(self, k: int, number: int) -> Shards:
        """Memory for the shards of a tensor after this step: after the last one, if that has their shape."""
        into = self._moves[k].into
        return into if into and number + 1 == len(self.program.steps[k]) and not self._plans[k].view else {}

    def _begin_collectives(self, named: Sequence[NamedCall], number: int, tag: int
                           ) -> Callable[[], list[tuple[int, Shards]]]:
        if not named:
            return list
        rank = world().rank
        several = [[Item(step, *self._shards[k].values()) for k, step in one.steps] for one in named]
        calls = [pack_collective(one.name, items, rank) for one, items in zip(named, several)]
        self.calls += [call.name for call in calls]
        wait = collectives.begin_collectives(calls, self._wait_text(), tag, self._check)

        def finish() -> list[tuple[int, Shards]]:
            wait()
            return [(k, {rank: shard}) for call, one, items in zip(calls, named, several)
                    for (k, _), shard in zip(one.steps, unpack_collective(
                        call, items, rank, [self._into(k, number).get(rank) for k, _ in one.steps]))]

        return finish

    def _begin_messages(self, todo: Sequence[int], number: int, tag: int) -> Callable[[], list[tuple[int, Shards]]]:
        if not todo:
            return list
        all_steps, shapes = self.program.steps, self.program.shapes
        programs = [compile_step(*all_steps[k][number][:2], shapes[k]) for k in todo]
        dtypes, shards = [self._moves[k].spec.dtype for k in todo], [self._shards[k] for k in todo]
        outgoing, incoming = pack(programs, shards), incoming_bytes(programs, dtypes)
        device = self._message_device(todo, number)
        buffers = {peer: torch.empty(n, dtype=torch.uint8, device=device) for peer, n in incoming.items()}
        wait = begin_exchange({peer: torch.cat([part.to(device) for part in parts]) if len(parts) > 1 else
                               parts[0].to(device) for peer, parts in outgoing.items()},
                              buffers, self._wait_text(), tag)

        def finish() -> list[tuple[int, Shards]]:
            wait()
            streams = {peer: ByteStream(data) for peer, data in buffers.items()}
            dsts = [all_steps[k][number].dst for k in todo]
            return [(k, build_shards(program, self._shards[k], spec(dst, shapes[k], None, dtype), dst, streams,
                                     self._into(k, number)))
                    for k, program, dtype, dst in zip(todo, programs, dtypes, dsts)]

        return finish

    def _message_device(self, now: Sequence[int], number: int) -> torch.device:
        """Where messages of a step lie on both sides: the engines of two kinds of devices never meet. On the device of
        this process's rank where all tensors come from such devices, whether or not this rank holds any."""
        types = {self.program.steps[k][number].src.placement.type for k in now}
        if world().single_process or world().staged or len(types) > 1:
            return torch.device("cpu")
        return world().device(types.pop(), world().rank) if types else torch.device("cpu")

    def _wait_text(self) -> str:
        return move_wait_text(self._purpose, self._moves[0].spec, self._moves[0].dst)


@remembered
def moves_program(specs: tuple[Spec, ...], dsts: tuple[Layout, ...], plans: tuple[BoxingPlan, ...]) -> MovesProgram:
    """What this process does of moves by these plans."""
    shapes = tuple(plan.view or of.shape for of, plan in zip(specs, plans))
    steps = tuple(_merge_reductions(plan.steps, shape, of.dtype) for of, plan, shape in zip(specs, plans, shapes))
    nbytes = sum(of.nbytes for of in specs)
    divided = tuple(_divide([(k, own[number], shapes[k], specs[k].dtype) for k, own in enumerate(steps)
                              if len(own) > number], nbytes)
                    for number in range(max(map(len, steps), default=0)))
    strides = (of.moved(dst).stride for of, dst in zip(specs, dsts))
    return MovesProgram(shapes, steps, divided, tuple(
        None if stride == contiguous(of.shape) else stride for of, stride in zip(specs, strides)))


def _divide(now: Sequence[tuple[int, Step, Shape, torch.dtype]], nbytes: int) -> DividedStep:
    """How a step of these tensors is done. `nbytes`: of all that move together."""
    in_memory: list[tuple[int, Any]] = []
    named: dict[tuple[str, tuple[int, ...], torch.dtype], list[tuple[int, GroupStep]]] = {}
    others: list[int] = []
    for k, step, shape, dtype in now:
        # a lone process has all shards: there is nothing to divide
        group = None if world().single_process else group_step(step.src, step.dst, shape, world().rank)
        boxing = _native_boxing(group, dtype) if group is not None else None
        name = None if group is None or boxing is not None else collective_name(group, dtype, step.merged, nbytes)
        if boxing is not None:
            in_memory.append((k, boxing))
        elif group is not None and name is not None:
            named.setdefault((name, tuple(sorted(group.ranks)), dtype), []).append((k, group))
        else:
            others.append(k)
    return DividedStep(tuple(in_memory), tuple(NamedCall(name, tuple(own)) for (name, _, _), own in named.items()),
                       tuple(others))


def _merge_reductions(steps: Sequence[tuple[Layout, Layout]], shape: Shape, dtype: torch.dtype) -> list[Step]:
    """The steps of a plan, the two halves of an all-reduction as one where one call does both."""
    merged: list[Step] = []
    for src, dst in steps:
        if merged and merged[-1].dst is src and _in_one_call(merged[-1].src, dst, shape, dtype):
            merged[-1] = Step(merged[-1].src, dst, merged=True)
        else:
            merged.append(Step(src, dst))
    return merged


def _in_one_call(src: Layout, dst: Layout, shape: Shape, dtype: torch.dtype) -> bool:
    group = None if world().single_process else group_step(src, dst, shape, world().rank)
    if group is None or not all(s.is_partial and t.is_broadcast for s, t in zip(group.src.sbp, group.dst.sbp)):
        return False
    return _native_boxing(group, dtype) is not None or collective_name(group, dtype) is not None


def _native_boxing(group: GroupStep, dtype: torch.dtype) -> Any:
    return native.find_boxing(spec(group.src, group.shape, None, dtype), group.dst)


def _settle_shards(move: Move, plan: BoxingPlan, stride: Shape | None, shards: Shards) -> Shards:
    """The new shards as those of the tensor that moved, its dims in memory in their order."""
    if plan.view:
        shards = _view_shards(shards, move.dst, move.spec.shape)
    return shards if stride is None else {rank: dense_in_order(shard, stride) for rank, shard in shards.items()}


def _view_shards(shards: Shards, held: Layout, shape: Shape) -> Shards:
    """The shards of a tensor as those of its view of this shape."""
    return {rank: shard.reshape(held.local_shape(shape, rank)) for rank, shard in shards.items()}


def boxing_tag(moves: Sequence[Move], purpose: str) -> int:
    """By what ranks notice that they do not mean the same boxing."""
    tag = _moves_tag(tuple(move.spec for move in moves), tuple(move.dst for move in moves))
    tag += of_boxing([move.lineage for move in moves])
    return tag + (call_site() if purpose == watch.EXPLICIT else zlib.crc32(purpose.encode()))


@remembered
def _moves_tag(specs: tuple[Spec, ...], dsts: tuple[Layout, ...]) -> int:
    """The same on all ranks, and seldom that of other boxings."""
    # k makes the tag depend on the order: ranks that box the same tensors in another order disagree.
    return sum(k * zlib.crc32(f"{of.layout} {dst} {of.shape} {of.dtype}".encode())
               for k, (of, dst) in enumerate(zip(specs, dsts), 1))


@remembered
def move_wait_text(purpose: str, of: Spec, dst: Layout) -> str:
    """What ranks that wait in a boxing say that they wait for."""
    return f"the boxing for {purpose} of {of} -> {dst}"
