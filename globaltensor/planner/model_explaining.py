"""Why the plan of a model is as it is: as explaining.py, with what each pin costs.

What changes the rows of a plan along tp (tp itself, sequence parallelism, pins) is run anew without memory, where it
was not run yet.
"""
from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from globaltensor.planner.explaining import PlanChoices, cost_of_fixing, explanation_of
from globaltensor.planner.model_prices import RECOMPUTES, ModelCandidate
from globaltensor.planner.model_report import candidate_text, times_of_parts
from globaltensor.planner.model_search import least_memory_of_model
from globaltensor.planner.pins import pin_text
from globaltensor.planner.program_costs import Pins
from globaltensor.planner.space import Fixed
from globaltensor.planner.whole_search import PlannedMachines


class ModelSearchable:
    """A model under pins."""

    recomputes: tuple[str, ...] = RECOMPUTES

    def __init__(self, costs: PlannedMachines, pins: Pins, fixed: Fixed) -> None:
        self.costs, self.pins, self.fixed, self.devices = costs, pins, fixed, costs.devices
        self.memory = costs.memory

    def fastest(self, fixed: Fixed, seconds: float) -> ModelCandidate | None:
        return self.costs.search(self.pins, fixed, seconds, menu=False).result.best

    def fastest_under(self, pins: Pins, seconds: float) -> ModelCandidate | None:
        """The fastest plan with other pins."""
        return self.costs.search(pins, self.fixed, seconds, menu=False).result.best

    def choices(self, plan: ModelCandidate) -> PlanChoices:
        shape, variant = plan.variant.shape, plan.variant
        is_told_by_sp = shape.kind in ("whole", "recognised", "sequence")
        return PlanChoices(shape.dp, shape.tp, shape.pp, variant.zero, shape.micro_batch, shape.kind == "sequence",
                           variant.schedule, variant.chunks, plan.recompute, plan.cut,
                           "" if is_told_by_sp else shape.kind,
                           len({mesh.variant for mesh in plan.meshes}) > 1)

    def text(self, plan: ModelCandidate) -> str:
        return candidate_text(plan)

    def parts(self, plan: ModelCandidate) -> Mapping[str, float]:
        return times_of_parts(plan)

    def least_memory(self, fixed: Fixed) -> float:
        costs = self.costs.costs(self.costs.all_groups)
        return least_memory_of_model(costs.task(costs.of(fixed, self.pins), fixed))


def explanation_of_model(of: ModelSearchable, best: ModelCandidate, seconds: float) -> dict[str, Any]:
    """The explanation of the plan of a model, as data."""
    until = time.monotonic() + seconds
    explanation = explanation_of(of, best, seconds)
    for pattern, row in of.pins.items():
        rest = {name: other for name, other in of.pins.items() if name != pattern}
        explanation["fixed"].append(
            cost_of_fixing(of, best, "pin", pin_text(pattern, row), rest, of.fastest_under, until))
    return explanation
