"""The ways to do a boxing that `boxing.py` compares, each ready to be called again and again.

    ceiling     the measured limit (ceiling.c), looped in C; P -> B in place
    new result  the same for P -> B, stored where the source is not, as all of ours are
    direct      ours: the native call, the source in shared memory
    staged      the same, the source in memory of its own
    python      ours as users write it: x.to_global(...), the source in shared memory
    gloo        torch.distributed over gloo; P -> B in place
    MPI         mpi4py, where mpirun started the processes; P -> B in place
    DTensor     x.redistribute(...) over gloo, where its S -> S is an all-gather and a cut
"""
from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import memset
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import globaltensor as gt
from benchmarks.ceiling import Ceiling
from globaltensor.boxings import native
from globaltensor.layouts.layout import layout
from globaltensor.runtime.native import torch_ext

P, B, S = gt.sbp.partial_sum, gt.sbp.broadcast, gt.sbp.split
BOXINGS = {"P -> B": (P, B), "S -> B": (S(0), B), "P -> S": (P, S(0)), "S -> S": (S(0), S(1))}


class Case(NamedTuple):
    """A boxing on all ranks. `nbytes` are those of the largest shard that a rank has before or after.

    The tensor is [n], for S -> S [ranks, ranks, n], so that what one rank has for another lies in one piece.
    """

    boxing: str
    nbytes: int
    dtype: torch.dtype
    rank: int
    ranks: int

    @property
    def shape(self) -> tuple[int, ...]:
        n = self.nbytes // self.dtype.itemsize
        return (self.ranks, self.ranks, n // self.ranks) if self.boxing == "S -> S" else (n,)

    def part(self, sbp: Any) -> tuple[int, ...]:
        """The shape of a shard."""
        return tuple(n // self.ranks if sbp.is_split and sbp.dim == d else n for d, n in enumerate(self.shape))

    @property
    def source(self) -> tuple[int, ...]:
        return self.part(BOXINGS[self.boxing][0])

    @property
    def result(self) -> tuple[int, ...]:
        return self.part(BOXINGS[self.boxing][1])


class Way(NamedTuple):
    """`run()` does the boxing of this rank's `source`, and `part` of what it gives is the new shard."""

    source: torch.Tensor
    run: Callable[[], Any]
    part: Callable[[Any], torch.Tensor]
    loop: Callable[[int, bool], float] | None = None     # `seconds` without Python in between

    def seconds(self, times: int, fresh: bool = False) -> float:
        """Of so many in a row; `fresh`: the source is written anew before each, and the time of that taken off."""
        if self.loop is not None:
            return self.loop(times, fresh)
        run, at, nbytes = self.run, self.source.data_ptr(), self.source.nbytes
        began = time.perf_counter()
        for _ in range(times):
            if fresh:
                memset(at, 0, nbytes)
            run()
        took = time.perf_counter() - began
        if fresh:
            began = time.perf_counter()
            for _ in range(times):
                memset(at, 0, nbytes)
            took -= time.perf_counter() - began
        return took


def ceiling(case: Case, limit: Ceiling, boxing: str = "") -> Way:
    boxing = boxing or case.boxing
    source = limit.source(case.source, case.dtype)
    made = source if boxing == "P -> B" else limit.result(case.result, case.dtype)

    def loop(times: int, fresh: bool) -> float:
        return limit.run(boxing, case.nbytes, case.dtype.itemsize, times, fresh)

    return Way(source, lambda: loop(1, False), lambda _: made, loop)


def new_result(case: Case, limit: Ceiling) -> Way | None:
    return ceiling(case, limit, "P -> new B") if case.boxing == "P -> B" else None


def direct(case: Case, limit: Ceiling) -> Way | None:
    return None if torch_ext is None else _native(case, torch_ext.arena_empty(case.source, case.dtype), True)


def staged(case: Case, limit: Ceiling) -> Way | None:
    return None if torch_ext is None else _native(case, torch.empty(case.source, dtype=case.dtype), False)


def _native(case: Case, source: torch.Tensor, shared: bool) -> Way:
    assert torch_ext.in_arena(source) == shared
    x = _global(case, source)
    boxing = native.find_boxing(x.spec, layout(x.placement, (BOXINGS[case.boxing][1],)))
    items, what = [(boxing, {case.rank: source})], f"bench {case.boxing}"
    return Way(source, lambda: torch_ext.move_shards(items, what, [0]), lambda made: made[0][case.rank],
               loop=lambda times, fresh: torch_ext.time_moves(items, what, times, fresh))


def python(case: Case, limit: Ceiling) -> Way:
    native_memory = torch_ext is not None
    source = (torch_ext.arena_empty(case.source, case.dtype) if native_memory
              else torch.empty(case.source, dtype=case.dtype))
    x, dst = _global(case, source), BOXINGS[case.boxing][1]
    return Way(source, lambda: x.to_global(sbp=dst), lambda y: y.to_local())


def _global(case: Case, source: torch.Tensor) -> gt.GlobalTensor:
    source.zero_()
    x = gt.from_local(source, gt.placement("cpu", range(case.ranks)), BOXINGS[case.boxing][0])
    assert x.shape == case.shape and x.to_local().data_ptr() == source.data_ptr()
    return x


def gloo(case: Case, limit: Ceiling) -> Way:
    x, y = torch.empty(case.source, dtype=case.dtype), torch.empty(case.result, dtype=case.dtype)
    run = {"P -> B": lambda: dist.all_reduce(x), "S -> B": lambda: dist.all_gather_into_tensor(y, x),
           "P -> S": lambda: dist.reduce_scatter_tensor(y, x),
           "S -> S": lambda: dist.all_to_all_single(y.view(-1), x.view(-1))}[case.boxing]
    return Way(x, run, lambda _: x if case.boxing == "P -> B" else y)


def mpi(case: Case, limit: Ceiling) -> Way | None:
    """MPI knows no bfloat16, but how to copy it."""
    if case.dtype is not torch.float32 and case.boxing.startswith("P"):
        return None
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    x, y = torch.empty(case.source, dtype=case.dtype), torch.empty(case.result, dtype=case.dtype)
    a, b = ([t.view(torch.float32).numpy().reshape(-1), MPI.FLOAT] if case.dtype is torch.float32 else
            [t.view(torch.uint8).numpy().reshape(-1), MPI.BYTE] for t in (x, y))
    run = {"P -> B": lambda: world.Allreduce(MPI.IN_PLACE, a, MPI.SUM), "S -> B": lambda: world.Allgather(a, b),
           "P -> S": lambda: world.Reduce_scatter_block(a, b, MPI.SUM),
           "S -> S": lambda: world.Alltoall(a, b)}[case.boxing]
    return Way(x, run, lambda _: x if case.boxing == "P -> B" else y)


def dtensor(case: Case, limit: Ceiling) -> Way:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (case.ranks,))
    src, dst = ([Partial() if s.is_partial else Replicate() if s.is_broadcast else Shard(s.dim)]
                for s in BOXINGS[case.boxing])
    source = torch.empty(case.source, dtype=case.dtype)
    x = DTensor.from_local(source, mesh, src)
    return Way(source, lambda: x.redistribute(placements=dst), lambda y: y.to_local())


WAYS: dict[str, Callable[[Case, Ceiling], Way | None]] = {
    "ceiling": ceiling, "new result": new_result, "direct": direct, "staged": staged, "python": python, "gloo": gloo,
    "MPI": mpi, "DTensor": dtensor}
