"""What ops return for which torch has shape functions in Python only, which import sympy: half a second.

Each function takes what the op takes, and gives an empty meta tensor for each result. They are for contiguous operands,
whose results are contiguous. Where an operand is not, or does not fit, they raise: then torch is asked (meta.py).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any

import torch
from torch import Tensor

from globaltensor.runtime.torch_internals import OpOverload

aten = torch.ops.aten
ShapeFunction = Callable[..., Any]


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device="meta")


def _check(fits: bool) -> None:
    if not fits:
        # nobody sees it: meta.py then asks torch, whose error is the user's
        raise RuntimeError("torch's own error follows")


def _numbers_per_dim(n: int, *numbers: Sequence[int]) -> list[Sequence[int]]:
    """A number per dim, where torch also takes one for all."""
    return [list(v) * n if len(v) == 1 else v for v in numbers]


def _positions(sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
             dilation: Sequence[int]) -> list[int]:
    """How often the kernel fits along each dim. An empty stride is the kernel's."""
    per_dim = _numbers_per_dim(len(sizes), kernel, stride or kernel, padding, dilation)
    counts = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(sizes, *per_dim)]
    _check(min(counts) > 0 and min(stride or kernel) > 0 and min(dilation) > 0 and min(padding) >= 0)
    return counts


def _as_operand(which: int, dims: int | None = None) -> ShapeFunction:
    """The result is like one of the operands; argument `dims` names dims of it."""

    def shape_of(*args: Any) -> Tensor:
        if dims is not None and len(args) > dims:
            args[0].sum(args[dims])                  # which checks them
        return _empty(args[which].shape, args[which])

    return shape_of


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    _check(x.numel() > 0 and len(shifts) == (len(dims) or 1))
    for dim in dims:
        x.sum(dim)
    return _empty(x.shape, x)


def _format_of(x: Tensor, weight: Tensor) -> torch.memory_format:
    """The memory format of what a convolution gives: channels last where one of the two is."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or not any(t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in (x, weight)):
        return torch.contiguous_format
    return last


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
                 dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int) -> Tensor:
    _check(x.dim() > 2 and weight.dim() == x.dim() and groups > 0 and x.dtype == weight.dtype)
    in_dim, channels = (0, weight.shape[1] * groups) if transposed else (1, weight.shape[0])
    _check(x.shape[1] == weight.shape[in_dim] * (1 if transposed else groups) and weight.shape[0] % groups == 0)
    _check(bias is None or bias.shape == (channels,) and bias.dtype == x.dtype)
    sizes, kernel = x.shape[2:], weight.shape[2:]
    if transposed:
        per_dim = _numbers_per_dim(len(sizes), kernel, stride, padding, dilation, output_padding)
        result = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, d, o in zip(sizes, *per_dim)]
        _check(min(result) > 0 and all(o < max(s, d) for s, d, o in zip(per_dim[1], per_dim[3], per_dim[4])))
    else:
        result = _positions(sizes, kernel, stride, padding, dilation)
    return _empty((x.shape[0], channels, *result), x).contiguous(memory_format=_format_of(x, weight))


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Sequence[int] | None, *options: Any
                          ) -> tuple[Tensor | None, ...]:
    shapes = x.shape, weight.shape, bias or [grad.shape[1]]
    format_of = _format_of(x, weight)
    return tuple(_empty(shape, grad).contiguous(memory_format=format_of if len(shape) > 1 else torch.contiguous_format)
                 if want else None for shape, want in zip(shapes, options[-1]))


def _group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, groups: int,
                eps: float) -> tuple[Tensor, Tensor, Tensor]:
    _check(groups > 0 and c % groups == 0 and x.numel() == n * c * hw)
    _check(all(t is None or t.shape == (c,) for t in (weight, bias)))
    statistic = _empty((n, groups), x if weight is None else weight)
    return _empty(x.shape, x), statistic, torch.empty_like(statistic)


def _group_norm_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, n: int, c: int,
                         hw: int, groups: int, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    shapes = x.shape, [c], [c]
    return tuple(_empty(shape, like) if want else None
                 for shape, like, want in zip(shapes, (x, mean, mean), wanted))


def _adaptive_pool(dims: int) -> ShapeFunction:

    def shape_of(x: Tensor, size: Sequence[int]) -> Tensor:
        _check(x.dim() in (dims + 1, dims + 2) and len(size) == dims and 0 not in x.shape[1:])
        return _empty((*x.shape[:-dims], *size), x)

    return shape_of


def _reflection_pad2d(x: Tensor, padding: Sequence[int]) -> Tensor:
    left, right, top, bottom = padding
    h, w = x.shape[-2:]
    _check(x.dim() in (3, 4) and all(x.shape[1:]) and min(padding) >= 0)
    _check(max(left, right) < w and max(top, bottom) < h)
    return _empty((*x.shape[:-2], h + top + bottom, w + left + right), x)


def _im2col(x: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
            ) -> Tensor:
    _check(x.dim() in (3, 4) and all(x.shape[-3:]))
    positions = _positions(x.shape[-2:], kernel, stride, padding, dilation)
    return _empty((*x.shape[:-3], x.shape[-3] * prod(kernel), prod(positions)), x)


def _col2im(x: Tensor, size: Sequence[int], kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int],
            stride: Sequence[int]) -> Tensor:
    _check(x.dim() in (2, 3) and x.shape[-2] % prod(kernel) == 0)
    _check(x.shape[-1] == prod(_positions(size, kernel, stride, padding, dilation)))
    return _empty((*x.shape[:-2], x.shape[-2] // prod(kernel), *size), x)


def _max_pool3d(x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
                dilation: Sequence[int] = (1,), ceil_mode: bool = False) -> tuple[Tensor, Tensor]:
    _check(x.dim() in (4, 5) and all(x.shape[-4:]) and not ceil_mode and 2 * max(padding) <= min(kernel))
    result = _empty((*x.shape[:-3], *_positions(x.shape[-3:], kernel, stride, padding, dilation)), x)
    return result, torch.empty_like(result, dtype=torch.int64)


def _max_unpool(dims: int) -> ShapeFunction:

    def shape_of(x: Tensor, indices: Tensor, size: Sequence[int], *options: Any) -> Tensor:
        _check(x.dim() in (dims + 1, dims + 2) and indices.shape == x.shape and len(size) == dims and all(x.shape[1:]))
        return _empty((*x.shape[:-dims], *size), x)

    return shape_of


def _channel_shuffle(x: Tensor, groups: int) -> Tensor:
    _check(x.dim() > 2 and groups > 0 and x.shape[1] % groups == 0)
    return _empty(x.shape, x)


def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    _check(0 < k <= (x.shape[dim] if x.dim() else 1))
    return aten.max.dim(x, dim, keepdim)


def _addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    result = _empty(aten.bmm(a, b).shape[1:], x)
    x.expand(result.shape)
    return result


def _cdist_backward(grad: Tensor, a: Tensor, *_: Any) -> Tensor:
    return _empty((*grad.shape[:-2], *a.shape[-2:]), a)              # of all batches, where `a` repeats


def _cdist(a: Tensor, b: Tensor, p: float, mode: int | None) -> Tensor:
    _check(p >= 0 and a.shape[-1] == b.shape[-1])
    return a.unsqueeze(-2).select(-1, 0) + b.unsqueeze(-3).select(-1, 0)


def _binary_cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Tensor:
    _check(x.shape == target.shape)
    return aten.mse_loss(x, target, reduction)


def _soft_margin_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    return _binary_cross_entropy(x, target, None, reduction)


def _for_contiguous(shape_of: ShapeFunction) -> ShapeFunction:
    @wraps(shape_of)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check(all(t.is_contiguous() for t in args if isinstance(t, Tensor)))
        return shape_of(*args, **kwargs)

    return checked


_FUNCTIONS: dict[OpOverload, ShapeFunction] = {
    aten.fill.Tensor: _as_operand(0),
    aten.flip.default: _as_operand(0, dims=1),
    aten.roll.default: _roll,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten._adaptive_avg_pool2d.default: _adaptive_pool(2),
    aten._adaptive_avg_pool3d.default: _adaptive_pool(3),
    aten._adaptive_avg_pool2d_backward.default: _as_operand(1),
    aten._adaptive_avg_pool3d_backward.default: _as_operand(1),
    aten.max_pool3d_with_indices.default: _max_pool3d,
    aten.max_unpool2d.default: _max_unpool(2),
    aten.max_unpool3d.default: _max_unpool(3),
    aten.channel_shuffle.default: _channel_shuffle,
    aten.unfold_backward.default: lambda grad, size, *options: _empty(size, grad),
    aten.max_pool3d_with_indices_backward.default: _as_operand(1),
    aten.reflection_pad2d.default: _reflection_pad2d,
    aten.reflection_pad2d_backward.default: _as_operand(1),
    aten.replication_pad2d_backward.default: _as_operand(1),
    aten.replication_pad3d_backward.default: _as_operand(1),
    aten.im2col.default: _im2col,
    aten.col2im.default: _col2im,
    aten.glu_backward.default: _as_operand(1),
    aten.kthvalue.default: _kthvalue,
    aten.addbmm.default: _addbmm,
    aten._cdist_forward.default: _cdist,
    aten._cdist_backward.default: _cdist_backward,
    aten._pdist_backward.default: _as_operand(1),
    aten.soft_margin_loss.default: _soft_margin_loss,
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    aten.binary_cross_entropy_backward.default: _as_operand(1),
}
SHAPES: dict[OpOverload, ShapeFunction] = {op: _for_contiguous(shape_of) for op, shape_of in _FUNCTIONS.items()}


# ------------------------------------------------------------------------------------------ channels last on a CPU

# op -> the operands of which one that is channels last makes the result so, where torch's shape functions say otherwise
LAST_ON_CPU: dict[OpOverload, tuple[int, ...]] = {
    aten.convolution.default: (0, 1),
    **dict.fromkeys((aten.roll.default, aten.max_unpool2d.default, aten.pixel_shuffle.default,
                     aten.pixel_unshuffle.default, aten.channel_shuffle.default, aten.native_channel_shuffle.default,
                     aten.reflection_pad2d.default, aten.reflection_pad3d.default, aten.replication_pad2d.default,
                     aten.replication_pad3d.default), (0,)),
    **dict.fromkeys((aten.reflection_pad2d_backward.default, aten.reflection_pad3d_backward.default,
                     aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default), (1,)),
}


def is_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Do kernels take a tensor of this shape and these strides for channels last? (`suggest_memory_format` in C++.)"""
    if len(shape) not in (4, 5) or 0 in shape or not stride[1]:
        return False
    least = 0
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        if stride[d] < least or d == 0 and least == stride[1]:
            return False
        least = stride[d] * shape[d]
    return True


def channels_last_on_cpu(func: OpOverload, result: Tensor) -> Tensor:
    """The result of an op of which an operand is channels last. Kernels of volumes are so only for batches of 32 bits
    and fewer."""
    volumes = func is aten.convolution.default and result.dim() == 5
    if volumes and (result.shape[0] == 1 or result.dtype is torch.float64):
        return result
    last = torch.channels_last if result.dim() == 4 else torch.channels_last_3d
    return torch.empty(result.shape, dtype=result.dtype, device="meta", memory_format=last)
