"""OneFlow's names for its own tests: torch and globaltensor under the name `oneflow`, in a world of 2 hosts of 2 ranks.

One process drives the four ranks, on CPUs. What asks for this rank's part alone is skipped.
"""
from __future__ import annotations

import sys
import types
import unittest as _unittest
from typing import Any

import numpy as np
import torch

import globaltensor as gt
from globaltensor.tensors.global_tensor import GlobalTensor

WORLD, HOSTS = 4, 2
PAIRS = "works on OneFlow's pairs of a tensor of torch and one of its own"
RANK_ALONE = "asks for the part of one rank, in a process that drives four"


class placement:
    """gt.placement on CPUs, of ranks as NumPy has them too."""

    def __new__(cls, type: str = "cpu", ranks: Any = None) -> Any:
        return gt.placement("cpu", np.asarray(ranks).tolist())

    @staticmethod
    def all(type: str) -> Any:
        return gt.placement("cpu", list(range(WORLD)))


is_plain = False                                     # inside the oracle's run, in which nothing becomes global


def _whole_to_global(x: Any, placement: Any = None, sbp: Any = None, **options: Any) -> Any:
    """A plain tensor is the same on all ranks in these tests, and so it is taken as a whole."""
    if is_plain:
        return x
    return gt.from_full(x, placement, sbp)


def _module_to_global(module: Any, placement: Any = None, sbp: Any = None) -> Any:
    return module if is_plain else gt.to_global(module, placement, sbp)


def _box(x: Any, placement: Any = None, sbp: Any = None, **options: Any) -> Any:
    return gt_to_global(x, placement, sbp, **{k: v for k, v in options.items() if k == "grad_sbp"})


def _skip(why: str) -> Any:
    raise _unittest.SkipTest(why)


gt_to_global, gt_numpy = GlobalTensor.to_global, GlobalTensor.numpy
GlobalTensor.numpy = lambda x: gt_numpy(x.detach())                            # type: ignore[method-assign]
GlobalTensor.to_global, GlobalTensor.to_local = _box, lambda x: _skip(RANK_ALONE)
torch.Tensor.to_global, torch.nn.Module.to_global = _whole_to_global, _module_to_global   # type: ignore[attr-defined]
torch.Tensor.oneflow = property(lambda x: x)                                   # type: ignore[attr-defined]
torch.Tensor.pytorch = property(lambda x: _skip(PAIRS))                        # type: ignore[attr-defined]

_train = torch.nn.Module.train
torch.nn.Module.train = lambda module, mode=True: _train(module, bool(mode))   # type: ignore[method-assign]
sbp, nn = gt.sbp, torch.nn
env = types.SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: WORLD, get_node_size=lambda: HOSTS)
unittest = types.ModuleType("oneflow.unittest")
unittest.TestCase = _unittest.TestCase               # type: ignore[attr-defined]
for _need in ("1n1d", "1n2d", "1n4d", "2n1d", "2n2d"):
    setattr(unittest, f"skip_unless_{_need}", lambda: lambda test: test)
sys.modules |= {"oneflow.unittest": unittest, "oneflow.nn": torch.nn, "oneflow.nn.functional": torch.nn.functional}
_unittest.skip = _unittest.skipIf = _unittest.skipUnless = lambda *_: lambda test: test   # for faults that are not ours


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(gt, name) if hasattr(gt, name) else _skip(f"oneflow.{name} is none of torch's")
