"""What ops, boxings and steps take here: a worker of `globaltensor calibrate --here`, one process per rank.

All ranks do the same at the same time, as the ranks of a step do, so that what they share (cores, caches, the memory)
is shared here too. Every op runs on global tensors, so its time includes what the library adds. Each row of an op says
how many kernels it starts, how many operations they do, how many bytes they read and write, and the seconds.
"""
from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

import globaltensor as gt
from globaltensor.cli.small_models import small_models, small_plans
from globaltensor.pipelining.layer_lists import WholeModel
from globaltensor.runtime.agreement import broadcast_object
from globaltensor.runtime.custom_ops import contract
from globaltensor.runtime.machine import TRANSPORTS
from globaltensor.runtime.world import world
from globaltensor.simulator.cluster import KNOWN

R = TypeVar("R", bound=tuple[Any, ...])
Step = Callable[[], None]                            # of training
Row = tuple[str, int, float, float, float]           # kind, kernels, operations, bytes, seconds

_BATCHES, _TURNS, _OF_TURN, _SECONDS = 12, 4, 3, 3e-3
_SIZES_OF_BOXINGS = (1 << 10, 1 << 14, 1 << 17, 1 << 20)             # elements
_MICRO_BATCHES = (1, 4)
_LAYERS = 6
_PRODUCTS = ((16, 64, 64), (64, 64, 256), (128, 256, 256), (256, 256, 1024), (512, 512, 512))
_CONVOLUTIONS = ((4, 4, 8, 8), (8, 16, 16, 16), (8, 16, 32, 32), (16, 32, 32, 32))   # rows, channels, outputs, pixels
_OF_CONVOLUTION = None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
_BATCHED = ((4, 32, 32, 32), (8, 64, 64, 128), (8, 256, 128, 256))    # products at once, and the sizes of each
_CONTRACTED = ((16, 16, 2, 32), (64, 64, 4, 64), (64, 128, 8, 256), (256, 128, 8, 256))           # n, h, e, f
_NORMALIZED = ((4, 8, 8), (16, 16, 16), (16, 32, 32))                 # rows, channels, pixels along each side
_ATTENTIONS = ((2, 4, 32, 16), (4, 4, 64, 32), (4, 4, 128, 32), (4, 8, 256, 32))      # rows, heads, positions, sizes
_ELEMENTS = (1 << 8, 1 << 13, 1 << 16, 1 << 19, 1 << 21)
_FLOAT = 4


def seconds_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
    """Of a call, on average over several batches: where ranks share a core, each waits for others now and then."""
    own = partial(call, *args, **kwargs)
    times = _calls_of_a_batch(own)
    return statistics.mean(_batch(own, times) for _ in range(_BATCHES))


def _calls_of_a_batch(call: Callable[[], Any]) -> int:
    """How many, so that a batch takes long enough to be timed; the same on all ranks."""
    for _ in range(2):
        call()
    times = max(int(_SECONDS / max(_batch(call, 1), 1e-7)), 1)
    return int(broadcast_object(times, 0, "how often an op is run"))


def _batch(call: Callable[[], Any], times: int) -> float:
    """Seconds of a call, on average."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def seconds_in_turns(steps: Sequence[Step]) -> list[float]:
    """Of each, the median of several batches. All take turns, so that a machine that becomes slower meanwhile is slower
    for all: then what is compared is still true."""
    times = [_calls_of_a_batch(step) for step in steps]
    taken: list[list[float]] = [[] for _ in steps]
    for _ in counted_rows((turn,) for turn in range(_TURNS)):
        for step, n, own in zip(steps, times, taken):
            step()                                   # caches are full of what others read
            own += [_batch(step, n) for _ in range(_OF_TURN)]
    return [statistics.median(own) for own in taken]


def _tensor(*shape: int) -> Any:
    return gt.randn(*shape, placement=gt.placement.all("cpu"), sbp=gt.sbp.broadcast)


def _products() -> Iterator[Row]:
    """Forward, and the two of backward; of several layers in turn, as none finds its operands in a cache."""
    for m, k, n in _PRODUCTS:
        layers = [(_tensor(m, k), _tensor(n, k), _tensor(m, n)) for _ in range(_LAYERS)]

        def each(layers: Any = layers) -> None:
            for x, w, y in layers:
                F.linear(x, w)
                torch.mm(y, w)
                torch.mm(y.T, x)

        yield ("product", 3 * _LAYERS, 6.0 * _LAYERS * m * k * n, 3.0 * _LAYERS * _FLOAT * (m * k + k * n + m * n),
               seconds_of(each))


def _batched_products() -> Iterator[Row]:
    for b, m, k, n in _BATCHED:
        x, y = _tensor(b, m, k), _tensor(b, k, n)
        nbytes = _FLOAT * b * (m * k + k * n + m * n)
        yield "batched", 1, 2.0 * b * m * k * n, nbytes, seconds_of(torch.bmm, x, y)
        yield "batched", 1, 2.0 * b * m * k * n, nbytes, seconds_of(torch.bmm, x, _tensor(b, n, k).transpose(1, 2))


def _contractions() -> Iterator[Row]:
    """Products whose operands lie in another order than those of matrices do: of samples and experts, say."""
    for n, h, e, f in _CONTRACTED:
        x, w, y = _tensor(n, h), _tensor(e, h, f), _tensor(e, n, f)
        nbytes = _FLOAT * float(x.numel() + w.numel() + y.numel())
        for equation, a, b in (("nh,ehf->enf", x, w), ("enf,ehf->nh", y, w), ("nh,enf->ehf", x, y)):
            yield "contraction", 1, 2.0 * n * h * e * f, nbytes, seconds_of(contract, equation, a, b)


def _batch_norms() -> Iterator[Row]:
    """Forward and backward, of rows that lie along an axis as those of a batch do: their statistics are global."""
    where = gt.placement("cpu", [list(range(gt.world_size()))], ("dp", "tp"))
    for b, c, size in _NORMALIZED:
        x: Any = gt.randn(b, c, size, size, placement=where, sbp=(gt.sbp.split(0), gt.sbp.broadcast)).requires_grad_()
        w, mean, spread = (gt.randn(c, placement=where, sbp=gt.sbp.broadcast) for _ in range(3))

        def both(x: Any = x, w: Any = w, mean: Any = mean, spread: Any = spread) -> None:
            F.batch_norm(x, mean, spread, w, w, training=True).backward(x.detach())
            x.grad = None

        yield "batch_norm", 2, 0.0, 5.0 * _FLOAT * x.numel(), seconds_of(both)


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


def _start_of_a_view() -> Row:
    x = _tensor(16, 16)
    return "view", 1, 0.0, 0.0, seconds_of(x.view, 256)


def _optimizers() -> Iterator[Row]:
    for count, n in ((4, 16), (16, 16), (8, 128), (8, 512)):
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


def _step_of_training(pipeline: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    pipeline.step(x, y)
    optimizer.step()
    optimizer.zero_grad()


def steps_of_one_rank() -> Iterator[tuple[int, int, Step]]:
    """Of each small model, by its number: micro-batches, and a step on one rank of a pipeline, with AdamW's."""
    for k, (model, inputs, targets, loss) in enumerate(small_models()):
        gt.to_global(model, gt.placement.all("cpu"), gt.sbp.broadcast)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        for m in _MICRO_BATCHES:
            runner = gt.pipeline([WholeModel(model)], [gt.placement.all("cpu")], "1f1b", m, loss)
            x, y = (torch.cat([one] * m) for one in (inputs, targets))
            yield k, m, partial(_step_of_training, runner, optimizer, x, y)


def steps_of_plans() -> Iterator[tuple[int, dict[str, Any], Step]]:
    """Of plans of small models: the model's number, what is fixed, and a step, AdamW's too."""
    models = small_models()
    for k, fixed in small_plans(gt.world_size()):
        model, inputs, targets, loss = models[k]
        x, y = (torch.cat([one] * fixed["dp"] * fixed["pp"]) for one in (inputs, targets))
        roomy = replace(KNOWN["dgx-a100"], devices_per_host=gt.world_size())         # any: all is fixed
        planned = gt.strategy(model, x, roomy, gt.world_size(), loss=loss, targets=y, micro_batch=len(inputs), **fixed)
        runner, optimizer = planned.apply(copy.deepcopy(model), loss, torch.optim.AdamW)
        yield k, fixed, partial(_step_of_training, runner, optimizer, x, y)


def counted_rows(rows: Iterator[R]) -> Iterator[R]:
    """The same; rank 0 writes a line for each, which the command that waits counts."""
    for row in rows:
        if gt.rank() == 0:
            print(row[0], flush=True)
        yield row


def main(path: str) -> None:
    """Measure, and write it as JSON."""
    gt.init()
    gt.manual_seed(0)
    with torch.no_grad():
        ops = [row for rows in (_products, _contractions, _batched_products, _convolutions, _attentions,
                                _through_memory) for row in counted_rows(rows())]
        boxings = list(counted_rows(measured_boxings())) if gt.world_size() > 1 else []
    ops += [*counted_rows(_batch_norms()), _start_of_a_view(), *counted_rows(_optimizers())]
    alone, planned = list(counted_rows(steps_of_one_rank())), list(counted_rows(steps_of_plans()))
    taken = iter(seconds_in_turns([step for *_, step in (*alone, *planned)]))
    steps, plans = ([(k, how, next(taken)) for k, how, _ in rows] for rows in (alone, planned))
    if gt.rank() == 0:
        own = replace(world().machine, hosts=())
        transport = next(name for name, rates in TRANSPORTS.items() if rates == own)
        Path(path).write_text(json.dumps({"ops": ops, "boxings": boxings, "steps": steps, "plans": plans,
                                         "transport": transport}))


if __name__ == "__main__":
    main(sys.argv[1])
