"""torch.distributed over shared memory: `dist.init_process_group("globaltensor")`, for programs that are not global.

Importing this registers the backend for CPU tensors, beside torch's own; nothing native is loaded before the first
process group is made. Ranks on one host then reach each other's memory, and a collective is one pass over it: DDP,
FSDP, DTensor and plain `dist.all_reduce` run as they are. `init_process_group("cpu:globaltensor,cuda:nccl")` mixes.

Every group has a gloo group inside for what shared memory is not used for: send and recv, products and bitwise
reductions, and everything where the ranks are on several hosts. `transport(group)` says which.
"""
from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from globaltensor.errors import TransportError
from globaltensor.runtime import native
from globaltensor.runtime.gloo import yield_cores
from globaltensor.runtime.torch_internals import backend_of

NAME = "globaltensor"


def register() -> None:
    """Let torch.distributed know the backend; done once, by importing this module."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])


def _extension() -> Any:
    if native.torch_ext is None:
        raise TransportError(f'the backend "{NAME}" is not available',
                             "the native code was not built, or does not load",
                             f'{native.how_to_build()}, or the backend "gloo"')
    return native.torch_ext


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """One rank's side of a group: what torch calls."""
    extension = _extension()
    if not dist.is_gloo_available():
        raise TransportError(f'the backend "{NAME}" needs gloo', "this torch was built without it",
                             "a torch from pytorch.org")
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout=timeout)
    yield_cores()
    return extension.Backend(store, rank, size, timeout, gloo)


def transport(group: dist.ProcessGroup | None = None) -> str:
    """How bytes move between the ranks of a group of this backend, in a line."""
    group = group or dist.group.WORLD
    assert group is not None                         # torch.distributed is started
    backend: Any = backend_of(group, "cpu")
    backend = getattr(backend, "wrapped_pg", backend)      # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    return backend.transport if hasattr(backend, "transport") else backend.name()


def enable_symmetric_memory() -> None:
    """Let `torch.distributed._symmetric_memory` work for CPU tensors of ranks on one host, with any backend:
    `empty(..., device="cpu")`, `rendezvous`, and the handle's `get_buffer`, `barrier`, `put_signal`, `wait_signal`.
    """
    _extension().enable_symmetric_memory()


register()
