"""The kernels of csrc/ on the path that the package takes with them: `device_kernels.py [cuda] [all] [PLANTS...]`.

The device is the stand-in (stand_in.py), and its kernels are the GPU's, run as threads. Without arguments it is checked
that boxings and random numbers are right and that these kernels make them; `all` runs checks of device.py again. Each
PLANTS, such as GT_BAD_COPY=copies, plants a mistake: the self-test must find it, in that kernel and no other, and what
the program computes must be right all the same. Prints the name of each check that passed.
"""
from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import sys
import warnings
from pathlib import Path

name = "cuda" if sys.argv[1:2] == ["cuda"] else "npu"
plants, sys.argv[1:] = [word for word in sys.argv[1:] if word != name], [name]
sys.path.insert(0, str(Path(__file__).parent))
import device  # noqa: E402
import torch  # noqa: E402
from stand_in import kernels_for_tests, plant  # noqa: E402

import globaltensor as gt  # noqa: E402
from globaltensor.boxings import device_boxing, redistribute  # noqa: E402
from globaltensor.boxings.run_steps import RunningBoxing  # noqa: E402
from globaltensor.cli import doctor  # noqa: E402
from globaltensor.runtime import device_kernels  # noqa: E402

kernels = kernels_for_tests(device.NAME)
device_kernels.provide_kernels(device.NAME, lambda: kernels)
WHERE = torch.device(device.NAME, 0)
by_messages: list[str] = []


def counted(moves, plans, purpose, check=True):      # torch ops, where no kernel of ours does it
    by_messages.append(" ".join(str(m.spec.placement.type) + str(m.dst.placement.type) for m in moves))
    return RunningBoxing(moves, plans, purpose, check)


redistribute.RunningBoxing = counted


def boxings_run_on_the_kernels():
    x = gt.from_full(torch.arange(35.0).view(5, 7), gt.placement(device.NAME, [[0, 1], [2, 3]]), gt.sbp.split(0))
    x.to_global(sbp=gt.sbp.broadcast)                # the first use of the devices: the self-test
    by_messages.clear()
    kernels.calls.clear()
    x.to_global(sbp=(gt.sbp.broadcast, gt.sbp.split(1)))
    assert kernels.calls == ["gt_cuda_reduce"] * device.DEVICES and not by_messages, (kernels.calls, by_messages)


def boxings_of_all_pairs():
    sbps = [gt.sbp.split(0), gt.sbp.split(1), gt.sbp.broadcast, gt.sbp.partial_sum]
    square = gt.placement(device.NAME, [[0, 1], [2, 3]])
    pairs = [(src, dst, device.two(), gt.placement(device.NAME, ranks))
             for src, dst in itertools.product(sbps, repeat=2) for ranks in ([0, 1], [3, 0, 2])]
    nd = list(itertools.product(itertools.product(sbps, repeat=2), repeat=2))
    pairs += [(src, dst, square, square) for src, dst in nd[::7]]
    for k, (src, dst, a, b) in enumerate(pairs):
        dtype = (torch.float32, torch.bfloat16, torch.int64, torch.float64)[k % 4]
        full = torch.randint(-40, 40, (5, 9)).to(dtype)
        by_messages.clear()
        x = gt.from_full(full, a, src).to_global(b, dst)
        assert not by_messages, (src, dst, a, b)
        device.shards_are_where_they_should_be(x)
        device.same(x.full_tensor(), full, (a, src, b, dst))


def large_sums_are_divided_among_the_devices():
    full = torch.randn(300, 100)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = gt.from_full(full.mul(5).to(dtype), gt.placement(device.NAME, [0, 1, 2, 3]), gt.sbp.partial_sum)
        boxing = device_boxing.find_device_boxing(x.spec, x.to_global(sbp=gt.sbp.broadcast).spec.layout)
        assert boxing is not None and len(boxing.steps[0].plans) == device.DEVICES
        for shard in x.to_global(sbp=gt.sbp.broadcast).shards.values():
            device.same(shard, full.mul(5).to(dtype), dtype)


def tensors_of_all_strides():
    full = torch.randn(6, 4, 10)
    for view in (full.transpose(0, 2), full[:, ::2], full[1:, :, 3:], full.expand(2, 6, 4, 10)):
        for src, dst in ((gt.sbp.split(0), gt.sbp.split(1)), (gt.sbp.split(1), gt.sbp.broadcast)):
            x = gt.from_full(full, device.two(), gt.sbp.broadcast)
            y = (x.transpose(0, 2) if view.shape[0] == 10 else x[:, ::2] if view.shape[1] == 2 else
                 x[1:, :, 3:] if view.dim() == 3 else x.expand(2, 6, 4, 10))
            device.same(y.to_global(sbp=src).to_global(sbp=dst).full_tensor(), view)


def streams_are_those_of_the_devices():
    a, b = gt.ones(40, 3, placement=device.two(), sbp=gt.sbp.partial_sum), []
    for k in range(5):
        a = a.to_global(sbp=gt.sbp.split(k % 2)) + k
        b.append(a.full_tensor().sum().item())
    assert b == [120.0 * (1 + k * (k + 1) / 2) for k in range(5)], b


def random_numbers_run_on_the_kernels():
    kernels.calls.clear()
    device.random_numbers_are_those_of_the_cpu()
    laws = {call for call in kernels.calls if "fill" in call}
    assert laws == {f"gt_cuda_fill_{law}" for law in
                    ("words", "uniform", "normal", "exponential", "integers", "bernoulli")}, laws


def the_self_test_is_quick_and_said_once():
    assert kernels.calls.count("gt_cuda_load") <= 4  # devices
    verdict = device_kernels.kernel_verdict(WHERE)
    assert verdict is not None and not verdict.failed and verdict.passed == set(device_kernels.KERNELS)
    assert "10 of 10 kernels passed" in str(verdict) and verdict.seconds < 20, verdict.seconds


def doctor_says(*expected: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = doctor.command(argparse.Namespace(json=False))
    assert code == ("is not used" in expected[0]) and all(text in printed.getvalue() for text in expected), (
        code, printed.getvalue())


def doctor_prints_the_verdict():
    doctor_says("10 of 10 kernels passed", f"{device.DEVICES} of type {device.NAME}", f"kernels on {WHERE}",
                *["through the CPU"] * (device.NAME != "cuda"))


def what_is_missing_is_said_once_and_done_by_torch_ops():
    def missing():
        raise device_kernels.MissingKernels("no kernels", "there is no compiler", "install one")

    device_kernels.provide_kernels(device.NAME, missing)
    device_boxing.find_device_boxing.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        x = gt.randn(5, 4, placement=device.two(), sbp=gt.sbp.split(0))
        device.same(x.to_global(sbp=gt.sbp.split(1)).full_tensor(), x.full_tensor().cpu())
    assert len(told) == 1 and "there is no compiler" in str(told[0].message), [str(w.message) for w in told]
    device_kernels.provide_kernels(device.NAME, lambda: kernels)
    device_boxing.find_device_boxing.cache_clear()


CHECKS = [the_self_test_is_quick_and_said_once, boxings_run_on_the_kernels, boxings_of_all_pairs,
          large_sums_are_divided_among_the_devices, tensors_of_all_strides, streams_are_those_of_the_devices,
          random_numbers_run_on_the_kernels, device.data_parallel_training, doctor_prints_the_verdict,
          what_is_missing_is_said_once_and_done_by_torch_ops]
AGAIN = [device.every_boxing, device.tensor_parallel_training, device.zero_of_both, device.parts_and_whole_values,
         device.views_indices_and_writes, device.derivatives]


def found(fault: str, kernel: str) -> None:
    plant(fault)
    device_kernels.forget_verdicts(device.NAME)
    device_boxing.find_device_boxing.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        verdict = device_kernels.kernel_verdict(WHERE)
        device_kernels.kernel_verdict(WHERE)
    assert verdict is not None and set(verdict.failed) == {kernel}, verdict
    assert len(told) == 1 and f"{kernel} is not used" in str(told[0].message), told
    doctor_says(f"{kernel} is not used")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")              # of the other device
        full = torch.arange(70).view(10, 7)
        for dtype in (torch.float32, torch.int32):
            x = gt.from_full(full.to(dtype), device.two(), gt.sbp.partial_sum)
            device.same(x.to_global(sbp=gt.sbp.split(1)).full_tensor(), full.to(dtype))
        drawn = []
        for type in ("cpu", device.NAME):
            gt.manual_seed(3)
            own = {"placement": device.two(type), "sbp": gt.sbp.split(0)}
            drawn.append([gt.randn(5, 3, **own).full_tensor().cpu(), gt.rand(5, 3, **own).full_tensor().cpu()])
        assert all(map(torch.equal, *drawn))
    plant("GT_NO_PLANT")


if __name__ == "__main__":
    for check in AGAIN if "all" in plants else () if plants else CHECKS:
        check()
        print(check.__name__, flush=True)
    for one in [word for word in plants if "=" in word]:
        found(*one.split("="))
        print(one, flush=True)
