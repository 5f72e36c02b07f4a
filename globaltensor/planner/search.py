"""The plan that takes least: best first, by what a plan takes at least; simulated only where it can still win.

    shapes      in the order of their bound (bounds.of_shape)
    variants    of a shape, when its turn comes, in the order of theirs (of_variant)
    cuts        of a variant, when its turn comes, in the order of theirs (of_cuts): simulated, until none can win

All three are in one queue. It ends when the next bound is no less than the best plan: what is left cannot win. What the
time does not suffice for, or a variant with more cuts than are tried, leaves its bound; the least of all these is
`lower_bound`. The answer depends on the cuts that are tried, not on the order, so that with more devices, memory or
bandwidth it is never slower: each plan that was possible still is, and takes no longer.

The *menu*, what one would try by hand (even stages, 1F1B, all devices), is searched first, a name at a time.
"""
from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import ceil
from typing import Any

import numpy as np

from globaltensor.planner.bounds import VariantCosts, of_shape
from globaltensor.planner.pricing import Candidate, Task, price_cut
from globaltensor.planner.space import (
    BatchError,
    MeshShape,
    Variant,
    cuts,
    divisors,
    even_cut,
    is_complete,
    shapes,
    variants,
)
from globaltensor.runtime.progress import progress
from globaltensor.simulator.gpt import RECOMPUTE

_RUNNERS_UP = 5
_MOST_TIMES = 64                                     # more devices than these are not tried
_NEVER = float("inf")


@dataclass
class SearchResult:
    """What a search gives: the best plan (None: nothing fits), the least that any plan of the space takes, how many
    plans were weighed and simulated, the best of other variants, the menu by name (None: it does not fit), and all
    plans that were simulated."""

    best: Candidate | None = None
    lower_bound: float = _NEVER
    weighed: int = 0
    simulated: int = 0
    runners_up: list[Candidate] = field(default_factory=list)
    menu: dict[str, Candidate | None] = field(default_factory=dict)
    simulated_plans: list[Candidate] = field(default_factory=list)


def search(task: Task, seconds: float = _NEVER, first: bool = False, menu: bool = True) -> SearchResult:
    """The fastest plan. `seconds`: stop then, with the best so far; `first`: stop at the first that fits; `menu`:
    search it too, before all else.

    Raises BatchError where there is no plan at all, whatever the memory.
    """
    until, every = time.monotonic() + seconds, shapes(task.gpt, task.devices, task.global_batch, task.fixed)
    result = SearchResult()
    for name, own in (_menu(task, every) if menu and not first else {}).items():
        queue = _Queue(task, own.shapes, own.allows, lambda variant: [even_cut(task.gpt.layers, variant.shape.pp)])
        queue.run(until)
        _add_counts(result, queue)
        if queue.weighed:                            # else what is fixed leaves no such plan
            result.menu[name] = queue.best
    queue = _Queue(task, every, lambda _: True, lambda variant: cuts(task.gpt.layers,
                                                                     variant.shape.pp * variant.chunks))
    for candidate in result.menu.values():
        if candidate is not None:
            queue.enter(candidate)
    queue.run(until, first)
    _add_counts(result, queue)
    if not queue.weighed and not queue.best and not queue.waiting:
        raise BatchError(f"{task.fixed.schedule or 'a schedule'} with {task.fixed.chunks or 2} stages on each rank",
                         f"no mesh that is left has as many: there are {task.gpt.layers} layers, and a stage has one",
                         "fewer --chunks, a smaller --pp, or another --schedule")
    result.best, result.lower_bound = queue.best, min(queue.lower_bound, queue.best.seconds if queue.best else _NEVER)
    result.runners_up = queue.runners_up()
    return result


def _add_counts(result: SearchResult, queue: _Queue) -> None:
    result.weighed += queue.weighed
    result.simulated += queue.simulated
    result.simulated_plans += queue.simulated_plans


class _Queue:
    """Shapes and variants in the order of their bounds, and the best plan so far."""

    def __init__(self, task: Task, several: Sequence[MeshShape], allows: Callable[[Variant], bool],
                 cuts_of: Callable[[Variant], Sequence[tuple[int, ...]]]) -> None:
        self.task, self.allows, self.cuts_of, self._serial = task, allows, cuts_of, count()
        self.best: Candidate | None = None
        self.weighed = self.simulated = 0
        self.left = _NEVER                           # the least bound of what was not searched to its end
        self.simulated_plans: list[Candidate] = []
        self._others: dict[tuple[object, ...], Candidate] = {}
        self._heap: list[tuple[float, int, MeshShape | Variant]] = [
            (of_shape(task, shape), next(self._serial), shape) for shape in several]
        heapq.heapify(self._heap)

    @property
    def lower_bound(self) -> float:
        """No plan of the space takes less."""
        return min(self.left, self._heap[0][0] if self._heap else _NEVER)

    @property
    def waiting(self) -> int:
        """How many shapes and variants were not searched."""
        return len(self._heap)

    def enter(self, candidate: Candidate) -> None:
        """One that was simulated."""
        if self.best is None or candidate.seconds < self.best.seconds:
            self.best = candidate
        plan = candidate.plan
        key = plan.dp, plan.tp, plan.pp, plan.schedule, plan.zero
        if key not in self._others or candidate.seconds < self._others[key].seconds:
            self._others[key] = candidate

    def runners_up(self) -> list[Candidate]:
        """The best plans of other kinds than the best."""
        ordered = sorted(self._others.values(), key=lambda one: one.seconds)
        return [one for one in ordered if one.plan != (self.best and self.best.plan)][:_RUNNERS_UP]

    def run(self, until: float, first: bool = False) -> None:
        """Search until nothing is left that could win, or the time is over."""
        with progress("searching", None, "groups of plans") as advance:
            self._search(until, first, advance)

    def _search(self, until: float, first: bool, advance: Callable[[float], None]) -> None:
        while self._heap and self._can_win(self._heap[0][0]) and time.monotonic() < until:
            if first and self.best:
                return
            bound, _, item = heapq.heappop(self._heap)
            advance(1)
            if isinstance(item, MeshShape):
                for variant in variants(self.task.gpt, item, self.task.fixed):
                    if self.allows(variant):
                        least = max(VariantCosts(self.task, variant).of_variant(self.task.cluster.memory), bound)
                        self.weighed += 1
                        if self._can_win(least):
                            heapq.heappush(self._heap, (least, next(self._serial), variant))
            else:
                self._cut(item, bound, until)

    def _can_win(self, bound: float) -> bool:
        return bound < (self.best.seconds if self.best else _NEVER)

    def _cut(self, variant: Variant, bound: float, until: float) -> None:
        """Simulate the cuts of a variant that can win."""
        several = [cut for cut in self.cuts_of(variant) if self.task.fixed.allows("cut", cut)]
        if not several:
            return
        bounds = VariantCosts(self.task, variant).of_cuts(np.array(several), self.task.cluster.memory)
        self.weighed += len(several)
        names = self.task.fixed.recomputes
        for k in np.argsort(bounds.seconds, kind="stable").tolist():
            if not self._can_win(float(bounds.seconds[k])):
                break
            if time.monotonic() >= until and self.best:
                self.left = min(self.left, bound)
                return
            candidate = price_cut(self.task, variant, several[k], tuple(names[n] for n in bounds.recompute[k]))
            self.enter(candidate)
            self.simulated_plans.append(candidate)
            self.simulated += 1
        if not is_complete(self.task.gpt.layers, variant.shape.pp * variant.chunks):
            self.left = min(self.left, bound)


# ------------------------------------------------------------------------------------------------------------ the menu


@dataclass(frozen=True)
class _Dish:
    """What one name of the menu stands for."""

    shapes: list[MeshShape]
    allows: Callable[[Variant], bool]


def _menu(task: Task, every: Sequence[MeshShape]) -> dict[str, _Dish]:
    """By name: the shapes that use all devices and are of this kind."""
    n = task.devices
    whole = [shape for shape in every if shape.dp * shape.tp * shape.pp == n]

    def dish(fits: Callable[[MeshShape], bool], zeros: tuple[int, ...] = (0,)) -> _Dish:
        return _Dish([shape for shape in whole if fits(shape)],
                     lambda variant: variant.zero in zeros and variant.schedule == "1f1b" and variant.chunks == 1)

    every_zero = (0, 1, 2, 3)
    dishes = {"dp": dish(lambda s: s.dp == n)} | {
        f"zero {zero}": dish(lambda s: s.dp == n > 1, (zero,)) for zero in every_zero[1:]} | {
        "tp": dish(lambda s: s.tp == n > 1 and not s.sequence_parallel),
        "tp + sp": dish(lambda s: s.tp == n > 1 and s.sequence_parallel),
        "pp": dish(lambda s: s.pp == n > 1),
        "dp x tp": dish(lambda s: s.dp > 1 and s.tp > 1 and s.pp == 1, every_zero),
        "dp x pp": dish(lambda s: s.dp > 1 and s.tp == 1 and s.pp > 1, every_zero),
        "tp x pp": dish(lambda s: s.dp == 1 and s.tp > 1 and s.pp > 1, every_zero),
        "dp x tp x pp": dish(lambda s: s.dp > 1 and s.tp > 1 and s.pp > 1, every_zero)}
    return {name: one for name, one in dishes.items() if one.shapes}


# ----------------------------------------------------------------------------------------------------- nothing fits


def least_memory(task: Task) -> float:
    """Bytes that a device needs at least, whatever is chosen."""
    smallest = dict[tuple[int, bool, int, int], MeshShape]()
    for shape in shapes(task.gpt, task.devices, task.global_batch, task.fixed):
        smallest.setdefault((shape.dp, shape.sequence_parallel, shape.tp, shape.pp), shape)    # its micro-batch first
    least = _NEVER
    for shape in smallest.values():
        several = list(variants(task.gpt, shape, task.fixed))
        thrifty = [variant for variant in several if variant.schedule == "1f1b"] or several
        most = max((variant.zero for variant in thrifty), default=0)
        for variant in thrifty:
            if variant.zero == most:
                own = np.array(cuts(task.gpt.layers, shape.pp * variant.chunks))
                least = min(least, float(VariantCosts(task, variant).of_cuts(own, 0).memory.max(1).min()))
    return least


def smallest_changes(task: Task, needs: float) -> dict[str, object]:
    """Of each kind of change the least with which something fits, each tried."""

    def fits(other: Task) -> bool:
        try:
            return search(other, first=True).best is not None
        except BatchError:
            return False

    def with_fixed(**other: Any) -> Task:
        return replace(task, fixed=replace(task.fixed, **other))

    changes: dict[str, object] = {}
    fixed = task.fixed
    tries: dict[str, Sequence[str | int]] = {
        "recompute": RECOMPUTE[RECOMPUTE.index(fixed.recompute) + 1:] if fixed.recompute else (),
        "micro_batch": [b for b in divisors(task.global_batch)[::-1] if b < fixed.micro_batch]
        if fixed.micro_batch else [],
        "zero": list(range(fixed.zero + 1, 4)) if fixed.zero is not None else []}
    for name, values in tries.items():
        enough = next((value for value in values if fits(with_fixed(**{name: value}))), None)
        if enough is not None:
            changes[name] = enough
    most = task.cluster.hosts * task.cluster.devices_per_host or task.devices * _MOST_TIMES
    low, high = task.devices, min(2 * task.devices, most)
    while high < most and not fits(replace(task, devices=high)):
        low, high = high, min(2 * high, most)
    if high > low and fits(replace(task, devices=high)):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(replace(task, devices=middle)) else (middle, high)
        changes["devices"] = high
    enough_bytes = ceil(needs)
    if fits(replace(task, cluster=replace(task.cluster, memory=float(enough_bytes)))):
        changes["memory"] = enough_bytes
    return changes
