"""A cluster from what was measured on it: ops, boxings and steps of small models (cli/measure_here.py).

    seconds of an op     start + operations x seconds of one + bytes x seconds of one, by kind
    of a boxing          by the library's plan: steps x latency + bytes / bandwidth; in a step the latency is more, as
                         ranks do not come to it at the same time
    of a step            what its ops take, those of each kind times a number, and something for the step, for each
                         micro-batch, and each op that runs in one (autograd and what else is around it); adding a
                         gradient to an earlier one is such an op
    of the host          for each tensor that ZeRO gathers, and each op of a block that recomputes: from steps of plans

An op that is measured again and again finds its code and operands in a cache, and memory for its result that it has
used before. In a step it does not, so there it takes longer: by that number.

Each is a sum of numbers that are 0 or more, so all are found by non-negative least squares (scipy), in which errors
count by their share of the time. The numbers of kinds that steps tell little of are like those of the others.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from globaltensor.boxings.plan import plan, plan_cost
from globaltensor.layouts.layout import layout
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import read_sbp
from globaltensor.pipelining.units import Unit
from globaltensor.planner.planning import strategy
from globaltensor.planner.unit_costs import run_costs
from globaltensor.runtime.machine import TRANSPORTS, Machine
from globaltensor.simulator.cluster import KERNEL_KINDS, Cluster, KernelRate, Link, hypothetical_placements

_INSTANT = 1e30                                  # a rate at which nothing takes any time
_FLOAT = 4
_ACCUMULATION = KERNEL_KINDS.index("accumulation")
_OPTIMIZER, _MOMENTS = KERNEL_KINDS.index("optimizer"), 2
_ALIKE = 0.2                                         # of a step: how an error is weighed by which a kind is unlike
_ALONE = Link(1e-6, 1e10)                            # of a lone rank, which is never asked
_SOME = 1e-5                                         # seconds
_LEAST = 1e-7                                        # by which the steps of plans are seen to change
MeasuredPlan = tuple[int, dict[str, Any], float]     # of which model, what is fixed, seconds of a step


class MeasuredModel(Protocol):
    """A model whose steps were measured, what it takes in a micro-batch, and its loss."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def inputs(self) -> torch.Tensor: ...

    @property
    def targets(self) -> torch.Tensor: ...

    @property
    def loss(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]: ...


def cluster_of_measurements(measured: Mapping[str, Any], ranks: int, memory: float, models: Sequence[MeasuredModel],
                            name: str = "here", cores: int = 0) -> Cluster:
    """The cluster whose rates agree best. `ranks` is its devices, each of so many bytes; `models` are those whose steps
    were measured; `cores`: that the ranks shared, all of them busy."""
    rows: dict[str, list[Sequence[float]]] = {}
    for kind, *row in measured["ops"]:
        rows.setdefault(kind, []).append(row)
    fitted = {kind: fit_rates([row[:3] for row in own], [row[3] for row in own]) for kind, own in rows.items()}
    for kind, part in (("product", 1), ("pointwise", 2)):            # no op takes no time at all
        fitted[kind][part] = fitted[kind][part] or min(row[3] / row[part] for row in rows[kind])
    kernels = tuple(KernelRate(kind, *map(float, fitted[kind])) for kind in KERNEL_KINDS if kind in fitted)
    by_kind = {one.kind: one for one in kernels}
    bandwidth = 1 / by_kind["pointwise"].byte
    transport = measured["transport"]
    link = _measured_link(measured["boxings"], ranks, bandwidth, transport) if measured["boxings"] else _ALONE
    bare = Cluster(name, ranks, 1 / by_kind["product"].operation, 1.0, memory, bandwidth, link, link, 1,
                   by_kind["pointwise"].start, kernels=kernels, transport=transport)
    beside = _beside_ops(measured["steps"], bare, models)
    slowed = [one.slower(beside.longer[one.kind]) for one in kernels]
    gradient = _accumulation(bare).slower(beside.longer["accumulation"])
    measured_here = dataclasses.replace(bare, micro_batch_overhead=beside.micro_batch, step_overhead=beside.step,
                                        kernels=_later([*slowed, gradient], beside.op))
    crowded = dataclasses.replace(measured_here, cores=cores).turns(ranks)
    uncrowded = dataclasses.replace(measured_here.slowed(1 / crowded), cores=cores)
    return _waits_of_ranks(measured["plans"], uncrowded, ranks, models).on(uncrowded)


def _accumulation(of: Cluster) -> KernelRate:
    """Of an op that adds a gradient to another, as pointwise ops are: it reads two and writes one of these bytes."""
    return KernelRate("accumulation", of.kernel_launch, 0.0, 3 / of.memory_bandwidth)


def _later(kernels: Sequence[KernelRate], seconds: float) -> tuple[KernelRate, ...]:
    """Ops that start so many seconds later. An optimizer runs outside of micro-batches."""
    return tuple(one if one.kind == "optimizer" else dataclasses.replace(one, start=one.start + seconds)
                 for one in kernels)


def fit_rates(parts: Sequence[Sequence[float]], seconds: Sequence[float], known: Sequence[float] | float = 0.0
              ) -> np.ndarray:
    """The numbers, 0 or more, whose products with the parts of each row, and what is known of it, add up to its
    seconds, as far as they can; to 0 in rows behind those that have seconds. Raises ImportError without scipy
    (`pip install 'globaltensor[plan]'`)."""
    from scipy.optimize import nnls

    table, wanted, of_rows = np.array(parts, float), np.zeros(len(parts)), len(seconds)
    table[:of_rows] /= np.array(seconds, float)[:, None]
    wanted[:of_rows] = 1 - np.array(known) / np.array(seconds)
    largest = np.abs(table[:of_rows]).max(0)
    largest[largest == 0] = 1.0                      # a part that no row has
    return np.asarray(nnls(table / largest, wanted)[0] / largest)


def _measured_link(boxings: Sequence[tuple[str, str, int, float]], ranks: int, bandwidth: float, transport: str
                   ) -> Link:
    parts, seconds = [], []
    one_each = Machine(1.0, 1.0, _INSTANT, in_rounds=TRANSPORTS[transport].in_rounds)
    with hypothetical_placements():
        where = placement("meta", list(range(ranks)))
        for src, dst, n, taken in boxings:
            ends = [layout(where, (one,)) for one in map(read_sbp, (src, dst)) if one is not None]
            done = plan(ends[0], ends[1], (n,), _FLOAT * n, TRANSPORTS[transport])
            steps, received = plan_cost(done, (n,), one_each)
            _, copied = plan_cost(done, (n,), Machine(1.0, _INSTANT, bandwidth))
            parts.append((steps, received * _FLOAT * n))
            seconds.append(max(taken - copied * _FLOAT * n, 0.1 * taken))
    latency, each = fit_rates(parts, seconds)
    return Link(float(latency), 1 / max(float(each), 1 / bandwidth / 10))


class Waits(NamedTuple):
    """Seconds by which a boxing starts later in a step, to which ranks do not come at the same time, than alone; that a
    step takes, as they wait for the last one; of the host for each tensor that ZeRO gathers, and for each op of a block
    that recomputes, in full or selectively."""

    boxing: float = 0.0
    step: float = 0.0
    gather: float = 0.0
    full: float = 0.0
    selective: float = 0.0

    def on(self, of: Cluster) -> Cluster:
        """The cluster with these."""
        link = Link(of.local.latency + self.boxing, of.local.bandwidth)
        return dataclasses.replace(of, local=link, remote=link, step_overhead=of.step_overhead + self.step,
                                   kernels=(*of.kernels, *(KernelRate(name, getattr(self, name), 0.0, 0.0)
                                                           for name in ("gather", "full", "selective"))))


def _waits_of_ranks(plans: Sequence[MeasuredPlan], of: Cluster, ranks: int, models: Sequence[MeasuredModel]) -> Waits:
    """What agrees best with the steps of plans in which ranks communicate; and then with those that recompute."""
    def step(k: int, fixed: dict[str, Any], waits: Waits) -> float:
        one = models[k]
        x, y = (torch.cat([t] * fixed["dp"] * fixed["pp"]) for t in (one.inputs, one.targets))
        return float(strategy(one.module, x, waits.on(of), ranks, loss=one.loss, targets=y,
                              micro_batch=len(one.inputs), **fixed)["step_time"])

    waits, together = Waits(), [row for row in plans if row[1]["recompute"] == "none" and ranks > 1]
    for _ in range(2 if together else 0):            # where boxings start later, some take another way
        parts, known = [], []
        more = max((of.local.latency + waits.boxing) / 2, _LEAST)     # a fitted latency may be 0
        for k, fixed, _ in together:
            now = step(k, fixed, waits)
            later = (step(k, fixed, waits._replace(boxing=waits.boxing + more)) - now) / more
            gathers = (step(k, fixed, waits._replace(gather=waits.gather + more)) - now
                       ) / more if fixed["zero"] else 0.0
            parts.append((later, of.turns(ranks), gathers))
            known.append(now - sum(n * each for n, each in zip(parts[-1], waits)))
        waits = Waits(*map(float, fit_rates(parts, [taken for *_, taken in together], known)))

    def with_more(k: int, fixed: dict[str, Any], more: dict[str, float]) -> float:
        return step(k, fixed, waits._replace(**more))

    return waits._replace(**{how: _host_of_recomputation(how, plans, with_more) for how in ("full", "selective")})


def _host_of_recomputation(how: str, plans: Sequence[MeasuredPlan],
                           step: Callable[[int, dict[str, Any], dict[str, float]], float]) -> float:
    """Seconds for each op: they tell how many times as long a step takes as one of the same plan that keeps all."""
    parts, seconds, known = [], [], []
    for k, fixed, taken in plans:
        if fixed["recompute"] == how:
            alike = fixed | {"recompute": "none"}
            before = next(own for j, other, own in plans if (j, other) == (k, alike))
            known.append(step(k, fixed, {}))
            parts.append([(step(k, fixed, {how: _SOME}) - known[-1]) / _SOME])
            seconds.append(taken / before * step(k, alike, {}))
    return float(fit_rates(parts, seconds, known)[0]) if parts else 0.0


class BesideOps(NamedTuple):
    """Seconds of a step, a micro-batch and an op besides what their kernels take, and how many times as long as alone
    those of each kind take in a step."""

    step: float
    micro_batch: float
    op: float
    longer: dict[str, float]


def _beside_ops(steps: Sequence[tuple[int, int, float]], bare: Cluster, models: Sequence[MeasuredModel]) -> BesideOps:
    rates = dataclasses.replace(bare, kernels=(*bare.kernels, _accumulation(bare))).rates_of_kinds
    of_models = [_counted_kernels(one, bare) for one in models]
    parts, seconds = [], []
    for k, m, taken in steps:
        gradients = list(models[k].module.parameters())
        counted = m * of_models[k]
        counted[_ACCUMULATION] = (m - 1) * np.array([len(gradients), 0, sum(p.nbytes for p in gradients)])
        of_micro_batches = counted[:, 0].sum()
        counted[_OPTIMIZER] = len(gradients), 0, _MOMENTS * sum(p.nbytes for p in gradients)
        parts.append([1.0, m, of_micro_batches, 0.0, *(counted * rates).sum(1)])
        seconds.append(taken)
    for kind in range(len(KERNEL_KINDS)):            # a number differs from their mean where that explains much
        alike = np.zeros(len(parts[0]))
        alike[3], alike[4 + kind] = -_ALIKE, _ALIKE
        parts.append(list(alike))
    step, each, of_op, _, *longer = map(float, fit_rates(parts, seconds))
    return BesideOps(step, each, of_op, dict(zip(KERNEL_KINDS, longer)))


def _counted_kernels(one: MeasuredModel, on: Cluster) -> np.ndarray:
    """Kernels, operations and bytes of each kind, in a micro-batch."""
    with hypothetical_placements():
        mesh = placement("meta", [[0]], ("dp", "tp"))
    (costs,), _ = run_costs(one.module, [Unit("", ("",))], [(one.inputs, one.targets)], one.loss, mesh, {}, on)[0]
    counted = np.zeros((len(KERNEL_KINDS), 3))
    for done in (costs.forward, costs.inputs, costs.weights):
        np.add.at(counted, done.kinds, np.array([np.ones(len(done.kinds)), done.operations, done.moved]).T)
    return counted
