"""What a plan of any model takes: cuts of a variant, their bounds, their bytes, and the simulator's seconds.

    shape      dp x tp, under one of several plans along tp, x pp, and samples in a micro-batch
    variant    of a shape: stage of ZeRO, schedule, chunks
    cut        of a variant: units in each stage; each rank recomputes in the fastest way that fits

All ranks of a pipeline have the same mesh, unless `of_rank` says otherwise (own_meshes.py).
"""
from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from globaltensor.algorithms.offer import largest_part
from globaltensor.layouts.sbp import broadcast, partial_sum
from globaltensor.parallel.plan import Plan
from globaltensor.planner.mesh_costs import SPLIT, MeshCosts, StateBytes, UnitArrays, state_bytes
from globaltensor.planner.pricing import peaks_of, schedule_of
from globaltensor.planner.rank_memory import BatchBytes, PeakBytes, UnitBytes, sums_of_units
from globaltensor.planner.space import Fixed
from globaltensor.planner.unit_sums import UnitCost
from globaltensor.schedules.schedule import loop, vee
from globaltensor.simulator.cluster import KERNEL_KINDS, Cluster, Link
from globaltensor.simulator.costs import Costs, Hop
from globaltensor.simulator.engine import SimulatedRun, simulate
from globaltensor.simulator.stage_times import with_gathers
from globaltensor.tensors import gradients

_NEVER = float("inf")
WHOLE_BACKWARD = ("gpipe", "1f1b")
ROUNDING = 1 - 1e-9
RECOMPUTES = ("none", "selective", "full")              # the fastest first
_ACCUMULATION = KERNEL_KINDS.index("accumulation")
_OPTIMIZER, _GATHER = KERNEL_KINDS.index("optimizer"), KERNEL_KINDS.index("gather")


class ModelShape(NamedTuple):
    """`kind`: which plan along tp."""

    dp: int
    tp: int
    kind: str
    pp: int
    micro_batch: int


class ModelVariant(NamedTuple):
    """A shape with all but its cut."""

    shape: ModelShape
    zero: int
    schedule: str
    chunks: int


@dataclass(frozen=True, eq=False)
class ModelTask:
    """What is to be planned. `costs`: by (tp, kind), and their `plans`; `blocks`: which units may be computed again."""

    costs: dict[tuple[int, str], MeshCosts]
    blocks: np.ndarray
    cluster: Cluster
    devices: int
    global_batch: int
    fixed: Fixed = Fixed()
    plans: Mapping[tuple[int, str], Plan] = field(default_factory=dict)
    batch: BatchBytes = BatchBytes()

    @property
    def units(self) -> int:
        return len(self.blocks)


class RankMesh(NamedTuple):
    """Where a rank of the pipeline lies, if not all ranks have the same mesh: its variant, and the first of its devices
    in the order in which the pipeline goes through them; `ranks`: these devices; `groups`: of which hosts they are."""

    variant: ModelVariant
    first: int
    ranks: tuple[int, ...]
    groups: tuple[int, ...]


@dataclass(frozen=True)
class ModelCandidate:
    """A plan with its price. `recompute`: of each rank of the pipeline; `memory`: bytes of each; `rooms`: bytes of its
    devices; `meshes`: of each, where they are not all `variant`'s on the first devices; `prices`: it is one of them."""

    seconds: float
    variant: ModelVariant
    cut: tuple[int, ...]
    recompute: tuple[str, ...]
    memory: tuple[float, ...]
    run: SimulatedRun = field(compare=False, repr=False)
    ends: tuple[float, ...] = ()                     # of each rank, reductions after its last action
    optimizer: tuple[float, ...] = ()
    rooms: tuple[float, ...] = ()
    meshes: tuple[RankMesh, ...] = ()
    prices: VariantPrices | None = field(default=None, compare=False, repr=False)

    @property
    def fits(self) -> bool:
        """Has every rank the memory that it takes?"""
        return all(nbytes <= room * (1 + 1e-9) for nbytes, room in zip(self.memory, self.rooms))

    @property
    def fullest(self) -> float:
        return max(self.memory)


class VariantPrices:
    """The numbers of a variant that its cuts share."""

    meshes: tuple[RankMesh, ...] = ()
    gradients: np.ndarray | None = None              # bytes of each unit, where a run has told them

    def __init__(self, task: ModelTask, variant: ModelVariant, busy: float | None = None) -> None:
        self.task, self.variant = task, variant
        self._unit_bytes: dict[str, UnitBytes] = {}
        shape = variant.shape
        self.micro_batches = task.global_batch // (shape.dp * shape.micro_batch)
        times = task.cluster.turns(shape.dp * shape.tp * shape.pp if busy is None else busy)
        self.cluster = cluster = task.cluster.slowed(times)
        self.mesh = task.costs[shape.tp, shape.kind].slowed(times)
        self.of: UnitArrays = self.mesh.arrays(shape.micro_batch, shape.dp)
        self.rank_of = np.array(vee(shape.pp) if variant.schedule in ("zb-v", "dualpipe-v") else
                                loop(shape.pp, variant.chunks))
        early = (variant.zero > 1 and shape.dp > 1 and shape.pp == 1
                 and self.mesh.sizes.sum() * shape.tp >= gradients.EARLY)
        self.times = self.micro_batches if early else 1          # gradients are reduced, in a step
        self.states: StateBytes = state_bytes(self.mesh.itemsize, variant.zero, shape.dp, early)
        self.gathers = self.unsharding = np.zeros(task.units)        # seconds in each pass: of links, of the host
        if variant.zero == 3 and shape.dp > 1:
            fixed, each = self.mesh.reduction(shape.dp, SPLIT, broadcast)
            self.gathers = np.where(self.mesh.sizes > 0, fixed, 0.0) + each * self.mesh.sizes
            self.unsharding = float(cluster.rates_of_kinds[_GATHER][0]) * self.mesh.tensors
        self.more = cluster.micro_batch_overhead * shape.pp / len(self.rank_of) / 2

    def of_rank(self, rank: int) -> VariantPrices:
        """Those of a rank of the pipeline: the same for all."""
        return self

    @cached_property
    def end(self) -> tuple[float, float]:
        """Seconds of what data parallelism does once a stage is done: whatever its size, and for each byte."""
        dp, zero = self.variant.shape.dp, self.variant.zero
        if dp == 1:
            return 0.0, 0.0
        if not zero:
            return self.mesh.reduction(dp, partial_sum, broadcast)
        fixed, each = self.mesh.reduction(dp, partial_sum, SPLIT)
        fixed, each = fixed * self.times, each * self.times
        if zero < 3:
            back, back_each = self.mesh.reduction(dp, SPLIT, broadcast)
            fixed, each = fixed + back, each + back_each
        return fixed, each

    @cached_property
    def optimizer_each(self) -> float:
        """Seconds of the optimizer for each byte of parameters: all of its state is read and written."""
        if self.cluster.kernels:
            return self.states.optimizer * float(self.cluster.rates_of_kinds[_OPTIMIZER][2])
        return 2 * self.states.optimizer / self.cluster.memory_bandwidth

    def optimizer_seconds(self, units: np.ndarray) -> float:
        """Of a rank with these units."""
        return float(self.optimizer_of_units[units].sum())

    @cached_property
    def optimizer_of_units(self) -> np.ndarray:
        """Seconds of each unit: what each tensor takes, its bytes, and the host where ZeRO gathers new values."""
        rates, gathers = self.cluster.rates_of_kinds, self.variant.shape.dp > 1 and self.variant.zero in (1, 2)
        start = float(rates[_OPTIMIZER][0] + gathers * rates[_GATHER][0])
        return self.optimizer_each * self.mesh.sizes + start * self.mesh.tensors

    def passes(self, recompute: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of F, I and W of each unit, with what it waits for."""
        again = {"none": 0.0 * self.of.forward, "selective": self.of.selective, "full": self.of.full}[recompute]
        inputs = self.of.inputs + np.where(self.task.blocks, again, 0.0)
        return self.of.forward + self.unsharding, inputs + self.unsharding, self.of.weights + self.added

    @cached_property
    def added(self) -> np.ndarray:
        """Seconds of each unit in which a micro-batch adds its gradients to those of earlier ones, on average."""
        start, _, byte = self.cluster.rates_of_kinds[_ACCUMULATION] if self.cluster.kernels else (0.0,) * 3
        return (start * self.mesh.tensors + byte * self.mesh.sizes) * (self.micro_batches - 1) / self.micro_batches

    def kept(self, recompute: str) -> np.ndarray:
        """Bytes that a rank keeps of each unit for a micro-batch."""
        if recompute == "none":
            return self.of.kept
        before = np.concatenate([[0.0], self.of.passed[:-1]])    # what enters a unit
        kept = np.minimum(before, self.of.kept) if recompute == "full" else before + self.of.selected
        return np.where(self.task.blocks, kept, self.of.kept)

    def stage_end(self, nbytes: float, pending: float) -> float:
        fixed, each = self.end
        on_tp, each_on_tp = self.mesh.reduction_on_tp() if pending else (0.0, 0.0)
        return fixed + each * nbytes + on_tp + each_on_tp * pending

    # ------------------------------------------------------------------------------------------------------- bounds

    def least(self) -> float:
        """Seconds that a step takes at least, however units are cut."""
        shape = self.variant.shape
        if float(self.mesh.sizes.sum()) * self.states.total / shape.pp > self.cluster.memory:
            return _NEVER                            # parameters, gradients and optimizer do not fit
        seconds = self.least_work() + self.end[0]
        if shape.pp == 1:
            seconds += (self.end[1] + self.optimizer_each) * float(self.mesh.sizes.sum())
        return seconds * ROUNDING

    def least_work(self) -> float:
        """Seconds of the passes of the busiest rank at least: the mean of all, or the longest unit. Of several stages
        also what a link between them is busy, and the way of one micro-batch through all stages and back."""
        shape, cluster = self.variant.shape, self.cluster
        f, i, w = self.passes(self.task.fixed.recompute or "none")
        if shape.pp == 1:
            rank = float(np.sum(f + i + w)) + cluster.micro_batch_overhead
            return (self.micro_batches * rank + cluster.step_overhead) * ROUNDING
        f, i = f + self.gathers, i + self.gathers
        work = f + i + w
        rank = max(float(work.sum()) / shape.pp, float(work.max())) + cluster.micro_batch_overhead
        latency = min(cluster.local.latency, cluster.remote.latency)
        busy = np.sort(self.of.passed[:-1]) / max(cluster.local.bandwidth, cluster.remote.bandwidth)
        crossings = np.count_nonzero(np.diff(self.rank_of))      # each at another unit
        alone = float((f + i).sum() + 2 * (latency + busy[:crossings]).sum())
        link = self.micro_batches * float(busy[0])
        return (max(self.micro_batches * rank, link, alone) + cluster.step_overhead) * ROUNDING

    def with_bytes_of(self, units: Sequence[UnitCost]) -> VariantPrices:
        """The same with the bytes of a run in which ranks of dp had parts of parameters: where ops gather these, and
        where operands instead, so that gradients come split, depends on their sizes."""
        twin, shape = copy.copy(self), self.variant.shape
        twin.of = MeshCosts(units, units, self.cluster, shape.tp).arrays(shape.micro_batch, shape.dp)
        twin.gradients = np.array([sum(largest_part(p.gradient, p.shape) * p.dtype.itemsize for p in unit.parameters
                                       if p.gradient is not None) for unit in units], float)
        twin._unit_bytes = {}
        return twin

    def unit_bytes(self, recompute: str) -> UnitBytes:
        """What each unit holds."""
        if recompute not in self._unit_bytes:
            again, shape = self.task.blocks & (recompute != "none"), self.variant.shape
            whole = BatchBytes(*(one * self.task.global_batch for one in self.task.batch))
            self._unit_bytes[recompute] = UnitBytes.of_units(
                self.mesh, self.of, self.states, self.kept(recompute), again, self.variant.zero, shape.dp, shape.pp,
                whole)
            if self.gradients is not None:
                self._unit_bytes[recompute] = replace(
                    self._unit_bytes[recompute], gradients=self.gradients, ahead=np.zeros(len(self.gradients)))
        return self._unit_bytes[recompute]

    def peak_of_rank(self, units: np.ndarray, rank: int, recompute: str) -> PeakBytes:
        """What a rank of the pipeline with these units holds at its peak."""
        stages = np.split(units, np.flatnonzero(np.diff(units) != 1) + 1)
        return self.unit_bytes(recompute).of_rank(stages, self._kept_micro_batches[rank], self.micro_batches)

    @cached_property
    def _kept_micro_batches(self) -> Sequence[Fraction]:
        """At the peak of each rank, in units of all of its stages."""
        shape = self.variant.shape
        return peaks_of(self.variant.schedule, shape.pp, self.micro_batches, self.variant.chunks)

    def fastest_recompute(self, units: np.ndarray, rank: int) -> tuple[str, float]:
        """The fastest with which a rank fits; else the one with the fewest bytes."""
        ways: list[tuple[bool, float, str, float]] = []
        for name in self._recomputes:
            nbytes = self.peak_of_rank(units, rank, name).total
            fits = nbytes <= self.cluster.memory
            ways.append((not fits, float(self.passes(name)[1][units].sum()) if fits else nbytes, name, nbytes))
            if fits and name == "none":
                break
        return min(ways, key=lambda one: one[:2])[2:]

    @property
    def _recomputes(self) -> list[str]:
        return [name for name in RECOMPUTES if self.task.fixed.allows("recompute", name)] or ["none"]

    # --------------------------------------------------------------------------------------------------------- cuts

    def best_cut(self) -> tuple[tuple[int, ...], float] | None:
        """The cut of which fill and drain take least, and these seconds; None where none fits. A stage on each rank."""
        n, p, m = self.task.units, self.variant.shape.pp, self.micro_batches
        f, i, w = self.passes("none")
        before = np.concatenate([[0.0], np.cumsum(f + i + w)])
        best = np.full(n + 1, _NEVER)
        best[0] = 0.0
        choices = []
        for rank in range(p):
            longer, choice, added = np.full(n + 1, _NEVER), np.zeros(n + 1, int), self._added_seconds(rank)
            for end in range(rank + 1, n - (p - rank - 1) + 1):
                for begin in range(end - 1, rank - 1, -1):
                    seconds = before[begin] + m * (before[end] - before[begin] + 2 * self.more) + rank * 2 * self.more
                    if best[begin] == _NEVER:
                        continue
                    if max(seconds, best[begin]) >= longer[end]:
                        if seconds >= longer[end]:
                            break                    # an even longer stage takes more
                        continue
                    if added[begin][end] == _NEVER:
                        break                        # nor does a longer stage fit
                    seconds += m * added[begin][end]
                    if (worst := max(seconds, best[begin])) < longer[end]:
                        longer[end], choice[end] = worst, begin
            best = longer
            choices.append(choice)
        if best[n] == _NEVER:
            return None
        ends, cut = n, []
        for choice in reversed(choices):
            cut.append(ends - int(choice[ends]))
            ends = int(choice[ends])
        return tuple(reversed(cut)), (float(best[n]) + self.cluster.step_overhead + self.end[0]) * ROUNDING

    def _added_seconds(self, rank: int) -> list[list[float]]:
        """Of a rank with the units from b to e [b][e]: seconds that the fastest recomputation that fits adds to each
        micro-batch."""
        seconds, passes = np.full((self.task.units + 1,) * 2, _NEVER), self.passes("none")[1]
        for name in reversed(self._recomputes):
            needed = self.unit_bytes(name).of_ranges(float(self._kept_micro_batches[rank]), self.micro_batches)
            added = sums_of_units(self.passes(name)[1] - passes)
            seconds = np.where(needed <= self.cluster.memory, np.minimum(added, seconds), seconds)
        return seconds.tolist()

    def dealt(self, cut: tuple[int, ...]) -> tuple[list[np.ndarray], list[list[int]], list[np.ndarray]]:
        """Of a cut: the units of each stage, the stages of each rank of the pipeline, and its units."""
        stages = units_of_stages(cut)
        of_rank = [[s for s, rank in enumerate(self.rank_of) if rank == r] for r in range(self.variant.shape.pp)]
        return stages, of_rank, [np.concatenate([stages[s] for s in own]) for own in of_rank]

    def memory(self, cut: tuple[int, ...]) -> list[float]:
        """Bytes of each rank of the pipeline, with the fastest recomputation that fits."""
        return [self.of_rank(rank).fastest_recompute(own, rank)[1] for rank, own in enumerate(self.dealt(cut)[2])]

    def costs(self, stages: list[np.ndarray], recompute: Sequence[str]) -> Costs:
        """Seconds of each action of each stage; `recompute`: of each rank of the pipeline."""
        forward, inputs, weights = list[float](), list[float](), list[float]()
        passes = {rank: self.of_rank(rank).passes(name) for rank, name in enumerate(recompute)}
        for stage, rank in zip(stages, self.rank_of):
            own = self.of_rank(rank)
            f, i, w = (one[stage] for one in passes[int(rank)])
            gathers = own.gathers[stage]
            if self.variant.shape.pp > 1:                         # op by op: nothing is gathered ahead
                f, i, gathers = f + gathers, i + gathers, np.zeros(len(stage))
            forward.append(with_gathers(f.tolist(), gathers.tolist()) + own.more)
            inputs.append(with_gathers(i[::-1].tolist(), gathers[::-1].tolist()) + own.more)
            weights.append(float(w.sum()))
        hops = tuple(self.hop(int(stages[s][-1]), int(self.rank_of[s]), int(self.rank_of[s + 1]))
                     for s in range(len(stages) - 1))
        return Costs(tuple(forward), tuple(inputs), tuple(weights), hops)

    def price(self, cut: tuple[int, ...]) -> ModelCandidate:
        """A cut, simulated."""
        stages, of_rank, units = self.dealt(cut)
        chosen = [self.of_rank(rank).fastest_recompute(own, rank) for rank, own in enumerate(units)]
        schedule = schedule_of(self.variant.schedule, self.variant.shape.pp, self.micro_batches, self.variant.chunks)
        run = simulate(schedule, self.costs(stages, [name for name, _ in chosen]))
        seconds, reductions, optimizer = [], [], []
        for rank, own in enumerate(of_rank):
            now, prices = 0.0, self.of_rank(rank)
            for s in sorted(own, key=run.done.__getitem__):
                now = max(now, float(run.done[s])) + prices.stage_end(
                    float(prices.mesh.sizes[stages[s]].sum()), float(prices.mesh.pending_on_tp[stages[s]].sum()))
            reduced = max(now, float(run.last[rank]))
            step = prices.optimizer_seconds(units[rank]) + prices.cluster.step_overhead
            seconds.append(reduced + step - float(min(run.first)))
            reductions.append(reduced - float(run.last[rank]))
            optimizer.append(step)
        rooms = tuple(self.of_rank(rank).task.cluster.memory for rank in range(len(units)))
        return ModelCandidate(max(seconds), self.variant, cut, tuple(name for name, _ in chosen),
                              tuple(nbytes for _, nbytes in chosen), run, tuple(reductions), tuple(optimizer), rooms,
                              self.meshes, self)

    def hop(self, unit: int, rank: int, other: int) -> Hop:
        """What a unit passes on from rank to rank of the pipeline."""
        if rank == other:
            return Hop()
        link = self.link(rank, other)
        return Hop(link.latency, float(self.of.passed[unit]) / link.bandwidth)

    def link(self, rank: int, other: int) -> Link:
        """Between two ranks of the pipeline."""
        group = self.variant.shape.dp * self.variant.shape.tp
        hosts = {r // self.cluster.devices_per_host for one in (rank, other)
                 for r in (one * group, one * group + group - 1)}
        return self.cluster.local if len(hosts) == 1 else self.cluster.remote


def units_of_stages(cut: tuple[int, ...]) -> list[np.ndarray]:
    """The units of each stage of a cut."""
    ends = np.cumsum((0, *cut))
    return [np.arange(a, b) for a, b in zip(ends[:-1], ends[1:])]
