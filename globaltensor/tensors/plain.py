"""What plain torch tensors and modules learn: `x.is_global`, `x.to_global(...)`, and an error for `x.sbp`.

Where torch.func wraps a global tensor, the wrapper is a torch.Tensor too: it answers for what it wraps.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from globaltensor.errors import PlainTensorError
from globaltensor.layouts.layout import Layout
from globaltensor.runtime.torch_internals import default_collate_fn_map, foreach_supported_types
from globaltensor.tensors import convert, map_ops
from globaltensor.tensors.full_value import FullTensor
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.linear_maps import layout_of
from globaltensor.tensors.redistribution import to_local
from globaltensor.tracebacks import api_boundary


def _layout(self: torch.Tensor) -> Layout:
    own = layout_of(self)
    if own is None:
        raise PlainTensorError("a plain tensor has no sbp and no placement", "it is not global",
                               "x.to_global(placement, sbp) first, or ask x.is_global")
    return own


def _of_stand_in(name: str, method: Callable[[torch.Tensor], torch.Tensor]) -> property:
    """A method of wrapped global tensors. Plain ones do not have it: by it some tell the two apart."""

    def get(self: torch.Tensor) -> Callable[[], torch.Tensor]:
        if layout_of(self) is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return lambda: method(self)

    return property(get)


def _collated(batch: list[torch.Tensor], **_: Any) -> torch.Tensor:
    """A batch of rows. In a worker torch stacks them into memory that processes share, which is a plain tensor's."""
    return torch.stack(batch)


def install_attributes() -> None:
    """Give torch.Tensor the attributes that GlobalTensor has."""
    plain: Any = torch.Tensor                        # a class learns attributes, which its stubs cannot know
    plain.is_global = property(lambda self: layout_of(self) is not None)
    plain.sbp = property(api_boundary(lambda self: _layout(self).sbp))
    plain.placement = property(api_boundary(lambda self: _layout(self).placement))
    plain.to_global = convert.plain_to_global
    plain.full_tensor = _of_stand_in("full_tensor", FullTensor.of)
    plain.to_local = _of_stand_in("to_local", to_local)
    for types in foreach_supported_types():
        types.append(GlobalTensor)                   # clipping takes all norms in one go
    default_collate_fn_map[GlobalTensor] = _collated
    map_ops.register_maps()
