"""The backend "globaltensor" of torch.distributed: values of every collective, the libraries above it, and bad ends.

Processes live for the whole file, one set per number of ranks; a test names a function that all of them run. Numbers
are small and whole, so that sums in every dtype are exact: a collective is compared with what it means.
"""
from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
import weakref
from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import ROOT, environment, free_port

from globaltensor import backend
from globaltensor.errors import TransportError

try:
    BUILT = hasattr(backend._native(), "Backend")
except TransportError:
    BUILT = False
built = pytest.mark.skipif(not BUILT, reason="the native code was not built")

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NUMBERS = FLOATS + [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.complex64, torch.complex128]
DTYPES = NUMBERS + [torch.bool]
ODD = [torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64]  # can be moved, not reduced
SIZES = [0, 1, 7, 1000, 20_000, 300_001]              # per rank; in one meeting, in two, by pieces
PLACES = ["heap", "arena", "mixed"]


# ------------------------------------------------------------------------------------------------ the processes


class Ranks:
    """Processes in one group that run what they are told until the end of the file."""

    def __init__(self, size: int, timeout: float = 60) -> None:
        context, port = mp.get_context("spawn"), free_port()
        self.pipes, ends = zip(*(context.Pipe() for _ in range(size)))
        self.processes = [context.Process(target=_serve, args=(r, size, port, end, timeout), daemon=True)
                          for r, end in enumerate(ends)]
        for process, end in zip(self.processes, ends):
            process.start()
            end.close()

    def start(self, function, *args) -> None:
        for pipe in self.pipes:
            pipe.send((function.__name__, args))

    def answers(self, timeout: float = 120) -> list:
        """What each rank returned, or the text of what it raised; None where it died."""
        return [self._answer(pipe, timeout) for pipe in self.pipes]

    def _answer(self, pipe, timeout):
        try:
            assert pipe.poll(timeout), "a rank hangs"
            return pipe.recv()
        except (EOFError, ConnectionError):
            return None

    def run(self, function, *args) -> None:
        """All must run it to the end."""
        self.start(function, *args)
        wrong = [f"rank {r}: {text}" for r, text in enumerate(self.answers()) if text != ""]
        if wrong:
            self.end()
        assert not wrong, "\n".join(wrong)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank, size, port, pipe, timeout):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    from globaltensor import backend                  # noqa: F401  (registers it)
    dist.init_process_group("globaltensor", timeout=timedelta(seconds=timeout))
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            globals()[name](*args)
            pipe.send("")
        except BaseException:
            pipe.send(traceback.format_exc())


@pytest.fixture(scope="module")
def pools():
    found: dict[int, Ranks] = {}
    yield found
    for ranks in found.values():
        ranks.end()


@pytest.fixture
def ranks(pools):
    def of(size: int) -> Ranks:
        if size not in pools or not all(p.is_alive() for p in pools[size].processes):
            pools[size] = Ranks(size)
        return pools[size]
    return of


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


@built
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("collective", REDUCING + MOVING, ids=lambda f: f.__name__)
def test_every_collective_means_what_it_says(ranks, collective, size):
    for dtype in DTYPES if collective in REDUCING else DTYPES + ODD:
        if size in (2, 4) or dtype in (torch.float32, torch.bfloat16):
            ranks(size).run(compare, collective.__name__, dtype)


# ------------------------------------------------------------------------------------------------ other uses


def unusual_reductions():
    n, me = dist.get_world_size(), dist.get_rank()
    for dtype, op, expected in [(torch.int64, dist.ReduceOp.PRODUCT, 6 ** n), (torch.int32, dist.ReduceOp.BAND, 6),
                                (torch.int32, dist.ReduceOp.BOR, 6), (torch.float32, dist.ReduceOp.AVG, 6.0),
                                (torch.bfloat16, dist.ReduceOp.AVG, 6.0), (torch.int32, dist.ReduceOp.AVG, 6)]:
        x = torch.full((1000,), 6, dtype=dtype)
        dist.all_reduce(x, op)
        same(x, torch.full_like(x, expected), f"{op} of {dtype}")
    x, y = torch.full((n, 5), me + 1.0), torch.empty(5)
    dist.reduce_scatter_tensor(y, x, dist.ReduceOp.AVG)
    same(y, torch.full((5,), (n + 1) / 2), "average, scattered")
    for nan in (float("nan"), 1.0):
        x = torch.tensor([nan if me == 1 else 2.0])
        dist.all_reduce(x, dist.ReduceOp.MAX)
        assert x.isnan().item() == (nan != nan)


def strided():
    """Tensors that are no run of memory, in and out; and views of them keep what lies between."""
    n, me = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(6, 10)
    x = whole.t()[2:8:2]                              # [3, 6]
    x.copy_(torch.arange(18.).view(3, 6) + me)
    dist.all_reduce(x)
    same(x, torch.arange(18.).view(3, 6) * n + n * (n - 1) / 2, "a strided tensor")
    assert whole.t()[3].eq(0).all() and whole.t()[8:].eq(0).all()
    y = torch.zeros(n * 4, 3).t()                     # [3, n * 4]
    dist.all_gather_into_tensor(y, torch.full((2, 6), me + 1.0).t().contiguous().view(4, 3).t())
    assert sorted(y.unique().tolist()) == [r + 1.0 for r in range(n)]
    found = [torch.zeros(4, 4)[:, ::2] for _ in range(n)]
    dist.all_gather(found, torch.full((2, 4), float(me)).t())
    same(torch.stack(found), torch.arange(n).float()[:, None, None].expand(n, 4, 2), "strided outputs")
    z = torch.full((4, 2), me + 0j).conj()            # a lazy conjugate
    dist.broadcast(torch.view_as_real(z.resolve_conj()), 0)
    grad = torch.ones(3, requires_grad=True)
    dist.all_reduce(grad)
    same(grad.detach(), torch.full((3,), float(n)), "a leaf that requires grad")


def works_and_objects():
    n, me = dist.get_world_size(), dist.get_rank()
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    assert work.is_completed() and work.wait() and work.is_success()
    assert work.get_future().then(lambda f: f.value()[0].sum().item()).wait() == 4 * n
    found = [None] * n
    dist.all_gather_object(found, {"rank": me})
    assert found == [{"rank": r} for r in range(n)]
    box = [("from", me)]
    dist.broadcast_object_list(box, n - 1)
    assert box == [("from", n - 1)]
    dist.scatter_object_list(box, list(range(n)) if me == 0 else None, 0)
    assert box == [me]
    dist.barrier()
    dist.monitored_barrier() if dist.get_backend() == "gloo" else None


def point_to_point():
    n, me = dist.get_world_size(), dist.get_rank()
    sent = [dist.isend(torch.full((3,), float(tag)), 1, tag=tag) for tag in (1, 2) if me == 0]
    if me == 1:
        for tag in (2, 1):                            # in another order
            dist.recv(x := torch.empty(3), 0, tag=tag)
            same(x, torch.full((3,), float(tag)), "a tagged message")
        assert dist.recv(x := torch.empty(3, dtype=torch.int64)) == (n - 1 if n > 2 else 0)  # from whoever sends
    if me == n - 1 and n > 2 or n == 2 and me == 0:
        dist.send(torch.arange(3), 1)
    for work in sent:
        work.wait()
    x = torch.empty(1)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.tensor([me + 0.0]), (me + 1) % n),
                                        dist.P2POp(dist.irecv, x, (me - 1) % n)]):
        work.wait()
    assert x.item() == (me - 1) % n


def subgroups():
    n, me = dist.get_world_size(), dist.get_rank()
    for parts in ([[0, 1], [2, 3]], [[3, 0], [1], [2]], [[0, 1, 2, 3]]):
        groups = [dist.new_group(part, backend="globaltensor") for part in parts]
        for part, group in zip(parts, groups):
            if me in part:
                assert "shared memory" in backend.transport(group)
                dist.all_reduce(x := torch.full((50_000,), me + 1.0), group=group)
                same(x, torch.full_like(x, sum(part) + len(part)), f"in {part}")
                dist.broadcast(x.fill_(me), src=part[-1], group=group)
                same(x, torch.full_like(x, part[-1]), f"from the last of {part}")
                dist.destroy_process_group(group)


@built
@pytest.mark.parametrize("use", [unusual_reductions, strided, works_and_objects, point_to_point])
@pytest.mark.parametrize("size", [2, 4])
def test_other_uses(ranks, use, size):
    ranks(size).run(use)


@built
def test_subgroups(ranks):
    ranks(4).run(subgroups)


# ------------------------------------------------------------------------------------------------ libraries above it


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.GELU(), torch.nn.Linear(64, 300), torch.nn.Linear(300, 3))


def trained(model: torch.nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        torch.manual_seed(10 * dist.get_rank() + step)
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def data_parallel():
    gloo = dist.new_group(backend="gloo")
    ddp = torch.nn.parallel.DistributedDataParallel
    for a, b in zip(trained(ddp(net(), bucket_cap_mb=0.01)), trained(ddp(net(), process_group=gloo))):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def fully_sharded():
    from torch.distributed.fsdp import fully_shard
    model = net()
    for layer in model:
        fully_shard(layer)
    expected = trained(torch.nn.parallel.DistributedDataParallel(net()))
    for a, b in zip(trained(fully_shard(model)), expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def dtensors():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    full = torch.arange(7 * 6.).view(7, 6)
    for src, dst in product(product([Shard(0), Shard(1), Replicate()], repeat=2), repeat=2):
        same(distribute_tensor(full, mesh, src).redistribute(mesh, dst).full_tensor(), full, f"{src} -> {dst}")
    x = distribute_tensor(full, mesh, [Replicate(), Shard(0)])
    same((x.t() @ x).full_tensor(), full.t() @ full, "a product that is partial")
    part = DTensor.from_local(full, mesh, [Partial(), Replicate()])
    same(part.redistribute(mesh, [Shard(1), Shard(0)]).full_tensor(), 2 * full, "a partial sum")


@built
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("use", [data_parallel, fully_sharded, dtensors])
def test_libraries_above(ranks, use, size):
    ranks(size).run(use)


def symmetric_memory():
    import torch.distributed._symmetric_memory as symm
    n, me = dist.get_world_size(), dist.get_rank()
    backend.enable_symmetric_memory()
    backend.enable_symmetric_memory()                 # a second time is no harm
    t = symm.empty(1024, 3, device="cpu").fill_(me + 1.0)
    handle = symm.rendezvous(t, dist.group.WORLD)
    handle.barrier()
    for r in range(n):
        assert handle.get_buffer(r, (1024, 3), torch.float32).eq(r + 1).all()
    handle.barrier(channel=1)
    handle.get_buffer((me + 1) % n, (5,), torch.float32).fill_(100.0 + me)
    handle.put_signal((me + 1) % n, channel=2)
    handle.wait_signal((me - 1) % n, channel=2)
    assert t.view(-1)[:5].eq(100 + (me - 1) % n).all()
    handle.barrier()
    if me == 0:
        with pytest.raises(RuntimeError, match="waited for rank 1"):
            handle.wait_signal(1, channel=3, timeout_ms=100)
    dist.barrier()
    del t
    assert handle.get_buffer(me, (1,), torch.float32).item() == 100 + (me - 1) % n  # the handle keeps the memory


@built
@pytest.mark.parametrize("size", [2, 4])
def test_symmetric_memory(ranks, size):
    ranks(size).run(symmetric_memory)
