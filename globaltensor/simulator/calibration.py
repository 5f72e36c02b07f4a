"""Finding what a cluster reaches: nine numbers of its description, fitted to steps that were measured.

A step is simulated with each trial of the nine, and the logarithms of simulated over measured times are made small: by
least squares in which a few odd measurements count little. Where measurements say nothing about a number (no plan
leaves its host, so the links between hosts are idle), it stays what the description says: each is drawn there, weakly.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from math import exp, log
from typing import NamedTuple

import numpy as np

from globaltensor.errors import ShapeError
from globaltensor.simulator.cluster import Cluster, Link
from globaltensor.simulator.evaluation import PlanRow, evaluate

_ODD = 0.05                                           # relative error from which on a measurement counts less
_DRAWN = 0.02                                         # off by a factor of e counts as one row that is off by 2%
# Where the description says 0, the seconds of eager programs on GPUs to begin with.
_USUAL = {"kernel_launch": 2e-5, "micro_batch_overhead": 1e-3, "step_overhead": 2e-3}
_FEWEST = 9                                           # rows, as there are numbers


class Quality(NamedTuple):
    """How times that are simulated agree with those that were measured.

    error    mean of |simulated / measured - 1|
    choice   mean over groups of: measured time of the plan that is ranked first / the best measured one
    rank     mean over groups of Spearman's rank correlation
    """

    rows: int
    groups: int
    error: float
    choice: float
    rank: float


def calibrate(rows: Sequence[PlanRow], start: Cluster, name: str = "") -> Cluster:
    """The cluster `start` with the rates that these measured plans reached. Raises ShapeError where too few rows have
    a measured time, and ImportError without scipy (`pip install 'globaltensor[plan]'`)."""
    from scipy.optimize import least_squares

    measured = [row for row in rows if row.measured]
    if len(measured) < _FEWEST:
        raise ShapeError(f"{len(measured)} rows with a measured time", f"nine numbers are fitted to them: it takes "
                         f"{_FEWEST} rows or more", "a column measured_ms")
    begin = np.array([log(value) for value in _numbers(start)])
    low, high = begin - log(1e4), begin + log(1e4)
    low[0], high[0] = log(0.05), log(1.0)             # of the data sheet's rate, a program reaches a share
    times = np.log([row.measured for row in measured if row.measured])

    def errors(trial: np.ndarray) -> np.ndarray:
        cluster = _with(start, trial)
        simulated = np.log([evaluate(row, cluster).step_time for row in measured])
        return np.concatenate([simulated - times, _DRAWN * (trial - begin)])

    solution = least_squares(errors, np.clip(begin, low + 1e-9, high - 1e-9), bounds=(low, high), loss="soft_l1",
                          f_scale=_ODD, diff_step=1e-3, xtol=1e-4, ftol=1e-5, max_nfev=60)
    return dataclasses.replace(_with(start, solution.x), name=name or start.name)


def quality(rows: Sequence[PlanRow], simulated: Sequence[float]) -> Quality:
    """Of the rows that were measured. Groups of fewer than three plans are no choice."""
    pairs = [(row, time, row.measured) for row, time in zip(rows, simulated) if row.measured]
    choices, ranks = [], []
    for _, several in groupby(sorted(pairs, key=_group_text), _group_text):
        times = np.array([(time, measured) for _, time, measured in several])
        if len(times) >= 3:
            choices.append(float(times[np.argmin(times[:, 0]), 1] / times[:, 1].min()))
            ranks.append(_rank_correlation(times[:, 0], times[:, 1]))
    errors = [abs(time / measured - 1) for _, time, measured in pairs]
    none = float("nan")
    return Quality(len(pairs), len(choices), float(np.mean(errors)) if errors else none,
                   float(np.mean(choices)) if choices else none, float(np.mean(ranks)) if ranks else none)


def _group_text(pair: tuple[PlanRow, float, float]) -> str:
    return repr(pair[0].group)


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    ranks = [np.array([(np.sum(t < x) + np.sum(t <= x)) / 2 for x in t]) for t in (a, b)]     # of equals, their mean
    return 1.0 if np.ptp(ranks[0]) == 0 == np.ptp(ranks[1]) else float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _numbers(of: Cluster) -> list[float]:
    return [of.efficiency, of.memory_bandwidth, of.local.latency, of.local.bandwidth, of.remote.latency,
            of.remote.bandwidth, *(getattr(of, name) or usual for name, usual in _USUAL.items())]


def _with(start: Cluster, logarithms: np.ndarray) -> Cluster:
    efficiency, memory, near, near_rate, far, far_rate, launch, micro_batch, step = (
        float(f"{exp(x):.6g}") for x in logarithms)
    # a device that does more than `flops` says has more
    return dataclasses.replace(start, flops=start.flops * max(efficiency, 1.0), efficiency=min(efficiency, 1.0),
                               memory_bandwidth=memory, local=Link(near, near_rate), remote=Link(far, far_rate),
                               kernel_launch=launch, micro_batch_overhead=micro_batch, step_overhead=step)
