"""The backend "globaltensor" of torch.distributed: every collective means what it says.

A table of collectives, times dtypes, sizes, places where tensors lie, and numbers of ranks; each is compared with its
meaning. Numbers are small and whole, so that sums in every dtype are exact.
"""
from __future__ import annotations

import ctypes
import weakref
from itertools import product

import pytest
import torch
import torch.distributed as dist

from globaltensor.errors import TransportError
from globaltensor.runtime import process_group

try:
    BUILT = hasattr(process_group._extension(), "Backend")
except TransportError:
    BUILT = False
pytestmark = [pytest.mark.processes, pytest.mark.skipif(not BUILT, reason="the native code was not built")]

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NUMBERS = FLOATS + [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.complex64, torch.complex128]
DTYPES = NUMBERS + [torch.bool]
ODD = [torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64]  # can be moved, not reduced
SIZES = [0, 1, 7, 1000, 20_000, 300_001]              # per rank; in one meeting, in two, by pieces
PLACES = ["heap", "arena", "mixed"]


# ------------------------------------------------------------------------------------------------ values


def values(rank: int, n: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What rank `rank` begins with: every rank can compute it for all."""
    numbers = (torch.arange(n) * 7 + rank * 3 + salt) % 5
    if dtype == torch.bool:
        return numbers == 0
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers * 2 % 3).double()).to(dtype)
    return numbers.to(dtype)


def placed(t: torch.Tensor, place: str) -> torch.Tensor:
    """The same, where it is told to lie. `mixed`: elsewhere on every other rank."""
    if place == "heap" or place == "mixed" and dist.get_rank() % 2:
        return t
    library = ctypes.CDLL(None)
    library.gt_alloc.restype, library.gt_alloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.gt_free.argtypes = [ctypes.c_void_p]
    data = library.gt_alloc(max(t.nbytes, 1))
    room = (ctypes.c_char * max(t.nbytes, 1)).from_address(data)
    weakref.finalize(room, library.gt_free, data)
    return torch.frombuffer(room, dtype=torch.uint8)[:t.nbytes].view(t.dtype).view(t.shape).copy_(t)


def same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if got.dtype.itemsize == 1 and got.dtype.is_floating_point or got.dtype in ODD:
        got, expected = got.view(torch.uint8), expected.view(torch.uint8)
    assert got.shape == expected.shape and torch.equal(got, expected), f"{what}: {got} is not {expected}"


def reduced(all: list[torch.Tensor], op) -> torch.Tensor:
    stack = torch.stack(all)
    if op == dist.ReduceOp.SUM:
        return stack.any(0) if stack.dtype == torch.bool else stack.sum(0, dtype=stack.dtype)
    if stack.dtype == torch.bool:
        return stack.any(0) if op == dist.ReduceOp.MAX else stack.all(0)
    return stack.amax(0) if op == dist.ReduceOp.MAX else stack.amin(0)


OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN]


def all_reduce(x, all, me, op, **_):
    dist.all_reduce(x, op)
    yield x, reduced(all, op)


def all_reduce_coalesced(x, all, me, op, place, **_):
    many = [placed(x.clone(), place) for _ in range(5)]
    with dist.distributed_c10d._coalescing_manager():
        for t in many:
            dist.all_reduce(t, op)
    for t in many:
        yield t, reduced(all, op)


def reduce(x, all, me, op, **_):
    for root in range(len(all)):
        y = x.clone()
        dist.reduce(y, root, op)
        if root == me:
            yield y, reduced(all, op)


def reduce_scatter(x, all, me, op, place, **_):
    n, salted = len(all), [[values(r, len(x), x.dtype, q) for q in range(len(all))] for r in range(len(all))]
    expected = reduced([salted[r][me] for r in range(n)], op)
    y = placed(torch.empty_like(x), place)
    dist.reduce_scatter_tensor(y, placed(torch.cat(salted[me]), place), op)
    yield y, expected
    whole = placed(torch.cat(salted[me]), place)      # into the rank's own part of the input
    own = whole.narrow(0, me * len(x), len(x))
    dist.reduce_scatter_tensor(own, whole, op)
    yield own, expected
    y = torch.empty_like(x)
    dist.reduce_scatter(y, [placed(t, place) for t in salted[me]], op)
    yield y, expected


def all_gather(x, all, me, place, **_):
    n = len(all)
    y = placed(torch.empty(n * len(x), dtype=x.dtype), place)
    dist.all_gather_into_tensor(y, x)
    yield y, torch.cat(all)
    own = y.fill_(0).narrow(0, me * len(x), len(x)).copy_(x)  # in place
    dist.all_gather_into_tensor(y, own)
    yield y, torch.cat(all)
    found = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(found, x)
    yield torch.cat(found), torch.cat(all)
    y, x = torch.empty(n, len(x), dtype=x.dtype), x.clone()
    with dist.distributed_c10d._coalescing_manager():
        dist.all_gather_into_tensor(y, x)
        dist.all_gather_into_tensor(z := y.clone(), x)
    yield torch.cat([y, z]), torch.stack(all + all)


def broadcast(x, all, me, **_):
    for root in range(len(all)):
        y = x.clone()
        dist.broadcast(y, root)
        yield y, all[root]


def gather_and_scatter(x, all, me, **_):
    for root in range(len(all)):
        found = [torch.empty_like(x) for _ in all] if me == root else None
        dist.gather(x, found, root)
        if me == root:
            yield torch.cat(found), torch.cat(all)
        y = torch.empty_like(x)
        dist.scatter(y, [t.clone() for t in all] if me == root else None, root)
        yield y, all[me]


def all_to_all(x, all, me, place, **_):
    n = len(all)
    pieces = [[values(r, len(x), x.dtype, q) for q in range(n)] for r in range(n)]
    expected = torch.cat([pieces[r][me] for r in range(n)])
    y = placed(torch.empty_like(expected), place)
    dist.all_to_all_single(y, placed(torch.cat(pieces[me]), place))
    yield y, expected
    found = [torch.empty_like(x) for _ in range(n)]
    dist.all_to_all(found, [placed(t, place) for t in pieces[me]])
    yield torch.cat(found), expected


def uneven(x, all, me, place, **_):
    """Rank r gives (r + 2 q) % 4 times len(x) % 50 elements to rank q; all-gathers r + 1 elements."""
    n, unit = len(all), len(x) % 50
    sizes = [[(r + 2 * q) % 4 * unit for q in range(n)] for r in range(n)]
    pieces = [[values(r, sizes[r][q], x.dtype, q) for q in range(n)] for r in range(n)]
    y = placed(torch.empty(sum(sizes[r][me] for r in range(n)), dtype=x.dtype), place)
    dist.all_to_all_single(y, placed(torch.cat(pieces[me]), place), [sizes[r][me] for r in range(n)], sizes[me])
    yield y, torch.cat([pieces[r][me] for r in range(n)])
    found = [torch.empty(r + 1, dtype=x.dtype) for r in range(n)]
    dist.all_gather(found, values(me, me + 1, x.dtype))
    yield torch.cat(found), torch.cat([values(r, r + 1, x.dtype) for r in range(n)])


REDUCING = [all_reduce, all_reduce_coalesced, reduce, reduce_scatter]
MOVING = [all_gather, broadcast, gather_and_scatter, all_to_all, uneven]


def compare(name: str, dtype: torch.dtype) -> None:
    collective, me, n = globals()[name], dist.get_rank(), dist.get_world_size()
    ops = OPS if collective in REDUCING and not dtype.is_complex else OPS[:1]
    sizes = SIZES if dtype in (torch.float32, torch.bfloat16) else SIZES[:-1]
    for size, place, op in product(sizes, PLACES, ops):
        all = [values(r, size, dtype) for r in range(n)]
        for got, expected in collective(placed(all[me].clone(), place), all=all, me=me, op=op, place=place):
            same(got, expected, f"{name}, {n} ranks, {size} {dtype} in {place}, {op}")


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 4))])
@pytest.mark.parametrize("collective", REDUCING + MOVING, ids=lambda f: f.__name__)
def test_every_collective_means_what_it_says(ranks, collective, size):
    for dtype in DTYPES if collective in REDUCING else DTYPES + ODD:
        if size == 4 or dtype in (torch.float32, torch.bfloat16):
            ranks(size).run(compare, collective.__name__, dtype)
