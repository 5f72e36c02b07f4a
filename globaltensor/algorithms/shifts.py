"""Ops that move elements along a split dim: `F.pad`, `cat`, `roll`, `slice_scatter`, the gradient of a slice.

Each rank makes its own part of the result, and asks for a window (rank_regions.py) of every operand: the elements that
come to lie in that part. It holds most of them where the dim becomes a little longer or shorter, so only rows at the
seams cross ranks. Slices themselves are views, which move no more when they are read (dispatch/view_reads.py).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch

from globaltensor.algorithms.decompositions import as_global
from globaltensor.algorithms.offer import Offer, boxings_to, largest_part
from globaltensor.algorithms.run import Run
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import Layout, Shape, Spec, dense, spec
from globaltensor.layouts.rank_regions import regions_by
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.regions import Range, Region, split_range
from globaltensor.layouts.symbols import has_symbols
from globaltensor.rules.call import Call
from globaltensor.runtime.dtypes import WIDER
from globaltensor.runtime.meta import as_on, meta
from globaltensor.runtime.torch_internals import OpOverload, tree_leaves, without_modes

aten = torch.ops.aten
NAME = "shifted rows"
_MOST_PARTS = 64                                     # a price looks at so many, evenly spread


class Shift(NamedTuple):
    """Along one dim, element k of an operand is element start + k * step of the result."""

    start: int = 0
    step: int = 1

    def reads(self, n: int, of_result: Range) -> Range:
        """Which of n elements come to lie in a range of the result."""
        # -(a // step) with the sign of a turned is the division rounded up
        first, stop = (min(max(-((self.start - end) // self.step), 0), n) for end in of_result)
        return first, max(first, stop)


class ShiftedPart(NamedTuple):
    """An operand, by its number, and how it is shifted along each dim."""

    operand: int
    shape: Shape
    shifts: tuple[Shift, ...]

    def reads(self, of_result: Region) -> Region:
        """The elements that come to lie in a region of the result."""
        return tuple(shift.reads(n, ends) for shift, n, ends in zip(self.shifts, self.shape, of_result))

    def places(self, part: Region, of_result: Region) -> tuple[slice, ...]:
        """Where that part of the operand goes in a shard that holds the region of the result."""
        return tuple(slice(shift.start + first * shift.step - low, shift.start + (stop - 1) * shift.step + 1 - low,
                           shift.step) if first < stop else slice(0, 0)
                     for shift, (first, stop), (low, _) in zip(self.shifts, part, of_result))


class _ShiftedRows(NamedTuple):
    """What a rank reads of an operand for its part of a result of this shape, laid out so."""

    placed: ShiftedPart
    home: Layout
    shape: Shape

    def region(self, rank: int) -> Region:
        return self.placed.reads(self.home.region(self.shape, rank))


class _Plan(NamedTuple):
    """What goes where. Elsewhere the result has the number `fill`, or what operand `base` has; None: all is covered."""

    shape: Shape
    placed: list[ShiftedPart]
    fill: complex | None = None
    base: int | None = None

    @property
    def moved(self) -> set[int]:
        """The dims along which elements come to lie at other indices."""
        return {d for one in self.placed for d, shift in enumerate(one.shifts)
                if shift != Shift() or one.shape[d] != self.shape[d]}


def _at(ndim: int, dim: int, shift: Shift) -> tuple[Shift, ...]:
    return tuple(shift if d == dim else Shift() for d in range(ndim))


def _of_slice_gradient(call: Call) -> _Plan:
    shape, own = tuple(call["input_sizes"]), call.shapes[0]
    dim = call["dim"] % len(shape)
    start, _, step = slice(call["start"], call["end"], call["step"]).indices(shape[dim])
    return _Plan(shape, [ShiftedPart(0, own, _at(len(shape), dim, Shift(start, step)))], 0)


def _of_pad(call: Call) -> _Plan:
    own, pad = call.shapes[0], call["pad"]
    ends = {len(own) - 1 - k: (pad[2 * k], pad[2 * k + 1]) for k in range(len(pad) // 2)}
    shifts = tuple(Shift(ends.get(d, (0, 0))[0]) for d in range(len(own)))
    whole = tuple(n + sum(ends.get(d, (0, 0))) for d, n in enumerate(own))
    return _Plan(whole, [ShiftedPart(0, own, shifts)], call["value"])


def _of_joined(call: Call) -> _Plan:
    shapes = call.shapes
    ndim = max(map(len, shapes))
    dim = call["dim"] % ndim
    parts = [(q, own) for q, own in enumerate(shapes) if len(own) == ndim]       # torch skips empty ones of one dim
    starts = [0, *accumulate(own[dim] for _, own in parts)]
    whole = tuple(starts[-1] if d == dim else n for d, n in enumerate(parts[0][1]))
    return _Plan(whole, [ShiftedPart(q, own, _at(ndim, dim, Shift(start))) for (q, own), start in zip(parts, starts)])


def _of_roll(call: Call) -> _Plan | None:
    own = call.shapes[0]
    if not call["dims"] or len({d % len(own) for d in call["dims"]}) < len(call["dims"]):
        return None                                  # of the flattened tensor, or of a dim several times
    by = {d % len(own): k % max(own[d], 1) for d, k in zip(call["dims"], call["shifts"])}
    ways = [[Shift(by[d]), Shift(by[d] - n)] if by.get(d) else [Shift()] for d, n in enumerate(own)]
    return _Plan(own, [ShiftedPart(0, own, shifts) for shifts in product(*ways)])


def _of_slice_scatter(call: Call) -> _Plan:
    shape, part = call.shapes
    dim = call["dim"] % len(shape)
    start, _, step = slice(call["start"], call["end"], call["step"]).indices(shape[dim])
    return _Plan(shape, [ShiftedPart(1, part, _at(len(shape), dim, Shift(start, step)))], base=0)


_PLANS: dict[OpOverload, Callable[[Call], _Plan | None]] = {
    aten.slice_backward.default: _of_slice_gradient, aten.constant_pad_nd.default: _of_pad, aten.roll.default: _of_roll,
    aten.cat.default: _of_joined, aten.slice_scatter.default: _of_slice_scatter}


def _home(plan: _Plan, operands: Sequence[Spec]) -> Layout | None:
    """How the result is laid out: as the base, or as the first operand that is split along a dim that is moved along;
    None where that is none, or where the result is too short to be."""
    for q in [one.operand for one in plan.placed] if plan.base is None else [plan.base]:
        home = operands[q].layout.without_partials
        cut = {s.dim for s in home.sbp if s.is_split} & plan.moved
        if cut:
            return home if all(plan.shape[d] >= home.num_parts(d) for d in cut) else None
    return None


def missing_rows(shift: Shift, n: int, of_result: int, parts: int, gets_result: bool = True) -> int:
    """Elements along a dim, of n of an operand and so many of the result, both in so many parts: how many the part
    lacks that lacks most, which makes its part of the result; or, of a slice, of the operand."""
    most = 0
    for i in range(parts) if parts <= _MOST_PARTS else (k * (parts - 1) // (_MOST_PARTS - 1)
                                                        for k in range(_MOST_PARTS)):
        (first, stop), (low, high) = split_range(n, parts, i), shift.reads(n, split_range(of_result, parts, i))
        wanted = high - low if gets_result else stop - first
        most = max(most, wanted - max(0, min(stop, high) - max(first, low)))
    return most


def offer_shifts(call: Call, operands: list[Spec]) -> Offer | None:
    """Of such an op, where a dim is split that it moves elements along: what each rank lacks of its part."""
    if not call.tensors[0].dim() or has_symbols([v for v in tree_leaves(list(call.values.values()))
                                                 if not isinstance(v, torch.Tensor)]):
        return None
    if any(own.symbolic or own.lazy_bits for own in operands):
        return None
    plan = _PLANS[call.func](call)
    home = _home(plan, operands) if plan is not None else None
    if plan is None or home is None:
        return None
    received = sum(_missing(one, home, plan.shape) * operands[one.operand].dtype.itemsize for one in plan.placed
                   if operands[one.operand].layout.without_partials is home)
    taken = {one.operand for one in plan.placed} | {plan.base}
    wants = tuple(home if q in taken else own.layout for q, own in enumerate(operands))
    return Offer(NAME, wants, (home,), float(largest_part(home, plan.shape)), (boxings_to(operands, wants),),
                 int(received > 0), received, returns=False)


def _missing(placed: ShiftedPart, home: Layout, of_result: Shape) -> int:
    """Elements that the rank lacks that lacks most, where the operand is laid out as the result."""
    held, missing = 1, 1
    for d, (shift, n, size) in enumerate(zip(placed.shifts, placed.shape, of_result)):
        rows = -(-n // home.num_parts(d))
        held, missing = held * rows, missing * (rows + missing_rows(shift, n, size, home.num_parts(d)))
    return missing - held


@remembered
def _rows_for(placed: ShiftedPart, home: Layout, of_result: Shape, axes: tuple[int, ...]) -> Layout:
    return regions_by(home.placement, _ShiftedRows(placed, home, of_result), None, home, axes)


def is_hard_to_flip(call: Call) -> bool:
    """Is it of a dtype that torch's kernel of flip takes where whole rows change places, and no part of such a tensor?
    """
    return call["self"].dtype in WIDER


def flip_wider(call: Call, run: Run) -> GlobalLike:
    """flip, of a dtype that its kernel takes."""
    x = call["self"]
    wide = run(aten._to_copy.default, x, dtype=WIDER[x.dtype])
    return run(aten._to_copy.default, run(aten.flip.default, wide, call["dims"]), dtype=x.dtype)


def shifted(call: Call, run: Run) -> GlobalLike:
    """The result, laid out as `offer` says."""
    op, plan = str(call.func), _PLANS[call.func](call)
    like = next(t for t in call.tensors if is_global(t))
    tensors = [as_global(run, t, like, op) for t in call.tensors]
    home = _home(plan, [t.spec for t in tensors]) if plan is not None else None
    assert plan is not None and home is not None     # as it was offered
    axes = tuple(axis for axis, s in enumerate(home.sbp) if s.is_split and s.dim in plan.moved)
    sources = [tensors[one.operand] for one in plan.placed]
    wanted = [_rows_for(one, home, plan.shape, axes) for one in plan.placed]
    if plan.base is not None:
        sources, wanted = [*sources, tensors[plan.base]], [*wanted, home]
    pieces = run.gather_regions(sources, wanted, op)
    result, shards = _result_spec(call.func, _without_tensors(call), tuple(t.spec for t in tensors), home), {}
    for rank in pieces[0]:
        region, size = home.region(plan.shape, rank), result.local_shape(rank)
        shard = pieces[0][rank].new_empty_strided(size, dense(size, result.stride), dtype=result.dtype)
        if plan.base is not None:
            shard.copy_(pieces[-1][rank])
        elif plan.fill is not None:
            shard.fill_(plan.fill)
        for one, piece in zip(plan.placed, pieces):
            shard[one.places(one.reads(region), region)] = piece[rank]
        shards[rank] = shard
    return run.wrap(result, shards)


@remembered
def _result_spec(func: OpOverload, values: tuple[Any, ...], operands: tuple[Spec, ...], home: Layout) -> Spec:
    """The result's spec; in `values`, ... stands for an operand."""
    with without_modes():                            # a trace would take these for its own tensors
        left = [torch.empty_strided(own.shape, own.stride, dtype=own.dtype, device="meta") for own in operands]
        result = meta(func, [left.pop(0) if v is ... else [left.pop(0) for _ in v] if type(v) is tuple and ... in v else
                             v for v in values], {})
        t = as_on(home.placement.type, func, operands, result)
    return spec(home, tuple(t.shape), t.stride(), t.dtype)


def _without_tensors(call: Call) -> tuple[Any, ...]:
    """The arguments of a call, with ... for operands."""
    def number(v: Any) -> Any:
        if isinstance(v, (list, tuple)):
            return tuple(map(number, v))
        return ... if isinstance(v, torch.Tensor) else v

    return tuple(map(number, call.values.values()))
