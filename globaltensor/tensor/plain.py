"""What plain torch tensors and modules learn: `x.is_global`, `x.to_global(...)`, and an error for `x.sbp`."""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.errors import SbpError
from globaltensor.tensor import convert


def _no_layout(self: torch.Tensor) -> Any:
    raise SbpError("a plain tensor has no sbp and no placement", "it is not global",
                   "x.to_global(placement, sbp) first, or ask x.is_global")


def install() -> None:
    """Give torch.Tensor the attributes that GlobalTensor has."""
    torch.Tensor.is_global = property(lambda self: False)
    torch.Tensor.sbp = property(_no_layout)
    torch.Tensor.placement = property(_no_layout)
    torch.Tensor.to_global = convert.to_global
