"""One trace of all ranks, for Perfetto: what torch's profiler saw of each, on one clock: `gt.export_chrome_trace`.

    with torch.profiler.profile(profile_memory=True) as prof:
        runner.step(x, y)
    gt.export_chrome_trace(prof, "step.json.gz", pipeline=runner)        on every rank; rank 0 writes

Each rank is a process in it: its ops, its boxings as ranges, the curve of its memory. The timetable of a pipeline
is one more, with a row per rank. Clocks of other hosts are compared with that of rank 0 by messages there and back, of
which the quickest counts: what is off is less than half of the time that it took.
"""
from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from globaltensor.errors import ArgumentError, GlobalTensorError
from globaltensor.pictures.trace_report import PIPELINE, described
from globaltensor.runtime.agreement import as_bytes, broadcast_object, from_bytes, gather_objects
from globaltensor.runtime.exchange import GATHER, exchange
from globaltensor.runtime.world import world
from globaltensor.schedules.text import format_schedule
from globaltensor.schedules.timetable import Event, as_trace
from globaltensor.tracebacks import api_boundary

_ROUNDS = 8                                          # messages there and back, by which clocks are compared
_WHAT = "the trace of every rank"
Row = dict[str, Any]


class RankTrace(NamedTuple):
    """What one process tells: `start` is when its clock began, in nanoseconds since 1970 by the clock of rank 0; times
    of rows and of the pipeline's events are in microseconds after it."""

    start: int
    name: str
    rows: list[Row]
    events: list[tuple[Any, ...]]


@api_boundary
def export_chrome_trace(profile: Any, path: str | os.PathLike[str], pipeline: Any = None) -> None:
    """Write what torch's profiler saw on all ranks into one file. Collective; rank 0 writes.

    profile    a `torch.profiler.profile` that is over, or in its `on_trace_ready`
    path       a name that ends in .gz is compressed. Open it at https://ui.perfetto.dev
    pipeline   what `gt.pipeline` returned: the actions of its last step are shown, too

    With `profile_memory=True` there is a curve of the memory of each rank. Raises GlobalTensorError on every rank where
    the file cannot be written.
    """
    if not callable(getattr(profile, "export_chrome_trace", None)):
        raise ArgumentError(f"a trace of {type(profile).__name__}", "it is made of what torch's profiler saw",
                            "with torch.profiler.profile() as prof: ..., then gt.export_chrome_trace(prof, path)")
    if pipeline is not None and not callable(getattr(pipeline, "own_events", None)):
        raise ArgumentError(f"pipeline={type(pipeline).__name__}", "it has no timetable",
                            "pipeline=runner, with runner = gt.pipeline(...)")
    own = _rank_trace(profile, pipeline.own_events() if pipeline is not None else [])
    traces = gather_to_first(own, _WHAT)
    trace = None
    if traces is not None:
        text = format_schedule(pipeline.schedule) if pipeline is not None else ""
        trace = merge_traces(traces) | {"globaltensor": described(world().size, len(traces), "process", text)}
    write_trace_file(Path(path), trace)


def write_trace_file(path: Path, trace: Row | None) -> None:
    """Write a trace on rank 0, which has it. Collective: raises GlobalTensorError on all ranks if that fails."""
    failure = ""
    if trace is not None:
        data = json.dumps(trace).encode()
        try:
            path.write_bytes(gzip.compress(data, 5) if path.suffix == ".gz" else data)
        except OSError as error:
            failure = str(error)
    _raise_if_unwritten(path, failure)


def check_trace_file(path: Path) -> None:
    """Before what takes long: can a file of this name be? Collective: raises GlobalTensorError on all ranks if not."""
    failure = ""
    if world().rank == 0 and path.is_dir():
        failure = "it is a folder"
    elif world().rank == 0 and not path.parent.is_dir():
        failure = f"there is no folder {path.parent}"
    _raise_if_unwritten(path, failure)


def _raise_if_unwritten(path: Path, failure: str) -> None:
    """`failure` is that of rank 0."""
    if failure := broadcast_object(failure, 0, _WHAT):
        raise GlobalTensorError(f"{os.fspath(path)} was not written", failure, "a folder of rank 0 that has room")


# ---------------------------------------------------------------------------------------------------- of one process


def _rank_trace(profile: Any, events: Sequence[Event]) -> RankTrace:
    """What this process tells."""
    offset, here = clock_offset(), world()
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "trace.json")
        try:
            profile.export_chrome_trace(file)
        except (AssertionError, RuntimeError) as error:
            raise ArgumentError("a trace of a profiler that has none to give", str(error).splitlines()[0],
                                "gt.export_chrome_trace(prof, path) once, after the block of the profiler") from None
        seen = json.loads(Path(file).read_bytes())
    rows = [row for row in seen["traceEvents"] if isinstance(row.get("pid"), int)]
    begin = min((row["ts"] for row in rows if "ts" in row), default=0.0)
    start = int(seen.get("baseTimeNanoseconds", 0)) + round(begin * 1000)
    mapped = time.time_ns() - time.perf_counter_ns() - start         # the pipeline's clock is another one
    times = [(e.rank, e.stage, e.kind, e.micro_batch, e.start * 1e6 + mapped / 1000, e.end * 1e6 + mapped / 1000)
             for e in events]
    name = f"rank {here.rank}" if len(here.local_ranks) == 1 else f"ranks 0 to {here.size - 1}"
    return RankTrace(start + offset, name, [_from(row, begin) for row in rows], times)


def _from(row: Row, begin: float) -> Row:
    return {**row, "ts": row["ts"] - begin} if "ts" in row else row


def clock_offset(clock: Callable[[], int] = time.time_ns) -> int:
    """What is added to this process's clock to give that of rank 0, in nanoseconds; 0 on its host, where they are one.
    Collective."""
    here = world()
    hosts = here.machine.hosts
    far = [rank for rank in range(here.size) if hosts and hosts[rank] != hosts[0]]
    if here.single_process or here.rank != 0 and here.rank not in far:
        return 0
    if here.rank != 0:
        return min(_there_and_back(clock) for _ in range(_ROUNDS))[1]
    for rank in far:
        for _ in range(_ROUNDS):
            exchange({}, {rank: torch.empty(1, dtype=torch.int64, device="cpu")}, _WHAT, GATHER)
            exchange({rank: torch.tensor([clock()], device="cpu")}, {}, _WHAT, GATHER)
    return 0


def _there_and_back(clock: Callable[[], int]) -> tuple[int, int]:
    """How long a question to rank 0 took, and by how much its clock is ahead, if the answer was half way."""
    asked, answer = clock(), torch.empty(1, dtype=torch.int64, device="cpu")
    exchange({0: torch.tensor([asked], device="cpu")}, {}, _WHAT, GATHER)
    exchange({}, {0: answer}, _WHAT, GATHER)
    took = clock() - asked
    return took, int(answer) - (asked + took // 2)


def gather_to_first(own: RankTrace, what: str) -> list[RankTrace] | None:
    """Those of all processes, on rank 0; None elsewhere."""
    here = world()
    if here.single_process:
        return [own]
    packed = zlib.compress(json.dumps(own).encode(), 1)
    data = as_bytes(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
    sizes = gather_objects(data.numel(), what)
    if here.rank:
        exchange({0: data}, {}, what, GATHER)
        return None
    buffers = {rank: torch.empty(size, dtype=torch.uint8, device="cpu") for rank, size in enumerate(sizes) if rank}
    exchange({}, buffers, what, GATHER)
    return [own, *(RankTrace(*json.loads(zlib.decompress(from_bytes(buffer, rank).numpy().tobytes())))
                   for rank, buffer in buffers.items())]


# ------------------------------------------------------------------------------------------------------------ of all


def merge_traces(traces: Sequence[RankTrace], by_process: bool = True) -> Row:
    """The Trace Event Format of all of them; times begin with the first. `by_process`: the rows of each get numbers of
    its process and its devices; else they have numbers of ranks already."""
    origin = min(one.start for one in traces)
    rows: list[Row] = []
    events: list[Event] = []
    for rank, one in enumerate(traces):
        later = (one.start - origin) / 1000
        rows += _renumbered(rank, one, later, len(traces)) if by_process else [_from(row, -later) for row in one.rows]
        for event in one.events:
            of = Event(*event)
            events.append(of._replace(start=of.start + later, end=of.end + later))
    if events:
        begin = min(event.start for event in events)
        rows.append(process_name(PIPELINE, "pipeline"))
        rows += [{**row, "pid": PIPELINE} | ({"ts": row["ts"] + begin} if "ts" in row else {})
                 for row in as_trace(events)["traceEvents"]]
    return {"traceEvents": rows, "displayTimeUnit": "ms", "baseTimeNanoseconds": origin}


def _renumbered(rank: int, one: RankTrace, later: float, processes: int) -> list[Row]:
    """The rows of a process under numbers of their own: its rank, and others for its devices."""
    pids: dict[int, int] = {}                        # in its own file -> here
    rows: list[Row] = []
    for row in one.rows:
        pid = pids.setdefault(row["pid"], rank + processes * len(pids))
        row = {**row, "pid": pid} | ({"ts": row["ts"] + later} if "ts" in row else {})
        name = row.get("name")
        if name == "process_name":
            row["args"] = {"name": one.name if pid == rank else f"{one.name}: {row['args']['name']}"}
        elif name == "process_sort_index":
            row["args"] = {"sort_index": pid}
        elif name == "[memory]":
            row = _memory_row(row, one.name)
        elif row.get("ph") in ("s", "t", "f"):       # arrows between rows have numbers of their own, too
            row["id"] = f"{rank}.{row['id']}"
        elif str(name).startswith("boxing for"):
            row["cat"] = "boxing"
        rows.append(row)
    return rows


def _memory_row(row: Row, of: str) -> Row:
    """A point of the curve of allocated memory."""
    on_cpu = row["args"].get("Device Type", 0) == 0
    device = "CPU" if on_cpu else f"device {row['args'].get('Device Id')}"
    return {"ph": "C", "name": f"memory of {of}, {device}", "pid": row["pid"], "tid": row["tid"], "ts": row["ts"],
            "args": {"bytes": row["args"]["Total Allocated"]}}


def process_name(pid: int, name: str) -> Row:
    """The row that names a process."""
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
