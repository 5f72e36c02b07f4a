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

from globaltensor.library import contract
from globaltensor.tensor import backward, gradients
from globaltensor.tensor.products import PutOff, put_off


class Halves:
    """`inputs_first()`, once, and then `weights()`, once."""

    def __init__(self, outputs: Sequence[torch.Tensor], grads: Sequence[Any], inputs: Sequence[torch.Tensor]) -> None:
        self.pairs = [(y, g) for y, g in zip(outputs, grads) if y.requires_grad and g is not None]
        self.inputs = [x for x in inputs if x.requires_grad]
        self.later: list[PutOff] = []

    def inputs_first(self) -> list[Any]:
        """The gradients of those inputs that need one, in their order; None where none arrives."""
        with put_off(self.inputs) as self.later:
            if self.pairs:
                backward.backward([y for y, _ in self.pairs], [g for _, g in self.pairs])
        found = [gradients.raw(x) for x in self.inputs]
        self.pairs, self.inputs = [], []
        return found

    def weights(self) -> None:
        """Accumulate the gradients that were put off."""
        with torch.no_grad():
            made = [(get_gradient_edge(leaf), contract(equation, a, b)) for leaf, equation, a, b in self.later]
        self.later = []
        if made:
            torch.autograd.backward([edge for edge, _ in made], [g for _, g in made])
