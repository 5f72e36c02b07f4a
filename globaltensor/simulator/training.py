"""A step of training on a described cluster: a GPT, a plan (dp x tp x pp) and a schedule, made into times and bytes.

Devices are numbered with tp innermost, then dp, then pp: a tensor-parallel group lies in a host where it fits.
What moves, and how, is what this library would do: every transfer is a boxing, and its plan, seconds and bytes come
from `boxing.plan` on the cluster's rates.

    within a layer       2 all-reductions of the activations forward and 2 back, on tp
    between stages       the output [b s, h] to the next stage's ranks, its gradient back
    at the end           gradients P -> B on dp (ZeRO: P -> S(0), and the new parameters S(0) -> B), beside the
                         backwards of other stages, once a stage has done its last

The replicas of dp do the same at the same time, and so do the ranks of tp: one pipeline is simulated for all of them.
Left out, being small: embeddings' lookups, norms of gradients, the loss's reduction over a cut vocabulary.
"""
from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from globaltensor.boxing.plan import bytes_received, plan
from globaltensor.errors import ShapeError
from globaltensor.layout import cut, layout
from globaltensor.pipeline.check import peak_activations
from globaltensor.pipeline.communication import routes
from globaltensor.pipeline.generators import generate
from globaltensor.pipeline.schedule import Schedule
from globaltensor.placement import placement
from globaltensor.sbp import Sbp, broadcast, partial_sum, split
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
    """Bytes that one device receives, in a step or in one transfer; `crossing`: those of them from another stage."""

    seconds: float
    bytes: int
    latency: float = 0.0
    crossing: int = 0


@dataclass(frozen=True)
class Step:
    """What a simulated step of training takes. `seconds` includes reductions and the optimizer; memory in bytes."""

    run: Run
    plan: Plan
    seconds: float
    operations: Fraction
    states: list[float]                               # per pipeline rank
    activations: list[float]                          # per pipeline rank, at its peak
    each: list[float]                                 # per pipeline rank, what it keeps of one micro-batch
    tensor: Traffic                                   # of the stage that moves most, in a step
    stage: Traffic                                    # one transfer between stages
    data: Traffic                                     # gradients and parameters, in a step


def train(gpt: GPT, on: Plan, cluster: Cluster, record: bool = False, own: Schedule | None = None) -> Step:
    """Simulate one step, of the plan's schedule or of one's own."""
    if on.zero == 3:
        raise ShapeError("ZeRO 3 in a pipeline", "it would gather the parameters for every micro-batch again",
                         "--zero 2, or `globaltensor memory` for its memory")
    schedule = own or generate(on.schedule, on.pp, on.micro_batches, on.chunks)
    if (schedule.ranks, schedule.micro_batches) != (on.pp, on.micro_batches):
        raise ShapeError(f"{schedule.name} has {schedule.ranks} ranks and {schedule.micro_batches} micro-batches",
                         f"the plan has {on.pp} and {on.micro_batches}", f"--pp {schedule.ranks} --global-batch "
                         f"{schedule.micro_batches * on.micro_batch * on.dp}")
    if gpt.layers < schedule.stages:
        raise ShapeError(f"{gpt.layers} layers in {schedule.stages} stages", "a stage has at least one layer",
                         f"--pp {gpt.layers // schedule.chunks or 1}, or fewer chunks")
    layers = [stop - start for start, stop in (cut(gpt.layers, schedule.stages, s) for s in range(schedule.stages))]
    with elsewhere():
        reduction, hops, transfer = _transfers(gpt, on, cluster, schedule)
        run = simulate(schedule, _costs(gpt, on, cluster, layers, reduction, hops), record)
        parameters = [gpt.parameters_per_layer * n // on.tp for n in layers]
        parameters[0] += gpt.embeddings // on.tp
        parameters[-1] += gpt.vocabulary * gpt.hidden // on.tp if schedule.stages > 1 else 0    # the output's copy
        seconds, data = _end(run, on, cluster, parameters)
    per_rank = [sum(layers[stage] for stage in stages) for stages in schedule.stages_of]
    held = [sum(parameters[stage] for stage in stages) for stages in schedule.stages_of]
    each = gpt.activations_per_layer(on.micro_batch, on.tp, on.sequence_parallel, on.recompute)
    plain = gpt.activations_per_layer(on.micro_batch, on.tp, on.sequence_parallel)
    again = plain if on.recompute == "full" else 0    # the layer being computed again is there in full
    activations = [float(peak * n * each + again) for peak, n in zip(peak_activations(schedule), per_rank)]
    repeats = 6 if on.recompute == "full" else 4
    most = max(per_rank) * on.micro_batches * repeats
    return Step(run, on, seconds, gpt.operations(on.global_batch, on.recompute),
                [float(model_states(n, on.zero, on.dp).total) for n in held], activations,
                [float(n * each) for n in per_rank],
                Traffic(reduction.seconds * most, reduction.bytes * most), transfer, data)


def _costs(gpt: GPT, on: Plan, cluster: Cluster, layers: list[int], reduction: Traffic,
           hops: tuple[Hop, ...]) -> Costs:
    """Seconds of each action of each stage."""
    rate = cluster.flops * cluster.efficiency
    weighted, attention = (float(n) / rate for n in gpt.layer_forward(on.micro_batch, on.tp))
    logits = float(gpt.logits_forward(on.micro_batch, on.tp)) / rate
    kept, without = (gpt.activations_per_layer(on.micro_batch, on.tp, on.sequence_parallel, recompute)
                     for recompute in ("none", "selective"))
    touched, rest = (2 * float(n) / cluster.memory_bandwidth for n in (kept, without))   # written once, read once
    attention, outside = attention + touched - rest, rest + 2 * reduction.seconds
    again = {"none": 0.0, "selective": attention, "full": weighted + attention + outside}[on.recompute]
    last = [0.0] * (len(layers) - 1) + [logits]
    return Costs(tuple(n * (weighted + attention + outside) + end for n, end in zip(layers, last)),
                 tuple(n * (weighted + 2 * attention + outside + again) + end for n, end in zip(layers, last)),
                 tuple(n * weighted + end for n, end in zip(layers, last)), hops)


def _transfers(gpt: GPT, on: Plan, cluster: Cluster, schedule: Schedule) -> tuple[Traffic, tuple[Hop, ...], Traffic]:
    """One reduction on tp; the way between each two stages; the slowest of these ways."""
    shape, machine = (on.micro_batch * gpt.sequence, gpt.hidden), cluster.machine(on.devices)

    def moved(src: list[int], dst: list[int], before: Sbp, after: Sbp) -> Traffic:
        a, b = (layout(placement("meta", ranks), (sbp,)) for ranks, sbp in ((src, before), (dst, after)))
        way = plan(a, b, shape, gpt_bytes, machine)
        most, crossing = (max(bytes_received(layouts, shape, 2).values(), default=0) for layouts in
                          (way.layouts, next(((x, y) for x, y in pairwise(way.layouts) if x.placement != y.placement),
                                             way.layouts[:1])))
        return Traffic(way.seconds(gpt_bytes), most, way.fixed, crossing)

    gpt_bytes = 2 * shape[0] * shape[1]
    groups = [[rank * on.tp * on.dp + i for i in range(on.tp)] for rank in range(on.pp)]
    between = split(0) if on.sequence_parallel else broadcast
    if on.sequence_parallel:                          # an all-reduction in its two halves
        halves = moved(groups[0], groups[0], partial_sum, split(0)), moved(groups[0], groups[0], split(0), broadcast)
        reduction = Traffic(sum(h.seconds for h in halves), sum(h.bytes for h in halves))
    else:
        reduction = moved(groups[0], groups[0], partial_sum, broadcast)
    to = routes(schedule.rank_of).forward
    ways = {pair: moved(groups[pair[0]], groups[pair[1]], between, between)
            for pair in {(rank, peer) for rank, peer in zip(schedule.rank_of, to) if peer >= 0}}
    hops = tuple(Hop(ways[rank, peer].latency, ways[rank, peer].seconds - ways[rank, peer].latency)
                 if peer >= 0 else Hop() for rank, peer in zip(schedule.rank_of, to[:-1]))
    return reduction, hops, max(ways.values(), key=lambda way: way.seconds, default=Traffic(0.0, 0))


def _end(run: Run, on: Plan, cluster: Cluster, parameters: list[int]) -> tuple[float, Traffic]:
    """When the last rank has reduced its gradients and stepped, and what data parallelism moved for it."""
    machine = cluster.machine(on.devices)
    group = placement("meta", [i * on.tp for i in range(on.dp)])
    steps = [(partial_sum, split(0)), (split(0), broadcast)] if on.zero else [(partial_sum, broadcast)]
    ends, totals = [], []
    for rank, stages in enumerate(run.schedule.stages_of):
        now = received = spent = 0.0
        for stage in sorted(stages, key=run.done.__getitem__):
            now = max(now, run.done[stage])
            for src, dst in steps if on.dp > 1 else ():
                way = plan(layout(group, (src,)), layout(group, (dst,)), (parameters[stage],), 2 * parameters[stage],
                           machine)
                took = way.seconds(2 * parameters[stage])
                received += max(bytes_received(way.layouts, (parameters[stage],), 2).values(), default=0)
                now, spent = now + took, spent + took
        own = model_states(sum(parameters[stage] for stage in stages), 1 if on.zero else 0, on.dp)
        stepping = 2 * float(own.optimizer) / cluster.memory_bandwidth        # every state is read and written
        ends.append(max(now, run.last[rank]) + stepping - min(run.first))
        totals.append(Traffic(spent, int(received)))
    return max(ends), max(totals, key=lambda one: one.bytes)
