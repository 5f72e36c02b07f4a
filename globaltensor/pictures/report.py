"""What the page of a report tells, as data: rows of events, who sends to whom, memory, and tables made of them.

    Panel      a timeline: rows ("rank 3", or a thread of it) of events that do not overlap, in columns
    Report     one or several panels on one scale of time (a run and its simulation), flows, memory, tables

All events of a panel stand in one column after the other, row by row; `offsets[r]` is where those of row r begin.
So millions of events are a few arrays.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from globaltensor.pictures.markup import DEEP
from globaltensor.pictures.packing import Numbers
from globaltensor.schedules.timetable import ACTION_NAMES, FIRST_STAGE_COLOURS

KIND_COLOURS = {name: FIRST_STAGE_COLOURS[kind] for kind, name in ACTION_NAMES.items()} | {
    "boxing": "#d6474a", "cpu_op": "#8d9db0", "user_annotation": "#c9a019", "kernel": "#4b9140"}
SAMPLED = 16                                         # rows of a table that has one for each rank


@dataclass(frozen=True)
class Panel:
    """A timeline. Times are in seconds (or in the unit of the report), from 0 on.

    rows      what each row is called; `ranks` the rank it belongs to
    names     of events: (text, kind); `name` is the index of each event's
    item      a number of each event: of its micro-batch, or where in `details` it is explained
    tick      what all times are multiples of, 0 where there is none
    """

    title: str
    rows: Sequence[str]
    ranks: Sequence[int]
    offsets: Numbers
    start: Numbers
    length: Numbers
    name: Numbers
    item: Numbers
    names: Sequence[tuple[str, str]]
    details: Sequence[str] = ()
    tick: float = 0.0

    @property
    def end(self) -> float:
        """When the last event ends."""
        return float((self.start + self.length).max(initial=0.0))

    @property
    def is_pipeline(self) -> bool:
        """Are its events the actions of a schedule?"""
        return bool(self.names) and all(kind in ACTION_NAMES.values() for _, kind in self.names)


@dataclass(frozen=True)
class MemoryCurves:
    """The most that each row had in each of equal parts of the time: `peaks[row, part]`, until `end`."""

    rows: Sequence[str]
    ranks: Sequence[int]
    peaks: Numbers
    end: float
    unit: str


@dataclass(frozen=True)
class Table:
    """A table of text; `numbers` are the columns that stand to the right."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()
    note: str = ""


@dataclass(frozen=True)
class Report:
    """All that a page tells. `unit` is that of times: "s", or "" for one that nobody named."""

    title: str
    facts: Sequence[tuple[str, str]]
    panels: Sequence[Panel]
    unit: str = "s"
    flows: dict[tuple[int, int], int] | None = None
    flows_unit: str = "bytes"
    memory: MemoryCurves | None = None
    tables: Sequence[Table] = ()
    notes: Sequence[str] = field(default=())


def spelled_time(seconds: float, unit: str) -> str:
    """1.5 ms, or the plain number where it has no unit."""
    if unit != "s":
        return f"{seconds:.4g}"
    for factor, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.4g} {name}"
    return f"{seconds / 1e-6:.4g} us"


def spelled_bytes(n: float) -> str:
    """12.3 MB, in powers of ten."""
    for factor, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= factor:
            return f"{n / factor:.4g} {name}"
    return f"{n:.0f} B"


def kind_colours(panels: Sequence[Panel]) -> dict[str, str]:
    """A colour for each kind of event."""
    kinds = list(dict.fromkeys(kind for panel in panels for _, kind in panel.names))
    others = iter(DEEP * (1 + len(kinds) // len(DEEP)))
    return {kind: KIND_COLOURS.get(kind) or next(others) for kind in kinds}


# --------------------------------------------------------------------------------------------------- bubbles explained


@dataclass(frozen=True)
class Idle:
    """Per row of a panel, seconds: at work, and not, before its first event, between events, after its last."""

    work: Numbers
    before: Numbers
    between: Numbers
    after: Numbers


def idle_times(panel: Panel) -> Idle:
    """Where the time of each row goes."""
    first, stop = panel.offsets[:-1], panel.offsets[1:]
    has = stop > first
    ends = panel.start + panel.length
    sums = np.concatenate([[0.0], np.cumsum(panel.length, dtype=np.float64)])
    work = sums[stop] - sums[first]
    begin = np.where(has, panel.start[np.minimum(first, len(ends) - 1)], 0.0) if len(ends) else work
    last = np.where(has, ends[np.maximum(stop - 1, 0)], 0.0) if len(ends) else work
    between = last - begin - work
    between[between < 1e-9 * panel.end] = 0.0        # sums of floats
    return Idle(work, begin, between, np.where(has, panel.end - last, panel.end))


def bubble_table(panel: Panel, unit: str) -> Table:
    """Where the time of a step goes, on the ranks of a pipeline; of many ranks, a sample and the mean."""
    idle, end = idle_times(panel), panel.end or 1.0
    columns = [idle.work, idle.before, idle.between, idle.after]
    count = len(panel.rows)
    chosen = spread_over(count, SAMPLED)

    def row(name: str, values: Sequence[float]) -> list[str]:
        return [name, *(f"{spelled_time(value, unit)} ({value / end:.1%})" for value in values),
                f"{sum(values[1:]) / end:.1%}"]

    rows = [row(panel.rows[k], [float(column[k]) for column in columns]) for k in chosen]
    rows.append(row("mean of all", [float(column.mean()) for column in columns]))
    head = ("", "works", "waits before", "waits between", "waits after", "bubble")
    note = ("Before its first action a rank waits for the stages before it, after its last for those that are still at "
            "work; between, for a value of another stage.")
    return Table(f"Bubble: {panel.title}", head, rows, range(1, 6), note)


def spread_over(count: int, most: int) -> list[int]:
    """At most so many of `count` rows, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)})


def time_by_name(panel: Panel, unit: str, most: int = 20) -> Table:
    """What takes the most time, over all rows."""
    took = np.bincount(panel.name, weights=panel.length, minlength=len(panel.names))
    counts = np.bincount(panel.name, minlength=len(panel.names))
    merged: dict[tuple[str, str], list[float]] = {}
    by_kind = panel.is_pipeline
    for key, seconds, n in zip(panel.names, took.tolist(), counts.tolist()):
        one = merged.setdefault((key[1], "") if by_kind else (key[1], key[0]), [0.0, 0])
        one[0], one[1] = one[0] + seconds, one[1] + n
    rows = [[kind, text, f"{int(n):,}", spelled_time(seconds, unit), spelled_time(seconds / max(n, 1), unit)]
            for (kind, text), (seconds, n) in sorted(merged.items(), key=lambda one: -one[1][0])[:most] if n]
    head: Sequence[str] = ("kind", "what", "count", "time of all ranks", "mean")
    if by_kind:
        head, rows = ("kind", *head[2:]), [[row[0], *row[2:]] for row in rows]
    return Table(f"Time: {panel.title}", head, rows, range(len(head) - 3, len(head)))
