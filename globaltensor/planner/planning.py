"""`gt.strategy`: the plan of any model, from the module and a description of a cluster.

    strategy = gt.strategy(model, batch, cluster="dgx-a100", devices=64, global_batch=1024)
    runner, optimizer = strategy.apply(model, loss, torch.optim.AdamW)

    units       the parts that a pipeline can cut the model into                          (pipelining/units.py)
    plans       along tp: what gt.Plan.of recognises, with and without the sequence split, and the layouts that are
                exactly the best for the captured graph, each with the pins above its rows
    costs       of each plan on each number of ranks of tp, by running it without memory  (unit_costs.py)
    search      of all the rest                                                           (model_search.py)

The model may be on the meta device; it is not changed.
"""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from globaltensor.errors import ArgumentError, expect
from globaltensor.layouts.placement import placement
from globaltensor.parallel.plan import OF_MODULES, Plan
from globaltensor.pipelining.units import Units, units_of
from globaltensor.planner.applying import is_block
from globaltensor.planner.capture import capture, read_inputs
from globaltensor.planner.graph import CaptureError
from globaltensor.planner.mesh_costs import SAMPLES, MeshCosts
from globaltensor.planner.model_prices import ModelShape, ModelTask
from globaltensor.planner.model_report import model_strategy
from globaltensor.planner.model_search import search_model
from globaltensor.planner.pins import read_pins
from globaltensor.planner.space import BatchError, Fixed, divisors
from globaltensor.planner.stage_choices import plan_stage
from globaltensor.planner.strategy import Strategy
from globaltensor.planner.unit_costs import run_costs
from globaltensor.planner.unit_sums import RunCosts, UnitCost
from globaltensor.runtime.agreement import broadcast_object
from globaltensor.runtime.torch_internals import tree_leaves, tree_map_only
from globaltensor.schedules.generators import GENERATORS
from globaltensor.simulator.cluster import Cluster, cluster as cluster_of, hypothetical_placements
from globaltensor.simulator.gpt import RECOMPUTE
from globaltensor.tracebacks import api_boundary

Kind = tuple[int, str]                               # ranks along tp, and which plan

_MOST_HOSTS_OF_TP = 1
_MOST_RANKS = 32                                     # of a stage, that are run in one process for its bytes


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


@api_boundary
def strategy(model: nn.Module, batch: Any, cluster: str | os.PathLike[str] | Cluster = "dgx-a100", devices: int = 8,
             global_batch: int | None = None, loss: Callable[..., Any] | None = None, targets: Any = None, *,
             dp: int | None = None, tp: int | None = None, pp: int | None = None, zero: int | None = None,
             recompute: str | None = None, schedule: str | None = None, chunks: int | None = None,
             micro_batch: int | None = None, sp: bool | None = None,
             pins: Sequence[str] | Mapping[str, Any] = (), memory: float | None = None,
             seconds: float = 60.0) -> Strategy:
    """The fastest plan of a model on a cluster that fits in memory, with a bound on any other.

    model         plain, and not changed; it may be on the meta device
    batch         example inputs: a tensor, a tuple of arguments or a dict of them by name. Only shapes and dtypes
                  count; dim 0 has the samples, however many
    cluster       a known name, a JSON file, or a `Cluster`
    devices       how many of them may be used
    global_batch  samples in a step (default: as many as the example has)
    loss          of the model's output, and of `targets` where these are given, a scalar (default: what the model
                  returns itself, alone or as `.loss`; or backward begins with a gradient for each output)
    targets       example targets, as inputs are
    dp, tp, pp, zero, recompute, schedule, chunks, micro_batch, sp        not to be chosen, but so; sp: is the sequence
                  split along tp?
    pins          rows that every plan has: {"*.up.weight": {"tp": "S(0)"}} or ["*.up.weight=tp:S(0)"]
    memory        bytes of a device (default: the cluster's)
    seconds       after which the search ends, with the best plan so far
    Not collective: it moves nothing, and every process that asks finds the same plan, if it has as long.
    Raises CaptureError where the model cannot be run without values, BatchError where there is no plan at all, PinError
    for pins that cannot be.
    """
    expect(model, nn.Module, "gt.strategy of no module", "gt.strategy(model, batch)")
    began = time.monotonic()
    machines = cluster if isinstance(cluster, Cluster) else cluster_of(os.fspath(cluster))
    if memory is not None:
        machines = replace(machines, memory=float(memory))
    machines.machine(devices)                        # raises where it has fewer
    fixed = _checked_choices(Fixed(dp, tp, pp, sp, micro_batch, zero, recompute, schedule, chunks), devices)
    program = _program(model, batch, loss, targets)
    whole_batch = program.rows if global_batch is None else global_batch
    _check_batch(whole_batch, fixed, devices, len(program.units.units), program.units.why)
    rows = read_pins(pins, model)
    with hypothetical_placements():
        runs, plans, left_out = _all_costs(program, rows, machines, devices, fixed)
    blocks = np.array([any(_is_block(model, part) for part in unit.parts) for unit in program.units.units])
    task = ModelTask({key: MeshCosts(few.units, many.units, machines, key[0]) for key, (few, many) in runs.items()},
                     blocks, machines, devices, whole_batch, fixed)
    result = search_model(task, max(seconds - (time.monotonic() - began), 0.0))
    whole = {op: line for few, _ in runs.values() for op, line in few.whole.items()}
    exact = None if result.best is None else _exact_costs(program, result.best.variant.shape, plans, machines)
    planned = model_strategy(program.model, program.units, task, result, plans, time.monotonic() - began, exact,
                           whole=whole, inputs=program.names, tokens=program.tokens, left_out=left_out)
    return Strategy(broadcast_object(dict(planned), 0, "a strategy"))


def _exact_costs(program: Program, shape: ModelShape, plans: Mapping[tuple[int, str], Plan], machines: Cluster
                 ) -> list[UnitCost] | None:
    """The units of the chosen plan on all of its ranks; None where these are too many to be run in one process."""
    if shape.dp * shape.tp > _MOST_RANKS:
        return None
    with hypothetical_placements():
        mesh = placement("meta", [[i * shape.tp + k for k in range(shape.tp)] for i in range(shape.dp)], ("dp", "tp"))
        samples = shape.micro_batch * shape.dp
        return run_costs(program.model, program.units.units, program.resized(program.inputs, samples), program.loss,
                         mesh, plans[shape.tp, shape.kind], machines, program.resized(program.targets, samples)).units


def _is_block(model: nn.Module, part: str) -> bool:
    return part not in dict(model.named_parameters()) and is_block(model.get_submodule(part))


def _program(model: nn.Module, batch: Any, loss: Callable[..., Any] | None, targets: Any) -> Program:
    tensors = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()]
    if not tensors:
        raise ArgumentError("gt.strategy without example inputs", "a batch is a tensor, a tuple of arguments or a dict "
                            "of them by name, with the samples along dim 0", "gt.strategy(model, torch.zeros(8, 32))")
    inputs = batch if isinstance(batch, Mapping) else read_inputs(batch)[0]
    names = list(batch) if isinstance(batch, Mapping) else []
    return Program(model, inputs, int(tensors[0].shape[0]), loss, targets, units_of(model, names))


def _checked_choices(fixed: Fixed, devices: int) -> Fixed:
    for name in ("dp", "tp", "pp", "chunks", "micro_batch"):
        value = getattr(fixed, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ArgumentError(f"{name}={value!r}", "it is a whole number, 1 or more", f"{name}=2")
    for name, known in (("zero", (0, 1, 2, 3)), ("recompute", RECOMPUTE), ("schedule", tuple(GENERATORS))):
        value = getattr(fixed, name)
        if value is not None and value not in known:
            raise ArgumentError(f"{name}={value!r}", f"it is one of {', '.join(map(str, known))}")
    if fixed.recompute == "selective":
        raise ArgumentError('recompute="selective" of a module', "its blocks run again whole or not at all",
                            'recompute="full", or "none"')
    ranks = (fixed.dp or 1) * (fixed.tp or 1) * (fixed.pp or 1)
    if ranks > devices:
        raise BatchError(f"{ranks} ranks on {devices} devices", "dp x tp x pp are at most as many as the devices",
                         f"devices={ranks}")
    return fixed


def _check_batch(global_batch: int, fixed: Fixed, devices: int, units: int, why: str) -> None:
    splits = (fixed.dp or 1) * (fixed.micro_batch or 1)
    if global_batch < 1 or global_batch % splits:
        raise BatchError(f"a global batch of {global_batch} in micro-batches of {fixed.micro_batch or 1} on dp "
                         f"{fixed.dp or 1}", "dp x micro-batch divides the global batch",
                         f"global_batch={max(global_batch // splits, 1) * splits}")
    if (fixed.pp or 1) * (fixed.chunks or 1) > units:
        reason = f": {why}" if why else ""
        raise BatchError(f"pp {fixed.pp or 1} with {fixed.chunks or 1} stages on each rank", f"the model has {units} "
                         f"units that can be cut{reason}", f"pp={max(units // (fixed.chunks or 1), 1)}")


# ------------------------------------------------------------------------------------------------------------- plans


def _sizes_of_tp(machines: Cluster, devices: int, fixed: Fixed) -> list[int]:
    """Ranks along tp that are weighed: within a host, all that divide the devices or the host, and powers of 2."""
    if fixed.tp is not None:
        return [fixed.tp]
    most = min(devices, machines.devices_per_host * _MOST_HOSTS_OF_TP)
    powers = [1 << k for k in range(most.bit_length())]
    return sorted({n for n in (*divisors(devices), *divisors(machines.devices_per_host), *powers) if n <= most})


def _plans_of(program: Program, pins: dict[str, dict[str, Any]], machines: Cluster, fixed: Fixed, tp: int
              ) -> dict[str, Plan]:
    """Of tp ranks, by kind. The first row that fits counts, so pins come first."""
    if tp == 1:
        return {"whole": Plan(pins)}
    model = program.model
    recognised, sequence = Plan.of(model, "tp"), Plan.of(model, "tp", "tp")
    kinds: dict[str, Plan] = {}
    if not recognised and not any("tp" in row for row in pins.values()):
        kinds |= _searched_layouts(program, machines, tp)
    if fixed.sequence_parallel is not True or sequence == recognised:
        kinds["recognised"] = recognised
    if fixed.sequence_parallel is not False and sequence != recognised:
        kinds["sequence"] = sequence
    return {name: Plan(pins | {pattern: row for pattern, row in plan.items() if pattern not in pins})
            for name, plan in kinds.items()}


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


def _all_costs(program: Program, pins: dict[str, dict[str, Any]], machines: Cluster, devices: int, fixed: Fixed
               ) -> tuple[dict[Kind, tuple[RunCosts, RunCosts]], dict[Kind, Plan], dict[str, str]]:
    """What each plan takes, with few and with many samples; the plans; those that cannot be run without values."""
    left_out: dict[str, str] = {}
    runs: dict[Kind, tuple[RunCosts, RunCosts]] = {}
    plans: dict[Kind, Plan] = {}
    for tp in _sizes_of_tp(machines, devices, fixed):
        mesh = placement("meta", [[rank * tp + k for k in range(tp)] for rank in range(2)], ("dp", "tp"))
        for kind, plan in _plans_of(program, pins, machines, fixed, tp).items():
            if tp > 1 and not any("tp" in row for pattern, row in plan.items() if not pattern.endswith(OF_MODULES)):
                continue                             # nothing is split along tp
            try:
                few, many = (run_costs(program.model, program.units.units, program.resized(program.inputs, 2 * n),
                                       program.loss, mesh, plan, machines, program.resized(program.targets, 2 * n))
                             for n in SAMPLES)
            except CaptureError as error:
                if tp == 1 or fixed.tp is not None:
                    raise
                left_out[f"tp {tp}, {kind}"] = error.why     # an algorithm that looks at values, such as a ring
                continue
            runs[tp, kind], plans[tp, kind] = (few, many), plan
    if not runs:
        raise BatchError(f"tp {fixed.tp}", f"no layer of a {type(program.model).__name__} is recognised that could be "
                         "split along tp", "tp=1, or pins=['pattern=tp:S(0)']")
    return runs, plans, left_out
