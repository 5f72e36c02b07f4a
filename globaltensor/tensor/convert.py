"""From plain tensors to global ones: `from_full`, `from_local`, `from_shards`, and `to_global` of a plain tensor."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from globaltensor import comm
from globaltensor.errors import GlobalTensorError, ShapeError
from globaltensor.layout import Layout, Shape, spec
from globaltensor.tensor.core import GlobalTensor, place, resolve


def from_full(t: torch.Tensor, placement: Any, sbp: Any) -> GlobalTensor:
    """Every process holds the same whole tensor `t`; each keeps its part. No communication. Differentiable.

    Raises SbpError for an sbp that does not fit.
    """
    dst = resolve(placement, sbp, t.dim())
    comm.agree(f"from_full({list(t.shape)}, {t.dtype}) on {dst}")
    return _FromFull.apply(t, dst)


class _FromFull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, dst: Layout) -> GlobalTensor:
        return place(t, dst)

    @staticmethod
    def backward(ctx: Any, grad: GlobalTensor) -> tuple[torch.Tensor, None]:
        return grad.full_tensor(), None


def from_local(t: torch.Tensor, placement: Any, sbp: Any) -> GlobalTensor:
    """Each rank's own part: S concatenates, P sums, B takes the first rank's.

    A process that drives several ranks gives `t` to each of them. The parts must be cut as this library cuts (as
    equal as can be, larger first). Differentiable. Raises ShapeError on every rank where they do not fit together.
    """
    dst = resolve(placement, sbp, t.dim())
    return _FromLocal.apply(t, dst)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, dst: Layout) -> GlobalTensor:
        mine = [r for r in comm.world().driven if r in dst.placement.coords]
        source = t.detach()
        return join({r: source.to(comm.world().device(dst.placement.type, r)) for r in mine}, dst, t.dtype)

    @staticmethod
    def backward(ctx: Any, grad: GlobalTensor) -> tuple[torch.Tensor, None]:
        parts = list(grad.shards.values())
        return sum(parts[1:], parts[0]), None


def from_shards(shards: Mapping[int, torch.Tensor], placement: Any, sbp: Any) -> GlobalTensor:
    """`{rank: part}` for the ranks this process drives: S concatenates, P sums, B takes the first rank's.

    Raises ShapeError on every rank where the parts do not fit together, GlobalTensorError for a missing rank.
    """
    ndim = next(iter(shards.values())).dim() if shards else 0
    dst = resolve(placement, sbp, ndim) if shards else resolve(placement, sbp, 64)
    mine = [r for r in comm.world().driven if r in dst.placement.coords]
    missing = [r for r in mine if r not in shards]
    if missing:
        raise GlobalTensorError(f"from_shards without a part for ranks {missing}",
                                f"this process drives ranks {mine} of the placement", "{rank: tensor} for each of them")
    parts = {r: shards[r].detach().to(comm.world().device(dst.placement.type, r)) for r in mine}
    dtype = next(iter(shards.values())).dtype if shards else torch.float32
    return join(parts, dst, dtype)


def join(parts: dict[int, torch.Tensor], dst: Layout, dtype: torch.dtype) -> GlobalTensor:
    """A global tensor whose shards are these parts, one for each rank of the placement, here or elsewhere."""
    shapes = _all_shapes(parts, dst)
    shape = _global_shape(shapes, dst)
    if shape is not None and all(dst.local_shape(shape, r) == shapes[r] for r in shapes):
        made = {r: t.contiguous() for r, t in parts.items()}
        if all(s.is_broadcast for s in dst.sbp) and len(parts) > 1:
            made = {r: t.clone() for r, t in made.items()}
        return GlobalTensor.wrap(spec(dst, shape, None, dtype), made)
    rows = "".join(f"\n    rank {r}: {list(s)}" for r, s in sorted(shapes.items()))
    fit = "" if shape is None else "".join(f"\n    rank {r}: {list(dst.local_shape(shape, r))}" for r in sorted(shapes))
    raise ShapeError(f"parts that do not fit together as {dst}:{rows}",
                     f"a tensor of {list(shape)} would be cut as:{fit}" if shape is not None else
                     "parts of one tensor have the same number of dims, and the same sizes but where they are split",
                     "parts as equal as can be, the larger ones first; or from_full")


def _all_shapes(parts: dict[int, torch.Tensor], dst: Layout) -> dict[int, Shape]:
    """The shape of every rank's part, agreed on by all processes."""
    mine = {r: tuple(t.shape) for r, t in parts.items()}
    if comm.world().lone:
        return mine
    said = comm.gather_objects((repr(dst), mine), f"from_local on {dst}")
    return {r: shape for _, shapes in said for r, shape in shapes.items()}


def _global_shape(shapes: dict[int, Shape], dst: Layout) -> Shape | None:
    """Sizes added up along split dims, taken from the first rank along others; None where the dims do not fit."""
    first = shapes[dst.placement.flat[0]]
    if any(len(s) != len(first) for s in shapes.values()):
        return None
    total = list(first)
    for d in {s.dim for s in dst.sbp if s.is_split}:
        keep = [axis for axis, s in enumerate(dst.sbp) if s.is_split and s.dim == d]
        total[d] = sum(shapes[r][d] for r, at in dst.placement.coords.items()
                       if all(i == 0 for axis, i in enumerate(at) if axis not in keep))
    return tuple(total)


def to_global(t: torch.Tensor, placement: Any = None, sbp: Any = None, grad_sbp: Any = None) -> GlobalTensor:
    """A plain tensor becomes global: `from_local`."""
    if placement is None or sbp is None:
        raise GlobalTensorError("a plain tensor has no placement and sbp of its own to keep",
                                fix="t.to_global(placement, sbp)")
    return from_local(t, placement, sbp)
