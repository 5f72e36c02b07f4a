"""One step of a boxing: what every rank takes from whom.

A step from layout `src` to layout `dst` is specified by what the destination wants. Rank r wants a box of the global
tensor; each *piece* of that box is the reduction of the parts that some source ranks hold of it:

    S(0) -> B   on 2 ranks    r0: [0:4] from r0, [4:8] from r1          a piece each, one source each (all-gather)
    P -> S(0)   on 2 ranks    r0: [0:4] from r0 + r1                    one piece, summed             (reduce-scatter)
    S(0) -> S(1)              r0: [0:4, 0:3] from r0, [4:8, 0:3] from r1                              (all-to-all)

So one kind of step serves every pair of layouts, of one placement or two, and the bytes it moves follow from it. A
rank takes its own part where it holds one; where several hold the same, readers are spread over them. What no piece
covers is zero: a rank's share of a pending sum.
"""
from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from globaltensor.layout import Box, Layout, Shape, cut, meet, volume


class Piece(NamedTuple):
    """`box` of the global tensor is the reduction of the parts of these ranks, in this order."""

    box: Box
    sources: tuple[int, ...]


class Route(NamedTuple):
    """What every destination rank takes: `pieces[rank]`, reduced by `op` where a piece has several sources."""

    pieces: dict[int, tuple[Piece, ...]]
    op: str


class Traffic(NamedTuple):
    """Elements that cross between ranks in one step: by the rank that receives most, and sends most."""

    received: int
    sent: int
    touched: int                                     # by the rank that reads most, its own part included


def kept_partial(src: Layout, dst: Layout) -> tuple[bool, ...]:
    """Per axis of src: does a pending sum stay pending?"""
    same = src.placement == dst.placement
    return tuple(same and a.is_partial and a == b for a, b in zip(src.sbp, dst.sbp if same else src.sbp))


@lru_cache(20_000)
def route(src: Layout, dst: Layout, shape: Shape) -> Route:
    """The pieces of one step. All pending axes of src that do not stay pending must share one op."""
    kept = kept_partial(src, dst)
    ops = {s.op for s, k in zip(src.sbp, kept) if s.is_partial and not k}
    assert len(ops) <= 1, f"one step cannot reduce {src.sbp}"
    holders = _holders(src, shape)
    pieces: dict[int, tuple[Piece, ...]] = {}
    for index, rank in enumerate(dst.placement.flat):
        wanted = _wanted(src, dst, shape, rank, kept)
        pieces[rank] = tuple(_cover(wanted, rank, index, holders, src, kept)) if wanted is not None else ()
    return Route(pieces, ops.pop() if ops else "")


def _wanted(src: Layout, dst: Layout, shape: Shape, rank: int, kept: tuple[bool, ...]) -> Box | None:
    """The box whose value `rank` takes over; less than it holds in `dst` where dst is a pending sum, None for nothing.

    B -> P gives the value to the first rank of the axis; S(d) -> P leaves each rank its own part of dim d.
    """
    box = dst.box(shape, rank)
    same = src.placement == dst.placement
    for axis, (s, index) in enumerate(zip(dst.sbp, dst.placement.coords[rank])):
        if not s.is_partial or s.op != "sum" or (same and kept[axis]):
            continue                                 # max and min of equal values is that value: every rank takes it
        was = src.sbp[axis] if same else None
        if was is not None and was.is_split:
            start, stop = box[was.dim]
            first, last = cut(stop - start, dst.placement.shape[axis], index)
            box = (*box[:was.dim], (start + first, start + last), *box[was.dim + 1:])
        elif index:
            return None
    return box


def _holders(src: Layout, shape: Shape) -> dict[tuple[int, ...], dict[Box, list[int]]]:
    """Coordinates on the pending axes -> box -> the ranks that hold it."""
    found: dict[tuple[int, ...], dict[Box, list[int]]] = {}
    for rank in src.placement.flat:
        at = tuple(i for i, s in zip(src.placement.coords[rank], src.sbp) if s.is_partial)
        found.setdefault(at, {}).setdefault(src.box(shape, rank), []).append(rank)
    return found


def _cover(wanted: Box, rank: int, index: int, holders: dict, src: Layout, kept: tuple[bool, ...]) -> list[Piece]:
    """`wanted` cut along the boxes that src holds, each piece with one source per term of the reduction."""
    fixed = [src.placement.coords[rank][axis] if keep else None
             for axis, (s, keep) in enumerate(zip(src.sbp, kept)) if s.is_partial]
    terms = [boxes for at, boxes in holders.items() if all(f is None or f == i for f, i in zip(fixed, at))]
    pieces = []
    for box in terms[0]:
        part = meet(box, wanted) if box else wanted
        if part is not None:
            pieces.append(Piece(part, tuple(_pick(boxes[box], rank, index) for boxes in terms)))
    return pieces


def _pick(ranks: list[int], rank: int, index: int) -> int:
    return rank if rank in ranks else ranks[index % len(ranks)]


@lru_cache(100_000)
def traffic(src: Layout, dst: Layout, shape: Shape) -> Traffic:
    """What this step moves for a tensor of `shape`."""
    sent: dict[int, int] = {}
    most = touched = 0
    for rank, pieces in route(src, dst, shape).pieces.items():
        got = read = 0
        for box, sources in pieces:
            size = volume(box)
            for source in sources:
                read += size
                if source != rank:
                    got += size
                    sent[source] = sent.get(source, 0) + size
        most, touched = max(most, got), max(touched, read)
    return Traffic(most, max(sent.values(), default=0), touched)


def received(src: Layout, dst: Layout, shape: Shape) -> dict[int, int]:
    """Elements that each destination rank receives from others in this step."""
    return {rank: sum(volume(box) for box, sources in pieces for source in sources if source != rank)
            for rank, pieces in route(src, dst, shape).pieces.items()}
