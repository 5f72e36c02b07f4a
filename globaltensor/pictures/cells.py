"""Who holds which region of a tensor, and how the value of a region comes from what the ranks hold.

    [6, 8] on [[0, 1], [2, 3]], (S(0), P)        [0:3, 0:8] is 0 + 1,  [3:6, 0:8] is 2 + 3

A drawing has a cell for each region, with a formula: `0 = 1` hold the same (B), `0 + 1` add up to it (P). All of it
follows from the layout, so nothing is communicated.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from globaltensor.layouts.layout import Spec
from globaltensor.layouts.regions import Region, volume


class Cell(NamedTuple):
    """A region of the tensor, and the formula of the ranks that hold it."""

    region: Region
    formula: str
    rank: int                                        # the first of them: gives the colour


def cells(of: Spec) -> list[Cell]:
    """The regions that split dims cut the tensor into, in the order of their places; empty ones left out."""
    return [Cell(region, formula(of, ranks), ranks[0]) for region, ranks in sorted(holders_of(of).items())
            if volume(region)]


def holders_of(of: Spec) -> dict[Region, list[int]]:
    """region -> the ranks that hold it, or a term of it."""
    holders: dict[Region, list[int]] = {}
    for rank in of.placement.flat:
        holders.setdefault(of.region(rank), []).append(rank)
    return holders


def formula(of: Spec, ranks: Sequence[int]) -> str:
    """How the value of a region comes from the shards of `ranks`: `0 + 2 = 1 + 3`, `max(0, 1)`, or `3`."""
    wide = [axis for axis, n in enumerate(of.placement.shape) if n > 1]
    copies = [axis for axis in wide if of.sbp[axis].is_broadcast]
    pending = [axis for axis in wide if of.sbp[axis].is_partial]
    return " = ".join(_pending(of, terms, pending) for terms in _by_index(of, ranks, copies))


def _pending(of: Spec, ranks: Sequence[int], axes: list[int]) -> str:
    """The reduction over the outermost of `axes` of those over the inner ones."""
    if not axes:
        return str(ranks[0])
    op = of.sbp[axes[0]].op
    terms = [_pending(of, part, axes[1:]) for part in _by_index(of, ranks, axes[:1])]
    return " + ".join(terms) if op == "sum" else f"{op}({', '.join(terms)})"


def _by_index(of: Spec, ranks: Sequence[int], axes: list[int]) -> list[list[int]]:
    """Ranks that have the same index on these axes, together."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        groups.setdefault(tuple(of.placement.coords[rank][axis] for axis in axes), []).append(rank)
    return list(groups.values())


def legend(of: Spec) -> list[str]:
    """What the signs of the formulas mean, in one line or none."""
    wide = [s for s, n in zip(of.sbp, of.placement.shape) if n > 1]
    notes = []
    if any(s.is_broadcast for s in wide):
        notes.append("= holds the same (B)")
    if any(s.is_partial and s.op == "sum" for s in wide):
        notes.append("+ is a pending sum (P)")
    notes += sorted({f"{s.op} is pending ({s})" for s in wide if s.is_partial and s.op != "sum"})
    empty = [r for r in of.placement.flat if not volume(of.region(r))]
    if empty and of.numel:
        notes.append(f"{rank_list(empty)} hold{'s' if len(empty) == 1 else ''} nothing")
    return [", ".join(notes)] if notes else []


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def drawn_dims(of: Spec) -> list[int]:
    """The two dims at most along which a tensor is drawn: the first that are split."""
    split = list(dict.fromkeys(s.dim for s in of.sbp if s.is_split))
    return sorted((split + [d for d in range(of.ndim) if d not in split])[:2])


def projected(of: Spec, region: Region) -> Region:
    """A region along those dims, as rows and columns."""
    return projected_region(region, drawn_dims(of))


def projected_region(region: Region, dims: Sequence[int]) -> Region:
    """A region along two dims at most, as rows and columns."""
    ranges = tuple(region[d] for d in dims)
    return ((0, 1),) * (2 - len(ranges)) + ranges
