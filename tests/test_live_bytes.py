"""Bytes that a plan says a rank holds, beside those that live in a step, counted op by op."""
from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from harness import PROGRAMS, ROOT, RUN, good

import globaltensor as gt
from benchmarks.planned import build, live_peak, take_step
from globaltensor.planner.rank_memory import UnitBytes
from globaltensor.simulator.cluster import KNOWN

PLANS = [("gpt", {"micro_batch": 8}), ("gpt", {"micro_batch": 2}), ("gpt", {"micro_batch": 4, "recompute": "full"}),
         ("gpt", {"micro_batch": 4, "recompute": "selective"}), ("mlp", {"micro_batch": 4}), ("vision", {}),
         ("vision", {"micro_batch": 4}), ("experts", {}), ("experts", {"micro_batch": 32}),
         ("experts", {"micro_batch": 32, "recompute": "selective"})]


@pytest.mark.parametrize("name, fixed", PLANS, ids=lambda value: str(value) if isinstance(value, dict) else value)
def test_a_step_holds_the_bytes_of_its_plan(name, fixed):
    one = build(name, small=True)
    fixed = {"micro_batch": len(one.inputs), "recompute": "none"} | fixed
    strategy = gt.strategy(one.model, one.inputs, KNOWN["dgx-a100"], 1, loss=one.loss, targets=one.targets, **fixed)
    runner, optimizer = strategy.apply(one.model, one.loss, torch.optim.AdamW)
    take_step(one, runner, optimizer)
    peak = live_peak(one, runner, optimizer)
    expected = strategy["memory"]["per_rank"][0]
    assert 0.97 <= expected / peak <= 1.1, (name, fixed, expected, peak)
    assert sum(strategy["stages"][0]["memory"][key] for key in (
        "parameters", "gradients", "optimizer", "activations", "temporary")) == pytest.approx(expected)


@pytest.mark.parametrize("name, micro_batch, zero", [
    ("gpt", 2, 3), *(pytest.param(*one, marks=pytest.mark.long)
                     for one in (("gpt", 1, 3), ("mlp", 32, 3), ("gpt", 2, 0), ("mlp", 32, 0)))])
def test_ranks_of_a_pipeline_hold_the_bytes_of_its_plan(name, micro_batch, zero):
    """ZeRO 3 has ops gather: parameters where these are small, and else operands, so that gradients come split."""
    ratios = [float(line) for line in good([*RUN, "-n", 4, PROGRAMS / "live_bytes.py", name, micro_batch, zero],
                                           {"PYTHONPATH": str(ROOT)}, timeout=300).split()]
    assert len(ratios) == 4 and all(0.97 <= ratio <= 1.1 for ratio in ratios), ratios


def unit_bytes(draw: random.Random, n: int) -> UnitBytes:
    def several(k: int = n) -> np.ndarray:
        return np.array([draw.randint(0, 100) for _ in range(k)], float)

    return UnitBytes(*(several() for _ in range(10)), *(several(n + 1) for _ in range(5)), batch=draw.randint(0, 100))


@pytest.mark.parametrize("seed", range(20))
def test_bytes_of_all_ranges_are_those_of_each(seed):
    draw = random.Random(seed)
    n, m = draw.randint(1, 7), draw.randint(1, 5)
    of, peak = unit_bytes(draw, n), draw.randint(1, m)
    every = of.of_ranges(peak, m)
    for b in range(n):
        for e in range(b + 1, n + 1):
            own = of.of_rank([np.arange(b, e)], Fraction(peak), m)
            assert every[b, e] == pytest.approx(own.total), (seed, b, e)
            assert own.gradients + own.activations <= own.total
            if peak < m:
                assert of.of_rank([np.arange(b, e)], peak + 1, m).total >= own.total, "more micro-batches, fewer bytes"
