"""The fastest plan of a GPT, by its sizes, on a cluster of one kind of host or on groups of different ones.

Where there are groups, a plan lies on one of them, or on several that follow each other in the file; then all of it
takes what it would on the slowest of these (groups.py). Each is searched by itself, and the fastest is the plan.
"""
from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

from globaltensor.planner.pricing import Task
from globaltensor.planner.report import strategy_of
from globaltensor.planner.search import SearchResult, search
from globaltensor.planner.space import BatchError, Fixed
from globaltensor.planner.strategy import Strategy
from globaltensor.simulator.cluster import Cluster
from globaltensor.simulator.gpt import GPT
from globaltensor.simulator.groups import ClusterGroups


class GptPlan(NamedTuple):
    """What a search gives: what was planned, on the hosts that the best plan lies on, and the strategy."""

    task: Task
    result: SearchResult
    strategy: Strategy


def plan_gpt(gpt: GPT, machines: Cluster | ClusterGroups, devices: int, global_batch: int, fixed: Fixed,
             seconds: float) -> GptPlan:
    """Raises BatchError where there is no plan at all, ClusterError where the cluster has fewer devices."""
    began = time.monotonic()
    if isinstance(machines, Cluster):
        machines.machine(devices)                    # raises where it has fewer
        task = Task(gpt, machines, devices, global_batch, fixed)
        result = search(task, seconds)
        return GptPlan(task, result, strategy_of(task, result, time.monotonic() - began))
    runs, left = _runs_of_groups(machines.first(devices), devices), seconds
    searched: list[tuple[list[int], Task, SearchResult]] = []
    failed: list[BatchError] = []
    for k, groups in enumerate(runs):
        used = _used_of_groups(machines, devices)
        task = Task(gpt, _cluster_of(machines, groups), sum(used[g] for g in groups), global_batch, fixed)
        try:
            searched.append((groups, task, search(task, max(left, 0.0) / (len(runs) - k))))
        except BatchError as error:                  # such as more ranks than these groups have
            failed.append(error)
        left = seconds - (time.monotonic() - began)
    if not searched:
        raise failed[-1]
    groups, task, result = min(searched, key=lambda one: one[2].best.seconds if one[2].best else float("inf"))
    least = min(other.lower_bound for _, _, other in searched)
    result.lower_bound, result.weighed = least, sum(other.weighed for _, _, other in searched)
    strategy = strategy_of(task, result, time.monotonic() - began)
    first = sum(machines.sizes[:groups[0]])
    strategy |= {"devices": devices, "cluster": machines.name}
    for stage in strategy.get("stages", []):
        stage["ranks"] = [first + rank for rank in stage["ranks"]]
        stage["group"] = machines.names(groups)
    return GptPlan(task, result, strategy)


def _used_of_groups(machines: ClusterGroups, devices: int) -> list[int]:
    """Devices of each group, of the first so many."""
    ends = [min(sum(machines.sizes[:k]), devices) for k in range(len(machines.sizes) + 1)]
    return [b - a for a, b in zip(ends, ends[1:])]


def _runs_of_groups(machines: ClusterGroups, devices: int) -> list[list[int]]:
    """Groups that follow each other; all of them last."""
    used = [k for k, size in enumerate(_used_of_groups(machines, devices)) if size]
    return sorted((used[a:b] for a in range(len(used)) for b in range(a + 1, len(used) + 1)), key=len)


def _cluster_of(machines: ClusterGroups, groups: list[int]) -> Cluster:
    one = machines.alike(groups)
    return replace(one, hosts=sum(machines.sizes[k] for k in groups) // one.devices_per_host)
