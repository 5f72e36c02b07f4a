"""Ops to which it matters how operands lie in memory: the kin of as_strided, and factorizations.

Strides speak of the memory that a tensor of one device would have. `aten.as_strided` knows where a rank has its part of
that (dispatch/view_writes.py); here similar ops are made of it.

The kernels of det and solve factor the transpose of a real matrix that is contiguous, and the matrix itself otherwise.
Their gradients are given the factors, and ask once more whether the matrix was contiguous, the whole one then.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from globaltensor.algorithms.aliasing import has_own_memory
from globaltensor.algorithms.run import Run
from globaltensor.errors import PlacementError
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import contiguous, dense
from globaltensor.layouts.view_parts import extent_in_memory
from globaltensor.rules.call import Call

aten = torch.ops.aten


def beyond_memory(base: Any, size: Sequence[int], stride: Sequence[int], offset: int) -> RuntimeError | None:
    """torch's error where strides lead beyond the memory of a tensor; None where they do not."""
    extent = extent_in_memory(size, stride)
    stop = offset + extent
    if not extent or stop <= base.numel():
        return None
    return RuntimeError(f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and "
                        f"itemsize {base.dtype.itemsize} requiring a storage size of {stop * base.dtype.itemsize} are "
                        f"out of bounds for storage of size {base.nbytes}")


def as_strided_copy(call: Call, run: Run) -> Any:
    """What as_strided views, in memory of its own."""
    view = run(aten.as_strided.default, call["self"], call["size"], call["stride"], call["storage_offset"])
    return run(aten.clone.default, view, memory_format=torch.contiguous_format)


def must_be_boxed(call: Call) -> bool:
    """Has no rank the whole memory that as_strided_scatter copies?"""
    x = call["self"]
    return is_global(x) and (x.spec.copied or any(not s.is_broadcast for s in x.spec.sbp))


def as_strided_scatter(call: Call, run: Run) -> Any:
    """A copy of x whose elements there are those of `src`. Raises PlacementError where the copy's memory would be
    another one: of memory with gaps, and for an offset in the memory of a view."""
    x, src = call["self"], call["src"]
    if list(src.shape) != list(call["size"]):        # in torch's words
        raise RuntimeError("expected src to have a size equal to the slice of self. src size = "
                           f"{list(src.shape)}, slice size = {list(call['size'])}")
    if x.spec.stride != dense(x.spec.shape, x.spec.stride) or (
            call["storage_offset"] is not None and not has_own_memory(x)):
        raise PlacementError("as_strided_scatter of a tensor that must be boxed for it, and is a view",
                             "strides speak of memory, and what is boxed has other memory", "x.clone() first")
    written = run(aten.clone.default, x)
    view = run(aten.as_strided.default, written, call["size"], call["stride"], call["storage_offset"])
    run(aten.copy_.default, view, src)
    return written


def zeros_in_memory_like(call: Call, run: Run) -> Any:
    """Zeros of the dtype of `other`, laid out, and lazily conjugated or negated, as it is: forward AD copies a tangent
    into them. The first dims of `self`, over which a transform maps, are outside of that memory."""
    like = call["other"]
    size, stride = list(like.shape), list(like.stride())
    step = extent_in_memory(size, stride)
    for n in reversed(call["self"].shape[:call["self_num_batch_dims"]]):
        size, stride, step = [n, *size], [step, *stride], step * n
    zeros = run(aten.new_empty_strided.default, like, size, stride)
    zeros = run(aten.zero_.default, zeros)
    zeros = run(aten._conj.default, zeros) if like.is_conj() else zeros      # below autograd torch sets bits unseen
    return run(aten._neg_view.default, zeros) if like.is_neg() else zeros


def lies_otherwise(call: Call) -> bool:
    """Is the matrix not contiguous, where a part of it may be: one that was boxed, or one of a batch with gaps?"""
    a = call["A"]
    return is_global(a) and not a.dtype.is_complex and a.spec.stride != contiguous(a.spec.shape)


def factored_by_columns(call: Call, run: Run) -> Any:
    """det and solve of a matrix that is not contiguous: laid out by columns it is not so on any rank either."""
    by_rows = run(aten.clone.default, run(aten.transpose.int, call["A"], -1, -2), memory_format=torch.contiguous_format)
    by_columns = run(aten.transpose.int, by_rows, -1, -2)
    args, kwargs = call.arguments_with([by_columns, *call.tensors[1:]])
    return run.plain(Call(call.func, tuple(args), kwargs))
