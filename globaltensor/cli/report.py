"""Make a page of a recorded run: timeline, bytes from rank to rank, by op and by line, memory, bubbles.

    globaltensor report run.json                    writes run.html, which any browser opens from disk
    globaltensor report run.json.gz -o page.html

The file is what `gt.record(file="run.json")` or `gt.export_chrome_trace(prof, "run.json")` wrote. Where it has the
actions of a pipeline, its schedule is simulated with their mean times and shown beside them. Of a plan that never ran:
`globaltensor simulate ... --report page.html`.
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

from globaltensor.cli.memory import problem
from globaltensor.cli.problem import unwritable
from globaltensor.errors import GlobalTensorError
from globaltensor.pictures.report import Report
from globaltensor.pictures.report_page import page
from globaltensor.pictures.trace_report import ReportError, read_trace, summary, trace_report
from globaltensor.schedules.text import parse_schedule
from globaltensor.simulator.report import with_simulation


def command(chosen: argparse.Namespace) -> int:
    """Read the run, write the page."""
    try:
        of = report_of(chosen.run)
    except GlobalTensorError as error:
        raise problem(error) from None
    name = chosen.run.name.removesuffix(".gz").removesuffix(".json")
    output = chosen.output or chosen.run.with_name(f"{name}.html")
    size = write_page(output, of)
    print(json.dumps({"page": str(output), "bytes": size}) if chosen.json
          else f"{output}: {summary(of)}, {size:,} bytes")
    return 0


def report_of(path: Path) -> Report:
    """The report of a recorded run, with the simulation of its pipeline. Raises ReportError."""
    trace = read_trace(path)
    of = trace_report(trace, path.name)
    schedule = trace["globaltensor"].get("schedule")
    if not schedule:
        return of
    try:
        return with_simulation(of, parse_schedule(str(schedule)))
    except (GlobalTensorError, IndexError) as error:
        raise ReportError(f"{path} is damaged", f"its schedule does not fit its events: {error}",
                          "the file as gt.record(file=...) wrote it") from None


def write_page(path: Path, of: Report) -> int:
    """Write the page; how many bytes it has."""
    data = page(of).encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise unwritable(path, error) from None
    return len(data)
