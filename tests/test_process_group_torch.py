"""torch's own tests of its distributed backends, written for gloo, run on ours.

torch starts a set of processes per test, which takes longer than the test. Here the body of a test runs in processes
that live on, whose group exists already; a test that makes a group of gloo's gets ours.
"""
from __future__ import annotations

import os
import tempfile
import unittest
from functools import cache

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from test_process_group import BUILT

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.timeout(3000),
              pytest.mark.skipif(not BUILT, reason="the native code was not built")]

NOT_FOR_US = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_barrier_timeout_global": "ends the group of all",
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL",
    "test_batch_isend_irecv_op_err": "needs GPUs",
    "test_ddp_logging_data_cpu": 'asks for the name, which of all backends from elsewhere is "custom" there',
    "test_get_backend": "asks for the name",
    "test_monitored_barrier_gloo": "gloo's alone",
    "test_monitored_barrier_gloo_subgroup": "gloo's alone",
}


def _ours(make):
    def made(*args, backend=None, **kwargs):
        return make(*args, backend="globaltensor" if backend == "gloo" else backend, **kwargs)
    return made


@cache
def cases() -> type:
    folder = tempfile.gettempdir()
    os.environ.update(BACKEND="gloo", TEMP_DIR=folder)
    os.environ.setdefault("WORLD_SIZE", "4")
    from torch.testing._internal.distributed import distributed_test as module
    torch.backends.__allow_nonbracketed_mutation_flag = True
    dist.init_process_group, dist.new_group = _ours(dist.init_process_group), _ours(dist.new_group)
    for name in ("barrier", "test_dir"):
        os.makedirs(os.path.join(folder, name), exist_ok=True)

    class Cases(module.TestDistBackend, module.DistributedTest._DistTestBase):
        world_size = property(lambda self: os.environ["WORLD_SIZE"])

        def _barrier(self, *args, **kwargs):
            dist.barrier()

    return Cases


def names() -> list[str]:
    found = (name for name in dir(cases()) if name.startswith("test_"))
    return sorted(name for name in found if "cuda" not in name and "nccl" not in name)


def body(name: str) -> None:
    """In each of the processes."""
    case = cases()(name)
    case.rank, case.file_name = dist.get_rank(), tempfile.mktemp()
    torch.manual_seed(1)
    try:
        getattr(case, name)()
    except (unittest.SkipTest, SystemExit) as skipped:
        raise RuntimeError(f"skipped: {skipped}") from None
    finally:
        dist.barrier()


def load() -> None:
    cases()


def test_the_tests_of_torch():
    pytest.importorskip("expecttest")
    ranks, passed, wrong = Ranks(4), [], {}
    ranks.start(load)
    assert ranks.answers(timeout=600) == [""] * 4
    for name in names():
        if name in NOT_FOR_US:
            continue
        if not ranks.alive():
            ranks = Ranks(4)
        ranks.start(body, name)
        answers = ranks.answers(timeout=300)
        if not any(answers):
            passed.append(name)
        elif not all("skipped: " in text for text in answers):
            wrong[name] = answers
    ranks.end()
    assert not wrong, "\n".join(f"{name}: {answers}" for name, answers in wrong.items())
    assert len(passed) > 80, passed
