"""Ops of which torch reads values, or strides, before it dispatches them: taken at the key of global tensors alone."""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.layouts.global_like import is_global
from globaltensor.runtime.memory import require
from globaltensor.runtime.torch_internals import OWN_KEYS, ExcludeDispatchKeys
from globaltensor.tensors.full_value import whole_value
from globaltensor.tensors.lookup import check_classes
from globaltensor.tensors.redistribution import to_layout


def one_hot(x: Any, num_classes: int = -1) -> torch.Tensor:
    """torch's own, after a look at the values, of which a pending sum has only terms."""
    if is_global(x):
        x = to_layout(x, x.spec.layout.without_partials)
    check_classes(x, num_classes)
    with ExcludeDispatchKeys(OWN_KEYS):
        return torch.ops.aten.one_hot.default(x, num_classes)


def tensor_split(x: Any, indices: Any, dim: int = 0) -> list[torch.Tensor]:
    """torch's own, which reads the indices from memory."""
    if is_global(indices):
        indices = whole_value(indices)
    else:
        require(indices, "the indices of tensor_split")
    with ExcludeDispatchKeys(OWN_KEYS):
        return torch.ops.aten.tensor_split.tensor_indices_or_sections(x, indices, dim)


def fill_diagonal(x: torch.Tensor, value: Any, wrap: bool = False) -> torch.Tensor:
    """As a view of x, where torch goes by the strides of memory, which not every view has here."""
    if x.dim() == 2 and not (wrap and x.shape[0] > x.shape[1]):
        x.diagonal().fill_(value)
        return x
    with ExcludeDispatchKeys(OWN_KEYS):
        return torch.ops.aten.fill_diagonal_.default(x, value, wrap)
