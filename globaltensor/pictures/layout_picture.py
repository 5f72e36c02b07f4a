"""Who holds what of a tensor, as a picture: the whole tensor in regions, and beside it what each rank has of it.

    the tensor               what each rank holds
    +-----------+            rank 0       rank 1         one colour is one region, so what is broadcast
    |   0 = 1   |            #######      #######        looks the same on all ranks that hold it
    +-----------+            .......      .......
    |   2 = 3   |            rank 2       rank 3         hatched: a term of a pending sum
    +-----------+            .......      .......        dashed and blank: of the tensor, but not of this rank
                             #######      #######

Ranks stand as in the placement, the last axis from left to right. Tensors of more than two dims are drawn along the
first two that are split.
"""
from __future__ import annotations

from math import prod

from globaltensor.layouts.layout import Layout, Spec, sbp_text
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.layouts.regions import Region, volume
from globaltensor.pictures.cells import cells, drawn_dims, holders_of, legend, projected
from globaltensor.pictures.markup import Picture, colour_of, hatching, label, rectangle, shortened, text_width

MOST_RANKS = 64                                      # that are drawn one by one
MOST_CELLS = 2000                                    # that a tensor is drawn in
_WHOLE = (250.0, 190.0)                              # pixels at most
_SMALL = (86.0, 54.0)
_GAP = 14.0
_TITLE = 11.0                                        # the size of letters


def layout_picture(of: Spec) -> Picture:
    """The picture of a tensor's layout."""
    top = 56.0
    whole, width, height = _whole_tensor(of, 8.0, top + 18)
    left = 8 + width + 40
    ranks, right, bottom = _each_rank(of, left, top)
    title = f"{list(of.shape)} {str(of.dtype).removeprefix('torch.')}, {sbp_text(of.sbp)}, {of.nbytes:,} bytes"
    where = shortened(f"on {place_text(of.layout)}", 100)
    notes = [note.replace("+ is a pending sum (P)", "hatched: + is a pending sum (P)") for note in legend(of)]
    end = max(top + 18 + height + 8, bottom) + 4
    elements = [label(8, 18, title, weight="bold"), label(8, 34, where, fill="var(--gt-soft)", size=_TITLE),
                *whole, *ranks,
                *(label(8, end + 10, shortened(note, 110), fill="var(--gt-soft)", size=_TITLE) for note in notes)]
    least = max(text_width(title), *(text_width(text, _TITLE) for text in (where, *(shortened(n, 110) for n in notes))))
    return Picture(max(right, least) + 12, end + (20 if notes else 4), elements)


def place_text(of: Layout) -> str:
    """A placement in few words where it has many ranks."""
    where = of.placement
    if len(where.flat) <= MOST_RANKS:
        return repr(where)
    sizes = " x ".join(f"{name} {n}" for name, n in zip(where.names or [""] * where.ndim, where.shape))
    return f"{where.type}, {len(where.flat):,} ranks: {sizes}"


# --------------------------------------------------------------------------------------------------- the whole tensor


def _whole_tensor(of: Spec, x: float, y: float) -> tuple[list[str], float, float]:
    """The tensor in its regions, with the edges marked; its width and height."""
    rows, columns = projected(of, tuple((0, n) for n in of.shape))
    width, height = _fitted_extent(rows[1], columns[1], _WHOLE, 60.0)
    dims = drawn_dims(of)
    name = "the tensor" if of.ndim <= 2 else f"the tensor, dims {dims[0]} and {dims[1]}"
    elements = [label(x, y - 20, name, fill="var(--gt-soft)", size=_TITLE)]
    if not of.numel:
        return [*elements, rectangle(x, y, width, height, "none", dashed=True, stroke="var(--gt-line)"),
                label(x + width / 2, y + height / 2 + 4, "no elements", anchor="middle", size=_TITLE)], width, height
    drawn: dict[Region, list[tuple[str, int]]] = {}
    for cell in cells(of):
        drawn.setdefault(projected(of, cell.region), []).append((cell.formula, cell.rank))
    if len(drawn) > MOST_CELLS:
        return [*elements, rectangle(x, y, width, height, "var(--gt-faint)"),
                label(x + width / 2, y + height / 2 + 4, f"{len(drawn):,} regions", anchor="middle")], width, height
    scale = width / columns[1], height / rows[1]
    for ((top, bottom), (left, right)), held in drawn.items():
        at = x + left * scale[0], y + top * scale[1], (right - left) * scale[0], (bottom - top) * scale[1]
        text = " | ".join(formula for formula, _ in held)
        elements += _filled(at, held[0][1], of.layout.partial, f"[{top}:{bottom}, {left}:{right}]  {text}")
        if at[3] >= 14 and at[2] >= 14:
            fits = int((at[2] - 4) / text_width("0", _TITLE))
            if len(text) > fits and fits < 5:
                text = ""
            elements.append(label(at[0] + at[2] / 2, at[1] + at[3] / 2 + 4, shortened(text, fits), anchor="middle",
                                  fill="#111", size=_TITLE))
    edges = [sorted({edge for region in drawn for edge in region[d]}) for d in (0, 1)]
    elements += _marks(edges[1], x, scale[0], y - 5) if of.ndim else []
    elements += [label(x + width + 4, y + edge * scale[1] + 4, str(edge), fill="var(--gt-soft)", size=9)
                 for edge in _spaced(edges[0], scale[1], 10)] if of.ndim >= 2 else []
    return elements, width + (24 if of.ndim >= 2 else 0), height


def _marks(edges: list[int], x: float, scale: float, y: float) -> list[str]:
    return [label(x + edge * scale, y, str(edge), fill="var(--gt-soft)", size=9, anchor="middle" if edge else "start")
            for edge in _spaced(edges, scale, 6.5 * len(str(edges[-1])) + 4)]


def _spaced(edges: list[int], scale: float, least: float) -> list[int]:
    """Those that are so many pixels apart; the last one always."""
    kept: list[int] = []
    for edge in edges:
        if not kept or (edge - kept[-1]) * scale >= least:
            kept.append(edge)
        elif edge == edges[-1]:
            kept[-1] = edge
    return kept


def _fitted_extent(rows: int, columns: int, most: tuple[float, float], least: float) -> tuple[float, float]:
    """Pixels for so many rows and columns: in proportion, as far as both stay visible."""
    scale = min(most[0] / max(columns, 1), most[1] / max(rows, 1))
    return (min(max(columns * scale, least), most[0]), min(max(rows * scale, least / 2), most[1]))


def _filled(at: tuple[float, float, float, float], rank: int, pending: bool, note: str) -> list[str]:
    return [rectangle(*at, colour_of(rank), note=note, line=0.8), *([hatching(*at)] if pending else [])]


# ----------------------------------------------------------------------------------------------------- of each rank


def _each_rank(of: Spec, x: float, y: float) -> tuple[list[str], float, float]:
    """What every rank holds, as the placement has them; the right and the lower end."""
    where = of.placement
    heads = {rank: ranks[0] for ranks in holders_of(of).values() for rank in ranks}
    columns = min(where.shape[-1], 8)
    pitch = _SMALL[0] + _GAP, small_extent(of)[1] + 36
    elements = [label(x, y - 2, "what each rank holds", fill="var(--gt-soft)", size=_TITLE)]
    drawn = where.flat[:MOST_RANKS]
    per_line = where.shape[-1]
    lines_each = -(-per_line // columns)
    for nth, rank in enumerate(drawn):
        line, column = divmod(nth % per_line, columns)
        at = x + column * pitch[0], y + 12 + (nth // per_line * lines_each + line) * pitch[1]
        elements += rank_shard(of, rank, heads[rank], *at)
    lines = -(-len(drawn) // per_line) * lines_each if len(drawn) >= per_line else -(-len(drawn) // columns)
    bottom = y + 12 + lines * pitch[1]
    if len(drawn) < len(where.flat):
        elements.append(label(x, bottom + 4, f"... and {len(where.flat) - len(drawn):,} more ranks",
                              fill="var(--gt-soft)", size=_TITLE))
        bottom += 10
    wide = max(min(len(drawn), columns) * pitch[0], text_width("what each rank holds", _TITLE))
    return elements, x + wide, bottom


def small_extent(of: Spec) -> tuple[float, float]:
    """Width and height of the small tensor."""
    rows, columns = projected(of, tuple((0, n) for n in of.shape))
    return _fitted_extent(rows[1], columns[1], _SMALL, 26.0)


def rank_shard(of: Spec, rank: int, head: int, x: float, y: float) -> list[str]:
    """A small tensor with the region that a rank holds of it, in the colour of the first holder, `head`."""
    whole = projected(of, tuple((0, n) for n in of.shape))
    width, height = small_extent(of)
    region, shape = of.region(rank), of.local_shape(rank)
    note = f"rank {rank} holds [{', '.join(f'{a}:{b}' for a, b in region)}]"
    elements = [label(x, y + 9, _rank_label(of, rank), size=_TITLE),
                rectangle(x, y + 14, width, height, "none", dashed=True, stroke="var(--gt-line)", line=0.8)]
    text = "nothing" if not volume(region) else "irregular" if isinstance(of.layout, RankRegions) else (
        "x".join(map(str, shape)) or "one number")
    if volume(region):
        (top, bottom), (left, right) = projected(of, region)
        scale = width / whole[1][1], height / whole[0][1]
        at = (x + left * scale[0], y + 14 + top * scale[1], max((right - left) * scale[0], 1.5),
              max((bottom - top) * scale[1], 1.5))
        elements += _filled(at, head, of.layout.partial, f"{note}, {prod(shape) * of.dtype.itemsize:,} bytes")
    elements.append(label(x, y + 14 + height + 11, text, fill="var(--gt-soft)", size=9))
    return elements


def _rank_label(of: Spec, rank: int) -> str:
    """With its place on the axes, where there are several."""
    at = of.placement.coords[rank]
    return f"rank {rank}" + (f" ({','.join(map(str, at))})" if len(at) > 1 else "")
