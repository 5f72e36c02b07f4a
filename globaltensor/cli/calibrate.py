"""Fit the description of a cluster to steps that were measured on it.

    globaltensor calibrate rows.csv --cluster dgx-a100 > mine.json
    globaltensor plan --evaluate others.csv --cluster mine.json

The rows are those of `globaltensor plan --evaluate`, with the column measured_ms. Nine numbers are fitted: the rates
that programs reach for matrix products, for memory, and for links within a host and between hosts; the latencies of
these links; and the overhead of a kernel, a micro-batch and a step. What no row tells about stays as in --cluster.
This needs scipy: pip install 'globaltensor[plan]'
"""
from __future__ import annotations

import argparse
import sys

from globaltensor.cli.memory import problem
from globaltensor.cli.plan import agreement_text
from globaltensor.cli.problem import Problem
from globaltensor.errors import GlobalTensorError
from globaltensor.simulator.calibration import calibrate, quality
from globaltensor.simulator.cluster import as_json, cluster
from globaltensor.simulator.evaluation import evaluate, read_rows


def command(chosen: argparse.Namespace) -> int:
    """Print the cluster as JSON, and how well it agrees on stderr."""
    try:
        start, rows = cluster(chosen.cluster), read_rows(chosen.rows)
        fitted = calibrate(rows, start, chosen.name)
        agreements = [quality(rows, [evaluate(row, one).step_time for row in rows]) for one in (start, fitted)]
    except GlobalTensorError as error:
        raise problem(error) from None
    except ImportError:
        raise Problem("calibrate needs scipy\n  try: pip install 'globaltensor[plan]'", 1) from None
    for when, agreement in zip(("before", "now"), agreements):
        print(f"{when}: {agreement_text(agreement)}", file=sys.stderr)
    print(as_json(fitted))
    return 0
