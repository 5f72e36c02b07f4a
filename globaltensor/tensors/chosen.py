"""`max()`, `min()` and `median()` of all elements: those that were chosen share the gradient, and others get none.

torch's own gradient writes it to them for a plain tensor, but for a tensor subclass multiplies it by a mask, and 0
times inf is nan. So for global tensors these are a function of ours, whose gradient chooses.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from globaltensor.runtime.torch_internals import OWN_KEYS, ExcludeDispatchKeys, OpOverload, transforms_active

aten = torch.ops.aten


class ChosenElement(torch.autograd.Function):
    """The element of x that the op chooses."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, func: OpOverload) -> torch.Tensor:
        value = func(x)
        ctx.save_for_backward(x, value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, value = ctx.saved_tensors
        chosen = (x == value) | (x.isnan() & value.isnan())
        return torch.where(chosen, grad / chosen.sum(), 0), None


def _choose(func: OpOverload, x: torch.Tensor) -> torch.Tensor:
    """Where more is asked than a backward pass, torch's own has all formulas."""
    if torch.is_grad_enabled() and x.requires_grad and not transforms_active():
        return ChosenElement.apply(x, func)
    with ExcludeDispatchKeys(OWN_KEYS):
        return func(x)


KERNELS: dict[OpOverload, Callable[..., Any]] = {
    func: partial(_choose, func) for func in (aten.max.default, aten.min.default, aten.median.default,
                                              aten.nanmedian.default)}
