"""torch's `FSDPModule`: what a module is that fully_shard was called for, and the methods that it has.

Most of them tune when torch gathers weights and reduces gradients. Here the library decides that: a layer is gathered
one ahead and freed behind its use, and gradients are pending sums until they are read. So these do nothing, and a
program that calls them gets the numbers that it gets of torch. Those that would change what is computed, and how it is
sent, are refused; the divisor of gradients is taken.
"""
from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from globaltensor.dtensor.device_mesh import DeviceMesh
from globaltensor.errors import ArgumentError, expect
from globaltensor.runtime.world import world
from globaltensor.tracebacks import api_boundary


@dataclass
class Sharding:
    """Of a module: along which mesh it is split, in which dtype its weights are gathered, and by what the sum of the
    ranks' gradients is divided. None: their own, and the number of ranks."""

    mesh: DeviceMesh
    dtype: torch.dtype | None = None
    divisor: float | None = None


shardings: weakref.WeakKeyDictionary[nn.Module, Sharding] = weakref.WeakKeyDictionary()


class GatheredAhead:
    """What `unshard(async_op=True)` gives."""

    def wait(self) -> None:
        """Nothing is waited for."""


class FSDPModule:
    """A module that `fully_shard` was called for: `isinstance(module, FSDPModule)`.

    Its parameters are global tensors always, also behind `unshard()`: `p.full_tensor()` is a whole one.
    """

    def unshard(self, async_op: bool = False) -> GatheredAhead | None:
        """Nothing: weights are gathered before the module runs."""
        return GatheredAhead() if async_op else None

    def reshard(self) -> None:
        """Nothing: weights are freed behind the module."""

    def reset_iter_state(self) -> None:
        """Nothing: the next forward pass clears what one that raised has left."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing: gradients are reduced when they are read."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Nothing: gradients of several backward passes are added up first, and reduced when they are read."""

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Nothing, as for `set_requires_gradient_sync`."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Nothing: modules inside of the outermost are freed behind the forward pass."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Nothing: they are freed behind the backward pass."""

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Nothing: the module that ran next in the last step is gathered ahead."""

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Nothing, as for `set_modules_to_forward_prefetch`."""

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Nothing: gathering follows the optimizer's step in the order of the program."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Nothing: gradients are divided first, and added up always."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Nothing: there are no such buffers."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Nothing: there are no process groups."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Nothing: weights that the backward pass does not need are not gathered."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Nothing: there are no process groups."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Nothing: there are no process groups."""

    @api_boundary
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the ranks' gradients by this, from the next forward pass on; default: by their number.

        Raises ArgumentError for a factor that is not above 0, and in a process that drives several ranks, where the
        program's own loss is that of the whole batch.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise ArgumentError(f"set_gradient_divide_factor({factor!r})", "gradients are divided by a number above 0",
                                f"set_gradient_divide_factor({world().size}), the number of ranks")
        if len(world().local_ranks) > 1:
            raise ArgumentError(f"set_gradient_divide_factor({factor})", "a process that drives several ranks has one "
                                "loss, that of the whole batch, and its gradient", f"(loss / {factor}).backward()")
        sharding_of(self).divisor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """torch's older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    @api_boundary
    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Raises ArgumentError if it is asked for: all ranks use the same parameters."""
        if reduce_scatter_unused_params:
            raise ArgumentError("set_reduce_scatter_unused_params(True)", "a gradient has terms of all ranks, or "
                                "of none", "loss + 0 * sum(p.sum() for p in unused), on ranks that leave some out")

    @api_boundary
    def set_custom_all_gather(self, comm: Any) -> None:
        """Raises ArgumentError: this library moves tensors itself."""
        raise _moves_itself("set_custom_all_gather")

    @api_boundary
    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raises ArgumentError: this library moves tensors itself."""
        raise _moves_itself("set_custom_reduce_scatter")

    @api_boundary
    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Raises ArgumentError: this library moves tensors itself."""
        raise _moves_itself("set_all_reduce_hook")


def _moves_itself(name: str) -> ArgumentError:
    return ArgumentError(name, "gradients and weights move by this library's own plans, and wait until they are read",
                         "p.register_hook(lambda grad: ...), which has the gradient before it is reduced")


def sharding_of(module: Any) -> Sharding:
    return shardings[module]


def become_fsdp(module: nn.Module) -> None:
    """Give a module the methods, as torch does: by a class of its own. Copies and parts are of the class before."""
    before: Any = type(module)
    if not issubclass(before, FSDPModule):
        module.__class__ = _class_of(before)


@functools.cache
def _class_of(before: Any) -> Any:
    def __new__(cls: type, *args: Any, **named: Any) -> nn.Module:
        return before(*args, **named)                # as of `layers[:2]`

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        function, arguments, *state = before.__reduce_ex__(self, protocol)
        return function, (before, *arguments[1:]), *state

    return type(f"FSDP{before.__name__}", (FSDPModule, before),
                {"__new__": __new__, "__reduce_ex__": __reduce_ex__, "__module__": before.__module__})


@api_boundary
def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the module's weights for this method too, as for `forward`; its forward hooks run around it.

    Of a module that fully_shard was not called for it changes nothing, as in torch. Raises ArgumentError for a name
    that the module does not have.
    """
    expect(module, nn.Module, "register_fsdp_forward_method of no module",
           'register_fsdp_forward_method(model, "generate")')
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ArgumentError(f"register_fsdp_forward_method(module, {method_name!r})",
                            f"a {type(module).__name__} has no such method", "the name of one that it has")
    if not isinstance(module, FSDPModule):
        return

    @functools.wraps(method)
    def as_forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        before = vars(self).get("forward")

        def once(*args: Any, **named: Any) -> Any:   # what it calls of the module, itself too, is as before
            _set_forward(self, before)
            return method(*args, **named)

        _set_forward(self, once)
        try:
            return self(*args, **named)
        finally:
            _set_forward(self, before)

    setattr(module, method_name, MethodType(as_forward, module))


def _set_forward(module: nn.Module, forward: Any) -> None:
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward
