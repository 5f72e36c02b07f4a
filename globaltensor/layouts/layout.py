"""Which part of a tensor each rank holds: the only shard arithmetic of the library.

A *layout* is a placement and an nd-sbp. Every shard is a region of the global tensor (regions.py), found axis by axis,
outermost first: S(d) splits what is left of dim d into parts as equal as they can be (n over p gives
n // p + (i < n % p)), B and P leave it. Fewer elements than ranks leaves empty shards.

A *spec* is what a global tensor is without its data: layout, shape, strides, dtype. Both are interned, so that the
hot paths compare and hash them by identity.
"""
from __future__ import annotations

from collections.abc import Mapping
from math import prod
from weakref import WeakValueDictionary

import torch

from globaltensor.layouts.placement import placement
from globaltensor.layouts.recent import Recent, remembered, shared
from globaltensor.layouts.regions import Region, split_range
from globaltensor.layouts.sbp import NdSbp, Sbp, broadcast, with_axes
from globaltensor.layouts.symbols import expected, has_symbols, known_sizes

Shape = tuple[int, ...]
Shards = dict[int, torch.Tensor]                     # rank -> its part, for the ranks that this process drives

# what nobody holds any more is released
_layouts: WeakValueDictionary[tuple[placement, NdSbp], Layout] = WeakValueDictionary()
_specs: WeakValueDictionary[tuple[Layout, Shape, Shape | None, torch.dtype, bool, frozenset[str]], Spec] = (
    WeakValueDictionary())
_NO_BITS: frozenset[str] = frozenset()


@shared
class Layout:
    """A placement and one sbp per axis, split dims counted from the start. Made by `layout()`, equal by identity."""

    __slots__ = ("placement", "sbp", "partial", "_regions", "__weakref__")

    def __init__(self, where: placement, sbp: NdSbp) -> None:
        self.placement, self.sbp = where, sbp
        self.partial = any(s.is_partial for s in sbp)
        self._regions: Recent[tuple[Shape, int], Region] = Recent()

    def __repr__(self) -> str:
        return f"{self.placement} {sbp_text(self.sbp)}"

    def __reduce__(self) -> tuple[object, ...]:
        return layout, (self.placement, self.sbp)    # interned where it is unpickled: equal is identical

    def __deepcopy__(self, memo: object) -> Layout:
        return self

    def region(self, shape: Shape, rank: int) -> Region:
        """The part of a tensor of `shape` that `rank` holds; ranks of the placement only."""
        if has_symbols(shape):
            return self._split(shape, rank)
        known = self._regions.get((shape, rank))
        if known is None:
            known = self._regions[shape, rank] = self._split(shape, rank)
        return known

    def _split(self, shape: Shape, rank: int) -> Region:
        region = [(0, n) for n in shape]
        for s, parts, index in zip(self.sbp, self.placement.shape, self.placement.coords[rank]):
            if s.is_split:
                start, stop = region[s.dim]
                first, last = split_range(stop - start, parts, index)
                region[s.dim] = (start + first, start + last)
        return tuple(region)

    def local_shape(self, shape: Shape, rank: int) -> Shape:
        """The shape of that part."""
        return tuple(stop - start for start, stop in self.region(shape, rank))

    def num_parts(self, dim: int) -> int:
        """Into how many parts dim `dim` is split."""
        return prod(p for s, p in zip(self.sbp, self.placement.shape) if s.is_split and s.dim == dim)

    @property
    def dual(self) -> Layout:
        """The layout of the gradient."""
        return layout(self.placement, tuple(s.dual for s in self.sbp))

    @property
    def replicated(self) -> Layout:
        """All broadcast on the same placement."""
        return replicated(self.placement)

    @property
    def without_partials(self) -> Layout:
        """The same without pending sums: broadcast where they were."""
        return layout(self.placement, tuple(broadcast if s.is_partial else s for s in self.sbp))

    def along(self, changes: Mapping[str, Sbp]) -> Layout:
        """The same but along the axes named: `along({"dp": split(0)})`. Names that the placement lacks are left out."""
        return layout(self.placement, with_axes(self.sbp, self.placement.names, changes))

    def with_sbp(self, sbp: NdSbp) -> Layout:
        return layout(self.placement, sbp)


def layout(where: placement, sbp: NdSbp) -> Layout:
    """The one Layout object for this placement and nd-sbp. What is pending on an axis of one rank is whole, and is
    called so: nothing is left to reduce there."""
    known = _layouts.get((where, sbp))
    if known is None:
        settled = tuple(broadcast if s.is_partial and n == 1 else s for s, n in zip(sbp, where.shape))
        known = _layouts[where, sbp] = Layout(where, sbp) if settled == sbp else layout(where, settled)
    return known


def replicated(where: placement) -> Layout:
    """Broadcast along every axis of a placement."""
    return layout(where, (broadcast,) * where.ndim)


def same_parts(a: Layout, b: Layout) -> bool:
    """Does every rank hold the same in both? On an axis of one rank all layouts are alike."""
    return a is b or (type(a) is type(b) is Layout and a.placement is b.placement
                      and all(s == t or n == 1 for s, t, n in zip(a.sbp, b.sbp, a.placement.shape)))


def completes(src: Layout, dst: Layout) -> bool:
    """Does a boxing between these leave nothing pending, and change nothing else?"""
    return src.partial and dst is src.without_partials


def sbp_text(sbp: NdSbp) -> str:
    """S(0) for one axis, (S(0), B) for several: as it is written."""
    return repr(sbp[0]) if len(sbp) == 1 else repr(tuple(sbp))


@shared
class Spec:
    """Layout, global shape, global strides and dtype of a global tensor. Made by `spec()`, equal by identity.

    `copied` marks a boxed view, whose shards are copies of what its base holds. `lazy_bits` ("conj", "neg") are what
    torch will do to the elements of a view when it reads them; the shards have these bits of their own.

    `symbolic`: sizes or strides are symbols, as torch.compile has them where it traces for many sizes. Such a spec is
    equal to no other one. What is asked of a symbol (is it even? is it that of another dim?) is a condition of the
    graph, under which alone torch uses it again; `int()` makes it a graph for this size.
    """

    __slots__ = ("layout", "shape", "stride", "dtype", "ndim", "numel", "nbytes", "copied", "lazy_bits", "symbolic",
                 "__weakref__")

    def __init__(self, where: Layout, shape: Shape, stride: Shape, dtype: torch.dtype, copied: bool = False,
                 lazy_bits: frozenset[str] = _NO_BITS) -> None:
        self.layout, self.shape, self.stride, self.dtype, self.copied = where, shape, stride, dtype, copied
        self.lazy_bits, self.symbolic = lazy_bits, False
        self.ndim, self.numel = len(shape), prod(shape)
        self.nbytes = self.numel * dtype.itemsize

    def __repr__(self) -> str:
        return f"{list(self.shape)} {self.dtype} on {self.layout}"

    def __reduce__(self) -> tuple[object, ...]:
        return spec, (self.layout, self.shape, self.stride, self.dtype, self.copied, self.lazy_bits)

    def __deepcopy__(self, memo: object) -> Spec:
        return self

    @property
    def placement(self) -> placement:
        return self.layout.placement

    @property
    def sbp(self) -> NdSbp:
        return self.layout.sbp

    def on(self, where: Layout) -> Spec:
        """The same tensor in another layout."""
        return self if where is self.layout else spec(where, self.shape, self.stride, self.dtype,
                                                      lazy_bits=self.lazy_bits)

    def cast(self, dtype: torch.dtype) -> Spec:
        """The same tensor in another dtype, in memory of its own."""
        return self if dtype == self.dtype else spec(self.layout, self.shape, self.stride, dtype)

    def moved(self, where: Layout) -> Spec:
        """The same tensor after a boxing: new memory without gaps, its dims in the order of the old one."""
        if where is self.layout:
            return self
        return (_spec_moved.__wrapped__ if self.symbolic else _spec_moved)(self, where)

    @property
    def expected(self) -> Spec:
        """The same with numbers for symbols: those that torch traces with. No graph depends on them, so they may decide
        what an op costs, and never what it gives."""
        if not self.symbolic:
            return self
        return spec(self.layout, expected(self.shape), expected(self.stride), self.dtype, self.copied, self.lazy_bits)

    def region(self, rank: int) -> Region:
        return self.layout.region(self.shape, rank)

    def local_shape(self, rank: int) -> Shape:
        return self.layout.local_shape(self.shape, rank)


def spec(where: Layout, shape: Shape, stride: Shape | None, dtype: torch.dtype, copied: bool = False,
         lazy_bits: frozenset[str] = _NO_BITS) -> Spec:
    """The one Spec object for these; `stride` None means contiguous. Where torch.compile has symbols for sizes, it is a
    symbolic one of its own."""
    if any(type(n) is not int for n in (shape if stride is None else shape + stride)):
        shape, stride = known_sizes(shape), None if stride is None else known_sizes(stride)
        if has_symbols(shape) or stride is not None and has_symbols(stride):
            own = Spec(where, shape, contiguous(shape) if stride is None else stride, dtype, copied, lazy_bits)
            own.symbolic = True
            return own
    key = (where, shape, stride, dtype, copied, lazy_bits)
    known = _specs.get(key)
    if known is None:
        known = Spec(where, shape, contiguous(shape) if stride is None else stride, dtype, copied, lazy_bits)
        # Also under its strides spelled out, so that None and the strides it stands for give the same object.
        known = _specs.setdefault((where, shape, known.stride, dtype, copied, lazy_bits), known)
        _specs[key] = known
    return known


@remembered
def _spec_moved(of: Spec, where: Layout) -> Spec:
    return spec(where, of.shape, dense(of.shape, of.stride), of.dtype)


def lazy_bits_of(t: torch.Tensor) -> frozenset[str]:
    """Which of "conj" and "neg" torch will do to the elements of a view when it reads them."""
    if not t.is_conj() and not t.is_neg():
        return _NO_BITS
    return frozenset(name for name, is_set in (("conj", t.is_conj()), ("neg", t.is_neg())) if is_set)


def contiguous(shape: Shape) -> Shape:
    """The strides of a contiguous tensor, as torch counts them (a size of 0 counts as 1)."""
    return (_contiguous.__wrapped__ if has_symbols(shape) else _contiguous)(shape)


@remembered
def _contiguous(shape: Shape) -> Shape:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def dense(shape: Shape, like: Shape) -> Shape:
    """The strides of a tensor without gaps whose dims lie in memory in the order that the strides `like` tell, as those
    of `torch.empty_like`. `like` may be of a larger tensor, of which this is a part."""
    return (_dense.__wrapped__ if has_symbols(shape + like) else _dense)(shape, like)


def dense_in_order(t: torch.Tensor, like: Shape) -> torch.Tensor:
    """The tensor without gaps, its dims in memory in the order that the strides `like` tell."""
    own = dense(tuple(t.shape), like)
    if all(n == 1 or step == its for n, step, its in zip(t.shape, t.stride(), own)):
        return t
    return t.new_empty_strided(t.shape, own).copy_(t)


@remembered
def _dense(shape: Shape, like: Shape) -> Shape:
    plain = contiguous(shape)
    if 0 in shape or all(n == 1 or step == its for n, step, its in zip(shape, like, plain)):
        return plain
    # Not torch.empty_like on the meta device: its formula is Python, and loads sympy.
    order = list(range(len(shape) - 1, -1, -1))      # dims from the innermost on
    for at in range(1, len(order)):                  # sorted by insertion: broadcast dims compare with no other
        for j in range(at - 1, -1, -1):
            inner, outer = order[j], order[at]
            if not like[inner] or not like[outer] or like[inner] == like[outer] and shape[inner] <= shape[outer]:
                continue
            if like[inner] < like[outer]:
                break
            order[j], order[at], at = outer, inner, j
    strides, step = [0] * len(shape), 1
    for d in order:
        strides[d] = step
        step *= shape[d]
    return tuple(strides)
