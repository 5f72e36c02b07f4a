"""Evaluate parallel plans: what a step of each takes on a cluster, in seconds and bytes, without running it.

    globaltensor plan --evaluate rows.csv --cluster dgx-a100
    globaltensor plan --evaluate rows.csv --cluster mine.json --json

A row is a GPT by its sizes and how it is spread, in a CSV file with these columns:

    gpus,global_batch,micro_batch,hidden,heads,layers,seq,vocab,tp,dp,pp,zero,recompute

and, if you like, schedule, chunks, sp (0 or 1), attention (flash or plain) and measured_ms. Where steps were measured,
the last line says how well the two agree. `globaltensor calibrate` makes the description of a cluster from such rows.
"""
from __future__ import annotations

import argparse
import json

from globaltensor.cli.memory import problem
from globaltensor.cli.problem import Problem
from globaltensor.errors import GlobalTensorError
from globaltensor.runtime.text_table import aligned
from globaltensor.simulator.calibration import Quality, quality
from globaltensor.simulator.cluster import cluster
from globaltensor.simulator.evaluation import Evaluation, PlanRow, evaluate, read_rows


def options(of: argparse.ArgumentParser) -> None:
    """The command line of `globaltensor plan`."""
    of.add_argument("--evaluate", metavar="FILE", help="a CSV file with a plan in each row")
    of.add_argument("--cluster", default="dgx-a100", metavar="NAME",
                    help="dgx-a100, dgx-h100, or a JSON file (default dgx-a100)")
    of.add_argument("--json", action="store_true", help="a list with an object for each row, in seconds and bytes")


def command(chosen: argparse.Namespace) -> int:
    """Print what the plans take."""
    if chosen.evaluate is None:
        raise Problem("which plans?\n  try: --evaluate rows.csv, with a plan in each row")
    try:
        machines, rows = cluster(chosen.cluster), read_rows(chosen.evaluate)
        evaluations = [evaluate(row, machines) for row in rows]
    except GlobalTensorError as error:
        raise problem(error) from None
    print(json.dumps([one._asdict() for one in evaluations], indent=2) if chosen.json
          else _evaluation_text(rows, evaluations))
    return 0


def agreement_text(of: Quality) -> str:
    """The agreement of simulated with measured times, in a line."""
    choice = (f"; of {of.groups} choices among plans for the same work, the one ranked first takes {of.choice:.3f} of "
              f"the best measured time, rank correlation {of.rank:.2f}") if of.groups else ""
    return f"{of.rows} measured steps: off by {of.error:.1%} in the mean{choice}"


def _evaluation_text(rows: list[PlanRow], evaluations: list[Evaluation]) -> str:
    titles = ("layers", "hidden", "batch", "micro", "dp", "tp", "pp", "zero", "step", "measured", "memory")
    lines = [tuple(str(size) for size in (row.gpt.layers, row.gpt.hidden, row.plan.global_batch, row.plan.micro_batch,
                                          row.plan.dp, row.plan.tp, row.plan.pp, row.plan.zero))
             + (f"{one.step_time:.4g} s", f"{row.measured:.4g} s" if row.measured else "",
                f"{one.memory / 1e9:.1f} GB" + ("" if one.fits else ": DOES NOT FIT"))
             for row, one in zip(rows, evaluations)]
    table = aligned([titles, *lines], right=set(range(10)))
    agreement = quality(rows, [one.step_time for one in evaluations])
    return "\n".join([*table, *([agreement_text(agreement)] if agreement.rows else [])])
