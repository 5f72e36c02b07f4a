"""Timetables of a pipeline step: as text, as a picture, as a trace that Perfetto and chrome://tracing open.

All three take `Event`s, whether from a simulation or from a run on real ranks. A picture of two lists of events shows
them one above the other, on one scale.

    rank 0  F0 F1 F2 .. .. .. B0 B0 B1 B1 B2 B2          text: one cell per unit of time, .. is a bubble
"""
from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Of a rank's first stage, and paler of its later ones.
FIRST_STAGE_COLOURS = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#f2a541", "R": "#b279a2"}
LATER_STAGE_COLOURS = {"F": "#9ec3e6", "B": "#9bd493", "I": "#b5e0dc", "W": "#f9d59b", "R": "#d8b9cf"}
ACTION_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "reduction"}


class Event(NamedTuple):
    """One action and its times, in any unit and from any origin."""

    rank: int
    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


def as_text(events: Sequence[Event], width: int = 240) -> str:
    """One line per rank, of at most `width` columns beside its name. Where all times are multiples of one unit and
    there is room, a cell is one unit and shows the micro-batch; else a column is a share of the whole step and shows
    the kind of the action in its middle. Stages after a rank's first are in lower case."""
    begin, end = min(e.start for e in events), max(e.end for e in events)
    label = len(f"rank {max(e.rank for e in events)}")
    unit = _unit(events, begin)
    cell = 1 + len(str(max(e.micro_batch for e in events)))
    units = round((end - begin) / unit) if unit else 0
    fits = unit and units * (cell + 1) <= width
    if not fits:
        unit, units, cell = (end - begin) / width or 1.0, width, 0
    lines = []
    for rank, row in _by_rank(events).items():
        first = min(e.stage for e in row)
        cells = ["." * (cell or 1)] * units
        for e in row:
            kind = e.kind if e.stage == first else e.kind.lower()
            name = f"{kind}{e.micro_batch}".ljust(cell) if cell else kind
            middle = 0.5 - 1e-9                       # a cell shows what runs in its middle, whatever the rounding
            for i in range(int((e.start - begin) / unit + middle), min(int((e.end - begin) / unit + middle), units)):
                cells[i] = name
        lines.append(f"{f'rank {rank}'.ljust(label)}  " + (" " if cell else "").join(cells).rstrip())
    scale = "" if fits else f"\none column is {unit:.4g}"
    return "\n".join(lines) + scale


def as_trace(events: Sequence[Event], microseconds: float = 1.0,
             counters: Mapping[str, Sequence[tuple[int, float, float]]] | None = None) -> dict[str, Any]:
    """The Trace Event Format, as Perfetto reads it: one thread per rank. `microseconds` are in one unit of time.
    `counters` are drawn as curves: name -> (rank, time, value)."""
    begin = min((e.start for e in events), default=0.0)
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({e.rank for e in events})]
    rows += [{"ph": "X", "name": f"{e.stage}{e.kind}{e.micro_batch}", "cat": ACTION_NAMES[e.kind], "pid": 0,
              "tid": e.rank, "ts": (e.start - begin) * microseconds, "dur": (e.end - e.start) * microseconds,
              "args": {"stage": e.stage, "micro-batch": e.micro_batch}} for e in events]
    for name, points in (counters or {}).items():
        rows += [{"ph": "C", "name": f"{name}, rank {rank}", "pid": 0, "tid": rank,
                  "ts": (time - begin) * microseconds, "args": {name: value}} for rank, time, value in points]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def write_trace(path: str | os.PathLike[str], *args: Any, **options: Any) -> None:
    """`as_trace` into a file."""
    Path(path).write_text(json.dumps(as_trace(*args, **options)))


def draw(path: str | os.PathLike[str], runs: Mapping[str, Sequence[Event]], unit: str = "time") -> None:
    """A picture, of the format that the ending of the name says: ranks by time, coloured by action, bubbles left blank,
    one panel for each title of `runs`. Needs matplotlib: pip install 'globaltensor[plot]'."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = max(e.rank for events in runs.values() for e in events) + 1
    height = min(0.42, 12 / ranks) * ranks + 1.3
    figure = Figure(figsize=(14, height * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(makespan_of(events) for events in runs.values())
    for panel, (title, events) in zip(panels, runs.items()):
        draw_panel(panel, events, longest)
        panel.set_title(title, loc="left", fontsize=11)
    panels[-1].set_xlabel(unit)
    kinds = [kind for kind in ACTION_NAMES if any(e.kind == kind for events in runs.values() for e in events)]
    patches = [Patch(color=FIRST_STAGE_COLOURS[kind], label=ACTION_NAMES[kind]) for kind in kinds]
    if any(_has_later_stages(events) for events in runs.values()):
        patches.append(Patch(color="#d0d0d0", label="paler: a later stage of the rank"))
    panels[0].legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


def draw_panel(panel: Any, events: Sequence[Event], longest: float) -> None:
    """The timetable of one run, in one panel of a picture that is `longest` wide in time."""
    begin = min(e.start for e in events)
    rows = _by_rank(events)
    points = 14 * 72 / longest if longest else 0.0    # of width, for one unit of time: figures are 14 inches wide
    for rank, row in rows.items():
        first = min(e.stage for e in row)
        bars = [(e.start - begin, e.end - e.start) for e in row]
        colours = [(FIRST_STAGE_COLOURS if e.stage == first else LATER_STAGE_COLOURS)[e.kind] for e in row]
        panel.broken_barh(bars, (rank - 0.44, 0.88), facecolors=colours, edgecolors="white",
                          linewidth=0.4 if len(events) < 5000 else 0)
        for e in row if len(events) < 5000 and len(rows) <= 40 else ():
            if (e.end - e.start) * points > 4 + 5 * len(str(e.micro_batch)):
                panel.text((e.start + e.end) / 2 - begin, rank, e.micro_batch, ha="center", va="center", fontsize=7)
    panel.set_xlim(0, longest or 1)
    panel.set_ylim(max(rows) + 0.6, -0.6)
    panel.set_yticks(list(rows) if len(rows) <= 16 else range(0, max(rows) + 1, max(1, len(rows) // 8)))
    panel.set_ylabel("rank")
    panel.set_facecolor("#f4f4f4")
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _by_rank(events: Sequence[Event]) -> dict[int, list[Event]]:
    rows: dict[int, list[Event]] = {rank: [] for rank in sorted({e.rank for e in events})}
    for e in events:
        rows[e.rank].append(e)
    return rows


def _has_later_stages(events: Sequence[Event]) -> bool:
    return any(len({e.stage for e in row}) > 1 for row in _by_rank(events).values())


def makespan_of(events: Sequence[Event]) -> float:
    """From the first begin to the last end."""
    return max(e.end for e in events) - min(e.start for e in events)


def _unit(events: Sequence[Event], begin: float) -> float:
    """The largest time that all others are multiples of, or 0 where rounding hides it."""
    edges = sorted({e.start - begin for e in events} | {e.end - begin for e in events})
    # times are sums of floats: what differs by rounding only is one edge
    steps = [b - a for a, b in zip(edges, edges[1:]) if b - a > 1e-9 * edges[-1]]
    unit = min(steps, default=0.0)
    fits = all(abs(edge / unit - round(edge / unit)) < 1e-6 for edge in edges) if unit else False
    return unit if fits else 0.0
