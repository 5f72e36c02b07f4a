"""What an op returns (shapes, strides, dtypes), told without running it and without torch's compiler.

torch has shape functions twice: in C++, beside the kernels, and in Python, for the compiler, also for ops that have
none in C++. On the meta device the Python ones hide the others, and most of them import sympy, many dynamo and
inductor: seconds, in every process. So an op is asked in the first of these ways that it has, and whatever it calls
likewise:

    as another   an op that returns the same (`AS`), or a function of ours (op_shapes.py)
    structured   its C++ shape function. torch wraps it, for devices that have nothing but a kernel, into a function
                 that makes the outputs and passes them to the op's out= variant, which is skipped here.
    composed     the C++ function that makes it of other ops
    pointwise    dtypes from running it on one element, strides from a structured op of as many operands
    kernel       its kernel for the meta device; one in Python last of all
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from globaltensor.runtime.op_shapes import LAST_ON_CPU, SHAPES, channels_last_on_cpu, is_channels_last
from globaltensor.runtime.torch_internals import (
    OpOverload,
    UntracedMode,
    call_kernel,
    has_kernel,
    python_meta,
    tree_leaves,
    tree_map_only,
)

aten = torch.ops.aten
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
Method = Callable[[OpOverload, Sequence[Any], dict[str, Any]], Any]

STRUCTURED, COMPOSITE = "CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd"     # torch's names
IMPLICIT = "CompositeImplicitAutograd"               # by which an op with kernels of its own may be made of others, too

# Their C++ functions call nothing but ops. Of others torch does not tell whether they read values.
COMPOSED = {f"aten::{name}" for name in (
    "empty_like", "zeros_like", "ones_like", "full_like", "fill.Scalar", "mean", "sort", "stack", "repeat", "embedding",
    "masked_fill.Scalar", "masked_fill.Tensor")}
# Pointwise, though torch does not tag them so.
POINTWISE = {f"aten::{name}" for name in (
    "masked_fill_.Scalar", "masked_fill_.Tensor", "complex", "polar", "hardswish", "hardswish_backward",
    "hardtanh_backward", "log_sigmoid_forward", "log_sigmoid_backward", "rrelu_with_noise_backward",
    "mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "soft_margin_loss_backward",
    "binary_cross_entropy_backward")}
# Their strides come out right only if Python is asked for all that their Python calls.
PYTHON_ONLY = {f"aten::{name}" for name in ("grid_sampler_2d", "grid_sampler_3d", "rrelu_with_noise")}


def meta(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The op's result for meta tensors. A user's mistake is torch's own error."""
    if (check := _CHECKS.get(func._schema.name.removesuffix("_"))) is not None:
        check(*args, **kwargs)
    return _method_of(func)(func, args, kwargs)


def as_on(device: str, func: OpOverload, operands: Sequence[Any], results: Any) -> Any:
    """The same, as kernels of a type of device give it: torch's shape functions tell what those of CUDA do. On a CPU
    statistics of a norm of 16 bits are wider only where a parameter is, and more ops keep images channels last."""
    norms = (aten.native_layer_norm.default, aten.native_batch_norm.default)
    if device != "cpu":
        return results
    if func in norms and len({own.dtype for own in operands}) == 1:
        return tuple(t.to(operands[0].dtype) for t in results)
    if any(is_channels_last(operands[i].shape, operands[i].stride) for i in LAST_ON_CPU.get(func, ())):
        return channels_last_on_cpu(func, results)
    return results


class Asking(UntracedMode):
    """Inside it, ops on meta tensors are asked as above. `structured`: the op whose out= variant is skipped."""

    def __init__(self, structured: str | None = None) -> None:
        super().__init__()
        self.structured = structured

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(t, Tensor) and t.is_meta for t in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)             # on a number that became a tensor
        if func._schema.name == self.structured and func._schema.arguments[-1].is_out:
            outputs = tuple(kwargs[a.name] for a in func._schema.arguments if a.is_out)
            return outputs if len(outputs) > 1 else outputs[0]
        return meta(func, args, kwargs)


@lru_cache(None)
def _method_of(func: OpOverload) -> Method:
    if func in AS:
        return _as_another
    if has_kernel(func, STRUCTURED):
        return _structured
    if has_kernel(func, IMPLICIT):
        return _by_decomposition
    if func.namespace in ("aten", "globaltensor") and has_kernel(func, COMPOSITE) and not func.is_view and (
            func.name() in COMPOSED or not has_kernel(func, "Meta")):
        return _composed
    if python_meta(func) is None or func.name() in PYTHON_ONLY:
        return _by_kernel
    return _pointwise if _is_pointwise(func) else _by_python


def _is_pointwise(func: OpOverload) -> bool:
    tagged = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    operands = sum(str(a.type) in ("Tensor", "Optional[Tensor]") for a in func._schema.arguments)
    return (tagged or func.name() in POINTWISE) and operands <= 3 and not func._schema.arguments[-1].is_out


def _structured(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with Asking(func._schema.name.removesuffix("_")):
        return call_kernel(func, STRUCTURED, args, kwargs)


def _by_decomposition(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with Asking():
        return call_kernel(func, IMPLICIT, args, kwargs)


def _composed(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with Asking():
        return call_kernel(func, COMPOSITE, args, kwargs)


def _by_kernel(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _by_python(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _or_torchs(python_meta(func), func, args, kwargs)


def _as_another(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _or_torchs(AS[func], func, args, kwargs)


def _or_torchs(kernel: Callable[..., Any] | None, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What `kernel` says; where that is an error, torch's own has the word, as ops that are called check more."""
    assert kernel is not None                        # the op was filed here because there is one
    try:
        with Asking():
            return kernel(*args, **kwargs)
    except (RuntimeError, IndexError, TypeError, ValueError):
        own = python_meta(func)
        return func(*args, **kwargs) if own is None or own is kernel else _or_torchs(own, func, args, kwargs)


def _pointwise(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """All pointwise ops broadcast their operands and lay out their results alike."""
    operands = [torch.empty_strided(t.shape, t.stride(), dtype=torch.float32, device="meta")
                for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    like = meta((aten.neg.default, aten.add.Tensor, aten.addcmul.default)[len(operands) - 1], operands, {})
    result = on_one_element(func, args, kwargs)
    if not func._schema.is_mutable:
        return tree_map_only(Tensor, lambda t: like.to(t.dtype), result)
    if like.shape != args[0].shape:                  # in torch's words
        own, whole = list(args[0].shape), list(like.shape)
        raise RuntimeError(f"output with shape {own} doesn't match the broadcast shape {whole}")
    return args[0]


def on_one_element(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a pointwise op does with operands of these dtypes, of one element each."""
    ones = tree_map_only(Tensor, lambda t: torch.ones((1,) * t.dim(), dtype=t.dtype, device="cpu"),
                         (list(args), kwargs))
    return func(*ones[0], **ones[1])


def _addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    result = aten.mm(a, b)
    x.expand(result.shape)                           # which only the kernel checks
    return result


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(0) @ b.unsqueeze(1)).squeeze()


def _huber_loss(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    if delta <= 0:
        raise RuntimeError(f"delta is {delta}")
    return aten.mse_loss(x, target, reduction)


def _variance(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return aten.mean.dim(x.abs(), dim, keepdim)


def _variance_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
                   ) -> tuple[Tensor, Tensor]:
    return _variance(x, dim, keepdim=keepdim), aten.mean.dim(x, dim, keepdim)


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
                ) -> tuple[Tensor, Tensor, Tensor]:
    lead = x.dim() - len(shape)
    sizes = [x.shape[lead:], *(t.shape for t in (weight, bias) if t is not None)]
    if not shape or any(list(size) != list(shape) for size in sizes):
        raise RuntimeError(f"not of shape {list(shape)}")
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    statistic = torch.empty((*x.shape[:lead], *[1] * len(shape)), dtype=wide, device="meta")
    return torch.empty(x.shape, dtype=x.dtype, device="meta"), statistic, torch.empty_like(statistic)


def _layer_norm_backward(grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor,
                         weight: Tensor | None, bias: Tensor | None, wanted: Sequence[bool]
                         ) -> tuple[Tensor | None, ...]:
    return tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") if want and t is not None else None
                 for t, want in zip((x, weight, bias), wanted))


def _batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
                training: bool, momentum: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    kernel = python_meta(aten.native_batch_norm.default)
    assert kernel is not None
    out, *statistics = kernel(x, weight, bias, mean, var, training, momentum, eps)
    if training:
        return (out, *statistics)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    kept = x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
    out = torch.empty_like(x, memory_format=formats[x.dim()] if kept else torch.contiguous_format)
    return out, x.new_empty(0), x.new_empty(0)       # kernels leave them empty


def _index_fill(x: Tensor, dim: int, *_: Any) -> Tensor:
    """Where elements of x share memory, torch's own word of the strides is not what its kernels give."""
    x.sum(dim)                                       # which checks it
    return torch.empty_like(x)


def _addr(x: Tensor, a: Tensor, b: Tensor, **scales: Any) -> Tensor:
    if a.dim() != 1 or b.dim() != 1:
        raise RuntimeError("not vectors")
    x.expand(a.shape[0], b.shape[0])
    return aten.addcmul.default(x, a.unsqueeze(1), b.unsqueeze(0))


def _attention_on_cpu(*operands: Any, **more: Any) -> Any:
    """Of float64, torch before 2.13 says that the logarithms of sums are float32, and the kernel gives float64."""
    kernel = python_meta(_ATTENTION)
    assert kernel is not None
    result, logarithms = kernel(*operands, **more)
    return result, logarithms.to(torch.float64) if result.dtype is torch.float64 else logarithms


def _batch_norm_backward(*operands: Any, **more: Any) -> tuple[Tensor | None, ...]:
    """torch's shape function also gives what the mask, the last argument, leaves out, and its kernels do not."""
    kernel = python_meta(aten.native_batch_norm_backward.default)
    assert kernel is not None
    mask = more.get("output_mask", operands[-1])
    return tuple(t if yes else None for t, yes in zip(kernel(*operands, **more), mask, strict=True))


def _contiguous_like(which: int) -> Callable[..., Tensor]:
    return lambda *operands: torch.empty(operands[which].shape, dtype=operands[which].dtype, device="meta")


def _ctc_loss(x: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    kept = (x.shape[0], 2 * targets.shape[1] + 1) if targets.dim() == 2 else (0, 0)      # as ctc.py keeps it
    return x.new_empty(x.shape[1]), x.new_empty(x.shape[1], *kept)


AS: dict[OpOverload, Callable[..., Any]] = {
    aten.addmm.default: _addmm,
    aten.mv.default: lambda a, b: (a @ b.unsqueeze(1)).squeeze(1),
    aten.dot.default: _dot,
    aten.vdot.default: _dot,
    aten.addr.default: _addr,
    aten.huber_loss.default: _huber_loss,
    aten.logsumexp.default: lambda x, dim, keepdim=False: x.exp().sum(dim, keepdim),
    aten.var.correction: _variance,
    aten.std.correction: _variance,
    aten.var_mean.correction: _variance_mean,
    aten.std_mean.correction: _variance_mean,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _contiguous_like(1),
    aten._ctc_loss_backward.Tensor: _contiguous_like(1),
    aten._standard_gamma_grad.default: _contiguous_like(0),
    aten._dirichlet_grad.default: _contiguous_like(0),
    aten.fractional_max_pool3d_backward.default: _contiguous_like(1),
    aten.multi_margin_loss_backward.default: _contiguous_like(1),
    aten.multilabel_margin_loss_backward.default: _contiguous_like(1),
    aten.index_fill.int_Tensor: _index_fill,
    aten.index_fill.int_Scalar: _index_fill,
    aten.zero.default: torch.empty_like,             # in the order of the operand, which torch tells since 2.13
    _ATTENTION: _attention_on_cpu,
    **SHAPES,
}


# ------------------------------------------------------------------------------------- what only torch's kernels check


def _check_selected(x: Tensor, dim: int, index: Tensor) -> None:
    if index.dim() > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")


def _check_filled(x: Tensor, dim: int, index: Tensor, value: Any) -> None:
    if isinstance(value, Tensor) and value.dim():
        raise RuntimeError("index_fill_ only supports a 0-dimensional value tensor, but got tensor with "
                           f"{value.dim()} dimension(s).")
    if (value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex)) and not x.is_complex():
        raise RuntimeError("index_fill_(): Converting complex Scalar to non-complex type is not supported")
    if index.dtype != torch.int64:
        raise IndexError("index_fill_(): Expected dtype int64 for index.")
    if index.dim() > 1:
        raise RuntimeError("Index has to be a vector/scalar")


def _check_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> None:
    index = [t.dtype for t in indices if t is not None]
    fills = index == [torch.bool] and values.numel() == 1 and not accumulate         # with what is cast: see masks.py
    if x.dtype != values.dtype and not fills:
        raise RuntimeError(f"Index put requires the source and destination dtypes match, got {_name_of_dtype(x)} for "
                           f"the destination and {_name_of_dtype(values)} for the source.")
    if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices):
        return                                       # how many elements a mask names only its values tell
    size = list(meta(aten.index.Tensor, [x, indices], {}).shape)
    own = list(values.shape)
    if len(own) > len(size) or any(n not in (1, m) for n, m in zip(reversed(own), reversed(size))):
        raise RuntimeError(f"shape mismatch: value tensor of shape {own} cannot be broadcast to indexing result of "
                           f"shape {size}")


def _check_classes(x: Tensor, target: Tensor, *_: Any) -> None:
    if target.dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {_name_of_dtype(target)}")


def _check_reduced(x: Tensor, *dims: Any, **more: Any) -> None:
    if not dims and not more and not x.numel():
        raise RuntimeError("Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim "
                           "with the 'dim' argument.")


def _check_channels(x: Tensor, *_: Any) -> None:
    x.size(1)


def _check_varied(x: Tensor, *_: Any, **more: Any) -> None:
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise RuntimeError("std and var only support floating point and complex dtypes")


def _check_convolved(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
                     dilation: Sequence[int], *options: Any) -> None:
    if min(padding) < 0:                             # parts of a split image, whose windows hold it, have none
        raise RuntimeError("negative padding is not supported")
    if min(dilation) <= 0:
        raise RuntimeError("non-positive dilation is not supported")
    if options[0] and x.dim() == weight.dim() > 2 and x.shape[1] != weight.shape[0]:
        raise RuntimeError(f"Given transposed=1, weight of size {list(weight.shape)}, expected input{list(x.shape)} "
                           f"to have {weight.shape[0]} channels, but got {x.shape[1]} channels instead")


def _name_of_dtype(t: Tensor) -> str:
    """As C++ calls it."""
    return t.type().rpartition(".")[2].removesuffix("Tensor")


# A rank may run an op of ours instead, or a part for which the kernel has nothing to check; and all processes shall
# raise, those too that run no kernel.
_CHECKS: dict[str, Callable[..., None]] = {
    "aten::index_select": _check_selected,
    "aten::index_fill": _check_filled,
    "aten::index_put": _check_put,
    "aten::nll_loss2d_forward": _check_classes,
    "aten::convolution": _check_convolved,
    "aten::native_batch_norm": _check_channels,
    "aten::max": _check_reduced,
    "aten::min": _check_reduced,
    **dict.fromkeys(("aten::var", "aten::std", "aten::var_mean", "aten::std_mean"), _check_varied),
}
