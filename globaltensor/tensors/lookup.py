"""Embeddings whose vocabulary is cut: every rank makes the gradient of its own rows only. And one_hot.

torch's gradient of an embedding knows how many rows there are, but not how the weight lies. So for a weight that is
split along its rows the lookup is a function of ours, which keeps a tensor of as many rows and no columns, `rows`,
that lies as the weight does; the gradient is made to lie like it. So is that of x[i, j] along a cut dim.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from globaltensor.algorithms.local_impls import check_range
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.runtime import custom_ops
from globaltensor.runtime.torch_internals import OWN_KEYS, ExcludeDispatchKeys, OpOverload, transforms_active
from globaltensor.tensors.linear_maps import row_by_row
from globaltensor.tensors.redistribution import to_layout

aten = torch.ops.aten
_embedding = aten.embedding.default
_backward = custom_ops.embedding_backward


class Lookup(torch.autograd.Function):
    """weight[indices]; the row `padding` takes no gradient (-1: none such)."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, indices: torch.Tensor, padding: int) -> torch.Tensor:
        ctx.padding = padding
        ctx.save_for_backward(indices, weight.new_empty(weight.shape[0], 0))
        return _embedding(weight, indices, padding)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        indices, rows = ctx.saved_tensors
        if transforms_active():                      # more is asked than a backward pass: torch's own has all formulas
            return aten.embedding_dense_backward(grad, indices, rows.shape[0], ctx.padding, False), None, None
        return EmbeddingGradient.apply(grad, indices, rows, ctx.padding), None, None


class EmbeddingGradient(torch.autograd.Function):
    """The gradient of a lookup, which is linear in the one that comes in."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor, padding: int) -> torch.Tensor:
        ctx.padding = padding
        ctx.save_for_backward(indices)
        return _backward(grad, indices, rows, padding)

    @staticmethod
    @row_by_row
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        indices, = ctx.saved_tensors
        rows = Lookup.apply(grad, indices, ctx.padding)
        return rows.masked_fill((indices == ctx.padding).unsqueeze(-1), 0), None, None, None


def embedding(input: torch.Tensor, weight: Any, padding_idx: int | None = None, max_norm: float | None = None,
              norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False) -> torch.Tensor:
    """F.embedding; all but a cut vocabulary goes torch's own way. The gradient of a global weight is dense, whatever
    `sparse` says: a rank's rows are in one piece of memory."""
    sparse = sparse and not is_global(weight)
    cut = is_global(weight) and weight.dim() == 2 and any(s.is_split and s.dim == 0 for s in weight.spec.sbp)
    fits = padding_idx is None or -weight.shape[0] <= padding_idx < weight.shape[0]
    if not cut or not fits or transforms_active() or max_norm is not None or scale_grad_by_freq:
        return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return Lookup.apply(weight, input, -1 if padding_idx is None else padding_idx % weight.shape[0])


class PickedElements(torch.autograd.Function):
    """x[i, j], where a dim that the indices name is cut. torch makes the gradient of a whole x; here it lies as x does,
    and what is moved are the values."""

    @staticmethod
    def forward(ctx: Any, x: Any, *indices: torch.Tensor) -> torch.Tensor:
        ctx.layout, ctx.shape = x.spec.layout.without_partials, x.shape
        ctx.save_for_backward(*indices)
        return aten.index.Tensor(x, list(indices))

    @staticmethod
    @row_by_row
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        zeros: Any = grad.new_zeros(()).expand(ctx.shape)
        zeros, indices = to_layout(zeros, ctx.layout), ctx.saved_tensors
        return aten.index_put.default(zeros, list(indices), grad, True), *[None] * len(indices)


def item(x: Any, index: Any) -> torch.Tensor:
    """x[index]; all but several indices by number, along a dim that is cut, goes torch's own way."""
    if type(index) is tuple and len(index) > 1 and x.requires_grad and torch.is_grad_enabled() and is_global(x) and all(
            isinstance(t, torch.Tensor) and t.dtype in (torch.int64, torch.int32) for t in index):
        cut = any(s.is_split and s.dim < len(index) for s in x.spec.sbp)
        if cut and len(index) <= x.dim() and not transforms_active():
            return PickedElements.apply(x, *index)
    return torch.Tensor.__getitem__(x, index)


def _embedding_bag(weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, by_frequency: bool = False,
                   mode: int = 0, sparse: bool = False, *others: Any) -> Any:
    with ExcludeDispatchKeys(OWN_KEYS):
        return aten._embedding_bag.default(weight, indices, offsets, by_frequency, mode, False, *others)


def _gather_backward(x: torch.Tensor, dim: int, index: torch.Tensor, grad: torch.Tensor) -> Any:
    return aten.gather_backward.default(grad, x, dim, index, False)


def check_classes(labels: GlobalLike, num_classes: int) -> None:
    """F.one_hot looks at the values of plain CPU tensors only. Raises OutOfRangeError for a class that there is not."""
    if num_classes < 1:                              # in torch's words
        raise RuntimeError("Class values must be smaller than num_classes." if labels.numel() else
                           "Can not infer total number of classes from empty tensor.")
    for shard in labels.shards.values():
        check_range(shard, num_classes, "class")


TAKEN: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {F.embedding: embedding, torch.Tensor.__getitem__: item}
# Beside global tensors, gradients are dense whatever `sparse` or `sparse_grad` says.
KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten._gather_sparse_backward.default: _gather_backward,
    aten._embedding_bag.default: _embedding_bag,
    aten.embedding_sparse_backward.default: aten.embedding_dense_backward.default}
