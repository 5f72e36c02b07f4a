"""From a global tensor to another layout, and to the part of one rank: `x.to_global(...)` and `x.to_local()`.

Both are linear maps (linear_maps.py). The gradient of a boxing src -> dst is the boxing dst.dual -> src.dual; where the
native dispatcher can do the boxing, its twin in C++ stands in the graph instead.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch

from globaltensor.algorithms.aliasing import value_spec
from globaltensor.boxings import native, watch
from globaltensor.boxings.redistribute import (
    ArrivingShards,
    Move,
    in_layout,
    make_room,
    move_shards,
    moves_meanwhile,
)
from globaltensor.errors import ArgumentError, GlobalTensorError, SbpError, expect
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import Layout, Shape, Spec, layout
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import Sbp, broadcast, code_of, in_range, nd_sbp
from globaltensor.runtime import custom_ops, trace_order
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import compiling, modes_active, transforms_active
from globaltensor.runtime.world import local_ranks_of, world
from globaltensor.tensors.full_value import FromFull, plain_gradient
from globaltensor.tensors.linear_maps import LinearMap, layout_of
from globaltensor.tracebacks import api_boundary

Global = TypeVar("Global", bound=GlobalLike)         # the tensor class, which stands above


def resolve_layout(where: Any, sbp: Any, ndim: int) -> Layout:
    """The layout that a user's placement and sbp mean for a tensor of `ndim` dims."""
    if type(sbp) is Sbp and type(where) is placement:            # each step of a program asks for the same few
        return _on_every_axis(where, sbp, ndim)
    return _read_layout(where, sbp, ndim)


def _read_layout(where: Any, sbp: Any, ndim: int) -> Layout:
    if not isinstance(where, placement):
        raise SbpError(f"not a placement: {where!r}", "a placement names a device type and the ranks",
                       'gt.placement("cpu", [0, 1])')
    return layout(where, in_range(nd_sbp(sbp, where.names, where.ndim), ndim))


_on_every_axis = lru_cache(maxsize=1024)(_read_layout)


def check_named_placement(name: str, what: str, values: Sequence[Any]) -> None:
    """Raise ArgumentError for a placement that is not told by its name, as gt.from_full takes it."""
    at = next((k for k, value in enumerate(values) if isinstance(value, placement)), None)
    if at is not None:
        texts = ["x" if isinstance(value, torch.Tensor) else repr(value) for value in values[:at]]
        first = "".join(f"{text if len(text) < 40 else '...'}, " for text in texts)
        raise ArgumentError(f"gt.{name} with a placement among the {what}", f"{what} come first, the rest by name",
                            f"gt.{name}({first}placement=P, sbp=gt.sbp.broadcast)")


def box_from(x: Any, where: Any, sbp: Any, grad_sbp: Any, wait: Any) -> Any:
    """x.to_global(where, sbp, grad_sbp, wait); x may be wrapped by torch.func."""
    own = layout_of(x)
    assert own is not None                           # else it is from_local
    if wait is not True and wait is not False:
        expect(wait, bool, "wait says neither yes nor no", "wait=False")
    dst = resolve_layout(*filled_in(own, where, sbp), x.dim())
    grad_layout = _layout_of_grad_sbp(own.placement, grad_sbp, x.dim()) if grad_sbp is not None else None
    if not wait and not compiling():
        make_room()
        if is_global(x) and not transforms_active() and moves_meanwhile(x, dst):
            return RedistributeMeanwhile.of(x, dst, grad_layout)
    return to_layout(x, dst, grad_layout)


def _layout_of_grad_sbp(where: placement, grad_sbp: Any, ndim: int) -> Layout:
    """The layout that a user's `grad_sbp` means, on the placement that x comes from."""
    try:
        return resolve_layout(where, grad_sbp, ndim)
    except SbpError as error:
        raise SbpError(f"grad_sbp: {error.what}", f"{error.why}; the gradient leaves on x's own placement, {where}",
                       error.fix.replace("sbp=(", "grad_sbp=(")) from None


def filled_in(own: Layout, where: Any, sbp: Any) -> tuple[Any, Any]:
    """The placement and sbp that a user asked for, of a tensor laid out as `own`: that is where one is None. On a
    placement of other axes the sbp is broadcast."""
    if isinstance(where, Sbp):
        raise SbpError(f"not a placement: {where!r}, which is an sbp", "the placement comes first, and may be left out",
                       f"sbp={code_of((where,))}")
    where = own.placement if where is None else where
    if sbp is None:
        sbp = own.sbp if getattr(where, "shape", None) == own.placement.shape else broadcast
    return where, sbp


def to_layout(x: Global, dst: Layout, grad_layout: Layout | None = None) -> Global:
    """x in another layout, x itself where it has that one already; its gradient leaves in `grad_layout` (default: dual
    to x's). A plain tensor counts as broadcast."""
    own = layout_of(x)
    if dst is own and grad_layout is None:
        return x
    if own is None:
        return FromFull.of(x, dst)
    # recorders, transforms and modes look at functions and ops of Python
    if (torch_ext is not None and dst is not own and is_global(x) and not watch.watched()
            and not transforms_active() and not modes_active()):
        boxing = native.find_boxing(x.spec, dst)
        if boxing is not None:
            return torch_ext.redistribute(x, boxing, grad_layout)
    return Redistribute.of(x, dst, grad_layout)


class Redistribute(LinearMap):
    """An explicit boxing src -> dst; its backward is the boxing dst.dual -> src.dual, or to `grad_layout`."""

    op = custom_ops.redistribute

    @staticmethod
    def forward(x: Global, dst: Layout, grad_layout: Layout | None = None) -> Global:
        return Redistribute.call_op(x, dst, grad_layout) if modes_active() else box(x, dst)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None, None]:
        return box_gradient(grad, ctx.layout, ctx.how[1]), None, None


class RedistributeMeanwhile(Redistribute):
    """The same, which goes on until a value of it is needed."""

    @staticmethod
    def forward(x: Any, dst: Layout, grad_layout: Layout | None = None) -> Any:
        where = dst.placement
        nothing = {rank: torch.empty(0, dtype=x.dtype, device=world().device(where.type, rank))
                   for rank in local_ranks_of(where)}
        moved = in_layout(x, dst, nothing)
        moved.arriving = ArrivingShards(x, dst)
        return moved


def box(x: Global, dst: Layout) -> Global:
    """A new tensor in that layout."""
    if dst is x.spec.layout:                         # asked for its grad_layout: the same value, on another way back
        same = x.wrap(value_spec(x.spec), {r: shard.clone() for r, shard in x.shards.items()})
        same.lineage = x.lineage
        return same
    return in_layout(x, dst, move_shards([Move(x.spec, x.shards, dst, trace_order.of(x))])[0])


def box_gradient(grad: Any, src: Layout, grad_layout: Layout | None) -> Any:
    """The gradient of a boxing from `src`, on its way back. A plain one is the same on every process."""
    now = layout_of(grad)
    return to_layout(grad, grad_layout or (src.without_partials if now is None else _gradient_layout(now, src)))


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


def to_local(x: Any) -> torch.Tensor:
    """This rank's part of x. GlobalTensorError in a process that drives several ranks, or none of x's."""
    if len(world().local_ranks) > 1:
        raise GlobalTensorError("to_local() in a process that drives several ranks",
                                f"it drives ranks {list(world().local_ranks)}, so there is no one local part",
                                "x.shards[rank]")
    where = layout_of(x).placement                   # type: ignore[union-attr]  # of a global tensor
    if world().rank not in where.coords:
        raise GlobalTensorError(f"rank {world().rank} holds no part of a tensor on {where}",
                                "its placement leaves this rank out", "x.full_tensor(), or ask x.shards first")
    return ToLocal.of(x)


class ToLocal(LinearMap):
    """The part of the only rank that this process drives. Gradients of the parts lie dual to x."""

    op = custom_ops.to_local

    @staticmethod
    def forward(x: GlobalLike) -> torch.Tensor:
        return ToLocal.call_op(x) if modes_active() else own_part(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> GlobalLike:
        return Spread.of(plain_gradient(grad), ctx.layout.dual, ctx.shape)


def own_part(x: GlobalLike) -> torch.Tensor:
    """The shard of the only rank, in its own memory."""
    part = next(iter(x.shards.values()))
    return part.view_as(part)


class Spread(LinearMap):
    """From a plain tensor the global one of which it is the part on every rank that this process drives."""

    op = custom_ops.spread

    @staticmethod
    def forward(t: torch.Tensor, dst: Layout, shape: Shape) -> GlobalLike:
        return Spread.call_op(t, dst, shape)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor, None, None]:
        dst, _ = ctx.how
        return Part.of(to_layout(grad, dst.without_partials), dst, ctx.shape).to(ctx.device), None, None


class Part(LinearMap):
    """Back from that: of S the part, of P the whole; of B the whole, once, as its copies are one value."""

    op = custom_ops.part

    @staticmethod
    def forward(x: GlobalLike, dst: Layout, shape: Shape) -> torch.Tensor:
        return Part.call_op(x, dst, shape) if modes_active() else sum_parts(x, dst, shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[GlobalLike, None, None]:
        return Spread.of(plain_gradient(grad), ctx.how[0], ctx.shape), None, None


def sum_parts(x: GlobalLike, dst: Layout, shape: Shape) -> torch.Tensor:
    """The sum of the shards that this process has, of those that are copies by `dst` only the first. `shape` is that of
    a shard, for a process that has none."""
    firsts = [shard for r, shard in x.shards.items()
              if all(i == 0 for i, s in zip(dst.placement.coords[r], dst.sbp) if s.is_broadcast)]
    parts = firsts if world().single_process else list(x.shards.values())
    return sum(parts[1:], parts[0].clone()) if parts else torch.zeros(shape, dtype=x.dtype, device="cpu")


def _box_gradient_of(grad: Any, x: Spec, grad_layout: Layout | None) -> Any:
    return box_gradient(grad, x.layout, grad_layout)


if torch_ext is not None:
    torch_ext.on_redistribute_backward(api_boundary(find_gradient_boxing), api_boundary(_box_gradient_of))
