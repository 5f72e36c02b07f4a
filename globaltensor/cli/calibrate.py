"""Describe a cluster by what was measured on it.

    globaltensor calibrate rows.csv --cluster dgx-a100 > mine.json
    globaltensor plan --evaluate others.csv --cluster mine.json

    globaltensor calibrate --here > here.json
    globaltensor plan --program train.py:build --devices 2 --cluster here.json

Each row is a step that was measured, as for `globaltensor plan --evaluate`, with the column measured_ms. Nine numbers
are fitted: the rates that programs reach for matrix products, for memory, and for links within a host and between
hosts; the latencies of these links; and the overhead of a kernel, a micro-batch and a step. What no row measures
stays as in --cluster.

--here measures this machine: ops of each kind and of several sizes, boxings between processes, an optimizer, and steps
of a small model. All ranks measure at the same time, so that the cores and the memory are shared as in a step.

This needs scipy: pip install 'globaltensor[plan]'
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from globaltensor.cli.cores import cores
from globaltensor.cli.memory import problem
from globaltensor.cli.plan import agreement_text
from globaltensor.cli.problem import Problem
from globaltensor.cli.small_models import small_models
from globaltensor.errors import GlobalTensorError
from globaltensor.planner.measured_cluster import cluster_of_measurements
from globaltensor.runtime.progress import progress
from globaltensor.runtime.text_table import aligned, terminal_columns
from globaltensor.runtime.units import bytes_text, seconds_text
from globaltensor.simulator.calibration import calibrate, quality
from globaltensor.simulator.cluster import Cluster, as_json, cluster
from globaltensor.simulator.evaluation import evaluate, read_rows

_LIMIT = 300                                         # seconds after which measuring is given up
_RANKS_OF_A_CORE = 8                                 # of more, each waits for the others most of the time


def command(chosen: argparse.Namespace) -> int:
    """Print the cluster as JSON, and how well it agrees on stderr."""
    if chosen.here == (chosen.rows is not None):
        raise Problem(f"calibrate by {'both a FILE and --here' if chosen.here else 'what'}?\n"
                      "  try: a FILE with measured steps, or --here to measure this machine")
    unused = [name for name in (("cluster",) if chosen.here else ("ranks",)) if getattr(chosen, name) is not None]
    if unused:
        raise Problem(f"--{unused[0]} does nothing {'with' if chosen.here else 'without'} --here\n"
                      f"  try: without --{unused[0]}")
    if (chosen.ranks or 1) > _RANKS_OF_A_CORE * cores():
        raise Problem(f"--ranks {chosen.ranks} on {cores()} cores would measure for longer than {_LIMIT} seconds\n"
                      f"  try: --ranks {cores()}")
    try:
        of, summary = _measured_here(chosen) if chosen.here else _fitted_to_rows(chosen)
    except GlobalTensorError as error:
        raise problem(error) from None
    except ImportError:
        raise Problem("calibrate needs scipy\n  try: pip install 'globaltensor[plan]'", 1) from None
    if not chosen.json:
        print(summary, file=sys.stderr)
    print(as_json(of))
    return 0


def _fitted_to_rows(chosen: argparse.Namespace) -> tuple[Cluster, str]:
    start, rows = cluster(chosen.cluster or "dgx-a100"), read_rows(chosen.rows)
    fitted = calibrate(rows, start, chosen.name or "")
    agreements = [quality(rows, [evaluate(row, one).step_time for row in rows]) for one in (start, fitted)]
    return fitted, "\n".join(f"{when}: {agreement_text(one)}" for when, one in zip(("before", "now"), agreements))


def _measured_here(chosen: argparse.Namespace) -> tuple[Cluster, str]:
    ranks = chosen.ranks or cores()
    of = cluster_of_measurements(measure(ranks), ranks, memory_of_rank(ranks), small_models(), chosen.name or "here",
                                 cores())
    rows = [("kind", "start", "of 10^9 operations", "of 10^9 bytes")]
    rows += [(one.kind, seconds_text(one.start), seconds_text(one.operation * 1e9), seconds_text(one.byte * 1e9))
             for one in of.kernels]
    words = [*aligned(rows, right={1, 2, 3}, columns=terminal_columns()),
             f"{ranks} ranks; a boxing starts in {seconds_text(of.local.latency)} and receives "
             f"{bytes_text(of.local.bandwidth)} a second; a micro-batch takes {seconds_text(of.micro_batch_overhead)} "
             f"besides, a step {seconds_text(of.step_overhead)}"]
    return of, "\n".join(words)


def memory_of_rank(ranks: int) -> float:
    """Bytes of this machine's memory that each rank can have."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks


def measure(ranks: int) -> dict[str, Any]:
    """What measure_here.py finds on so many ranks."""
    with tempfile.TemporaryDirectory(prefix="globaltensor-") as folder:
        path, errors = Path(folder, "measured.json"), Path(folder, "errors")
        line = [sys.executable, "-m", "globaltensor.cli", "run", "-n", str(ranks), "-m",
                "globaltensor.cli.measure_here", str(path)]
        with (errors.open("w") as stderr, progress("measuring", None, "rows") as advance,
              subprocess.Popen(line, stdout=subprocess.PIPE, stderr=stderr, text=True) as process):
            assert process.stdout is not None
            limit = threading.Timer(_LIMIT, process.terminate)
            limit.start()
            for _ in process.stdout:                 # rank 0 writes a line for each row
                advance(1)
            code = process.wait()
            in_time = limit.is_alive()
            limit.cancel()
        if code and not in_time:
            raise Problem(f"{ranks} ranks did not measure this machine in {_LIMIT} seconds\n  try: fewer --ranks, or "
                          "when less else runs", 1)
        if code or not path.exists():
            raise Problem(f"{ranks} ranks could not measure this machine\n{errors.read_text().strip()}", 1)
        measured: dict[str, Any] = json.loads(path.read_text())
        return measured
