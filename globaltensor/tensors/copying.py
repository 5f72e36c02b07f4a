"""Copies of global tensors, their class, and what users have set on them."""
from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from globaltensor.errors import GlobalTensorError
from globaltensor.tensors import gradients

_OURS = {"spec", "lineage", "_shards", "arriving", "boxed_view", "viewed", "traced", "made_after", "completed",
         "_is_param", gradients.ATTRIBUTE}


def user_attributes(x: torch.Tensor) -> dict[str, Any]:
    """What users have set on a tensor."""
    return {name: value for name, value in x.__dict__.items() if name not in _OURS}


def same_memory_copy(x: Any) -> Any:
    """copy.copy of a global tensor: a leaf in the same memory, with what users have set on x."""
    value = x.detach()
    copied: Any = (torch.nn.Parameter(value, x.requires_grad) if isinstance(x, torch.nn.Parameter)
                   else value.requires_grad_(x.requires_grad))
    copied.__dict__.update(user_attributes(x))
    return copied


def keep_global(x: Any, cls: type) -> Any:
    """x.as_subclass(cls) of a global tensor: itself. Functions of a subclass of torch.Tensor ask it of each result, and
    a tensor of that class counts as plain beside a global one."""
    return x


def deep_copy(x: Any, memo: dict[int, Any]) -> Any:
    """copy.deepcopy of a global tensor. Of a parameter torch copies the value alone."""
    if id(x) not in memo:
        if not x.is_leaf:
            raise RuntimeError("Only leaf tensors can be deep-copied")
        if gradients.part_of(x) is x:
            raise GlobalTensorError("an optimizer under gt.zero cannot be copied",
                                    "its copy would step parts that belong to no parameter",
                                    "gt.zero(torch.optim.AdamW(copy.parameters())), then load_state_dict")
        value = x.detach().clone()
        if isinstance(x, torch.nn.Parameter):
            memo[id(x)] = torch.nn.Parameter(value, x.requires_grad)
        else:
            memo[id(x)] = value.requires_grad_(x.requires_grad)
            value.grad = deepcopy(x.grad, memo)
            value.__dict__.update(deepcopy(user_attributes(x), memo))
    return memo[id(x)]
