"""Stages with meshes of their own, on one kind of host and on groups of different ones.

Oracle of the search: every pipeline of a small chain, by loops that know nothing of bounds. Of a plan: one process.
"""
from __future__ import annotations

import dataclasses
import itertools
import random
from math import gcd, inf

import numpy as np
import pytest
from test_strategy import SEED, mesh_costs

from globaltensor.planner.model_prices import ModelShape, ModelTask, ModelVariant, RankMesh
from globaltensor.planner.model_search import search_model
from globaltensor.planner.own_mesh_search import search_own_meshes
from globaltensor.planner.own_meshes import DeviceOrder, OwnMeshPrices
from globaltensor.planner.space import Fixed
from globaltensor.planner.whole_search import device_orders
from globaltensor.simulator.cluster import Cluster, Link
from globaltensor.simulator.groups import ClusterGroups

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-h2")


def small_groups(draw: random.Random, several: int) -> ClusterGroups:
    """Groups whose devices differ in speed, memory and links."""
    near, memory = 10 ** draw.uniform(8, 10), 10 ** draw.uniform(5, 7)
    groups = tuple(Cluster(
        f"group{k}", draw.choice([1, 2, 4]), 1e12 * draw.choice([1, 2, 4]), 0.5, memory * draw.choice([1, 2, 4]), 1e11,
        Link(1e-6, near * draw.choice([1, 3])), Link(1e-5, near / draw.choice([1, 10])), draw.choice([1, 2]),
        draw.choice([0, 1e-6]), draw.choice([0, 1e-6]), draw.choice([0, 1e-4])) for k in range(several))
    links = {pair: Link(1e-5, near / draw.choice([1, 30])) for pair in itertools.combinations(range(several), 2)}
    return ClusterGroups("small", groups, links)


class Case:
    """A chain of units with any costs, and groups of devices."""

    def __init__(self, seed: int, several: int, most_units: int = 4, most_devices: int = 4) -> None:
        draw = random.Random(seed)
        self.groups, self.units = small_groups(draw, several), draw.randint(2, most_units)
        self.seed, self.batch = seed, draw.choice([1, 2, 4, 6])
        self.sizes = [min(size, max(most_devices // several, 1)) for size in self.groups.sizes]
        self.fixed = Fixed(schedule=draw.choice([None, *SCHEDULES]), zero=draw.choice([None, None, 0, 3]))
        self.blocks = np.array([draw.random() < 0.7 for _ in range(self.units)])
        self.orders = list(itertools.permutations(range(several)))

    def task(self, groups: tuple[int, ...], sizes: list[int]) -> ModelTask:
        """The same work on the hosts of these groups."""
        draw = random.Random(self.seed + 1)
        one = self.groups.groups[groups[0]] if len(groups) == 1 else self.groups.slowest_of(groups, sizes)
        costs = {(tp, "whole" if tp == 1 else "recognised"): mesh_costs(draw, self.units, one, tp) for tp in (1, 2)}
        return ModelTask(costs, self.blocks, one, sum(sizes[k] for k in groups), self.batch, self.fixed)

    def device_orders(self, sizes: list[int] | None = None) -> list[DeviceOrder]:
        own = sizes or self.sizes
        parts = {frozenset(order[a:b]) for order in self.orders for a in range(len(order))
                 for b in range(a + 1, len(order) + 1)}
        return device_orders(own, self.orders, {part: self.task(tuple(sorted(part)), own) for part in parts},
                             self.groups.link)


def first_place(order: DeviceOrder, groups: frozenset[int], size: int, begin: int) -> int | None:
    """As documented: the first free devices that are of these groups, within a host or from a host's beginning on."""
    of = order.group_of
    hosts = [order.tasks[frozenset([group])].cluster.devices_per_host for group in groups]
    host = hosts[0] if len(groups) == 1 else gcd(*hosts, *(of.count(group) for group in groups))
    first = min(of.index(group) for group in groups)
    for place in range(max(begin, first), len(of) - size + 1):
        own = list(range(place, place + size))
        same = {(k - first) // host for k in own}
        if {of[k] for k in own} == set(groups) and (len(same) == 1 if size <= host else (place - first) % host == 0):
            return place
    return None


def every_pipeline(order: DeviceOrder, units: int, batch: int, fixed: Fixed):
    """All of two ranks and more: meshes and cuts."""
    for schedule, samples in itertools.product(SCHEDULES, range(1, batch + 1)):
        if fixed.schedule not in (None, schedule) or batch % samples:
            continue
        for pp in range(2, min(units, len(order.devices)) + 1):
            for meshes in ranks(order, samples, schedule, pp, fixed, 0, ()):
                for at in itertools.combinations(range(1, units), pp - 1):
                    yield meshes, tuple(b - a for a, b in itertools.pairwise((0, *at, units)))


def ranks(order: DeviceOrder, samples: int, schedule: str, pp: int, fixed: Fixed, begin: int, so_far):
    if len(so_far) == pp:
        yield so_far
        return
    for groups, dp, tp in itertools.product(order.tasks, range(1, samples + 1), (1, 2)):
        place = first_place(order, groups, dp * tp, begin)
        if samples % dp or place is None:
            continue
        for zero in range(4) if dp > 1 else (0,):
            if dp == 1 or fixed.zero in (None, zero):
                variant = ModelVariant(ModelShape(dp, tp, "whole" if tp == 1 else "recognised", pp, samples // dp),
                                       zero, schedule, 1)
                mesh = RankMesh(variant, place, order.devices[place:place + dp * tp], tuple(sorted(groups)))
                yield from ranks(order, samples, schedule, pp, fixed, place + dp * tp, (*so_far, mesh))


def compare_with_every_pipeline(seed: int, several: int) -> bool:
    """What the search finds is the fastest. Is it one of meshes of their own?"""
    case = Case(seed, several)
    orders = case.device_orders()
    tasks = {part: task for order in orders for part, task in order.tasks.items()}
    equal = [search_model(task, menu=False).best for task in tasks.values()]
    known = best = min((one.seconds for one in equal if one), default=inf)
    for order in orders:
        for meshes, cut in every_pipeline(order, case.units, case.batch, case.fixed):
            if several == 1 and len({mesh.variant for mesh in meshes}) == 1:
                continue                             # the search for equal meshes has these
            one = OwnMeshPrices(order, meshes).price(cut)
            if one.fits:
                best = min(best, one.seconds)
    result = search_own_meshes(orders, known, inf)
    assert (result.best.seconds if result.best else known) == pytest.approx(best, rel=1e-9), (seed, several)
    assert result.left == inf, "all that could win was tried"
    return result.best is not None


WON = (17, 54, 65, 86, 121, 145, 158, 183, 215, 264)  # cases in which meshes of their own are the fastest


def test_no_pipeline_is_faster_than_what_is_found():
    assert all(compare_with_every_pipeline(SEED + k, 1 + k % 2) for k in WON), "an own mesh is the fastest"
    for k in range(4):
        compare_with_every_pipeline(SEED + k, 1 + k % 2)


@pytest.mark.long
def test_no_pipeline_is_faster_in_a_thousand_cases():
    for k in range(1_000):
        compare_with_every_pipeline(100 * SEED + k, 1 + k % 2)


def test_more_devices_are_never_slower():
    for seed in range(SEED, SEED + 4):
        case = Case(seed, 2, 3, 4)

        def seconds(sizes, case=case) -> float:
            result = search_own_meshes(case.device_orders(sizes), inf, inf)
            return result.best.seconds if result.best else inf

        one = seconds(case.sizes)
        for k in range(2):
            sizes = [size + (k == j) * case.groups.groups[k].devices_per_host for j, size in enumerate(case.sizes)]
            assert seconds(sizes) <= one * (1 + 1e-9), (seed, k)


def test_equal_meshes_are_priced_as_by_the_search_for_these():
    case = Case(SEED, 1)
    order, = case.device_orders()
    task = order.tasks[frozenset([0])]
    result = search_model(dataclasses.replace(task, fixed=Fixed(dp=1, tp=1, pp=2, schedule="1f1b")))
    assert result.best is not None
    variant = result.best.variant
    meshes = tuple(RankMesh(variant, k, (k,), (0,)) for k in range(2))
    assert OwnMeshPrices(order, meshes).price(result.best.cut).seconds == pytest.approx(result.best.seconds)
