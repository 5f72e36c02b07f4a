"""ZeRO 1 and 2 over a link: parameters that come while the program goes on are those of one device, whoever reads them
first, and however.

`write_behind.py WHICH [TYPE]`: on the CPU, or on devices that stand in for others, with an engine of their own.
"""
import atexit
import copy
import gc
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import torch

TYPE = sys.argv[2] if len(sys.argv) > 2 else "cpu"
if TYPE != "cpu":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import stand_in
    import stand_in_engine
    stand_in_engine.provide(TYPE)

import globaltensor as gt  # noqa: E402
from globaltensor.parallel import write_behind  # noqa: E402
from globaltensor.runtime import exchange  # noqa: E402
from globaltensor.tensors import gradients  # noqa: E402

SEED = 20_261_128
WIDTH, LAYERS = 64, 4
S, B = gt.sbp.split(0), gt.sbp.broadcast


class Job:
    """A model, its ZeRO optimizer, and a twin on one device."""

    def __init__(self, stage=1, dtype=torch.float32, optimizer=torch.optim.SGD):
        torch.manual_seed(SEED)
        self.plain = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.where = gt.placement.all(TYPE)
        self.net = gt.to_global(copy.deepcopy(self.plain).to(dtype), self.where, B)
        self.optimizer = gt.zero(optimizer(self.net.parameters(), lr=0.1), stage=stage)
        self.twin = optimizer(self.plain.parameters(), lr=0.1)
        self.generator = torch.Generator().manual_seed(SEED)
        self.dtype = dtype

    def step(self):
        x = torch.randn(16, WIDTH, generator=self.generator)
        self.net(gt.from_full(x.to(self.dtype), self.where, S)).square().mean().backward()
        self.plain(x).square().mean().backward()
        for optimizer in (self.optimizer, self.twin):
            optimizer.step()
            optimizer.zero_grad()

    def arriving(self):
        return under_way(self.net)

    def check(self):
        for p, q in zip(self.net.parameters(), self.plain.parameters(), strict=True):
            same(p.full_tensor().float(), q)

    def first(self, parameter=0):
        """This rank's shard, and what it shall be."""
        return next(iter([*self.net.parameters()][parameter].shards.values())), [*self.plain.parameters()][parameter]


def under_way(net):
    """Which parameters are not there yet?"""
    return [p.arriving is not None and p.arriving._of.boxing is not None for p in net.parameters()]


def same(shard, value):
    torch.testing.assert_close(shard.cpu(), value, rtol=1e-6, atol=1e-6)


def training(job):
    for _ in range(3):
        job.step()
        assert all(job.arriving()), job.arriving()
    job.check()


def nobody_reads_before_the_next_step(job):
    """The parameters of a layer that does not run."""
    last = job.net[-1], job.plain[-1]
    job.step()
    job.net, job.plain = job.net[:-1], job.plain[:-1]
    for _ in range(2):
        job.step()
    job.net.append(last[0]), job.plain.append(last[1])
    job.check()


def one_rank_reads(job):
    """At other points of the program than others, and the last first."""
    for k in range(3):
        job.step()
        if gt.rank() == k % gt.world_size():
            same(*job.first(-1))
            same(*job.first(2))
    job.check()


def one_rank_holds(job):
    """Memory of a parameter, a view, or all of them."""
    held = []
    for _ in range(3):
        job.step()
        if gt.rank() == 0:
            held += [job.first(0)[0], next(iter(job.net[1].weight.view(-1).shards.values()))]
            held += [job.net[2].weight.detach()]
            job.step_of_one = job.net.state_dict()
            held += [job.first(-1)[0].numpy() if TYPE == "cpu" else job.first(-1)[0].view(-1)]
        job.step()
        if gt.rank() == 0:
            same(held[0], job.plain[0].weight)
            same(held[1], job.plain[1].weight.reshape(-1))
            same(next(iter(held[2].shards.values())), job.plain[2].weight)
            same(torch.as_tensor(held[3]), job.plain[-1].bias)
            same(next(iter(job.step_of_one["3.weight"].shards.values())), job.plain[3].weight)
    job.check()


def written_to(job):
    """Parameters are written to after a step, in several ways, while they come."""
    for _ in range(2):
        job.step()
        with torch.no_grad():
            job.net[0].weight *= 0.5
            job.plain[0].weight *= 0.5
            new = torch.randn(WIDTH, WIDTH, generator=job.generator) / 10
            job.net[1].weight.data = gt.from_full(new.clone(), job.where, B)
            job.plain[1].weight.data = new
            job.net[2].weight.copy_(gt.from_full(new, job.where, B))
            job.plain[2].weight.copy_(new)
            for shard in job.net[3].weight.shards.values():
                shard.add_(0.01)
            job.plain[3].weight += 0.01
    job.step()
    job.check()


def loaded(job):
    job.step()
    states = copy.deepcopy(job.net.state_dict()), copy.deepcopy(job.optimizer.state_dict())
    plain = copy.deepcopy(job.plain.state_dict())
    job.step()
    job.net.load_state_dict(states[0]), job.optimizer.load_state_dict(states[1]), job.plain.load_state_dict(plain)
    job.step()
    job.check()


def recorded(job):
    """By one rank alone, which sees one boxing."""
    for _ in range(2):
        with gt.record() if gt.rank() == 0 else nullcontext() as moves:
            job.step()
        if moves is not None:
            gathers = [move for move in moves if move.op == "zero"]
            assert len(gathers) == 1 and gathers[0].tensors == 2 * LAYERS and set(gathers[0].calls) == {"all_gather"}, (
                moves)
            assert not any(job.arriving())
    job.check()


def refused(job):
    """In a block that allows no boxing: what was begun is there outside of it."""
    for _ in range(2):
        job.step()
        x = torch.randn(16, WIDTH, generator=job.generator)
        job.net(gt.from_full(x, job.where, S)).square().mean().backward()
        job.plain(x).square().mean().backward()
        assert job.net[0].weight.grad is not None                # reduced outside
        try:
            with gt.boxing("forbid"):
                job.optimizer.step()
        except gt.BoxingError:
            pass
        else:
            raise AssertionError("it was not forbidden")
        job.twin.step()
        for optimizer in (job.optimizer, job.twin):
            optimizer.zero_grad()
    job.step()
    job.check()


def read_by_a_thread(job):
    for _ in range(3):
        job.step()
        seen = []
        threads = [threading.Thread(target=lambda k=k: seen.append(job.first(k)[0].clone())) for k in (5, 0, 5)]
        for thread in threads:
            thread.start()
        job.check()
        for thread in threads:
            thread.join()
        assert len(seen) == 3


def read_without_gradients(job):
    for mode in (torch.no_grad, torch.inference_mode):
        job.step()
        x = torch.ones(4, WIDTH)
        with mode():
            torch.testing.assert_close(job.net(gt.from_full(x, job.where, S)).full_tensor().cpu(), job.plain(x),
                                       rtol=1e-5, atol=1e-5)
    job.step()
    job.check()


def copied(job):
    job.step()
    twin = copy.deepcopy(job.net)
    assert twin[0].weight.arriving is None
    job.step()
    detached = [p.detach() for p in job.net.parameters()]
    for p, q in zip(detached, job.plain.parameters(), strict=True):
        same(p.full_tensor(), q)
    for p, q in zip(detached, job.net.parameters(), strict=True):
        assert [t.data_ptr() for t in p.shards.values()] == [t.data_ptr() for t in q.shards.values()]
    job.check()


def compiled(job):
    run = torch.compile(job.net, backend="eager")
    for _ in range(2):
        job.step()
        x = torch.ones(4, WIDTH)
        torch.testing.assert_close(run(gt.from_full(x, job.where, S)).full_tensor().cpu(), job.plain(x),
                                   rtol=1e-5, atol=1e-5)
    job.check()


def dropped(job):
    for _ in range(3):
        other = Job()
        other.step()
        del other
        gc.collect()
    job.step()
    job.check()


def same_bits_as_at_once(dtype):
    runs, times = [], write_behind._times_behind
    for write_behind._times_behind in (times, lambda *_: {}):
        job = Job(2, dtype, torch.optim.AdamW)
        for _ in range(4):
            job.step()
            assert all(job.arriving()) == (write_behind._times_behind is times)
        runs.append([p.full_tensor() for p in job.net.parameters()])
    write_behind._times_behind = times
    assert all(map(torch.equal, *runs))


def read_on_another_stream(job):
    """What is waited for there is written on the stream of the step, for which that one waits."""
    device, index = job.first()[0].device, torch.accelerator.current_device_index()
    first, other = torch.accelerator.current_stream(device), torch.Stream(device=device)
    for _ in range(2):
        job.step()
        before = len(stand_in_engine.waited_on), stand_in.waits(other, first)
        torch.accelerator.set_stream(other)
        same(*job.first())
        assert torch.accelerator.current_stream(device) == other
        torch.accelerator.set_stream(first)
        torch.accelerator.set_device_index(index)
        assert {*stand_in_engine.waited_on[before[0]:]} == {first.stream_id} and not all(job.arriving())
        assert stand_in.waits(other, first) == before[1] + 1
    job.check()


def captured_in_a_graph(job):
    """Nothing is begun there which may end behind it."""
    module = torch.get_device_module(TYPE)
    for captures in (True, False, True, False):
        module.is_current_stream_capturing = lambda captures=captures: captures
        job.step()
        assert any(job.arriving()) != captures and not gradients._buckets.under_way
    for read in (True, False):
        job.step()
        before = len(stand_in_engine.waited_on)
        with suppress(AttributeError):               # there is no CUDA
            torch.cuda.CUDAGraph.capture_begin(None)
        waited = len(stand_in_engine.waited_on)
        assert waited > before
        if read:                                     # without a wait
            same(*job.first())
            assert len(stand_in_engine.waited_on) == waited
    job.check()


def grid():
    """Tensor parallelism within hosts: matrices come behind; what takes several steps is there at once."""
    where = gt.placement(TYPE, [[0, 1], [2, 3]], axis_names=("dp", "tp"))
    torch.manual_seed(SEED)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)).double()
    net = gt.to_global(copy.deepcopy(plain), where, {"0.*": {"tp": S}, "2.weight": {"tp": gt.sbp.split(1)}})
    optimizers = gt.zero(torch.optim.AdamW(net.parameters(), lr=0.01)), torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(4):
        x = torch.randn(8, 64, dtype=torch.float64)
        net(gt.from_full(x, where, [S, B])).square().mean().backward()
        plain(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        # a bias in two hosts, that is in one part on each, takes two steps; devices reduce over hosts as they like
        assert under_way(net) == [True, False, True, TYPE != "cpu"], under_way(net)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor().cpu(), q)


def main(which):
    write_behind.TIMES_LATENCY = write_behind.LEAST = 0        # pieces of such a small model, too
    if which == "ends":                              # when what it sends may not be sent yet
        atexit.register(lambda: print("with", len(exchange._unfinished), "messages that nobody waited for"))
        job = Job()
        for _ in range(2):
            job.step()
        large = gt.zero(torch.optim.SGD([weight := torch.nn.Parameter(gt.ones(4000, 8000, placement=job.where, sbp=B))],
                                        lr=1.0))
        weight.sum().backward()
        large.step()
        if gt.rank():
            same(next(iter(weight.shards.values())), torch.zeros(4000, 8000))
            same(*job.first())
        assert exchange._unfinished
        return
    if which == "grid":
        grid()
        return
    of_devices = [read_on_another_stream, captured_in_a_graph] * (TYPE not in ("cpu", "cuda"))
    for check in (training, nobody_reads_before_the_next_step, one_rank_reads, one_rank_holds, written_to, loaded,
                  recorded, refused, read_by_a_thread, read_without_gradients, copied, compiled, dropped, *of_devices):
        for stage in (1, 2):
            check(Job(stage))
    for dtype in (torch.bfloat16, torch.float64):
        same_bits_as_at_once(dtype)


if __name__ == "__main__":
    main(sys.argv[1])
