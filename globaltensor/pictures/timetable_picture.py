"""A pipeline's timetable as a picture: a row for each rank, a bar for each action, bubbles left blank.

    rank 0  [F0][F1][F2]            [B0]    [B1]    [B2]     62%       the share of the step in which it works
    rank 1      [F0]    [B0][F1][B1]    [F2][B2]

`Timetable` is a list of events that prints as text and that a notebook shows as this picture. Where there are more
actions than can be told apart, a column of the picture shows how much of it each kind takes, from top to bottom, and of
many ranks a sample is drawn, which the picture says.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from globaltensor.pictures.markup import Picture, element, label, rectangle, text_width
from globaltensor.schedules.timetable import (
    ACTION_NAMES,
    FIRST_STAGE_COLOURS,
    LATER_STAGE_COLOURS,
    Event,
    as_text,
    makespan_of,
)

WIDTH = 720.0                                        # pixels of the bars
MOST_ROWS, MOST_BARS, BINS, LEVELS = 48, 3000, 180, 6
_SOFT = "var(--gt-soft)"


class Timetable(list[Event]):
    """The events of a step, in a list. `str` is a table of text; in a notebook it is a picture."""

    def __str__(self) -> str:
        return as_text(self) if self else "no actions"

    def _repr_html_(self) -> str:
        if not self:
            return escape(str(self))
        return timetable_picture({"": self})._repr_html_()


def timetable_picture(runs: Mapping[str, Sequence[Event]], unit: str = "") -> Picture:
    """One panel for each title of `runs`, below each other on one scale; `unit` is that of the times."""
    longest = max(makespan_of(events) for events in runs.values()) or 1.0
    ranks = sorted({e.rank for events in runs.values() for e in events})
    left = text_width(f"rank {ranks[-1]}") + 14
    step = -(-len(ranks) // MOST_ROWS)
    shown = ranks[::step]
    height = 20.0 if len(shown) <= 16 else 12.0
    y, elements = 8.0, []
    for title, events in runs.items():
        if title:
            elements.append(label(8, y + 12, title, weight="bold"))
            y += 22
        elements += _panel_of(events, shown, left, y, height, WIDTH / longest)
        y += len(shown) * height + 8
    scale = f"0 to {longest:.4g}{' ' if unit else ''}{unit}"
    elements.append(label(left, y + 8, scale + (f"; one rank of {step}" if step > 1 else ""), fill=_SOFT, size=11))
    elements += _legend_of(runs, left + WIDTH, y + 8)
    return Picture(left + WIDTH + 52, y + 18, elements)


def _panel_of(events: Sequence[Event], ranks: Sequence[int], left: float, top: float, height: float, scale: float
              ) -> list[str]:
    begin = min(e.start for e in events)
    rows: dict[int, list[Event]] = {rank: [] for rank in ranks}
    for e in events:
        if e.rank in rows:
            rows[e.rank].append(e)
    few = sum(map(len, rows.values())) <= MOST_BARS
    span = makespan_of(events)
    elements = [element("rect", x=left, y=top, width=span * scale, height=len(ranks) * height, fill="var(--gt-faint)",
                        fill_opacity=0.45)]
    for nth, (rank, row) in enumerate(rows.items()):
        y = top + nth * height
        if height >= 16 or nth % 2 == 0:
            elements.append(label(left - 6, y + height * 0.72, f"rank {rank}", anchor="end",
                                  size=11 if height > 16 else 9))
        first = min((e.stage for e in row), default=0)
        bars = ((e.start - begin, e.end - begin, e, e.stage == first) for e in row)
        elements += _bars(bars, left, y, height, scale) if few else _binned(bars, left, y, height, scale, span)
        worked = sum(e.end - e.start for e in row) / span if span else 1.0
        elements.append(label(left + span * scale + 6, y + height * 0.72, f"{worked:.0%}", fill=_SOFT,
                              size=10 if height > 16 else 8))
    return elements


Bar = tuple[float, float, Event, bool]


def _colour_of_bar(kind: str, is_first: bool) -> str:
    return (FIRST_STAGE_COLOURS if is_first else LATER_STAGE_COLOURS)[kind]


def _bars(bars: Iterable[Bar], left: float, y: float, height: float, scale: float) -> list[str]:
    elements = []
    for start, end, e, is_first in bars:
        x, width = left + start * scale, (end - start) * scale
        note = f"{ACTION_NAMES[e.kind]} of stage {e.stage}, micro-batch {e.micro_batch}: {e.start:.5g} to {e.end:.5g}"
        elements.append(rectangle(x, y + 1, width, height - 2, _colour_of_bar(e.kind, is_first), note=note,
                            stroke="var(--gt-paper)", line=0.5))
        if width > text_width(str(e.micro_batch), 9) + 2 and height > 12:
            elements.append(label(x + width / 2, y + height * 0.68, str(e.micro_batch), anchor="middle", fill="#111",
                                  size=9))
    return elements


def _binned(bars: Iterable[Bar], left: float, y: float, height: float, scale: float, span: float) -> list[str]:
    """Columns of a few pixels, in which each kind takes its share of the height; columns alike are one."""
    took: list[dict[str, float]] = [{} for _ in range(BINS)]
    width = span / BINS or 1.0
    for start, end, e, is_first in bars:
        colour = _colour_of_bar(e.kind, is_first)
        for k in range(int(start / width), min(int(end / width) + 1, BINS)):
            share = min(end, (k + 1) * width) - max(start, k * width)
            if share > 0:
                took[k][colour] = took[k].get(colour, 0.0) + share
    elements: list[str] = []
    run: list[tuple[str, int]] = []
    began = 0
    for k, shares in enumerate([*took, {}]):
        levels = [(colour, n) for colour, share in sorted(shares.items()) if (n := round(share / width * LEVELS))]
        if levels != run or k == BINS:
            at = y + 1.0
            for colour, n in run:
                tall = (height - 2) * n / LEVELS
                elements.append(element("rect", x=left + began * width * scale, y=at,
                                        width=(k - began) * width * scale, height=tall, fill=colour))
                at += tall
            run, began = levels, k
    return elements


def _legend_of(runs: Mapping[str, Sequence[Event]], right: float, y: float) -> list[str]:
    """Colours and what they stand for, ending at `right`."""
    kinds = [kind for kind in ACTION_NAMES if any(e.kind == kind for events in runs.values() for e in events)]
    entries = [(FIRST_STAGE_COLOURS[kind], ACTION_NAMES[kind]) for kind in kinds]
    if any(len({e.stage for e in events if e.rank == events[0].rank}) > 1 for events in runs.values() if events):
        entries.append((LATER_STAGE_COLOURS["F"], "paler: a later stage"))
    elements, x = [], right
    for colour, text in reversed(entries):
        x -= text_width(text, 11) + 22
        elements += [rectangle(x, y - 9, 10, 10, colour, line=0), label(x + 14, y, text, fill=_SOFT, size=11)]
    return elements
