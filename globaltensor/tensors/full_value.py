"""The whole value of a global tensor, and back: `x.full_tensor()`, and `from_full` without its checks.

The whole value is a boxing to broadcast on a placement of all processes, so that those outside of x's placement have it
too and `if loss.item() > 3:` takes the same branch everywhere.
"""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.boxings import watch
from globaltensor.boxings.redistribute import Move, move_shards
from globaltensor.errors import ArgumentError
from globaltensor.layouts.global_like import GlobalLike
from globaltensor.layouts.layout import Layout, Shards, Spec, dense, dense_in_order, layout, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import broadcast
from globaltensor.runtime import custom_ops, trace_order
from globaltensor.runtime.memory import require
from globaltensor.runtime.torch_internals import is_of_a_trace, modes_active, neg_view
from globaltensor.runtime.world import local_ranks_of, world
from globaltensor.tensors.linear_maps import LinearMap, layout_of


def gather_full(x: GlobalLike, op: str = "full_tensor") -> Shards:
    """The whole value on the first rank that each process drives."""
    here, own = world(), x.spec
    # whoever watches sees what many processes would move, which print what they have
    alone = here.single_process and (op == watch.PRINTED or not watch.watched())
    if all(s.is_broadcast for s in own.sbp) and (alone or len(own.placement.flat) == here.size):
        return x.shards
    ranks = [here.rank] if alone else range(here.size)
    everywhere = layout(placement(own.placement.type, ranks), (broadcast,))
    return move_shards([Move(own, x.shards, everywhere, trace_order.of(x))], op)[0]


def whole_value(x: GlobalLike) -> torch.Tensor:
    """The same as one plain tensor."""
    return next(iter(gather_full(x).values())).clone()             # it may be a shard, which a write would change


def no_gradient_placements(x: GlobalLike, grad_placements: Any) -> torch.Tensor:
    """Refuse x.full_tensor(grad_placements=...)."""
    raise ArgumentError("full_tensor(grad_placements=...) of a tensor on a placement",
                        "it is for tensors on a mesh of gt.dtensor", "x.full_tensor()")


class FullTensor(LinearMap):
    """The whole value; its gradient is a plain tensor, the same everywhere."""

    op = custom_ops.full_tensor

    @staticmethod
    def forward(x: GlobalLike) -> torch.Tensor:
        if modes_active():
            return FullTensor.call_op(x)
        return whole_value(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> GlobalLike:
        return FromFull.of(plain_gradient(grad), ctx.layout.without_partials)


class FromFull(LinearMap):
    """A value that every process holds whole, in a layout."""

    op = custom_ops.from_full

    @staticmethod
    def forward(t: torch.Tensor, dst: Layout) -> GlobalLike:
        return FromFull.call_op(t, dst)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor, None]:
        return plain_gradient(grad).to(ctx.device), None


def plain_gradient(grad: Any) -> torch.Tensor:
    """The gradient of a plain tensor, which comes as a global one where that was an operand beside global ones."""
    return grad if layout_of(grad) is None else FullTensor.of(grad)


def with_bits_of(x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The whole value, whose memory counts as conjugated or negated where that of x does: torch refuses what reads it.
    """
    whole = whole.conj() if x.is_conj() else whole
    return neg_view(whole) if x.is_neg() else whole


def place_full(whole: torch.Tensor, dst: Layout) -> tuple[Spec, Shards]:
    """The spec and the shards of a value that every process holds whole; no communication."""
    ranks = local_ranks_of(dst.placement)
    home = dst.replicated
    devices = {r: world().device(dst.placement.type, r) for r in ranks}
    if not is_of_a_trace(whole):
        require(whole, f"a plain tensor on {dst}")
    shape = tuple(whole.shape)
    of = spec(home, shape, dense(shape, whole.stride()), whole.dtype)
    source = whole.detach().resolve_conj().resolve_neg()         # what reads the memory knows no such bits
    if dst.placement.type == "cpu":
        source = source.cpu()
    if dst is home:
        shards = {r: dense_in_order(source.to(devices[r], copy=True), of.stride) for r in ranks}
    elif dst.placement.type in ("cpu", "meta"):
        shards = move_shards([Move(of, dict.fromkeys(ranks, source), dst)], "from_full")[0]
    else:                                            # cut where it is: a device gets its ranks' parts only
        cut = dst.without_partials
        parts = {r: tuple(slice(*ends) for ends in cut.region(of.shape, r)) for r in ranks}
        shards = {r: dense_in_order(source[part].to(devices[r], copy=True), of.stride) for r, part in parts.items()}
        if cut is not dst:
            shards = move_shards([Move(of.on(cut), shards, dst)], "from_full")[0]
    return of.on(dst), shards
