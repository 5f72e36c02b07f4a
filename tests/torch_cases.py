"""torch's own tests of its distributed backends, written for gloo, run on ours: in processes that live on.

torch starts three processes per test, which takes longer than the test. Here a test's body runs in the processes of
`Ranks`, whose group exists already. A test that asks for gloo gets our backend.
"""
from __future__ import annotations

import os
import sys
import tempfile
import unittest
from functools import cache, partial

import torch
import torch.distributed as dist

OURS = "globaltensor"


def _ours(make):
    """`init_process_group` or `new_group`, which give our backend to whoever asks for gloo's."""
    def made(*args, backend=None, **kwargs):
        return make(*args, backend=OURS if backend == "gloo" else backend, **kwargs)
    return made


@cache
def cases() -> type:
    """torch's class of tests."""
    os.environ.setdefault("WORLD_SIZE", "4")
    os.environ.update(BACKEND="gloo", TEMP_DIR=os.environ.get("TEMP_DIR", tempfile.gettempdir()))
    from torch.testing._internal.distributed import distributed_test as module
    torch.backends.__allow_nonbracketed_mutation_flag = True
    dist.init_process_group, dist.new_group = _ours(dist.init_process_group), _ours(dist.new_group)
    dist.new_subgroups = partial(_subgroups, dist.new_subgroups)

    class Cases(module.TestDistBackend, module.DistributedTest._DistTestBase):
        world_size = property(lambda self: os.environ["WORLD_SIZE"])

        def _barrier(self, *args, **kwargs):
            dist.barrier()

    return Cases


def _subgroups(make, *args, backend=None, **kwargs):
    return make(*args, backend=backend, **kwargs)


def names() -> list[str]:
    return sorted(name for name in dir(cases()) if name.startswith("test_"))


def run(name: str) -> None:
    """In each of the processes."""
    case = cases()(name)
    case.rank, case.file_name = dist.get_rank(), tempfile.mktemp()
    torch.manual_seed(1)
    try:
        getattr(case, name)()
    except unittest.SkipTest as skipped:
        raise RuntimeError(f"skipped: {skipped}") from None
    except SystemExit as left:
        raise RuntimeError(f"skipped: {left.code}") from None
    finally:
        dist.barrier()
        sys.stdout.flush()
