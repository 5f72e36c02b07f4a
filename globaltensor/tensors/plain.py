"""What plain torch tensors and modules learn: `x.is_global`, `x.to_global(...)`, and an error for `x.sbp`."""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.errors import SbpError
from globaltensor.runtime.torch_internals import foreach_supported_types
from globaltensor.tensors import convert
from globaltensor.tensors.global_tensor import GlobalTensor


def _no_layout(self: torch.Tensor) -> Any:
    raise SbpError("a plain tensor has no sbp and no placement", "it is not global",
                   "x.to_global(placement, sbp) first, or ask x.is_global")


def install_attributes() -> None:
    """Give torch.Tensor the attributes that GlobalTensor has."""
    plain: Any = torch.Tensor                        # a class learns attributes, which its stubs cannot know
    plain.is_global = property(lambda self: False)
    plain.sbp = property(_no_layout)
    plain.placement = property(_no_layout)
    plain.to_global = convert.plain_to_global
    for types in foreach_supported_types():
        types.append(GlobalTensor)                   # clipping takes all norms in one go
