"""Writes through boxed views: they go to the memory of the base, and move at most what is written.

An elementwise op is done by every rank on what it holds of the view, where that lies: `x[2].add_(1)` moves nothing,
`x[1:] = y` the parts of y. Any other op is done on the view's value, which is then written to the base. Below autograd
both look like a write in place, so gradients are torch's own business.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from globaltensor.algorithms.aliasing import ViewSteps, base_and_steps, has_own_memory, replay_views, value_spec
from globaltensor.algorithms.run import Run
from globaltensor.algorithms.strided_memory import beyond_memory
from globaltensor.dispatch import foreach
from globaltensor.errors import InPlaceError, PlacementError
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import Spec, contiguous, lazy_bits_of
from globaltensor.layouts.rank_regions import rank_regions
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.regions import Region
from globaltensor.layouts.view_parts import (
    Straight,
    Strided,
    laid_out,
    overlaps_itself,
    repeats_elements,
    scattered_elements,
    straight,
)
from globaltensor.rules.call import Call, written
from globaltensor.runtime.agreement import compare_plain
from globaltensor.runtime.meta import meta
from globaltensor.runtime.torch_internals import OpOverload, is_of_a_trace, storage_id, without_modes

aten = torch.ops.aten
# One value for all elements, so that several of them may be one in memory.
_FILLING = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
# What the elements were does not count.
_OVERWRITING = {aten.copy_.default, *_FILLING}
# Elementwise, though torch does not tag them so.
_ELEMENTWISE = {*_OVERWRITING, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor}


def writes_view(call: Call) -> bool:
    """Does the op write into a boxed view? (`unsqueeze_` and others change what the view is, not its elements.)"""
    return torch.Tag.inplace_view not in call.func.tags and any(is_global(t) and t.spec.copied for t in written(call))


def write_through(call: Call, run: Run) -> Any:
    """An op that writes into boxed views."""
    if foreach.is_foreach(call.func) and len(call.values["self"]) > 1:
        return foreach.one_by_one(call, run)         # one may see what another one wrote
    views = [t for t in written(call) if is_global(t) and t.spec.copied]
    if call.func not in _OVERWRITING and any(_base(view)[1].repeats for view in views):
        return _write_to_whole_bases(call, run, views)
    if len(written(call)) == 1 and views[0] is call.tensors[0] and _is_elementwise(call):
        target = _Target(call.func, views[0])
        # Done on the terms of a pending sum, an op is not done on the sum. But a value that replaces the sum can be
        # laid out as one: all of it on the first rank.
        if not target.position.lazy_bits and (not target.pending or call.func in _OVERWRITING):
            if not target.is_same(call):
                _write_elements(call, run, target)
            return views[0] if call.func._schema.returns else None
    targets = [(_Target(call.func, view), view) for view in views]
    values = {id(view): target.value(run, str(call.func)) for target, view in targets}
    result = _run_on(values, views, call, run)
    for target, view in targets:
        _write_value(run, target, values[id(view)], str(call.func))
    return result


def _run_on(values: dict[int, Any], views: Sequence[Any], call: Call, run: Run) -> Any:
    """Run the op on the values of views, by the ids of these; it returns the views."""
    args, kwargs = call.arguments_with([values.get(id(t), t) for t in call.tensors])
    result = run(call.func, *args, **kwargs)
    view_of = {id(values[id(view)]): view for view in views}
    if isinstance(result, (tuple, list)):
        return type(result)(view_of.get(id(r), r) for r in result)
    return view_of.get(id(result), result)


def _write_to_whole_bases(call: Call, run: Run, views: Sequence[Any]) -> Any:
    """Windows that overlap are written to as in one piece: an element of several of them has one value."""
    wholes: dict[int, tuple[Any, Any]] = {}          # by the id of a base, with it
    values = {}
    for view in views:
        base, steps = base_and_steps(view)
        if id(base) not in wholes:
            whole, = run.redistribute([base], [base.spec.layout.replicated], str(call.func))
            shards = {rank: laid_out(t, base.spec.shape, base.spec.stride) for rank, t in whole.shards.items()}
            wholes[id(base)] = base, run.wrap(whole.spec, shards)
        values[id(view)] = replay_views(steps, wholes[id(base)][1], run)
    result = _run_on(values, views, call, run)
    for base, whole in wholes.values():
        run(aten.copy_.default, base, whole)
    return result


def _is_elementwise(call: Call) -> bool:
    func = call.func
    if foreach.is_foreach(func):                     # of one element; a scalar per element may be in a tensor
        return all(s.item is not None or not t.dim() for s, t in zip(call.slots, call.tensors))
    return func in _ELEMENTWISE or (torch.Tag.pointwise in func.tags
                                    and torch.Tag.nondeterministic_seeded not in func.tags)


def _write_elements(call: Call, run: Run, target: _Target) -> None:
    """Every rank runs the op on the elements that it holds."""
    others = [target.parts_of(t, run, str(call.func)) for t in call.tensors[1:]]
    for rank, piece in target.pieces.items():
        if target.holds_zeros(rank):
            piece.elements.zero_()
        else:
            args, kwargs = call.arguments_with([piece.elements, *[parts[rank] for parts in others]])
            call.func(*args, **kwargs)
        piece.put_back()


def _write_value(run: Run, target: _Target, value: GlobalLike, op: str) -> None:
    """Every rank takes of the view's value the elements that it holds."""
    if target.position.lazy_bits:
        value = run(aten.conj_physical.default, value) if "conj" in target.position.lazy_bits else value
        value = run(aten.neg.default, value) if "neg" in target.position.lazy_bits else value
    parts = target.parts_of(value, run, op)
    for rank, piece in target.pieces.items():
        if target.holds_zeros(rank):
            piece.elements.zero_()
        else:
            piece.elements.copy_(parts[rank])
        piece.put_back()


class _Piece:
    """What a rank holds of a view: `elements`, where they lie if the view runs straight, else taken from there."""

    def __init__(self, shard: Tensor, region: Region, position: _Position) -> None:
        self.part = self._in_view = None
        if position.line is not None:
            self.part = position.line.part(region)
            self.empty = self.part is None
            if self.part is not None:
                self.elements = position.line.slice_of(region, self.part).of(shard)
            return
        self._shape, self._shard = position.view.shape, shard
        inside, index = scattered_elements(position.memory, position.view, region)
        self._in_view = _indices_of(inside, position, region)
        self._index = tuple(i[self._in_view] for i in index)
        self.elements = shard[self._index]
        self.empty = not self.elements.numel()

    def cut(self, whole: Tensor) -> Tensor:
        """The same elements of a tensor that is broadcast to the view's shape."""
        if not whole.dim():
            return whole
        if self.part is None:
            return whole.expand(self._shape)[self._in_view]
        return whole[tuple(slice(0, 1) if n == 1 else slice(*r) for n, r in _ranges_of(whole.shape, self.part))]

    def put_back(self) -> None:
        """Write elements that were taken to where they lie."""
        if self._in_view is not None:
            self._shard[self._index] = self.elements


def _indices_of(inside: Tensor, position: _Position, region: Region) -> tuple[Tensor, ...]:
    """Where a mask is set that tells which elements of a view lie in a region of the base. A graph is asked for none of
    its values: how many are set is computed outside of it."""
    if not is_of_a_trace(inside):
        return inside.nonzero(as_tuple=True)
    with without_modes():
        mask, _ = scattered_elements(position.memory, position.view, region)
        count = int(mask.sum())
    return inside.nonzero_static(size=count).unbind(1)


def _ranges_of(shape: Sequence[int], part: Region) -> list[tuple[int, tuple[int, int]]]:
    """The dims of an operand beside those of a part of the view, the last with the last."""
    return list(zip(shape, part[len(part) - len(shape):]))


class _Position(NamedTuple):
    """Where the elements of a view are in the memory of its base. `lazy_bits` ("conj", "neg") are what torch would do
    to elements when it reads them; `line` is None where the view's dims do not run along those of the base; `repeats`
    tells of windows that overlap."""

    memory: Strided
    view: Strided
    line: Straight | None
    dtype: torch.dtype
    lazy_bits: frozenset[str]
    repeats: bool


class _View(NamedTuple):
    """Elements of this dtype in the memory of a base, and what torch would do to them."""

    at: Strided
    dtype: torch.dtype
    lazy_bits: frozenset[str]


def _without_elements(base: Spec) -> Tensor:
    """A tensor laid out as the whole base is in memory, on the meta device."""
    return torch.empty_strided(base.shape, base.stride, dtype=base.dtype, device="meta")


@remembered
def _view_of_whole(base: Spec, steps: ViewSteps) -> _View:
    """The view at the end of a chain, as if the base were in one piece."""
    view = replay_views(steps, _without_elements(base), lambda func, *args, **named: meta(func, args, named))
    at = Strided(tuple(view.shape), view.stride(), int(view.storage_offset()))
    return _View(at, view.dtype, lazy_bits_of(view))


@remembered
def _position(base: Spec, steps: ViewSteps) -> _Position:
    """Raises InPlaceError for a view whose elements are parts of those of the base, or several of them."""
    view = _view_of_whole(base, steps)
    memory = _as_dtype(_without_elements(base), view.dtype)
    # of what is expanded there is one in memory
    of_memory = Strided(tuple(n if step else min(n, 1) for n, step in zip(memory.shape, memory.stride())),
                        memory.stride())
    repeats = not overlaps_itself(view.at) and repeats_elements(view.at)
    return _Position(of_memory, view.at, straight(of_memory, view.at), view.dtype, view.lazy_bits, repeats)


def _as_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory as elements of another dtype, with one dim at least."""
    t = t if t.dim() else t.unsqueeze(0)
    if t.dtype == dtype:
        return t
    if t.dtype.is_complex and t.dtype.to_real() == dtype:
        return torch.view_as_real(t)
    if dtype.is_complex and dtype.to_real() == t.dtype and t.shape[-1] == 2:     # else ranks have halves of pairs
        return torch.view_as_complex(t)
    if t.dtype.itemsize == dtype.itemsize:
        return t.view(dtype)
    raise InPlaceError(f"a view of {t.dtype} as {dtype} that needs a boxing, written to or taken apart by strides",
                       "its elements are parts of, or several of, those of the tensor it was made from",
                       "clone() the view first; to write, write into the tensor itself")


def _base(view: Any) -> tuple[Any, _Position]:
    """The tensor with memory at the end of the chain, and where the view is in it."""
    base, steps = base_and_steps(view)
    return base, _position(base.spec, steps)


def start_in_base(t: Any) -> int:
    """How many bytes into the memory at the end of its chain a tensor begins."""
    base, steps = base_and_steps(t)
    view = _view_of_whole(base.spec, steps)
    return view.at.offset * view.dtype.itemsize


def same_memory(base: Any, other: Any) -> bool:
    """Do two tensors with memory have it in the same place? (In a graph it has no addresses.)"""
    return base.spec is other.spec and all(
        storage_id(shard) == storage_id(other.shards[rank])
        and shard.storage_offset() == other.shards[rank].storage_offset() for rank, shard in base.shards.items())


def position_of(base: Spec, call: Call) -> _Position:
    """Where the elements of the view that a call makes of this base are."""
    values = tuple(tuple(v) if isinstance(v, list) else v for v in list(call.values.values())[1:])
    return _position(base, ((call.func, values, 0),))


def restride(call: Call, run: Run) -> Any:
    """as_strided of a tensor that must be boxed: sizes and strides speak of the memory at the end of the chain, so they
    are those of a view of it, with its dims in their order in memory. Windows along a dim, as in torch.stft, are what
    unfold views.

    Raises PlacementError where that has gaps, and for an offset in the memory of a view; torch's error beyond it.
    """
    unfolded = _as_unfold(call)
    if unfolded is not None:
        dim, width, step = unfolded
        return run(aten.slice.Tensor, run(aten.unfold.default, call["self"], dim, width, step), dim, 0,
                   call["size"][dim])
    base, position = _base(call.tensors[0])
    dense = run(aten.permute.default, base, sorted(range(base.dim()), key=lambda d: -base.stride(d)))
    absolute, size, stride = call["storage_offset"], call["size"], call["stride"]
    offset = position.view.offset if absolute is None else absolute
    beyond, own = beyond_memory(base, size, stride, offset), has_own_memory(base)
    if dense.spec.stride != contiguous(dense.spec.shape) or position.dtype != base.dtype or position.lazy_bits or (
            (base is not call.tensors[0] or not own) and absolute is not None) or (beyond and not own):
        raise PlacementError("as_strided of a tensor that must be boxed for it, and is a view",
                             "strides speak of memory, and what is boxed has other memory", "x.clone() first")
    if beyond:
        raise beyond
    return run.plain(Call(call.func, (dense, size, stride, offset), {}))


def _as_unfold(call: Call) -> tuple[int, int, int] | None:
    """The dim along which as_strided views windows of its operand, how wide they are and how far apart; None for what
    else it may view."""
    x, size, stride = call["self"], call["size"], call["stride"]
    if call["storage_offset"] is not None or len(size) != x.dim() + 1 or not all(size):
        return None
    others = [n == size[d] and (step == stride[d] or n == 1) for d, (n, step) in enumerate(zip(x.shape, x.stride()))]
    for d, own in enumerate(x.stride()):
        if own and stride[-1] == own and stride[d] > 0 and not stride[d] % own and all(others[:d] + others[d + 1:]):
            step = stride[d] // own
            return (d, size[-1], step) if (size[d] - 1) * step + size[-1] <= x.shape[d] else None
    return None


class _Target:
    """The memory that a write through a boxed view goes to.

    view        the view
    base        the tensor with memory, at the end of the chain
    pending     whether its value is the sum, maximum or minimum of what ranks hold
    pieces      what every rank of this process holds of the view; ranks that hold nothing are left out
    """

    def __init__(self, func: OpOverload, view: GlobalLike) -> None:
        self.view = view
        self.base, self.position = _base(view)
        self.pending = any(s.is_partial for s in self.base.spec.sbp)
        if view.spec.numel and (overlaps_itself(self.position.view) and func not in _FILLING or self._holds_copies()):
            raise InPlaceError(f"{func} into a view of which several elements are one in memory",
                               "an expanded tensor cannot take a value for each of its elements",
                               "clone() the tensor first")
        pieces = {rank: _Piece(self._memory(shard), self._region(rank), self.position)
                 for rank, shard in self.base.shards.items()} if view.spec.numel else {}
        self.pieces = {rank: piece for rank, piece in pieces.items() if not piece.empty}

    def _holds_copies(self) -> bool:
        """Is what strides call one element several of them on a rank?"""
        repeated = [d for d, step in enumerate(self.base.spec.stride) if not step]
        return any(shard.shape[d] > 1 and shard.stride(d) for shard in self.base.shards.values() for d in repeated)

    def _memory(self, shard: Tensor) -> Tensor:
        """The shard as elements of the view's dtype, without those that are there by `expand`."""
        shard = _as_dtype(shard, self.position.dtype)
        for d, (n, step) in enumerate(zip(self.position.memory.shape, self.position.memory.stride)):
            shard = shard if step or n == shard.shape[d] else shard.narrow(d, 0, n)
        return shard

    def holds_zeros(self, rank: int) -> bool:
        """Of a pending sum the first rank holds the value, the others zero."""
        coords = self.base.placement.coords[rank]
        return any(i > 0 and s.op == "sum" for i, s in zip(coords, self.base.sbp))

    def is_same(self, call: Call) -> bool:
        """Is this a copy of elements to where they are? (`x[2] += 1` adds to x[2], and then assigns it.)"""
        if call.func is not aten.copy_.default or not is_global(source := call.tensors[1]) or not source.spec.copied \
                or source.dtype != self.position.dtype:
            return False
        # only what may be the same is looked for in memory: a value may be a view that nothing can be written to
        base, steps = base_and_steps(source)
        return same_memory(base, self.base) and _position(base.spec, steps) == self.position

    def value(self, run: Run, op: str) -> GlobalLike:
        """The view's value, in its layout, as a tensor of its own."""
        own = self.view.spec
        if self.position.line is None or self.pending or self.position.lazy_bits or not own.ndim or not own.numel:
            return run.wrap(value_spec(own), {rank: shard.clone() for rank, shard in self.view.shards.items()})
        nothing = ((0, 0),) * own.ndim
        regions = {rank: self.position.line.part(self._region(rank)) or nothing for rank in own.placement.flat}
        parts = {rank: self.pieces[rank].elements if rank in self.pieces else
                 shard.new_empty((0,) * own.ndim, dtype=own.dtype) for rank, shard in self.base.shards.items()}
        held = rank_regions(own.placement, regions)
        return run.scatter_add_regions(parts, held, own, op)

    def parts_of(self, t: Any, run: Run, op: str) -> dict[int, Tensor]:
        """What every rank needs of an operand that is broadcast to the view's shape."""
        if not is_global(t):
            compare_plain(t, f"a plain operand of {op}", self.base.placement.flat)
            return {rank: piece.cut(t) for rank, piece in self.pieces.items()}
        own = t.spec
        if all(s.is_broadcast for s in own.sbp):
            shards = t.shards                        # by every rank: a boxed view is made together
            return {rank: piece.cut(shards[rank]) for rank, piece in self.pieces.items()}
        if self.position.line is None or not own.ndim or not self.view.spec.numel:
            whole, = run.redistribute([t], [own.layout.replicated], op)
            return {rank: piece.cut(whole.shards[rank]) for rank, piece in self.pieces.items()}
        wanted = {rank: self.position.line.part(self._region(rank)) for rank in own.placement.flat}
        regions = {rank: tuple((0, 0) if part is None else (0, 1) if n == 1 else r
                               for n, r in _ranges_of(own.shape, part or ((0, 0),) * self.view.spec.ndim))
                   for rank, part in wanted.items()}
        parts, = run.gather_regions([t], [rank_regions(own.placement, regions)], op)
        return parts

    def _region(self, rank: int) -> Region:
        region = self.base.spec.region(rank)
        dims = len(self.position.memory.shape)
        if dims > len(region):                       # a 0-dim tensor as one of 1 dim, a complex one as pairs
            return (*region, (0, self.position.memory.shape[-1]))
        return region[:dims]
