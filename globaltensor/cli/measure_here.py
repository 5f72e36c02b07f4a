"""What ops, boxings and steps take here: a worker of `globaltensor calibrate --here`, one process per rank.

All ranks do the same at the same time, as the ranks of a step do, so that what they share (cores, caches, the memory)
is shared here too. Every op runs on global tensors, so its time includes what the library adds. Each row of an op says
how many kernels it starts, how many operations they do, how many bytes they read and write, and the seconds.
"""
from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import globaltensor as gt
from globaltensor.pipelining.layer_lists import WholeModel
from globaltensor.runtime.agreement import broadcast_object

Row = tuple[str, int, float, float, float]           # kind, kernels, operations, bytes, seconds

_BATCHES, _SECONDS = 7, 4e-3
_SIZES_OF_BOXINGS = (1 << 10, 1 << 14, 1 << 17, 1 << 20)             # elements
_MICRO_BATCHES = (1, 2, 8)
_PRODUCTS = ((16, 64, 64), (64, 64, 256), (128, 256, 256), (256, 256, 1024), (512, 512, 512), (512, 1024, 1024))
_CONVOLUTIONS = ((4, 4, 8, 8), (8, 16, 16, 16), (8, 16, 32, 32), (16, 32, 32, 32))   # rows, channels, outputs, pixels
_OF_CONVOLUTION = None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
_ATTENTIONS = ((2, 4, 32, 16), (4, 4, 64, 32), (4, 4, 128, 32), (4, 8, 256, 32))      # rows, heads, positions, sizes
_ELEMENTS = (1 << 8, 1 << 13, 1 << 16, 1 << 19, 1 << 21)
_FLOAT = 4


def seconds_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
    """Of a call: the median of several batches."""
    for _ in range(2):
        call(*args, **kwargs)
    began = time.perf_counter()
    call(*args, **kwargs)
    times = max(int(_SECONDS / max(time.perf_counter() - began, 1e-7)), 1)
    times = int(broadcast_object(times, 0, "how often an op is run"))
    taken = []
    for _ in range(_BATCHES):
        began = time.perf_counter()
        for _ in range(times):
            call(*args, **kwargs)
        taken.append((time.perf_counter() - began) / times)
    return statistics.median(taken)


def _tensor(*shape: int) -> Any:
    return gt.randn(*shape, placement=gt.placement.all("cpu"), sbp=gt.sbp.broadcast)


def _products() -> Iterator[Row]:
    for m, k, n in _PRODUCTS:
        x, w = _tensor(m, k), _tensor(n, k)
        yield "product", 1, 2.0 * m * k * n, _FLOAT * (m * k + k * n + m * n), seconds_of(F.linear, x, w)


def _convolutions() -> Iterator[Row]:
    for b, c, d, size in _CONVOLUTIONS:
        x, w = _tensor(b, c, size, size), _tensor(d, c, 3, 3)
        y = F.conv2d(x, w, padding=1)
        operations, nbytes = 2.0 * y.numel() * c * 9, _FLOAT * (x.numel() + w.numel() + y.numel())
        yield "convolution", 1, operations, nbytes, seconds_of(F.conv2d, x, w, padding=1)
        yield "convolution", 1, 2 * operations, 2 * nbytes, seconds_of(
            torch.ops.aten.convolution_backward.default, y, x, w, *_OF_CONVOLUTION)


def _attentions() -> Iterator[Row]:
    for b, h, s, d in _ATTENTIONS:
        q, k, v = (_tensor(b, h, s, d) for _ in range(3))
        yield "attention", 1, 4.0 * b * h * s * s * d, _FLOAT * 4 * q.numel(), seconds_of(
            F.scaled_dot_product_attention, q, k, v, is_causal=True)


def _through_memory() -> Iterator[Row]:
    for n in _ELEMENTS:
        x, y = _tensor(n), _tensor(n)
        yield "pointwise", 1, 0.0, 3.0 * _FLOAT * n, seconds_of(torch.add, x, y)
        yield "curve", 1, 0.0, 2.0 * _FLOAT * n, seconds_of(F.gelu, x)
    for r, h in ((16, 64), (256, 128), (512, 512), (2048, 512)):
        x, w = _tensor(r, h), _tensor(h)
        yield "normalization", 1, 0.0, 2.0 * _FLOAT * r * h, seconds_of(F.layer_norm, x, (h,), w, w)
        yield "normalization", 1, 0.0, 2.0 * _FLOAT * r * h, seconds_of(F.log_softmax, x, 1)
        yield "reduction", 1, 0.0, _FLOAT * (r + 1.0) * h, seconds_of(torch.sum, x, 0)
        ids = gt.randint(0, r, (r,), placement=x.placement, sbp=gt.sbp.broadcast)
        yield "index", 1, 0.0, 2.0 * _FLOAT * r * h + 8 * r, seconds_of(F.embedding, ids, x)


def _starts() -> Iterator[Row]:
    """Of a view; and of an op with autograd, forward or backward: `graph`."""
    x = _tensor(16, 16)
    yield "view", 1, 0.0, 0.0, seconds_of(x.view, 256)

    def chain() -> None:
        y = leaf
        for _ in range(20):
            y = y.tanh()
        y.backward(x)
        leaf.grad = None

    leaf = _tensor(16, 16).requires_grad_()
    yield "graph", 40, 0.0, 0.0, seconds_of(chain)


def _optimizers() -> Iterator[Row]:
    for count, n in ((4, 16), (16, 16), (4, 128), (4, 512)):
        parameters = [nn.Parameter(_tensor(n, n)) for _ in range(count)]
        for p in parameters:
            p.grad = _tensor(n, n)
        optimizer = torch.optim.AdamW(parameters)
        yield "optimizer", count, 0.0, 2.0 * _FLOAT * count * n * n, seconds_of(optimizer.step)


def measured_boxings() -> Iterator[tuple[str, str, int, float]]:
    """From one sbp to another, elements, seconds."""
    where = gt.placement.all("cpu")
    ways = {"P": gt.sbp.partial_sum, "B": gt.sbp.broadcast, "S(0)": gt.sbp.split(0)}
    for n in _SIZES_OF_BOXINGS:
        for src, dst in (("P", "B"), ("S(0)", "B"), ("P", "S(0)")):
            x = gt.randn(n, placement=where, sbp=gt.sbp.broadcast).to_global(sbp=ways[src])
            yield src, dst, n, seconds_of(x.to_global, sbp=ways[dst])


def measured_steps() -> Iterator[tuple[int, float]]:
    """Micro-batches, seconds of a step of a model that computes next to nothing, on one rank of a pipeline."""
    model = small_model()
    gt.to_global(model, gt.placement.all("cpu"), gt.sbp.broadcast)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for m in _MICRO_BATCHES:
        runner = gt.pipeline([WholeModel(model)], [gt.placement.all("cpu")], "1f1b", m, F.mse_loss)
        x = torch.zeros(4 * m, 16)

        def step(runner: Any = runner, x: torch.Tensor = x) -> None:
            runner.step(x, x)
            optimizer.zero_grad()

        yield m, seconds_of(step)


def small_model() -> nn.Sequential:
    """Eight linear layers of 16."""
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])


def main(path: str) -> None:
    """Measure, and write it as JSON."""
    gt.init()
    gt.manual_seed(0)
    with torch.no_grad():
        ops = [row for rows in (_products, _convolutions, _attentions, _through_memory) for row in rows()]
        boxings = list(measured_boxings()) if gt.world_size() > 1 else []
    ops += [*_starts(), *_optimizers()]
    steps = list(measured_steps())
    if gt.rank() == 0:
        Path(path).write_text(json.dumps({"ops": ops, "boxings": boxings, "steps": steps}))


if __name__ == "__main__":
    main(sys.argv[1])
