"""Why a plan is as it is: for each choice, the fastest plan that differs in it, and how much longer its step is.

    mesh        dp, tp and pp: what is fastest with another size of each, all else chosen anew
    on it       ZeRO, recomputation, the micro-batch, the schedule, its chunks, sequence parallelism: what is fastest on
                the same mesh with another value
    cut         the next best way to cut the same plan into stages
    fixed       what is fastest without each thing that was fixed: what fixing it costs
    plain dp    one replica on each device: what it takes, or why it cannot be

Each is a search of its own with one value excluded, so what it names is exact where the search is.
"""
from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from globaltensor.planner.pricing import Candidate, Task
from globaltensor.planner.report import parts_of_time, plan_text
from globaltensor.planner.search import least_memory, search
from globaltensor.planner.space import BatchError, Fixed
from globaltensor.runtime.text_table import aligned
from globaltensor.runtime.units import bytes_text, seconds_text
from globaltensor.simulator.gpt import RECOMPUTE

_NAMES = {"sequence_parallel": "sp", "micro_batch": "micro-batch", "zero": "ZeRO", "cut": "stage cut"}


def explanation_of(task: Task, best: Candidate, seconds: float = 60.0) -> dict[str, Any]:
    """The explanation of a plan that a search of this task found, as data. Searches that are not begun within so many
    seconds are left out, and say so: their `runner_up` is None and `why` tells it."""
    until = time.monotonic() + seconds
    return {"choices": [_compared(task, best, *choice, until) for choice in _choices(task, best)],
            "fixed": [_cost_of_fixing(task, best, name, value, until)
                      for name, value in vars(task.fixed).items() if value is not None and name != "excluded"],
            "plain_dp": _plain_dp(task, best)}


def _choices(task: Task, best: Candidate) -> Iterator[tuple[str, str, list[Fixed]]]:
    """Each choice that was free: its name, what was chosen, and what makes a search choose another."""
    plan, fixed = best.plan, task.fixed
    for name in ("dp", "tp", "pp"):
        if getattr(fixed, name) is None:
            yield name, str(getattr(plan, name)), [_excluding(fixed, name, getattr(plan, name))]
    on_mesh = replace(fixed, dp=plan.dp, tp=plan.tp, pp=plan.pp)
    several = {"zero": plan.dp > 1, "micro_batch": True, "sequence_parallel": plan.tp > 1, "schedule": plan.pp > 1,
               "chunks": plan.pp > 1}
    for name, is_choice in several.items():
        if is_choice and getattr(fixed, name) is None:
            value = getattr(plan, name)
            yield name, _value_text(value), [_excluding(on_mesh, name, value)]
    if fixed.recompute is None:
        chosen = sorted(set(plan.recompute_of_ranks), key=RECOMPUTE.index)
        yield "recompute", " and ".join(chosen), [replace(on_mesh, recompute=one) for one in RECOMPUTE
                                                  if [one] != chosen]
    if plan.pp > 1:
        same = replace(on_mesh, micro_batch=plan.micro_batch, zero=plan.zero, schedule=plan.schedule,
                       chunks=plan.chunks, sequence_parallel=plan.sequence_parallel)
        yield "cut", cut_text(plan.layers), [_excluding(same, "cut", plan.layers)]


def _value_text(value: object) -> str:
    return str(value) if not isinstance(value, bool) else "on" if value else "off"


def _excluding(fixed: Fixed, name: str, value: object) -> Fixed:
    return replace(fixed, excluded=fixed.excluded | {(name, value)})


def _fastest(task: Task, several: list[Fixed], until: float) -> Candidate | None:
    """The fastest plan of any of these."""
    fastest = []
    for fixed in several:
        try:
            fastest.append(search(replace(task, fixed=fixed), max(until - time.monotonic(), 0.0), menu=False).best)
        except BatchError:                           # no plan at all has such a choice
            continue
    return min(filter(None, fastest), key=lambda one: one.seconds, default=None)


def _compared(task: Task, best: Candidate, name: str, chosen: str, several: list[Fixed],
              until: float) -> dict[str, Any]:
    head = {"choice": _NAMES.get(name, name), "chosen": chosen}
    if time.monotonic() >= until:
        return head | {"runner_up": None, "why": "there was no time left to search for another"}
    other = _fastest(task, several, until)
    if other is None:
        return head | {"runner_up": None, "why": "no other fits"}
    return head | {"runner_up": _difference_text(other, best, name), "step_time": other.seconds,
                   "costs": other.seconds - best.seconds}


def _difference_text(other: Candidate, best: Candidate, name: str) -> str:
    """A plan in a line, with its stages where they are what differs."""
    return f"{cut_text(other.plan.layers)}" if name == "cut" else plan_text(other.plan)


def _cost_of_fixing(task: Task, best: Candidate, name: str, value: object, until: float) -> dict[str, Any]:
    head = {"choice": _NAMES.get(name, name), "fixed": _value_text(value)}
    if time.monotonic() >= until:
        return head | {"without": None, "why": "there was no time left to search without it"}
    rest: dict[str, Any] = {name: None}
    free = _fastest(task, [replace(task.fixed, **rest)], until)
    if free is None or free.seconds > best.seconds:   # a search that was stopped may find less than it was given
        free = best
    return head | {"without": plan_text(free.plan), "step_time": free.seconds, "costs": best.seconds - free.seconds}


def _plain_dp(task: Task, best: Candidate) -> dict[str, Any]:
    """What one replica on each device takes."""
    plain = replace(task, fixed=Fixed(dp=task.devices, tp=1, pp=1, zero=0))
    try:
        one = search(plain, menu=False).best
        if one is None:
            needs = least_memory(plain)
            return {"fits": False, "needs": needs, "device": task.cluster.memory,
                    "why": f"a device holds the whole model: at least {bytes_text(needs)}, of the "
                           f"{bytes_text(task.cluster.memory)} that it has"}
    except BatchError as error:
        return {"fits": False, "why": f"{error.what}: {error.why}"}
    parts = {name: seconds_text(seconds) for name, seconds in parts_of_time(task, one.plan).items()}
    return {"fits": True, "step_time": one.seconds, "costs": one.seconds - best.seconds, "plan": plan_text(one.plan),
            "why": "it is this plan" if one.plan == best.plan else
            f"it communicates for {parts['communication']} and computes for {parts['compute']}"}


def cut_text(layers: tuple[int, ...]) -> str:
    """Layers of each stage in a few characters: `13 12 12 11`, or `12 x 7, 10`."""
    runs: list[list[int]] = []
    for n in layers:
        if runs and runs[-1][0] == n:
            runs[-1][1] += 1
        else:
            runs.append([n, 1])
    if len(layers) <= 6:
        return " ".join(map(str, layers))
    return ", ".join(f"{n} x {times}" if times > 1 else str(n) for n, times in runs)


def explanation_text(of: Mapping[str, Any], step_time: float) -> str:
    """As a table: choices, what fixing costs, plain data parallelism."""
    rows = [("choice", "here", "fastest otherwise", "step", "costs")]
    rows += [(one["choice"], one["chosen"], *_cost_cells(one, one["runner_up"], step_time)) for one in of["choices"]]
    lines = aligned(rows, right={3, 4})
    if of["fixed"]:
        rows = [("fixed", "to", "fastest without", "step", "costs")]
        rows += [(one["choice"], one["fixed"], *_cost_cells(one, one["without"], step_time)) for one in of["fixed"]]
        lines += ["", *aligned(rows, right={3, 4})]
    plain = of["plain_dp"]
    took = f" {seconds_text(plain['step_time'])}, {plain['costs'] / step_time:+.1%};" if plain["fits"] else ""
    return "\n".join([*lines, "", f"plain dp:{took} {plain['why']}"])


def _cost_cells(one: Mapping[str, Any], other: str | None, step_time: float) -> tuple[str, str, str]:
    if other is None:
        return one["why"], "", ""
    return other, seconds_text(one["step_time"]), f"{one['costs'] / step_time:+.2%}"
