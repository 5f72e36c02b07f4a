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
rank, slices, local shape and bytes. All of it follows from the layout, so nothing is communicated. A notebook shows
the same as a picture. Of the folder of a checkpoint it shows what is in it.
"""
from __future__ import annotations

import os
import sys
from math import prod
from typing import Any, overload

import torch

from globaltensor.checkpoint.contents import Contents, contents_of
from globaltensor.errors import ArgumentError, GlobalTensorError, expect_path, writing_to
from globaltensor.layouts.layout import Spec
from globaltensor.layouts.regions import Region
from globaltensor.pictures.cells import Cell, cells, legend
from globaltensor.pictures.layout_picture import layout_picture
from globaltensor.pictures.markup import Picture, colour_of
from globaltensor.runtime.text_table import aligned
from globaltensor.runtime.world import world
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tracebacks import api_boundary

WIDTH, HEIGHT = 96, 40                               # characters and lines that a drawing may take


Segment = tuple[str, int | None]                     # text, and the rank whose colour it has


class Drawing(str):
    """What `gt.show` returns: the text, which a notebook shows as a picture."""

    picture: Picture | Contents

    def __new__(cls, text: str, picture: Picture | Contents) -> Drawing:
        drawing = super().__new__(cls, text)
        drawing.picture = picture
        return drawing

    def __getnewargs__(self) -> tuple[str, Picture | Contents]:  # type: ignore[override]  # of str, which has one
        return str(self), self.picture               # with what a copy is made

    def __repr__(self) -> str:
        return f"<drawing: {self.partition(chr(10))[0]}>"       # what an interpreter shows after the text itself

    def _repr_html_(self) -> str:
        return self.picture._repr_html_()


@overload
def show(x: str | os.PathLike[str]) -> Drawing: ...
@overload
def show(x: Any, file: str | None = None) -> Drawing: ...


@api_boundary
def show(x: Any, file: str | None = None) -> Drawing:
    """Draw who holds what of a global tensor, print it once (by rank 0), and return it; on every process alike. In a
    notebook nothing is printed: it shows what is returned, as a picture.

    x       a global tensor; or the folder of a checkpoint, or one version in it: what it holds
    file    a picture is written there as well, of the type its name ends in; .svg needs nothing, others
            `globaltensor[plot]`
    Raises GlobalTensorError for a plain tensor, and where a picture is asked for without matplotlib; CheckpointError
    for a folder without a checkpoint, or a damaged one.
    """
    if file is not None:
        _check_file(file)
    if isinstance(x, (str, os.PathLike)):
        contents = contents_of(x)
        lines: list[list[Segment]] = [[(line, None)] for line in str(contents).splitlines()]
        return _shown(lines, contents)
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"show of a {type(x).__name__}", "it draws one global tensor, or tells of one checkpoint",
                            "gt.show(x) for each tensor x in it")
    if not isinstance(x, GlobalTensor):
        raise GlobalTensorError("show of a plain tensor", "it lies on no ranks", "x.to_global(placement, sbp) first")
    picture = layout_picture(x.spec)
    if world().rank == 0 and file is not None:
        with writing_to(file, "a picture into no file", 'gt.show(x, file="x.svg")'):
            picture.save(file) if str(file).endswith(".svg") else _picture(x.spec, file)
    return _shown(_lines(x.spec), picture)


def _check_file(file: str) -> None:
    expect_path(file, "a picture into no file", 'gt.show(x, file="x.svg")')
    if os.path.isdir(file):
        raise GlobalTensorError(f"a picture into {file}", "it is a folder", 'gt.show(x, file="x.svg")')


def _shown(lines: list[list[Segment]], picture: Picture | Contents) -> Drawing:
    if world().rank == 0 and not in_notebook():
        _print(lines)
    return Drawing("\n".join("".join(text for text, _ in line) for line in lines), picture)


def in_notebook() -> bool:
    """Does this program run in a kernel, which shows what the last line of a cell gives?"""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


# -------------------------------------------------------------------------------------------------------- as text


def _lines(of: Spec) -> list[list[Segment]]:
    head = f"{list(of.shape)} {str(of.dtype).removeprefix('torch.')} on {of.layout}, {of.nbytes:,} bytes"
    drawn = _grid(of) if of.ndim <= 2 and of.numel else None
    notes: list[list[Segment]] = [[(text, None)] for text in legend(of)]
    return [[(head, None)], *(drawn or _owner_lines(of)), *notes]


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
        styled = [(text, "" if rank is None else f"black on {colour_of(rank)}") for text, rank in line]
        console.print(Text.assemble(*styled))


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
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, facecolor=colour_of(rank), edgecolor="black"))
        axes.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center")
    axes.set(xlim=(0, max(shape[1], 1)), ylim=(max(shape[0], 1), 0))
    axes.set(xticks=sorted({x for _, xs, *_ in rectangles for x in xs}), xlabel=f"dim {dims[-1]}" if dims else "")
    axes.set(yticks=sorted({y for ys, *_ in rectangles for y in ys}) if len(dims) == 2 else [],
             ylabel=f"dim {dims[0]}" if len(dims) == 2 else "")
    axes.set_title(f"{list(of.shape)} on {of.layout}\n{', '.join(legend(of))}", fontsize=9)
    try:
        figure.savefig(file)
    except ValueError as error:                      # a format that matplotlib does not know
        raise GlobalTensorError(f"no picture {file!r}", str(error), 'gt.show(x, file="x.svg")') from None


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
