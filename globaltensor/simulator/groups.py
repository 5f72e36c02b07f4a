"""A cluster of several groups of hosts: the hosts of a group are alike, those of different groups need not be.

    {"groups": [{"name": "old", "cluster": "dgx-a100", "hosts": 1}, {"name": "new", "cluster": "dgx-h100", "hosts": 2}],
     "links": [{"between": ["old", "new"], "latency": 2e-5, "bandwidth": 1e10}]}

A group has the keys of a cluster (cluster.py) and says how many `hosts` it has; `cluster` names a known one, whose
values it has where it gives none of its own. Each pair of groups has a link: what a device receives from one of the
other group. Devices are numbered group by group, in the order of the file.

What runs on several groups at once pays for the slowest: `slowest_of` is the cluster that has the least of each.
"""
from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import combinations
from math import gcd
from pathlib import Path
from typing import Any

from globaltensor.runtime.machine import TRANSPORTS
from globaltensor.simulator.cluster import (
    KERNEL_KINDS,
    KNOWN,
    Cluster,
    ClusterError,
    KernelRate,
    Link,
    checked_number,
    cluster,
    cluster_from_json,
)


@dataclasses.dataclass(frozen=True)
class ClusterGroups:
    """Groups of hosts, each a cluster with so many hosts, and the link between each two of them."""

    name: str
    groups: tuple[Cluster, ...]
    links: dict[tuple[int, int], Link] = dataclasses.field(default_factory=dict)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each group."""
        return tuple(one.hosts * one.devices_per_host for one in self.groups)

    @property
    def devices(self) -> int:
        return sum(self.sizes)

    def link(self, one: int, other: int) -> Link:
        """Between two groups."""
        return self.links[min(one, other), max(one, other)]

    def first(self, devices: int) -> ClusterGroups:
        """The first so many devices of it. Raises ClusterError where it has fewer."""
        if devices > self.devices:
            raise ClusterError(f"{devices} devices of {self.name}", f"it has {self.devices}: " + ", ".join(
                f"{size} of {one.name}" for one, size in zip(self.groups, self.sizes)), f"devices={self.devices}")
        return self

    def with_memory(self, nbytes: float) -> ClusterGroups:
        """The same with so many bytes on each device."""
        return dataclasses.replace(self, groups=tuple(dataclasses.replace(one, memory=nbytes) for one in self.groups))

    def names(self, groups: Iterable[int]) -> str:
        """As they are printed: `old + new`."""
        return " + ".join(self.groups[k].name for k in sorted(groups))

    def alike(self, several: Iterable[int]) -> Cluster:
        """What lies on these groups, as if all hosts were so: the least of them, with any number of hosts. Devices are
        numbered through all groups, so hosts are as large as fits into that numbering."""
        own = sorted(several)
        one = self.groups[own[0]] if len(own) == 1 else self.slowest_of(own, self.sizes)
        host = gcd(one.devices_per_host, sum(self.sizes[:own[0]]))
        return dataclasses.replace(one, devices_per_host=host, hosts=0)

    def slowest_of(self, several: Sequence[int], sizes: Sequence[int]) -> Cluster:
        """The cluster that has the least of these groups, of which so many devices are used. Its hosts are as large as
        fits into all of them, so that what lies within one of its hosts lies within one of theirs."""
        of = [self.groups[k] for k in several]
        between = [self.link(a, b) for a, b in combinations(several, 2)]
        host = gcd(*(one.devices_per_host for one in of), *(sizes[k] for k in several))
        total = sum(sizes[k] for k in several)
        return Cluster(
            self.names(several), host, min(one.flops * one.efficiency for one in of), 1.0,
            min(one.memory for one in of), min(one.memory_bandwidth for one in of),
            _slowest_link([one.local for one in of]), _slowest_link([*(one.remote for one in of), *between]),
            total // host, max(one.kernel_launch for one in of), max(one.micro_batch_overhead for one in of),
            max(one.step_overhead for one in of), _slowest_kernels(of),
            min((one.transport for one in of), key=lambda name: TRANSPORTS[name].bandwidth),
            min((max(one.cores * host // one.devices_per_host, 1) for one in of if one.cores), default=0))


def _slowest_link(several: Sequence[Link]) -> Link:
    return Link(max(one.latency for one in several), min(one.bandwidth for one in several))


def _slowest_kernels(of: Sequence[Cluster]) -> tuple[KernelRate, ...]:
    """The slowest rates, where they were measured on every group; else all of them are told by the data sheets."""
    if not all(one.kernels for one in of):
        return ()
    rates = [one.rates_of_kinds for one in of]
    return tuple(KernelRate(kind, *(float(max(rate[k][part] for rate in rates)) for part in range(3)))
                 for k, kind in enumerate(KERNEL_KINDS))


def with_memory(machines: Cluster | ClusterGroups, nbytes: float) -> Cluster | ClusterGroups:
    """The same with so many bytes on each device."""
    return (machines.with_memory(nbytes) if isinstance(machines, ClusterGroups) else
            dataclasses.replace(machines, memory=nbytes))


def read_cluster(name: str) -> Cluster | ClusterGroups:
    """A known cluster by its name, or the one that a JSON file describes, of one kind of host or of several groups."""
    described: Any = None
    if name not in KNOWN and os.path.exists(name):
        try:
            described = json.loads(Path(name).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError):
            described = None                         # `cluster` says what is wrong with it
    if not isinstance(described, dict) or "groups" not in described:
        return cluster(name)
    return _groups_from_json(described, name)


_A_LINK = '"links": [{"between": ["old", "new"], "latency": 2e-5, "bandwidth": 1e10}]'


def _groups_from_json(described: dict[str, Any], source: str) -> ClusterGroups:
    for key in described:
        if key not in ("name", "groups", "links"):
            raise ClusterError(f"{source}: a cluster of groups has no {key!r}", "it has name, groups, links",
                               *difflib.get_close_matches(key, ("name", "groups", "links"), 1, 0.4))
    several = described["groups"]
    if not isinstance(several, list) or not several:
        raise ClusterError(f"{source}: groups is {several!r:.60}", "it is a list of groups, one at least",
                           '"groups": [{"name": "old", "cluster": "dgx-a100", "hosts": 1}, ...]')
    groups = tuple(_group_from_json(one, f"{source}: groups[{k}]") for k, one in enumerate(several))
    names = [one.name for one in groups]
    if twice := next((name for k, name in enumerate(names) if name in names[:k]), None):
        raise ClusterError(f"{source}: two groups are called {twice!r}", "links name groups", '"name": ...')
    links: dict[tuple[int, int], Link] = {}
    for k, one in enumerate(described.get("links", [])):
        pair, link = _link_from_json(one, names, f"{source}: links[{k}]", source)
        if links.setdefault(pair, link) != link:
            raise ClusterError(f"{source}: links[{k}] is another one between {names[pair[0]]} and {names[pair[1]]}",
                               "a pair of groups has one link", "one of them")
    for a, b in combinations(range(len(groups)), 2):
        if (a, b) not in links:
            raise ClusterError(f"{source} has no link between {names[a]} and {names[b]}", "a stage of one group passes "
                               "on to one of another over it", _A_LINK.replace("old", names[a]).replace(
                                   "new", names[b]))
    return ClusterGroups(str(described.get("name", Path(source).stem)), groups, links)


def _group_from_json(described: Any, where: str) -> Cluster:
    if not isinstance(described, dict):
        raise ClusterError(f"{where} is {described!r:.60}", "a group is an object with the keys of a cluster",
                           '{"name": "old", "cluster": "dgx-a100", "hosts": 1}')
    own = dict(described)
    like = own.pop("cluster", None)
    if like is not None and like not in KNOWN:
        raise ClusterError(f"{where}: there is no cluster {like!r}", f"the known ones are {', '.join(KNOWN)}",
                           *difflib.get_close_matches(str(like), KNOWN, 1, 0.3))
    if "name" not in own:
        raise ClusterError(f"{where} has no name", "links, and the stages of a plan, name groups", '"name": "old"')
    if like is not None:
        own = dataclasses.asdict(KNOWN[like]) | own
    one = cluster_from_json(own, where)
    if one.hosts < 1:
        raise ClusterError(f"{where} does not say how many hosts it has", "devices are numbered group by group",
                           '"hosts": 1')
    return one


def _link_from_json(described: Any, names: list[str], where: str, source: str) -> tuple[tuple[int, int], Link]:
    ends = described.get("between") if isinstance(described, dict) else None
    if not isinstance(ends, list) or len(ends) != 2 or ends[0] == ends[1] or not set(map(str, ends)) <= set(names):
        strange = next((str(end) for end in ends if end not in names), "") if isinstance(ends, list) else ""
        raise ClusterError(f"{where} is between {ends!r:.60}", f"it names two of the groups {', '.join(names)}",
                           *(difflib.get_close_matches(strange, names, 1, 0.3) or [_A_LINK]))
    latency, bandwidth = (checked_number(described.get(rate), f"{where.removeprefix(f'{source}: ')}.{rate}", source)
                          for rate in ("latency", "bandwidth"))
    a, b = sorted(map(names.index, ends))
    return (a, b), Link(latency, bandwidth)
