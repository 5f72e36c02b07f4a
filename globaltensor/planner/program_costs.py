"""What each plan of a model takes on each number of ranks of tp, before the rest of it is chosen.

    plans    along tp: what gt.Plan.of recognises, with and without the sequence split, and the layouts that are exactly
             the best for the captured graph, each with the pins above its rows
    costs    of each plan, by running it without memory, with few and with many samples        (unit_costs.py)

Costs are kept, so that the same question under other pins, or with less that is fixed, runs only what is new.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from globaltensor.layouts.placement import placement
from globaltensor.parallel.plan import OF_MODULES, Plan
from globaltensor.pipelining.units import Units
from globaltensor.planner.applying import is_block
from globaltensor.planner.capture import capture
from globaltensor.planner.graph import CaptureError
from globaltensor.planner.mesh_costs import SAMPLES, MeshCosts
from globaltensor.planner.model_prices import ModelTask
from globaltensor.planner.rank_memory import BatchBytes
from globaltensor.planner.space import BatchError, Fixed, divisors
from globaltensor.planner.stage_choices import plan_stage
from globaltensor.planner.unit_costs import run_costs
from globaltensor.planner.unit_sums import RunCosts
from globaltensor.runtime.torch_internals import tree_leaves, tree_map_only
from globaltensor.simulator.cluster import Cluster, hypothetical_placements

Kind = tuple[int, str]                               # ranks along tp, and which plan
Pins = dict[str, dict[str, Any]]

_MOST_HOSTS_OF_TP = 1


@dataclass(frozen=True)
class Program:
    """What is to be planned: a model, its inputs for any number of samples, and its units."""

    model: nn.Module
    inputs: Any
    rows: int
    loss: Callable[..., Any] | None
    targets: Any
    units: Units

    def resized(self, tensors: Any, samples: int) -> Any:
        """Example tensors with so many samples, without memory."""
        def resized(t: torch.Tensor) -> torch.Tensor:
            shape = (samples, *t.shape[1:]) if t.dim() and t.shape[0] == self.rows else tuple(t.shape)
            return torch.empty(shape, dtype=t.dtype, device="meta")

        return tree_map_only(torch.Tensor, resized, tensors)

    def run(self, mesh: placement, plan: Plan, on: Cluster, sizes: Sequence[int],
            parted: Collection[str] = ()) -> list[RunCosts]:
        """What micro-batches of so many samples take under a plan."""
        batches = [(self.resized(self.inputs, n), self.resized(self.targets, n)) for n in sizes]
        return run_costs(self.model, self.units.units, batches, self.loss, mesh, plan, on, parted)

    @cached_property
    def blocks(self) -> np.ndarray:
        """Which units may be computed again."""
        own = dict(self.model.named_parameters())
        return np.array([any(part not in own and is_block(self.model.get_submodule(part)) for part in unit.parts)
                         for unit in self.units.units])

    @property
    def batch(self) -> BatchBytes:
        """Of a sample."""
        return BatchBytes(*(sum(t.nbytes / self.rows for t in tree_leaves(tensors) if isinstance(t, torch.Tensor)
                                and t.dim() and t.shape[0] == self.rows) for tensors in (self.inputs, self.targets)))

    @property
    def names(self) -> list[str]:
        """Of inputs that are passed by name."""
        return list(self.inputs) if isinstance(self.inputs, Mapping) else []

    @property
    def tokens(self) -> int:
        """Of a sample: the positions of a sequence of ids; else it is one."""
        first = next((t for t in tree_leaves(self.inputs) if isinstance(t, torch.Tensor)), None)
        is_sequence = first is not None and first.dim() == 2 and not first.is_floating_point()
        return int(first.shape[1]) if is_sequence and first is not None else 1


@dataclass
class PlansOfModel:
    """By ranks of tp and kind: what each plan takes, with few and with many samples; the plans; and why those are left
    out that cannot be run without values."""

    runs: dict[Kind, tuple[RunCosts, RunCosts]] = field(default_factory=dict)
    plans: dict[Kind, Plan] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> dict[str, str]:
        """Ops that are planned on whole operands, with a line of each."""
        return {op: line for few, _ in self.runs.values() for op, line in few.whole.items()}


class PlannedCosts:
    """What plans of a program take on a cluster; those that were run are kept."""

    def __init__(self, program: Program, machines: Cluster, devices: int, global_batch: int) -> None:
        self.program, self.machines, self.devices, self.global_batch = program, machines, devices, global_batch
        self._known: dict[tuple[int, str], tuple[RunCosts, RunCosts]] = {}
        self._layouts: dict[int, dict[str, Plan]] = {}

    def of(self, fixed: Fixed, pins: Pins) -> PlansOfModel:
        """All plans that there are with these pins, where so much is fixed."""
        result = PlansOfModel()
        with hypothetical_placements():
            for tp in _sizes_of_tp(self.machines, self.devices, fixed):
                for kind, plan in self._plans_of(pins, fixed, tp).items():
                    if tp == 1 or any("tp" in row for name, row in plan.items() if not name.endswith(OF_MODULES)):
                        self._add(result, tp, kind, plan, fixed.tp is not None)
        if not result.runs:
            name = type(self.program.model).__name__
            raise BatchError(f"tp {fixed.tp}", f"no layer of a {name} is recognised that could be split along tp, and "
                             "the best layouts of its graph split no parameter",
                             "tp=1, or pins=['pattern=tp:S(0)']")
        return result

    def task(self, plans: PlansOfModel, fixed: Fixed) -> ModelTask:
        """What remains to be chosen."""
        costs = {key: MeshCosts(few.units, many.units, self.machines, key[0])
                 for key, (few, many) in plans.runs.items()}
        return ModelTask(costs, self.program.blocks, self.machines, self.devices, self.global_batch, fixed, plans.plans,
                         self.program.batch)

    def _add(self, result: PlansOfModel, tp: int, kind: str, plan: Plan, is_fixed: bool) -> None:
        key = tp, repr(sorted((name, sorted(row.items(), key=str)) for name, row in plan.items()))
        if key not in self._known:
            mesh = placement("meta", [[rank * tp + k for k in range(tp)] for rank in range(2)], ("dp", "tp"))
            try:
                few, many = self.program.run(mesh, plan, self.machines, [2 * samples for samples in SAMPLES])
            except CaptureError as error:
                if tp == 1 or is_fixed:
                    raise
                result.left_out[f"tp {tp}, {kind}"] = error.why      # an algorithm that looks at values, such as a ring
                return
            self._known[key] = few, many
        result.runs[tp, kind], result.plans[tp, kind] = self._known[key], plan

    @cached_property
    def _recognised(self) -> tuple[Plan, Plan]:
        """Along tp, on any number of ranks: with activations whole, and with the sequence split."""
        return Plan.of(self.program.model, "tp"), Plan.of(self.program.model, "tp", "tp")

    def _plans_of(self, pins: Pins, fixed: Fixed, tp: int) -> dict[str, Plan]:
        """Of tp ranks, by kind. The first row that fits counts, so pins come first."""
        if tp == 1:
            return {"whole": Plan(pins)}
        recognised, sequence = self._recognised
        kinds: dict[str, Plan] = {}
        if not recognised and not any("tp" in row for row in pins.values()):
            if tp not in self._layouts:
                self._layouts[tp] = _searched_layouts(self.program, self.machines, tp)
            kinds |= self._layouts[tp]
        if fixed.sequence_parallel is not True or sequence == recognised:
            kinds["recognised"] = recognised
        if fixed.sequence_parallel is not False and sequence != recognised:
            kinds["sequence"] = sequence
        return {name: Plan(pins | {pattern: row for pattern, row in plan.items() if pattern not in pins})
                for name, plan in kinds.items()}


def _sizes_of_tp(machines: Cluster, devices: int, fixed: Fixed) -> list[int]:
    """Ranks along tp that are weighed: within a host, all that divide the devices or the host, and powers of 2."""
    if fixed.tp is not None:
        return [fixed.tp]
    most = min(devices, machines.devices_per_host * _MOST_HOSTS_OF_TP)
    powers = [1 << k for k in range(most.bit_length())]
    return sorted({n for n in (*divisors(devices), *divisors(machines.devices_per_host), *powers) if n <= most})


def _searched_layouts(program: Program, machines: Cluster, tp: int) -> dict[str, Plan]:
    """Where nothing is recognised: the layouts under which the captured graph costs least along tp; and these with a
    row for what each module gives, so that what dispatch would decide otherwise is done as they say."""
    model = program.model
    loss = program.loss if program.targets is None else None
    graph = capture(model, program.resized(program.inputs, SAMPLES[0]), loss)
    planned = plan_stage(graph, machines, placement("meta", list(range(tp)), ("tp",)), zero=False, whole_inputs=True)
    steered: dict[str, Any] = {}
    for op in planned.ops:
        gives = op.outputs[0] if op.outputs else None
        if op.phase == "forward" and op.module and gives is not None:
            steered[op.module] = None if gives.sbp[0].is_partial else gives.sbp[0]
    rows: dict[str, Any] = {f"{module} ->": {"tp": how} for module, how in steered.items() if how is not None}
    for block in graph.graph["blocks"].values():
        for nodes in block.repeats:
            later = graph.nodes[nodes[0]]["module"]
            rows |= {f"{later}{pattern[len(block.module):]}": row for pattern, row in rows.items()
                     if pattern.startswith(f"{block.module}.")}
    stored = {name: row for name, row in planned.plan.items() if any(s.is_split for s in row.values())}
    if not any(s.is_split for name, row in stored.items() if not name.endswith(OF_MODULES) for s in row.values()):
        return {}                                    # nothing to split: dp does that
    return {"layouts": Plan(stored), "layouts, steered": Plan(stored | rows)}
