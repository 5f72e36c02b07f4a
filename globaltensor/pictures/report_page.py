"""The page of a report: one HTML file that opens from disk, with its data, its style and its script inside.

Tables, the matrix and the text are plain HTML. The timeline and the curves of memory are drawn by report.js, on
canvases and from packed columns (packing.py); without script, a picture of a sample of the rows stands in their place.
Nothing is loaded from anywhere: the page's own content security policy forbids it.
"""
from __future__ import annotations

import json
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from globaltensor.pictures.boxing_picture import flow_matrix
from globaltensor.pictures.markup import STYLE, Picture, element, html_table, label
from globaltensor.pictures.packing import Numbers, PackedColumn, pack_column
from globaltensor.pictures.report import (
    MemoryCurves,
    Panel,
    Report,
    kind_colours,
    spelled_bytes,
    spelled_time,
    spread_over,
)

STATIC_ROWS, STATIC_BINS = 24, 160                   # of the picture for pages without script
_TICKS = 2 ** 31                                     # times are whole numbers below this


def page(of: Report) -> str:
    """The HTML of a report."""
    data, scripts = _packed(of)
    sections = [f"<h1>{escape(of.title)}</h1>", _facts_html(of), *(f"<p>{escape(note)}</p>" for note in of.notes)]
    if of.panels:
        sections.append(_timeline_html(of))
    if of.flows is not None:
        ranks = sorted({rank for pair in of.flows for rank in pair})
        sections.append(f"<h2>Who sends to whom</h2>{_matrix(of, ranks)}")
    sections += [f"<h2>{escape(table.title)}</h2>" + html_table(
        table.head, [[escape(cell) for cell in row] for row in table.rows], numbers=table.numbers) +
        (f"<p>{escape(table.note)}</p>" if table.note else "") for table in of.tables]
    if of.memory is not None:
        sections.append(_memory_html(of.memory))
    script = resources.files(__package__).joinpath("report.js").read_text(encoding="utf-8")
    style = resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    policy = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:")
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">',
        f"<title>{escape(of.title)}</title><style>{STYLE}{style}</style></head>", '<body class="gt-picture">',
        *sections, *scripts, f'<script type="application/json" id="data">{_json(data)}</script>',
        f"<script>{script}</script>", "</body></html>", ""])


def _json(data: Any) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


# ---------------------------------------------------------------------------------------------------------- sections


def _facts_html(of: Report) -> str:
    return html_table(("", ""), [(escape(name), escape(value)) for name, value in of.facts]) if of.facts else ""


def _timeline_html(of: Report) -> str:
    kinds = "".join(f'<label><input type="checkbox" checked data-kind="{escape(kind)}">'
                    f'<span class="swatch" style="background:{colour}"></span>{escape(kind)}</label>'
                    for kind, colour in kind_colours(of.panels).items())
    panels = "".join(f'<h3>{escape(panel.title)}</h3><canvas class="timeline" data-panel="{nth}" tabindex="0" '
                     f'aria-label="timeline of {escape(panel.title)}"></canvas>' for nth, panel in enumerate(of.panels))
    static = "".join(f"<h3>{escape(panel.title)}</h3>{_static_timeline(panel, of)}" for panel in of.panels)
    return ('<h2>Timeline</h2><div class="controls needs-script">'
            f'<span id="kinds">{kinds}</span>'
            '<label>name <input id="names" type="search" placeholder="part of a name" size="16"></label>'
            '<label>ranks <input id="ranks" type="search" placeholder="0-7, 12" size="12"></label>'
            '<button id="closer">+</button><button id="farther">-</button><button id="whole">all</button>'
            '<span id="status"></span></div>'
            '<p class="hint needs-script">Wheel: zoom in time; with Shift: zoom in ranks. Drag: move. Double click: '
            "all. Keys: arrows, + and -.</p>"
            f'<div class="needs-script">{panels}</div><div id="note"></div><noscript>{static}<p>A sample of the rows. '
            "With JavaScript the timeline can be zoomed and filtered.</p></noscript>")


def _matrix(of: Report, ranks: list[int]) -> str:
    assert of.flows is not None
    if not of.flows:
        return "<p>No bytes go from one rank to another.</p>"
    elements, width, height = flow_matrix(of.flows, ranks, 0.0, of.flows_unit)
    sums = sorted(of.flows.items(), key=lambda one: -one[1])
    rows = [(f"{a}", f"{b}", f"{n:,}" if of.flows_unit != "bytes" else spelled_bytes(n)) for (a, b), n in sums[:10]]
    picture = Picture(width + 10, height + 10, elements)._repr_html_()
    largest = html_table(("from rank", "to rank", of.flows_unit), rows, "the largest", numbers=(0, 1, 2))
    return f'<div class="beside"><div>{picture}</div><div>{largest}</div></div>'


def _memory_html(of: MemoryCurves) -> str:
    peaks = of.peaks.max(axis=1, initial=0.0)
    chosen = np.argsort(-peaks, kind="stable")[:16]
    rows = [(escape(of.rows[k]), _amount(float(peaks[k]), of.unit)) for k in chosen.tolist()]
    return ('<h2>Memory by rank over time</h2><canvas class="memory needs-script" aria-label="memory"></canvas>'
            + html_table(("", "most"), rows, "the largest", numbers=(1,)))


def _amount(value: float, unit: str) -> str:
    return spelled_bytes(value) if unit == "bytes" else f"{value:.4g} {unit}"


def _static_timeline(panel: Panel, of: Report) -> str:
    """A picture of some rows, in which each column has the colour of what takes most of it."""
    colours = kind_colours(of.panels)
    chosen = spread_over(len(panel.rows), STATIC_ROWS)
    kinds = list(colours)
    kind_of_name = np.array([kinds.index(kind) for _, kind in panel.names], np.int64)
    left, width, height, end = 130.0, 640.0, 14.0, panel.end or 1.0
    elements = []
    for nth, row in enumerate(chosen):
        y = nth * height
        elements.append(label(left - 6, y + 11, panel.rows[row][:18], anchor="end", size=10))
        part = slice(int(panel.offsets[row]), int(panel.offsets[row + 1]))
        shares = _shares(panel.start[part], panel.length[part], kind_of_name[panel.name[part]], len(kinds), end)
        best = np.where(shares.sum(axis=0) > 0.3, shares.argmax(axis=0), -1)
        edges = [0, *(np.flatnonzero(np.diff(best)) + 1).tolist(), STATIC_BINS]
        elements += [element("rect", x=left + a * width / STATIC_BINS, y=y + 1, width=(b - a) * width / STATIC_BINS,
                             height=height - 2, fill=colours[kinds[int(best[a])]])
                     for a, b in zip(edges, edges[1:]) if best[a] >= 0]
    bottom = len(chosen) * height + 12
    elements.append(label(left, bottom, f"0 to {spelled_time(end, of.unit)}", size=10, fill="var(--gt-soft)"))
    return Picture(left + width + 10, bottom + 6, elements)._repr_html_()


def _shares(start: Numbers, length: Numbers, kind: Numbers, kinds: int, end: float) -> Numbers:
    """Of each bin of the time, the share that each kind takes: [kind, bin]."""
    shares = np.zeros((kinds, STATIC_BINS + 1))
    scale = STATIC_BINS / end
    a, b = start * scale, np.minimum((start + length) * scale, STATIC_BINS)
    first, last = a.astype(np.int64), np.minimum(b.astype(np.int64), STATIC_BINS)
    inside = first == last
    np.add.at(shares, (kind[inside], first[inside]), (b - a)[inside])
    across = ~inside
    np.add.at(shares, (kind[across], first[across]), (first + 1 - a)[across])
    np.add.at(shares, (kind[across], last[across]), (b - last)[across])
    full = np.zeros((kinds, STATIC_BINS + 2))
    np.add.at(full, (kind[across], first[across] + 1), 1.0)
    np.add.at(full, (kind[across], last[across]), -1.0)
    return (shares + np.cumsum(full, axis=1)[:, :STATIC_BINS + 1])[:, :STATIC_BINS]


# -------------------------------------------------------------------------------------------------------------- data


def _packed(of: Report) -> tuple[dict[str, Any], list[str]]:
    """What report.js reads: a description, and elements with packed columns, which it names."""
    scripts: list[str] = []

    def column(packed: PackedColumn) -> dict[str, Any]:
        scripts.append(f'<script type="text/plain" id="column{len(scripts)}">{packed.text}</script>')
        return packed._asdict() | {"text": len(scripts) - 1}

    colours = kind_colours(of.panels)
    data: dict[str, Any] = {"unit": of.unit, "kinds": list(map(list, colours.items())), "panels": []}
    for panel in of.panels:
        tick, start, length = _in_ticks(panel)
        gap = start - np.concatenate([[0], (start + length)[:-1]]) if len(start) else start
        kinds = list(colours)
        data["panels"].append({
            "title": panel.title, "rows": list(panel.rows), "ranks": list(map(int, panel.ranks)), "tick": tick,
            "end": panel.end, "names": [[text, kinds.index(kind)] for text, kind in panel.names],
            "details": list(panel.details),
            "offsets": column(pack_column(panel.offsets, True)), "gap": column(pack_column(_signless(gap))),
            "length": column(pack_column(length)), "name": column(pack_column(panel.name, True)),
            "item": column(pack_column(panel.item, True))})
    if of.memory is not None:
        top = float(of.memory.peaks.max(initial=0.0)) or 1.0
        levels = np.round(of.memory.peaks / top * 65535).astype(np.int64)
        data["memory"] = {"rows": list(of.memory.rows), "ranks": list(map(int, of.memory.ranks)), "top": top,
                          "end": of.memory.end, "unit": of.memory.unit, "parts": int(of.memory.peaks.shape[1]),
                          "levels": column(pack_column(levels.reshape(-1), True))}
    return data, scripts


def _signless(values: Numbers) -> Numbers:
    """Even for what is not negative, odd for what is: where a row begins, the gap is."""
    return np.where(values >= 0, 2 * values, -2 * values - 1)


def _in_ticks(panel: Panel) -> tuple[float, Numbers, Numbers]:
    """What one tick is, and times as whole numbers of them: what the panel says, or else a small part of an event of
    middling length."""
    middling = float(np.median(panel.length)) / 200 if len(panel.length) else 0.0
    tick = max(panel.tick or middling, panel.end / (_TICKS - 2)) or 1.0
    start = np.round(panel.start / tick).astype(np.int64)
    stop = np.round((panel.start + panel.length) / tick).astype(np.int64)
    return tick, start, stop - start
