"""How close do the fused boxing passes come to the rate at which a GPU copies its memory?

Four ranks on one GPU. Every pass is one launch that reads each byte of its sources once and writes each byte of its
targets once; GB/s counts both, and `share` is of what a plain copy of the same size reaches, measured beside it. Times
are those of the device, of calls replayed in a CUDA graph; `enqueue us` is what a call costs the host from Python.
Values are compared with torch's before anything is timed.

Then a GPT is trained on the GPU, by plain torch and by global tensors on one rank and on two that share it:
milliseconds of a step, as a small model, whose ops the host must start fast enough, and as one that keeps the GPU busy.
"""
from __future__ import annotations

import itertools
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import globaltensor as gt
from benchmarks.timing import show
from globaltensor.boxings.copy_plan import CopyMove, Strides
from globaltensor.boxings.kernel_program import compile_program
from globaltensor.layouts.layout import layout
from globaltensor.layouts.sbp import Sbp, broadcast, partial_sum, split
from tests.cuda_library import Corner, Library, Region, build, move, shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT

RANKS, MEGABYTES, CALLS, ROUNDS = 4, (64, 512), 10, 7
PATHS = [(split(0), split(1)), (split(1), split(0)), (split(0), broadcast), (partial_sum, split(0)),
         (partial_sum, broadcast)]


class Pass(NamedTuple):
    name: str
    moves: list[CopyMove]
    nbytes: int                                      # read and written
    right: Callable[[], bool]
    plain: Callable[[], object] | None = None        # what torch does for it, where that is one call


def values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Small whole numbers: their sums are exact in every dtype."""
    return torch.randint(-8, 9, shape, device=device).to(dtype)


def boxing(src: Sbp, dst: Sbp, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Pass:
    """The program that the library compiles for this pair, with all ranks in this process."""
    where = gt.placement("cpu", list(range(RANKS)))  # only says how many
    a, b = layout(where, (src,)), layout(where, (dst,))
    program = compile_program(a, b, shape, dtype.itemsize, range(RANKS))
    held, made = ([values(each.local_shape(shape, r), dtype, device) for r in range(RANKS)] for each in (a, b))
    if src is broadcast:
        held = held[:1] * RANKS

    def whole(parts: list[torch.Tensor], sbp: Sbp) -> torch.Tensor:
        if sbp.is_partial:
            return torch.stack(parts).float().sum(0).to(dtype)
        return torch.cat(parts, sbp.dim) if sbp.is_split else parts[0]

    asked = move(program.regions, program.corners, [shard(t) for t in held], [shard(t) for t in made], dtype, dtype,
                 program.op)
    regions = (Region * program.region_count).from_buffer_copy(program.regions)
    nbytes = sum(math.prod(r.size[:r.ndim]) * (r.sources + r.targets) // r.parts for r in regions) * dtype.itemsize
    return Pass(f"{src} -> {dst}", [asked], nbytes, lambda: torch.equal(whole(made, dst), whole(held, src)))


def single(name: str, sources: list[torch.Tensor], target: torch.Tensor, plain: Callable[[], object] | None = None,
           expected: Callable[[], torch.Tensor] | None = None) -> Pass:
    """One region: the sum of all of these, cast."""
    n, shape = len(sources), target.shape
    region = Region(len(shape), n, 1, 0, 1, 0, Strides(*shape))
    asked = move([region], [*[Corner(i) for i in range(n)], Corner(0)], [shard(t) for t in sources], [shard(target)],
                 sources[0].dtype, target.dtype)

    def right() -> bool:
        return torch.equal(target, expected() if expected else torch.stack(sources).float().sum(0).to(target.dtype))

    return Pass(name, [asked], target.nbytes + sum(t.nbytes for t in sources), right, plain)


def passes(nbytes: int, device: torch.device) -> list[Pass]:
    """All that is measured, on tensors of about `nbytes`."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        n = nbytes // dtype.itemsize
        rows, name = max(int(n**0.5) // 64 * 64, 64), str(dtype)[6:]
        columns = n // rows
        for src, dst in PATHS:
            one = boxing(src, dst, (rows, columns), dtype, device)
            found.append(one._replace(name=f"{name} {one.name}"))
        x, turned = values((columns, rows), dtype, device), torch.empty(rows, columns, dtype=dtype, device=device)
        found.append(single(f"{name} turned", [x.t()], turned, lambda x=x: x.t().contiguous()))
        x, odd = values((n + 1,), dtype, device), torch.empty(n, dtype=dtype, device=device)
        found.append(single(f"{name} copied, misaligned", [x[1:]], odd, lambda x=x, odd=odd: odd.copy_(x[1:])))
        other = torch.bfloat16 if dtype is torch.float32 else torch.float32
        x, cast = values((n,), dtype, device), torch.empty(n, dtype=other, device=device)
        found.append(single(f"{name} cast to {str(other)[6:]}", [x], cast, lambda x=x, other=other: x.to(other)))
    found.append(many(nbytes, device))
    return found


def many(nbytes: int, device: torch.device) -> Pass:
    """The gradients of a model: 300 tensors of all sizes, the sum of two of each, in one call."""
    sizes = [(1 + i % 50) ** 2 for i in range(300)]
    sizes = [max(size * nbytes // 2 // sum(sizes), 1) for size in sizes]
    each = [single("", [values((size,), torch.bfloat16, device) for _ in range(2)],
                   torch.empty(size, dtype=torch.bfloat16, device=device)) for size in sizes]
    return Pass("bfloat16, 300 tensors at once", [one.moves[0] for one in each], sum(one.nbytes for one in each),
                lambda: all(one.right() for one in each))


def on_device(call: Callable[[], object], calls: int, rounds: int) -> float:
    """Microseconds of one call on the GPU: a graph of several of them, the median of its replays."""
    call()
    torch.cuda.synchronize()
    graph, marks = torch.cuda.CUDAGraph(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(rounds):
        marks[0].record()
        graph.replay()
        marks[1].record()
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]) * 1e3 / calls)
    return statistics.median(times)


def copy_time(source: torch.Tensor, target: torch.Tensor, calls: int, rounds: int) -> float:
    """Microseconds of the fastest copy: in a graph another engine may do it than outside of one, or than a kernel's."""
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    for start in starts:
        start.record()
        for _ in range(calls):
            target.copy_(source)
    torch.cuda.synchronize()
    eager = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(starts)) * 1e3 / calls
    graph, kernel = (on_device(call, calls, rounds) for call in (
        lambda: target.copy_(source), lambda: torch.neg(source, out=target)))
    return min(eager, graph, kernel)


def check(library: Library, found: list[Pass]) -> None:
    """Raise where a pass makes something else than torch."""
    for one in found:
        library.check(library.reduce(one.moves))
        if not one.right():
            raise AssertionError(f"{one.name}: not what torch makes")


def measure(library: Library, nbytes: int, calls: int, rounds: int) -> list[dict]:
    rows = []
    source, target = (torch.empty(nbytes // 4, device=library.device) for _ in range(2))
    source.normal_()
    copy = 2 * nbytes / copy_time(source, target, calls, rounds) / 1e3
    found = passes(nbytes, library.device)
    check(library, found)
    for one in found:
        us = on_device(lambda: library.check(library.reduce(one.moves)), calls, rounds)
        began = time.perf_counter()
        for _ in range(calls):
            library.reduce(one.moves)
        enqueue = (time.perf_counter() - began) / calls * 1e6
        torch.cuda.synchronize()
        plain = on_device(one.plain, calls, rounds) if one.plain else None
        rate = one.nbytes / us / 1e3
        rows.append({"pass": one.name, "MB": nbytes >> 20, "us": us, "GB/s": rate, "copy GB/s": copy,
                     "share": rate / copy, "torch us": plain, "enqueue us": enqueue})
    return rows


# ------------------------------------------------------------------------------------------------------- training
class Shape(NamedTuple):
    """A GPT and its batch; `amp`: computed in bfloat16 where that is enough."""

    layers: int
    hidden: int
    batch: int
    seq: int
    amp: bool


SHAPES = (Shape(4, 256, 8, 128, False), Shape(12, 768, 16, 1024, True))


def trainer(shape: Shape, ranks: int) -> Callable[[], torch.Tensor]:
    """A step of training, which returns the loss; without ranks, of plain torch."""
    torch.manual_seed(0)
    model = GPT(512, shape.seq, shape.layers, shape.hidden, shape.hidden // 64)
    ids = torch.randint(512, (shape.batch, shape.seq + 1))
    parts = [ids[:, :-1].contiguous(), ids[:, 1:].contiguous()]
    if ranks:
        where = gt.placement("cuda", list(range(ranks)), ("dp",))
        gt.to_global(model, where, broadcast)
        parts = [gt.from_full(part, where, split(0)) for part in parts]
    else:
        model.cuda()
        parts = [part.cuda() for part in parts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=shape.amp):
            loss = F.cross_entropy(model(parts[0]).float().view(-1, 512), parts[1].view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def train(shape: Shape, rounds: int) -> dict:
    """Median milliseconds of a step of each, in turns, the GPU's work included."""
    arms = {"plain ms": trainer(shape, 0), "one rank ms": trainer(shape, 1), "two ranks ms": trainer(shape, 2)}
    losses = {name: [arm().item() for _ in range(3)] for name, arm in arms.items()}
    for name, found in losses.items():
        if not torch.allclose(*map(torch.tensor, (found, losses["plain ms"])), rtol=1e-2 if shape.amp else 1e-4):
            raise AssertionError(f"{name}: losses {found}, not {losses['plain ms']}")
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            began = time.perf_counter()
            for _ in range(3):
                arm()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - began) / 3 * 1e3)
    row = {name: statistics.median(found) for name, found in times.items()}
    return {**shape._asdict(), **row, "one rank / plain": row["one rank ms"] / row["plain ms"]}


def main(json: bool = False, quick: bool = False) -> None:
    for missing, there in (("GPU", torch.cuda.is_available()), ("nvcc", shutil.which("nvcc"))):
        if not there:
            print(f"device: there is no {missing} here, so nothing was measured")
            return
    gt.init(ranks=RANKS)
    with tempfile.TemporaryDirectory() as folder:
        library = Library(build(Path(folder)))
        rows = [row for megabytes in ((8,) if quick else MEGABYTES)
                for row in measure(library, megabytes << 20, 2 if quick else CALLS, 2 if quick else ROUNDS)]
    show("device: boxing passes of four ranks on one GPU", rows, json, gpu=torch.cuda.get_device_name())
    os.environ["GLOBALTENSOR_SHARE_GPU"] = "1"
    show("device: a training step on one GPU", [train(shape, 3 if quick else 20) for shape in SHAPES], json,
         gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main(json=True)
