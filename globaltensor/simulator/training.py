"""A step of training on a described cluster: a GPT, a plan (dp x tp x pp) and a schedule, turned into times and bytes.

Devices are numbered with tp innermost, then dp, then pp: a tensor-parallel group is within a host where it fits. The
communication is what this library would do: every transfer is a boxing, and its steps, seconds and bytes come from
`boxings.plan` at the cluster's rates.

    within a layer       2 all-reductions of the activations forward and 2 back, on tp
    between stages       the output [b s, h] to the next stage's ranks, its gradient back
    at the end           gradients P -> B on dp (ZeRO: P -> S(0), and the new parameters S(0) -> B), concurrent with
                         the backwards of other stages, once a stage has done its last; until then gradients are whole
    ZeRO 3               before every F, and again before every B or I, the stage's parameters S(0) -> B on dp, a layer
                         at a time and one layer ahead. What a layer takes is the slower of its pass and of gathering
                         the next; W, computed from activations and gradients alone, needs none. At the end gradients
                         P -> S(0), and nothing else

All replicas of dp do the same at the same time, and so do the ranks of tp: one pipeline is simulated for all of them.
Left out, being small: embedding lookups, norms of gradients, the loss's reduction over a split vocabulary.
"""
from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

from globaltensor.boxings.plan import bytes_received, plan as plan_boxing
from globaltensor.errors import ShapeError
from globaltensor.layouts.layout import Shape, layout
from globaltensor.layouts.placement import placement
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
from globaltensor.simulator.memory import model_states
from globaltensor.simulator.stage_times import layer_times, output_times, with_gathers


@dataclass(frozen=True)
class TrainingPlan:
    """How a GPT is trained: ranks per axis, batch, schedule, and what is recomputed or sharded to save memory."""

    micro_batch: int
    global_batch: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    zero: int = 0
    recompute: str = "full"
    sequence_parallel: bool = False

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


def simulate_training(gpt: GPT, plan: TrainingPlan, cluster: Cluster, record: bool = False,
                      own: Schedule | None = None) -> SimulatedStep:
    """Simulate one step, of the plan's schedule or of one's own."""
    schedule = own or generate(plan.schedule, plan.pp, plan.micro_batches, plan.chunks)
    if (schedule.ranks, schedule.micro_batches) != (plan.pp, plan.micro_batches):
        raise ShapeError(f"{schedule.name} has {schedule.ranks} ranks and {schedule.micro_batches} micro-batches",
                         f"the plan has {plan.pp} and {plan.micro_batches}", f"--pp {schedule.ranks} --global-batch "
                         f"{schedule.micro_batches * plan.micro_batch * plan.dp}")
    if gpt.layers < schedule.stages:
        raise ShapeError(f"{gpt.layers} layers in {schedule.stages} stages", "a stage has at least one layer",
                         f"--pp {gpt.layers // schedule.chunks or 1}, or fewer chunks")
    ranges = [split_range(gpt.layers, schedule.stages, s) for s in range(schedule.stages)]
    layers = [stop - start for start, stop in ranges]
    parts = _stage_parts(gpt, plan.tp, layers)
    with hypothetical_placements():
        machine = cluster.machine(plan.devices)
        reduction, hops, transfer = _transfer_costs(gpt, plan, machine, schedule)
        by_parts = {one: _data_parallel_cost(plan, machine, one) for one in set(parts)}
    data_costs = [by_parts[one] for one in parts]
    run = simulate(schedule, _costs(gpt, plan, cluster, layers, reduction, hops, data_costs), record)
    seconds, data = _end_of_step(run, plan, cluster, parts, data_costs)
    per_rank = [sum(layers[stage] for stage in stages) for stages in schedule.stages_of]
    per_layer = gpt.activations_per_layer(plan.micro_batch, plan.tp, plan.sequence_parallel, plan.recompute)
    without_recompute = gpt.activations_per_layer(plan.micro_batch, plan.tp, plan.sequence_parallel)
    # With full recomputation the layer that is being recomputed has all its activations, beside the kept inputs.
    again = without_recompute if plan.recompute == "full" else 0
    activations = [float(peak * n * per_layer + again) for peak, n in zip(peak_activations(schedule), per_rank)]
    reductions_per_layer = 6 if plan.recompute == "full" else 4
    most = max(per_rank) * plan.micro_batches * reductions_per_layer
    return SimulatedStep(run, plan, seconds, gpt.operations(plan.global_batch, plan.recompute),
                         [_model_bytes(plan, [parts[stage] for stage in stages])
                          for stages in schedule.stages_of],
                         activations, [float(n * per_layer) for n in per_rank], reduction * most, transfer, data)


def _costs(gpt: GPT, plan: TrainingPlan, cluster: Cluster, layers: list[int], reduction: TransferCost,
           hops: tuple[Hop, ...], data_costs: list[DataParallelCost]) -> Costs:
    """Seconds of each action of each stage, including those in which it waits for what it gathers or reduces."""
    layer = layer_times(gpt, cluster, plan.micro_batch, plan.tp, plan.sequence_parallel, plan.recompute,
                        reduction.seconds)
    output = output_times(gpt, cluster, plan.micro_batch, plan.tp)
    last = len(layers) - 1
    forward, inputs, weights = (
        [[0.0] * (stage == 0) + [own] * n + [at_end] * (stage == last) for stage, n in enumerate(layers)]
        for own, at_end in zip(layer, output))        # of each stage, its parts: embeddings, layers, output
    more = cluster.micro_batch_overhead * plan.pp / len(layers) / 2
    return Costs(tuple(with_gathers(own, of.gathers) + more for own, of in zip(forward, data_costs)),
                 tuple(with_gathers(own[::-1], of.gathers[::-1]) + more for own, of in zip(inputs, data_costs)),
                 tuple(map(sum, weights)), hops)


def _boxing_cost(src_ranks: list[int], dst_ranks: list[int], before: Sbp, after: Sbp, shape: Shape,
                 machine: Machine) -> TransferCost:
    """What a boxing takes as this library plans it, at 16 bits an element."""
    src, dst = (layout(placement("meta", ranks), (sbp,)) for ranks, sbp in ((src_ranks, before), (dst_ranks, after)))
    nbytes = 2 * prod(shape)
    route = plan_boxing(src, dst, shape, nbytes, machine)
    crossing_step = next(((x, y) for x, y in pairwise(route.layouts) if x.placement != y.placement), route.layouts[:1])
    most, crossing = (max(bytes_received(layouts, shape, 2).values(), default=0)
                      for layouts in (route.layouts, crossing_step))
    return TransferCost(route.seconds(nbytes), most, route.fixed, crossing)


def _transfer_costs(gpt: GPT, plan: TrainingPlan, machine: Machine,
                    schedule: Schedule) -> tuple[TransferCost, tuple[Hop, ...], TransferCost]:
    """One reduction on tp; the hop between each two stages; the slowest transfer between stages."""
    cost = partial(_boxing_cost, shape=(plan.micro_batch * gpt.sequence, gpt.hidden), machine=machine)
    groups = [[rank * plan.tp * plan.dp + i for i in range(plan.tp)] for rank in range(plan.pp)]
    between = split(0) if plan.sequence_parallel else broadcast
    within = partial(cost, groups[0], groups[0])
    if plan.sequence_parallel:                        # the two halves of an all-reduction
        reduction = within(partial_sum, split(0)) + within(split(0), broadcast)
    else:
        reduction = within(partial_sum, broadcast)
    to = routes(schedule.rank_of).forward
    by_pair = {pair: cost(groups[pair[0]], groups[pair[1]], between, between)
               for pair in {(rank, peer) for rank, peer in zip(schedule.rank_of, to) if peer >= 0}}
    hops = tuple(Hop(by_pair[rank, peer].latency, by_pair[rank, peer].seconds - by_pair[rank, peer].latency)
                 if peer >= 0 else Hop() for rank, peer in zip(schedule.rank_of, to[:-1]))
    return reduction, hops, max(by_pair.values(), key=lambda one: one.seconds, default=TransferCost())


def _stage_parts(gpt: GPT, tensor: int, layers: list[int]) -> list[tuple[int, ...]]:
    """Parameters of the parts of each stage: the embeddings, of the first; layers; the output layer, of the last."""
    # It shares the embedding's weight; on another stage it is a copy.
    output = gpt.vocabulary * gpt.hidden // tensor if len(layers) > 1 else 0
    return [(gpt.embeddings // tensor,) * (stage == 0) + (gpt.parameters_per_layer // tensor,) * n
            + (output,) * (stage == len(layers) - 1) for stage, n in enumerate(layers)]


def _data_parallel_cost(plan: TrainingPlan, machine: Machine, parts: tuple[int, ...]) -> DataParallelCost:
    """What data parallelism transfers for a stage whose parts have so many parameters."""
    group, none = [i * plan.tp for i in range(plan.dp)], TransferCost()
    waits = [0.0] * len(parts)

    def cost(before: Sbp, after: Sbp, parameters: int = sum(parts)) -> TransferCost:
        return _boxing_cost(group, group, before, after, (parameters,), machine) if parameters else none

    if plan.dp == 1:
        return DataParallelCost(none, none, waits)
    if not plan.zero:
        return DataParallelCost(none, cost(partial_sum, broadcast), waits)
    reduced = cost(partial_sum, split(0))
    if plan.zero < 3:
        return DataParallelCost(none, reduced + cost(split(0), broadcast), waits)
    by_size = {n: cost(split(0), broadcast, n) for n in set(parts)}
    return DataParallelCost(sum((by_size[n] for n in parts), none), reduced, [by_size[n].seconds for n in parts])


def _model_bytes(plan: TrainingPlan, stages: list[tuple[int, ...]]) -> float:
    """Bytes of parameters, gradients and optimizer state on a rank with stages of such parts, at the most."""
    parameters = sum(map(sum, stages))
    states = model_states(parameters, plan.zero, plan.dp)
    # of the part that is computed and of the next
    gathered = 2 * max(map(sum, (pair for parts in stages for pair in pairwise((*parts, 0)))))
    gathered = gathered if plan.zero == 3 and plan.dp > 1 else 0
    # In a pipeline gradients are reduced, and so sharded, after the last backward only.
    unreduced = 2 * parameters - states.gradients if plan.pp > 1 else 0
    return float(states.total + gathered + unreduced)


def _end_of_step(run: SimulatedRun, plan: TrainingPlan, cluster: Cluster, parts: list[tuple[int, ...]],
                 data_costs: list[DataParallelCost]) -> tuple[float, TransferCost]:
    """When the last rank has reduced its gradients and stepped, and what data parallelism transferred in the step."""
    ends, totals = [], []
    for rank, stages in enumerate(run.schedule.stages_of):
        now, total = 0.0, TransferCost()
        for stage in sorted(stages, key=run.done.__getitem__):
            now = max(now, run.done[stage]) + data_costs[stage].end.seconds
            total += data_costs[stage].use * (2 * plan.micro_batches) + data_costs[stage].end
        own = model_states(sum(sum(parts[stage]) for stage in stages), 1 if plan.zero else 0, plan.dp)
        optimizer = 2 * float(own.optimizer) / cluster.memory_bandwidth       # every state is read and written
        ends.append(max(now, run.last[rank]) + optimizer - min(run.first) + cluster.step_overhead)
        totals.append(total)
    return max(ends), max(totals, key=lambda one: one.bytes)
