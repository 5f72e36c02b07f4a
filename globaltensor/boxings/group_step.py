"""One step of a boxing as the ranks of one group do it among themselves.

Ranks that differ only on the axes that a step changes form a group. Where the other axes split each dim first, what a
group holds is one region of the tensor, and nothing of it comes from outside. So the step is, for each group, a boxing
of its own: of a tensor of that region's shape, on a placement of the group's ranks.

    [6, 4] on [[0, 1], [2, 3]]   (S(0), P) -> (S(0), B)      ranks 2 and 3 do P -> B of [3, 4] on [2, 3]

Groups need not go the same way: one whose ranks share memory takes the native kernel, another a collective of
torch.distributed (collectives.py), the rest messages of our own (torch_program.py).
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from globaltensor.boxings.traffic import axis_codes
from globaltensor.layouts.layout import Layout, Shape, layout
from globaltensor.layouts.placement import placement, with_ranks
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.sbp import broadcast


class GroupStep(NamedTuple):
    """What a group does: a step from `src` to `dst`, on a placement of its ranks alone, of a tensor of `shape`."""

    src: Layout
    dst: Layout
    shape: Shape

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.src.placement.flat


def separate_axes(src: Sequence[int], dst: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """The axes that a step on one placement changes, where its groups need nothing of each other; else None. Of
    `axis_codes`."""
    changed: list[int] = []
    cut: list[int] = []                              # codes of changed axes further out, splits among them
    for axis, (s, t, parts) in enumerate(zip(src, dst, sizes)):
        if s != t and parts > 1:
            changed.append(axis)
            cut += (s, t)
        elif s >= 0 and s in cut and parts > 1:
            return None
    return tuple(changed)


@remembered
def group_step(src: Layout, dst: Layout, shape: Shape, rank: int) -> GroupStep | None:
    """What the group of `rank` does in the step from src to dst; None where it is not a boxing of the group's own."""
    if src.placement != dst.placement or isinstance(src, RankRegions) or isinstance(dst, RankRegions):
        return None
    where = src.placement
    axes = separate_axes(axis_codes(src.sbp), axis_codes(dst.sbp), where.shape)
    if not axes or rank not in where.coords:
        return None
    together = src.with_sbp(tuple(broadcast if axis in axes else s for axis, s in enumerate(src.sbp)))
    group = _group(where, axes, rank)
    first, then = (layout(group, tuple(of.sbp[axis] for axis in axes)) for of in (src, dst))
    return GroupStep(first, then, together.local_shape(shape, rank))


@remembered
def _group(of: placement, axes: tuple[int, ...], rank: int) -> placement:
    """The ranks of a placement that differ from `rank` on these axes only, in a placement of just these axes."""
    return with_ranks(of, _nested(of.ranks_along(axes, rank), [of.shape[axis] for axis in axes]))


def _nested(flat: Sequence[int], sizes: Sequence[int]) -> list[object]:
    """The list in nested lists of these lengths."""
    if len(sizes) == 1:
        return list(flat)
    n = len(flat) // sizes[0]
    return [_nested(flat[i * n:(i + 1) * n], sizes[1:]) for i in range(sizes[0])]
