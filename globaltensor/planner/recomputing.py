"""Blocks that compute again in backward what they have not kept (torch.utils.checkpoint).

    full         all of a block but its input
    selective    all but what takes longest to get again, which is kept: products with parameters, convolutions, and
                 what other ranks sent. So attention, norms and pointwise ops run again, and nothing is sent twice
"""
from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_KEPT = {"linear", "contract", "mm", "addmm", "convolution", "embedding",
         "redistribute", "box", "spread", "part", "full_tensor"}


def recompute_block(block: nn.Module, how: str) -> None:
    """Let a block recompute: how is "full" or "selective"."""
    selection: dict[str, Any] = {}
    if how == "selective":
        selection = {"context_fn": partial(create_selective_checkpoint_contexts, _policy_of)}
    module: Any = block
    module.forward = partial(checkpoint, block.forward, use_reentrant=False, **selection)


def _policy_of(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(func) else CheckpointPolicy.PREFER_RECOMPUTE


def is_kept(func: Any) -> bool:
    """Is what this op gives kept, where a block recomputes selectively?"""
    return func.overloadpacket.__name__ in _KEPT
