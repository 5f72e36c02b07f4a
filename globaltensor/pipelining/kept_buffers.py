"""Buffers as they were: what runs a second time runs on the values of the first, and leaves those of now alone.

    values = buffers_of(module)                      # before it runs
    with buffers_left_alone(module, values): ...     # later: runs on copies of these

Running statistics and averages do not count a micro-batch twice, and one that uses them (a spectral norm, a codebook)
gets what it got before later micro-batches changed them.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from globaltensor.runtime.torch_internals import without_modes
from globaltensor.tensors.global_tensor import GlobalTensor

Buffers = list[tuple[dict[str, Any], str, Any]]      # where each one is, by which name, and its value
MANY_BYTES = 1 << 20

_last_copies: Any = WeakIdKeyDictionary()            # of a large buffer: its last copy, while someone has that


def buffers_of(module: nn.Module) -> Buffers:
    """Copies of a module's buffers. A large one that stays as it is, such as a mask, is copied once for all that run
    between."""
    return _copies_of(_buffers_in(module))


@contextmanager
def buffers_left_alone(module: nn.Module, values: Buffers | None = None) -> Iterator[None]:
    """Inside, the module works on copies of its buffers, or of these values of them."""
    own = _buffers_in(module)
    for place, key, b in _copies_of(own if values is None else values, always=True):
        place[key] = b
    try:
        yield
    finally:
        for place, key, b in own:
            place[key] = b


def _buffers_in(module: nn.Module) -> Buffers:
    return [(place, key, place[key]) for m in module.modules() for key in m._buffers
            for place in (m.__dict__, m._buffers) if key in place]       # swapped in, and its own


def _copies_of(buffers: Buffers, always: bool = False) -> Buffers:
    copies: dict[int, Any] = {}                      # one for a buffer that has several names
    with without_modes():                            # that of a checkpoint takes all ops for the module's
        for _, _, b in buffers:
            if id(b) not in copies:
                copies[id(b)] = b if b is None else b.clone() if always else _copy_of(b)
    return [(place, key, copies[id(b)]) for place, key, b in buffers]


def _copy_of(b: torch.Tensor) -> torch.Tensor:
    """Versions of tensors do not tell whether it is what it was: writes to `.data` leave them as they are."""
    if b.is_meta or sum(part.nbytes for part in _parts(b)) < MANY_BYTES:
        return b.clone()
    last = _last_copies[b]() if b in _last_copies else None
    if last is None or not _is_same(b, last):
        last = b.clone()
        _last_copies[b] = weakref.ref(last)
    return last


def _is_same(b: torch.Tensor, last: torch.Tensor) -> bool:
    """Of two of the same lineage each rank may take either."""
    if isinstance(b, GlobalTensor) and b.lineage != cast(GlobalTensor, last).lineage:
        return False
    return all(map(torch.equal, _parts(b), _parts(last)))


def _parts(b: torch.Tensor) -> list[torch.Tensor]:
    return [*b.shards.values()] if isinstance(b, GlobalTensor) else [b]
