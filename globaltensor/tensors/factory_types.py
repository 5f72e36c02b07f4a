"""How the factories may be called, for type checkers: with a placement and an sbp they give a GlobalTensor, without
them they are torch's and give a Tensor."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, overload

import torch

from globaltensor.layouts.placement import placement as Placement
from globaltensor.layouts.sbp import SbpLike
from globaltensor.tensors.global_tensor import GlobalTensor


class Sized(Protocol):
    """zeros, ones, empty: called with a size, as ints or a sequence."""

    @overload
    def __call__(self, *size: int, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None,
                 requires_grad: bool = False) -> GlobalTensor: ...

    @overload
    def __call__(self, size: Sequence[int], *, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None,
                 requires_grad: bool = False) -> GlobalTensor: ...

    @overload
    def __call__(self, *size: int, out: torch.Tensor | None = None, dtype: torch.dtype | None = None,
                 layout: torch.layout | None = None, device: Any = None, pin_memory: bool = False,
                 requires_grad: bool = False) -> torch.Tensor: ...

    @overload
    def __call__(self, size: Sequence[int], *, out: torch.Tensor | None = None, dtype: torch.dtype | None = None,
                 layout: torch.layout | None = None, device: Any = None, pin_memory: bool = False,
                 requires_grad: bool = False) -> torch.Tensor: ...


class Drawn(Protocol):
    """rand, randn: also with a generator."""

    @overload
    def __call__(self, *size: int, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None,
                 generator: torch.Generator | None = None, requires_grad: bool = False) -> GlobalTensor: ...

    @overload
    def __call__(self, size: Sequence[int], *, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None,
                 generator: torch.Generator | None = None, requires_grad: bool = False) -> GlobalTensor: ...

    @overload
    def __call__(self, *size: int, generator: torch.Generator | None = None, out: torch.Tensor | None = None,
                 dtype: torch.dtype | None = None, layout: torch.layout | None = None, device: Any = None,
                 pin_memory: bool = False, requires_grad: bool = False) -> torch.Tensor: ...

    @overload
    def __call__(self, size: Sequence[int], *, generator: torch.Generator | None = None,
                 out: torch.Tensor | None = None, dtype: torch.dtype | None = None, layout: torch.layout | None = None,
                 device: Any = None, pin_memory: bool = False, requires_grad: bool = False) -> torch.Tensor: ...


class FromPlain(Protocol):
    """arange, linspace, logspace, eye, tensor: made whole, then cut. Each has arguments of its own."""

    @overload
    def __call__(self, *args: Any, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None,
                 requires_grad: bool = False) -> GlobalTensor: ...

    @overload
    def __call__(self, *args: Any, dtype: torch.dtype | None = None, layout: torch.layout | None = None,
                 device: Any = None, pin_memory: bool = False, requires_grad: bool = False,
                 out: torch.Tensor | None = None) -> torch.Tensor: ...
