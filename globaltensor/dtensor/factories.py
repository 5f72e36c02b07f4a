"""torch's factories of distributed tensors: `zeros(4, 5, device_mesh=mesh, placements=[Shard(0)])`.

The signatures are those of torch.distributed.tensor, the values those of gt's factories of the same names: numbers that
are drawn depend on the seed and on the places of the elements in the whole, on no mesh.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement

from globaltensor.dtensor.device_mesh import DeviceMesh, mesh_or_current
from globaltensor.layouts.sbp import broadcast
from globaltensor.tensors import factories
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tracebacks import api_boundary

_WHAT = """`device_mesh` is that of the `with` block by default, and `placements` are all `Replicate()`.

Collective; moves nothing. Raises ArgumentError without a mesh, and for a layout that is not torch.strided."""


def _on_mesh(name: str, make: Callable[..., GlobalTensor], *args: Any, device_mesh: DeviceMesh | None,
             placements: Sequence[Placement] | None, **options: Any) -> GlobalTensor:
    return make(*args, **options, placement=mesh_or_current(device_mesh, f"{name}(...)"),
                sbp=broadcast if placements is None else tuple(placements))


def _mesh_factory(name: str, make: Any) -> Callable[..., GlobalTensor]:

    def factory(*size: Any, dtype: torch.dtype | None = None, layout: torch.layout = torch.strided,
                requires_grad: bool = False, device_mesh: DeviceMesh | None = None,
                placements: Sequence[Placement] | None = None) -> GlobalTensor:
        return _on_mesh(name, make, *size, dtype=dtype, layout=layout, requires_grad=requires_grad,
                        device_mesh=device_mesh, placements=placements)

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"torch.distributed.tensor.{name}. {_WHAT}"
    return api_boundary(factory)


zeros, ones, empty = (_mesh_factory(name, getattr(factories, name)) for name in ("zeros", "ones", "empty"))
rand, randn = (_mesh_factory(name, getattr(factories, name)) for name in ("rand", "randn"))


@api_boundary
def full(size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, layout: torch.layout = torch.strided,
         requires_grad: bool = False, device_mesh: DeviceMesh | None = None,
         placements: Sequence[Placement] | None = None) -> GlobalTensor:
    """torch.distributed.tensor.full, whose arguments are those of `zeros`, after the value.

    Collective; moves nothing. Raises ArgumentError without a mesh, and for a layout that is not torch.strided.
    """
    return _on_mesh("full", factories.full, size, fill_value, dtype=dtype, layout=layout, requires_grad=requires_grad,
                    device_mesh=device_mesh, placements=placements)


@api_boundary
def linspace(start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None,
             layout: torch.layout = torch.strided, requires_grad: bool = False, device_mesh: DeviceMesh | None = None,
             placements: Sequence[Placement] | None = None) -> GlobalTensor:
    """torch.distributed.tensor.linspace, which torch has since 2.14: `steps` numbers from `start` to `end`.

    Collective; moves nothing. Raises ArgumentError without a mesh, and for a layout that is not torch.strided.
    """
    return _on_mesh("linspace", factories.linspace, start, end, steps, dtype=dtype, layout=layout,
                    requires_grad=requires_grad, device_mesh=device_mesh, placements=placements)


@api_boundary
def logspace(start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: torch.dtype | None = None,
             layout: torch.layout = torch.strided, requires_grad: bool = False, device_mesh: DeviceMesh | None = None,
             placements: Sequence[Placement] | None = None) -> GlobalTensor:
    """torch.distributed.tensor.logspace, which torch has since 2.14: `base` to the power of `linspace`.

    Collective; moves nothing. Raises ArgumentError without a mesh, and for a layout that is not torch.strided.
    """
    return _on_mesh("logspace", factories.logspace, start, end, steps, base, dtype=dtype, layout=layout,
                    requires_grad=requires_grad, device_mesh=device_mesh, placements=placements)
