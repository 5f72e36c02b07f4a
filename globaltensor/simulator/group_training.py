"""A step of training on a cluster of one kind of host, or on groups of different ones.

Devices are numbered group by group, and the pipeline goes through them in that order. A stage takes what it would on
hosts that have the least of those groups that it lies on (groups.py); what passes between two ranks of the pipeline
takes what it would on the slowest of both.
"""
from __future__ import annotations

from functools import cache
from itertools import pairwise

from globaltensor.schedules.schedule import Schedule
from globaltensor.simulator.cluster import Cluster
from globaltensor.simulator.costs import Costs, Hop
from globaltensor.simulator.gpt import GPT
from globaltensor.simulator.groups import ClusterGroups
from globaltensor.simulator.training import (
    SimulatedStep,
    StepCosts,
    TrainingPlan,
    plan_schedule,
    simulate_training,
    simulated_step,
    step_costs,
)


def simulate_on(gpt: GPT, plan: TrainingPlan, machines: Cluster | ClusterGroups, record: bool = False,
                own: Schedule | None = None) -> SimulatedStep:
    """As `simulate_training`. Raises ClusterError where there are fewer devices than the plan has."""
    if isinstance(machines, Cluster):
        return simulate_training(gpt, plan, machines, record, own)
    schedule, groups = plan_schedule(gpt, plan, own), groups_of_ranks(machines, plan)

    @cache
    def costs(of: frozenset[int]) -> StepCosts:
        return step_costs(gpt, plan, machines.alike(of), schedule.rank_of)

    by_stage = [costs(groups[rank]) for rank in schedule.rank_of]
    hops: list[Hop] = []
    for stage, (rank, other) in enumerate(pairwise(schedule.rank_of)):
        hops.append(costs(groups[rank] | groups[other]).costs.hops[stage])
    own_costs = [(one.costs, stage) for stage, one in enumerate(by_stage)]
    passes = Costs(tuple(of.forward[k] for of, k in own_costs), tuple(of.inputs[k] for of, k in own_costs),
                   tuple(of.weights[k] for of, k in own_costs), tuple(hops))
    step = StepCosts(
        by_stage[0].layers, by_stage[0].parts, passes,
        tuple(one.data[stage] for stage, one in enumerate(by_stage)),
        max((one.reduction for one in by_stage), key=lambda one: one.seconds),
        max((costs(a | b).transfer for a, b in pairwise(groups)), key=lambda one: one.seconds,
            default=by_stage[0].transfer))
    return simulated_step(gpt, plan, [machines.alike(of) for of in groups], schedule, step, record)


def groups_of_ranks(machines: ClusterGroups, plan: TrainingPlan) -> list[frozenset[int]]:
    """On which groups each rank of the pipeline lies."""
    owner = [k for k, size in enumerate(machines.first(plan.devices).sizes) for _ in range(size)]
    size = plan.dp * plan.tp
    return [frozenset(owner[rank * size:(rank + 1) * size]) for rank in range(plan.pp)]


def rooms_of_ranks(machines: Cluster | ClusterGroups, plan: TrainingPlan) -> list[float]:
    """Bytes of a device of each rank of the pipeline."""
    if isinstance(machines, Cluster):
        return [machines.memory] * plan.pp
    return [machines.alike(of).memory for of in groups_of_ranks(machines, plan)]


def peak_flops(machines: Cluster | ClusterGroups, plan: TrainingPlan) -> float:
    """Operations per second of all devices of a plan, by their data sheets."""
    if isinstance(machines, Cluster):
        return machines.flops * plan.devices
    owner = [k for k, size in enumerate(machines.sizes) for _ in range(size)]
    return sum(machines.groups[k].flops for k in owner[:plan.devices])
