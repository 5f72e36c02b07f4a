"""A step of training on a described cluster: a GPT, a plan (dp x tp x pp) and a schedule, turned into times and bytes.

Devices are numbered with tp innermost, then dp, then pp: a tensor-parallel group is within a host where it fits. The
communication is what this library would do: every transfer is a boxing, and its steps, seconds and bytes come from
`boxings.plan` at the cluster's rates.

    within a layer       2 all-reductions of the activations forward and 2 back, on tp
    between stages       the output [b s, h] to the next stage's ranks, its gradient back
    at the end           gradients P -> B on dp (ZeRO: P -> S(0), and the new parameters S(0) -> B), concurrent with
                         the backwards of other stages, once a stage has done its last; until then gradients are whole.
                         ZeRO 2 and 3 of one stage: P -> S(0) for every micro-batch, if more than gt.zero lets wait
    ZeRO 3               before every F, and again before every B or I, the stage's parameters S(0) -> B on dp, a layer
                         at a time and one layer ahead. What a layer takes is the slower of its pass and of gathering
                         the next; W, computed from activations and gradients alone, needs none. At the end gradients
                         P -> S(0), and nothing else

All replicas of dp do the same at the same time, and so do the ranks of tp: one pipeline is simulated for all of them.
Stages have as many layers each as can be, or as many as the plan says; what is recomputed may differ between the ranks
of a pipeline, as the first ones keep more micro-batches. Left out: lookups, norms of gradients, sums of split losses.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

from globaltensor.boxings.plan import BoxingPlan, bytes_received, plan as plan_boxing, plan_bytes
from globaltensor.errors import ShapeError
from globaltensor.layouts.layout import Shape, layout
from globaltensor.layouts.placement import placement
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.regions import split_range
from globaltensor.layouts.sbp import Sbp, broadcast, partial_sum, split
from globaltensor.runtime.machine import Machine
from globaltensor.schedules.check import peak_activations
from globaltensor.schedules.communication import routes
from globaltensor.schedules.generators import generate
from globaltensor.schedules.schedule import Schedule
from globaltensor.simulator.cluster import Cluster, hypothetical_placements
from globaltensor.simulator.costs import Costs, Hop
from globaltensor.simulator.engine import SimulatedRun, simulate
from globaltensor.simulator.gpt import GPT
from globaltensor.simulator.memory import model_bytes, model_states, splits_gradients_early
from globaltensor.simulator.stage_times import PassTimes, layer_times, output_times, with_gathers


@dataclass(frozen=True)
class TrainingPlan:
    """How a GPT is trained: ranks per axis, batch, schedule, and what is recomputed or sharded to save memory.

    recompute   none, selective or full; or a tuple with one of these for each rank of the pipeline
    layers      of each stage (default: as even as possible, the first stages having one more)
    """

    micro_batch: int
    global_batch: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    zero: int = 0
    recompute: str | tuple[str, ...] = "full"
    sequence_parallel: bool = False
    layers: tuple[int, ...] = ()

    @property
    def recompute_of_ranks(self) -> tuple[str, ...]:
        """For each rank of the pipeline."""
        return (self.recompute,) * self.pp if isinstance(self.recompute, str) else self.recompute

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def micro_batches(self) -> int:
        """Of each pipeline."""
        count, rest = divmod(self.global_batch, self.micro_batch * self.dp)
        if rest or not count:
            raise ShapeError(f"a global batch of {self.global_batch} for {self.dp} pipelines in micro-batches of "
                             f"{self.micro_batch}", "all pipelines have equally many micro-batches",
                             f"--global-batch {max(count, 1) * self.micro_batch * self.dp}")
        return count


@dataclass(frozen=True)
class TransferCost:
    """What one device receives, in a step or in one transfer: bytes (`crossing`: those of them from another stage) and
    seconds. Transfers one after the other add up: `a + b`, `a * 3`."""

    seconds: float = 0.0
    bytes: int = 0
    latency: float = 0.0
    crossing: int = 0

    def __add__(self, other: TransferCost) -> TransferCost:
        return TransferCost(self.seconds + other.seconds, self.bytes + other.bytes, self.latency + other.latency,
                            self.crossing + other.crossing)

    def __mul__(self, times: int) -> TransferCost:
        return TransferCost(self.seconds * times, self.bytes * times, self.latency * times, self.crossing * times)


class DataParallelCost(NamedTuple):
    """What data parallelism transfers for a stage: parameters before each use of them, and once at the end. `gathers`:
    seconds of the former, for each part of the stage."""

    use: TransferCost
    end: TransferCost
    gathers: list[float]


class RankEnd(NamedTuple):
    """Seconds of a step on one rank of the pipeline: all of it; after its last action the reductions; the optimizer,
    and what a step takes besides."""

    total: float
    reductions: float
    optimizer: float


@dataclass(frozen=True)
class SimulatedStep:
    """What a step of training takes. `seconds` includes reductions and the optimizer; memory is in bytes."""

    run: SimulatedRun
    plan: TrainingPlan
    seconds: float
    operations: Fraction
    states: list[float]                               # per pipeline rank; with ZeRO 3 its largest stage gathered
    activations: list[float]                          # per pipeline rank, at its peak
    per_micro_batch: list[float]                      # per pipeline rank, activations of one micro-batch
    tensor: TransferCost                              # of the stage that transfers most, in a step
    stage: TransferCost                               # one transfer between stages
    data: TransferCost                                # gradients and parameters of the busiest rank, in a step
    rank_ends: list[RankEnd]                          # per pipeline rank


@lru_cache(256)
def _machine_of(cluster: Cluster, devices: int) -> Machine:
    return cluster.machine(devices)


@dataclass(frozen=True)
class StepCosts:
    """What a step adds up, before it is known in which order: for each stage its layers, the parameters of its parts,
    the seconds of its actions, and what data parallelism transfers; a reduction on tp; the slowest hop."""

    layers: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    costs: Costs
    data: tuple[DataParallelCost, ...]
    reduction: TransferCost
    transfer: TransferCost


def simulate_training(gpt: GPT, plan: TrainingPlan, cluster: Cluster, record: bool = False,
                      own: Schedule | None = None) -> SimulatedStep:
    """Simulate one step, of the plan's schedule or of one's own."""
    schedule = plan_schedule(gpt, plan, own)
    step = step_costs(gpt, plan, cluster, schedule.rank_of)
    return simulated_step(gpt, plan, [cluster] * plan.pp, schedule, step, record)


def plan_schedule(gpt: GPT, plan: TrainingPlan, own: Schedule | None) -> Schedule:
    """The plan's schedule, or one's own. Raises ShapeError where it, or the plan, does not fit."""
    gpt.check_tensor_parallel(plan.tp)
    schedule = own or generate(plan.schedule, plan.pp, plan.micro_batches, plan.chunks)
    if (schedule.ranks, m := schedule.micro_batches) != (plan.pp, plan.micro_batches):
        raise ShapeError(f"{schedule.name} has {schedule.ranks} ranks and {m} micro-batches", f"the plan has {plan.pp} "
                         f"and {plan.micro_batches}", f"--pp {schedule.ranks} "
                         f"--global-batch {m * plan.micro_batch * plan.dp}")
    if gpt.layers < schedule.stages:
        raise ShapeError(f"{gpt.layers} layers in {schedule.stages} stages", "a stage has at least one layer",
                         f"--pp {gpt.layers // schedule.chunks or 1}, or fewer chunks")
    return schedule


def simulated_step(gpt: GPT, plan: TrainingPlan, clusters: Sequence[Cluster], schedule: Schedule, step: StepCosts,
                   record: bool) -> SimulatedStep:
    """A step whose costs are known; `clusters`: where each rank of the pipeline is."""
    run = simulate(schedule, step.costs, record)
    ends, data = end_of_step(run, plan, clusters, step)
    states, activations = rank_memory(gpt, plan, step, schedule.stages_of, peak_activations(schedule))
    by_rank = list(zip(schedule.stages_of, plan.recompute_of_ranks))
    per_micro_batch = [float(_kept_of_micro_batch(gpt, plan, step, *own)) for own in by_rank]
    reductions = max(sum(step.layers[stage] for stage in stages) * (6 if recompute == "full" else 4)
                     for stages, recompute in by_rank)
    return SimulatedStep(run, plan, max(end.total for end in ends), _operations(gpt, plan, step, schedule), states,
                         activations, per_micro_batch, step.reduction * (reductions * plan.micro_batches),
                         step.transfer, data, ends)


def _operations(gpt: GPT, plan: TrainingPlan, step: StepCosts, schedule: Schedule) -> Fraction:
    """Of one iteration, with what each rank recomputes."""
    one, batch = replace(gpt, layers=1), plan.global_batch
    again = {kind: one.operations(batch, kind) - one.operations(batch, "none") for kind in set(plan.recompute_of_ranks)}
    return gpt.operations(plan.global_batch, "none") + sum(
        step.layers[stage] * again[plan.recompute_of_ranks[rank]] for stage, rank in enumerate(schedule.rank_of))


def step_costs(gpt: GPT, plan: TrainingPlan, cluster: Cluster, rank_of: tuple[int, ...]) -> StepCosts:
    """What the stages of a plan take, where stage s is on rank `rank_of[s]` of the pipeline."""
    layers = plan.layers or tuple(stop - start for start, stop in (
        split_range(gpt.layers, len(rank_of), s) for s in range(len(rank_of))))
    if len(layers) != len(rank_of) or sum(layers) != gpt.layers or min(layers) < 1:
        raise ShapeError(f"stages of {', '.join(map(str, layers))} layers", f"there are {len(rank_of)} stages with at "
                         f"least one layer each, and {gpt.layers} layers", "no `layers`: as even as possible")
    if len(plan.recompute_of_ranks) != plan.pp:
        raise ShapeError(f"recompute for {len(plan.recompute_of_ranks)} ranks of a pipeline", f"it has {plan.pp}",
                         'one for each, or one for all: "full"')
    parts = _stage_parts(gpt, plan.tp, layers)
    with hypothetical_placements():
        machine = _machine_of(cluster, plan.devices)
        reduction, hops, transfer = transfer_costs(gpt, plan, machine, rank_of)
        by_parts = {one: _data_parallel_cost(plan, machine, one) for one in set(parts)}
    data = tuple(by_parts[one] for one in parts)
    return StepCosts(layers, parts, _costs(gpt, plan, cluster, layers, rank_of, reduction, hops, data), data,
                     reduction, transfer)


def _kept_of_layer(gpt: GPT, plan: TrainingPlan, recompute: str) -> Fraction:
    """Bytes of activations that a rank keeps of a layer for a micro-batch."""
    return gpt.activations_per_layer(plan.micro_batch, plan.tp, plan.sequence_parallel, recompute)


def _kept_of_micro_batch(gpt: GPT, plan: TrainingPlan, step: StepCosts, stages: Sequence[int],
                         recompute: str) -> Fraction:
    """Bytes of activations that the rank with these stages keeps for a micro-batch."""
    loss = gpt.logits_bytes(plan.micro_batch, plan.tp) if len(step.layers) - 1 in stages else 0
    return sum(step.layers[stage] for stage in stages) * _kept_of_layer(gpt, plan, recompute) + loss


def rank_memory(gpt: GPT, plan: TrainingPlan, step: StepCosts, stages_of: Sequence[Sequence[int]],
                peaks: Sequence[Fraction]) -> tuple[list[float], list[float]]:
    """Bytes of each rank of the pipeline: for parameters, gradients and optimizer; for activations, whose `peaks` are
    in units of all that a rank keeps of one micro-batch."""
    states = [model_bytes(plan, [step.parts[stage] for stage in stages]) for stages in stages_of]
    activations = []
    for stages, peak, recompute in zip(stages_of, peaks, plan.recompute_of_ranks):
        # With full recomputation the layer that is being recomputed has all its activations, beside the kept inputs.
        again = _kept_of_layer(gpt, plan, "none") if recompute == "full" else 0
        activations.append(float(peak * _kept_of_micro_batch(gpt, plan, step, stages, recompute) + again))
    return states, activations


def _costs(gpt: GPT, plan: TrainingPlan, cluster: Cluster, layers: Sequence[int], rank_of: tuple[int, ...],
           reduction: TransferCost, hops: tuple[Hop, ...], data_costs: Sequence[DataParallelCost]) -> Costs:
    """Seconds of each action of each stage, including those in which it waits for what it gathers or reduces."""
    times = {recompute: layer_times(gpt, cluster, plan.micro_batch, plan.tp, plan.sequence_parallel, recompute,
                                    reduction.seconds) for recompute in set(plan.recompute_of_ranks)}
    of_stage = [times[plan.recompute_of_ranks[rank]] for rank in rank_of]
    output = output_times(gpt, cluster, plan.micro_batch, plan.tp)
    last = len(layers) - 1
    forward, inputs, weights = (
        [[0.0] * (stage == 0) + [own[kind]] * n + [output[kind]] * (stage == last)
         for stage, (n, own) in enumerate(zip(layers, of_stage))]
        for kind in range(len(PassTimes._fields)))    # of each stage, its parts: embeddings, layers, output
    more = cluster.micro_batch_overhead * plan.pp / len(layers) / 2
    return Costs(tuple(with_gathers(own, of.gathers) + more for own, of in zip(forward, data_costs)),
                 tuple(with_gathers(own[::-1], of.gathers[::-1]) + more for own, of in zip(inputs, data_costs)),
                 tuple(map(sum, weights)), hops)


def _boxing_cost(src_ranks: list[int], dst_ranks: list[int], before: Sbp, after: Sbp, shape: Shape,
                 machine: Machine) -> TransferCost:
    """What a boxing takes as this library plans it, at 16 bits an element."""
    src, dst, by_hosts = _counted_ranks(src_ranks, dst_ranks, machine)
    return _planned_cost(src, dst, before, after, shape, by_hosts)


def _counted_ranks(src_ranks: list[int], dst_ranks: list[int],
              machine: Machine) -> tuple[tuple[int, ...], tuple[int, ...], Machine]:
    """Ranks counted from 0, on a machine of their own. They count by the hosts that they are on alone, so boxings
    between all stages of a pipeline are priced once."""
    ranks, hosts = sorted({*src_ranks, *dst_ranks}), dict[int, int]()
    number = {rank: i for i, rank in enumerate(ranks)}
    of_hosts = tuple(hosts.setdefault(machine.hosts[rank], len(hosts)) for rank in ranks)
    src, dst = (tuple(number[rank] for rank in own) for own in (src_ranks, dst_ranks))
    return src, dst, replace(machine, hosts=of_hosts)


def _planned_route(src_ranks: tuple[int, ...], dst_ranks: tuple[int, ...], before: Sbp, after: Sbp, shape: Shape,
                   machine: Machine) -> BoxingPlan:
    src, dst = (layout(placement("meta", list(ranks)), (sbp,))
                for ranks, sbp in ((src_ranks, before), (dst_ranks, after)))
    return plan_boxing(src, dst, shape, 2 * prod(shape), machine)


@remembered
def _planned_cost(src_ranks: tuple[int, ...], dst_ranks: tuple[int, ...], before: Sbp, after: Sbp, shape: Shape,
                  machine: Machine) -> TransferCost:
    route = _planned_route(src_ranks, dst_ranks, before, after, shape, machine)
    crossing_step = next(((x, y) for x, y in pairwise(route.layouts) if x.placement != y.placement), route.layouts[:1])
    most, crossing = (max(received.values(), default=0) for received in (
        plan_bytes(route, shape, 2), bytes_received(crossing_step, shape, 2)))
    return TransferCost(route.seconds(2 * prod(shape)), most, route.fixed, crossing)


def transfer_costs(gpt: GPT, plan: TrainingPlan, machine: Machine,
                   rank_of: tuple[int, ...]) -> tuple[TransferCost, tuple[Hop, ...], TransferCost]:
    """One reduction on tp; the hop between each two stages; the slowest transfer between stages."""
    cost = partial(_boxing_cost, shape=(plan.micro_batch * gpt.sequence, gpt.hidden), machine=machine)
    groups = [[rank * plan.tp * plan.dp + i for i in range(plan.tp)] for rank in range(plan.pp)]
    between = split(0) if plan.sequence_parallel else broadcast
    within = partial(cost, groups[0], groups[0])
    if plan.sequence_parallel:                        # the two halves of an all-reduction
        reduction = within(partial_sum, split(0)) + within(split(0), broadcast)
    else:
        reduction = within(partial_sum, broadcast)
    to = routes(rank_of).forward
    by_pair = {pair: cost(groups[pair[0]], groups[pair[1]], between, between)
               for pair in {(rank, peer) for rank, peer in zip(rank_of, to) if peer >= 0}}
    hops = tuple(Hop(by_pair[rank, peer].latency, by_pair[rank, peer].seconds - by_pair[rank, peer].latency)
                 if peer >= 0 else Hop() for rank, peer in zip(rank_of, to[:-1]))
    return reduction, hops, max(by_pair.values(), key=lambda one: one.seconds, default=TransferCost())


def _stage_parts(gpt: GPT, tensor: int, layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Parameters of the parts of each stage: the embeddings, of the first; layers; the output layer, of the last."""
    # It shares the embedding's weight; on another stage it is a copy.
    output = gpt.vocabulary * gpt.hidden // tensor if len(layers) > 1 else 0
    return tuple((gpt.embeddings // tensor,) * (stage == 0) + (gpt.parameters_per_layer // tensor,) * n
                 + (output,) * (stage == len(layers) - 1) for stage, n in enumerate(layers))


def _data_parallel_cost(plan: TrainingPlan, machine: Machine, parts: tuple[int, ...]) -> DataParallelCost:
    """What data parallelism transfers for a stage whose parts have so many parameters."""
    group, none = [i * plan.tp for i in range(plan.dp)], TransferCost()

    def cost(before: Sbp, after: Sbp, parameters: int = sum(parts)) -> TransferCost:
        # A parameter is split along its longest dim, which as a rule comes out even: so does their sum here.
        even = -(-parameters // plan.dp) * plan.dp
        return _boxing_cost(group, group, before, after, (even,), machine) if parameters else none

    end = sum((cost(before, after) * times for before, after, times in _at_end(plan, sum(parts))), none)
    if plan.zero < 3 or plan.dp == 1:
        return DataParallelCost(none, end, [0.0] * len(parts))
    gathers = [cost(split(0), broadcast, n) for n in parts]
    return DataParallelCost(sum(gathers, none), end, [one.seconds for one in gathers])


def _at_end(plan: TrainingPlan, parameters: int) -> list[tuple[Sbp, Sbp, int]]:
    """The boxings of a stage's gradients and parameters, and how often in a step."""
    if plan.dp == 1:
        return []
    if not plan.zero:
        return [(partial_sum, broadcast, 1)]
    times = plan.micro_batches if splits_gradients_early(plan, parameters) else 1
    return [(partial_sum, split(0), times), (split(0), broadcast, 1)][:1 if plan.zero == 3 else 2]


def end_rates(plan: TrainingPlan, cluster: Cluster, bits: int, parameters: int) -> tuple[float, float]:
    """What data parallelism takes at the end of a step for a stage whose parameters take so many bits to count in
    bytes: seconds whatever their number, and seconds for each parameter. `parameters`: of a rank with one stage."""
    group = [i * plan.tp for i in range(plan.dp)]
    with hypothetical_placements():
        src, dst, machine = _counted_ranks(group, group, _machine_of(cluster, plan.dp * plan.tp))
        even = max((1 << bits - 2) // plan.dp, 1) * plan.dp
        routes = [(_planned_route(src, dst, before, after, (even,), machine), times)
                  for before, after, times in _at_end(plan, parameters)]
    return sum(route.fixed * n for route, n in routes), sum(2 * route.rate * n for route, n in routes)


def gather_seconds(plan: TrainingPlan, cluster: Cluster, parameters: int) -> float:
    """In which ZeRO 3 gathers so many of them."""
    with hypothetical_placements():
        return _data_parallel_cost(plan, _machine_of(cluster, plan.dp * plan.tp), (parameters,)).gathers[0]


def end_of_step(run: SimulatedRun, plan: TrainingPlan, clusters: Sequence[Cluster],
                step: StepCosts) -> tuple[list[RankEnd], TransferCost]:
    """When each rank has reduced its gradients and stepped, and what data parallelism transferred in the step."""
    ends, totals = list[RankEnd](), list[TransferCost]()
    for rank, stages in enumerate(run.schedule.stages_of):
        now, total, cluster = 0.0, TransferCost(), clusters[rank]
        for stage in sorted(stages, key=run.done.__getitem__):
            now = max(now, run.done[stage]) + step.data[stage].end.seconds
            total += step.data[stage].use * (2 * plan.micro_batches) + step.data[stage].end
        states = model_states(sum(sum(step.parts[stage]) for stage in stages), 1 if plan.zero else 0, plan.dp)
        optimizer = 2 * float(states.optimizer) / cluster.memory_bandwidth    # every state is read and written
        reduced = max(now, run.last[rank])
        ends.append(RankEnd(float(reduced + optimizer - min(run.first) + cluster.step_overhead),
                            float(reduced - run.last[rank]), optimizer + cluster.step_overhead))
        totals.append(total)
    return ends, max(totals, key=lambda one: one.bytes)
