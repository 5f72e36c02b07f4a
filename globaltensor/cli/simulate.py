"""Simulate a pipeline schedule: bubbles, memory and step time.

    globaltensor simulate --schedule zb-h1 --stages 8 --micro-batches 24 --times 18.522,18.086,9.337,0.601
    globaltensor simulate --schedule mine.txt --times 1,1,1,0 --text
    globaltensor simulate --model gpt --layers 128 --hidden 25600 --heads 160 --seq 2048 --vocab 51200 \\
        --tp 8 --pp 64 --dp 6 --micro-batch 1 --global-batch 3072 --cluster dgx-a100

Give either times, or a model and a cluster. --times TF,TB,TW,Tcomm are in any one unit: for one micro-batch, how long
a rank takes for the forward pass, the gradients of inputs and the gradients of weights, and how long a transfer takes
from one rank to another. With a model, all times are in seconds.

The report has these terms:

    span          the longest time of any rank, from its first action to its last
    makespan      the time from the first action of all to the last
    bubble rate   (span - work) / span, of the rank with the longest span
    step time     the makespan; with a model, also the gradient reductions and the optimizer step that follow

--zero 3 gathers the parameters of a stage before each forward and each backward pass, which wait for them. --plot
draws the step, --trace writes it for Perfetto (ui.perfetto.dev), and --text prints it as a timetable. --report writes
a page that a browser opens from disk: thousands of ranks and micro-batches, to zoom into.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
from fractions import Fraction
from typing import Any

from globaltensor.cli.memory import model, number, problem
from globaltensor.cli.problem import Problem, check_new_file, unwritable
from globaltensor.cli.report import write_page
from globaltensor.errors import GlobalTensorError
from globaltensor.runtime.text_table import aligned, terminal_columns
from globaltensor.runtime.units import bytes_text, seconds_text
from globaltensor.schedules import text, timetable
from globaltensor.schedules.check import activation_history, check_schedule, peak_activations
from globaltensor.schedules.communication import routes
from globaltensor.schedules.generators import GENERATORS, generate
from globaltensor.schedules.schedule import Schedule
from globaltensor.simulator.costs import Costs, exact
from globaltensor.simulator.engine import SimulatedRun, simulate
from globaltensor.simulator.group_training import peak_flops, rooms_of_ranks, simulate_on
from globaltensor.simulator.groups import read_cluster
from globaltensor.simulator.report import simulation_report
from globaltensor.simulator.training import SimulatedStep, TrainingPlan

_TO_SIMULATE = 4_000_000                             # forward passes: some ten seconds for each million
_TO_SHOW = 300_000                                    # more actions than this make no picture
_ON_A_PAGE = 20_000_000                               # more than this no browser can hold



def command(chosen: argparse.Namespace) -> int:
    """Simulate one step and report it."""
    if chosen.list:
        print("\n".join(GENERATORS))
        return 0
    if chosen.schedule and chosen.schedule not in GENERATORS and not _names_a_file(chosen.schedule):
        try:
            generate(chosen.schedule, 1, 1)           # raises: the name is wrong, whatever else is missing
        except GlobalTensorError as error:
            raise problem(error) from None
    if (chosen.times is None) == (chosen.model is None):
        raise Problem(f"{'what do the actions take' if chosen.times is None else 'both --times and --model'}?\n"
                      "  try: --times 1,1,1,0, or --model gpt --layers ...")
    if chosen.plot is not None:
        check_new_file(chosen.plot, "--plot")
    show = bool(chosen.text or chosen.plot or chosen.trace)
    try:
        own = text.read_schedule(chosen.schedule) if chosen.schedule and _names_a_file(chosen.schedule) else None
        if own:
            check_schedule(own)
        simulated = _with_times if chosen.times else _with_model
        run, step, summary = simulated(chosen, own, show or chosen.report is not None)
    except GlobalTensorError as error:
        raise problem(error, chosen.schedule or "") from None
    if show and len(run.schedule) > _TO_SHOW:
        raise Problem(f"{len(run.schedule):,} actions are too many to show\n  try: fewer micro-batches")
    _show(chosen, run, step, summary)
    if chosen.report is not None:
        if len(run.schedule) > _ON_A_PAGE:
            raise Problem(f"{len(run.schedule):,} actions are too many for a page\n  try: fewer micro-batches")
        write_page(chosen.report, simulation_report(run, step, dict(_facts_text(summary))))
    print(json.dumps(summary, indent=2) if chosen.json else _simulation_text(summary))
    return 0


def _with_times(chosen: argparse.Namespace, own: Schedule | None,
                record: bool) -> tuple[SimulatedRun, None, dict[str, Any]]:
    for name in ("schedule",) if own else ("schedule", "stages", "micro_batches"):
        if getattr(chosen, name) is None:
            raise Problem(f"which --{name.replace('_', '-')}?\n  try: --schedule 1f1b --stages 4 --micro-batches 8")
    if own is None:
        _check_actions(chosen.stages, chosen.chunks, chosen.micro_batches)
    schedule = own or generate(chosen.schedule, chosen.stages, chosen.micro_batches, chosen.chunks)
    run = simulate(schedule, Costs.exact(chosen.times.split(","), schedule.stages, schedule.chunks), record)
    peaks = peak_activations(schedule, _share(chosen.weight_share))
    return run, None, _facts(run) | {"step_time": number(run.makespan),
                                     "peak_activations": [number(peak) for peak in peaks], "links": _links(schedule)}


def _check_actions(ranks: int, chunks: int | None, micro_batches: int) -> None:
    """Raise Problem where a simulation would take minutes."""
    forwards = ranks * (chunks or 1) * micro_batches
    if forwards > _TO_SIMULATE:
        raise Problem(f"{forwards:,} forward passes are too many to simulate: at most {_TO_SIMULATE:,}\n"
                      "  try: fewer stages or micro-batches")


def _share(text: str) -> Fraction:
    try:
        share = exact(text)
    except (ValueError, ArithmeticError):
        raise Problem(f"--weight-share {text} is not a number\n  try: --weight-share 1/2") from None
    if not 0 <= share <= 1:
        raise Problem(f"--weight-share {text} is not a share, from 0 to 1\n  try: --weight-share 1/2")
    return share


def _with_model(chosen: argparse.Namespace, own: Schedule | None,
                record: bool) -> tuple[SimulatedRun, SimulatedStep, dict[str, Any]]:
    gpt = model(chosen)
    if chosen.global_batch is None:
        raise Problem(f"which --global-batch?\n  try: --global-batch {chosen.dp * chosen.pp * 4 * chosen.micro_batch}")
    plan = TrainingPlan(chosen.micro_batch, chosen.global_batch, chosen.dp, chosen.tp, chosen.pp,
                        chosen.schedule or "1f1b", chosen.chunks, chosen.zero, chosen.recompute, chosen.sp)
    if own is None:
        _check_actions(plan.pp, plan.chunks, plan.micro_batches)
    machines = read_cluster(chosen.cluster)
    step = simulate_on(gpt, plan, machines, record, own)
    memory, rooms = [a + b for a, b in zip(step.states, step.activations)], rooms_of_ranks(machines, plan)
    tokens = chosen.global_batch * chosen.seq
    return step.run, step, _facts(step.run) | {
        "step_time": step.seconds, "cluster": machines.name, "devices": plan.devices,
        "parameters": gpt.parameters, "flops": number(step.operations), "tokens_per_second": tokens / step.seconds,
        "tflops_per_device": float(step.operations) / step.seconds / plan.devices / 1e12,
        "share_of_peak": float(step.operations) / step.seconds / peak_flops(machines, plan),
        "peak_activations": [number(peak) for peak in peak_activations(step.run.schedule)],
        "memory": {"per_rank": memory, "model_states": step.states, "activations": step.activations,
                   "device": min(rooms), "fits": all(own <= room for own, room in zip(memory, rooms))},
        "traffic": {name: {"bytes": one.bytes, "seconds": one.seconds} for name, one in
                    (("tensor_parallel", step.tensor), ("between_stages", step.stage), ("data_parallel", step.data))},
        "links": _links(step.run.schedule, step.stage.crossing)}


def _facts(run: SimulatedRun) -> dict[str, Any]:
    schedule = run.schedule
    return {"schedule": schedule.name, "ranks": schedule.ranks, "stages": schedule.stages,
            "micro_batches": schedule.micro_batches, "bubble_rate": float(run.bubble_rate),
            "span": number(run.span), "makespan": number(run.makespan), "work": number(max(run.work)),
            "spans": [number(span) for span in run.spans]}


def _links(schedule: Schedule, nbytes: int | None = None) -> list[dict[str, int]]:
    """What goes over each link between pipeline ranks in a step; bytes that one device gets from the other stage."""
    to, counts = routes(schedule.rank_of), dict[tuple[int, int], int]()
    for targets in to:
        for rank, target in zip(schedule.rank_of, targets):
            if target >= 0:
                counts[rank, target] = counts.get((rank, target), 0) + schedule.micro_batches
    return [{"from": a, "to": b, "transfers": n, **({} if nbytes is None else {"bytes": n * nbytes})}
            for (a, b), n in sorted(counts.items())]


def _show(chosen: argparse.Namespace, run: SimulatedRun, step: SimulatedStep | None, summary: dict[str, Any]) -> None:
    if not (chosen.text or chosen.plot or chosen.trace):
        return
    events = run.events()
    if chosen.text and chosen.json:
        summary["timetable"] = timetable.as_text(events).splitlines()
    elif chosen.text:
        label = len(f"rank {run.schedule.ranks - 1}  ")
        columns = shutil.get_terminal_size((240 + label, 0)).columns
        print(timetable.as_text(events, max(columns - label, 20)), end="\n\n")
    path = chosen.plot or chosen.trace
    try:
        if chosen.plot:
            title = f"{run.schedule.name}: bubble {summary['bubble_rate']:.1%}"
            timetable.draw(chosen.plot, {title: events}, "seconds" if step else "time")
        if chosen.trace:
            path = chosen.trace
            counters = {"memory in GB" if step else "activations": _curve(run, step, events)}
            timetable.write_trace(chosen.trace, events, 1e6 if step else 1.0, counters)
    except ImportError:
        raise Problem("--plot needs matplotlib\n  try: pip install 'globaltensor[plot]'", 1) from None
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from None


def _curve(run: SimulatedRun, step: SimulatedStep | None,
           events: list[timetable.Event]) -> list[tuple[int, float, float]]:
    """What each rank keeps over time: a forward adds when it begins, the others free when they end."""
    points, event = [], iter(events)
    for rank, (row, held) in enumerate(zip(run.schedule.actions, activation_history(run.schedule))):
        always, each = (step.states[rank] / 1e9, step.per_micro_batch[rank] / 1e9) if step else (0.0, 1.0)
        for action, value in zip(row, held):
            e = next(event)
            points.append((rank, e.start if action.kind == "F" else e.end, always + each * float(value)))
    return points


def _names_a_file(name: str) -> bool:
    return name not in GENERATORS and (os.path.isfile(name) or os.sep in name or name.endswith((".txt", ".csv")))


def _simulation_text(summary: dict[str, Any]) -> str:
    return "\n".join(aligned(_facts_text(summary), columns=terminal_columns()))


def _facts_text(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What a simulation found, by name."""
    peaks, time = summary["peak_activations"], seconds_text if "cluster" in summary else "{:.6g}".format
    rows = [("schedule", f"{summary['schedule']}, {summary['stages']} stages on {summary['ranks']} ranks, "
             f"{summary['micro_batches']} micro-batches"),
            ("step time", time(summary["step_time"])), ("longest rank span", time(summary["span"])),
            ("makespan", time(summary["makespan"])),
            ("bubble rate", f"{summary['bubble_rate']:.4f}"),
            ("peak activations", " ".join(f"{peak:g}" for peak in peaks[:16]) + (" ..." if len(peaks) > 16 else ""))]
    if "cluster" in summary:
        memory, traffic = summary["memory"], summary["traffic"]
        rows += [("model", f"{summary['parameters'] / 1e9:,.4g} billion parameters"),
                 ("devices", f"{summary['devices']:,} of {summary['cluster']}"),
                 ("tokens/s", f"{summary['tokens_per_second']:,.0f}"),
                 ("per device", f"{summary['tflops_per_device']:.1f} TFLOP/s, "
                  f"{summary['share_of_peak']:.0%} of its peak"),
                 ("memory", f"{bytes_text(max(memory['per_rank']))} of {bytes_text(memory['device'])}"
                  + ("" if memory["fits"] else ": DOES NOT FIT"))]
        rows += [(name.replace("_", " "), f"{bytes_text(one['bytes'])}, {seconds_text(one['seconds'])}"
                  + (" each" if name == "between_stages" else " a step")) for name, one in traffic.items()]
    return rows
