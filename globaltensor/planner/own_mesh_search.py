"""The fastest pipeline whose ranks have meshes of their own: unequal stages on unequal devices.

With p ranks, a stage on each, m micro-batches, and seconds f, t of a rank's forward and of all its passes, a step takes

    of any schedule       the f of all ranks before a rank, m t of the rank, and what it does at the end
    of 1F1B and GPipe     the t of all ranks before a rank, and m t of the rank

at least. Both are found for the best ranks from some unit and some device on by dynamic programming from the last rank
to the first, as both are only the larger of two terms when a rank is put before others:

    least(units from b, devices from d) = min over ranks on b..e and d..d' of max(m t, t + least(from e, from d'))

Then pipelines are put together rank by rank from the first on, the one with the least bound first (A*), and simulated.
What is no better than the best plan is passed over, so the answer is exact, unless there are too many to be tried: then
the least bound of what is left is part of `lower_bound`.
"""
from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import NamedTuple

import numpy as np

from globaltensor.planner.model_prices import (
    RECOMPUTES,
    ROUNDING,
    WHOLE_BACKWARD,
    ModelCandidate,
    ModelTask,
    ModelVariant,
    RankMesh,
    VariantPrices,
)
from globaltensor.planner.own_meshes import DeviceOrder, OwnMeshPrices
from globaltensor.planner.rank_memory import sums_of_units
from globaltensor.planner.space import divisors

_NEVER = float("inf")
_SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-h2")     # those with a stage on each rank
_MOST_ACTIONS = 1_000_000                            # of pipelines that are simulated
_MOST_STEPS = 20_000                                 # of putting them together


class RankTable(NamedTuple):
    """Of a rank of this mesh, for all units from b to e [b, e]: seconds of F, of all passes and of what it does at the
    end, and of what it passes on at least. Passes are by ranks behind it, as these tell how many micro-batches it
    keeps; inf where it does not fit."""

    groups: frozenset[int]
    variant: ModelVariant
    forward: np.ndarray
    passes: list[np.ndarray]
    end: np.ndarray
    hop: np.ndarray

    @property
    def size(self) -> int:
        return self.variant.shape.dp * self.variant.shape.tp


@dataclass
class OwnMeshSearch:
    """What a search gives: the best plan (None: none is faster than what was known), the least that takes what was
    not tried, how many were weighed, and those simulated."""

    best: ModelCandidate | None = None
    left: float = _NEVER
    weighed: int = 0
    simulated: list[ModelCandidate] = field(default_factory=list)


class _Start(NamedTuple):
    """Pipelines of p ranks with the same samples and schedule."""

    tables: _Tables
    pp: int


class _Part(NamedTuple):
    """The first ranks of a pipeline: its units and places so far, seconds of their F and of all their passes, and the
    bounds that they give."""

    start: _Start
    meshes: tuple[RankMesh, ...] = ()
    cut: tuple[int, ...] = ()
    units: int = 0
    place: int = 0
    forward: float = 0.0
    passes: float = 0.0
    least: float = 0.0
    first_end: float = 0.0


def search_own_meshes(orders: Iterable[DeviceOrder], known: float, until: float) -> OwnMeshSearch:
    """The fastest that takes less than a `known` plan."""
    result, serial = OwnMeshSearch(), count()
    heap: list[tuple[float, int, _Part]] = []
    for tables in _all_tables(orders, known, until, result):
        for pp in range(2, tables.most + 1):
            bound = tables.bound(pp)
            if bound < known:
                heapq.heappush(heap, (bound, next(serial), _Part(_Start(tables, pp))))
    best, steps, actions = known, 0, 0
    while heap and heap[0][0] < best:
        if actions >= _MOST_ACTIONS or steps >= _MOST_STEPS or time.monotonic() >= until:
            result.left = min(result.left, heap[0][0])
            break
        bound, _, part = heapq.heappop(heap)
        steps += 1
        if len(part.meshes) < part.start.pp:
            for least, longer in part.start.tables.longer(part):
                result.weighed += 1
                if (least := max(least, bound)) < best:
                    heapq.heappush(heap, (least, next(serial), longer))
            continue
        one = OwnMeshPrices(part.start.tables.order, part.meshes).price(part.cut)
        assert one.seconds >= bound * ROUNDING or not one.fits, "it takes at least what its bound says"
        result.simulated.append(one)
        actions += len(one.run.schedule)
        if one.fits and one.seconds < best:
            best, result.best = one.seconds, one
    return result


def _all_tables(orders: Iterable[DeviceOrder], known: float, until: float, result: OwnMeshSearch) -> Iterator[_Tables]:
    """Of each size of micro-batches and each schedule; those that no pipeline could win with are left out."""
    for order in orders:
        task = next(iter(order.tasks.values()))
        if len(order.devices) < 2 or task.units < 2 or not task.fixed.allows("chunks", 1):
            continue
        schedules = [name for name in _SCHEDULES if task.fixed.allows("schedule", name)]
        for samples in divisors(task.global_batch):
            least = _least_work(order, samples)
            if least >= known:
                continue
            if time.monotonic() >= until:
                result.left = min(result.left, least)
                continue
            for schedule in schedules:
                tables = _Tables(order, samples, schedule)
                if tables.tables:
                    yield tables


def _least_work(order: DeviceOrder, samples: int) -> float:
    """Seconds of the work of all units at least, each on the ranks that do it with the least device seconds."""
    each = [np.sum(order.prices(groups, variant).passes("none"), axis=0) * variant.shape.dp * variant.shape.tp
            for groups in order.group_sets for variant in order.meshes(groups, samples, "1f1b", 2)]
    if not each:
        return _NEVER
    task = next(iter(order.tasks.values()))
    return task.global_batch // samples * float(np.min(each, axis=0).sum()) / len(order.devices) * ROUNDING


class _Tables:
    """What ranks take under a schedule, with micro-batches of so many samples."""

    def __init__(self, order: DeviceOrder, samples: int, schedule: str) -> None:
        self.order, self.samples, self.schedule = order, samples, schedule
        self.task: ModelTask = next(iter(order.tasks.values()))
        self.units, self.places = self.task.units, len(order.devices)
        self.micro_batches = self.task.global_batch // samples
        self.step_overhead = min(task.cluster.step_overhead for task in order.tasks.values())
        self.most = min(self.units, self.places, self.task.fixed.pp or self.units)
        self.tables = [self._rank_table(groups, variant) for groups in order.group_sets
                       for variant in order.meshes(groups, samples, schedule, 2)
                       if variant.shape.dp * variant.shape.tp < self.places]

    # ----------------------------------------------------------------------------------------------------- of a rank

    def _rank_table(self, groups: frozenset[int], variant: ModelVariant) -> RankTable:
        prices, n = self.order.prices(groups, variant), self.units
        mesh, sizes = prices.mesh, sums_of_units(prices.mesh.sizes)
        forward = sums_of_units(prices.passes("none")[0] + prices.gathers) + prices.more
        no_end, each_end = prices.end
        pending = sums_of_units(mesh.pending_on_tp)
        on_tp, each_on_tp = mesh.reduction_on_tp() if pending.max() > 0 else (0.0, 0.0)
        end = no_end + each_end * sizes + np.where(pending > 0, on_tp + each_on_tp * pending, 0.0)
        end = end + sums_of_units(np.array([prices.optimizer_seconds(np.array([k])) for k in range(n)]))
        hop = self.order.fastest.latency + np.concatenate([[0.0], prices.of.passed]) / self.order.fastest.bandwidth
        return RankTable(groups, variant, forward, self._all_passes(prices), end, hop)

    def _all_passes(self, prices: VariantPrices) -> list[np.ndarray]:
        """Seconds of all passes, by ranks behind, with the fastest recomputation that fits."""
        is_stage = np.arange(self.units + 1)[None, :] > np.arange(self.units + 1)[:, None]
        names = [name for name in RECOMPUTES if self.task.fixed.allows("recompute", name)] or ["none"]
        ways = [(prices.unit_bytes(name), 2 * prices.more + sums_of_units(sum(prices.passes(name))
                                                                          + 2 * prices.gathers))
                for name in reversed(names)]
        room = prices.task.cluster.memory * (1 + 1e-9)
        by_kept: dict[int, np.ndarray] = {}
        for behind in range(self.most):
            times = self._kept_micro_batches(behind)
            if times not in by_kept:
                seconds = np.full(is_stage.shape, _NEVER)
                for needed, own in ways:
                    fits = needed.of_ranges(times, self.micro_batches) <= room
                    seconds = np.where(is_stage & fits, np.minimum(own, seconds), seconds)
                by_kept[times] = seconds
        return [by_kept[self._kept_micro_batches(behind)] for behind in range(self.most)]

    def _kept_micro_batches(self, behind: int) -> int:
        """Micro-batches whose activations a rank keeps at least, with so many ranks behind it."""
        return self.micro_batches if self.schedule == "gpipe" else min(self.micro_batches, behind + 1)

    # ------------------------------------------------------------------------------------------- of what is behind

    @cached_property
    def _behind(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """By ranks less one: the least of both kinds, for ranks from a place and a unit on [place, unit]."""
        n, d, m = self.units, self.places, self.micro_batches
        levels: list[tuple[np.ndarray, np.ndarray]] = []
        places = [self._places(table) for table in self.tables]
        for behind in range(self.most):
            by_end, by_passes = (np.full((d + 1, n + 1), _NEVER) for _ in range(2))
            for table, own in zip(self.tables, places):
                if not len(own):
                    continue
                t, f = table.passes[behind], table.forward
                if not behind:
                    ended = np.broadcast_to((m * t + table.end)[:, n], (len(own), n + 1))
                    passed = np.broadcast_to(m * t[:, n], (len(own), n + 1))
                else:
                    ends, passes = (level[own + table.size][:, None, :] for level in levels[-1])
                    ended = np.maximum(m * t + table.end, np.where(np.isfinite(t), f + table.hop, _NEVER) + ends).min(2)
                    passed = np.maximum(m * t, t + 2 * table.hop + passes).min(2)
                by_end[own] = np.minimum(by_end[own], ended)
                by_passes[own] = np.minimum(by_passes[own], passed)
            # devices may stay idle
            levels.append((np.minimum.accumulate(by_end[::-1])[::-1], np.minimum.accumulate(by_passes[::-1])[::-1]))
        return levels

    def _places(self, table: RankTable) -> np.ndarray:
        starts = (self.order.first_place(table.groups, table.size, begin) for begin in range(self.places))
        return np.array(sorted({start for start in starts if start is not None}), int)

    def bound(self, pp: int) -> float:
        """Seconds of any pipeline of so many ranks at least."""
        if not self.task.fixed.allows("pp", pp):
            return _NEVER
        ends, passes = (float(level[0, 0]) for level in self._behind[pp - 1])
        return (max(ends, passes if self.schedule in WHOLE_BACKWARD else 0.0) + self.step_overhead) * ROUNDING

    def longer(self, part: _Part) -> Iterator[tuple[float, _Part]]:
        """A pipeline with one more rank, in all ways, each with its bound."""
        pp, m, n = part.start.pp, self.micro_batches, self.units
        behind = pp - 1 - len(part.meshes)
        for table in self.tables:
            place = self.order.first_place(table.groups, table.size, part.place)
            if place is None:
                continue
            for e in range(part.units + 1, n + 1 - behind) if behind else (n,):
                t, f = float(table.passes[behind][part.units, e]), float(table.forward[part.units, e])
                if t == _NEVER:
                    continue
                end = float(table.end[part.units, e])
                first_end = end if not part.meshes else part.first_end
                least = max(part.least, part.forward + m * t + end)
                if self.schedule in WHOLE_BACKWARD:
                    least = max(least, part.passes + m * t + first_end)
                hop = float(table.hop[e])
                forward, passes = part.forward + f + hop, part.passes + t + 2 * hop
                bound = least
                if behind:
                    ends, back = (float(level[place + table.size, e]) for level in self._behind[behind - 1])
                    bound = max(bound, forward + ends,
                                passes + back + first_end if self.schedule in WHOLE_BACKWARD else 0.0)
                if bound == _NEVER:
                    continue
                variant = table.variant._replace(shape=table.variant.shape._replace(pp=pp))
                meshes = (*part.meshes, self.order.mesh(table.groups, variant, place))
                cut = (*part.cut, e - part.units)
                if behind or self._is_allowed(meshes, cut):
                    yield (bound + self.step_overhead) * ROUNDING, _Part(
                        part.start, meshes, cut, e, place + table.size, forward, passes, least, first_end)

    def _is_allowed(self, meshes: tuple[RankMesh, ...], cut: tuple[int, ...]) -> bool:
        """Is it one that the search for equal meshes does not weigh? Or one that may not be chosen?"""
        first = meshes[0]
        alike = all(one.variant == first.variant and one.groups == first.groups for one in meshes)
        is_other = not alike or len(self.order.group_sets) > 1
        return is_other and self.task.fixed.allows("cut", cut) and self.task.fixed.allows("own_meshes", True)
