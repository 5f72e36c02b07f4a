"""The backward pass of a stage in two halves: first the gradients of its inputs, later those of its weights.

The stage before waits for the first half only, so the second can fill a gap (Qi et al., "Zero Bubble Pipeline
Parallelism", arXiv:2401.10241). Half of what a backward pass costs are products for the gradients of weights: of a
linear layer dy x w leads on to the input, dy.T x w.T ends at the weight. The first half is a backward pass that notes
the latter instead of making them, the second makes them. So nothing is computed twice, and what a weight needs besides
products (norms, biases, embeddings, convolutions) comes with the first.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from globaltensor.runtime.custom_ops import contract
from globaltensor.tensors import backward, gradients
from globaltensor.tensors.products import DeferredGrad, defer_weight_grads


def passed_back(outputs: Sequence[torch.Tensor], grads: Sequence[Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """A whole backward pass from these outputs. Gives the gradients of the inputs, which are leaves; None for none."""
    pairs = [(y, g) for y, g in zip(outputs, grads) if y.requires_grad and g is not None]
    if pairs:
        backward.backward([y for y, _ in pairs], [g for _, g in pairs])
    return [gradients.raw_grad(x) for x in inputs]


def inputs_first(outputs: Sequence[torch.Tensor], grads: Sequence[Any],
                 inputs: Sequence[torch.Tensor]) -> tuple[list[Any], list[DeferredGrad]]:
    """The same without the products that only weights wait for, and what `weights` needs to make these."""
    with defer_weight_grads([x for x in inputs if x.requires_grad]) as later:
        found = passed_back(outputs, grads, inputs)
    return found, later


def weights(later: Sequence[DeferredGrad]) -> None:
    """Accumulate the gradients that were put off."""
    with torch.no_grad():
        made = [(get_gradient_edge(leaf), contract(equation, a, b)) for leaf, equation, a, b in later]
    if made:
        torch.autograd.backward([edge for edge, _ in made], [g for _, g in made])
