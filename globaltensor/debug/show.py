"""Who holds what of a global tensor, as a drawing: `gt.show(x)`.

    x [6, 8] float32 on placement("cpu", [[0, 1], [2, 3]]) (S(0), P), 192 bytes
          0               8
      0   +---------------+
          | 0 + 1         |
      3   +---------------+
          | 2 + 3         |
      6   +---------------+
    + is a pending sum (P)

Split dims cut a tensor of one or two dims into boxes. What stands in a box says how its value comes from what the
ranks hold: `0 = 1` hold the same (B), `0 + 1` add up to it (P). More dims, or boxes too many to draw: a table of
rank, slices, local shape and bytes. All of it follows from the layout, so nothing is communicated.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.layout import Spec
from globaltensor.layouts.regions import Region, volume
from globaltensor.runtime.text_table import aligned
from globaltensor.runtime.world import world
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tracebacks import api_boundary

WIDTH, HEIGHT = 96, 40                               # characters and lines that a drawing may take
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac")


class Cell(NamedTuple):
    """A box of the tensor, and the formula of the ranks that hold it."""

    region: Region
    formula: str
    rank: int                                        # the first of them: gives the colour


Segment = tuple[str, int | None]                     # text, and the rank whose colour it has


@api_boundary
def show(x: Any, file: str | None = None) -> str:
    """Draw who holds what of `x`, print it once (by rank 0), and return the text; on every process alike.

    file    a picture is written there as well, of the type its name ends in (needs `globaltensor[plot]`)
    Raises GlobalTensorError for a plain tensor, and where a picture is asked for without matplotlib.
    """
    if not isinstance(x, GlobalTensor):
        raise GlobalTensorError("show of a plain tensor", "it lies on no ranks", "x.to_global(placement, sbp) first")
    lines = _lines(x.spec)
    if world().rank == 0:
        _print(lines)
        if file is not None:
            _picture(x.spec, file)
    return "\n".join("".join(text for text, _ in line) for line in lines)


# ------------------------------------------------------------------------------------------------------- who holds


def cells(of: Spec) -> list[Cell]:
    """The boxes that split dims cut the tensor into, in the order of their places; empty ones left out."""
    holders: dict[Region, list[int]] = {}
    for rank in of.placement.flat:
        holders.setdefault(of.region(rank), []).append(rank)
    return [Cell(region, formula(of, ranks), ranks[0]) for region, ranks in sorted(holders.items()) if volume(region)]


def formula(of: Spec, ranks: Sequence[int]) -> str:
    """How the value of a box comes from the shards of `ranks`: `0 + 2 = 1 + 3`, `max(0, 1)`, or `3`."""
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


def _legend(of: Spec) -> list[str]:
    wide = [s for s, n in zip(of.sbp, of.placement.shape) if n > 1]
    notes = []
    if any(s.is_broadcast for s in wide):
        notes.append("= holds the same (B)")
    if any(s.is_partial and s.op == "sum" for s in wide):
        notes.append("+ is a pending sum (P)")
    notes += sorted({f"{s.op} is pending ({s})" for s in wide if s.is_partial and s.op != "sum"})
    empty = [r for r in of.placement.flat if not volume(of.region(r))]
    if empty and of.numel:
        notes.append(f"{_ranks(empty)} hold{'s' if len(empty) == 1 else ''} nothing")
    return [", ".join(notes)] if notes else []


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# -------------------------------------------------------------------------------------------------------- as text


def _lines(of: Spec) -> list[list[Segment]]:
    head = f"{list(of.shape)} {str(of.dtype).removeprefix('torch.')} on {of.layout}, {of.nbytes:,} bytes"
    drawn = _grid(of) if of.ndim <= 2 and of.numel else None
    legend: list[list[Segment]] = [[(text, None)] for text in _legend(of)]
    return [[(head, None)], *(drawn or _owner_lines(of)), *legend]


def _grid(of: Spec) -> list[list[Segment]] | None:
    """The drawing, boxes in proportion to their sizes; None where it would not fit."""
    shape = (1,) * (2 - of.ndim) + of.shape
    regions = {((0, 1),) * (2 - of.ndim) + cell.region: cell for cell in cells(of)}
    edges = [sorted({edge for region in regions for edge in region[d]}) for d in (0, 1)]
    least = max(len(cell.formula) for cell in regions.values()) + 2
    widths = _extents(edges[1], shape[1], least, 64)
    heights = _extents(edges[0], shape[0], 1, 6)
    margin = len(str(shape[0])) + 4
    if sum(widths) + len(widths) + margin > WIDTH or sum(heights) + len(heights) > HEIGHT:
        return None
    rule: Segment = ("+" + "".join("-" * w + "+" for w in widths), None)
    lines: list[list[Segment]] = [[(" " * margin + _ruler(edges[1], widths), None)]]
    for i, (top, bottom) in enumerate(zip(edges[0], edges[0][1:])):
        lines.append([(_mark(of, top).rjust(margin - 2) + "  ", None), rule])
        row = [regions[(top, bottom), (left, right)] for left, right in zip(edges[1], edges[1][1:])]
        for k in range(heights[i]):
            lines.append([(" " * margin + "|", None)])
            for cell, w in zip(row, widths):
                text = f" {cell.formula}" if k == (heights[i] - 1) // 2 else ""
                lines[-1] += [(text.ljust(w), cell.rank), ("|", None)]
    return [*lines, [(_mark(of, shape[0]).rjust(margin - 2) + "  ", None), rule]]


def _mark(of: Spec, edge: int) -> str:
    """The edge of a row; a tensor of less than two dims has no rows to count."""
    return str(edge) if of.ndim == 2 else ""


def _extents(edges: list[int], size: int, least: int, whole: int) -> list[int]:
    """Characters for each interval, in proportion but not below `least`."""
    return [max(least, round((stop - start) / size * min(whole, size))) for start, stop in zip(edges, edges[1:])]


def _ruler(edges: list[int], widths: list[int]) -> str:
    text = ""
    for edge, width in zip(edges, [*widths, 0]):
        text += str(edge).ljust(width + 1)
    return text.rstrip()


def _owner_lines(of: Spec) -> list[list[Segment]]:
    """rank, coordinates, global slices, local shape, bytes."""
    rows = [("rank", "at", "slices", "local shape", "bytes")]
    for rank in of.placement.flat:
        region, local = of.region(rank), of.local_shape(rank)
        at = ", ".join(map(str, of.placement.coords[rank]))
        rows.append((str(rank), at, f"[{', '.join(f'{a}:{b}' for a, b in region)}]", str(list(local)),
                     f"{prod(local) * of.dtype.itemsize:,}"))
    ranks: list[int | None] = [None, *of.placement.flat]
    return [[(f"  {line}", rank)] for rank, line in zip(ranks, aligned(rows))]


def _print(lines: list[list[Segment]]) -> None:
    """In colour where rich is installed and the output is a terminal, which rich finds out."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print("\n".join("".join(text for text, _ in line) for line in lines))
        return
    console = Console(soft_wrap=True, highlight=False)
    for line in lines:
        styled = [(text, "" if rank is None else f"black on {_colour(rank)}") for text, rank in line]
        console.print(Text.assemble(*styled))


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


# ----------------------------------------------------------------------------------------------------- as a picture


def _picture(of: Spec, file: str) -> None:
    """The drawing by matplotlib; tensors of more than two dims along the first two that are split."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise GlobalTensorError(f"no picture {file!r}: matplotlib is not installed",
                                fix="pip install 'globaltensor[plot]'") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    shape, dims, rectangles = _projected(of)
    for (top, bottom), (left, right), text, rank in rectangles:
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, facecolor=_colour(rank), edgecolor="black"))
        axes.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center")
    axes.set(xlim=(0, max(shape[1], 1)), ylim=(max(shape[0], 1), 0))
    axes.set(xticks=sorted({x for _, xs, *_ in rectangles for x in xs}), xlabel=f"dim {dims[-1]}" if dims else "")
    axes.set(yticks=sorted({y for ys, *_ in rectangles for y in ys}) if len(dims) == 2 else [],
             ylabel=f"dim {dims[0]}" if len(dims) == 2 else "")
    axes.set_title(f"{list(of.shape)} on {of.layout}\n{', '.join(_legend(of))}", fontsize=9)
    figure.savefig(file)


Rectangle2 = tuple[tuple[int, int], tuple[int, int], str, int]


def _projected(of: Spec) -> tuple[tuple[int, int], list[int], list[Rectangle2]]:
    """Two dims at most, the shape and the boxes along them; boxes that fall on one another share a rectangle."""
    split = list(dict.fromkeys(s.dim for s in of.sbp if s.is_split))
    dims = sorted((split + [d for d in range(of.ndim) if d not in split])[:2])
    projected: dict[Region, list[Cell]] = {}
    for cell in cells(of):
        projected.setdefault(tuple(cell.region[d] for d in dims), []).append(cell)
    pad = 2 - len(dims)
    height, width = (1,) * pad + tuple(of.shape[d] for d in dims)
    rectangles = []
    for region, held in projected.items():
        rows, columns = ((0, 1),) * pad + region
        rectangles.append((rows, columns, " | ".join(c.formula for c in held), held[0].rank))
    return (height, width), dims, rectangles
