"""Pipelines in which each rank has a mesh of its own: where it may lie, and what it takes there.

    rank of the pipeline    dp x tp under a plan along tp, a stage of ZeRO, and devices of its own: a `RankMesh`
    order                   the devices as the pipeline goes through them, group by group. A rank lies on the first free
                            ones on which it may: within a host where it fits into one, else from a host's beginning on
    groups                  what a rank takes is priced on the hosts that it lies on: of several groups, on the slowest

All ranks work on the same samples: a micro-batch of `samples`, of which a rank of dp has its part.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from globaltensor.planner.model_prices import ModelShape, ModelTask, ModelVariant, RankMesh, VariantPrices
from globaltensor.simulator.cluster import Link
from globaltensor.simulator.costs import Hop


@dataclass(frozen=True, eq=False)
class DeviceOrder:
    """Devices in the order of the pipeline. `group_of`: of each place; `tasks`: by groups, what plans take on hosts of
    these; `link`: between two groups."""

    devices: tuple[int, ...]
    group_of: tuple[int, ...]
    tasks: Mapping[frozenset[int], ModelTask]
    link: Callable[[int, int], Link]
    _prices: dict[tuple[frozenset[int], ModelVariant], VariantPrices] = field(default_factory=dict)

    @cached_property
    def group_sets(self) -> tuple[frozenset[int], ...]:
        """Groups that lie one behind the other: what a rank may lie on."""
        runs = list(dict.fromkeys(self.group_of))
        return tuple(frozenset(runs[a:b]) for a in range(len(runs)) for b in range(a + 1, len(runs) + 1))

    @cached_property
    def _first_of_group(self) -> dict[int, int]:
        return {group: self.group_of.index(group) for group in dict.fromkeys(self.group_of)}

    @cached_property
    def fastest(self) -> Link:
        """The least latency and the most bandwidth of any link."""
        runs = list(dict.fromkeys(self.group_of))
        links = [self.link(a, b) for a in runs for b in runs if a != b]
        links += [link for task in self.tasks.values() for link in (task.cluster.local, task.cluster.remote)]
        return Link(min(link.latency for link in links), max(link.bandwidth for link in links))

    def first_place(self, groups: frozenset[int], size: int, begin: int) -> int | None:
        """The first place from `begin` on at which a rank of so many devices lies on exactly these groups."""
        first = min(self._first_of_group[group] for group in groups)
        host = self.tasks[groups].cluster.devices_per_host
        for place in range(max(begin, first), len(self.devices) - size + 1):
            offset = place - first
            fits = (offset // host == (offset + size - 1) // host) if size <= host else offset % host == 0
            if fits and frozenset(self.group_of[place:place + size]) == groups:
                return place
        return None

    def meshes(self, groups: frozenset[int], samples: int, schedule: str, pp: int) -> Iterator[ModelVariant]:
        """What a rank may be on these groups, as far as it is not fixed."""
        task = self.tasks[groups]
        fixed = task.fixed
        for tp, kind in task.costs:
            if not (fixed.allows("tp", tp) and fixed.allows("kind", kind)
                    and ("sequence_parallel", kind == "sequence") not in fixed.excluded):
                continue
            for dp in range(1, len(self.devices) // tp + 1):
                if samples % dp or not (fixed.allows("dp", dp) and fixed.allows("micro_batch", samples // dp)):
                    continue
                for zero in range(4) if dp > 1 else (0,):
                    if dp == 1 or fixed.allows("zero", zero):
                        yield ModelVariant(ModelShape(dp, tp, kind, pp, samples // dp), zero, schedule, 1)

    def prices(self, groups: frozenset[int], variant: ModelVariant) -> VariantPrices:
        """Of a rank there."""
        key = groups, variant
        if key not in self._prices:
            self._prices[key] = VariantPrices(self.tasks[groups], variant, len(self.devices))
        return self._prices[key]

    def mesh(self, groups: frozenset[int], variant: ModelVariant, place: int) -> RankMesh:
        size = variant.shape.dp * variant.shape.tp
        return RankMesh(variant, place, self.devices[place:place + size], tuple(sorted(groups)))

    def link_between(self, one: RankMesh, other: RankMesh) -> Link:
        """The slowest between two ranks of the pipeline."""
        groups = frozenset(one.groups) | frozenset(other.groups)
        if len(groups) == 1:
            cluster, (group,) = self.tasks[groups].cluster, groups
            hosts = {(mesh.first - self._first_of_group[group] + k) // cluster.devices_per_host
                     for mesh in (one, other) for k in (0, len(mesh.ranks) - 1)}
            return cluster.local if len(hosts) == 1 else cluster.remote
        links = [self.link(a, b) for a in one.groups for b in other.groups if a != b]
        links += [self.tasks[frozenset([a])].cluster.remote for a in one.groups for b in other.groups if a == b]
        return Link(max(link.latency for link in links), min(link.bandwidth for link in links))


class OwnMeshPrices(VariantPrices):
    """The numbers of a pipeline whose ranks have these meshes."""

    def __init__(self, order: DeviceOrder, meshes: tuple[RankMesh, ...]) -> None:
        first = meshes[0]
        super().__init__(order.tasks[frozenset(first.groups)], first.variant, len(order.devices))
        self.order, self.meshes = order, meshes
        self.of_ranks = [order.prices(frozenset(one.groups), one.variant) for one in meshes]

    def of_rank(self, rank: int) -> VariantPrices:
        return self.of_ranks[rank]

    def hop(self, unit: int, rank: int, other: int) -> Hop:
        """A rank sends what it has, and one of the next receives what it takes: the larger of both."""
        link = self.order.link_between(self.meshes[rank], self.meshes[other])
        nbytes = max(float(self.of_ranks[r].of.passed[unit]) for r in (rank, other))
        return Hop(link.latency, nbytes / link.bandwidth)
