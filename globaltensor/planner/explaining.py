"""Why a plan is as it is: for each choice, the fastest plan that differs in it, and how much longer its step is.

    mesh        dp, tp and pp: what is fastest with another size of each, all else chosen anew
    on it       ZeRO, recomputation, the micro-batch, the schedule, its chunks, sequence parallelism: what is fastest on
                the same mesh with another value
    cut         the next best way to cut the same plan into stages
    fixed       what is fastest without each thing that was fixed, pins too: what fixing it costs
    plain dp    one replica on each device: what it takes, or why it cannot be

Each is a search of its own with one value excluded, so what it names is exact where the search is.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple, Protocol

from globaltensor.planner.pricing import Candidate, Task
from globaltensor.planner.report import parts_of_time, plan_text
from globaltensor.planner.search import least_memory, search
from globaltensor.planner.space import BatchError, Fixed
from globaltensor.runtime.text_table import aligned
from globaltensor.runtime.units import bytes_text, seconds_text
from globaltensor.simulator.gpt import RECOMPUTE

_NAMES = {"sequence_parallel": "sp", "micro_batch": "micro-batch", "zero": "ZeRO", "cut": "stage cut",
          "kind": "layouts", "own_meshes": "meshes"}


class PlanChoices(NamedTuple):
    """What was chosen in a plan. `layers`: of each stage; `recompute`: of each rank of the pipeline; `kind`: under
    which rows along tp, where `sequence_parallel` does not tell; `own_meshes`: not all ranks of the pipeline have the
    same mesh, and the sizes are those of the first."""

    dp: int
    tp: int
    pp: int
    zero: int
    micro_batch: int
    sequence_parallel: bool
    schedule: str
    chunks: int
    recompute: tuple[str, ...]
    layers: tuple[int, ...]
    kind: str = ""
    own_meshes: bool = False


class Searchable(Protocol):
    """What is to be planned, as something that can be planned again with other choices."""

    fixed: Fixed
    devices: int
    memory: float
    recomputes: tuple[str, ...]

    def fastest(self, fixed: Fixed, seconds: float) -> Any:
        """The fastest plan with these choices, after so many seconds at most; None where none fits. Raises
        BatchError where there is no plan at all."""

    def choices(self, plan: Any) -> PlanChoices:
        """What was chosen in it."""

    def text(self, plan: Any) -> str:
        """It in a line."""

    def parts(self, plan: Any) -> Mapping[str, float]:
        """Where the time of a step goes."""

    def least_memory(self, fixed: Fixed) -> float:
        """Bytes that a device needs at least."""


class GptSearch:
    """A GPT by its sizes."""

    recomputes: tuple[str, ...] = RECOMPUTE

    def __init__(self, task: Task) -> None:
        self.task, self.fixed, self.devices, self.memory = task, task.fixed, task.devices, task.cluster.memory

    def fastest(self, fixed: Fixed, seconds: float) -> Candidate | None:
        return search(replace(self.task, fixed=fixed), seconds, menu=False).best

    def choices(self, plan: Candidate) -> PlanChoices:
        of = plan.plan
        return PlanChoices(of.dp, of.tp, of.pp, of.zero, of.micro_batch, of.sequence_parallel, of.schedule,
                           of.chunks or 1, of.recompute_of_ranks, of.layers)

    def text(self, plan: Candidate) -> str:
        return plan_text(plan.plan)

    def parts(self, plan: Candidate) -> Mapping[str, float]:
        return parts_of_time(self.task, plan.plan)

    def least_memory(self, fixed: Fixed) -> float:
        return least_memory(replace(self.task, fixed=fixed))


def explanation_of(of: Searchable, best: Any, seconds: float = 60.0) -> dict[str, Any]:
    """The explanation of a plan that such a search found, as data. Searches that are not begun within so many seconds
    are left out, and say so: their `runner_up` is None and `why` tells it."""
    until = time.monotonic() + seconds
    return {"choices": [_compared(of, best, *choice, until) for choice in _free_choices(of, best)],
            "fixed": [cost_of_fixing(of, best, name, value, _unfixed(of.fixed, name), of.fastest, until)
                      for name, value in vars(of.fixed).items() if value is not None and name != "excluded"],
            "plain_dp": _plain_dp(of, best)}


def _free_choices(of: Searchable, best: Any) -> Iterator[tuple[str, str, list[Fixed]]]:
    """Each choice that was free: its name, what was chosen, and what makes a search choose another."""
    plan, fixed = of.choices(best), of.fixed
    for name in ("dp", "tp", "pp"):
        if getattr(fixed, name) is None:
            yield name, str(getattr(plan, name)), [_excluding(fixed, name, getattr(plan, name))]
    on_mesh = fixed if plan.own_meshes else replace(fixed, dp=plan.dp, tp=plan.tp, pp=plan.pp)
    if plan.own_meshes:
        yield "own_meshes", "of each stage", [_excluding(fixed, "own_meshes", True)]
    several = {"zero": plan.dp > 1, "micro_batch": True, "sequence_parallel": plan.tp > 1 and not plan.kind,
               "kind": bool(plan.kind), "schedule": plan.pp > 1, "chunks": plan.pp > 1}
    for name, is_choice in several.items():
        if is_choice and getattr(fixed, name, None) is None:
            value = getattr(plan, name)
            yield name, _value_text(value), [_excluding(on_mesh, name, value)]
    if fixed.recompute is None:
        chosen = sorted(set(plan.recompute), key=RECOMPUTE.index)
        yield "recompute", " and ".join(chosen), [replace(on_mesh, recompute=one) for one in of.recomputes
                                                  if [one] != chosen]
    if plan.pp > 1 and not plan.own_meshes:
        same = replace(on_mesh, micro_batch=plan.micro_batch, zero=plan.zero, schedule=plan.schedule,
                       chunks=plan.chunks, sequence_parallel=plan.sequence_parallel)
        yield "cut", cut_text(plan.layers), [_excluding(same, "cut", plan.layers)]


def _value_text(value: object) -> str:
    return str(value) if not isinstance(value, bool) else "on" if value else "off"


def _unfixed(fixed: Fixed, name: str) -> Fixed:
    rest: dict[str, Any] = {name: None}
    return replace(fixed, **rest)


def _excluding(fixed: Fixed, name: str, value: object) -> Fixed:
    return replace(fixed, excluded=fixed.excluded | {(name, value)})


def _compared(of: Searchable, best: Any, name: str, chosen: str, several: list[Fixed], until: float) -> dict[str, Any]:
    head = {"choice": _NAMES.get(name, name), "chosen": chosen}
    if time.monotonic() >= until:
        return head | {"runner_up": None, "why": "there was no time left to search for another"}
    others = []
    for fixed in several:
        try:
            others.append(of.fastest(fixed, max(until - time.monotonic(), 0.0)))
        except BatchError:                           # no plan at all has such a choice
            continue
    other = min(filter(None, others), key=lambda one: one.seconds, default=None)
    if other is None:
        return head | {"runner_up": None, "why": "no other fits"}
    text = cut_text(of.choices(other).layers) if name == "cut" else of.text(other)
    return head | {"runner_up": text, "step_time": other.seconds, "costs": other.seconds - best.seconds}


def cost_of_fixing(of: Searchable, best: Any, name: str, value: object, without: Any,
                   fastest: Callable[[Any, float], Any], until: float) -> dict[str, Any]:
    """What it costs that something was fixed: the plan beside the fastest one `without` it."""
    head = {"choice": _NAMES.get(name, name), "fixed": _value_text(value)}
    if time.monotonic() >= until:
        return head | {"without": None, "why": "there was no time left to search without it"}
    try:
        free = fastest(without, max(until - time.monotonic(), 0.0))
    except BatchError as error:                      # a pin may be all that makes so many ranks of tp possible
        return head | {"without": None, "why": f"none: {error.why}"}
    if free is None or free.seconds > best.seconds:   # a search that was stopped may find less than it was given
        free = best
    return head | {"without": of.text(free), "step_time": free.seconds, "costs": best.seconds - free.seconds}


def _plain_dp(of: Searchable, best: Any) -> dict[str, Any]:
    """What one replica on each device takes, with what was fixed of a micro-batch."""
    plain = Fixed(dp=of.devices, tp=1, pp=1, zero=0, micro_batch=of.fixed.micro_batch, recompute=of.fixed.recompute)
    try:
        one = of.fastest(plain, inf)
        if one is None:
            needs = of.least_memory(plain)
            if needs == inf:                         # there is no such plan, whatever a device has
                return {"fits": False, "why": f"{of.devices} replicas of equal micro-batches do not divide the batch"}
            return {"fits": False, "needs": needs, "device": of.memory,
                    "why": f"a device holds the whole model: at least {bytes_text(needs)}, of the "
                           f"{bytes_text(of.memory)} that it has"}
    except BatchError as error:
        return {"fits": False, "why": f"{error.what}: {error.why}"}
    parts = {name: seconds_text(seconds) for name, seconds in of.parts(one).items()}
    return {"fits": True, "step_time": one.seconds, "costs": one.seconds - best.seconds, "plan": of.text(one),
            "why": "it is this plan" if of.choices(one) == of.choices(best) else
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
    took = (f" {seconds_text(plain['step_time'])}, {plain['costs'] / step_time:+.1%}, by {plain['plan']};"
            if plain["fits"] else "")
    return "\n".join([*lines, "", f"plain dp:{took} {plain['why']}"])


def _cost_cells(one: Mapping[str, Any], other: str | None, step_time: float) -> tuple[str, str, str]:
    if other is None:
        return one["why"], "", ""
    return other, seconds_text(one["step_time"]), f"{one['costs'] / step_time:+.2%}"
