"""The dtype in which gradients are sent: half the bytes where it is bfloat16."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from globaltensor.errors import ArgumentError, GlobalTensorError
from globaltensor.layouts.global_like import is_global
from globaltensor.tensors.gradients import notes_of
from globaltensor.tracebacks import api_boundary


@api_boundary
def set_grad_reduce_dtype(parameters: Iterable[Any], dtype: torch.dtype | None) -> None:
    """Send the gradients of these parameters in another dtype when they are reduced, then bring them back to their own:
    half the bytes for bfloat16. What arrives is added up in float32. None: in their own dtype again.

    Every process makes the call. Raises ArgumentError for a dtype that is not floating point and for what are no
    parameters, GlobalTensorError for a plain parameter.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"gradients cannot be reduced in {dtype!r}", "they are floating point numbers",
                            "gt.set_grad_reduce_dtype(model.parameters(), torch.bfloat16)")
    several = isinstance(parameters, Iterable) and not isinstance(parameters, torch.Tensor)
    for leaf in (leaves := list(parameters) if several else [None]):
        if not isinstance(leaf, torch.Tensor):
            raise ArgumentError(f"gradients of a {type(parameters).__name__}", "they belong to parameters",
                                "gt.set_grad_reduce_dtype(model.parameters(), dtype); of one: [model.weight]")
        if not is_global(leaf):
            raise GlobalTensorError("gt.set_grad_reduce_dtype of a plain parameter",
                                    f"one of shape {list(leaf.shape)} is plain, and its gradient is never reduced",
                                    "gt.parallelize(model, placement) before it")
    for leaf in leaves:
        notes_of(leaf).reduce_dtype = dtype
