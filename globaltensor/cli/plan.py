"""Find the fastest parallel plan for a model on a cluster, or evaluate given plans.

    globaltensor plan --model gpt --layers 96 --hidden 12288 --heads 96 --seq 2048 --vocab 51200 \\
        --devices 1024 --global-batch 1536 --cluster dgx-a100 --save plan.json
    globaltensor plan --program train.py:build --devices 8 --pin 'blocks.*.up.weight=tp:S(0)'
    globaltensor plan --evaluate rows.csv --cluster mine.json

--program plans any model, as gt.strategy does: the function returns (module, example batch, loss), where loss takes
the module's output; or (module, example batch, loss, targets), where it takes the targets too. A loss of None means
that the module returns its loss.

The search covers all products dp x tp x pp, micro-batch sizes, ZeRO stages, schedules and cuts into stages, and
simulates those that could be the fastest. Options such as --dp and --tp fix a choice. `gt.Strategy.load("plan.json")`
reads what --save wrote. If no plan fits in memory, the exit code is 1, and the output names the smallest change that
makes one fit.

--explain compares each choice with the fastest plan that differs in it, and says what each fixed option costs. --plot
draws the stages, the timetable and the candidates.

--evaluate reads a table with one plan per row, each for a GPT of the given sizes:

    gpus,global_batch,micro_batch,hidden,heads,layers,seq,vocab,tp,dp,pp,zero,recompute

Further columns are optional: schedule, chunks, sp (0 or 1), attention (flash or plain) and measured_ms. If steps were
measured, the last line says how well the prediction agrees. `globaltensor calibrate` fits a cluster to such rows.
"""
from __future__ import annotations

import argparse
import errno
import json
import os
import re
from collections.abc import Callable

from globaltensor.cli.memory import model, problem
from globaltensor.cli.problem import Problem, unwritable
from globaltensor.cli.program import as_options, load_program
from globaltensor.errors import GlobalTensorError, where
from globaltensor.planner.explaining import GptSearch, explanation_of, explanation_text
from globaltensor.planner.gpt_on_groups import plan_gpt
from globaltensor.planner.graph import CaptureError
from globaltensor.planner.planning import strategy as plan_model
from globaltensor.planner.plotting import candidate_points, draw_plan
from globaltensor.planner.space import Fixed
from globaltensor.planner.strategy import Strategy
from globaltensor.runtime.text_table import aligned, terminal_columns
from globaltensor.runtime.units import bytes_text, seconds_text
from globaltensor.simulator.calibration import Quality, quality
from globaltensor.simulator.cluster import Cluster
from globaltensor.simulator.evaluation import Evaluation, PlanRow, evaluate, read_rows
from globaltensor.simulator.groups import ClusterGroups, read_cluster, with_memory
from globaltensor.simulator.training import simulate_training

_SIZES = "the sizes of a model are those of the program's own"
_OF_ROWS = "each row says it for itself"
_NOT_WITH: dict[str, dict[str, str]] = {             # options that would do nothing, and why
    "model": {"pin": "pins name parameters of a module, and a model by its sizes has none"},
    "program": dict.fromkeys(("layers", "hidden", "heads", "seq", "vocab", "flash"), _SIZES),
    "evaluate": dict.fromkeys((
        "layers", "hidden", "heads", "seq", "vocab", "flash", "devices", "global_batch", "dp", "tp", "pp", "zero",
        "recompute", "schedule", "chunks", "micro_batch", "sp", "pin"), _OF_ROWS) | dict.fromkeys(
        ("save", "explain", "plot"), "nothing is planned")}


def command(chosen: argparse.Namespace) -> int:
    """Print the fastest plan, or what given plans take."""
    kinds = [kind for kind in ("model", "program", "evaluate") if getattr(chosen, kind) is not None]
    if len(kinds) != 1:
        what = " and ".join(f"--{kind}" for kind in kinds)
        raise Problem((f"{what} are one too many: plan one thing" if kinds else "plan what?") +
                      "\n  try: --model gpt --layers ... --devices ... --global-batch ..., --program FILE.py:FUNCTION "
                      "--devices ..., or --evaluate rows.csv")
    kind, = kinds
    for name in _NOT_WITH[kind]:
        if getattr(chosen, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise Problem(f"--{kind} takes no {option}\n  why: {_NOT_WITH[kind][name]}\n  try: without {option}")
    try:
        return {"model": _planned, "program": _planned_program, "evaluate": _evaluated}[kind](chosen)
    except GlobalTensorError as error:
        raise problem(error) from None


def _planned(chosen: argparse.Namespace) -> int:
    gpt = model(chosen)
    for name, usual in (("devices", 8), ("global_batch", 512)):
        if getattr(chosen, name) is None:
            option = f"--{name.replace('_', '-')}"
            raise Problem(f"which {option}?\n  try: {option} {usual}")
    fixed = Fixed(chosen.dp, chosen.tp, chosen.pp, chosen.sp, chosen.micro_batch, chosen.zero, chosen.recompute,
                  chosen.schedule, chosen.chunks)
    task, result, strategy = plan_gpt(gpt, _machines_of(chosen), chosen.devices, chosen.global_batch, fixed,
                                      chosen.seconds)
    if chosen.explain and result.best:
        strategy["explanation"] = explanation_of(GptSearch(task), result.best, chosen.seconds)
    if chosen.save:
        _write_file(chosen.save, strategy.save)
    if chosen.plot and result.best:
        best = result.best
        events = simulate_training(task.gpt, best.plan, task.cluster, record=True).run.events()
        points = candidate_points(task, result.simulated_plans)
        _write_file(chosen.plot, lambda path: draw_plan(path, strategy, events, points))
    print(strategy.as_text() if chosen.json else _strategy_report(strategy))
    return 0 if strategy["feasible"] else 1


def _machines_of(chosen: argparse.Namespace) -> Cluster | ClusterGroups:
    machines = read_cluster(chosen.cluster)
    return machines if chosen.memory is None else with_memory(machines, chosen.memory)


def _planned_program(chosen: argparse.Namespace) -> int:
    if chosen.devices is None:
        raise Problem("which --devices?\n  try: --devices 8")
    program = load_program(chosen.program)
    try:
        strategy = plan_model(
            program.module, program.batch, chosen.cluster, chosen.devices, chosen.global_batch, program.loss,
            program.targets, dp=chosen.dp, tp=chosen.tp, pp=chosen.pp, zero=chosen.zero, recompute=chosen.recompute,
            schedule=chosen.schedule, chunks=chosen.chunks, micro_batch=chosen.micro_batch, sp=chosen.sp,
            pins=chosen.pin or (), memory=chosen.memory, seconds=chosen.seconds, explain=chosen.explain,
            plot=chosen.plot)
    except GlobalTensorError as error:
        error.fix = as_options(error.fix)
        is_of_program = isinstance(error, CaptureError) and error.where != where()
        raise problem(error, error.where if is_of_program else "") from None
    if chosen.save:
        _write_file(chosen.save, strategy.save)
    print(strategy.as_text() if chosen.json else _strategy_report(strategy))
    return 0 if strategy["feasible"] else 1


def _write_file(path: str, write: Callable[[str], None]) -> None:
    if os.path.isdir(path):
        raise unwritable(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    try:
        write(path)
    except ImportError:
        raise Problem("--plot needs matplotlib\n  try: pip install 'globaltensor[plot]'", 1) from None
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from None


def _strategy_report(of: Strategy) -> str:
    rows = [("by hand", "plan", "step", "memory")]
    rows += [(one["name"], one["plan"], seconds_text(one["step_time"]), bytes_text(one["memory"]))
             if one["feasible"] else (one["name"], "does not fit", "", "") for one in of["menu"]]
    others = [(one["name"], seconds_text(one["step_time"]), bytes_text(one["memory"]))
              for one in of.get("runners_up", [])]
    columns = terminal_columns()
    why = ["", explanation_text(of["explanation"], of["step_time"])] if "explanation" in of else []
    summary = re.sub(r"(?m)^  (try|or) ([a-z ]+): ", lambda m: f"  {m[1]} --{m[2].replace(' ', '-')} ", str(of))
    return "\n".join([summary, "", *aligned(rows, right={2, 3}, columns=columns),
                      *(["", "next best", *aligned(others, right={1, 2}, columns=columns)] if others else []), *why, "",
                      f"{of['candidates']:,} plans were weighed in {seconds_text(of['search_seconds'])}"])


def _evaluated(chosen: argparse.Namespace) -> int:
    machines, rows = _machines_of(chosen), read_rows(chosen.evaluate)
    evaluations = [evaluate(row, machines) for row in rows]
    print(json.dumps([one._asdict() for one in evaluations], indent=2) if chosen.json
          else _evaluation_text(rows, evaluations))
    return 0


def agreement_text(of: Quality) -> str:
    """The agreement of simulated with measured times, in a line."""
    choice = (f"; of {of.groups} choices among plans for the same work, the one ranked first takes {of.choice:.3f} of "
              f"the best measured time, rank correlation {of.rank:.2f}") if of.groups else ""
    return f"{of.rows} measured steps: off by {of.error:.1%} on average{choice}"


def _evaluation_text(rows: list[PlanRow], evaluations: list[Evaluation]) -> str:
    titles = ("layers", "hidden", "batch", "micro", "dp", "tp", "pp", "zero", "step", "measured", "memory")
    lines = [tuple(str(size) for size in (row.gpt.layers, row.gpt.hidden, row.plan.global_batch, row.plan.micro_batch,
                                          row.plan.dp, row.plan.tp, row.plan.pp, row.plan.zero))
             + (seconds_text(one.step_time), seconds_text(row.measured) if row.measured else "",
                bytes_text(one.memory) + ("" if one.fits else ": DOES NOT FIT"))
             for row, one in zip(rows, evaluations)]
    table = aligned([titles, *lines], right=set(range(10)), columns=terminal_columns())
    agreement = quality(rows, [one.step_time for one in evaluations])
    return "\n".join([*table, *([agreement_text(agreement)] if agreement.rows else [])])
