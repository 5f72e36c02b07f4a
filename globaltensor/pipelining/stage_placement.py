"""Which stage lives where: placements for the ranks of a schedule, parameters on their placements, tied ones kept tied.

A schedule knows *ranks* of its own, 0 to p-1. Each stands for a group of ranks of the world: those of a placement. The
stages of one rank of the schedule live on one group, each in a layout of its own; groups share no rank.

A parameter that two stages share (an embedding and the head's weight) lives with the first of them, once, so that
optimizers and clipping see it once. The other stage works on a *replica*, made of it before a step; the replica's
gradient goes into the parameter's after the step.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from globaltensor.boxings.redistribute import redistribute
from globaltensor.errors import PlacementError
from globaltensor.layouts.layout import Layout, layout
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import broadcast
from globaltensor.parallel.modules import named_tensors
from globaltensor.schedules.schedule import Schedule
from globaltensor.tensors import backward, gradients
from globaltensor.tensors.convert import from_full
from globaltensor.tensors.global_tensor import GlobalTensor, to_layout

Spot = tuple[nn.Module, str, str]                    # a module, "_parameters" or "_buffers", and a name in it


def groups(placements: Sequence[placement]) -> list[frozenset[int]]:
    """The ranks of the world for each rank of a schedule, in the order of the placements."""
    found: list[frozenset[int]] = []
    for where in placements:
        if not isinstance(where, placement):
            raise PlacementError(f"not a placement: {where!r}", "a pipeline takes one for each rank or each stage",
                                 'gt.placement("cpu", [0])')
        own = frozenset(where.flat)
        for other in found:
            if own != other and own & other:
                raise PlacementError(f"stages on ranks {sorted(other)} and {sorted(own)}",
                                     f"ranks {sorted(own & other)} would have to be at two micro-batches at a time",
                                     "placements that share all ranks, or none")
        if own not in found:
            found.append(own)
    return found


def homes(schedule: Schedule, placements: Sequence[placement]) -> list[placement]:
    """The placement of each stage, of one for each stage or one for each rank of the schedule."""
    by_rank = groups(placements)
    if len(by_rank) != schedule.ranks:
        raise PlacementError(f"{len(by_rank)} placements for the {schedule.ranks} ranks of {schedule.name}",
                             "each rank of a schedule is a placement",
                             f"{schedule.ranks} placements without a common rank")
    if len(placements) == schedule.ranks:
        return [placements[rank] for rank in schedule.rank_of]
    if len(placements) != schedule.stages:
        raise PlacementError(f"{len(placements)} placements for {schedule.stages} stages on {schedule.ranks} ranks",
                             f"{schedule.name} has stages on ranks {' '.join(map(str, schedule.rank_of))}",
                             f"{schedule.ranks} placements, or {schedule.stages}")
    for stage, (where, rank) in enumerate(zip(placements, schedule.rank_of)):
        if frozenset(where.flat) != by_rank[rank]:
            raise PlacementError(f"stage {stage} on {where}", f"{schedule.name} has it on the ranks of stage "
                                 f"{schedule.rank_of.index(rank)}, {sorted(by_rank[rank])}",
                                 f"a placement of these ranks; stages lie {' '.join(map(str, schedule.rank_of))}")
    return list(placements)


class Replica:
    """What a later stage works on in the place of a tensor that lives with an earlier one."""

    def __init__(self, home: Any, layout: Layout) -> None:
        self.home, self.layout = home, layout
        self.spots: list[Spot] = []
        self.now: Any = None                         # the leaf that the stage works on
        self._made: Any = None                       # the same, in the graph that leads home

    def make(self) -> None:
        """Before a step, on every process."""
        with torch.enable_grad():
            self._made = to_layout(self.home, self.layout)
        self.now = torch._C.TensorBase.requires_grad_(self._made.detach(), self.home.requires_grad)

    def settle(self, used: bool) -> None:
        """After a step, on every process: what it gathered goes into the gradient of the tensor itself."""
        if self._made.requires_grad and used:
            dst, grad = self.layout.dual.without_partials, gradients.raw_grad(self.now)
            if grad is not None:
                grad, = redistribute([grad], [dst], "gradient")
            else:                                    # other processes hold it
                grad = GlobalTensor.wrap(self.now.spec.on(dst), {})
            backward.backward([self._made], [grad])
        self.now = self._made = None


class Homes:
    """The parameters and buffers of all stages, moved to the placements of their stages, in place."""

    def __init__(self, stages: Sequence[nn.Module], places: Sequence[placement]) -> None:
        self.stages, self.places = stages, places
        self.replicas: list[dict[int, Replica]] = [{} for _ in stages]      # by stage, by id of the tensor itself
        moved: dict[int, tuple[Any, Any]] = {}       # id of the original -> the original, what became of it
        for stage, (module, where) in enumerate(zip(stages, places)):
            for _, owner, key, tensor, kind in list(named_tensors(module)):
                if id(tensor) not in moved:
                    now = _moved(tensor, where)
                    moved[id(tensor)] = moved[id(now)] = tensor, now
                now = moved[id(tensor)][1]
                getattr(owner, kind)[key] = now
                if now.placement != where:
                    replica = self.replicas[stage].setdefault(id(now), Replica(now, _like(now, where)))
                    replica.spots.append((owner, kind, key))

    def make(self) -> None:
        for replica in self._all():
            replica.make()

    def settle(self, unused: set[tuple[int, int]]) -> None:
        """`unused`: (stage, index) of replicas that got no gradient."""
        for stage, held in enumerate(self.replicas):
            for k, replica in enumerate(held.values()):
                replica.settle((stage, k) not in unused)

    def reduced(self, stage: int) -> list[Any]:
        """The parameters whose gradients are whole when the stage has ended its last backward pass: those of a stage on
        several ranks that no other stage shares."""
        if len(self.places[stage].flat) == 1:
            return []
        shared = {id(replica.home) for replica in self._all()}
        return [p for p in self.stages[stage].parameters() if id(p) not in shared]

    def unused(self, stages: Sequence[int]) -> set[tuple[int, int]]:
        """The replicas of these stages that got no gradient."""
        return {(stage, k) for stage in stages for k, replica in enumerate(self.replicas[stage].values())
                if gradients.raw_grad(replica.now) is None}

    def _all(self) -> Iterator[Replica]:
        for held in self.replicas:
            yield from held.values()

    @contextmanager
    def replicas_in(self, stage: int) -> Iterator[None]:
        """Inside, the stage's modules have replicas where what they share lives elsewhere."""
        spots = [(replica, spot) for replica in self.replicas[stage].values() for spot in replica.spots]
        for replica, (owner, kind, key) in spots:
            getattr(owner, kind)[key] = replica.now
        try:
            yield
        finally:
            for replica, (owner, kind, key) in spots:
                getattr(owner, kind)[key] = replica.home


def _moved(tensor: torch.Tensor, where: placement) -> Any:
    """A parameter or buffer on a placement: what is plain is broadcast, what is global keeps its sbp."""
    if tensor.is_global and tensor.placement == where:
        return tensor
    with torch.no_grad():
        now = (to_layout(tensor, _like(tensor, where)) if tensor.is_global
               else from_full(tensor.detach(), where, broadcast))
    return nn.Parameter(now, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else now


def _like(tensor: Any, where: placement) -> Layout:
    own = tensor.sbp if tensor.placement.ndim == where.ndim else (broadcast,) * where.ndim
    return layout(where, own)
