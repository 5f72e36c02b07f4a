"""Swapping parameters in and out: another tensor in the place of a module's parameter, for a while or for good.

For a while: a module looks a parameter up last, after its own attributes. `swap_in` puts a tensor among these, which
is what the module's forward finds, until `swap_out`. Optimizers, `parameters()` and `state_dict()` go on seeing the
parameter.

For good: `convert` gives a parameter a global value, or a plain one, and leaves it the same object. So an optimizer
made before goes on training it, modules that share it go on sharing it, and its hooks and its gradient stay. A plain
parameter cannot take global data, nor a global one plain data, nor any one data on another kind of device;
`torch.utils.swap_tensors` gives it what another object has, all but the hooks, which torch keeps with both the object
and the data.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from globaltensor.errors import GlobalTensorError
from globaltensor.runtime.memory_writes import writes_of
from globaltensor.tensors import gradients
from globaltensor.tensors.copying import user_attributes
from globaltensor.tensors.global_tensor import GlobalTensor

Slot = tuple[nn.Module, str]                         # a module, and the name of a parameter or buffer in it


def swap_in(owner: nn.Module, key: str, tensor: Tensor) -> None:
    """Let a module find `tensor` where it looks for its parameter or buffer `key`, until `swap_out`."""
    owner.__dict__[key] = tensor


def swap_out(owner: nn.Module, key: str) -> None:
    owner.__dict__.pop(key, None)


class SwappedIn:
    """Another tensor in all places of a module's parameter while the module runs: until `end`, which gives the
    parameter what the module wrote to it."""

    def __init__(self, slots: Sequence[Slot], parameter: Any, tensor: Any) -> None:
        self._slots, self._parameter, self._tensor = slots, parameter, tensor
        self._writes = writes_of(tensor) if isinstance(tensor, GlobalTensor) else None
        for owner, key in slots:
            swap_in(owner, key, tensor)

    def end(self) -> None:
        for owner, key in self._slots:
            swap_out(owner, key)
        if self._writes is None or self._tensor is self._parameter:
            return
        if (writes := writes_of(self._tensor)) != self._writes:
            counted = writes[0] != self._writes[0]   # by autograd, which does not count those by `.data`
            with torch.no_grad():
                (self._parameter if counted else self._parameter.data).copy_(self._tensor)


@contextmanager
def swapped_in(tensors: Iterable[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Inside, modules find these tensors where they look for their parameters."""
    slots = list(tensors)
    for owner, key, tensor in slots:
        swap_in(owner, key, tensor)
    try:
        yield
    finally:
        for owner, key, _ in slots:
            swap_out(owner, key)


def convert(tensor: Tensor, to_other: Callable[[Tensor], Tensor]) -> Tensor:
    """A parameter or buffer, made global or plain by `to_other`: of a buffer what that gives, a parameter itself, with
    its gradient made so likewise. `check_convertible` comes before, for all tensors that are to be converted."""
    if not isinstance(tensor, nn.Parameter):
        with torch.no_grad():
            return to_other(tensor.detach())
    with torch.no_grad():
        value = to_other(tensor.detach())
        grad = None if tensor.grad is None else to_other(tensor.grad.detach())
    tensor.grad = None                               # of the old layout, which torch would compare with the new one
    if isinstance(tensor, GlobalTensor) and isinstance(value, GlobalTensor) and tensor.device.type == value.device.type:
        tensor.data = value
    else:
        _become(tensor, value)
    tensor.grad = grad
    return tensor


@contextmanager
def weights_made_again(module: nn.Module) -> Iterator[None]:
    """Around the conversion of a module: torch's RNNs refer to their weights weakly, and layers under torch's older
    weight_norm and spectral_norm keep a weight that was computed of their parameters. Either hinders a conversion; it
    is looked up or made anew afterwards."""
    rnns = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    normed = [(part, hook) for part in module.modules() for hook in part._forward_pre_hooks.values()
              if isinstance(hook, (WeightNorm, SpectralNorm)) and hook.name in vars(part)]
    for rnn in rnns:
        rnn._flat_weight_refs = []
    for part, hook in normed:
        delattr(part, hook.name)
    try:
        yield
    finally:
        for rnn in rnns:
            rnn._init_flat_weights()
        for part, hook in normed:                    # until the next forward pass, as torch leaves it
            setattr(part, hook.name, hook.compute_weight(part) if isinstance(hook, WeightNorm) else
                    getattr(part, f"{hook.name}_orig").data)


def check_convertible(parameter: Tensor, name: str, to: type[Tensor] = GlobalTensor) -> None:
    """Raise GlobalTensorError for a parameter that a graph or a weak reference still knows as what it was, and for one
    that `gt.zero` has split. `name` is for the message, `to` is the class of its value to come."""
    what = f"the parameter {name!r} cannot be made global, plain, or laid out anew, now"
    if is_lazy(parameter):
        raise GlobalTensorError(what, "its module is lazy: the first forward pass tells its shape",
                                "module(x) once, on a plain x of the right shape, before module.to_global(...)")
    if gradients.part_of(parameter) is not None:
        raise GlobalTensorError(what, "gt.zero has split it, and its optimizer works on the parts",
                                "module.to_global(...) before gt.zero(...)")
    if isinstance(parameter, GlobalTensor) and to is GlobalTensor or not isinstance(parameter, nn.Parameter):
        return
    if weakref.getweakrefs(parameter):
        raise GlobalTensorError(what, "a weak reference to it knows it as what it was",
                                "module.to_global(...) before what refers to its parameters weakly is made")
    if any(getattr(hook, "__module__", None) == torch.autograd.graph.__name__
           for hook in (parameter._backward_hooks or {}).values()):
        raise GlobalTensorError(what, "a hook of register_multi_grad_hook knows it as what it was, and would never run",
                                "handle.remove(), and register_multi_grad_hook after module.to_global(...)")
    # One use is the Python object's, one that of the node that accumulates its gradient, which swap_tensors allows.
    if parameter._use_count() > 2:                   # type: ignore[attr-defined]  # not in torch's stubs
        raise GlobalTensorError(what, "a graph that waits for its backward pass has saved it as what it was",
                                "loss.backward() first, or module.to_global(...) before the forward pass")


def _become(parameter: nn.Parameter, value: Tensor) -> None:
    """Let a parameter have a value of another class, or on another type of device."""
    attributes = user_attributes(parameter)          # which swap_tensors would leave with the other object
    torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
    parameter.__dict__.update(attributes)
    if isinstance(parameter, GlobalTensor):          # its gradient comes to where it is now
        notes = gradients.notes_of(parameter)
        notes.layout, notes.early = None, False
    gradients.keep_hooks(parameter)
