"""Plan ahead: the fastest parallel plan of a model on a cluster that fits in memory, or what given plans would take.

    globaltensor plan --model gpt --layers 96 --hidden 12288 --heads 96 --seq 2048 --vocab 51200 \\
        --devices 1024 --global-batch 1536 --cluster dgx-a100 --save plan.json
    globaltensor plan --evaluate rows.csv --cluster mine.json

All products dp x tp x pp, micro-batches, stages of ZeRO, schedules and cuts into stages are weighed, and those that can
win are simulated. --dp, --tp and the like fix what they name. `gt.Strategy.load("plan.json")` reads what --save wrote.
Where nothing fits the exit code is 1, and the least change with which something does is named.

--evaluate tells what plans take, by the rows of a table, each a GPT by its sizes and how it is spread:

    gpus,global_batch,micro_batch,hidden,heads,layers,seq,vocab,tp,dp,pp,zero,recompute

and, if you like, schedule, chunks, sp (0 or 1), attention (flash or plain) and measured_ms. Where steps were measured,
the last line says how well the two agree. `globaltensor calibrate` makes the description of a cluster from such rows.
"""
from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

from globaltensor.cli.memory import model, model_options, problem
from globaltensor.cli.problem import Problem, positive
from globaltensor.errors import GlobalTensorError
from globaltensor.planner.pricing import Task
from globaltensor.planner.report import strategy_of
from globaltensor.planner.search import search
from globaltensor.planner.space import Fixed
from globaltensor.planner.strategy import Strategy
from globaltensor.runtime.text_table import aligned
from globaltensor.schedules.generators import GENERATORS
from globaltensor.simulator.calibration import Quality, quality
from globaltensor.simulator.cluster import cluster
from globaltensor.simulator.evaluation import Evaluation, PlanRow, evaluate, read_rows
from globaltensor.simulator.gpt import RECOMPUTE


def options(of: argparse.ArgumentParser) -> None:
    """The command line of `globaltensor plan`."""
    of.add_argument("--evaluate", metavar="FILE", help="a CSV file with a plan in each row")
    of.add_argument("--cluster", default="dgx-a100", metavar="NAME",
                    help="dgx-a100, dgx-h100, or a JSON file (default dgx-a100)")
    of.add_argument("--json", action="store_true", help="the strategy as one JSON object; of rows, a list of objects")
    own = of.add_argument_group("a model")
    model_options(own)
    own.add_argument("--devices", type=positive, metavar="N", help="devices of the cluster; some may stay idle")
    own.add_argument("--global-batch", type=positive, metavar="N", help="samples in a step")
    own.add_argument("--memory", type=_number, metavar="BYTES", help="of a device (default: the cluster's): 80e9")
    own.add_argument("--seconds", type=_number, default=60.0, metavar="N",
                     help="stop the search then, with the best so far and its bound (default 60)")
    own.add_argument("-o", "--save", metavar="FILE", help="write the strategy, for gt.Strategy.load")
    fixed = of.add_argument_group("not to be chosen, but given")
    for name, what in (("dp", "data-parallel ranks"), ("tp", "tensor-parallel ranks"), ("pp", "pipeline ranks"),
                       ("chunks", "stages on each rank"), ("micro-batch", "samples at a time")):
        fixed.add_argument(f"--{name}", type=positive, metavar="N", help=what)
    fixed.add_argument("--zero", type=int, choices=range(4), help="stage of ZeRO over dp")
    fixed.add_argument("--recompute", choices=RECOMPUTE, help="which activations are computed again")
    fixed.add_argument("--schedule", choices=list(GENERATORS), help="of the pipeline")
    fixed.add_argument("--sp", action=argparse.BooleanOptionalAction, help="sequence parallel, along tp, or not")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def command(chosen: argparse.Namespace) -> int:
    """Print the fastest plan, or what given plans take."""
    if (chosen.evaluate is None) == (chosen.model is None):
        raise Problem("plan what?\n  try: --model gpt --layers ... --devices ... --global-batch ..., or "
                      "--evaluate rows.csv")
    try:
        return _evaluated(chosen) if chosen.evaluate else _planned(chosen)
    except GlobalTensorError as error:
        raise problem(error) from None


def _planned(chosen: argparse.Namespace) -> int:
    gpt = model(chosen)
    for name, usual in (("devices", 8), ("global_batch", 512)):
        if getattr(chosen, name) is None:
            option = f"--{name.replace('_', '-')}"
            raise Problem(f"which {option}?\n  try: {option} {usual}")
    machines = cluster(chosen.cluster)
    if chosen.memory is not None:
        machines = replace(machines, memory=chosen.memory)
    machines.machine(chosen.devices)                 # raises where it has fewer
    fixed = Fixed(chosen.dp, chosen.tp, chosen.pp, chosen.sp, chosen.micro_batch, chosen.zero, chosen.recompute,
                  chosen.schedule, chosen.chunks)
    task = Task(gpt, machines, chosen.devices, chosen.global_batch, fixed)
    begin = time.monotonic()
    result = search(task, chosen.seconds)
    strategy = strategy_of(task, result, time.monotonic() - begin)
    if chosen.save:
        try:
            strategy.save(chosen.save)
        except OSError as error:
            raise Problem(f"{chosen.save} could not be written: {error}", 1) from None
    print(strategy.as_text() if chosen.json else _strategy_report(strategy))
    return 0 if strategy["feasible"] else 1


def _strategy_report(of: Strategy) -> str:
    rows = [("by hand", "plan", "step", "memory")]
    rows += [(one["name"], one["plan"], f"{one['step_time']:.4g} s", f"{one['memory'] / 1e9:.1f} GB")
             if one["feasible"] else (one["name"], "does not fit", "", "") for one in of["menu"]]
    others = [(one["name"], f"{one['step_time']:.4g} s", f"{one['memory'] / 1e9:.1f} GB")
              for one in of.get("runners_up", [])]
    return "\n".join([str(of), "", *aligned(rows, right={2, 3}),
                      *(["", "next best", *aligned(others, right={1, 2})] if others else []), "",
                      f"{of['candidates']:,} plans were weighed in {of['search_seconds']:.1f} s"])


def _evaluated(chosen: argparse.Namespace) -> int:
    machines, rows = cluster(chosen.cluster), read_rows(chosen.evaluate)
    evaluations = [evaluate(row, machines) for row in rows]
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
