"""torch's fused attention of a CPU, on GPUs: a kernel for the op, made of those that torch has there.

    attention_on_gpu(q, k, v, ...)                      out, logsumexp
    attention_gradients_on_gpu(grad, q, k, v, out, logsumexp, ...)       dq, dk, dv

Every call takes the kernel that torch itself would for these operands: flash, memory-efficient or cuDNN; and where it
has none, a few of its ops. All of them keep the logarithm of a row's sum of exponentials, so that the gradient may take
any of them, and results of blocks of keys can be merged (ring_attention.py). As on a CPU, a row that sees nothing gives
0, and 0 for its logarithm.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from globaltensor.algorithms.fused_attention import BACKWARD, FORWARD
from globaltensor.runtime.dtypes import accumulation_dtype
from globaltensor.runtime.torch_internals import fused_sdp_choice

aten = torch.ops.aten
_MASK_STEP = 16                                      # elements by which rows of a mask must be apart
_ROWS = 32                                           # by which the memory-efficient kernel counts logarithms


def attention_on_gpu(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
                     attn_mask: Tensor | None = None, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """out [b, h, q, d] and logsumexp [b, h, q]; keys and values may have fewer heads."""
    assert dropout_p == 0                            # fused_attention.py sees to it
    key, value = (_with_heads(t, query.shape[1]) for t in (key, value))
    mask = None if attn_mask is None else _mask_for_kernels(attn_mask, query, key)
    kernel = _kernel_for(query, key, value, mask, is_causal, scale)
    if kernel == SDPBackend.FLASH_ATTENTION:
        out, log = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)[:2]
    elif kernel == SDPBackend.CUDNN_ATTENTION:
        out, log = aten._scaled_dot_product_cudnn_attention(query, key, value, mask, True, 0.0, is_causal, False,
                                                            scale=scale)[:2]
        log = log.reshape(query.shape[:3])
    elif kernel == SDPBackend.EFFICIENT_ATTENTION:
        out, log = aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, 0.0, is_causal,
                                                                scale=scale)[:2]
        log = log[..., :query.shape[2]]
    else:
        out, log = attention_by_ops(query, key, value, is_causal, mask, scale)
    if mask is not None:
        blind = mask.isneginf().all(-1)
        out, log = out.masked_fill(blind.unsqueeze(-1), 0), log.masked_fill(blind, 0)
    return out, log


def attention_gradients_on_gpu(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
                               logsumexp: Tensor, dropout_p: float, is_causal: bool, *,
                               attn_mask: Tensor | None = None, scale: float | None = None
                               ) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values; `out` and `logsumexp` may be those of more keys than these."""
    heads, groups = key.shape[1], query.shape[1] // max(key.shape[1], 1)
    key, value = (_with_heads(t, query.shape[1]) for t in (key, value))
    mask = None if attn_mask is None else _mask_for_kernels(attn_mask, query, key)
    operands, log = (grad_out, query, key, value), logsumexp.contiguous()
    unused = torch.empty((), dtype=torch.int64, device=query.device)         # states of random generators
    kernel = _kernel_for(query, key, value, mask, is_causal, scale)
    if kernel == SDPBackend.FLASH_ATTENTION:
        grads = aten._scaled_dot_product_flash_attention_backward(
            *operands, out, log, None, None, query.shape[2], key.shape[2], 0.0, is_causal, unused, unused, scale=scale)
    elif kernel == SDPBackend.CUDNN_ATTENTION:
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            *operands, out, log.unsqueeze(-1), unused, unused, mask, None, None, query.shape[2], key.shape[2], 0.0,
            is_causal, scale=scale)
    elif kernel == SDPBackend.EFFICIENT_ATTENTION:
        log = F.pad(log, (0, -log.shape[-1] % _ROWS), value=inf)
        grads = aten._scaled_dot_product_efficient_attention_backward(
            *operands, mask, out, log, unused, unused, 0.0, [True, True, True, False], is_causal, scale=scale)
    else:
        grads = attention_gradients_by_ops(*operands, out, log, is_causal, mask, scale)
    dq, dk, dv = grads[:3]
    return (dq, dk, dv) if groups <= 1 else (dq, *(t.unflatten(1, (heads, groups)).sum(2) for t in (dk, dv)))


def attention_by_ops(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None,
                     scale: float | None) -> tuple[Tensor, Tensor]:
    """What the kernels do, in the dtype in which they add."""
    scores = _scores(query, key, causal, mask, scale)
    log = scores.logsumexp(-1)
    return (scores.softmax(-1) @ value.to(scores.dtype)).to(query.dtype), log


def attention_gradients_by_ops(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log: Tensor,
                               causal: bool, mask: Tensor | None, scale: float | None
                               ) -> tuple[Tensor, Tensor, Tensor]:
    """Likewise of the gradients."""
    scores = _scores(query, key, causal, mask, scale)
    wide = [t.to(scores.dtype) for t in (grad, query, key, value, out)]
    grad, q, k, v, out = wide
    p = (scores - log.unsqueeze(-1)).exp()
    slope = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * _scale_of(query, scale)
    return (slope @ k).to(query.dtype), (slope.mT @ q).to(key.dtype), (p.mT @ grad).to(value.dtype)


def _scores(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    dtype = accumulation_dtype(query.dtype)
    scores = query.to(dtype) @ key.to(dtype).mT * _scale_of(query, scale)
    if mask is not None:
        scores = scores + mask
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -inf)
    return scores


def _scale_of(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5 if scale is None else scale)


def _with_heads(t: Tensor, heads: int) -> Tensor:
    """Keys or values with as many heads as queries have."""
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


def _mask_for_kernels(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as kernels want it: for every pair of rows, which are apart by a round number of elements."""
    mask = mask.expand(*mask.shape[:-1], key.shape[2])
    steps: Sequence[int] = [step for n, step in zip(mask.shape[:-1], mask.stride()) if n > 1]
    if mask.stride(-1) != 1 or any(step % _MASK_STEP for step in steps) or mask.data_ptr() % _MASK_STEP:
        mask = F.pad(mask, (0, -mask.shape[-1] % _MASK_STEP))[..., :mask.shape[-1]]
    return mask.expand(*query.shape[:3], key.shape[2])


def _kernel_for(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None
                ) -> SDPBackend:
    """torch's choice; of heads that torch would pad first, its ops."""
    kernel = SDPBackend(fused_sdp_choice(query, key, value, mask, 0.0, causal, scale=scale))
    return SDPBackend.MATH if query.shape[-1] % 8 and kernel == SDPBackend.FLASH_ATTENTION else kernel


def provide_on(key: str) -> None:
    """Let devices of a dispatch key, such as "CUDA", run the op."""
    _library.impl(FORWARD.name(), attention_on_gpu, key)
    _library.impl(BACKWARD.name(), attention_gradients_on_gpu, key)


_library = torch.library.Library("aten", "IMPL")     # what it is told ends with it
