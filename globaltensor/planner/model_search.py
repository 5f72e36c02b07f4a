"""The plan of any model that takes least: meshes, micro-batches, ZeRO, schedules, chunks, recomputation and cuts.

    shape      dp x tp, under one of several plans along tp, x pp, and samples in a micro-batch
    variant    of a shape: stage of ZeRO, schedule, chunks
    cut        of a variant: units in each stage; each rank recomputes in the fastest way that fits

Shapes come in the order of what they take at least: the work of all units, dealt out evenly, or of the longest one.
Of a variant all cuts are simulated whose bounds (cut_bounds.py) can win, unless there are thousands. Then it is the one
that a dynamic program over units and stages finds, which is the least for

    fill and drain     max over ranks r of the passes of the stages before r, once, + m times the passes of r

and this is a bound of 1F1B and GPipe. Of other schedules the bound is m times the mean work of a rank. What is no
better than the best plan is passed over; the least bound of what was not searched to its end is `lower_bound`.
"""
from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np

from globaltensor.planner.cut_bounds import bounds_of_cuts
from globaltensor.planner.model_prices import (
    WHOLE_BACKWARD,
    ModelCandidate,
    ModelShape,
    ModelTask,
    ModelVariant,
    VariantPrices,
)
from globaltensor.planner.space import MANY_CUTS, all_cuts, divisors, even_cut, is_complete, kinds_of_schedules
from globaltensor.runtime.progress import progress

_NEVER = float("inf")
_RUNNERS_UP = 5
_MOST_ACTIONS = 1_000_000                            # that are simulated of variants with many cuts


# ----------------------------------------------------------------------------------------------------------- the space


def model_shapes(task: ModelTask) -> list[ModelShape]:
    """All of them."""
    several = []
    for tp, kind in task.costs:
        if not (task.fixed.allows("tp", tp) and task.fixed.allows("kind", kind)
                and ("sequence_parallel", kind == "sequence") not in task.fixed.excluded):
            continue
        for dp in divisors(task.global_batch):
            if not task.fixed.allows("dp", dp):
                continue
            for pp in range(1, min(task.devices // (dp * tp), task.units) + 1):
                if task.fixed.allows("pp", pp):
                    several += [ModelShape(dp, tp, kind, pp, b) for b in divisors(task.global_batch // dp)
                                if task.fixed.allows("micro_batch", b)]
    return several


def model_variants(task: ModelTask, shape: ModelShape) -> Iterator[ModelVariant]:
    """All of a shape."""
    zeros = [zero for zero in range(4) if task.fixed.allows("zero", zero)] if shape.dp > 1 else [0]
    for schedule, chunks in kinds_of_schedules(shape.pp, task.units):
        if shape.pp == 1 or task.fixed.allows("schedule", schedule) and task.fixed.allows("chunks", chunks):
            yield from (ModelVariant(shape, zero, schedule, chunks) for zero in zeros)


# ---------------------------------------------------------------------------------------------------------- the search


@dataclass
class ModelSearch:
    """What a search gives; as `SearchResult`."""

    best: ModelCandidate | None = None
    lower_bound: float = _NEVER
    weighed: int = 0
    runners_up: list[ModelCandidate] = field(default_factory=list)
    menu: dict[str, ModelCandidate | None] = field(default_factory=dict)
    simulated: list[ModelCandidate] = field(default_factory=list)


def search_model(task: ModelTask, seconds: float = _NEVER, first: bool = False, menu: bool = True) -> ModelSearch:
    """The fastest plan. `first`: stop at the first that fits, and leave out the menu; `menu`: search it before all
    else."""
    until = time.monotonic() + seconds
    every, result = model_shapes(task), ModelSearch()
    queue = _ModelQueue(task)
    if menu and not first:
        whole = [shape for shape in every if shape.dp * shape.tp * shape.pp == task.devices]
        for dish in _model_menu(task.devices):
            several = [variant for shape in whole if dish.fits(shape) for variant in model_variants(task, shape)
                       if dish.allows(variant)]
            if several:                              # else what is fixed leaves no such plan
                result.menu[dish.name] = queue.best_of(several, until)
    queue.run(every, until, first)
    result.best, result.weighed, result.simulated = queue.best, queue.weighed, queue.simulated
    result.lower_bound = min(queue.left, queue.best.seconds if queue.best else _NEVER)
    ordered = sorted(queue.others.values(), key=lambda one: one.seconds)
    result.runners_up = [one for one in ordered if one.variant != (queue.best and queue.best.variant)][:_RUNNERS_UP]
    return result


def least_memory_of_model(task: ModelTask) -> float:
    """Bytes that a device needs at least: of the smallest micro-batches, with as much ZeRO as is allowed."""
    thriftiest: dict[tuple[int, int, str, int], ModelShape] = {}
    for shape in model_shapes(task):
        thriftiest.setdefault(shape[:4], shape)      # its micro-batch first
    least = _NEVER
    for shape in thriftiest.values():
        several = list(model_variants(task, shape))
        thrifty = [variant for variant in several if variant.schedule == "1f1b"] or several
        most = max((variant.zero for variant in thrifty), default=0)
        for prices in (VariantPrices(task, variant) for variant in thrifty if variant.zero == most):
            stages = len(prices.rank_of)
            own = all_cuts(task.units, stages) if is_complete(task.units, stages) else (
                even_cut(task.units, stages), _by_work(prices, stages))
            least = min(least, *(max(prices.memory(cut)) for cut in own))
    return least


class _ModelQueue:
    """Shapes and variants in the order of their bounds, and the best plan so far."""

    def __init__(self, task: ModelTask) -> None:
        self.task, self.weighed, self.left = task, 0, _NEVER
        self.best: ModelCandidate | None = None
        self.others: dict[object, ModelCandidate] = {}
        self.simulated: list[ModelCandidate] = []
        self.actions = 0                             # simulated of variants with many cuts

    def can_win(self, bound: float) -> bool:
        return bound < (self.best.seconds if self.best else _NEVER)

    def enter(self, candidate: ModelCandidate) -> bool:
        """One that was simulated. Does it fit?"""
        self.weighed += 1
        self.simulated.append(candidate)
        if not candidate.fits:
            return False
        if self.can_win(candidate.seconds):
            self.best = candidate
        v = candidate.variant
        key = v.shape.dp, v.shape.tp, v.shape.pp, v.schedule, v.zero
        if key not in self.others or candidate.seconds < self.others[key].seconds:
            self.others[key] = candidate
        return True

    def run(self, shapes: Sequence[ModelShape], until: float, first: bool) -> None:
        with progress("searching", None, "groups of plans") as advance:
            self._run_by_bounds(shapes, until, first, advance)

    def _run_by_bounds(self, shapes: Sequence[ModelShape], until: float, first: bool,
                       advance: Callable[[float], None]) -> None:
        serial = count()
        heap: list[tuple[float, int, ModelShape | ModelVariant]] = [
            (VariantPrices(self.task, ModelVariant(shape, 0, "1f1b", 1)).least_work(), next(serial), shape)
            for shape in shapes]
        heapq.heapify(heap)
        while heap and self.can_win(heap[0][0]):
            if time.monotonic() >= until and self.best or first and self.best:
                break
            bound, _, item = heapq.heappop(heap)
            advance(1)
            if isinstance(item, ModelVariant):
                self.left = min(self.left, self.cut(VariantPrices(self.task, item), bound, until))
                continue
            for variant in model_variants(self.task, item):
                self.weighed += 1
                least = max(VariantPrices(self.task, variant).least(), bound)
                if self.can_win(least):
                    heapq.heappush(heap, (least, next(serial), variant))
        self.left = min(self.left, heap[0][0] if heap else _NEVER)

    def cut(self, prices: VariantPrices, bound: float, until: float) -> float:
        """Simulate the cuts that can win; what those that are left out take at least."""
        units, stages = self.task.units, len(prices.rank_of)
        if is_complete(units, stages):
            return self._simulate(prices, all_cuts(units, stages), bound, until)
        tried = {even_cut(units, stages), _by_work(prices, stages)}
        if prices.variant.chunks == 1:
            planned = prices.best_cut()
            if planned is None:
                self.enter(prices.price(_by_work(prices, stages)))
                return _NEVER                        # no cut fits
            if prices.variant.schedule in WHOLE_BACKWARD:
                bound = max(bound, planned[1])
                if not self.can_win(bound):
                    return bound
            tried.add(planned[0])
        allows = self.task.fixed.allows
        tried |= {other for cut in tried if not allows("cut", cut) for other in _cuts_beside(cut)}
        self._simulate(prices, sorted(tried), bound, until)
        return self._simulate(prices, all_cuts(units, stages), bound, until, few=False) if is_complete(
            units, stages, MANY_CUTS) else bound

    def _simulate(self, prices: VariantPrices, several: Iterable[tuple[int, ...]], bound: float, until: float,
                  few: bool = True) -> float:
        """Those of these cuts that can win; what those take at least for which the time does not suffice, or, if they
        are not few, the actions that may be simulated."""
        several = [cut for cut in several if self.task.fixed.allows("cut", cut)]
        bounds = bounds_of_cuts(prices, np.array(several, int).reshape(-1, len(prices.rank_of)))
        for k in np.argsort(bounds, kind="stable").tolist():
            least = max(float(bounds[k]), bound)
            if not self.can_win(least):
                break
            if self.best and (time.monotonic() >= until or not few and self.actions >= _MOST_ACTIONS):
                return least
            self.enter(one := prices.price(several[k]))
            self.actions += 0 if few else len(one.run.schedule)
        return _NEVER

    def best_of(self, several: Sequence[ModelVariant], until: float) -> ModelCandidate | None:
        """The best of the even cuts of these variants; None where none fits."""
        best: ModelCandidate | None = None
        bounds = [(VariantPrices(self.task, variant).least(), k) for k, variant in enumerate(several)]
        for bound, k in sorted(bounds):
            if best is not None and (bound >= best.seconds or time.monotonic() >= until):
                break
            variant = several[k]
            one = VariantPrices(self.task, variant).price(even_cut(self.task.units, variant.shape.pp))
            if self.enter(one) and (best is None or one.seconds < best.seconds):
                best = one
        return best


def _cuts_beside(cut: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Cuts in which one unit is in the stage beside."""
    moved = []
    for a, b in (*pairwise(range(len(cut))), *((b, a) for a, b in pairwise(range(len(cut))))):
        if cut[a] > 1:
            moved.append(tuple(n - (k == a) + (k == b) for k, n in enumerate(cut)))
    return moved


def _by_work(prices: VariantPrices, stages: int) -> tuple[int, ...]:
    """A cut into stages of about the same work."""
    f, i, w = prices.passes("none")
    ends = np.cumsum(f + i + w)
    n, at = len(ends), [0]
    for k in range(1, stages):
        wanted = int(np.searchsorted(ends, ends[-1] * k / stages, side="left")) + 1
        at.append(min(max(wanted, at[-1] + 1), n - (stages - k)))
    return tuple(int(b - a) for a, b in zip(at, [*at[1:], n]))


class _ModelDish(NamedTuple):
    """What one name of the menu stands for: even stages, 1F1B, all devices."""

    name: str
    fits: Callable[[ModelShape], bool]
    zeros: tuple[int, ...] = (0,)

    def allows(self, variant: ModelVariant) -> bool:
        return variant.zero in self.zeros and variant.schedule == "1f1b" and variant.chunks == 1


def _model_menu(n: int) -> list[_ModelDish]:
    every = (0, 1, 2, 3)
    return [
        _ModelDish("dp", lambda s: s.dp == n),
        *(_ModelDish(f"zero {zero}", lambda s: s.dp == n > 1, (zero,)) for zero in (1, 2, 3)),
        _ModelDish("tp", lambda s: s.tp == n > 1 and s.kind != "sequence"),
        _ModelDish("tp + sp", lambda s: s.tp == n > 1 and s.kind == "sequence"),
        _ModelDish("pp", lambda s: s.pp == n > 1),
        _ModelDish("dp x tp", lambda s: s.dp > 1 and s.tp > 1 and s.pp == 1, every),
        _ModelDish("dp x pp", lambda s: s.dp > 1 and s.tp == 1 and s.pp > 1, every),
        _ModelDish("tp x pp", lambda s: s.dp == 1 and s.tp > 1 and s.pp > 1, every),
        _ModelDish("dp x tp x pp", lambda s: s.dp > 1 and s.tp > 1 and s.pp > 1, every)]
