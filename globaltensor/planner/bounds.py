"""What a plan takes at least, without simulating it: work and communication, and what no order of actions avoids.

With w_s = f_s + i_s + w_s, the times of stage s for a micro-batch, m micro-batches and the stages of rank r of the
pipeline, whose first is stage r, a step takes at least

    fill    sum of f_s before stage r, with hops, + m w_r + the reductions and the optimizer of r
    drain   the same + the backwards of the stages before r, where no weights' gradients come later      (not zb)
    turn    all f_s, and the i_s after r, until the first backward of r; then all of r but the forwards that its list
            has before that: k_r of them                                              (gpipe, 1f1b, zb-h1, zb-h2)

The last action of a rank is of its first stage: that one is reduced when all is done, and a later one may be before.
`of_cuts` has these for given cuts, whose times and bytes are exact. `of_variant` is for whatever cut: each rank has at
most as many layers as end within T, and T is the least at which all layers find a place. Both are checked against the
simulator by tests.
"""
from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from globaltensor.planner.pricing import Task, peaks_of, rank_of_stages, training_plan
from globaltensor.planner.space import MeshShape, Variant
from globaltensor.simulator.cluster import hypothetical_placements
from globaltensor.simulator.memory import held_states, model_states
from globaltensor.simulator.stage_times import PassTimes, layer_times, output_times
from globaltensor.simulator.training import (
    TrainingPlan,
    TransferCost,
    end_rates,
    gather_seconds,
    transfer_costs,
)

_ROUNDING = 1e-9                                     # sums in another order differ by less
_STEEPLY = 1e-30                                     # a line that is level still has an inverse
_WHOLE_BACKWARD = ("gpipe", "1f1b", "interleaved", "bfs")


class CutBounds(NamedTuple):
    """Of several cuts, a row each: seconds that a step takes at least (inf: it does not fit), what each rank
    recomputes (an index into `Fixed.recomputes`), bytes of each rank with it, the fewest where they do not fit."""

    seconds: np.ndarray
    recompute: np.ndarray
    memory: np.ndarray


class VariantCosts:
    """The numbers of a variant that its cuts share."""

    def __init__(self, task: Task, variant: Variant) -> None:
        self.task, self.variant = task, variant
        gpt, shape, cluster = task.gpt, variant.shape, task.cluster
        self.plan = plan = training_plan(task, variant)
        self.rank_of = np.array(rank_of_stages(variant))
        self.ranks, self.stages, self.micro_batches = shape.pp, len(self.rank_of), plan.micro_batches
        self.reduction, self.hops = _transfers(task, plan.dp, plan.tp, plan.pp, plan.micro_batch,
                                               plan.sequence_parallel, tuple(self.rank_of.tolist()))
        self.forward, self.inputs, self.weights, self.output = _pass_times(task, shape[1:3] + shape[4:], self.reduction)
        self.more = cluster.micro_batch_overhead * self.ranks / self.stages / 2
        self.layer_size = gpt.parameters_per_layer // shape.tp
        self.embedding = gpt.embeddings // shape.tp
        self.output_size = gpt.vocabulary * gpt.hidden // shape.tp if self.stages > 1 else 0
        sizes = self.layer_size, self.embedding, self.output_size
        self.gathers = _gathers(task, shape.dp, shape.tp, sizes) if variant.zero == 3 else (0.0, 0.0, 0.0)
        self.peaks = np.array([float(n) for n in peaks_of(variant.schedule, self.ranks, self.micro_batches,
                                                         variant.chunks)])
        self.kept, self.again = _activations(task, shape.tp, shape.sequence_parallel, shape.micro_batch)
        self.logits = self.peaks * (np.arange(self.ranks) == self.rank_of[-1]) * float(
            gpt.logits_bytes(shape.micro_batch, shape.tp))
        self.of_parameter = float(held_states(plan, 1, self.embedding + gpt.layers * self.layer_size).total)
        states = model_states(1, 1 if variant.zero else 0, shape.dp)
        self.optimizer = 2 * float(states.optimizer) / cluster.memory_bandwidth
        self.ends = _end_rates(task, shape, variant.zero, plan.micro_batches)

    # ------------------------------------------------------------------------------------------------- of given cuts

    def of_cuts(self, cuts: np.ndarray, memory: float) -> CutBounds:
        """Of cuts [k, stages] on devices with so much memory."""
        ranks, onto = self.ranks, np.equal.outer(self.rank_of, np.arange(self.ranks)).astype(float)
        sizes = cuts * self.layer_size
        sizes[:, 0] += self.embedding
        sizes[:, -1] += self.output_size
        by_rank = sizes @ onto
        needed = self._bytes(cuts, by_rank, cuts @ onto)            # [recompute, k, ranks]
        fits: np.ndarray = needed <= memory * (1 + _ROUNDING)
        chosen = np.where(fits.any(0), fits.argmax(0), needed.argmin(0))
        own = np.take_along_axis(needed, chosen[None], 0)[0]
        forward, inputs, weights = self._times(cuts, chosen[:, self.rank_of])
        back, ends = inputs + weights, self._ends(sizes)
        first = np.arange(ranks)                     # stage r is the first of rank r, on a loop and on a V
        hops = np.concatenate([[0.0], np.cumsum(self.hops)])
        fill = (np.cumsum(forward, 1) - forward)[:, first] + hops[first]
        work = self.micro_batches * ((forward + back) @ onto)
        tail = ends[:, first] + self.optimizer * by_rank            # the last action of a rank is of its first stage
        seconds = (fill + work + tail).max(1)
        at_0 = (ends[:, 0] + self.optimizer * by_rank[:, 0])[:, None]
        if self.variant.schedule in _WHOLE_BACKWARD:
            drain = (np.cumsum(back, 1) - back)[:, first] + hops[first]
            seconds = np.maximum(seconds, (fill + work + drain + at_0).max(1))
        if (before := self._forwards_before()) is not None:
            turn = forward.sum(1, keepdims=True) + hops[-1]
            after = np.cumsum(inputs[:, ::-1], 1)[:, ::-1] - inputs
            if self.variant.schedule in _WHOLE_BACKWARD:
                after = back.sum(1, keepdims=True) - back + hops[-1]
                turn = turn + after + at_0
            else:
                turn = turn + after + hops[-1] - hops[first] + tail
            seconds = np.maximum(seconds, (turn + self.micro_batches * back
                                           + (self.micro_batches - before) * forward).max(1))
        seconds = (seconds + self.task.cluster.step_overhead) * (1 - _ROUNDING)
        return CutBounds(np.where(np.all(np.any(fits, 0), 1), seconds, np.inf), chosen, own)

    def _forwards_before(self) -> np.ndarray | None:
        """How many forwards the list of each rank has before its first backward, where each has one stage."""
        rank, p, m = np.arange(self.ranks), self.ranks, self.micro_batches
        if self.variant.chunks > 1:
            return None
        match self.variant.schedule:
            case "gpipe":
                return np.full(p, m)
            case "1f1b" | "zb-h1":
                return np.minimum(m, p - rank)
            case "zb-h2":
                return np.minimum(m, 2 * (p - 1 - rank) + 1)
        return None

    def _times(self, cuts: np.ndarray, recompute: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of F, I and W of each stage [k, stages], as the simulator adds them up."""
        layer, embedding, output = self.gathers
        f, i, w = self.forward, self.inputs[recompute], self.weights
        weights = cuts * w
        weights[:, -1] += self.output.weights
        if self.variant.zero < 3:
            forward, inputs = cuts * f, cuts * i
            forward[:, -1] += self.output.forward
            inputs[:, -1] += self.output.inputs
            return forward + self.more, inputs + self.more, weights
        # each part is computed while the next is gathered (simulator/stage_times.py)
        ahead, back = np.maximum(f, layer), np.maximum(i, layer)
        forward, inputs = (cuts - 1) * ahead + f + layer, (cuts - 1) * back + i + layer
        forward[:, 0] += embedding                   # looked up in no time, while the first layer is gathered
        forward[:, -1] += max(f, output) - f + self.output.forward
        inputs[:, 0] += np.maximum(i[:, 0], embedding) - i[:, 0]
        inputs[:, -1] += output + max(self.output.inputs, layer) - layer
        return forward + self.more, inputs + self.more, weights

    def _ends(self, sizes: np.ndarray) -> np.ndarray:
        """Seconds of what data parallelism does at the end, for stages with so many parameters."""
        if self.variant.shape.dp == 1:
            return np.zeros(sizes.shape)
        dp = self.variant.shape.dp
        even = -(-sizes // dp) * dp
        bits = np.frexp(2.0 * even)[1] - self.ends.first_bits
        return self.ends.fixed[bits] + self.ends.each[bits] * even

    def _bytes(self, cuts: np.ndarray, parameters: np.ndarray, layers: np.ndarray) -> np.ndarray:
        """Bytes of each rank [recompute, k, ranks]."""
        states = parameters * self.of_parameter
        if self.variant.zero == 3 and self.variant.shape.dp > 1:      # the part that is computed, and the next
            pairs = np.where(cuts > 1, 2 * self.layer_size, self.layer_size)
            pairs[:, 0] = np.maximum(pairs[:, 0], self.embedding + self.layer_size)
            pairs[:, -1] = np.maximum(pairs[:, -1], self.output_size + self.layer_size if self.output_size else 0)
            states = states + 2 * np.stack([pairs[:, self.rank_of == r].max(1) for r in range(self.ranks)], 1)
        kept = (self.peaks * layers)[None] * self.kept[:, None, None] + self.logits
        return states[None] + kept + self.again[:, None, None]

    # ---------------------------------------------------------------------------------------------- of whatever cut

    def of_variant(self, memory: float) -> float:
        """Seconds that a step takes at least, however layers are cut; inf where no cut fits."""
        lines = self._lines()                        # [lines, recompute, ranks, 2]: T >= a + b layers
        rank = np.arange(self.ranks)
        fixed_bytes = self.of_parameter * (
            self.embedding * (rank == 0) + self.output_size * (rank == self.rank_of[-1]))
        if self.variant.zero == 3 and self.variant.shape.dp > 1:
            fixed_bytes += 2 * self.layer_size
        free = memory * (1 + _ROUNDING) - fixed_bytes - self.logits - self.again[:, None]
        most = np.floor(free / (self.of_parameter * self.layer_size + self.peaks * self.kept[:, None]))   # [rc, ranks]
        most = np.minimum(most, self.task.gpt.layers - (self.ranks - 1) * self.variant.chunks)
        if (most.max(0) < self.variant.chunks).any() or most.max(0).sum() < self.task.gpt.layers:
            return float("inf")

        def room(seconds: float) -> float:
            each = np.floor((seconds - lines[..., 0]) / lines[..., 1] + _ROUNDING).min(0)
            each = np.minimum(each, most).max(0)
            return float(each.sum()) if (each >= self.variant.chunks).all() else 0.0

        low, high = 0.0, float((lines[..., 0] + lines[..., 1] * self.task.gpt.layers).max())
        while high - low > _ROUNDING * high:
            middle = (low + high) / 2
            low, high = (low, middle) if room(middle) >= self.task.gpt.layers else (middle, high)
        return (low + self.task.cluster.step_overhead) * (1 - _ROUNDING)

    def _lines(self) -> np.ndarray:
        """T >= a + b layers for each rank and what it may recompute."""
        p, m, chunks = self.ranks, self.micro_batches, self.variant.chunks
        rank, has_output = np.arange(p), np.arange(p) == self.rank_of[-1]
        layer, *_ = self.gathers
        f, i, w = max(self.forward, layer), np.maximum(self.inputs, layer), self.weights        # i: [recompute]
        hops = np.concatenate([[0.0], np.cumsum(self.hops)])
        fill = rank * (self.forward + layer + self.more) + hops[rank]
        end, end_each = float(self.ends.fixed.min()), float(self.ends.each.min())
        first = self.embedding * (rank == 0) + self.output_size * has_output
        # what a rank reduces last is its first stage: all of its layers, or one of them at least
        own_end = self.layer_size if chunks == 1 else 0
        last = first if chunks == 1 else self.embedding * (rank == 0) + self.layer_size
        tail = end + end_each * last + self.optimizer * first
        at_0 = end + (end_each + self.optimizer) * (self.layer_size + self.embedding)
        alone = min(self.forward, layer) + min(float(self.inputs.min()), layer)     # gathered ahead of nothing
        work = m * (chunks * (2 * self.more + alone) + sum(self.output) * has_output)
        slope = m * (f + i + w)[:, None]
        lines = [(fill + work + tail, slope + (end_each * own_end + self.optimizer * self.layer_size))]
        if self.variant.schedule in _WHOLE_BACKWARD:
            drain = rank * (float(self.inputs.min()) + layer + w + self.more) + hops[rank]
            lines.append((fill + work + drain + at_0, slope))
        before = self._forwards_before()
        if before is not None:
            lines.append(self._turn(before, tail, at_0))
        shape = (len(i), p)
        return np.stack([np.stack([np.broadcast_to(a, shape), np.broadcast_to(np.maximum(b, _STEEPLY), shape)], -1)
                         for a, b in lines])

    def _turn(self, before: np.ndarray, tail: np.ndarray, at_0: float) -> tuple[np.ndarray, np.ndarray]:
        """The line of what begins once all forwards of a micro-batch are done: a [ranks], b [recompute, ranks]."""
        p, m, layers = self.ranks, self.micro_batches, self.task.gpt.layers
        rank, has_output = np.arange(p), np.arange(p) == self.rank_of[-1]
        layer, *_ = self.gathers
        f, i, w = max(self.forward, layer), np.maximum(self.inputs, layer)[:, None], self.weights
        end_each, back_of_output = float(self.ends.each.min()), self.output.inputs + self.output.weights
        hops = np.concatenate([[0.0], np.cumsum(self.hops)])
        least = layers * self.forward + self.output.forward + 2 * self.more * p + hops[-1]
        own = (m - before) * (self.more + self.output.forward * has_output)
        if self.variant.schedule in _WHOLE_BACKWARD:
            least += layers * (float(self.inputs.min()) + w) + back_of_output + hops[-1]
            own = own + (m - 1) * (self.more + back_of_output * has_output)
            return least + own + at_0, (m - 1) * (i + w) + (m - before) * f
        after = (p - 1 - rank) * float(self.inputs.min()) + hops[-1] - hops[rank] + self.output.inputs * (rank < p - 1)
        own = own + m * (self.more + back_of_output * has_output) - self.more * p
        return least + after + own + tail, (
            m * (i + w) + (m - before) * f + (self.optimizer + end_each) * self.layer_size)


def of_shape(task: Task, shape: MeshShape) -> float:
    """Seconds that a step takes at least on a mesh of this shape, whatever else is chosen, with as little recomputation
    as is allowed and as much ZeRO: what its ranks do on average, and what the one with most layers does."""
    gpt, cluster = task.gpt, task.cluster
    reduction, _ = _transfers(task, shape.dp, shape.tp, 1, shape.micro_batch, shape.sequence_parallel, (0,))
    forward, inputs, weights, output = _pass_times(task, shape[1:3] + shape[4:], reduction)
    m, layer = task.global_batch // (shape.dp * shape.micro_batch), forward + float(inputs.min()) + weights
    ends = _end_rates(task, shape, 3, 1)
    parameters = (gpt.layers * (gpt.parameters_per_layer // shape.tp) + gpt.embeddings // shape.tp) / shape.pp
    mean = m * (gpt.layers * layer + sum(output)) / shape.pp + (shape.pp - 1) / 2 * forward
    mean += parameters * 2 * 12 / shape.dp / cluster.memory_bandwidth         # the optimizer's state, read and written
    if shape.pp == 1:                                # else a rank may reduce one of its stages before its last action
        mean += parameters * float(ends.each.min())
    return (max(mean, m * -(-gpt.layers // shape.pp) * layer) + m * cluster.micro_batch_overhead
            + float(ends.fixed.min()) + cluster.step_overhead) * (1 - _ROUNDING)


class EndRates(NamedTuple):
    """Of data parallelism at the end of a step, by how many bits count the bytes of a stage's parameters, from
    `first_bits` on: seconds whatever their number, and seconds for each."""

    first_bits: int
    fixed: np.ndarray
    each: np.ndarray


def _end_rates(task: Task, shape: MeshShape, zero: int, micro_batches: int) -> EndRates:
    """Of a plan with so many micro-batches, which count where one stage splits the gradients of each."""
    early = zero > 1 and shape.pp == 1
    return _rates_of_group(task, shape.dp, shape.tp, zero if early or zero == 3 else min(zero, 1),
                           micro_batches if early else 1)


@lru_cache(10_000)
def _rates_of_group(task: Task, dp: int, tp: int, zero: int, micro_batches: int) -> EndRates:
    gpt = task.gpt
    least = max(gpt.parameters_per_layer // tp, 1)
    most = -(-(gpt.parameters + gpt.vocabulary * gpt.hidden + tp) // tp) + dp
    first, last = (2 * least).bit_length(), (2 * most).bit_length()
    plan = TrainingPlan(1, dp * micro_batches, dp, tp, 1, zero=zero)
    in_one_stage = gpt.embeddings // tp + gpt.layers * (gpt.parameters_per_layer // tp)
    rates = [end_rates(plan, task.cluster, bits, in_one_stage) for bits in range(first, last + 1)]
    return EndRates(first, np.array([fixed for fixed, _ in rates]), np.array([each for _, each in rates]))


@lru_cache(10_000)
def _transfers(task: Task, dp: int, tp: int, pp: int, micro_batch: int, sequence_parallel: bool,
               rank_of: tuple[int, ...]) -> tuple[TransferCost, np.ndarray]:
    """A reduction on tp; seconds of the hops between stages."""
    plan = TrainingPlan(micro_batch, task.global_batch, dp, tp, pp, sequence_parallel=sequence_parallel)
    with hypothetical_placements():
        reduction, hops, _ = transfer_costs(task.gpt, plan, task.cluster.machine(dp * tp * pp), rank_of)
    return reduction, np.array([float(hop.busy + hop.latency) for hop in hops])


@lru_cache(10_000)
def _pass_times(task: Task, dp_free: tuple[int, bool, int], reduction: TransferCost) -> tuple[
        float, np.ndarray, float, PassTimes]:
    """Seconds of a layer: forward, gradient of the inputs for each way to recompute, of the weights; the output's."""
    tp, sequence_parallel, micro_batch = dp_free
    several = [layer_times(task.gpt, task.cluster, micro_batch, tp, sequence_parallel, recompute, reduction.seconds)
               for recompute in task.fixed.recomputes]
    return (several[0].forward, np.array([one.inputs for one in several]), several[0].weights,
            output_times(task.gpt, task.cluster, micro_batch, tp))


@lru_cache(10_000)
def _gathers(task: Task, dp: int, tp: int, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """Seconds in which ZeRO 3 gathers so many parameters."""
    return tuple(gather_seconds(TrainingPlan(1, task.global_batch, dp, tp, zero=3), task.cluster, n) for n in sizes)


@lru_cache(10_000)
def _activations(task: Task, tp: int, sequence_parallel: bool, micro_batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that are kept of a layer for a micro-batch, and those that recomputing a layer takes besides."""
    kept = [float(task.gpt.activations_per_layer(micro_batch, tp, sequence_parallel, recompute))
            for recompute in task.fixed.recomputes]
    whole = float(task.gpt.activations_per_layer(micro_batch, tp, sequence_parallel))
    return np.array(kept), np.array([whole * (recompute == "full") for recompute in task.fixed.recomputes])
