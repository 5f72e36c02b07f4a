"""Processes whose devices stand in for others, with an engine of their own, as GPUs have NCCL.

`globaltensor run -n 2 engine.py npu [kernels]`. With `kernels`, those of csrc/ box what is small between processes. In
place of npu, cuda stands for the GPUs of this host and NCCL. With `cpu`, nothing lies on devices.

Prints the name of each check that passed.
"""
from __future__ import annotations

import sys
from pathlib import Path

with_kernels, without_devices = "kernels" in sys.argv, "cpu" in sys.argv
sys.argv[1:] = ["cuda" if "cuda" in sys.argv else "npu"]
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import stand_in  # noqa: E402
import stand_in_engine  # noqa: E402

stand_in_engine.provide(sys.argv[1])
stand_in.load = lambda name: name                    # it is loaded
import device  # noqa: E402
import torch  # noqa: E402

import globaltensor as gt  # noqa: E402
from globaltensor.runtime import device_kernels  # noqa: E402
from globaltensor.runtime.world import world  # noqa: E402
from globaltensor.tensors import gradients  # noqa: E402

STANDS_IN = device.NAME != "cuda"                    # who counts what its engine does
kernels = stand_in.kernels_for_tests(device.NAME) if with_kernels else None
if with_kernels:
    device_kernels.provide_kernels(device.NAME, lambda: kernels)


def zero_along_dp():
    for stage in (1, 2, 3):
        for by_layer in (False, True) if stage == 3 else (False,):
            device.trains(gt.placement(device.NAME, [0, 1], ("dp",)), device.S(0), device.B, "dp", stage,
                          make=device.Headed, by_layer=by_layer)


def gradients_of_two_kinds():
    """Large ones are begun during backward, by the engine. Small ones are, too, but where kernels reduce them."""
    where = gt.placement(device.NAME, [0, 1], ("dp",))
    plain = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(3)))
    net = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(3)))
    net.load_state_dict(plain.state_dict())
    gt.to_global(net, where, device.B)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, net)]
    for step in range(3):
        x = torch.randn(6, 400, generator=torch.Generator().manual_seed(step))
        for m, own, batch in ((plain, optimizers[0], x), (net, optimizers[1], gt.from_full(x, where, device.S(0)))):
            own.zero_grad()
            m(batch).square().mean().backward()
            if m is net and step:
                begun = [one.leaf.dim() for bucket in gradients._buckets.under_way for one in bucket.reductions]
                assert sorted(begun) == ([2] * 3 if with_kernels else [1] * 3 + [2] * 3), begun
            own.step()
    for p, q in zip(plain.parameters(), net.parameters(), strict=True):
        device.same(q.detach().full_tensor(), p.detach(), rtol=1e-5, atol=1e-6)


def micro_batches_of_a_pipeline():
    """By way of the CPU in the first step of a kind, by the engine from then on; shapes may change."""
    loss, stages = torch.nn.functional.cross_entropy, [gt.placement(device.NAME, [rank]) for rank in (0, 1)]
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        plain, net = device.network(), device.network()
        runner = gt.pipeline(net, stages, schedule, micro_batches=4, loss=loss)
        for step, samples in enumerate((8, 8, 12, 8, 12)):
            batch = torch.randint(11, (samples,), generator=torch.Generator().manual_seed(step))
            plain.zero_grad(), net.zero_grad()
            want = loss(plain(batch), batch)
            want.backward()
            before = len(stand_in_engine.calls)
            device.same(runner.step(batch, batch).full_tensor(), want.detach())
            moved = [call for call in stand_in_engine.calls[before:] if call in ("send", "recv")]
            # four micro-batches each way; and a word through each channel when it is opened
            expected = {0: 0, 1: 10, 2: 0, 3: 8, 4: 8}[step] if STANDS_IN else 0
            assert len(moved) == expected, (schedule, step, moved)
            for p, q in zip(plain.parameters(), net.parameters(), strict=True):
                device.same(q.grad.full_tensor(), p.grad, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for _ in range(2):
                device.same(runner.eval(batch).full_tensor(), plain(batch), rtol=1e-5, atol=1e-6)


def stages_of_two_ranks():
    """Tensor parallelism within stages, several stages on a rank, and messages between ranks of other numbers."""
    loss = torch.nn.functional.cross_entropy
    pair = [gt.placement(device.NAME, ranks, ("tp",)) for ranks in ([0, 1], [2, 3])]
    uneven = [gt.placement(device.NAME, ranks, ("tp",)) for ranks in ([2], [0, 1, 3])]
    for schedule, stages, chunks, plan in (("1f1b", pair, None, {"1.*": {"tp": device.S(0)}}), ("zb-v", pair, None, {}),
                                           ("interleaved", pair, 2, {}), ("1f1b", uneven, None, {})):
        plain, net = device.network(), device.network()
        if plan:
            gt.parallelize(net[:2], stages[0], plan)
        runner = gt.pipeline(net, stages, schedule, micro_batches=4, loss=loss, chunks=chunks)
        for step in range(3):
            batch = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step))
            plain.zero_grad(), net.zero_grad()
            want = loss(plain(batch), batch)
            want.backward()
            before = len(stand_in_engine.calls)
            device.same(runner.step(batch, batch).full_tensor(), want.detach(), schedule)
            sent = {"send", "recv"} & {*stand_in_engine.calls[before:]}
            assert bool(sent) == (step > 0 and STANDS_IN), (schedule, step, sent)
            for p, q in zip(plain.parameters(), net.parameters(), strict=True):
                device.same(q.grad.full_tensor(), p.grad, schedule, rtol=1e-5, atol=1e-6)


def on_the_cpu():
    """Ranks of which one has no device to ask, either."""
    gt.metrics()
    x = gt.from_full(torch.arange(6.0), device.two("cpu"), device.S(0))
    device.same(x.to_global(sbp=device.B).full_tensor(), torch.arange(6.0))
    numbers = gt.metrics(flops=1.0)
    assert numbers["mfu"] > 0 and "peak_device_memory_bytes" not in numbers, numbers


CHECKS = [*device.OF_TWO_PROCESSES, zero_along_dp, gradients_of_two_kinds, micro_batches_of_a_pipeline]
OF_FOUR_PROCESSES = [stages_of_two_ranks]

if __name__ == "__main__":
    gt.init()
    assert world().engine == (stand_in_engine.NAME if STANDS_IN else "nccl") and not world().staged
    gradients.TIMES_LATENCY = 0                      # of models that are so small
    for check in [on_the_cpu] if without_devices else CHECKS if gt.world_size() == 2 else OF_FOUR_PROCESSES:
        check()
        print(check.__name__, flush=True)
    if gt.world_size() > 2 or without_devices or not STANDS_IN:
        sys.exit()
    collectives = {"all_reduce", "reduce_scatter", *(() if with_kernels else ("all_gather", "all_to_all"))}
    assert {*stand_in_engine.calls} == {"messages", "send", "recv", *collectives}, {*stand_in_engine.calls}
    assert not with_kernels or kernels.calls.count("gt_cuda_reduce_in_sync") > 50
