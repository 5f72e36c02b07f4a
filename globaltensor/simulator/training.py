"""A step of training on a described cluster: a GPT, a plan (dp x tp x pp) and a schedule, made into times and bytes.

Devices are numbered with tp innermost, then dp, then pp: a tensor-parallel group lies in a host where it fits.
What moves, and how, is what this library would do: every transfer is a boxing, and its plan, seconds and bytes come
from `boxing.plan` on the cluster's rates.

    within a layer       2 all-reductions of the activations forward and 2 back, on tp
    between stages       the output [b s, h] to the next stage's ranks, its gradient back
    at the end           gradients P -> B on dp (ZeRO: P -> S(0), and the new parameters S(0) -> B), beside the
                         backwards of other stages, once a stage has done its last; until then they are whole
    ZeRO 3               before every F, and again before every B or I, the stage's parameters S(0) -> B on dp. The
                         action waits until all of them are there, and lets go of them; W, made of activations and
                         gradients alone, needs none. So a rank has one stage whole at a time: with one stage on each
                         rank that saves nothing over ZeRO 2. At the end gradients P -> S(0), and no more

The replicas of dp do the same at the same time, and so do the ranks of tp: one pipeline is simulated for all of them.
Left out, being small: embeddings' lookups, norms of gradients, the loss's reduction over a cut vocabulary.
"""
from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

from globaltensor.boxings.plan import bytes_received, plan
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
from globaltensor.simulator.cluster import Cluster, elsewhere
from globaltensor.simulator.costs import Costs, Hop
from globaltensor.simulator.engine import Run, simulate
from globaltensor.simulator.gpt import GPT
from globaltensor.simulator.memory import model_states


@dataclass(frozen=True)
class Plan:
    """How a GPT is trained: ranks per axis, batch, schedule, and what is not kept or not held twice."""

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
                             f"{self.micro_batch}", "each pipeline has as many micro-batches",
                             f"--global-batch {max(count, 1) * self.micro_batch * self.dp}")
        return count


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device receives, in a step or in one transfer; `crossing`: those of them from another stage.
    One after the other they add up: `a + b`, `a * 3`."""

    seconds: float = 0.0
    bytes: int = 0
    latency: float = 0.0
    crossing: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.seconds + other.seconds, self.bytes + other.bytes, self.latency + other.latency,
                       self.crossing + other.crossing)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.seconds * times, self.bytes * times, self.latency * times, self.crossing * times)


class Shared(NamedTuple):
    """What data parallelism moves of a stage: its parameters before one use, and what it does once at the end."""

    use: Traffic
    end: Traffic


@dataclass(frozen=True)
class Step:
    """What a simulated step of training takes. `seconds` includes reductions and the optimizer; memory in bytes."""

    run: Run
    plan: Plan
    seconds: float
    operations: Fraction
    states: list[float]                               # per pipeline rank; with ZeRO 3 its largest stage gathered
    activations: list[float]                          # per pipeline rank, at its peak
    each: list[float]                                 # per pipeline rank, what it keeps of one micro-batch
    tensor: Traffic                                   # of the stage that moves most, in a step
    stage: Traffic                                    # one transfer between stages
    data: Traffic                                     # gradients and parameters of the rank that moves most, in a step


def train(gpt: GPT, on: Plan, cluster: Cluster, record: bool = False, own: Schedule | None = None) -> Step:
    """Simulate one step, of the plan's schedule or of one's own."""
    schedule = own or generate(on.schedule, on.pp, on.micro_batches, on.chunks)
    if (schedule.ranks, schedule.micro_batches) != (on.pp, on.micro_batches):
        raise ShapeError(f"{schedule.name} has {schedule.ranks} ranks and {schedule.micro_batches} micro-batches",
                         f"the plan has {on.pp} and {on.micro_batches}", f"--pp {schedule.ranks} --global-batch "
                         f"{schedule.micro_batches * on.micro_batch * on.dp}")
    if gpt.layers < schedule.stages:
        raise ShapeError(f"{gpt.layers} layers in {schedule.stages} stages", "a stage has at least one layer",
                         f"--pp {gpt.layers // schedule.chunks or 1}, or fewer chunks")
    ranges = [split_range(gpt.layers, schedule.stages, s) for s in range(schedule.stages)]
    layers = [stop - start for start, stop in ranges]
    parameters = [gpt.parameters_per_layer * n // on.tp for n in layers]
    parameters[0] += gpt.embeddings // on.tp
    parameters[-1] += gpt.vocabulary * gpt.hidden // on.tp if schedule.stages > 1 else 0    # the output's copy
    with elsewhere():
        machine = cluster.machine(on.devices)
        reduction, hops, transfer = _transfers(gpt, on, machine, schedule)
        sizes = {n: _shared(on, machine, n) for n in set(parameters)}
    shared = [sizes[n] for n in parameters]
    run = simulate(schedule, _costs(gpt, on, cluster, layers, reduction, hops, shared), record)
    seconds, data = _end(run, on, cluster, parameters, shared)
    per_rank = [sum(layers[stage] for stage in stages) for stages in schedule.stages_of]
    each = gpt.activations_per_layer(on.micro_batch, on.tp, on.sequence_parallel, on.recompute)
    plain = gpt.activations_per_layer(on.micro_batch, on.tp, on.sequence_parallel)
    again = plain if on.recompute == "full" else 0    # the layer being computed again is there in full
    activations = [float(peak * n * each + again) for peak, n in zip(peak_activations(schedule), per_rank)]
    repeats = 6 if on.recompute == "full" else 4
    most = max(per_rank) * on.micro_batches * repeats
    return Step(run, on, seconds, gpt.operations(on.global_batch, on.recompute),
                [_states(on, [parameters[stage] for stage in stages]) for stages in schedule.stages_of], activations,
                [float(n * each) for n in per_rank], reduction * most, transfer, data)


def _costs(gpt: GPT, on: Plan, cluster: Cluster, layers: list[int], reduction: Traffic,
           hops: tuple[Hop, ...], shared: list[Shared]) -> Costs:
    """Seconds of each action of each stage, those in which it waits for what it gathers or reduces included."""
    rate = cluster.flops * cluster.efficiency
    weighted, attention = (float(n) / rate for n in gpt.layer_forward(on.micro_batch, on.tp))
    logits = float(gpt.logits_forward(on.micro_batch, on.tp)) / rate
    kept, without = (gpt.activations_per_layer(on.micro_batch, on.tp, on.sequence_parallel, recompute)
                     for recompute in ("none", "selective"))
    touched, rest = (2 * float(n) / cluster.memory_bandwidth for n in (kept, without))   # written once, read once
    attention, outside = attention + touched - rest, rest + 2 * reduction.seconds
    again = {"none": 0.0, "selective": attention, "full": weighted + attention + outside}[on.recompute]
    last = [0.0] * (len(layers) - 1) + [logits]
    waits = [stage.use.seconds for stage in shared]
    return Costs(tuple(n * (weighted + attention + outside) + end + use for n, end, use in zip(layers, last, waits)),
                 tuple(n * (weighted + 2 * attention + outside + again) + end + use
                       for n, end, use in zip(layers, last, waits)),
                 tuple(n * weighted + end for n, end in zip(layers, last)), hops)


def _moved(src: list[int], dst: list[int], before: Sbp, after: Sbp, shape: Shape, machine: Machine) -> Traffic:
    """What this library's way from one layout to another takes, at 16 bits an element."""
    a, b = (layout(placement("meta", ranks), (sbp,)) for ranks, sbp in ((src, before), (dst, after)))
    nbytes = 2 * prod(shape)
    way = plan(a, b, shape, nbytes, machine)
    most, crossing = (max(bytes_received(layouts, shape, 2).values(), default=0) for layouts in
                      (way.layouts, next(((x, y) for x, y in pairwise(way.layouts) if x.placement != y.placement),
                                         way.layouts[:1])))
    return Traffic(way.seconds(nbytes), most, way.fixed, crossing)


def _transfers(gpt: GPT, on: Plan, machine: Machine, schedule: Schedule) -> tuple[Traffic, tuple[Hop, ...], Traffic]:
    """One reduction on tp; the way between each two stages; the slowest of these ways."""
    moved = partial(_moved, shape=(on.micro_batch * gpt.sequence, gpt.hidden), machine=machine)
    groups = [[rank * on.tp * on.dp + i for i in range(on.tp)] for rank in range(on.pp)]
    between = split(0) if on.sequence_parallel else broadcast
    within = partial(moved, groups[0], groups[0])
    if on.sequence_parallel:                          # an all-reduction in its two halves
        reduction = within(partial_sum, split(0)) + within(split(0), broadcast)
    else:
        reduction = within(partial_sum, broadcast)
    to = routes(schedule.rank_of).forward
    ways = {pair: moved(groups[pair[0]], groups[pair[1]], between, between)
            for pair in {(rank, peer) for rank, peer in zip(schedule.rank_of, to) if peer >= 0}}
    hops = tuple(Hop(ways[rank, peer].latency, ways[rank, peer].seconds - ways[rank, peer].latency)
                 if peer >= 0 else Hop() for rank, peer in zip(schedule.rank_of, to[:-1]))
    return reduction, hops, max(ways.values(), key=lambda way: way.seconds, default=Traffic())


def _shared(on: Plan, machine: Machine, parameters: int) -> Shared:
    """What data parallelism moves of a stage of so many parameters."""
    group = [i * on.tp for i in range(on.dp)]
    moved = partial(_moved, group, group, shape=(parameters,), machine=machine)
    if on.dp == 1:
        return Shared(Traffic(), Traffic())
    if not on.zero:
        return Shared(Traffic(), moved(partial_sum, broadcast))
    reduced, gathered = moved(partial_sum, split(0)), moved(split(0), broadcast)
    return Shared(gathered, reduced) if on.zero == 3 else Shared(Traffic(), reduced + gathered)


def _states(on: Plan, parameters: list[int]) -> float:
    """Bytes that a rank with stages of so many parameters keeps of them, at the most."""
    states = model_states(sum(parameters), on.zero, on.dp)
    gathered = 2 * max(parameters) if on.zero == 3 and on.dp > 1 else 0
    pending = 2 * sum(parameters) - states.gradients if on.pp > 1 else 0    # whole until the last backward
    return float(states.total + gathered + pending)


def _end(run: Run, on: Plan, cluster: Cluster, parameters: list[int], shared: list[Shared]) -> tuple[float, Traffic]:
    """When the last rank has reduced its gradients and stepped, and what data parallelism moved in the step."""
    ends, totals = [], []
    for rank, stages in enumerate(run.schedule.stages_of):
        now, moved = 0.0, Traffic()
        for stage in sorted(stages, key=run.done.__getitem__):
            now = max(now, run.done[stage]) + shared[stage].end.seconds
            moved += shared[stage].use * (2 * on.micro_batches) + shared[stage].end
        own = model_states(sum(parameters[stage] for stage in stages), 1 if on.zero else 0, on.dp)
        stepping = 2 * float(own.optimizer) / cluster.memory_bandwidth        # every state is read and written
        ends.append(max(now, run.last[rank]) + stepping - min(run.first))
        totals.append(moved)
    return max(ends), max(totals, key=lambda one: one.bytes)
