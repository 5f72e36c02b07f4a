"""globaltensor: write PyTorch for one device, say where tensors live and how they lie, run it on many.

    import globaltensor as gt
    P = gt.placement("cpu", [0, 1])
    x = gt.randn(4, 5, placement=P, sbp=gt.sbp.split(0))
    w = gt.randn(5, 8, placement=P, sbp=gt.sbp.broadcast)
    x @ w                                            # (4, 8), split along dim 0

Every attribute that is not listed here is torch's own (`gt.matmul`, `gt.nn`, `gt.optim`, ...).
"""
from __future__ import annotations

from typing import Any

import torch

from globaltensor import data, rules
from globaltensor.boxings.watch import boxing, record
from globaltensor.checkpoint import load, load_safetensors, save, save_safetensors
from globaltensor.debug.explain import explain
from globaltensor.debug.show import show
from globaltensor.dispatch.core import rule
from globaltensor.errors import GlobalTensorError, RuleError
from globaltensor.layouts import sbp
from globaltensor.layouts.placement import placement
from globaltensor.parallel.modules import to_global
from globaltensor.parallel.plan import Plan, parallelize
from globaltensor.parallel.zero import zero
from globaltensor.pipelining.runner import pipeline
from globaltensor.runtime import process_group  # registers itself with torch.distributed
from globaltensor.runtime.start import init
from globaltensor.runtime.world import rank, world_size
from globaltensor.tensors import plain
from globaltensor.tensors.convert import from_full, from_local, from_shards
from globaltensor.tensors.factories import (
    arange,
    empty,
    eye,
    full,
    linspace,
    logspace,
    normal,
    ones,
    rand,
    randint,
    randn,
    randperm,
    tensor,
    zeros,
)
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.gradients import set_grad_reduce_dtype

__version__ = "0.1.0"

plain.install()
torch.nn.Module.to_global = to_global


def manual_seed(seed: int) -> Any:
    """Seed all random numbers, global and plain: `torch.manual_seed`."""
    return torch.manual_seed(seed)


def __getattr__(name: str) -> Any:
    return getattr(torch, name)
