"""Which kind of kernel an op starts, by its name: kinds differ in how long an operation or a byte takes."""
from __future__ import annotations

from functools import cache
from typing import Any

import torch

from globaltensor.simulator.cluster import KERNEL_KINDS

FREE = {torch.ops.aten._unsafe_view.default, torch.ops.aten.detach.default}
_KINDS = {
    "contraction": ("contract",),
    "product": ("linear", "mm", "addmm", "addmv", "mv", "dot"),
    "batched": ("bmm", "baddbmm"),
    "batch_norm": ("native_batch_norm", "native_batch_norm_backward", "native_group_norm",
                   "native_group_norm_backward"),
    "convolution": ("convolution", "convolution_backward", "_convolution"),
    "curve": ("gelu", "gelu_backward", "tanh", "exp", "erf", "sigmoid", "silu", "silu_backward", "log", "pow", "sin",
              "cos", "softplus", "mish", "native_dropout", "bernoulli", "rand", "randn"),
    "normalization": ("native_layer_norm", "native_layer_norm_backward", "_softmax", "_softmax_backward_data",
                      "_log_softmax", "_log_softmax_backward_data", "logsumexp", "max_pool2d_with_indices",
                      "max_pool2d_with_indices_backward", "topk", "sort", "cumsum"),
    "reduction": ("sum", "mean", "amax", "amin", "max", "min", "var", "std", "norm", "argmax"),
    "index": ("embedding", "embedding_dense_backward", "embedding_backward", "index", "index_put", "gather",
              "scatter", "scatter_add", "index_select", "index_add", "nll_loss_forward", "nll_loss_backward"),
}
_BY_NAME = {name: KERNEL_KINDS.index(kind) for kind, names in _KINDS.items() for name in names}


@cache
def kind_of(func: Any) -> int:
    """Its place in `KERNEL_KINDS`."""
    if func.is_view or func in FREE:
        return KERNEL_KINDS.index("view")
    name = func.overloadpacket.__name__.removesuffix("_") if func.overloadpacket.__name__[-2:] != "__" else ""
    if "attention" in name:
        return KERNEL_KINDS.index("attention")
    return _BY_NAME.get(name, KERNEL_KINDS.index("pointwise"))
