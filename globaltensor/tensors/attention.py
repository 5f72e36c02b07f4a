"""`F.scaled_dot_product_attention` of global tensors on accelerators, where a fused kernel would not do.

With dropout it draws numbers that depend on how the operands are laid out, and of a mask that needs a gradient not all
of them give it. As on a CPU, torch's own ops do these. csrc/torch_ext/attention.cpp is the twin.
"""
from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F

from globaltensor.algorithms.attention_kernels import provide_on
from globaltensor.tensors.products import autocast

_decompose = torch.ops.aten.scaled_dot_product_attention.default.decompose


def scaled_dot_product_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                                 attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
                                 is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
                                 torchs: Callable[..., torch.Tensor] = F.scaled_dot_product_attention) -> torch.Tensor:
    """torch's own function, which is `torchs`."""
    if query.device.type in ("cpu", "meta") or not dropout_p and (attn_mask is None or not attn_mask.requires_grad):
        return torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype).log()  # 0 where it is seen, -inf elsewhere
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal,
                                                             scale=scale, enable_gqa=enable_gqa)[0]


def traced_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                     attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
                     **options: Any) -> torch.Tensor:
    """The same at the key of what torch traces, above autocast. The key stays, so that the products inside come to
    products.py."""
    kind = query.device.type
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options,
                                            torchs=_decompose)


if torch.version.cuda:
    provide_on("CUDA")

TAKEN: dict[Callable[..., object], Callable[..., torch.Tensor]] = {
    F.scaled_dot_product_attention: scaled_dot_product_attention}
