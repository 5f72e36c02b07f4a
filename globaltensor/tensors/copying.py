"""Copies of global tensors, their class, and what users have set on them."""
from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from globaltensor.errors import GlobalTensorError
from globaltensor.runtime.torch_internals import end_graph
from globaltensor.tensors import gradients

_OURS = {"spec", "lineage", "_shards", "arriving", "boxed_view", "viewed", "traced", "made_after", "completed",
         "emptied_later", "_is_param", gradients.ATTRIBUTE}
_HOOKS = "_hooks_of_other"                           # on the way from the first of two that are swapped to the second
_data: Any = torch.Tensor.data                       # a descriptor of C
attributes: Any = torch.Tensor.__dict__["__dict__"]  # a descriptor of C


def user_attributes(x: torch.Tensor) -> dict[str, Any]:
    """What users have set on a tensor."""
    return {name: value for name, value in x.__dict__.items() if name not in _OURS}


def swap_attributes(x: Any, others: dict[str, Any]) -> None:
    """torch.utils.swap_tensors(x, y), by which `nn.Module.to` and `Module.float` give a parameter the data of a fresh
    one, sets `x.__dict__` to that of y, and `y.__dict__` to that of x. What is noted of the gradients of a leaf, and
    what users have set on it and y has not, stays where it is. Hooks, which torch would leave behind, stay as well."""
    own = attributes.__get__(x)
    notes, coming = (its.get(gradients.ATTRIBUTE, gradients.LeafGradient()) for its in (own, others))
    order = coming.order
    if order is not None and notes.order is not None or x._post_accumulate_grad_hooks:
        order = notes.order                          # what comes is watched, or will be, as x was
    kept = {} if any(name not in _OURS and name != _HOOKS for name in others) else user_attributes(x)
    attributes.__set__(x, kept | others | {gradients.ATTRIBUTE: replace(notes, order=order)})
    hooks = attributes.__get__(x).pop(_HOOKS, None)
    if hooks is None and gradients.ATTRIBUTE in own:
        own[_HOOKS] = x._backward_hooks, x._post_accumulate_grad_hooks
    elif hooks is not None:                          # x has the data that the first one will have
        if hooks[0] is not None:
            x._backward_hooks = hooks[0]
        if hooks[1] is not None:
            x._post_accumulate_grad_hooks = hooks[1]


def data_of(x: Any) -> Any:
    """x.data. It holds the memory of x, also of what ZeRO 3 frees behind a layer."""
    data = _data.__get__(x)
    if x.emptied_later is not None:
        data.shards = {rank: shard.detach() for rank, shard in x.shards.items()}
    return data


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
    """copy.deepcopy of a global tensor. What shares memory shares that of the copies; of a parameter torch copies the
    value alone."""
    end_graph("copy.deepcopy of a global tensor notes what it copied, by where it lies in memory")
    if id(x) not in memo:
        if not x.is_leaf:
            raise RuntimeError("Only leaf tensors can be deep-copied")
        if gradients.part_of(x) is x:
            raise GlobalTensorError("an optimizer under gt.zero cannot be copied",
                                    "its copy would step parts that belong to no parameter",
                                    "gt.zero(torch.optim.AdamW(copy.parameters())), then load_state_dict")
        if isinstance(x, torch.nn.Parameter):
            memo[id(x)] = torch.nn.Parameter(x.detach().clone(), x.requires_grad)
        else:
            value = _copy_in_copied_memory(x, memo)
            memo[id(x)] = value.requires_grad_(x.requires_grad)
            value.grad = deepcopy(x.grad, memo)
            value.__dict__.update(deepcopy(user_attributes(x), memo))
    return memo[id(x)]


def _copy_in_copied_memory(x: Any, memo: dict[int, Any]) -> Any:
    """The same of the copy of its memory, of which torch makes one for all tensors that share it."""
    origin = x.origin
    if origin is not None:
        with torch.no_grad():
            views = origin.func(_copy_in_copied_memory(origin.base, memo), *origin.values[1:])
        return views if isinstance(views, torch.Tensor) else views[origin.nth]
    if x.spec.lazy_bits or x.emptied_later is not None:
        return x.detach().clone()
    value = type(x).wrap(x.spec, {rank: deepcopy(shard.detach(), memo) for rank, shard in x.shards.items()})
    value.lineage = x.lineage
    return value
