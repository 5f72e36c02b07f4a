"""A report from a file in the Trace Event Format: what `gt.record(file=...)` and `gt.export_chrome_trace` write.

Each process and thread of the file is a row, in as many lines as its events are nested deep: an op that calls others
stands above them. The actions of a pipeline are a panel of their own. The key "globaltensor" says that a file is ours,
and what is in it besides: the ranks, bytes from rank to rank, the schedule.
"""
from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from globaltensor.errors import GlobalTensorError, counted
from globaltensor.pictures.report import MemoryCurves, Panel, Report, Table, spelled_bytes, spelled_time, time_by_name
from globaltensor.schedules.timetable import ACTION_NAMES

FORMAT = 1                                           # of the key "globaltensor"
PIPELINE = 1_000_000                                 # the process in the file that is the pipeline
_PARTS = 512                                         # into which the time of memory is divided
_BOXING = re.compile(r"boxing for (.*?): .*, ([\d,]+) bytes, (.*)$")
_LARGEST = 1 << 31                                   # bytes of a file, unpacked: gzip can hide more
Event = dict[str, Any]


class ReportError(GlobalTensorError, ValueError):
    """A file that no report can be made of: it is cut off, or of another program."""


def read_trace(path: Path) -> dict[str, Any]:
    """The file, checked. Raises ReportError for one that is damaged or foreign."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ReportError(f"{path} cannot be read", why, "a file that gt.record(file=...) wrote") from None
    if len(data) > _LARGEST:
        raise ReportError(f"{path} is larger than {spelled_bytes(_LARGEST)}", "a page of it could not be opened",
                          "a record of fewer steps")
    try:
        trace = json.loads(data)
    except (ValueError, RecursionError) as error:
        text = data.rstrip()
        why = ("it is empty" if not text else "it ends in the middle" if text[:1] == b"{" and text[-1:] != b"}"
               else f"it is not JSON: {error}")
        raise ReportError(f"{path} is not a record", why,
                          "let the program end its gt.record block, which writes the file") from None
    ours = trace.get("globaltensor") if isinstance(trace, dict) else None
    if not isinstance(ours, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ReportError(f"{path} is of another program", "it lacks what gt.record(file=...) writes beside the events",
                          "gt.record(file='run.json'), or gt.export_chrome_trace(prof, 'run.json')")
    if ours.get("format") != FORMAT:
        raise ReportError(f"{path} has format {ours.get('format')!r:.40}, this version reads {FORMAT}",
                          "another version of globaltensor wrote it", "the version that wrote it")
    return trace


def trace_report(trace: dict[str, Any], name: str) -> Report:
    """The report of a file that was read. Raises ReportError where its parts are not what they are to be."""
    try:
        return _read_report(trace, name)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, GlobalTensorError):
            raise
        raise ReportError(f"{name} is damaged", f"an event is not as it was written: {type(error).__name__}: {error}",
                          "the file as gt.record(file=...) wrote it") from None


def _read_report(trace: dict[str, Any], name: str) -> Report:
    ours, rows = trace["globaltensor"], trace["traceEvents"]
    timed = [row for row in rows if row.get("ph") == "X" and row.get("dur", -1) >= 0]
    counters = [row for row in rows if row.get("ph") == "C"]
    origin = min((row["ts"] for row in [*timed, *counters]), default=0.0)
    processes = int(ours["processes"])
    pipeline = [row for row in timed if row["pid"] == PIPELINE]
    panels = [_thread_panel([row for row in timed if row["pid"] != PIPELINE], rows, origin, _row_count(ours))]
    if pipeline:
        panels.append(_pipeline_panel(pipeline))
    panels = [panel for panel in panels if len(panel.start)]
    end = max((panel.end for panel in panels), default=0.0)
    boxings = [one for row in timed if (one := _boxing_of(row)) is not None]
    flows = {(int(a), int(b)): int(n) for a, b, n in ours["flows"]} if "flows" in ours else None
    facts = [("ranks", str(int(ours["ranks"]))), ("processes", str(processes)), ("time", spelled_time(end, "s")),
             ("boxings", f"{len(boxings):,} in the timeline")]
    if flows is not None:
        facts.append(("between ranks", spelled_bytes(sum(flows.values()))))
    tables = [_bytes_table(boxings, 0, "Bytes by op"), _bytes_table(boxings, 1, "Bytes by line of the program")]
    notes = [] if flows is not None else ["This file has no bytes from rank to rank: gt.record(file=...) writes them."]
    if not panels:
        notes.append("Nothing was recorded: the block had no boxing.")
    tables = [*(table for table in tables if table.rows), *(time_by_name(panel, "s") for panel in panels)]
    memory = _memory(counters, origin, end, _row_count(ours))
    return Report(f"Run: {name}", facts, panels, "s", flows, "bytes", memory, tables, notes)


def _row_count(ours: dict[str, Any]) -> int:
    """Rows of the file have the numbers of ranks; or of processes, and beyond these of devices, process by process."""
    return max(int(ours["ranks" if ours["by"] == "rank" else "processes"]), 1)


# ------------------------------------------------------------------------------------------------------- the timeline


def _thread_panel(timed: list[Event], rows: list[Event], origin: float, numbers: int) -> Panel:
    """All but the pipeline: a row for each thread and depth."""
    called = {row["pid"]: str(row["args"]["name"]) for row in rows if row.get("name") == "process_name"}
    threads: dict[tuple[int, Any], list[Event]] = {}
    for row in timed:
        threads.setdefault((row["pid"], row["tid"]), []).append(row)
    lanes: list[tuple[str, int, list[Event]]] = []
    for (pid, tid), events in sorted(threads.items(), key=lambda one: (one[0][0], str(one[0][1]))):
        rank = pid % numbers
        several = sum(other == pid for other, _ in threads) > 1
        title = called.get(pid, f"rank {pid}") + (f" {tid}" if several else "")
        lanes += [(title if depth == 0 else "", rank, lane) for depth, lane in enumerate(_lanes_by_depth(events))]
    return _columns("what ran", lanes, origin, lambda row: (_event_name(row), str(row.get("cat", "event"))),
                    _event_detail)


def _lanes_by_depth(events: list[Event]) -> list[list[Event]]:
    """Events by depth: each lies within one of the lane before. What overlaps otherwise goes one deeper, too."""
    lanes: list[list[Event]] = []
    ends: list[float] = []
    for row in sorted(events, key=lambda row: (row["ts"], -row["dur"])):
        depth = max((k + 1 for k, end in enumerate(ends) if end > row["ts"]), default=0)     # below all that still run
        if depth == len(lanes):
            lanes.append([])
            ends.append(0.0)
        lanes[depth].append(row)
        ends[depth] = row["ts"] + row["dur"]
    return lanes


def _pipeline_panel(events: list[Event]) -> Panel:
    ranks: dict[int, list[Event]] = {}
    for row in events:
        ranks.setdefault(int(row["tid"]), []).append(row)
    lanes = [(f"rank {rank}", rank, sorted(its, key=lambda row: row["ts"])) for rank, its in sorted(ranks.items())]
    kinds = set(ACTION_NAMES.values())
    if any(row["cat"] not in kinds for row in events):
        raise ValueError("an action of the pipeline has no kind")
    panel = _columns("the pipeline, measured", lanes, min(row["ts"] for row in events),
                     lambda row: (f"{row['cat']}, stage {int(row['args']['stage'])}", row["cat"]), lambda row: "")
    items = np.array([int(row["args"]["micro-batch"]) for _, _, lane in lanes for row in lane], np.int64)
    return Panel(panel.title, panel.rows, panel.ranks, panel.offsets, panel.start, panel.length, panel.name, items,
                 panel.names)


def _columns(title: str, lanes: list[tuple[str, int, list[Event]]], origin: float, key: Any, detail: Any) -> Panel:
    names: dict[tuple[str, str], int] = {}
    details: dict[str, int] = {}
    events = [row for _, _, lane in lanes for row in lane]
    return Panel(
        title, [name for name, _, _ in lanes], [rank for _, rank, _ in lanes],
        np.concatenate([[0], np.cumsum([len(lane) for _, _, lane in lanes])]).astype(np.int64),
        np.array([(row["ts"] - origin) * 1e-6 for row in events], np.float64),
        np.array([row["dur"] * 1e-6 for row in events], np.float64),
        np.array([names.setdefault(key(row), len(names)) for row in events], np.int64),
        np.array([details.setdefault(detail(row), len(details)) for row in events], np.int64),
        list(names), list(details))


def _event_name(row: Event) -> str:
    """An op without its overload; a boxing without its layouts, which its detail tells."""
    match = _BOXING.match(str(row["name"]))
    return f"boxing for {match[1]}" if match else str(row["name"])


def _event_detail(row: Event) -> str:
    if _BOXING.match(str(row["name"])):
        return str(row["name"])
    args = row.get("args") or {}
    return ", ".join(f"{args[key]:,} bytes" if key == "bytes" else str(args[key])
                     for key in ("layouts", "bytes", "where") if key in args)


# --------------------------------------------------------------------------------------------------- bytes and memory


def _boxing_of(row: Event) -> tuple[str, str, int, int] | None:
    """Op, line, rank and bytes."""
    if row.get("cat") != "boxing":
        return None
    match = _BOXING.match(str(row["name"]))
    if match:
        return match[1], match[3], row["pid"], int(match[2].replace(",", ""))
    return str(row["name"]), str(row["args"]["where"]), row["pid"], int(row["args"]["bytes"])


def _bytes_table(boxings: Iterable[tuple[str, str, int, int]], by: int, title: str) -> Table:
    """Of what all ranks tell, what the rank tells that tells most: each has its own record of a boxing of several."""
    sums: dict[str, dict[int, list[int]]] = {}
    for one in boxings:
        its = sums.setdefault(str(one[by]), {}).setdefault(one[2], [0, 0])
        its[0], its[1] = its[0] + one[3], its[1] + 1
    rows = [(key, *max((nbytes, n) for nbytes, n in its.values())) for key, its in sums.items()]
    rows = sorted(rows, key=lambda row: -row[1])[:40]
    return Table(title, (title.rpartition("by ")[2], "boxings", "bytes"),
                 [[key, f"{n:,}", spelled_bytes(nbytes)] for key, nbytes, n in rows], (1, 2),
                 "Bytes that the rank that receives most received, by the plans of the boxings.")


def _memory(counters: list[Event], origin: float, end: float, numbers: int) -> MemoryCurves | None:
    """The curves of memory: the most in each part of the time."""
    curves: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for row in counters:
        if "bytes" in row["args"]:
            curves.setdefault((row["pid"], str(row["name"])), []).append(
                ((row["ts"] - origin) * 1e-6, float(row["args"]["bytes"])))
    if not curves:
        return None
    end = max(end, *(max(points)[0] for points in curves.values())) or 1.0
    peaks = np.zeros((len(curves), _PARTS))
    edges = np.arange(_PARTS) * (end / _PARTS)
    for nth, points in enumerate(curves.values()):
        times, values = (np.array(column) for column in zip(*sorted(points)))
        before = np.searchsorted(times, edges, side="right") - 1
        peaks[nth] = values[np.maximum(before, 0)]
        np.maximum.at(peaks[nth], np.minimum((times / end * _PARTS).astype(np.int64), _PARTS - 1), values)
    names = [name.removeprefix("memory of ") for _, name in curves]
    return MemoryCurves(names, [pid % numbers for pid, _ in curves], peaks, end, "bytes")


def described(ranks: int, processes: int, by: str, schedule: str = "",
              flows: Iterable[Sequence[int]] | None = None) -> dict[str, Any]:
    """The key "globaltensor" of a file that is written; `by` says what its rows are numbered by: rank or process."""
    about: dict[str, Any] = {"format": FORMAT, "ranks": ranks, "processes": processes, "by": by}
    if schedule:
        about["schedule"] = schedule
    if flows is not None:
        about["flows"] = [list(flow) for flow in flows]
    return about


def summary(of: Report) -> str:
    """A line about a report that was written."""
    events = sum(len(panel.start) for panel in of.panels)
    return f"{counted(len(of.panels), 'timeline')}, {events:,} events"
