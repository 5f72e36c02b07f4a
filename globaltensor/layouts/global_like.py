"""What the rooms below the tensor class know of a global tensor: its spec, its shards, and what every tensor has.

The class itself (`tensors/global_tensor.py`) stands above them, so they type by this protocol instead.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from globaltensor.layouts.layout import Shards, Spec
from globaltensor.layouts.placement import placement

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class GlobalLike(Protocol):
    """A global tensor. `origin` is the call that made it, where it is a boxed view (algorithms/aliasing.py);
    `lineage` tells values apart (runtime/lineage.py); `traced`: torch.compile traces, and the shards are fake; then
    `made_after` so many boxings (runtime/trace_order.py)."""

    spec: Spec
    shards: Shards
    lineage: int
    traced: bool
    made_after: int

    @property
    def origin(self) -> Any: ...

    @property
    def placement(self) -> placement: ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @classmethod
    def wrap(cls, of: Spec, shards: Shards) -> Self: ...

    @classmethod
    def wrap_traced(cls, of: Spec, shards: Shards) -> Self: ...

    def dim(self) -> int: ...

    def numel(self) -> int: ...


def is_global(value: Any) -> TypeIs[GlobalLike]:
    """Is this a global tensor, and no plain one, number or None?"""
    return hasattr(value, "spec")


def spec_of(value: Any) -> Spec | None:
    """What a global tensor is; None of anything else."""
    return value.spec if is_global(value) else None
