"""The door above autograd: linear maps of global tensors, as torch differentiates, batches and traces them.

Boxing, `full_tensor`, `from_full`, `to_local` and `from_local` are linear. So the tangent of a result is the map of the
tangent; the gradient is that of the adjoint, which is one of these maps too, so that all can be differentiated again;
and under vmap a batch dim is a dim like any other, by which those that a layout names are counted on.

Each is an op as well (map_ops.py), which names layouts by their text. It is called where a dispatch mode looks on
(make_fx, a FLOP counter), and does its work there; a graph that was traced so is differentiable. torch.compile traces
what the op does instead.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any
from weakref import WeakValueDictionary

import torch

from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Layout
from globaltensor.layouts.sbp import broadcast, split
from globaltensor.runtime.torch_internals import (
    OpOverload,
    as_batch,
    below_autograd,
    compiling,
    in_batch,
    modes_active,
    stood_for,
    transforms_active,
)
from globaltensor.tracebacks import api_boundary

# a schema has no type for layouts; a traced graph knows the name alone, so what it may name lives on
_named: WeakValueDictionary[str, Layout] = WeakValueDictionary()
_traced: set[Layout] = set()


class LinearMap(torch.autograd.Function):
    """Linear in x. A subclass has forward(x, *how), where `how` are layouts and shapes, its backward, and its op."""

    op: OpOverload
    kernel: Callable[..., Any]                       # what the op does

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.backward = staticmethod(api_boundary(cls.backward))  # type: ignore[method-assign]  # torch calls it

    @classmethod
    def of(cls, x: Any, *how: Any) -> Any:
        """The map of x, by way of autograd only where that has to know. Of a batch of gradients autograd knows all
        of it as one."""
        transformed = transforms_active()
        if transformed and in_batch(x):
            whole, dim = stood_for(x)  # type: ignore[misc]
            return as_batch(cls.of(whole, *[_batched(one, dim, whole.shape[dim]) for one in how]))
        if transformed or torch.is_grad_enabled() and x.requires_grad:
            return cls.apply(x, *how)
        return cls.forward(x, *how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, *ctx.how = inputs
        ctx.layout, ctx.shape, ctx.device = layout_of(x), tuple(x.shape), x.device

    @classmethod
    def jvp(cls, ctx: Any, tangent: Any, *_: Any) -> Any:
        return cls.of(tangent, *ctx.how)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], x: Any, *how: Any) -> Any:
        return cls.apply(x, *[_batched(one, in_dims[0], info.batch_size) for one in how]), in_dims[0]

    @classmethod
    def call_op(cls, x: Any, *how: Any) -> Any:
        """The op, from within this function of autograd: not by way of it again."""
        if compiling():
            return cls.kernel(x, *how)
        with below_autograd():
            return cls.op(x, *op_arguments(how))


def _batched(how: Any, dim: int, size: int) -> Any:
    """A layout, or a shape, of tensors that have a batch dim in this place."""
    if isinstance(how, Layout):
        return how.with_sbp(tuple(split(s.dim + (s.dim >= dim)) if s.is_split else s for s in how.sbp))
    return how and (*how[:dim], size, *how[dim:])


def row_by_row(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a function of autograd that asks for layouts or parts: of a batch of gradients it takes
    one after the other. (What autograd notes of tensors that stand for a batch is lost behind it.)"""
    @functools.wraps(backward)
    def of_each(ctx: Any, *grads: Any) -> Any:
        if compiling() or not transforms_active() or not any(g is not None and in_batch(g) for g in grads):
            return backward(ctx, *grads)
        rows = [stood_for(g)[0].unbind() if g is not None and in_batch(g) else repeat(g)  # type: ignore[index]
                for g in grads]
        results = [backward(ctx, *row) for row in zip(*rows)]
        if not isinstance(results[0], tuple):
            return as_batch(torch.stack(results))
        return tuple(None if several[0] is None else as_batch(torch.stack(several)) for several in zip(*results))
    return of_each


def layout_of(t: Any) -> Layout | None:
    """The layout of a global tensor, also where torch.func wraps it: batch dims do not show. None of a plain one."""
    if is_global(t):
        return t.spec.layout
    whole, dim = stood_for(t) or (t, -1)
    inner = layout_of(whole) if whole is not t else None
    if inner is None or dim < 0:
        return inner
    # seen from one example, a split of the batch splits nothing
    shown = {d: split(d - (d > dim)) if d != dim else broadcast for d in {s.dim for s in inner.sbp if s.is_split}}
    return inner.with_sbp(tuple(shown[s.dim] if s.is_split else s for s in inner.sbp))


def innermost(t: torch.Tensor) -> torch.Tensor:
    """What is left when nothing stands for another tensor."""
    while (inner := stood_for(t)) is not None:
        t, _ = inner
    return t


def op_arguments(how: Sequence[Any]) -> list[Any]:
    """Layouts by their names."""
    for one in how:
        if isinstance(one, Layout):
            _named[str(one)] = one
            if modes_active():
                _traced.add(one)
    return [str(one) if isinstance(one, Layout) else one for one in how]


def how_of(arguments: Sequence[Any]) -> list[Any]:
    """Names back to layouts, lists back to shapes."""
    return [_named[one] if isinstance(one, str) else tuple(one) if isinstance(one, list) else one for one in arguments]

