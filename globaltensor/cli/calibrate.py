"""Fit the description of a cluster to steps that were measured on it.

    globaltensor calibrate rows.csv --cluster dgx-a100 > mine.json
    globaltensor plan --evaluate others.csv --cluster mine.json

The rows are those of `globaltensor plan`, with the column measured_ms. Nine numbers are fitted: the rates that programs
reach for products, memory, and links within a host and between hosts, their latencies, and what starting a kernel, a
micro-batch and a step costs. What no row tells about stays as --cluster has it. Needs scipy: globaltensor[plan].
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


def options(of: argparse.ArgumentParser) -> None:
    """The command line of `globaltensor calibrate`."""
    of.add_argument("rows", metavar="FILE", help="a CSV file with a plan and its measured_ms in each row")
    of.add_argument("--cluster", default="dgx-a100", metavar="NAME",
                    help="where to begin: dgx-a100, dgx-h100, or a JSON file (default dgx-a100)")
    of.add_argument("--name", default="", help="what to call it (default: the name of --cluster)")


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
