"""Which part of a tensor a rank holds: the only shard arithmetic of the library.

A *layout* is a placement and an nd-sbp. Every shard is a box of the global tensor, one (start, stop) per dim, found
axis by axis, outermost first: S(d) cuts what is left of dim d into parts as equal as they can be (n over p gives
n // p + (i < n % p)), B and P leave it. Fewer elements than ranks leaves empty boxes.

A *spec* is what a global tensor is without its data: layout, shape, strides, dtype. Both are interned, so that the
hot paths compare and hash them by identity.

*Windows* are for what no nd-sbp can say: a box of its own for every rank, overlapping or out of turn (the neighbours'
rows that a convolution needs, the part of a sequence whose turn it is, the tokens of some experts).
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod

import torch

from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import NdSbp, broadcast

Box = tuple[tuple[int, int], ...]
Shape = tuple[int, ...]

_layouts: dict[tuple[placement, NdSbp], Layout] = {}
_specs: dict[tuple, Spec] = {}
_windows: dict[tuple, Windows] = {}


class Layout:
    """A placement and one sbp per axis, split dims counted from the start. Made by `layout()`, equal by identity."""

    __slots__ = ("placement", "sbp", "partial", "_boxes")

    def __init__(self, where: placement, sbp: NdSbp) -> None:
        self.placement, self.sbp = where, sbp
        self.partial = any(s.is_partial for s in sbp)
        self._boxes: dict[tuple[Shape, int], Box] = {}

    def __repr__(self) -> str:
        return f"{self.placement} {sbp_text(self.sbp)}"

    def __reduce__(self) -> tuple:
        return layout, (self.placement, self.sbp)

    def box(self, shape: Shape, rank: int) -> Box:
        """The part of a tensor of `shape` that `rank` holds; ranks of the placement only."""
        found = self._boxes.get((shape, rank))
        if found is None:
            if len(self._boxes) > 10_000:
                self._boxes.clear()
            found = self._boxes[shape, rank] = self._cut(shape, rank)
        return found

    def _cut(self, shape: Shape, rank: int) -> Box:
        box = [(0, n) for n in shape]
        for s, parts, index in zip(self.sbp, self.placement.shape, self.placement.coords[rank]):
            if s.is_split:
                start, stop = box[s.dim]
                first, last = cut(stop - start, parts, index)
                box[s.dim] = (start + first, start + last)
        return tuple(box)

    def local_shape(self, shape: Shape, rank: int) -> Shape:
        """The shape of that part."""
        return tuple(stop - start for start, stop in self.box(shape, rank))

    def ways(self, dim: int) -> int:
        """Into how many parts dim `dim` is cut."""
        return prod(p for s, p in zip(self.sbp, self.placement.shape) if s.is_split and s.dim == dim)

    @property
    def dual(self) -> Layout:
        """The layout of the gradient."""
        return layout(self.placement, tuple(s.dual for s in self.sbp))

    @property
    def whole(self) -> Layout:
        """All broadcast on the same placement."""
        return layout(self.placement, (broadcast,) * self.placement.ndim)

    @property
    def settled(self) -> Layout:
        """The same without pending sums: broadcast where they were."""
        return layout(self.placement, tuple(broadcast if s.is_partial else s for s in self.sbp))

    def with_sbp(self, sbp: NdSbp) -> Layout:
        return layout(self.placement, sbp)


def layout(where: placement, sbp: NdSbp) -> Layout:
    """The one Layout object for this placement and nd-sbp."""
    found = _layouts.get((where, sbp))
    if found is None:
        found = _layouts[where, sbp] = Layout(where, sbp)
    return found


class Windows(Layout):
    """A box of its own for every rank. On pending axes the value is the sum of what the ranks hold, zero where none
    holds any; on broadcast ones several may hold the same. Made by `windows()`; for boxing, not for tensors."""

    __slots__ = ("boxes",)

    def __init__(self, where: placement, sbp: NdSbp, boxes: tuple[Box, ...]) -> None:
        super().__init__(where, sbp)
        self.boxes = dict(zip(where.flat, boxes))

    def __repr__(self) -> str:
        return f"{self.placement} windows"

    def box(self, shape: Shape, rank: int) -> Box:
        return self.boxes[rank]


def windows(where: placement, boxes: Mapping[int, Box], sbp: NdSbp | None = None) -> Windows:
    """The one Windows object for these boxes, one per rank of the placement; `sbp` has B and P only (None: all B)."""
    key = (where, sbp or (broadcast,) * where.ndim, tuple(boxes[rank] for rank in where.flat))
    found = _windows.get(key)
    if found is None:
        if len(_windows) > 10_000:
            _windows.clear()
        found = _windows[key] = Windows(*key)
    return found


def cut(n: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index` of n things in `parts` parts: n // parts + (index < n % parts) of them."""
    size, more = divmod(n, parts)
    start = index * size + min(index, more)
    return start, start + size + (index < more)


def meet(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None."""
    both = []
    for (a0, a1), (b0, b1) in zip(a, b):
        low, high = (a0 if a0 > b0 else b0), (a1 if a1 < b1 else b1)
        if low >= high:
            return None
        both.append((low, high))
    return tuple(both)


def volume(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def slices(box: Box, within: Box) -> tuple[slice, ...]:
    """Index of `box` in a shard that holds `within`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, within))


def sbp_text(sbp: NdSbp) -> str:
    """S(0) for one axis, (S(0), B) for several: as it is written."""
    return repr(sbp[0]) if len(sbp) == 1 else repr(tuple(sbp))


class Spec:
    """Layout, global shape, global strides and dtype of a global tensor. Made by `spec()`, equal by identity.

    `copied` marks a view that had to be boxed, so that it is a copy of what it was made from.
    """

    __slots__ = ("layout", "shape", "stride", "dtype", "ndim", "numel", "nbytes", "copied")

    def __init__(self, where: Layout, shape: Shape, stride: Shape, dtype: torch.dtype, copied: bool = False) -> None:
        self.layout, self.shape, self.stride, self.dtype, self.copied = where, shape, stride, dtype, copied
        self.ndim, self.numel = len(shape), prod(shape)
        self.nbytes = self.numel * dtype.itemsize

    def __repr__(self) -> str:
        return f"{list(self.shape)} {self.dtype} on {self.layout}"

    @property
    def placement(self) -> placement:
        return self.layout.placement

    @property
    def sbp(self) -> NdSbp:
        return self.layout.sbp

    def on(self, where: Layout) -> Spec:
        """The same tensor in another layout."""
        return self if where is self.layout else spec(where, self.shape, self.stride, self.dtype)

    def box(self, rank: int) -> Box:
        return self.layout.box(self.shape, rank)

    def local_shape(self, rank: int) -> Shape:
        return self.layout.local_shape(self.shape, rank)


def spec(where: Layout, shape: Shape, stride: Shape | None, dtype: torch.dtype, copied: bool = False) -> Spec:
    """The one Spec object for these; `stride` None means contiguous."""
    key = (where, shape, stride, dtype, copied)
    found = _specs.get(key)
    if found is None:
        if len(_specs) > 100_000:
            _specs.clear()                           # specs in use live on; equal new ones miss a cache once
        found = Spec(where, shape, contiguous(shape) if stride is None else stride, dtype, copied)
        found = _specs.setdefault((where, shape, found.stride, dtype, copied), found)
        _specs[key] = found
    return found


@lru_cache(10_000)
def contiguous(shape: Shape) -> Shape:
    """The strides of a contiguous tensor, as torch counts them (a size of 0 counts as 1)."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
