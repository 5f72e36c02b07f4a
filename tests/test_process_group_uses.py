"""The backend "globaltensor" of torch.distributed in use: odd tensors, groups, the libraries above it, and bad ends."""
from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import environment, free_port, good, run
from ranks import Ranks
from test_process_group import BUILT, same

from globaltensor.runtime import process_group

pytestmark = pytest.mark.processes
built = pytest.mark.skipif(not BUILT, reason="the native code was not built")


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
    """Tensors that are not one run of memory, in and out; and views of them keep what lies between."""
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
        x = torch.empty(3, dtype=torch.int64)
        assert dist.recv(x, tag=3) == (n - 1 if n > 2 else 0)  # from whoever sends
    if me == n - 1 and n > 2 or n == 2 and me == 0:
        dist.send(torch.arange(3), 1, tag=3)
    for work in sent:
        work.wait()
    x = torch.empty(1)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.tensor([me + 0.0]), (me + 1) % n),
                                        dist.P2POp(dist.irecv, x, (me - 1) % n)]):
        work.wait()
    assert x.item() == (me - 1) % n


def subgroups():
    me = dist.get_rank()
    for parts in ([[0, 1], [2, 3]], [[3, 0], [1], [2]], [[0, 1, 2, 3]]):
        groups = [dist.new_group(part, backend="globaltensor") for part in parts]
        for part, group in zip(parts, groups):
            if me in part:
                assert "shared memory" in process_group.transport(group)
                dist.all_reduce(x := torch.full((50_000,), me + 1.0), group=group)
                same(x, torch.full_like(x, sum(part) + len(part)), f"in {part}")
                dist.broadcast(x.fill_(me), src=part[-1], group=group)
                same(x, torch.full_like(x, part[-1]), f"from the last of {part}")
                dist.destroy_process_group(group)


def threads():
    """What serves the connections of gloo, within the backend, takes no core from others, which Linux can be told."""
    if dist.get_backend() == process_group.NAME and sys.platform == "linux":
        policies = [os.sched_getscheduler(int(thread.name)) for thread in Path("/proc/self/task").glob("*")
                    if (thread / "comm").read_text().startswith("gloo_tcp")]
        assert policies and set(policies) == {os.SCHED_BATCH}, policies


@pytest.mark.sample(2)
@built
@pytest.mark.parametrize("use", [unusual_reductions, strided, works_and_objects, point_to_point, threads])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_other_uses(ranks, use, size):
    ranks(size).run(use)


@built
def test_subgroups(ranks):
    ranks(4).run(subgroups)


# ------------------------------------------------------------------------------------------------ libraries above it


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(20, 64), torch.nn.GELU(), linear(64, 300), linear(300, 3))


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
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("use", [data_parallel, fully_sharded, dtensors])
def test_libraries_above(ranks, use, size):
    ranks(size).run(use)


def symmetric_memory():
    import torch.distributed._symmetric_memory as symm
    n, me = dist.get_world_size(), dist.get_rank()
    process_group.enable_symmetric_memory()
    process_group.enable_symmetric_memory()                 # a second time is no harm
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


# ------------------------------------------------------------------------------------------------ bad ends


@pytest.fixture
def fresh():
    """Ranks of their own, for a test that leaves them unusable."""
    started: list[Ranks] = []
    yield lambda size, timeout=30: started.append(Ranks(size, timeout)) or started[-1]
    for ranks in started:
        ranks.end()


def disagree():
    dist.all_reduce(torch.ones(10 + dist.get_rank()))


def one_dies():
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(100))


def one_waits(seconds=None):
    options = dist.AllreduceOptions()
    if seconds:
        options.timeout = timedelta(seconds=seconds)
    if dist.get_rank() == 0:
        dist.group.WORLD.allreduce([torch.ones(3)], options)


def interrupted():
    if dist.get_rank() == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)     # background jobs of a shell ignore it
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    one_waits()


def everyone():
    dist.all_reduce(torch.ones(3))


@built
def test_ranks_that_disagree_are_told_who_does_what(fresh):
    ranks = fresh(2)
    ranks.start(disagree)
    for text in ranks.answers():
        assert "DistBackendError" in text
        assert "rank 0: allreduce of 10 Float" in text and "rank 1: allreduce of 11 Float" in text


@built
def test_when_one_dies_the_others_raise(fresh):
    ranks = fresh(3)
    ranks.start(everyone)
    ranks.answers()
    began = time.monotonic()
    ranks.start(one_dies)
    for rank, text in enumerate(ranks.answers()):
        assert rank == 1 or "DistBackendError" in text and "rank 1" in text, text
    assert time.monotonic() - began < 10


@built
def test_control_c_ends_a_wait_and_tells_the_others(fresh):
    ranks = fresh(2)
    ranks.run(everyone)
    ranks.start(interrupted)
    assert "KeyboardInterrupt" in ranks.answers()[0]
    ranks.start(everyone)
    assert all("DistBackendError" in text for text in ranks.answers())


@pytest.mark.sample(2)
@built
@pytest.mark.parametrize("own", [None, 1])
def test_waiting_has_an_end(fresh, own):
    ranks = fresh(2, 6)                           # seconds, in which a busy machine can also start them
    ranks.start(one_waits, own)
    text = ranks.answers()[0]
    assert "DistBackendError" in text and ("rank 1" in text if own is None else "not done within 1000 ms" in text), text


@built
def test_ranks_that_cannot_share_memory_go_by_gloo():
    """Here since they are one process; ranks on several hosts take the same way."""
    store, found = dist.HashStore(), {}

    def rank(r):
        group = found[r] = process_group._create(store, r, 2, timedelta(seconds=30))
        for x, op, expected in [(torch.ones(5), dist.ReduceOp.SUM, 2.0), (torch.ones(5) + r, dist.ReduceOp.AVG, 1.5)]:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            group.allreduce([x], options).wait()
            same(x, torch.full((5,), expected), "by gloo")
        group.barrier().wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))
    assert "one process" in found[0].transport and "gloo" in found[0].name()


def test_importing_only_registers():
    """Nothing is started or waited for: a busy machine may take the core away, but seldom five times."""
    code = ("import torch.distributed as dist, globaltensor.runtime.process_group as b, time\n"
            "laps = []\n"
            "for _ in range(5):\n"
            "    began = time.thread_time(); dist.Backend.backend_list.remove(b.NAME); b.register()\n"
            "    laps.append(time.thread_time() - began)\n"
            "print(min(laps))\n"
            "assert dist.Backend(b.NAME) == 'globaltensor' and not dist.is_initialized()")
    assert float(good([sys.executable, "-c", code])) < 1e-3


def test_without_the_native_code_the_error_says_what_to_do():
    code = ("import torch.distributed as dist, globaltensor.runtime.process_group;"
            "dist.init_process_group('globaltensor')")
    status, _, error = run([sys.executable, "-c", code], environment(
        GLOBALTENSOR_NATIVE="0", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())))
    assert status and 'the backend "globaltensor" is not available' in error and "gloo" in error
