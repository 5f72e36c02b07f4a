"""What each axis does in one step of a boxing.

A step takes parts of one layout to parts of another (route.py). Which parts overlap, and which of several ranks that
hold the same part sends it, follows from what becomes of each axis of the placement:

    reduced    P -> anything else        a piece has one source per coordinate there
    kept       P -> P                    a rank takes from ranks of its own coordinate only
    matched    B -> anything else        so too here: whoever differs there has its own copy to take from
    sharing    B -> S(d), where d is split already by an axis that goes: the copies share what they send: each sends
               its part of dim d, as if the axis split it innermost
    loose      S -> P                    ranks share a sum: each takes what has its own coordinate there, which it holds
    tied       B or another P -> P       so too here: each takes a part, as if the axis split its region innermost along
               the longest dim that comes out even; where nothing moves (B -> P), the first rank takes all

Between two placements no axis is matched. There the copies of the source and those of the destination are counted
through: with g the greatest common divisor of the counts, copy k takes from those copies that are k modulo g, and they
share.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import NamedTuple

from globaltensor.layouts.layout import Layout, Shape

Axes = tuple[int, ...]


class StepRoles(NamedTuple):
    """The axes of each role. Axes of size 1 have none.

    Per dim, outermost first: `cut` by these axes of src, `cut_by_dst` by those of dst, the tied ones among them, and
    `sharing`. `first` are axes of dst of which the first rank takes all. For two placements, `copies` are axes of src
    that hold the same, `free` those of dst that want the same, and `groups` counts the groups that go together.
    """

    same: bool                                       # one placement
    op: str
    reduced: Axes
    cut: tuple[Axes, ...]
    cut_by_dst: tuple[Axes, ...]
    sharing: tuple[Axes, ...]
    loose: Axes
    first: Axes
    copies: Axes
    free: Axes
    groups: int


def kept_partial(src: Layout, dst: Layout) -> tuple[bool, ...]:
    """Per axis of src: does a pending sum stay pending?"""
    same = src.placement == dst.placement
    return tuple(same and a.is_partial and a == b for a, b in zip(src.sbp, dst.sbp if same else src.sbp))


def summed_axes(src: Layout, dst: Layout) -> Axes:
    """Axes of dst along which ranks share a sum that is not pending in src."""
    kept = kept_partial(src, dst) if src.placement == dst.placement else (False,) * len(dst.sbp)
    return tuple(axis for axis, t in enumerate(dst.sbp)
                 if t.is_partial and t.op == "sum" and dst.placement.shape[axis] > 1 and not kept[axis])


def roles(src: Layout, dst: Layout, shape: Shape) -> StepRoles:
    """The roles in a step of a tensor of this shape; all axes of src that are reduced must share one op."""
    same, sizes, dst_sizes = src.placement == dst.placement, src.placement.shape, dst.placement.shape
    pending = [axis for axis, kept in enumerate(kept_partial(src, dst)) if src.sbp[axis].is_partial and not kept]
    ops = {src.sbp[axis].op for axis in pending}
    assert len(ops) <= 1, f"one step cannot reduce {src.sbp}"
    reduced = tuple(axis for axis in pending if sizes[axis] > 1)
    cut, cut_by_dst = _cut(src, len(shape)), _cut(dst, len(shape))
    shared = summed_axes(src, dst)
    loose = tuple(axis for axis in shared if same and src.sbp[axis].is_split)
    tied = tuple(axis for axis in shared if axis not in loose)
    moving = not same or bool(reduced) or any(
        axis not in loose for a, b in zip(cut, cut_by_dst) for axis in without_common_start(a, b)[0])
    divided = moving and bool(shape)
    if tied and divided:
        parts = [prod(dst_sizes[axis] for axis in path) for path in cut_by_dst]
        cut_by_dst[tied_dim(shape, parts, prod(dst_sizes[axis] for axis in tied))] += tied
    sharing: list[Axes] = [()] * len(shape)
    for d, path in enumerate(cut if same else ()):
        rest, rest_of_dst = without_common_start(path, cut_by_dst[d])
        if any(axis not in loose for axis in rest):
            sharing[d] = tuple(axis for axis in rest_of_dst if src.sbp[axis].is_broadcast)
    copies = tuple(axis for axis, s in enumerate(src.sbp) if s.is_broadcast and sizes[axis] > 1)
    free = tuple(axis for axis, t in enumerate(dst.sbp)
                 if not t.is_split and axis not in shared and dst_sizes[axis] > 1)
    groups = gcd(prod(sizes[axis] for axis in copies), prod(dst_sizes[axis] for axis in free))
    return StepRoles(same, ops.pop() if ops else "", reduced, tuple(cut), tuple(cut_by_dst), tuple(sharing),
                     loose, () if divided else tied, copies, free, groups)


def tied_dim(shape: Shape, parts: Sequence[int], more: int) -> int:
    """The dim to divide into so many `more` parts, where they are divided into `parts`: the longest that comes out
    even."""
    return max(range(len(shape)), key=lambda d: (shape[d] % (parts[d] * more) == 0, shape[d] / parts[d]))


def _cut(of: Layout, ndim: int) -> list[Axes]:
    """Per dim the axes that split it."""
    cut: list[Axes] = [()] * ndim
    for axis, (s, parts) in enumerate(zip(of.sbp, of.placement.shape)):
        if s.is_split and parts > 1:
            cut[s.dim] += (axis,)
    return cut


def without_common_start(a: Sequence[int], b: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Two lists of axes without those with which both begin."""
    k = 0
    while k < min(len(a), len(b)) and a[k] == b[k]:
        k += 1
    return a[k:], b[k:]
