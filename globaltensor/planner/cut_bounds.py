"""What cuts of any model take at least, without simulating them.

With f, i, w, the times of a stage for a micro-batch, and all passes of rank r of the pipeline, m micro-batches of each
of its stages, a step takes at least the sum of a way in, the passes, and a way out:

    in     the f of the stages before r, the first stage of the rank
           or all f, and the i of the stages after that of its first backward; less the forwards before it in its list
    out    what the rank reduces after its last action, which is of stage r, and its optimizer
           or the i of the stages before r, and what rank 0 does then; less the w behind its last backward in its list

Where a list has whole backwards alone, i counts with its w.
"""
from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from globaltensor.planner.model_prices import ROUNDING, VariantPrices
from globaltensor.planner.pricing import schedule_of
from globaltensor.schedules.schedule import F, I, W


class ListEnds(NamedTuple):
    """Of the list of each rank: how many forwards of each stage it has before its first backward, and how many w behind
    its last [ranks, stages]; the stage of its first backward; whether a backward of any rank is split."""

    forwards: np.ndarray
    weights: np.ndarray
    turns: np.ndarray
    is_split: bool


@lru_cache(64)
def ends_of_lists(name: str, ranks: int, micro_batches: int, chunks: int) -> ListEnds:
    """Of the schedule of this name."""
    schedule = schedule_of(name, ranks, micro_batches, chunks)
    forwards, weights = np.zeros((2, ranks, schedule.stages), int)
    turns, is_split = np.zeros(ranks, int), False
    for rank, row in enumerate(schedule.actions):
        kinds, stages = np.frombuffer(row.kinds, np.uint8), np.array(row.keys) % schedule.stages
        backwards = np.flatnonzero((kinds != F) & (kinds != W))
        first, last = backwards[0], backwards[-1]
        turns[rank] = stages[first]
        np.add.at(forwards[rank], stages[:first], 1)
        np.add.at(weights[rank], stages[last + 1:], 1)
        is_split |= bool((kinds == I).any())
    return ListEnds(forwards, weights, turns, is_split)


def bounds_of_cuts(prices: VariantPrices, several: np.ndarray) -> np.ndarray:
    """Seconds that each of these cuts [k, stages] takes at least, however little is recomputed."""
    variant, m = prices.variant, prices.micro_batches
    p, first = variant.shape.pp, np.arange(variant.shape.pp)        # stage r is the first of rank r
    lists = ends_of_lists(variant.schedule, p, m, variant.chunks)
    ends = np.concatenate([np.zeros((len(several), 1), int), np.cumsum(several, 1)], 1)

    def of_stages(units: np.ndarray) -> np.ndarray:
        return np.diff(np.concatenate([[0.0], np.cumsum(units)])[ends], axis=1)

    f, i, w = prices.passes(prices.task.fixed.recompute or "none")
    gathers = prices.gathers if p > 1 else 0.0       # of one stage, they are done while it computes
    forward, inputs, weights = of_stages(f + gathers) + prices.more, of_stages(i + gathers) + prices.more, of_stages(w)
    back = inputs if lists.is_split else inputs + weights
    onto = np.equal.outer(prices.rank_of, np.arange(p)).astype(float)
    fixed, each = prices.end
    optimizer = of_stages(prices.optimizer_of_units) @ onto
    reduced = fixed + each * of_stages(prices.mesh.sizes)
    hops = _hops_before(prices, ends)                # [k, stages]: of the way to a stage
    fill = (np.cumsum(forward, 1) - forward + hops)[:, first]
    after = np.cumsum(back[:, ::-1], 1)[:, ::-1] - back + hops[:, -1:] - hops
    turn = (forward.sum(1, keepdims=True) + hops[:, -1:] + after[:, lists.turns]) - forward @ lists.forwards.T
    drain = (np.cumsum(back, 1) - back + hops)[:, first] - weights @ lists.weights.T
    at_0 = weights @ lists.weights[0] + reduced[:, 0] + optimizer[:, 0]
    out = np.maximum(reduced[:, first] + optimizer, drain + at_0[:, None])
    work = m * ((forward + inputs + weights) @ onto)
    return ((np.maximum(fill, turn) + work + out).max(1) + prices.cluster.step_overhead) * ROUNDING


def _hops_before(prices: VariantPrices, ends: np.ndarray) -> np.ndarray:
    """Seconds of all hops on the way from the first stage to each."""
    ranks = prices.rank_of.tolist()
    hops = np.zeros((len(ends), len(ranks)))
    for stage, (rank, other) in enumerate(zip(ranks, ranks[1:])):
        if rank != other:
            link = prices.link(rank, other)
            hops[:, stage + 1] = link.latency + prices.of.passed[ends[:, stage + 1] - 1] / link.bandwidth
    return np.cumsum(hops, 1)
