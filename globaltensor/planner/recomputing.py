"""Blocks that compute again in backward what they have not kept (torch.utils.checkpoint).

    full         all of a block but its input
    selective    all but what takes longest to get again, which is kept: products with parameters, convolutions, and
                 what other ranks sent. So attention, norms and pointwise ops run again; of boxings only those of
                 pending sums that such an op reduces

A block runs again on its buffers as they were, and leaves them as they are: torch's checkpoint counts a batch twice in
running statistics.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from globaltensor.pipelining.kept_buffers import buffers_left_alone, buffers_of

_KEPT = {"linear", "mm", "addmm", "convolution", "embedding",
         "redistribute", "box", "spread", "part", "full_tensor"}
_PRODUCTS = {"contract", "bmm", "baddbmm"}           # of a parameter, or of attention


def recompute_block(block: nn.Module, how: str) -> None:
    """Let a block recompute: how is "full" or "selective"."""
    selection: dict[str, Any] = {}
    if how == "selective":
        selection = {"context_fn": partial(create_selective_checkpoint_contexts, _policy_of)}
    module: Any = block
    module.forward = partial(_checkpointed, block, block.forward, selection)      # copied with the module


def _checkpointed(block: nn.Module, forward: Callable[..., Any], selection: dict[str, Any], *args: Any,
                  **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    runs, buffers = itertools.count(), buffers_of(block)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not next(runs):
            return forward(*args, **kwargs)
        with buffers_left_alone(block, buffers):
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, **selection, **kwargs)


def _policy_of(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = is_kept(func, args, _is_of_parameter)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def is_kept(func: Any, operands: Iterable[Any], is_of_parameter: Callable[[Any], bool]) -> bool:
    """Is what this op gives kept, where a block recomputes selectively? Of batched products, those of which an operand
    is a parameter, or comes from one alone."""
    name = func.overloadpacket.__name__
    return name in _KEPT or name in _PRODUCTS and any(map(is_of_parameter, operands))


def _is_of_parameter(t: Any) -> bool:
    """Is it a parameter, or one that was viewed, cast or gathered?"""
    if not isinstance(t, torch.Tensor):
        return False
    if isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter):
        return True
    node: Any = t.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return node is not None and isinstance(node.variable, nn.Parameter)
