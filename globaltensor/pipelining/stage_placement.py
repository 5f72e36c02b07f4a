"""Stages on placements: placements for the ranks of a schedule, parameters moved to them, tied parameters kept tied.

A schedule has *ranks* of its own, 0 to p-1. Each stands for a group of ranks of the world: those of a placement. The
stages of one rank of the schedule are on one group, each in a layout of its own; groups share no rank.

A parameter that two stages share (an embedding and the head's weight) is on the placement of the first of them, once,
so that optimizers and clipping see it once. The other stage works on a *replica*, made from it before a step; the
replica's gradient is added to the parameter's after the step.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from globaltensor.boxings.redistribute import redistribute
from globaltensor.errors import PlacementError, counted
from globaltensor.layouts.layout import Layout, layout, replicated
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import broadcast
from globaltensor.pipelining.stages import StageError
from globaltensor.pipelining.step_results import MissingGradients
from globaltensor.runtime.memory_writes import writes_of
from globaltensor.runtime.torch_internals import TensorBase
from globaltensor.schedules.schedule import Schedule
from globaltensor.tensors import backward, gradients
from globaltensor.tensors.convert import from_full_of_model
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.materialize import named_tensors
from globaltensor.tensors.parameter_swap import Slot, check_convertible, convert, swapped_in, weights_made_again
from globaltensor.tensors.redistribution import to_layout


def rank_groups(placements: Sequence[placement]) -> list[frozenset[int]]:
    """The ranks of the world for each rank of a schedule, in the order of the placements."""
    groups: list[frozenset[int]] = []
    if isinstance(placements, placement):
        raise PlacementError(f"one placement for a pipeline: {placements}", "each rank of the schedule has its own",
                             'a list: [gt.placement("cpu", [0]), gt.placement("cpu", [1])]')
    for where in placements:
        if not isinstance(where, placement):
            raise PlacementError(f"not a placement: {where!r}", "a pipeline takes one for each rank or each stage",
                                 'gt.placement("cpu", [0])')
        own = frozenset(where.flat)
        for other in groups:
            if own != other and own & other:
                raise PlacementError(f"stages on ranks {sorted(other)} and {sorted(own)}",
                                     f"ranks {sorted(own & other)} would have to run two micro-batches at a time",
                                     "placements that share all ranks, or none")
        if own not in groups:
            groups.append(own)
    return groups


def stage_placements(schedule: Schedule, placements: Sequence[placement]) -> list[placement]:
    """The placement of each stage, from one for each stage or one for each rank of the schedule."""
    by_rank = rank_groups(placements)
    if len(by_rank) != schedule.ranks:
        raise PlacementError(f"{counted(len(by_rank), 'placement')} for the {counted(schedule.ranks, 'rank')} of "
                             f"{schedule.name}", "each rank of a schedule is a placement",
                             f"{counted(schedule.ranks, 'placement')} without a common rank")
    if len(placements) == schedule.ranks:
        return [placements[rank] for rank in schedule.rank_of]
    if len(placements) != schedule.stages:
        several = f", or {schedule.stages}" if schedule.stages != schedule.ranks else ""
        raise PlacementError(f"{counted(len(placements), 'placement')} for {counted(schedule.stages, 'stage')} on "
                             f"{counted(schedule.ranks, 'rank')}", f"{schedule.name} has its stages on ranks "
                             f"{' '.join(map(str, schedule.rank_of))}, and placements of the same ranks are one of "
                             "these", f"{counted(schedule.ranks, 'placement')}{several}; for more stages on the same "
                             'ranks the schedule "interleaved", with chunks=2')
    for stage, (where, rank) in enumerate(zip(placements, schedule.rank_of)):
        if frozenset(where.flat) != by_rank[rank]:
            raise PlacementError(f"stage {stage} on {where}", f"{schedule.name} has it on the ranks of stage "
                                 f"{schedule.rank_of.index(rank)}, {sorted(by_rank[rank])}",
                                 "a placement of these ranks; the stages are on "
                                 f"{' '.join(map(str, schedule.rank_of))}")
    return list(placements)


class Replica:
    """A copy of a tensor of an earlier stage, on the placement of a later one that shares it."""

    def __init__(self, original: Any, layout: Layout) -> None:
        self.original, self.layout = original, layout
        self.slots: list[Slot] = []
        self.leaf: Any = None                        # what the stage works on
        self._moved: Any = None                      # the same, in the graph that leads back to the original

    def make(self) -> None:
        """Before a step, on every process."""
        with torch.enable_grad():
            self._moved = to_layout(self.original, self.layout)
        self.leaf = TensorBase.requires_grad_(self._moved.detach(), self.original.requires_grad)

    def reduce_grad(self, used: bool) -> None:
        """After a step, on every process: add its gradient to that of the original."""
        if self._moved.requires_grad and used:
            dst, grad = self.layout.dual.without_partials, gradients.raw_grad(self.leaf)
            if grad is not None:
                grad, = redistribute([grad], [dst], "gradient")
            else:                                    # other processes hold it
                grad = GlobalTensor.wrap(self.leaf.spec.on(dst), {})
            backward.backward([self._moved], [grad])
        self.leaf = self._moved = None


class StageParameters:
    """The parameters and buffers of all stages, moved in place to the placements of their stages."""

    def __init__(self, stages: Sequence[nn.Module], placements: Sequence[placement]) -> None:
        self.stages, self.placements = stages, placements
        self.replicas: list[dict[int, Replica]] = [{} for _ in stages]      # by stage, by id of the original
        self.uses: dict[int, tuple[str, Any, list[int]]] = {}    # by id of a tensor: a name, itself, and its stages
        self._kept: dict[int, weakref.ref[Any]] = {}     # by id of a part of ZeRO: its gradient of before the step
        with ExitStack() as stack:
            for module in stages:
                stack.enter_context(weights_made_again(module))
            self._place()

    def _place(self) -> None:
        stages, placements = self.stages, self.placements
        moved: dict[int, tuple[Any, Any]] = {}       # id of a tensor -> the tensor (kept alive), and its global one
        for name, _, _, tensor, _ in [row for module in stages for row in named_tensors(module)]:
            check_convertible(tensor, name)
        for stage, (module, where) in enumerate(zip(stages, placements)):
            for name, owner, key, tensor, kind in list(named_tensors(module)):
                if id(tensor) not in moved:
                    placed = _to_placement(name, tensor, where)
                    moved[id(tensor)] = moved[id(placed)] = tensor, placed
                placed = moved[id(tensor)][1]
                getattr(owner, kind)[key] = placed
                self.uses.setdefault(id(placed), (name, placed, []))[2].append(stage)
                if placed.placement != where:
                    replica = self.replicas[stage].setdefault(id(placed), Replica(placed, _same_sbp(placed, where)))
                    replica.slots.append((owner, key))

    def check_hooks(self) -> None:
        """Raise StageError for a parameter with hooks of users that several stages share."""
        for name, tensor, users in self.uses.values():
            if users[0] != users[-1] and gradients.has_hooks(tensor):
                raise StageError(f"a hook on {name}, which stages {users[0]} and {users[-1]} share",
                                 "each has a backward pass of its own: the hook would be called with parts of the "
                                 "gradient, more than once per micro-batch",
                                 "handle.remove() of it, and the same of its .grad after step(...)")

    def begin_step(self) -> None:
        """Make the replicas."""
        for replica in self._all_replicas():
            replica.make()
        parts = (gradients.part_of(p) for module in self.stages for p in module.parameters())
        self._kept = {id(part): weakref.ref(grad) for part in parts
                      if part is not None and (grad := gradients.raw_grad(part)) is not None}

    def reduce_replicas(self, unused: frozenset[tuple[int, int]]) -> None:
        """`unused`: (stage, index) of replicas that got no gradient."""
        for stage, replicas in enumerate(self.replicas):
            for k, replica in enumerate(replicas.values()):
                replica.reduce_grad((stage, k) not in unused)

    def reduced_by_stage(self, stage: int) -> list[Any]:
        """The parameters whose gradients are complete after the stage's last backward pass: those of a stage on
        several ranks that no other stage shares."""
        if len(self.placements[stage].flat) == 1:
            return []
        shared = {id(replica.original) for replica in self._all_replicas()}
        return [p for p in self.stages[stage].parameters() if id(p) not in shared]

    def missing_gradients(self, stages: Sequence[int]) -> MissingGradients:
        """Those of these stages."""
        return MissingGradients(
            frozenset((stage, k) for stage in stages for k, p in enumerate(self.stages[stage].parameters())
                      if not self._has_gradient(p)),
            frozenset((stage, k) for stage in stages for k, replica in enumerate(self.replicas[stage].values())
                      if gradients.raw_grad(replica.leaf) is None))

    def _has_gradient(self, p: Any) -> bool:
        """Is there one for ranks of other stages to have too? Not where the part of ZeRO keeps one of earlier steps
        alone, which they have."""
        if gradients.raw_grad(p) is not None:        # not read by `.grad`, which would reduce what is pending
            return True
        part = gradients.part_of(p)
        grad = None if part is None else gradients.raw_grad(part)    # from a hook that read it
        return grad is not None and (id(part) not in self._kept or self._kept[id(part)]() is not grad)

    def _all_replicas(self) -> Iterator[Replica]:
        for replicas in self.replicas:
            yield from replicas.values()

    @contextmanager
    def replicas_in(self, stage: int) -> Iterator[None]:
        """Inside, the stage's modules work on the replicas of what they share with earlier stages. Raises StageError
        where they write to what they share: the other stages would not see it."""
        shared = list(self._shared_in(stage))
        before = [writes_of(tensor) for _, tensor in shared]
        with swapped_in((owner, key, replica.leaf) for replica in self.replicas[stage].values()
                        for owner, key in replica.slots):
            yield
        for (key, tensor), writes in zip(shared, before):
            if writes_of(tensor) != writes:
                raise StageError(f"stage {stage} writes to {key}, which it shares with another stage",
                                 "a stage on other ranks works on a copy of it, made before the step",
                                 "what is written to in one stage, or a copy in each: tensor.clone()")

    def _shared_in(self, stage: int) -> Iterator[tuple[str, Any]]:
        """What a stage shares with stages on other ranks, as it has it, with a name of it."""
        own = self.replicas[stage].values()
        for replica in self._all_replicas():
            if replica in own or replica.original.placement == self.placements[stage]:
                yield replica.slots[0][1], replica.leaf if replica in own else replica.original


def _to_placement(name: str, tensor: torch.Tensor, where: placement) -> Any:
    """A parameter or buffer on a placement: a plain one is broadcast, a global one keeps its sbp."""
    if isinstance(tensor, GlobalTensor) and tensor.placement == where:
        return tensor
    return convert(tensor, lambda t: to_layout(t, _same_sbp(t, where)) if isinstance(t, GlobalTensor)
                   else from_full_of_model(t, name, where, broadcast))


def _same_sbp(tensor: GlobalTensor, where: placement) -> Layout:
    """The tensor's sbp on another placement, where that has as many axes; else broadcast."""
    return layout(where, tensor.sbp) if tensor.placement.ndim == where.ndim else replicated(where)
