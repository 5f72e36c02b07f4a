"""What `torch.distributed.checkpoint` asks a tensor. `dcp.py` answers, which is loaded at the first question."""
from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from globaltensor.tensors.global_tensor import GlobalTensor


def install_dcp_protocol() -> None:
    """Teach global tensors the protocol."""
    learner: Any = GlobalTensor                      # a class learns attributes, which its stubs cannot know
    learner.__create_write_items__ = lambda t, name, source: _dcp().create_write_items(t, name, source)
    learner.__create_chunk_list__ = lambda t: _dcp().create_chunk_list(t)
    learner.__get_tensor_shard__ = lambda t, index: _dcp().get_tensor_shard(t, index)
    learner._staged = property(_Held, _set_shards)
    learner.__slots__ = ("_staged",)                 # async_save copies a tensor as an empty one like it, and these
    learner.__slotnames__ = []                       # as copyreg notes: no slot that holds anything, for swap_tensors


def _dcp() -> Any:
    return import_module("globaltensor.checkpoint.dcp")


class _Held(dict[int, torch.Tensor]):
    """The shards of a tensor themselves; a copy of them is a plain dict."""

    def __init__(self, t: GlobalTensor) -> None:
        super().__init__(t.shards)
        self.t = t

    def __reduce__(self) -> tuple[Any, ...]:
        _dcp().chunks(self.t)                        # refuses what cannot be saved
        return dict, (), None, None, iter(self.items())


def _set_shards(t: GlobalTensor, copies: dict[int, torch.Tensor]) -> None:
    assert all(copy.shape == t.spec.local_shape(rank) for rank, copy in copies.items()), t.spec
    t.shards = copies
