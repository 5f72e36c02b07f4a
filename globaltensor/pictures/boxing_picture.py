"""A boxing as a picture: what each rank holds before and after, and arrows with the bytes that go from rank to rank.

    before        after          An arrow is what one rank receives from another over all steps of the boxing's plan; it
    rank 0 ##  -> rank 0 ##      is the wider, the more bytes it stands for. What a rank keeps for itself has no arrow.
    rank 1 ##  -> rank 1 ##

With more than a few ranks the arrows hide each other. Then a matrix takes their place: a row for each rank that sends,
a column for each that receives.
"""
from __future__ import annotations

from collections.abc import Mapping

from globaltensor.layouts.layout import Spec, sbp_text
from globaltensor.pictures.cells import holders_of
from globaltensor.pictures.layout_picture import place_text, rank_shard, small_extent
from globaltensor.pictures.markup import Picture, element, label, line_colour_of, rectangle, shortened, text_width

Flows = Mapping[tuple[int, int], int]                # (from, to) -> bytes

MOST_ARROWS_RANKS = 8
MOST_MATRIX_RANKS = 64
_LEFT, _BETWEEN = 12.0, 260.0
_SOFT = "var(--gt-soft)"


def boxing_picture(before: Spec, after: Spec, flows: Flows, op: str = "") -> Picture:
    """The picture of a boxing between two specs of one tensor; `flows` are its bytes from rank to rank."""
    ranks = len({*before.placement.flat, *after.placement.flat})
    if before.placement == after.placement:
        move = f"{sbp_text(before.sbp)} -> {sbp_text(after.sbp)} on {place_text(before.layout)}"
    else:
        move = " -> ".join(f"{sbp_text(of.sbp)} on {place_text(of.layout)}" for of in (before, after))
    received: dict[int, int] = {}
    for (_, rank), n in flows.items():
        received[rank] = received.get(rank, 0) + n
    total = (f"{sum(flows.values()):,} bytes between ranks, at most {max(received.values()):,} to one" if flows
             else "nothing moves between ranks")
    if flows and len({*flows.values()}) == 1:
        total += f", {next(iter(flows.values())):,} along each arrow"
    title = f"{list(before.shape)} {str(before.dtype).removeprefix('torch.')}: {move}"
    lines = [shortened(title, 104), f"{op + ': ' if op else ''}{total}"]
    head = [label(8, 18, lines[0], weight="bold"), label(8, 34, lines[1], fill=_SOFT, size=11)]
    elements, width, height = (_arrows(before, after, flows, received, 72.0) if ranks <= MOST_ARROWS_RANKS
                               else flow_matrix(flows, sorted({*before.placement.flat, *after.placement.flat}), 72.0))
    return Picture(max(width, text_width(lines[0]), text_width(lines[1], 11)) + 16, height + 8, [*head, *elements])


def _arrows(before: Spec, after: Spec, flows: Flows, received: Mapping[int, int], top: float
            ) -> tuple[list[str], float, float]:
    """Ranks one below the other, before on the left and after on the right."""
    width, height = small_extent(before)
    pitch, right = height + 38, _LEFT + width + _BETWEEN
    elements = [label(x, top - 8, text, fill=_SOFT, size=11) for x, text in ((_LEFT, "before"), (right, "after"))]
    places: list[dict[int, float]] = []
    for of, x in ((before, _LEFT), (after, right)):
        heads = {rank: ranks[0] for ranks in holders_of(of).values() for rank in ranks}
        places.append({})
        for nth, rank in enumerate(of.placement.flat):
            y = top + nth * pitch
            elements += rank_shard(of, rank, heads[rank], x, y)
            places[-1][rank] = y + 14 + height / 2
    most = max(flows.values(), default=1)
    senders = {rank: [pair for pair in sorted(flows) if pair[0] == rank] for rank in places[0]}
    takers = {rank: [pair for pair in sorted(flows) if pair[1] == rank] for rank in places[1]}
    alike = len({*flows.values()}) == 1
    for (source, target), n in sorted(flows.items()):
        if source not in places[0] or target not in places[1]:
            continue                                 # of a step between, on a rank that is in neither
        ends = (places[0][source] + _fan(senders[source], (source, target)),
                places[1][target] + _fan(takers[target], (source, target)))
        elements += _arrow(_LEFT + width + 10, ends[0], right - 14, ends[1], 1 + 4 * n / most, line_colour_of(source),
                           "" if alike or len(flows) > 12 else f"{n:,}", f"rank {source} -> rank {target}: {n:,} bytes")
    elements += [label(right + width + 14, y + 4, f"+ {received[rank]:,} bytes", fill=_SOFT, size=11)
                 for rank, y in places[1].items() if received.get(rank)]
    lowest = top + max(map(len, places)) * pitch
    return elements, right + width + 14 + text_width(f"+ {max(received.values(), default=0):,} bytes", 11), lowest


def _fan(pairs: list[tuple[int, int]], pair: tuple[int, int]) -> float:
    """Arrows at one rank begin and end beside each other."""
    return (pairs.index(pair) - (len(pairs) - 1) / 2) * min(10.0, 34.0 / len(pairs))


def _arrow(x0: float, y0: float, x1: float, y1: float, width: float, colour: str, text: str, note: str) -> list[str]:
    middle = (x0 + x1) / 2
    curve = f"M{x0:.1f} {y0:.1f}C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    head = f"M{x1 - 1:.1f} {y1 - 4 - width / 2:.1f}L{x1 + 8:.1f} {y1:.1f}L{x1 - 1:.1f} {y1 + 4 + width / 2:.1f}Z"
    near = 0.8                                       # of the way, where arrows to one rank have parted
    x, y = x0 + (x1 - x0) * near, y0 + (y1 - y0) * (3 * near ** 2 - 2 * near ** 3)
    return [element("path", element("title", note), d=curve, stroke=colour, stroke_width=float(width), fill="none"),
            element("path", d=head, fill=colour),
            *([_over_lines(label(x - 6, y - 3, text, anchor="middle", size=9))] if text else [])]


def _over_lines(text: str) -> str:
    """A label with a margin around its letters, to be read where arrows cross it."""
    return element("g", text, stroke="var(--gt-paper)", stroke_width=3, stroke_linejoin="round", paint_order="stroke")


def flow_matrix(flows: Flows, ranks: list[int], top: float, unit: str = "bytes") -> tuple[list[str], float, float]:
    """Bytes by sender (rows) and receiver (columns). Many ranks share a cell."""
    group = -(-len(ranks) // MOST_MATRIX_RANKS)
    n = -(-len(ranks) // group)
    place = {rank: nth // group for nth, rank in enumerate(ranks)}
    cells: dict[tuple[int, int], int] = {}
    for (source, target), nbytes in flows.items():
        key = place[source], place[target]
        cells[key] = cells.get(key, 0) + nbytes
    size = max(6.0, min(22.0, 400.0 / n))
    x, y, most = 64.0, top + 26, max(cells.values(), default=1)
    elements = [rectangle(x, y, n * size, n * size, "none", stroke="var(--gt-line)"),
                label(x, y - 18, "to rank", fill=_SOFT, size=11), label(8, y + 10, "from", fill=_SOFT, size=11)]
    for nth in range(0, n, max(1, -(-n // 12))):
        text = str(ranks[nth * group])
        elements += [label(x + (nth + 0.5) * size, y - 5, text, anchor="middle", fill=_SOFT, size=9),
                     label(x - 5, y + (nth + 0.5) * size + 3, text, anchor="end", fill=_SOFT, size=9)]
    for (i, j), nbytes in sorted(cells.items()):
        note = f"rank {ranks[i * group]} -> rank {ranks[j * group]}" if group == 1 else (
            f"ranks from {ranks[i * group]} -> ranks from {ranks[j * group]}")
        elements.append(element("rect", element("title", f"{note}: {nbytes:,} {unit}"), x=x + j * size, y=y + i * size,
                                width=size, height=size, fill="#4e79a7", fill_opacity=0.15 + 0.85 * nbytes / most))
    scale = f"darkest: {most:,} {unit}" + (f"; {group} ranks a cell" if group > 1 else "")
    elements.append(label(x, y + n * size + 16, scale, fill=_SOFT, size=11))
    return elements, x + max(n * size, text_width(scale, 11)), y + n * size + 22
