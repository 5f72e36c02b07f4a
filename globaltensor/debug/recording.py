"""Boxings recorded, and written to a file for a report: `gt.record(file="run.json")`.

    with gt.record() as moves: step()                              a list of BoxingRecord, and nothing else
    with gt.record(file="run.json", pipeline=runner): step()       also a file: globaltensor report run.json

The file is in the Trace Event Format, so Perfetto opens it too. It has the boxings of all ranks, the bytes that each
rank sends to each other one, the memory in use at each boxing, and the actions of the pipeline's last step. It is
written as the block ends, by rank 0, from what all processes tell: so all of them run the block. Nothing is written
where the block raises.
"""
from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from globaltensor.boxings.watch import BoxingRecord, Record, layouts_text, recorded
from globaltensor.debug.merged_trace import (
    RankTrace,
    check_trace_file,
    clock_offset,
    gather_to_first,
    merge_traces,
    process_name,
    write_trace_file,
)
from globaltensor.errors import ArgumentError
from globaltensor.pictures.trace_report import described
from globaltensor.runtime.world import world
from globaltensor.schedules.text import format_schedule
from globaltensor.tracebacks import api_boundary

_WHAT = "the record of every rank"


@api_boundary
def record(file: str | os.PathLike[str] | None = None, pipeline: Any = None) -> AbstractContextManager[Record]:
    """A list to which every boxing done inside the block, by this process, is added. It prints as a table.

    file       what is recorded is written there as the block ends, for `globaltensor report`; then all processes run
               the block. A name that ends in .gz is compressed
    pipeline   what `gt.pipeline` returned: the file has the actions of its last step, and its schedule

    Raises GlobalTensorError on every rank where the file cannot be written.
    """
    if file is None:
        if pipeline is not None:
            raise ArgumentError("gt.record(pipeline=...) without a file", "the actions of a pipeline go into one",
                                'gt.record(file="run.json", pipeline=runner)')
        return recorded()
    if not isinstance(file, (str, os.PathLike)):
        raise ArgumentError(f"gt.record(file={file!r})", "it is the name of a file", 'gt.record(file="run.json")')
    if pipeline is not None and not callable(getattr(pipeline, "own_events", None)):
        raise ArgumentError(f"pipeline={type(pipeline).__name__}", "it has no timetable",
                            "pipeline=runner, with runner = gt.pipeline(...)")
    return _recorded_to(Path(file), pipeline)


@contextmanager
def _recorded_to(path: Path, pipeline: Any) -> Iterator[Record]:
    check_trace_file(path)
    memory: list[tuple[float, int]] = []
    began = time.time()
    with recorded() as moves:
        moves.when_added = lambda: memory.append((time.time(), _bytes_in_use()))
        moves.when_added()
        yield moves
        moves.when_added()
    own = _told(moves, memory, began, pipeline)
    traces = gather_to_first(own, _WHAT)
    text = format_schedule(pipeline.schedule) if pipeline is not None else ""
    write_trace_file(path, None if traces is None else _merged_record(traces, text))


def _bytes_in_use() -> int:
    """Bytes: of the accelerators that this process has used, or else of the process itself."""
    if devices := world().used_devices:
        return sum(map(torch.accelerator.memory_allocated, devices))
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _told(moves: Record, memory: list[tuple[float, int]], began: float, pipeline: Any) -> RankTrace:
    """What this process tells: its boxings, once for each rank that it drives and that takes part; what its ranks
    receive goes into `flows`."""
    here = world()
    rows: list[dict[str, Any]] = []
    flows = dict(moves.messages)
    for move in moves:
        ranks = {*move.src.placement.flat, *move.dst.placement.flat} & {*here.local_ranks}
        rows += [_row_of_move(move, rank, began) for rank in sorted(ranks)]
        for (source, target), n in move.flows.items():
            if target in here.local_ranks:
                flows[source, target] = flows.get((source, target), 0) + n
    name = f"rank {here.rank}" if len(here.local_ranks) == 1 else f"ranks 0 to {here.size - 1}"
    rows += [{"ph": "C", "name": f"memory of {name}", "pid": here.local_ranks[0], "tid": 0, "ts": (at - began) * 1e6,
              "args": {"bytes": n}} for at, n in memory]
    rows.append({"ph": "flows", "flows": [[a, b, n] for (a, b), n in sorted(flows.items())]})
    clock = time.time() - time.perf_counter() - began
    events = [(e.rank, e.stage, e.kind, e.micro_batch, (e.start + clock) * 1e6, (e.end + clock) * 1e6)
              for e in (pipeline.own_events() if pipeline is not None else ())]
    return RankTrace(round(began * 1e9) + clock_offset(), name, rows, events)


def _row_of_move(move: BoxingRecord, rank: int, began: float) -> dict[str, Any]:
    args = {"where": move.where, "layouts": layouts_text(move), "bytes": move.bytes}
    return {"ph": "X", "name": move.op, "cat": "boxing", "pid": rank, "tid": 0, "ts": (move.began - began) * 1e6,
            "dur": move.seconds * 1e6, "args": args}


def _merged_record(traces: list[RankTrace], schedule: str) -> dict[str, Any]:
    """The file: on one clock, each row under the number of its rank."""
    flows = [flow for one in traces for row in one.rows if row["ph"] == "flows" for flow in row["flows"]]
    size = world().size
    plain = [one._replace(rows=[row for row in one.rows if row["ph"] != "flows"]) for one in traces]
    merged = merge_traces(plain, by_process=False)
    merged["traceEvents"] += [process_name(rank, f"rank {rank}") for rank in range(size)]
    merged["globaltensor"] = described(size, len(traces), "rank", schedule, flows)
    return merged
