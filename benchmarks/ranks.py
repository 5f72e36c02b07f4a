"""What grows with the number of ranks: the price of a boxing that was never seen, and the first step of a model?

Prices are those of boxings at random, each of another pair of layouts of a 2-dim tensor, as an op's decision asks for
them. The model is a two-layer MLP, data parallel, whose ranks one process drives. Targets: a price at 0.1 ms
whatever the placement; the first step on 128 ranks at 1 s.
"""
from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from itertools import product

import torch

import globaltensor as gt
from benchmarks.timing import show
from globaltensor.boxings.plan import plan
from globaltensor.layouts.layout import layout
from globaltensor.layouts.sbp import NdSbp, broadcast, partial_sum, split
from globaltensor.runtime.machine import gloo

SEED = 2026
AXES = [(2, 4), (8, 8), (128, 8), (16, 16, 8, 8)]
STEP = """
import time, torch, globaltensor as gt
torch.set_num_threads(1)
torch.manual_seed(0)
P = gt.placement.all("cpu")
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
x = torch.randn(4 * {ranks}, 64)
plain = torch.func.functional_call(model, dict(model.named_parameters()), x).square().mean().item()
gt.to_global(model, P, gt.sbp.broadcast)
x = gt.from_full(x, P, gt.sbp.split(0))
for _ in range(2):
    began = time.perf_counter()
    loss = model(x).square().mean()
    loss.backward()
    grads = [p.grad.shards for p in model.parameters()]         # read, so reduced
    print(time.perf_counter() - began)
torch.testing.assert_close(loss.item(), plain)
"""


def prices_of_unseen(axes: tuple[int, ...], boxings: int) -> list[float]:
    """Milliseconds of each, ascending."""
    where = gt.placement("cpu", torch.arange(torch.Size(axes).numel()).reshape(axes))
    states = list(product([broadcast, partial_sum, split(0), split(1)], repeat=len(axes)))
    r, pairs, times = random.Random(SEED), set[tuple[NdSbp, NdSbp]](), []
    while len(pairs) < boxings:
        src, dst = r.sample(states, 2)
        pairs.add((src, dst))
    size = (4096 * where.shape[0], 4096 * where.shape[-1])
    for src, dst in pairs:
        ends = layout(where, src), layout(where, dst)
        began = time.perf_counter()
        plan(*ends, size, 4 << 30, gloo)
        times.append((time.perf_counter() - began) * 1e3)
    return sorted(times)


def first_step(ranks: int) -> tuple[float, float]:
    """Milliseconds of the first step and of the second, in a fresh process."""
    done = subprocess.run([sys.executable, "-c", STEP.format(ranks=ranks)], capture_output=True, text=True, check=True,
                          env={**os.environ, "GLOBALTENSOR_RANKS": str(ranks)}, timeout=600)
    first, second = (float(line) * 1e3 for line in done.stdout.split())
    return first, second


def main(json: bool = False, quick: bool = False) -> None:
    gt.init(ranks=16384)
    rows: list[dict[str, object]] = []
    for axes in AXES:
        prices = prices_of_unseen(axes, 20 if quick else 200)
        rows.append({"what": f"price of an unseen boxing, axes {'x'.join(map(str, axes))}",
                     "ms": statistics.median(prices), "slowest tenth ms": prices[len(prices) * 9 // 10]})
    for ranks in (16,) if quick else (16, 64, 128):
        first, second = first_step(ranks)
        rows.append({"what": f"first step of an MLP, {ranks} ranks in one process", "ms": first, "second ms": second})
    columns = ("what", "ms", "slowest tenth ms", "second ms")
    show("ranks: what grows with their number", rows, json, [columns])


if __name__ == "__main__":
    main()
