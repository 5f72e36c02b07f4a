"""The fastest plan of a program on a cluster, of one kind of host or of groups of different ones.

    equal meshes    every rank of the pipeline has the same mesh                                  (model_search.py)
    own meshes      each has its own: on at most 16 devices, or 32 of each group             (own_mesh_search.py)

Where there are groups, the first search is done on each of them, and on several at the price of the slowest; the second
prices each rank on the groups that it lies on, and goes through the groups in every order.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import NamedTuple

from globaltensor.planner.model_prices import ModelCandidate, ModelTask, RankMesh
from globaltensor.planner.model_search import ModelSearch, search_model
from globaltensor.planner.own_mesh_search import search_own_meshes
from globaltensor.planner.own_meshes import DeviceOrder
from globaltensor.planner.program_costs import Pins, PlannedCosts, PlansOfModel, Program
from globaltensor.planner.space import Fixed
from globaltensor.simulator.cluster import Cluster, Link
from globaltensor.simulator.groups import ClusterGroups

_MOST_DEVICES = 16
_MOST_OF_A_GROUP = 32
_MOST_ORDERED = 3                                    # groups of which every order is tried
_SHARE_OF_TIME = 0.5                                 # of the seconds, for the search for equal meshes
_NEVER = float("inf")


class WholeSearch(NamedTuple):
    """What a search gives; `task`: on all devices, at the price of the slowest; `plans`: those along tp there."""

    result: ModelSearch
    task: ModelTask
    plans: PlansOfModel


class PlannedMachines:
    """What plans of a program take on the machines of a cluster. Costs are kept from search to search."""

    def __init__(self, program: Program, machines: Cluster | ClusterGroups, devices: int, global_batch: int) -> None:
        self.program, self.machines, self.devices, self.global_batch = program, machines, devices, global_batch
        sizes = [devices]
        if isinstance(machines, ClusterGroups):
            sizes, left = [], devices
            for size in machines.sizes:
                sizes.append(min(size, left))
                left -= sizes[-1]
        self.sizes = [size for size in sizes if size]
        self.orders = [tuple(order) for order in permutations(range(len(self.sizes)))
                       ] if len(self.sizes) <= _MOST_ORDERED else [tuple(range(len(self.sizes)))]
        self._costs: dict[frozenset[int], PlannedCosts] = {}

    @property
    def all_groups(self) -> frozenset[int]:
        return frozenset(range(len(self.sizes)))

    @property
    def memory(self) -> float:
        """Bytes of a device, the one with fewest."""
        return self._cluster_of(self.all_groups).memory

    def _cluster_of(self, groups: frozenset[int]) -> Cluster:
        if not isinstance(self.machines, ClusterGroups):
            return self.machines
        if len(groups) == 1:
            return self.machines.groups[next(iter(groups))]
        return self.machines.slowest_of(sorted(groups), self.sizes)

    def costs(self, groups: frozenset[int]) -> PlannedCosts:
        """On the devices of these groups."""
        if groups not in self._costs:
            self._costs[groups] = PlannedCosts(self.program, self._cluster_of(groups),
                                               sum(self.sizes[k] for k in groups), self.global_batch)
        return self._costs[groups]

    def search(self, pins: Pins, fixed: Fixed, seconds: float = _NEVER, menu: bool = True) -> WholeSearch:
        """The fastest plan under these pins, where so much is fixed."""
        until = time.monotonic() + seconds
        plans = self.costs(self.all_groups).of(fixed, pins)
        tasks = {self.all_groups: self.costs(self.all_groups).task(plans, fixed)}
        for groups in sorted({part for order in self.orders for part in _groups_in_a_row(order)}, key=sorted):
            if groups not in tasks:
                tasks[groups] = self.costs(groups).task(self.costs(groups).of(fixed, pins), fixed)
        result = search_groups(self, tasks, until, menu)
        return WholeSearch(result, tasks[self.all_groups], plans)

    def link(self, one: int, other: int) -> Link:
        assert isinstance(self.machines, ClusterGroups)
        return self.machines.link(one, other)

    def device_orders(self, tasks: dict[frozenset[int], ModelTask]) -> list[DeviceOrder]:
        """The orders in which a pipeline may go through the devices."""
        return device_orders(self.sizes, self.orders, tasks, self.link)


def device_orders(sizes: Sequence[int], orders: Sequence[tuple[int, ...]], tasks: dict[frozenset[int], ModelTask],
                  link: Callable[[int, int], Link]) -> list[DeviceOrder]:
    """Groups of these sizes in these orders, as far as ranks with meshes of their own may lie on them."""
    first = [sum(sizes[:k]) for k in range(len(sizes))]
    most = _MOST_OF_A_GROUP if len(sizes) > 1 else _MOST_DEVICES
    several = []
    for order in orders:
        devices = [(first[k] + i, k) for k in order for i in range(min(sizes[k], most))]
        several.append(DeviceOrder(tuple(d for d, _ in devices), tuple(k for _, k in devices),
                                   {part: tasks[part] for part in _groups_in_a_row(order)}, link))
    return several


def search_groups(of: PlannedMachines, tasks: dict[frozenset[int], ModelTask], until: float, menu: bool) -> ModelSearch:
    """The fastest of all searches, with the least that any of them leaves."""
    result = ModelSearch()
    for groups, task in tasks.items():
        is_whole = groups == of.all_groups
        one = search_model(task, max(until - time.monotonic(), 0.0) * _SHARE_OF_TIME, menu=menu and is_whole)
        _add_search(result, one, [] if len(tasks) == 1 else sorted(groups), of.sizes)
    known = result.best.seconds if result.best else _NEVER
    own = search_own_meshes(of.device_orders(tasks), known, until)
    if own.best is not None:
        if result.best is not None:
            result.runners_up.insert(0, result.best)
        result.best = own.best
    result.weighed += own.weighed
    result.simulated += own.simulated
    result.lower_bound = min(result.lower_bound, own.left, result.best.seconds if result.best else _NEVER)
    return result


def _add_search(result: ModelSearch, one: ModelSearch, groups: list[int], sizes: Sequence[int]) -> None:
    """Add what a search on some groups gave."""
    def placed(candidate: ModelCandidate) -> ModelCandidate:
        return _on_groups(candidate, groups, sizes) if groups else candidate

    if one.best is not None and (result.best is None or one.best.seconds < result.best.seconds):
        result.best = placed(one.best)
    result.lower_bound = min(result.lower_bound, one.lower_bound)
    result.weighed += one.weighed
    result.menu |= {name: None if dish is None else placed(dish) for name, dish in one.menu.items()}
    result.runners_up = sorted([*result.runners_up, *map(placed, one.runners_up)], key=lambda other: other.seconds)[:5]
    result.simulated += one.simulated


def _on_groups(candidate: ModelCandidate, groups: list[int], sizes: Sequence[int]) -> ModelCandidate:
    """A plan of equal meshes on the devices of some groups."""
    devices = [sum(sizes[:k]) + i for k in groups for i in range(sizes[k])]
    owner = [k for k in groups for _ in range(sizes[k])]
    size = candidate.variant.shape.dp * candidate.variant.shape.tp
    meshes = tuple(RankMesh(candidate.variant, rank * size, tuple(devices[rank * size:(rank + 1) * size]),
                            tuple(sorted(set(owner[rank * size:(rank + 1) * size]))))
                   for rank in range(candidate.variant.shape.pp))
    return replace(candidate, meshes=meshes)


def _groups_in_a_row(order: tuple[int, ...]) -> list[frozenset[int]]:
    """Groups that lie one behind the other in an order."""
    return [frozenset(order[a:b]) for a in range(len(order)) for b in range(a + 1, len(order) + 1)]
