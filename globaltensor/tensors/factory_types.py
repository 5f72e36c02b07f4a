"""How the factories may be called, for type checkers: with a placement and an sbp they give a GlobalTensor, without
them they are torch's and give a Tensor."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Required, TypeAlias, TypedDict, Unpack, overload

import torch

from globaltensor.layouts.placement import placement as Placement
from globaltensor.layouts.sbp import SbpLike
from globaltensor.tensors.global_tensor import GlobalTensor

End: TypeAlias = "complex | torch.Tensor"            # of a linspace


class _Common(TypedDict, total=False):
    dtype: torch.dtype | None
    requires_grad: bool


class Placed(_Common, total=False):
    """The keywords of a factory that gives a global tensor."""

    placement: Required[Placement]
    sbp: Required[SbpLike]


class AsTorch(_Common, total=False):
    """The keywords of torch's factories."""

    out: torch.Tensor | None
    layout: torch.layout | None
    device: torch.device | str | int | None
    pin_memory: bool


class PlacedRandom(Placed, total=False):
    """The keywords of a factory that draws a global tensor."""

    generator: torch.Generator | None


class RandomAsTorch(AsTorch, total=False):
    """The keywords of torch's factories that draw."""

    generator: torch.Generator | None


class Sized(Protocol):
    """zeros, ones, empty: called with a size, as ints or a sequence."""

    @overload
    def __call__(self, *size: int, **options: Unpack[Placed]) -> GlobalTensor: ...
    @overload
    def __call__(self, size: Sequence[int], **options: Unpack[Placed]) -> GlobalTensor: ...
    @overload
    def __call__(self, *size: int, **options: Unpack[AsTorch]) -> torch.Tensor: ...
    @overload
    def __call__(self, size: Sequence[int], **options: Unpack[AsTorch]) -> torch.Tensor: ...


class Drawn(Protocol):
    """rand, randn: also with a generator."""

    @overload
    def __call__(self, *size: int, **options: Unpack[PlacedRandom]) -> GlobalTensor: ...
    @overload
    def __call__(self, size: Sequence[int], **options: Unpack[PlacedRandom]) -> GlobalTensor: ...
    @overload
    def __call__(self, *size: int, **options: Unpack[RandomAsTorch]) -> torch.Tensor: ...
    @overload
    def __call__(self, size: Sequence[int], **options: Unpack[RandomAsTorch]) -> torch.Tensor: ...


class Arange(Protocol):
    @overload
    def __call__(self, end: float, **options: Unpack[Placed]) -> GlobalTensor: ...
    @overload
    def __call__(self, start: float, end: float, step: float = 1, **options: Unpack[Placed]) -> GlobalTensor: ...
    @overload
    def __call__(self, end: float, **options: Unpack[AsTorch]) -> torch.Tensor: ...
    @overload
    def __call__(self, start: float, end: float, step: float = 1, **options: Unpack[AsTorch]) -> torch.Tensor: ...


class Linspace(Protocol):
    @overload
    def __call__(self, start: End, end: End, steps: int, **options: Unpack[Placed]) -> GlobalTensor: ...
    @overload
    def __call__(self, start: End, end: End, steps: int, **options: Unpack[AsTorch]) -> torch.Tensor: ...


class Logspace(Protocol):
    @overload
    def __call__(self, start: End, end: End, steps: int, base: float = 10.0, **options: Unpack[Placed]
                 ) -> GlobalTensor: ...
    @overload
    def __call__(self, start: End, end: End, steps: int, base: float = 10.0, **options: Unpack[AsTorch]
                 ) -> torch.Tensor: ...


class Eye(Protocol):
    @overload
    def __call__(self, n: int, m: int = ..., **options: Unpack[Placed]) -> GlobalTensor: ...
    @overload
    def __call__(self, n: int, m: int = ..., **options: Unpack[AsTorch]) -> torch.Tensor: ...


class OfData(Protocol):
    """tensor: of a number, nested lists of numbers, an array."""

    @overload
    def __call__(self, data: Any, **options: Unpack[Placed]) -> GlobalTensor: ...
    @overload
    def __call__(self, data: Any, *, dtype: torch.dtype | None = None, device: torch.device | str | int | None = None,
                 requires_grad: bool = False, pin_memory: bool = False) -> torch.Tensor: ...


class LikeOptions(AsTorch, total=False):
    """The keywords of torch's `*_like`."""

    memory_format: torch.memory_format | None


class LaidOut(_Common, total=False):
    """The keywords of a `*_like` of a global tensor, which gives what is left out."""

    placement: Placement
    sbp: SbpLike


class Like(Protocol):
    """zeros_like, ones_like, empty_like."""

    @overload
    def __call__(self, x: GlobalTensor, **options: Unpack[LaidOut]) -> GlobalTensor: ...
    @overload
    def __call__(self, x: torch.Tensor, **options: Unpack[Placed]) -> GlobalTensor: ...
    @overload
    def __call__(self, x: torch.Tensor, **options: Unpack[LikeOptions]) -> torch.Tensor: ...


class FullLike(Protocol):
    @overload
    def __call__(self, x: GlobalTensor, fill_value: complex, **options: Unpack[LaidOut]) -> GlobalTensor: ...
    @overload
    def __call__(self, x: torch.Tensor, fill_value: complex, **options: Unpack[Placed]) -> GlobalTensor: ...
    @overload
    def __call__(self, x: torch.Tensor, fill_value: complex, **options: Unpack[LikeOptions]) -> torch.Tensor: ...


class RandomLike(Protocol):
    """rand_like, randn_like: also with a generator."""

    @overload
    def __call__(self, x: GlobalTensor, *, generator: torch.Generator | None = None, **options: Unpack[LaidOut]
                 ) -> GlobalTensor: ...
    @overload
    def __call__(self, x: torch.Tensor, **options: Unpack[PlacedRandom]) -> GlobalTensor: ...
    @overload
    def __call__(self, x: torch.Tensor, **options: Unpack[LikeOptions]) -> torch.Tensor: ...


class RandintLike(Protocol):
    """Of [0, high) or [low, high)."""

    @overload
    def __call__(self, x: GlobalTensor, *bounds: int, generator: torch.Generator | None = None,
                 **options: Unpack[LaidOut]) -> GlobalTensor: ...
    @overload
    def __call__(self, x: torch.Tensor, *bounds: int, **options: Unpack[PlacedRandom]) -> GlobalTensor: ...
    @overload
    def __call__(self, x: torch.Tensor, *bounds: int, **options: Unpack[LikeOptions]) -> torch.Tensor: ...
