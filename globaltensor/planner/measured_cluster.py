"""A cluster from what was measured on it: ops, boxings and steps of a small model (cli/measure_here.py).

    seconds of an op     start + operations x seconds of one + bytes x seconds of one, by kind
    of a boxing          by the library's plan: steps x latency + bytes / bandwidth
    of a step            what its ops take, times a number, and something for the step, for each micro-batch, and each
                         op that runs in one (autograd and what else is around it); adding a gradient to an earlier one
                         is such an op

An op that is measured again and again finds its operands in a cache, and memory for its result that it has used before.
In a step it does not, so there it takes longer: by that number, which is 1 or more.

Each is a sum of numbers that are 0 or more, so all are found by non-negative least squares (scipy), in which errors
count by their share of the time.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from globaltensor.boxings.plan import plan, plan_cost
from globaltensor.layouts.layout import layout
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import read_sbp
from globaltensor.planner.planning import strategy
from globaltensor.runtime.machine import TRANSPORTS, Machine
from globaltensor.simulator.cluster import KERNEL_KINDS, Cluster, KernelRate, Link, hypothetical_placements

_INSTANT = 1e30                                  # a rate at which nothing takes any time
_FLOAT = 4
_ALONE = Link(1e-6, 1e10)                            # of a lone rank, which is never asked


class MeasuredModel(Protocol):
    """A model whose steps were measured, and the rows in each of their micro-batches."""

    @property
    def module(self) -> nn.Sequential: ...

    @property
    def rows(self) -> int: ...


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
    step, each, of_op, longer = _beside_ops(measured["steps"], bare, models)
    slowed = [dataclasses.replace(one, operation=one.operation * longer, byte=one.byte * longer) for one in kernels]
    gradient = KernelRate("accumulation", bare.kernel_launch + of_op, 0.0, 3 * longer / bandwidth)  # reads 2, writes 1
    measured_here = dataclasses.replace(bare, micro_batch_overhead=each, step_overhead=step,
                                        kernels=(*_later(slowed, of_op), gradient))
    crowded = dataclasses.replace(measured_here, cores=cores).turns(ranks)
    return dataclasses.replace(measured_here.slowed(1 / crowded), cores=cores)


def _later(kernels: Sequence[KernelRate], seconds: float) -> tuple[KernelRate, ...]:
    """Ops that start so many seconds later. An optimizer runs outside of micro-batches."""
    return tuple(one if one.kind == "optimizer" else dataclasses.replace(one, start=one.start + seconds)
                 for one in kernels)


def fit_rates(parts: Sequence[Sequence[float]], seconds: Sequence[float]) -> np.ndarray:
    """The numbers, 0 or more, whose products with the parts of each row add up to its seconds, as far as they can.
    Raises ImportError without scipy (`pip install 'globaltensor[plan]'`)."""
    from scipy.optimize import nnls

    table = np.array(parts, float) / np.array(seconds, float)[:, None]
    largest = np.abs(table).max(0)
    largest[largest == 0] = 1.0                      # a part that no row has
    return np.asarray(nnls(table / largest, np.ones(len(table)))[0] / largest)


def _measured_link(boxings: Sequence[tuple[str, str, int, float]], ranks: int, bandwidth: float, transport: str
                   ) -> Link:
    parts, seconds = [], []
    with hypothetical_placements():
        where = placement("meta", list(range(ranks)))
        for src, dst, n, taken in boxings:
            ends = [layout(where, (one,)) for one in map(read_sbp, (src, dst)) if one is not None]
            done = plan(ends[0], ends[1], (n,), _FLOAT * n, TRANSPORTS[transport])
            steps, received = plan_cost(done, (n,), Machine(1.0, 1.0, _INSTANT))
            _, copied = plan_cost(done, (n,), Machine(1.0, _INSTANT, bandwidth))
            parts.append((steps, received * _FLOAT * n))
            seconds.append(max(taken - copied * _FLOAT * n, 0.1 * taken))
    latency, each = fit_rates(parts, seconds)
    return Link(float(latency), 1 / max(float(each), 1 / bandwidth / 10))


def _beside_ops(steps: Sequence[tuple[int, int, float]], bare: Cluster, models: Sequence[MeasuredModel]
                ) -> list[float]:
    """Seconds of a step, a micro-batch and an op besides what their kernels take, and how many times as long operations
    and bytes of these take as alone."""
    at_once = [dataclasses.replace(one, start=0.0) for one in bare.kernels]
    ops: list[tuple[float, float, int]] = []         # of each model: seconds of its ops, without starts; how many
    for one in models:
        shape: Any = one.rows, one.module[0].in_features
        x = torch.zeros(shape, dtype=torch.float32, device="cpu")
        whole, done, later = (strategy(one.module, x, dataclasses.replace(bare, kernels=tuple(kernels)), 1, targets=x,
                                       loss=nn.functional.mse_loss)["time"]["compute"]
                              for kernels in (bare.kernels, at_once, _later(bare.kernels, 1.0)))
        ops.append((whole, done, round(later - whole)))
    parts, seconds = [], []
    for k, m, taken in steps:
        whole, done, count = ops[k]
        gradients = list(models[k].module.parameters())
        starts = m * (whole - done) + (m - 1) * len(gradients) * bare.kernel_launch
        adding = sum(3 * p.nbytes / bare.memory_bandwidth for p in gradients)
        parts.append((1.0, m, m * count + (m - 1) * len(gradients), m * done + (m - 1) * adding))
        seconds.append(max(taken - starts, 0.1 * taken))
    rates = [float(n) for n in fit_rates(parts, seconds)]
    if rates[3] >= 1:
        return rates
    # as long as alone: then a step that hardly does anything else tells little of the rest
    rest = [(part[:3], taken - part[3]) for part, taken in zip(parts, seconds) if taken - part[3] > 0.1 * taken]
    return [*(map(float, fit_rates(*zip(*rest))) if rest else (0.0, 0.0, 0.0)), 1.0]
