"""Plans as rows of a table: a GPT by its sizes, how it is spread, and, where somebody measured it, what a step took.

    gpus,global_batch,micro_batch,hidden,heads,layers,seq,vocab,tp,dp,pp,zero,recompute,measured_ms

`schedule` (1f1b where there is no such column), `chunks`, `sp` (0 or 1) and `attention` (flash or plain) may be there
too. Attention is flash where nothing else is said, as it is in this library.
"""
from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from globaltensor.errors import GlobalTensorError, ShapeError
from globaltensor.simulator.cluster import Cluster
from globaltensor.simulator.gpt import GPT, RECOMPUTE
from globaltensor.simulator.group_training import rooms_of_ranks, simulate_on
from globaltensor.simulator.groups import ClusterGroups
from globaltensor.simulator.training import TrainingPlan

_NUMBERS = ("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq", "vocab", "tp", "dp", "pp",
            "zero")
_ATTENTION = ("flash", "plain")


class RowError(ShapeError):
    """A table of plans that cannot be read: which line, and what is wrong with it."""


@dataclass(frozen=True)
class PlanRow:
    """A plan, and the seconds that a step of it took, where they are known."""

    gpt: GPT
    plan: TrainingPlan
    measured: float | None = None

    @property
    def group(self) -> tuple[GPT, int, int]:
        """Plans of one group are choices for the same work: a model, a batch, so many devices."""
        return self.gpt, self.plan.global_batch, self.plan.devices


class Evaluation(NamedTuple):
    """Seconds of a step, bytes of the fullest rank, and whether the device has them."""

    step_time: float
    memory: float
    fits: bool


def evaluate(row: PlanRow, machines: Cluster | ClusterGroups) -> Evaluation:
    """What the plan takes on this cluster."""
    step = simulate_on(row.gpt, row.plan, machines)
    memory = [states + activations for states, activations in zip(step.states, step.activations)]
    rooms = rooms_of_ranks(machines, row.plan)
    return Evaluation(step.seconds, max(memory), all(own <= room for own, room in zip(memory, rooms)))


def read_rows(file: str) -> list[PlanRow]:
    """The plans of a CSV file, in its order. Raises RowError."""
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RowError(f"the plans in {file} could not be read", str(error),
                       "a CSV file with a line of names") from None
    table = csv.DictReader(lines)
    table.fieldnames = [name.strip() for name in table.fieldnames or ()]
    twice = [name for name in table.fieldnames if table.fieldnames.count(name) > 1]
    if twice:
        raise RowError(f"{file} has two columns {twice[0]!r}", "each is one size of a plan", "each name once")
    missing = [name for name in (*_NUMBERS, "recompute") if name not in (table.fieldnames or ())]
    if missing:
        raise RowError(f"{file} has no column {missing[0]!r}", f"its first line is {lines[0] if lines else ''!r:.200}",
                       ",".join((*_NUMBERS, "recompute", "measured_ms")))
    rows = [_plan_row(fields, f"{file}, line {table.line_num}") for fields in table]
    if not rows:
        raise RowError(f"{file} has no plans", "it has a line of names alone", "a line for each plan")
    return rows


def _plan_row(fields: dict[str, str | None], where: str) -> PlanRow:
    surplus = fields.get(None)                       # type: ignore[call-overload]  # where csv keeps it
    if surplus:
        raise RowError(f"{where}: {len(fields) - 1 + len(surplus)} values in {len(fields) - 1} columns",
                       f"nothing names {surplus[0]!r}", "a value for each column, in its order")
    sizes = {name: _whole(fields, name, where) for name in _NUMBERS}
    chosen = {name: (fields.get(name) or default).strip() for name, default in
              (("recompute", ""), ("attention", "flash"), ("schedule", "1f1b"), ("sp", "0"))}
    for name, known in (("recompute", RECOMPUTE), ("attention", _ATTENTION), ("sp", ("0", "1"))):
        if chosen[name] not in known:
            raise RowError(f"{where}: {name} is {chosen[name]!r}", f"it is one of {', '.join(known)}")
    chunks = _whole(fields, "chunks", where) if (fields.get("chunks") or "").strip() else None
    plan = TrainingPlan(sizes["micro_batch"], sizes["global_batch"], sizes["dp"], sizes["tp"], sizes["pp"],
                        chosen["schedule"], chunks, sizes["zero"], chosen["recompute"], chosen["sp"] == "1")
    if plan.devices != sizes["gpus"]:
        raise RowError(f"{where}: {sizes['gpus']} gpus", f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp} are "
                       f"{plan.devices}", f"gpus {plan.devices}")
    try:
        gpt = GPT(sizes["layers"], sizes["hidden"], sizes["heads"], sizes["seq"], sizes["vocab"],
                  chosen["attention"] == "flash")
        gpt.check_tensor_parallel(plan.tp)
        assert plan.micro_batches
    except GlobalTensorError as error:
        raise RowError(f"{where}: {error.what}", error.why, error.fix) from None
    return PlanRow(gpt, plan, _measured(fields.get("measured_ms"), where))


def _whole(fields: dict[str, str | None], name: str, where: str) -> int:
    text = (fields.get(name) or "").strip()
    least = 0 if name == "zero" else 1
    if not text.isdecimal() or int(text) < least or name == "zero" and int(text) > 3:
        raise RowError(f"{where}: {name} is {text!r}", "it is 0, 1, 2 or 3" if name == "zero" else
                       "it is a whole number, 1 or more")
    return int(text)


def _measured(text: str | None, where: str) -> float | None:
    if not (text or "").strip():
        return None
    try:
        milliseconds = float(text or "")
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds < float("inf"):
        raise RowError(f"{where}: measured_ms is {text!r}", "it is a number above 0: the milliseconds of a step")
    return milliseconds / 1e3
