"""What units take on a mesh dp x tp for a micro-batch of any size, from two runs without memory.

The ops of a model are the same for every micro-batch; their operations, their bytes and what is kept are a constant and
a part for each sample. So a run with 2 samples and one with 4 tell of all sizes, and only the longest of operations,
bytes and start of a kernel is taken for each. Along dp a run has two ranks: what passes between them grows with their
number n as 2 (n - 1) / n, and where dp is 1 there is none of it.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from globaltensor.layouts.layout import layout
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import Sbp, broadcast, partial_sum, split
from globaltensor.planner.op_costs import OpCosts
from globaltensor.planner.unit_sums import ParameterCost, PassCost, UnitCost
from globaltensor.simulator.cluster import KERNEL_KINDS, Cluster, hypothetical_placements

SAMPLES = 2, 4                                       # of a rank of dp, in the two runs
_STATES_OF_ADAM = 2


@dataclass(frozen=True)
class UnitArrays:
    """Of all units, an entry each, for one micro-batch on a mesh. Seconds, with what is reduced within them; bytes of a
    rank."""

    forward: np.ndarray
    inputs: np.ndarray
    weights: np.ndarray
    compute: np.ndarray
    kept: np.ndarray
    unsaved: np.ndarray
    first: np.ndarray                                # at the peak of a unit's backward: see unit_memory.py
    later: np.ndarray
    passed: np.ndarray
    full: np.ndarray                                 # seconds of recomputation: what runs again, and the host's part
    selective: np.ndarray
    selected: np.ndarray                             # bytes that are kept then
    tp_bytes: np.ndarray                             # received along tp, forward and backward
    dp_bytes: np.ndarray


class MeshCosts:
    """Of a model under one plan, along tp; `few` and `many` are its units with `SAMPLES` samples."""

    def __init__(self, few: Sequence[UnitCost], many: Sequence[UnitCost], cluster: Cluster, tp: int) -> None:
        alike = all(len(x.operations) == len(y.operations) for a, b in zip(few, many)
                    for x, y in zip(_passes(a), _passes(b)))
        # where the library does something else with more samples, all is in proportion to them
        self.few = few if alike else [_in_proportion(unit, SAMPLES[0] / SAMPLES[1]) for unit in many]
        self.many, self.cluster, self.tp, self.times = many, cluster, tp, 1.0
        self._slowed: dict[float, MeshCosts] = {}
        self._known: dict[tuple[int, int], UnitArrays] = {}
        self.parameters = [unit.parameters for unit in few]

    def slowed(self, times: float) -> MeshCosts:
        """The same on a cluster on which everything takes so many times longer."""
        if times == 1:
            return self
        if times not in self._slowed:
            self._slowed[times] = MeshCosts(self.few, self.many, self.cluster.slowed(times), self.tp)
            self._slowed[times].times = times
        return self._slowed[times]

    @property
    def operations(self) -> float:
        """Of a sample, in the whole model."""
        first, second = SAMPLES
        return sum(b.operations - a.operations for a, b in zip(self.few, self.many)) / (2 * (second - first))

    def arrays(self, micro_batch: int, dp: int) -> UnitArrays:
        """Of a micro-batch of so many samples on each of dp ranks."""
        if (micro_batch, dp) not in self._known:
            self._known[micro_batch, dp] = self._computed(micro_batch, dp)
        return self._known[micro_batch, dp]

    def _computed(self, micro_batch: int, dp: int) -> UnitArrays:
        first, second = SAMPLES
        share = (micro_batch - first) / (second - first)
        along_dp = 2 * (dp - 1) / dp if dp > 1 else 0.0

        def between(a: float, b: float) -> float:
            return max(a + (b - a) * share, 0.0)

        def seconds(a: PassCost, b: PassCost) -> tuple[float, float]:
            operations, moved = (np.maximum(x + (y - x) * share, 0.0) for x, y in (
                (np.array(a.operations), np.array(b.operations)), (np.array(a.moved), np.array(b.moved))))
            compute = float(self.cluster.op_seconds(np.array(a.kinds, int), operations, moved).sum())
            return compute, compute + self.times * sum(between(a.seconds[axis], b.seconds.get(axis, 0.0)) * (
                along_dp if axis == "dp" else 1.0) for axis in a.seconds)

        def received(a: UnitCost, b: UnitCost, axis: str) -> float:
            return sum(between(x.bytes.get(axis, 0), y.bytes.get(axis, 0)) for x, y in zip(_passes(a), _passes(b)))

        pairs = [(self.few[k], self.many[k]) for k in self._distinct[0]]

        def each(name: str) -> np.ndarray:
            return np.array([between(getattr(a, name), getattr(b, name)) for a, b in pairs])

        def peaks(name: str) -> np.ndarray:
            return np.array([max(map(between, getattr(a, name), getattr(b, name)), default=0.0) for a, b in pairs])

        times = np.array([[seconds(x, y) for x, y in zip(_passes(a), _passes(b))] for a, b in pairs])
        ops = np.array([len(a.forward.kinds) for a, _ in pairs])
        full, selective = (self.cluster.rates_of_kinds[KERNEL_KINDS.index(how), 0] * ops
                           for how in ("full", "selective"))
        of_distinct = (
            times[:, 0, 1], times[:, 1, 1], times[:, 2, 1], times[:, :, 0].sum(1),
            each("kept"), each("unsaved"), peaks("first"), peaks("later"), each("passed"),
            times[:, 0, 1] + full, np.array([seconds(a.again, b.again)[0] for a, b in pairs]) + selective,
            each("selected"),
            np.array([received(a, b, "tp") for a, b in pairs]),
            np.array([received(a, b, "dp") for a, b in pairs]) * along_dp)
        return UnitArrays(*(one[self._distinct[1]] for one in of_distinct))

    @cached_property
    def _distinct(self) -> tuple[list[int], list[int]]:
        """The first of the units that cost the same, and for each unit its place among these: most layers of a model
        are equal."""
        places: dict[str, int] = {}
        of_unit = [places.setdefault(repr([_numbers_of(self.few[k]), _numbers_of(self.many[k])]), len(places))
                   for k in range(len(self.few))]
        return [of_unit.index(place) for place in range(len(places))], of_unit

    # -------------------------------------------------------------------------------------------------- parameters

    @cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of the parameters of each unit on a rank of tp; those that several units share count in each."""
        return np.array([sum(_elements_of(p) * p.dtype.itemsize for p in own) for own in self.parameters], float)

    @cached_property
    def learned(self) -> np.ndarray:
        """The same of those that have a gradient."""
        return np.array([sum(_elements_of(p) * p.dtype.itemsize for p in own if p.gradient is not None)
                         for own in self.parameters], float)

    @cached_property
    def buffers(self) -> np.ndarray:
        """Bytes of the buffers of each unit on a rank."""
        return np.array([unit.buffers for unit in self.few], float)

    @cached_property
    def tensors(self) -> np.ndarray:
        """How many parameters each unit has."""
        return np.array([len(own) for own in self.parameters], float)

    @cached_property
    def largest(self) -> np.ndarray:
        """Bytes of the largest parameter of each unit on a rank of tp."""
        return np.array([max((_elements_of(p) * p.dtype.itemsize for p in own), default=0) for own in self.parameters],
                        float)

    @cached_property
    def temporaries(self) -> np.ndarray:
        """Bytes that Adam computes with while it steps the parameters of each unit: for one parameter after another two
        of its size, and what is left of the one before."""
        most, before = [], 0
        for own in self.parameters:
            most.append(0)
            for p in own:
                nbytes = _elements_of(p) * p.dtype.itemsize
                most[-1], before = max(most[-1], 2 * nbytes + before), nbytes
        return np.array(most, float)

    @cached_property
    def elements(self) -> np.ndarray:
        return np.array([sum(_elements_of(p) for p in own) for own in self.parameters], float)

    @cached_property
    def itemsize(self) -> int:
        """Of the parameters: that of most of them."""
        return round(self.sizes.sum() / max(self.elements.sum(), 1)) or 4

    @cached_property
    def pending_on_tp(self) -> np.ndarray:
        """Bytes of each unit's gradients that are a sum over tp still."""
        return np.array([sum(_elements_of(p) * p.dtype.itemsize for p in own if p.gradient is not None
                             and p.gradient.sbp[-1].is_partial) for own in self.parameters], float)

    def reduction(self, dp: int, before: Sbp, after: Sbp) -> tuple[float, float]:
        """Of a boxing of parameters along dp: seconds whatever their number, and for each byte."""
        return _rates(self.cluster, tuple(i * self.tp for i in range(dp)), before, after, int(self.sizes.sum()))

    def reduction_on_tp(self) -> tuple[float, float]:
        """The same of gradients that are sums over tp."""
        return _rates(self.cluster, tuple(range(self.tp)), partial_sum, broadcast, int(self.sizes.sum()))


@lru_cache(10_000)
def _rates(cluster: Cluster, ranks: tuple[int, ...], before: Sbp, after: Sbp, nbytes: int) -> tuple[float, float]:
    if len(ranks) == 1:
        return 0.0, 0.0
    with hypothetical_placements():
        where = placement("meta", list(ranks))
        costs = OpCosts(cluster, where)
        even = max(nbytes // 2 // len(ranks), 1) * len(ranks)
        src, dst = (layout(where, (s,)) for s in (before, after))
        fixed, seconds = costs.boxing_parts(src, dst, (even,), 2 * even)
        return fixed, seconds / (2 * even)


def _passes(of: UnitCost) -> tuple[PassCost, PassCost, PassCost]:
    return of.forward, of.inputs, of.weights


def _numbers_of(of: UnitCost) -> list[Any]:
    """All that a unit costs, but for its parameters."""
    return [getattr(of, one.name) for one in fields(of) if one.name != "parameters"]


def _in_proportion(of: UnitCost, share: float) -> UnitCost:
    """What it would be for a share of the samples, if nothing were constant."""
    def part(one: PassCost) -> PassCost:
        return PassCost([n * share for n in one.operations], [n * share for n in one.moved],
                        {axis: n * share for axis, n in one.seconds.items()},
                        {axis: n * share for axis, n in one.bytes.items()}, one.kinds)

    return UnitCost(part(of.forward), part(of.inputs), part(of.weights), round(of.kept * share),
                    round(of.unsaved * share), round(of.passed * share), round(of.passed_whole * share),
                    of.operations * share, of.parameters, part(of.again), round(of.selected * share),
                    [round(n * share) for n in of.first], [round(n * share) for n in of.later], of.buffers)


def _elements_of(p: ParameterCost) -> int:
    """Elements of a parameter on a rank of tp."""
    ways = [1] * len(p.shape)
    for s, n in zip(p.lies.sbp, p.lies.placement.shape):
        if s.is_split:
            ways[s.dim] *= n
    return prod(-(-n // k) for n, k in zip(p.shape, ways))


@dataclass(frozen=True)
class StateBytes:
    """Of a rank, for each byte of its parameters."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(itemsize: int, zero: int, dp: int, early: bool) -> StateBytes:
    """Parameters, gradients and the state of Adam as gt.zero leaves them. `early`: are gradients split in backward?"""
    if dp == 1:
        zero = 0
    moments = _STATES_OF_ADAM * (4 if zero else itemsize) / itemsize
    masters = 0.0 if not zero or zero == 3 and itemsize >= 4 else 4 / itemsize
    return StateBytes(1 / dp if zero == 3 else 1.0, 1 / dp if early else 1.0, (moments + masters) / (dp if zero else 1))


SPLIT = split(0)
