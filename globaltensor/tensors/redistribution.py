"""From a global tensor to another layout, and to the part of one rank: `x.to_global(...)` and `x.to_local()`.

Both are differentiable. The gradient of a boxing src -> dst is the boxing dst.dual -> src.dual, for all of them by one
autograd function; where the native dispatcher can do the boxing, its twin in C++ stands in the graph instead.
"""
from __future__ import annotations

from typing import Any, TypeVar

import torch

from globaltensor.algorithms.aliasing import value_spec
from globaltensor.boxings import native, watch
from globaltensor.boxings.redistribute import Move, move_shards
from globaltensor.errors import GlobalTensorError, SbpError
from globaltensor.layouts.global_like import GlobalLike
from globaltensor.layouts.layout import Layout, Spec, layout, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import broadcast, in_range, nd_sbp
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.world import world

Global = TypeVar("Global", bound=GlobalLike)         # the tensor class, which stands above


def resolve_layout(where: Any, sbp: Any, ndim: int) -> Layout:
    """The layout that a user's placement and sbp mean for a tensor of `ndim` dims."""
    if not isinstance(where, placement):
        raise SbpError(f"not a placement: {where!r}", fix='gt.placement("cpu", [0, 1])')
    return layout(where, in_range(nd_sbp(sbp, where.names, where.ndim), ndim))


def to_layout(x: Global, dst: Layout, grad_layout: Layout | None = None) -> Global:
    """x in another layout, x itself where it has that one already; its gradient leaves in `grad_layout` (default: dual
    to x's)."""
    if dst is x.spec.layout and grad_layout is None:
        return x
    if torch_ext is not None and not watch.watched() and dst is not x.spec.layout:
        boxing = native.find_boxing(x.spec, dst)
        if boxing is not None:
            return torch_ext.redistribute(x, boxing, grad_layout)
    return Redistribute.apply(x, dst, grad_layout)


class Redistribute(torch.autograd.Function):
    """An explicit boxing src -> dst; its backward is the boxing dst.dual -> src.dual, or to `grad_sbp`."""

    @staticmethod
    def forward(ctx: Any, x: Global, dst: Layout, grad_layout: Layout | None) -> Global:
        ctx.x, ctx.grad_layout = x.spec, grad_layout
        if dst is x.spec.layout:
            return x.wrap(value_spec(x.spec), {r: shard.clone() for r, shard in x.shards.items()})
        shards = move_shards([Move(x.spec, x.shards, dst)])[0]
        return x.wrap(spec(dst, x.spec.shape, None, x.spec.dtype), shards)

    @staticmethod
    def backward(ctx: Any, grad: Global) -> tuple[Global, None, None]:
        return box_gradient(grad, ctx.x, ctx.grad_layout), None, None


def box_gradient(grad: Global, x: Spec, grad_layout: Layout | None) -> Global:
    """The gradient of a boxing of x, on its way back."""
    return to_layout(grad, grad_layout or _gradient_layout(grad.spec.layout, x.layout))


def find_gradient_boxing(grad: Spec, x: Spec, grad_layout: Layout | None) -> Any:
    """The native boxing for that; None where the gradient stays as it is."""
    dst = grad_layout or _gradient_layout(grad.layout, x.layout)
    return None if dst is grad.layout else native.find_boxing(grad, dst)


def _gradient_layout(now: Layout, src: Layout) -> Layout:
    """Where the gradient of a tensor in `src` goes: dual to it, but what is broadcast already is not made pending."""
    want = src.dual.sbp
    if now.placement == src.placement:
        want = tuple(n if w.is_partial and n.is_broadcast else w for n, w in zip(now.sbp, want))
    else:
        want = tuple(broadcast if w.is_partial else w for w in want)
    return layout(src.placement, want)


def to_local(x: GlobalLike) -> torch.Tensor:
    """This rank's part of x. GlobalTensorError in a process that drives several ranks, or none of x's."""
    if len(world().local_ranks) > 1:
        raise GlobalTensorError("to_local() in a process that drives several ranks",
                                f"it drives ranks {list(world().local_ranks)}, so there is no one local part",
                                "x.shards[rank]")
    if not x.shards:
        raise GlobalTensorError(f"rank {world().rank} holds no part of a tensor on {x.placement}",
                                "its placement leaves this rank out", "x.full_tensor(), or ask x.shards first")
    return ToLocal.apply(x)


class ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Global) -> torch.Tensor:
        ctx.own, ctx.wrap = x.spec, x.wrap
        return next(iter(x.shards.values())).view_as(next(iter(x.shards.values())))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> GlobalLike:
        dual = ctx.own.layout.dual
        return ctx.wrap(spec(dual, ctx.own.shape, None, grad.dtype), {world().rank: grad.contiguous()})
