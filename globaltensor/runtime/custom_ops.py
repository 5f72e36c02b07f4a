"""Ops of our own, registered with torch so that they dispatch, trace and run on plain tensors like any other.

    contract(equation, a, b)     einsum of two tensors
    linear(x, weight, bias)      x [..., k] @ weight [n, k].T + bias [n], of any number of dims
    embedding_backward(grad, indices, rows, padding_idx)
                                 the gradient of an embedding's weight, of as many rows as `rows` has
"""
from __future__ import annotations

import torch
from torch.nn import functional as F

from globaltensor.runtime.native import torch_ext

_library = torch.library.Library("globaltensor", "DEF")


def _contract(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.einsum(equation, a, b)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _embedding_backward(grad: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor, padding_idx: int
                        ) -> torch.Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, indices, rows.shape[0], padding_idx, False)


for _schema, _kernel in (("contract(str equation, Tensor a, Tensor b) -> Tensor", _contract),
                         ("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", _linear),
                         ("embedding_backward(Tensor grad, Tensor indices, Tensor rows, int padding_idx) -> Tensor",
                          _embedding_backward)):
    _library.define(_schema)
    if torch_ext is None or _kernel is _embedding_backward:   # the native code brings its own
        _library.impl(_schema.partition("(")[0], _kernel, "CompositeExplicitAutograd")

contract = torch.ops.globaltensor.contract.default
linear = torch.ops.globaltensor.linear.default
embedding_backward = torch.ops.globaltensor.embedding_backward.default
