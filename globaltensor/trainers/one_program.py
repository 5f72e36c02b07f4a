"""What the trainers here have in common: one program for all ranks, plain tensors at its doors, global ones inside."""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from globaltensor.data.batch import map_structure
from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import broadcast, split
from globaltensor.runtime.start import init
from globaltensor.tensors.convert import from_full
from globaltensor.tensors.global_tensor import GlobalTensor

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "NODE_RANK",
             "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@contextmanager
def seen_as_one_process() -> Iterator[None]:
    """Start the world; inside, the environment does not say that a launcher has started this process with others."""
    init()
    hidden = {name: os.environ.pop(name) for name in _LAUNCHED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def placement_of(module: nn.Module) -> placement:
    """Where a module's parameters are. Raises GlobalTensorError for a plain module."""
    for p in module.parameters():
        if isinstance(p, GlobalTensor):
            return p.placement
    raise GlobalTensorError(f"a {type(module).__name__} of plain parameters", "this trainer is for global ones",
                            'gt.parallelize(model, gt.placement("cpu", range(4))) before it')


def to_batch(values: Any, where: placement) -> Any:
    """Plain tensors, which every process has whole, made global: rows split along "dp", broadcast along other axes."""
    sbp = tuple(split(0) if name == "dp" else broadcast for name in where.names) or (split(0),)

    def place(t: Any, path: str) -> Any:
        if not isinstance(t, torch.Tensor) or isinstance(t, GlobalTensor):
            return t
        return from_full(t, where, sbp if t.dim() else broadcast)

    return map_structure(values, place, place)


def to_plain(values: Any) -> Any:
    """Global tensors as whole, plain ones."""
    return map_structure(values, lambda t, path: t.full_tensor() if isinstance(t, GlobalTensor) else t,
                         lambda values, path: values)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises GlobalTensorError for an optimizer of plain parameters only."""
    if not any(isinstance(p, GlobalTensor) for group in optimizer.param_groups for p in group["params"]):
        raise GlobalTensorError(f"a {type(optimizer).__name__} of plain parameters", "this trainer steps global ones",
                                "gt.parallelize(model, placement), and then the optimizer of model.parameters()")


def load_plain_state(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load whole, plain tensors, which every process has, into a global module. A tied parameter need not be there
    under all of its names."""
    own = module.state_dict(keep_vars=True)
    known = {id(own[name]): t for name, t in state.items() if name in own}
    module.load_state_dict({**{name: known[id(t)] for name, t in own.items() if id(t) in known}, **state})
