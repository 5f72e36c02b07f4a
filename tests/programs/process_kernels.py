"""Boxings between devices of the processes of a host, by the kernels of csrc/ run as threads: `globaltensor run -n 2`;
with `cuda`, by those of its GPUs.

With an argument, something is wrong on the rank that it names: `wrong=1` a kernel that reads wrong numbers, `none=1` no
kernels, `closed=1` memory that cannot be shared. Then all ranks must box without these kernels, and be right.
"""
from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

faults = dict(word.split("=") for word in sys.argv[1:] if word != "cuda")
sys.argv[1:] = ["cuda" if "cuda" in sys.argv else "npu"]
sys.path.insert(0, str(Path(__file__).parent))
import device  # noqa: E402
import torch  # noqa: E402
from stand_in import kernels_for_tests  # noqa: E402

import globaltensor as gt  # noqa: E402
from globaltensor.boxings import process_boxing  # noqa: E402
from globaltensor.errors import GlobalTensorError  # noqa: E402
from globaltensor.runtime import device_kernels  # noqa: E402

ME = os.environ["RANK"]
if device.DEVICES < 2:                               # their kernels take turns on it
    process_boxing.shared_gpu = lambda: False
kernels = kernels_for_tests(device.NAME)


def none():
    raise device_kernels.MissingKernels("no kernels", "there is no compiler", "install one")


def closed(t: torch.Tensor) -> bytes:
    raise GlobalTensorError("memory that cannot be shared")



device_kernels.provide_kernels(device.NAME, none if faults.get("none") == ME else lambda: kernels)
if faults.get("closed") == ME:
    kernels.export_memory = closed
if "wrong" in faults:                                # on all: one that does not come would be waited for
    right = kernels.reduce_in_sync
    kernels.reduce_in_sync = lambda *args: right(*args) if faults["wrong"] != ME else right(
        *args[:-1], args[-1].__class__(*args[-1][:1]))


def calls() -> int:
    return kernels.calls.count("gt_cuda_reduce_in_sync")


def all_pairs() -> None:
    generator = torch.Generator().manual_seed(device.SEED)
    sbps = [gt.sbp.split(0), gt.sbp.split(1), gt.sbp.broadcast, gt.sbp.partial_sum]
    one = gt.placement(device.NAME, [1])
    for shape, dtype in {(5, 6): torch.float32, (33, 70): torch.bfloat16, (0, 4): torch.int64}.items():
        full = torch.randn(shape, generator=generator).mul(8).to(dtype)
        for src, dst in itertools.product(sbps, repeat=2):
            for a, b in ((device.two(), device.two()), (device.two(), one), (one, device.two())):
                x = gt.from_full(full, a, src).to_global(b, dst)
                device.shards_are_where_they_should_be(x)
                device.same(x.full_tensor(), full, (a, src, b, dst))


def larger_than_the_staging_area() -> None:
    process_boxing.STAGING = 40_000
    full = torch.randn(120, 70)                      # 33,600 bytes
    xs = [gt.from_full(full + k, device.two(), gt.sbp.split(0)) for k in range(5)]
    before = calls()
    moved = process_boxing.run_process_boxings(
        process_boxing._meetings[0, 1], [process_boxing.Move(x.spec, x.shards, xs[0].to_global(
            sbp=gt.sbp.split(1)).spec.layout, x.lineage) for x in xs], "a test") if not faults else []
    for k, shards in enumerate(moved):
        shard, = shards.values()
        device.same(shard, (full + k).tensor_split(2, 1)[gt.rank()])
    assert faults or calls() == before + 10          # one for each, and one for each layout that was asked for
    x = gt.from_full(torch.randn(300, 90), device.two(), gt.sbp.split(0))
    before = calls()
    x.to_global(sbp=gt.sbp.split(1))                 # larger than the area: by torch.distributed
    assert calls() == before
    process_boxing.STAGING = 64 << 20


if __name__ == "__main__":
    all_pairs()
    assert faults or calls() > 100, calls()
    if faults:
        assert calls() == (4 if "wrong" in faults else 0), calls()       # those of the trial
    larger_than_the_staging_area()
    device.data_parallel_training()
    print("right")
