"""How close do the fused boxing passes come to the rate at which a GPU copies its memory?

Four ranks on one GPU. Every pass is one launch that reads each byte of its sources once and writes each byte of its
targets once; GB/s counts both, and `share` is of what a plain copy of the same size reaches, measured beside it. Times
are those of the device, of calls replayed in a CUDA graph; `enqueue us` is what a call costs the host from Python.
Values are compared with torch's before anything is timed.
"""
from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import globaltensor as gt
from benchmarks.timing import show
from globaltensor.boxings.copy_plan import CopyMove, Strides
from globaltensor.boxings.kernel_program import compile_program
from globaltensor.layouts.layout import layout
from globaltensor.layouts.sbp import Sbp, broadcast, partial_sum, split
from tests.cuda_library import Corner, Library, Region, build, move, shard

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


def check(library: Library, found: list[Pass]) -> None:
    """Raise where a pass makes something else than torch."""
    for one in found:
        library.check(library.reduce(one.moves))
        if not one.right():
            raise AssertionError(f"{one.name}: not what torch makes")


def measure(library: Library, nbytes: int, calls: int, rounds: int) -> list[dict]:
    rows = []
    source, target = (torch.empty(nbytes // 4, device=library.device) for _ in range(2))
    source.zero_()
    copy = 2 * nbytes / on_device(lambda: target.copy_(source), calls, rounds) / 1e3
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


if __name__ == "__main__":
    main(json=True)
