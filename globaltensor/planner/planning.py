"""`gt.strategy`: the plan of any model, from the module and a description of a cluster.

    strategy = gt.strategy(model, batch, cluster="dgx-a100", devices=64, global_batch=1024)
    runner, optimizer = strategy.apply(model, loss, torch.optim.AdamW)

    units       the parts that a pipeline can cut the model into                           (pipelining/units.py)
    costs       of plans along tp, on each number of its ranks, by running them without memory   (program_costs.py)
    search      of all the rest                                                                   (whole_search.py)

The model may be on the meta device; it is not changed.
"""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from globaltensor.errors import ArgumentError, ErrorNote, GlobalTensorError, expect, expect_amount, expect_path
from globaltensor.layouts.placement import placement
from globaltensor.parallel.model_layers import is_in_a_layer
from globaltensor.pipelining.units import Units, units_of
from globaltensor.planner.capture import read_inputs
from globaltensor.planner.graph import CaptureError
from globaltensor.planner.model_explaining import ModelSearchable, explanation_of_model
from globaltensor.planner.model_prices import VariantPrices
from globaltensor.planner.model_report import model_strategy
from globaltensor.planner.pins import PinError, read_pins
from globaltensor.planner.plotting import draw_model_plan
from globaltensor.planner.program_costs import Program
from globaltensor.planner.space import BatchError, Fixed, chunks_of
from globaltensor.planner.strategy import Strategy
from globaltensor.planner.unit_costs import run_layers
from globaltensor.planner.unit_sums import UnitCost
from globaltensor.planner.whole_search import PlannedMachines
from globaltensor.runtime.agreement import broadcast_object, uncoordinated
from globaltensor.runtime.lineage import paused
from globaltensor.runtime.torch_internals import tree_leaves
from globaltensor.runtime.world import world
from globaltensor.schedules.generators import GENERATORS
from globaltensor.simulator.cluster import Cluster, hypothetical_placements
from globaltensor.simulator.gpt import RECOMPUTE
from globaltensor.simulator.groups import ClusterGroups, read_cluster
from globaltensor.tensors.gradients import reduce_pending
from globaltensor.tracebacks import api_boundary

_MOST_RANKS = 32                                     # of a stage, that are run in one process for its bytes


@api_boundary
def strategy(model: nn.Module, batch: Any, cluster: str | os.PathLike[str] | Cluster | ClusterGroups = "dgx-a100",
             devices: int = 8,
             global_batch: int | None = None, loss: Callable[..., Any] | None = None, targets: Any = None, *,
             dp: int | None = None, tp: int | None = None, pp: int | None = None, zero: int | None = None,
             recompute: str | None = None, schedule: str | None = None, chunks: int | None = None,
             micro_batch: int | None = None, sp: bool | None = None,
             pins: Sequence[str] | Mapping[str, Any] = (), memory: float | None = None,
             seconds: float = 60.0, explain: bool = False, plot: str | os.PathLike[str] | None = None) -> Strategy:
    """The fastest plan of a model on a cluster that fits in memory, with a bound on any other.

    model         plain, and not changed; it may be on the meta device
    batch         example inputs: a tensor, a tuple of arguments or a dict of them by name. Only shapes and dtypes
                  count; dim 0 has the samples, however many
    cluster       a known name, a JSON file, a `Cluster`, or `ClusterGroups` of different hosts
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
    explain       also say why: of each choice the runner-up and what it costs, what each pin costs, as `explanation`
    plot          a file for a picture of the plan: .png, .svg or .pdf
    Collective: rank 0 plans, and tells the others. It moves no tensor.
    Raises CaptureError where the model cannot be run without values, BatchError where there is no plan at all, PinError
    for pins that cannot be; `except gt.GlobalTensorError` catches them all, as they have no names in gt.
    """
    choices = Fixed(dp, tp, pp, sp, micro_batch, zero, recompute, schedule, chunks)

    def find() -> dict[str, Any]:
        return _find(model, batch, cluster, devices, global_batch, loss, targets, choices, pins, memory, seconds,
                     explain, plot)

    return Strategy(_told_by_rank_0(find))


def _find(model: nn.Module, batch: Any, cluster: str | os.PathLike[str] | Cluster | ClusterGroups, devices: int,
          global_batch: int | None, loss: Callable[..., Any] | None, targets: Any, choices: Fixed,
          pins: Sequence[str] | Mapping[str, Any], memory: float | None, seconds: float, explain: bool,
          plot: str | os.PathLike[str] | None) -> dict[str, Any]:
    """What `strategy` does, on one process."""
    expect(model, nn.Module, "gt.strategy of no module", "gt.strategy(model, batch)")
    _check_arguments(devices, memory, seconds, pins, plot)
    _check_loss(loss, targets)
    began = time.monotonic()
    machines = _machines(cluster, devices, memory)
    fixed = _checked_choices(choices, devices)
    program = _program(model, batch, loss, targets)
    whole_batch = program.rows if global_batch is None else global_batch
    _check_batch(whole_batch, fixed, devices, len(program.units.units), program.units.why)
    rows = read_pins(pins, model)
    costs = PlannedMachines(program, machines, devices, whole_batch)
    result, task, plans = costs.search(rows, fixed, max(seconds - (time.monotonic() - began), 0.0))
    best = result.best
    planned = model_strategy(
        model, program.units, task, result, time.monotonic() - began, cache(partial(_exact_costs, program)),
        machines, whole=plans.whole, inputs=program.names, tokens=program.tokens, left_out=plans.left_out)
    if explain and best is not None:
        planned["explanation"] = explanation_of_model(ModelSearchable(costs, rows, fixed), best, seconds)
    if plot is not None and best is not None:
        draw_model_plan(plot, planned, task, best, result.simulated)
    return dict(planned)


def _told_by_rank_0(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 has found, on every process; the others wait for it. Where it raises, all raise. Models are run to be
    planned, but draw no random numbers of the program."""
    if world().single_process:
        with torch.random.fork_rng(devices=[]):
            return find()
    message: dict[str, Any] = {}
    reduce_pending()                                 # all together: a dry run reads gradients
    if world().rank == 0:
        try:
            # what it runs without memory, the others do not run
            with uncoordinated(), paused(), torch.random.fork_rng(devices=[]):
                message["plan"] = find()
        except Exception as error:                   # whatever it is: the others wait to be told
            broadcast_object({"error": tuple(ErrorNote.of(error, "gt.strategy on rank 0"))}, 0, "a strategy")
            raise
    message = broadcast_object(message, 0, "a strategy")
    if "error" in message:
        note = ErrorNote(*message["error"])
        raise note.class_of(*_TOLD)(note.what, note.why, note.fix)
    plan: dict[str, Any] = message["plan"]
    return plan


_TOLD = (ArgumentError, BatchError, CaptureError, PinError, GlobalTensorError)


def _machines(cluster: str | os.PathLike[str] | Cluster | ClusterGroups, devices: int, memory: float | None
              ) -> Cluster | ClusterGroups:
    if not isinstance(cluster, str | os.PathLike | Cluster | ClusterGroups):
        raise ArgumentError(f"cluster={cluster!r:.60}", "it is a known name, a JSON file, a Cluster or ClusterGroups",
                            'cluster="dgx-a100"')
    machines = cluster if isinstance(cluster, Cluster | ClusterGroups) else read_cluster(os.fspath(cluster))
    if isinstance(machines, ClusterGroups):
        return machines.first(devices) if memory is None else machines.first(devices).with_memory(float(memory))
    if memory is not None:
        machines = replace(machines, memory=float(memory))
    machines.machine(devices)                        # raises where it has fewer
    return machines


def _exact_costs(program: Program, prices: VariantPrices) -> list[UnitCost] | None:
    """The units of the chosen plan on the whole mesh of a stage, not on two ranks of dp; None where that is large."""
    shape, task = prices.variant.shape, prices.task
    if shape.dp * shape.tp > _MOST_RANKS:
        return None
    # in a pipeline every op gathers what ZeRO 3 has split; else layers are gathered as wholes
    parted = [name for name, _ in program.model.named_parameters() if prices.variant.zero == 3 and shape.dp > 1 and (
        shape.pp > 1 or not is_in_a_layer(name, program.model))]
    with hypothetical_placements():
        mesh = placement("meta", [[i * shape.tp + k for k in range(shape.tp)] for i in range(shape.dp)], ("dp", "tp"))
        one, = program.run(mesh, task.plans[shape.tp, shape.kind], task.cluster, [shape.micro_batch * shape.dp], parted)
        return one.units


def _program(model: nn.Module, batch: Any, loss: Callable[..., Any] | None, targets: Any) -> Program:
    tensors = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()]
    if not tensors:
        raise ArgumentError("gt.strategy without example inputs", "a batch is a tensor, a tuple of arguments or a dict "
                            "of them by name, with the samples along dim 0", "gt.strategy(model, torch.zeros(8, 32))")
    inputs = batch if isinstance(batch, Mapping) else read_inputs(batch)[0]
    names = list(batch) if isinstance(batch, Mapping) else []
    return Program(model, inputs, int(tensors[0].shape[0]), loss, targets, _checked_units(model, inputs, names))


def _checked_units(model: nn.Module, inputs: Any, names: list[str]) -> Units:
    units = units_of(model, names)
    if units.of_list:
        try:
            run_layers(model, units.units, inputs)
        except CaptureError as error:                # one of the whole model is raised when that is run
            return units.as_one(f"the layers of a {type(model).__name__} are no stages: "
                                f"{error.why.removeprefix('StageError: ')}")
    return units


def _check_arguments(devices: object, memory: object, seconds: object, pins: object, plot: object) -> None:
    expect(devices, int, "gt.strategy for no number of devices", "devices=8")
    expect_amount(seconds, "gt.strategy for no time", "seconds=60")
    if memory is not None:
        expect_amount(memory, "gt.strategy for no number of bytes", "memory=80e9")
    if isinstance(pins, str) or not isinstance(pins, (Sequence, Mapping)):
        raise ArgumentError(f"pins={pins!r}", "they are a list of texts, or a dict", "pins=['*.up.weight=tp:S(0)']")
    if plot is not None:
        expect_path(plot, "gt.strategy drawn into no file", 'plot="plan.svg"')
        if os.path.isdir(plot):  # type: ignore[arg-type]  # it is a path
            raise ArgumentError(f"plot={plot!r}", "it is a folder", 'plot="plan.svg", a file')


def _check_loss(loss: object, targets: object) -> None:
    if loss is not None and not callable(loss):
        raise ArgumentError(f"loss={loss!r:.60}", "it is called with the model's output, and with targets where there "
                            "are some", "loss=torch.nn.functional.cross_entropy")
    if targets is not None and loss is None:
        raise ArgumentError("gt.strategy with targets and no loss", "a loss is what takes them",
                            "loss=torch.nn.functional.cross_entropy")


def _checked_choices(fixed: Fixed, devices: int) -> Fixed:
    for name in ("dp", "tp", "pp", "chunks", "micro_batch"):
        value = getattr(fixed, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ArgumentError(f"{name}={value!r}", "it is a whole number, 1 or more", f"{name}=2")
    for name, known in (("zero", (0, 1, 2, 3)), ("recompute", RECOMPUTE), ("schedule", tuple(GENERATORS))):
        value = getattr(fixed, name)
        if value is not None and value not in known:
            near = get_close_matches(str(value).lower(), [each for each in known if isinstance(each, str)], 1, 0.4)
            raise ArgumentError(f"{name}={value!r}", f"it is one of {', '.join(map(str, known))}",
                                f"{name}={(near or known[-1:])[0]!r}, or nothing: then it is chosen")
    if fixed.sequence_parallel is not None:
        expect(fixed.sequence_parallel, bool, "sp says neither yes nor no", "sp=True, or nothing: then it is chosen")
    tried = sorted({n for name in ([fixed.schedule] if fixed.schedule else GENERATORS) for n in chunks_of(name)})
    if fixed.pp != 1 and fixed.chunks not in (None, *tried):
        raise BatchError(f"{fixed.schedule or 'a schedule'} with {fixed.chunks} stages on each rank",
                         f"it is planned with {tried[0] if len(tried) == 1 else f'{tried[0]} to {tried[-1]}'}",
                         f"chunks={min(tried, key=lambda n: abs(n - (fixed.chunks or 1)))}, or another schedule")
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
    chunks = fixed.chunks or (chunks_of(fixed.schedule)[0] if fixed.schedule and fixed.pp not in (None, 1) else 1)
    if (fixed.pp or 1) * chunks > units:
        reason = f": {why}" if why else ""
        raise BatchError(f"pp {fixed.pp or 1} with {chunks} stages on each rank", f"the model has {units} "
                         f"units that can be cut{reason}", f"pp={max(units // chunks, 1)}")
