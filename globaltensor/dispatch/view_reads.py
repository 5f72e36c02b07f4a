"""Reading boxed views: where a view runs straight along its base, its elements move and the rest of the base does not.

Every rank has some slice of `x[2:5]` in its shard of x, most of them an empty one. Together they are the view, in a
layout with a region per rank; what is left to do is a boxing from there.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch

from globaltensor.algorithms.shifts import Shift, missing_rows
from globaltensor.boxings.redistribute import Move, move_shards
from globaltensor.dispatch.view_writes import position_of
from globaltensor.layouts.layout import Shards, Spec, spec
from globaltensor.layouts.rank_regions import rank_regions
from globaltensor.layouts.regions import Region
from globaltensor.layouts.view_parts import Slice, Strided, ViewSlices, overlaps_itself
from globaltensor.rules.call import Call
from globaltensor.runtime.world import local_ranks_of


def view_slices(call: Call, base: Spec, view: Spec) -> ViewSlices | None:
    """What ranks hold of the view that a call makes; None where it does not run straight, its base is expanded or a
    pending sum, or the call has another operand (slice_inverse)."""
    if base.lazy_bits or view.lazy_bits or base.dtype != view.dtype or not view.ndim or not view.numel:
        return None
    if len(call.slots) > 1 or any(s.is_partial for s in base.sbp):
        return None
    line = position_of(base, call).line
    if line is None or overlaps_itself(Strided(base.shape, base.stride)):
        return None
    nothing = ((0, 0),) * view.ndim
    empty = Slice((0,) * base.ndim, (0,) * view.ndim, line.dims, line.steps)
    own = {rank: line.slice_of(base.region(rank), part) if (part := line.part(base.region(rank))) else empty
           for rank in local_ranks_of(base.placement)}

    def held() -> Spec:
        splits = [axis for axis, s in enumerate(base.sbp) if s.is_split]
        alike: dict[tuple[int, ...], Region] = {}    # by the coordinates that tell a region
        regions = {}
        for rank, at in base.placement.coords.items():
            key = tuple([at[axis] for axis in splits])
            if key not in alike:
                alike[key] = line.part(base.region(rank)) or nothing
            regions[rank] = alike[key]
        return spec(rank_regions(base.placement, regions, base=base.layout), view.shape, view.stride, view.dtype)

    return ViewSlices(own, held)


def stays_split(call: Call, base: Spec, view: Spec) -> Spec:
    """The view's spec. A slice along a split dim is laid out as its base, if less moves then: rows at the seams, and
    not nearly all of it, for another dim to be split."""
    if call.func is not torch.ops.aten.slice.Tensor or any(s.is_partial for s in base.sbp):
        return view
    dim = call["dim"] % base.ndim
    parts, rows = base.layout.num_parts(dim), view.shape[dim]
    if parts == 1 or rows < parts:
        return view
    start, _, step = slice(call["start"], call["end"], call["step"]).indices(base.shape[dim])
    if missing_rows(Shift(start, step), rows, base.shape[dim], parts, gets_result=False) * parts * parts >= (
            rows * (parts - 1)):
        return view
    return spec(base.layout, view.shape, view.stride, view.dtype, view.copied, view.lazy_bits)


def read_slices(of: ViewSlices, shards: Mapping[int, torch.Tensor], view: Spec, op: str, purpose: str) -> Shards:
    """The shards of the view, from those of its base."""
    held = {rank: one.of(shards[rank]) for rank, one in of.of_rank.items()}
    return move_shards([Move(of.held, held, view.layout)], op, purpose)[0]
