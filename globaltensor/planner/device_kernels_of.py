"""On the meta device the kernels of the device that a program is meant for, where torch chooses by the device.

For scaled dot product attention torch asks the device of the operands which fused kernel fits them. The meta device has
none, so a program would be seen to make s x s matrices that it never makes. Inside `kernels_of("cpu")` the choice is
that of the device named, asked on fake tensors of it. Of a linear map, that device also says which dtypes it does not
multiply: the meta device takes any.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from globaltensor.runtime.torch_internals import (
    OpOverload,
    UntracedMode,
    fake_mode,
    tree_map_only,
    without_modes,
)
from globaltensor.tensors.global_tensor import GlobalTensor

aten = torch.ops.aten
_fused = aten._scaled_dot_product_flash_attention_for_cpu.default


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Inside, attention of global tensors on the meta device is computed by the op that it would be on a device."""
    with _Attention(device):
        yield


class _Attention(TorchFunctionMode):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(self.device, *args, **kwargs)
        if func is F.linear:
            _check_dtypes(self.device, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            func = _with_attention(func, self.device)
        return func(*args, **kwargs)


def _check_dtypes(device: str, *operands: Any, **named: Any) -> None:
    """Raise what the device's kernel raises for operands of such dtypes; autocast, which changes them, comes after."""
    dtypes = {t.dtype for t in (*operands, *named.values()) if isinstance(t, torch.Tensor)}
    if len(dtypes) > 1 and not torch.is_autocast_enabled():
        with without_modes(), torch.no_grad():
            few = tree_map_only(torch.Tensor, lambda t: torch.empty([1] * t.dim(), dtype=t.dtype, device=device),
                                (operands, named))
            F.linear(*few[0], **few[1])


def _with_attention(func: Any, device: str) -> Any:
    """A function of torch's that calls attention inside, where a mode does not see it: the same with ours."""
    names = {**func.__globals__, "scaled_dot_product_attention": partial(_attention, device)}
    names[func.__name__] = FunctionType(func.__code__, names, func.__name__, func.__defaults__)
    return names[func.__name__]


def _attention(device: str, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
               is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Any:
    described = [None if t is None else (tuple(t.shape), tuple(t.stride()), t.dtype, t.requires_grad)
                 for t in (query, key, value, attn_mask)]
    on_meta = isinstance(query, GlobalTensor) and query.is_meta
    if not on_meta or not _is_fused(device, *described, dropout_p, is_causal, scale, enable_gqa):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                                              enable_gqa=enable_gqa)
    if enable_gqa:                                   # several heads of queries share one of keys: torch repeats those
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        low = torch.full((), -torch.inf, dtype=query.dtype, device="cpu")
        attn_mask = torch.where(attn_mask, torch.zeros((), dtype=query.dtype, device="cpu"), low)
    return _fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


class _Names(UntracedMode):
    """Notes which ops are called."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpOverload] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        self.ops.append(func)
        return func(*args, **kwargs or {})


@lru_cache(1_000)
def _is_fused(device: str, *call: Any) -> bool:
    """Does torch take the fused kernel for operands like these, by shape, strides, dtype and need of a gradient?"""
    *described, dropout_p, is_causal, scale, enable_gqa = call
    with without_modes(), fake_mode(), torch.no_grad(), _Names() as names:
        operands: list[Any] = []
        for one in described:
            t = None if one is None else torch.empty_strided(one[0], one[1], dtype=one[2], device=device)
            operands.append(t if t is None or not t.is_floating_point() else t.requires_grad_(one[3]))
        q, k, v, mask = operands
        F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return _fused in names.ops
