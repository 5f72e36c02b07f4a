"""The backward pass of a stage in two parts: first the gradients of its inputs, later those of its weights.

The stage before waits for the first part only, so the second can fill a gap (Qi et al., "Zero Bubble Pipeline
Parallelism", arXiv:2401.10241). Half the cost of a backward pass are matrix products for the gradients of weights: of a
linear layer, dy x w leads on to the input, dy.T x ends at the weight. The first part is a backward pass that records
products of the latter kind instead of computing them; the second part computes them. So nothing is computed twice, and
gradients of weights that are not such products (norms, biases, embeddings, convolutions) come with the first part.

Hooks of users are called once per backward pass, with whole gradients, and may read and change what has been
accumulated before: in one pass in the order of plain torch. So a stage with such hooks runs its backward pass in one
piece, all of it where the first part stands.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from globaltensor.runtime.custom_ops import contract
from globaltensor.runtime.torch_internals import BACKWARD_HOOKS_OF_ALL_MODULES
from globaltensor.tensors import backward, gradients
from globaltensor.tensors.products import DeferredGrad, defer_weight_grads


def backward_full(outputs: Sequence[torch.Tensor], grads: Sequence[Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """A whole backward pass from these outputs. The gradients of the inputs, which are leaves; None where none
    arrives."""
    pairs = [(y, g) for y, g in zip(outputs, grads) if y is not None and g is not None and y.requires_grad]
    if pairs:
        backward.backward([y for y, _ in pairs], [g for _, g in pairs])
    return [None if x is None else gradients.raw_grad(x) for x in inputs]


def has_backward_hooks(modules: Iterable[nn.Module]) -> bool:
    """Do hooks of users, on these modules or their parameters or on all modules, run within a backward pass?"""
    return any(BACKWARD_HOOKS_OF_ALL_MODULES) or any(
        module._backward_hooks or module._backward_pre_hooks or any(
            p is not None and gradients.has_hooks(p) for p in module._parameters.values()) for module in modules)


def backward_input(outputs: Sequence[torch.Tensor], grads: Sequence[Any],
                   inputs: Sequence[torch.Tensor]) -> tuple[list[Any], list[DeferredGrad]]:
    """The same without the products that only weights wait for, and what `backward_weight` needs to compute these."""
    with defer_weight_grads([x for x in inputs if x is not None and x.requires_grad]) as deferred:
        input_grads = backward_full(outputs, grads, inputs)
    return input_grads, deferred


def backward_weight(deferred: Sequence[DeferredGrad]) -> None:
    """Compute and accumulate the deferred gradients."""
    with torch.enable_grad():
        ends = [_Product.apply(weight, factors) for weight, *factors in deferred]
    if ends:                                         # through the leaf, so that its hooks run as in any backward
        torch.autograd.backward(ends)


class _Product(torch.autograd.Function):
    """A zero whose derivative by a weight is a deferred product. Nobody but autograd holds the product, which becomes
    the gradient itself. One that is handed over is copied, and a pending sum would be reduced by that, each time."""

    @staticmethod
    def forward(ctx: Any, weight: Any, factors: Sequence[Any]) -> torch.Tensor:
        ctx.factors = factors                        # in a list, where autograd does not look for what leads to them
        return torch.zeros((), dtype=torch.float32, device="cpu")

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, None]:
        with torch.no_grad():
            return contract(*ctx.factors), None
