"""What a plan takes, by the simulator.

Less recomputation is never slower, as no time that a simulation adds up is longer. So once a variant is cut into stages
nothing remains to be chosen: each rank of the pipeline recomputes the least with which its memory is enough.
"""
from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from globaltensor.planner.space import Fixed, Variant
from globaltensor.schedules.check import peak_activations
from globaltensor.schedules.generators import generate
from globaltensor.schedules.schedule import Schedule, loop, vee
from globaltensor.simulator.cluster import Cluster
from globaltensor.simulator.engine import simulate
from globaltensor.simulator.gpt import GPT
from globaltensor.simulator.training import TrainingPlan, end_of_step, rank_memory, step_costs

_SCHEDULES_KEPT = 64
_IN_VEE = ("zb-v", "dualpipe-v")


@dataclass(frozen=True, eq=False)
class Task:
    """What is to be planned: a model, a cluster, how many of its devices, samples in a step, and what is fixed."""

    gpt: GPT
    cluster: Cluster
    devices: int
    global_batch: int
    fixed: Fixed = Fixed()


class Candidate(NamedTuple):
    """A plan with its price: seconds of a step, bytes of each rank of the pipeline."""

    seconds: float
    plan: TrainingPlan
    memory: tuple[float, ...]

    @property
    def fullest(self) -> float:
        """Bytes of the rank with the most."""
        return max(self.memory)


def rank_of_stages(variant: Variant) -> tuple[int, ...]:
    """The rank of the pipeline that each stage is on."""
    return vee(variant.shape.pp) if variant.schedule in _IN_VEE else loop(variant.shape.pp, variant.chunks)


def training_plan(task: Task, variant: Variant, cut: tuple[int, ...] = (),
                  recompute: tuple[str, ...] | str = "none") -> TrainingPlan:
    """A variant and its cut as the simulator has it."""
    shape = variant.shape
    return TrainingPlan(shape.micro_batch, task.global_batch, shape.dp, shape.tp, shape.pp, variant.schedule,
                        variant.chunks, variant.zero, recompute, shape.sequence_parallel, cut)


@lru_cache(_SCHEDULES_KEPT)
def schedule_of(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """As `generate`; kept, since many plans differ in sizes alone."""
    return generate(name, ranks, micro_batches, chunks)


@lru_cache(2_000)
def peaks_of(name: str, ranks: int, micro_batches: int, chunks: int) -> tuple[Fraction, ...]:
    """The activations that each rank keeps at its peak, in units of all of its stages' for one micro-batch: those of
    `peak_activations`, in closed form where there is one."""
    p, m, v = ranks, micro_batches, chunks
    first_group = -(-m // max(m // p, 1))            # micro-batches that pass the first chunk before the second
    ahead_of = {"1f1b": lambda r: p - 1 - r, "interleaved": lambda r: (v - 1) * first_group + 2 * (p - 1 - r),
                "zb-h1": lambda r: (v - 1) * first_group + p - 1, "zb-h2": lambda r: 2 * (p - 1)}
    if name in ("gpipe", "bfs"):
        return (Fraction(m),) * p
    if name in ahead_of:
        return tuple(Fraction(min(m * v, ahead_of[name](r) + 1), v) for r in range(p))
    return tuple(peak_activations(schedule_of(name, p, m, v)))


def price_cut(task: Task, variant: Variant, cut: tuple[int, ...], recompute: tuple[str, ...]) -> Candidate:
    """The plan that cuts a variant so, simulated."""
    plan = training_plan(task, variant, cut, recompute)
    step = step_costs(task.gpt, plan, task.cluster, rank_of_stages(variant))
    schedule = schedule_of(variant.schedule, plan.pp, plan.micro_batches, variant.chunks)
    ends, _ = end_of_step(simulate(schedule, step.costs), plan, [task.cluster] * plan.pp, step)
    peaks = peaks_of(variant.schedule, plan.pp, plan.micro_batches, variant.chunks)
    memory = zip(*rank_memory(task.gpt, plan, step, schedule.stages_of, peaks))
    return Candidate(max(end.total for end in ends), plan, tuple(states + kept for states, kept in memory))
