"""Gradients from before a step, set aside while it runs.

A stage's sum over micro-batches is a pending sum, which is reduced once. Added to what is settled, each micro-batch's
would be reduced by itself.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from globaltensor.boxings.redistribute import redistribute
from globaltensor.tensors import gradients
from globaltensor.tensors.gradients import raw_grad, set_raw


def set_aside(leaves: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Take the settled gradients out of these leaves: pending sums are added to each other at no cost, to what is
    settled each by a reduction of its own. `restore` adds them again."""
    taken = [(leaf, grad) for leaf in leaves if leaf.requires_grad and (grad := raw_grad(leaf)) is not None
             and grad.spec.layout is gradients.grad_layout(leaf)]
    for leaf, _ in taken:
        set_raw(leaf, None)
    return taken


def restore(taken: Iterable[tuple[Any, Any]]) -> None:
    """Add what was set aside to what has come since, as it lies: where backward did not end it is a sum that waits."""
    with torch.no_grad():
        for leaf, before in taken:
            if (grad := raw_grad(leaf)) is not None:
                before = redistribute([before], [grad.spec.layout], "gradient")[0].add_(grad)
            set_raw(leaf, before)
