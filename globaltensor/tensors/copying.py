"""Copies and pickles of global tensors, their class, and what users have set on them."""
from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from globaltensor.algorithms.aliasing import base_and_steps, replay_views
from globaltensor.errors import ArgumentError, GlobalTensorError
from globaltensor.runtime.torch_internals import OpOverload, end_graph, torch_function_enabled
from globaltensor.runtime.world import world
from globaltensor.tensors import gradients
from globaltensor.tracebacks import api_boundary, torch_boundary

_OURS = {"spec", "lineage", "_shards", "arriving", "boxed_view", "viewed", "traced", "made_after", "completed",
         "no_memory", "emptied_later", "_is_param", gradients.ATTRIBUTE}
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
    if others is own:                                # x and x, by torch's `register_parametrization`
        _allow_backward(x)
        return
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


def _allow_backward(x: torch.Tensor) -> None:
    """`swap_tensors` lets what accumulates the gradient of a leaf raise, for graphs that have saved it as it was. What
    is swapped with itself stays that."""
    if x.is_leaf and x.requires_grad:
        node = torch.autograd.graph.get_gradient_edge(x).node    # held: else it ends here, where no graph has it
        ours = node.register_prehook(lambda gradients: None)
        hooks: dict[int, Any] = ours.hooks_dict_ref() or {}
        for key, hook in list(hooks.items()):
            if hook.__qualname__.startswith(torch.utils.swap_tensors.__name__ + "."):
                del hooks[key]
        ours.remove()


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


@api_boundary
def keep_global(x: Any, cls: type) -> Any:
    """x.as_subclass(cls) of a global tensor: itself. Functions of a subclass of torch.Tensor ask it of each result, and
    then subclasses have no functions: a tensor of that class counts as plain beside a global one. Raises ArgumentError
    where a program asks for another class."""
    if torch_function_enabled() and not isinstance(x, cls):
        raise ArgumentError(f"as_subclass({cls.__name__}) of a global tensor",
                            f"it cannot be of another class as well, so nothing would know it for a {cls.__name__}",
                            f"x.full_tensor().as_subclass({cls.__name__}), then gt.from_full of what comes of it")
    return x


@torch_boundary
def deep_copy(x: Any, memo: dict[int, Any]) -> Any:
    """copy.deepcopy of a global tensor. What shares memory shares that of the copies; of a parameter torch copies the
    value alone."""
    end_graph("copy.deepcopy of a global tensor notes what it copied, by where it lies in memory")
    if id(x) not in memo:
        if not x.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support deepcopy")
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
    if x.spec.lazy_bits or x.emptied_later is not None:
        return x.detach().clone()
    base, steps = base_and_steps(x)
    if steps:
        with torch.no_grad():
            return replay_views(steps, _copy_in_copied_memory(base, memo), _do)
    value = type(x).wrap(x.spec, {rank: deepcopy(shard.detach(), memo) for rank, shard in x.shards.items()})
    value.lineage = x.lineage
    return value


# ---------------------------------------------------------------------------------------------- pickled, by torch.save


class _RefusedShards:
    """In the place of shards, what raises in the process that reads them."""

    def __reduce__(self) -> Any:
        return _refuse_shards, ()


def _refuse_shards() -> None:
    raise GlobalTensorError("a row from a worker of a DataLoader that is a global tensor, in one of several processes",
                            "each process holds only its own shards",
                            "num_workers=0; or rows that are plain tensors, of which gt.data.DataLoader makes a batch")


def saved_shards(x: Any) -> dict[int, torch.Tensor] | _RefusedShards:
    """The shards of a tensor, for a pickle. Of tensors that share memory torch.save writes it once, and a plain pickle
    has each tensor by itself, as of plain tensors."""
    if not world().single_process:
        if get_worker_info() is not None:            # its thread drops what raises here: the loader would wait
            return _RefusedShards()
        raise GlobalTensorError("pickling a global tensor in one of several processes", "each process holds only "
                                "its own shards", "gt.save(x, file), or x.full_tensor(), by all of them")
    return {rank: shard.detach() for rank, shard in x.shards.items()}


def saved_marks(x: Any) -> tuple[Any, ...]:
    """What else of a tensor is pickled: whether it requires a gradient, is a parameter, and what users have set."""
    return x.requires_grad, isinstance(x, torch.nn.Parameter), user_attributes(x)


def saved_view(x: Any) -> tuple[Any, ...] | None:
    """A boxed view as its base, whose memory is that of what else is pickled, and the calls that made it."""
    base, steps = base_and_steps(x)
    calls = [(func.name(), values, nth) for func, values, nth in steps]
    return (view_again, (base.detach(), calls, *saved_marks(x))) if calls else None


def view_again(base: Any, calls: list[tuple[str, tuple[Any, ...], int]], requires_grad: bool, is_parameter: bool,
               attributes: dict[str, Any]) -> Any:
    """A boxed view that was pickled: the same of its base. Raises for any other op: a file may name each."""
    steps = tuple((_view_op(name), values, nth) for name, values, nth in calls)
    with torch.no_grad():
        return with_marks(replay_views(steps, base, _do), requires_grad, is_parameter, attributes)


def _view_op(name: str) -> OpOverload:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    func = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    if not isinstance(func, OpOverload) or not func.is_view:
        raise GlobalTensorError(f"a pickled view by {name}", "the op does not give views",
                                "a file that torch.save wrote of global tensors")
    return func


def _do(func: OpOverload, *args: Any, **named: Any) -> Any:
    return func(*args, **named)


def with_marks(x: Any, requires_grad: bool, is_parameter: bool, attributes: dict[str, Any]) -> Any:
    """With what else of it was pickled."""
    x = torch.nn.Parameter(x, requires_grad) if is_parameter else x.requires_grad_(requires_grad)
    x.__dict__.update(attributes)
    return x
