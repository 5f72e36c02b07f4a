"""Training a model in stages, each on its placement, on micro-batches, by a schedule.

    stages = [nn.Sequential(embedding, *blocks[:4]), nn.Sequential(*blocks[4:], head)]
    places = [gt.placement("cpu", [0]), gt.placement("cpu", [1])]
    runner = gt.pipeline(stages, places, "1f1b", micro_batches=8, loss=loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for inputs, targets in batches:
        runner.step(inputs, targets)                 # leaves the gradients of all micro-batches, as a plain loop does
        optimizer.step()
        optimizer.zero_grad()

The same program runs in one process that drives all ranks and in one process per rank. In the latter case each process
runs only the stages it holds a part of, so code inside a stage must involve the stage's ranks alone: no `.item()`, no
`full_tensor()`. Before and after a step all processes are in step again.

Communication beyond the schedule's: parameters that several stages share travel once each way; a stage on several
ranks reduces its gradients once, right after its last backward pass, while other stages are still at work.
"""
from __future__ import annotations

import gc
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from globaltensor.boxings.redistribute import redistribute
from globaltensor.errors import ArgumentError, GlobalTensorError, closest, counted, expect, warn
from globaltensor.layouts.layout import spec
from globaltensor.layouts.placement import placement
from globaltensor.pictures.timetable_picture import Timetable
from globaltensor.pipelining.actions import PipelineModel, PipelineStep
from globaltensor.pipelining.dry_run import dry_run
from globaltensor.pipelining.layer_lists import cut_by_layers, layer_lists
from globaltensor.pipelining.micro_batches import MicroBatches, check_rows, mean_divisors, with_named
from globaltensor.pipelining.stage_comm import StageComm
from globaltensor.pipelining.stage_placement import StageParameters, rank_groups, stage_placements
from globaltensor.pipelining.stages import StageError, as_modules, cut_sequence
from globaltensor.pipelining.step_results import KnownSteps, MissingGradients
from globaltensor.pipelining.tracing import UntraceableError, cut_traced
from globaltensor.runtime import lineage
from globaltensor.runtime.agreement import gather_objects
from globaltensor.runtime.compiler_skips import ends_graphs
from globaltensor.runtime.p2p import MAX_PENDING
from globaltensor.runtime.world import world
from globaltensor.schedules.check import check_schedule
from globaltensor.schedules.communication import communicate
from globaltensor.schedules.early_send import send_gradients_early
from globaltensor.schedules.generators import GENERATORS, generate
from globaltensor.schedules.schedule import F, Schedule
from globaltensor.schedules.text import read_schedule
from globaltensor.schedules.timetable import Event
from globaltensor.tensors import gradients
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tracebacks import api_boundary


@api_boundary
def pipeline(model: Any, placements: Sequence[placement], schedule: str | os.PathLike[str] | Schedule = "1f1b",
             micro_batches: int | None = None, loss: Callable[..., Any] | None = None, *, chunks: int | None = None,
             starts: Sequence[str] | None = None, cost: Callable[[nn.Module], float] | None = None, batch: str = "dp",
             reduction: str = "mean", recompute: bool = False, inputs: Sequence[str] = ()) -> PipelineRunner:
    """A model in stages, ready to be trained by a schedule. Its parameters become global, on the stages' placements,
    and stay the same objects. Those that are global already keep their sbp.

    model          the stages, as a list of modules; or a module, which is cut into stages of equal cost: an
                   nn.Sequential; any other whose forward torch.fx can trace (inside its blocks anything may happen);
                   or one with an nn.ModuleList or nn.ModuleDict of layers that run one after the other, as those of
                   transformers and torchtitan have
    placements     one for each rank of the schedule, or one for each stage; of any sizes and layouts
    schedule       a name (gpipe, 1f1b, interleaved, bfs, zb-h1, zb-h2, zb-v, dualpipe-v), a file, or a Schedule. One
                   with a name may send gradients early (schedules/early_send.py), others are run as they are
    micro_batches  into how many a batch is cut (default: 4, or those of the schedule)
    loss           of what the last stage returns and the targets, a scalar (default: the last stage returns it itself,
                   alone or beside others that are not scalars: `return logits, loss`)
    chunks         stages on each rank, where the schedule leaves a choice
    starts, cost   of a module that is cut: the names of the layers with which later stages begin; the cost of a layer
                   (default: its parameters; `globaltensor.pipelining.stages.measured(model, inputs)` measures)
    batch          the axis along which plain inputs and targets are split, where a placement has it
    reduction      "mean": losses of micro-batches are means of their rows, and that of a step is the mean of all rows.
                   A mean of something else, such as of targets that are not ignored, counts by the rows all the same.
                   "sum": that of a step is their sum
    recompute      keep only the inputs of stages, and run the stages again before their backward passes
    inputs         of a module that is cut by tracing: which of its inputs with a default value, such as labels=None,
                   will be passed; the others keep theirs
    Collective. Raises ScheduleError, StageError and PlacementError, on every rank, for arguments that do not fit
    together.
    """
    if reduction not in ("mean", "sum"):
        raise GlobalTensorError(f"reduction={reduction!r}", "losses of micro-batches are added or averaged",
                                'reduction="mean" or "sum"')
    for name, number in (("micro_batches", micro_batches), ("chunks", chunks)):
        if number is not None:
            expect(number, int, f"{name}={number!r}", f"{name}=4")
    if loss is not None and not callable(loss):
        raise ArgumentError(f"loss={loss!r}", "it is called with the output of the last stage and the targets",
                            "loss=torch.nn.functional.cross_entropy")
    _check_stage_options(cost, batch, recompute, inputs)
    plain_schedule = _resolve_schedule(schedule, len(rank_groups(placements)), micro_batches, chunks, model)
    program = check_schedule(plain_schedule, MAX_PENDING).program
    by_stage = stage_placements(plain_schedule, placements)
    _check_batch_axis(batch, by_stage)
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        where_to = plain_schedule.stages if starts is None else starts
        stages = (cut_sequence(model, where_to, cost) if isinstance(model, nn.Sequential) else
                  _cut_module(model, where_to, cost, inputs))
    else:
        stages = as_modules(model)
    if len(stages) != plain_schedule.stages:
        raise StageError(f"{counted(len(stages), 'stage')} for {plain_schedule.name}, which has "
                         f"{plain_schedule.stages} on {counted(plain_schedule.ranks, 'rank')}", "each stage of the "
                         "schedule is a module", f"{counted(plain_schedule.stages, 'module')}, or an nn.Sequential")
    parameters = StageParameters(stages, by_stage)
    return PipelineRunner(PipelineModel(stages, by_stage, parameters, loss, reduction, recompute), program, batch)


def _check_batch_axis(batch: str, by_stage: Sequence[placement]) -> None:
    names = dict.fromkeys(name for where in by_stage for name in where.axis_names or ())
    if batch != "dp" and batch not in names:         # which is the default, and there need be none
        near = closest(batch, names) or ["dp"]
        raise ArgumentError(f"batch={batch!r}", "no placement of a stage has an axis of that name" + (
            f": theirs are {', '.join(names)}" if names else ""), f"batch={near[0]!r}")


def _check_stage_options(cost: object, batch: object, recompute: object, inputs: object) -> None:
    if cost is not None and not callable(cost):
        raise ArgumentError(f"cost={cost!r}", "it is called with a layer, and gives a number",
                            "cost=lambda layer: sum(p.numel() for p in layer.parameters())")
    expect(batch, str, "a batch split along no axis", 'batch="dp"')
    expect(recompute, bool, "recompute says neither yes nor no", "recompute=True")
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise ArgumentError(f"inputs={inputs!r}", "they are names, in a tuple or list", 'inputs=("labels",)')


def _cut_module(model: nn.Module, stages: int | Sequence[str], cost: Callable[[nn.Module], float] | None,
                inputs: Sequence[str]) -> list[nn.Module]:
    """By its graph; where torch.fx does not follow its forward, by its list of layers."""
    try:
        return cut_traced(model, stages, cost, inputs)
    except UntraceableError as untraceable:
        if not layer_lists(model):
            raise
        try:
            return cut_by_layers(model, stages, cost, inputs)
        except StageError as error:
            raise untraceable from error             # what a traced model must be says more


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Inside, Python does not look for reference cycles: going through all objects of all graphs takes long, while the
    neighbouring stages wait."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _resolve_schedule(schedule: Any, ranks: int, micro_batches: int | None, chunks: int | None,
                      model: Any) -> Schedule:
    """The schedule of this name, of this file, or this one itself."""
    if isinstance(schedule, str) and (schedule in GENERATORS or not os.path.exists(schedule)):
        any_chunks = schedule in GENERATORS and GENERATORS[schedule][1] is None
        if chunks is None and any_chunks and isinstance(model, (list, tuple)):
            chunks = max(len(model) // ranks, 1)
        return send_gradients_early(generate(schedule, ranks, 4 if micro_batches is None else micro_batches, chunks))
    if not isinstance(schedule, (str, os.PathLike, Schedule)):
        raise ArgumentError(f"schedule={schedule!r}", "it is a name, a file or a Schedule", 'gt.pipeline(..., "1f1b")')
    own = schedule if isinstance(schedule, Schedule) else read_schedule(schedule)
    if micro_batches not in (None, own.micro_batches):
        raise StageError(f"{counted(micro_batches or 0, 'micro-batch', 'micro-batches')} for {own.name}",
                         f"it has {own.micro_batches}", f"micro_batches={own.micro_batches}")
    return own


class PipelineRunner:
    """Made by `gt.pipeline`.

    stages     the modules, by stage
    schedule   as it was checked, with its sends and receives
    events     the actions of the last step in this process, with their times in seconds of one clock per host
    seeds      of the random numbers of the last step, by micro-batch: a loop over a global model that calls
               `torch.manual_seed` with them before each micro-batch draws the same
    """

    def __init__(self, model: PipelineModel, schedule: Schedule, batch: str) -> None:
        here = world()
        self.stages, self.schedule, self.model = model.stages, schedule, model
        self.evaluation = communicate(schedule.only([F]))
        self.events: list[Event] = []
        self.seeds: list[int] = []
        self._divisors: list[float] = []             # of the losses of micro-batches of the last step
        by_rank = [model.placements[stages[0]] for stages in schedule.stages_of]
        self._everyone = sorted({rank for where in by_rank for rank in where.flat})
        self._cutter = MicroBatches(schedule.micro_batches, batch, self._everyone)
        self._comm = None if here.single_process else StageComm(self._everyone)
        self._ranks = [r for r, where in enumerate(by_rank) if here.single_process or here.rank in where.coords]
        self._shorter: dict[tuple[int, int], Schedule] = {}      # by the schedule, with fewer micro-batches
        self._dry_run_kinds: set[Hashable] = set()
        self._warned = False                         # of what differs from one device
        self._known_steps = KnownSteps()

    @ends_graphs
    @api_boundary
    def step(self, inputs: Any = (), targets: Any = None, **named: Any) -> GlobalTensor:
        """Forward and backward of a batch: gradients are left in the parameters. The loss, on the last placement.

        inputs, targets   a tensor, or a tuple of several, cut into micro-batches along dim 0; or a list that has a
                          tensor or tuple for each micro-batch. Plain ones are the same on every process. Of fewer
                          rows than micro-batches each is one
        named             more inputs, tensors that the first stage takes by name and that are cut likewise; None: not
                          passed. Without a loss function, targets are such an input, called so

        Collective. Raises ShapeError and ArgumentError for a batch that cannot be cut, GlobalTensorError for one that
        requires a gradient, DisagreementError for plain tensors that differ, and StageError for a hook on a parameter
        that stages share, or where a stage or the loss fails on the first inputs of their kind: on every rank. What a
        stage raises later, its own ranks raise; others raise TransportError or DisagreementError once these have ended
        or gone on. Gradients of before the step stay, and what its backward passes have added.
        """
        targets, named = self._who_takes(targets, named)
        self.model.parameters.check_hooks()
        with lineage.paused():
            return self._total(self._run(inputs, targets, named, True, self.schedule))

    @ends_graphs
    @api_boundary
    def eval(self, inputs: Any = (), targets: Any = None, **named: Any) -> Any:
        """Forward only, without gradients: the output of the last stage, the micro-batches concatenated again along
        dim 0, and scalars, such as a loss that the stage returns, reduced as those of a step; with targets, the loss.
        Arguments as those of `step`. Call `eval()` of the modules first where they behave differently then.
        Collective. Raises what `step` does."""
        targets, named = self._who_takes(targets, named)
        with lineage.paused():
            results = self._run(inputs, targets, named, False, self.evaluation)
        if targets is not None:
            return self._total(results)
        outputs = tuple(self._joined(parts) for parts in zip(*results))
        return outputs if len(outputs) > 1 else outputs[0]

    def _who_takes(self, targets: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What the loss function takes, and what the first stage takes by name."""
        return (targets, named) if self.model.loss is not None else (None, {"targets": targets, **named})

    def _joined(self, parts: Sequence[Any]) -> Any:
        """One of the outputs of the last stage, of all micro-batches."""
        if parts[0] is None or parts[0].dim():
            return None if parts[0] is None else torch.cat(list(parts))
        if self.model.reduction == "mean":           # else a count stays an integer
            parts = [part / own for part, own in zip(parts, self._divisors)]
        return self._total([(part,) for part in parts])

    @api_boundary
    def gathered_events(self) -> Timetable:
        """The events of all processes: prints as a timetable, which a notebook shows as a picture. Collective. Raises
        TransportError where a process has ended."""
        own: Any = tuple(map(tuple, self.own_events()))
        return Timetable(Event(*event) for events in gather_objects(own, "the events of a pipeline")
                         for event in events)

    def own_events(self) -> list[Event]:
        """Those that this process tells of. Where several ranks run the same stages, the first does."""
        lead = not self._ranks or world().rank == self.model.placements[
            self.schedule.stages_of[self._ranks[0]][0]].flat[0]
        return self.events if lead or world().single_process else []

    # -------------------------------------------------------------------------------------------------------- one step

    def _run(self, inputs: Any, targets: Any, named: dict[str, Any], train: bool,
             schedule: Schedule) -> list[tuple[Any, ...]]:
        """The output of the last stage, or the loss, for each micro-batch, on every process."""
        first, last = self.model.placements[0], self.model.placements[-1]
        autocast = torch.get_autocast_dtype(first.type), torch.is_autocast_enabled(first.type)
        with torch.autocast(first.type, enabled=False), torch.no_grad():
            names = tuple(name for name, value in named.items() if value is not None)
            inputs = with_named(inputs, [named[name] for name in names])
            cutter = self._cutter if isinstance(inputs, list) else self._cutter.of_rows(inputs, targets)
            micro_inputs = cutter.cut(inputs, first, "inputs")
            micro_targets = [None] * len(micro_inputs) if targets is None else cutter.cut(targets, last, "targets")
            if not (isinstance(inputs, list) and isinstance(targets, (list, type(None)))):   # cut by the user already
                check_rows(micro_inputs, micro_targets)
        self._divisors = mean_divisors(micro_inputs) if self.model.reduction == "mean" else [1.0] * len(micro_inputs)
        mode = train, autocast, names, self._state_of_stages()
        keys = [(mode, _shapes(x), _shapes(y or ())) for x, y in zip(micro_inputs, micro_targets)]
        base = int(torch.randint(1 << 62, (), device="cpu"))
        self.seeds = [base + j for j in range(len(micro_inputs))]
        random_after = torch.get_rng_state()         # the program draws one number a step, whatever the stages draw
        step = PipelineStep(self.model, self._of_micro_batches(schedule, len(micro_inputs)), self._comm,
                            micro_inputs if 0 in self._ranks or self._has(0) else (), micro_targets, keys, self.seeds,
                            train, autocast, names, self._divisors)
        if self._comm is not None:
            self._comm.begin_step()
        try:
            with torch.autocast(first.type, enabled=False):
                self.model.parameters.begin_step()
                self._dry_run(step, micro_inputs, mode)
                with garbage_collection_off():
                    step.run(self._ranks)
                if self._comm is not None:
                    self._comm.flush()
                return self._agree(step, tuple(keys), train)
        finally:
            torch.set_rng_state(random_after)
            self.events = step.events

    def _of_micro_batches(self, schedule: Schedule, number: int) -> Schedule:
        """The schedule of a step with so many: a batch may have fewer rows than the schedule has micro-batches."""
        if number == schedule.micro_batches:
            return schedule
        if (id(schedule), number) not in self._shorter:
            self._shorter[id(schedule), number] = schedule.first(number)
        return self._shorter[id(schedule), number]

    def _dry_run(self, step: PipelineStep, micro_inputs: Sequence[tuple[Any, ...]], mode: Hashable) -> None:
        """For inputs of a kind that was not seen before: do the stages fit together?"""
        for mb, inputs in enumerate(micro_inputs):
            kind = mode, tuple((t.dim(), t.dtype, t.shape[:1] == inputs[0].shape[:1])
                               for t in (*inputs, *(step.targets[mb] or ())))
            if kind not in self._dry_run_kinds:
                dry_run(step, mb, inputs, [stage for stage in range(len(self.stages)) if self._has(stage)])
                self._dry_run_kinds.add(kind)
                if not self._warned and len(micro_inputs) > 1 and world().rank == min(world().rank, *self._everyone):
                    self._warned = _warn_of_batch_norm(self.stages, len(micro_inputs))

    def _state_of_stages(self) -> Hashable:
        """What the outputs of stages follow from besides their inputs, of all stages and the same on every process:
        which parameters learn and how they lie, which stages train (by the modules without children: a stage that was
        cut is a new module, which `model.eval()` does not reach), and the dtype of new tensors."""
        every: list[torch.Tensor] = [p for stage in self.stages for p in stage.parameters()]
        parameters = tuple((p.requires_grad, p.spec.layout if isinstance(p, GlobalTensor) else None) for p in every)
        training = tuple(any(m.training for m in stage.modules() if not m._modules) for stage in self.stages)
        return parameters, training, torch.get_default_dtype()

    def _has(self, stage: int) -> bool:
        """Does this process run the stage?"""
        return self.schedule.rank_of[stage] in self._ranks

    def _agree(self, step: PipelineStep, keys: Hashable, train: bool) -> list[tuple[Any, ...]]:
        """After a step each process knows of its own stages only. Here all learn what the others know, so that they go
        on alike. The output of the last stage, or the loss, for each micro-batch."""
        own = [stage for stage in range(len(self.stages)) if self._has(stage)]
        results = None
        if self._has(len(self.stages) - 1):
            results = [step.results[j] for j in range(len(step.keys))]
        missing = self.model.parameters.missing_gradients(own) if train else MissingGradients()
        known = self._known_steps.of_all(keys, missing, results, train)
        if train:
            self.model.parameters.reduce_replicas(known.missing.replicas)
            self._set_grads_elsewhere(own, known.missing.parameters)
        if results is None:
            # No shards here, but the value can be read: `if loss.item() > 3` takes the same branch on every process.
            results = [tuple(part and GlobalTensor.wrap(part.spec, {}) for part in meta) for meta in known.metas]
        return results

    def _set_grads_elsewhere(self, own: Sequence[int], missing: frozenset[tuple[int, int]]) -> None:
        """A parameter of a stage that other processes run gets a gradient here too, without a shard, so that clipping
        and optimizers do the same everywhere."""
        for stage in set(range(len(self.stages))) - set(own):
            parameters: list[torch.Tensor] = list(self.stages[stage].parameters())
            for k, p in enumerate(parameters):
                if p.requires_grad and (stage, k) not in missing and gradients.raw_grad(p) is None:
                    assert isinstance(p, GlobalTensor)           # stages are moved to their placements
                    dst = gradients.grad_layout(p)
                    # beside what the part of ZeRO kept of earlier steps, which it is added to as on the other ranks
                    gradients.set_raw(p, GlobalTensor.wrap(spec(dst, p.spec.shape, None, p.spec.dtype), {}))

    def _total(self, results: Sequence[tuple[Any, ...]]) -> GlobalTensor:
        """The sum of scalars, one for each micro-batch, on the last placement."""
        total = results[0][0]
        # pending sums are added as they are: the loss of a step is reduced once, not once a micro-batch
        for (part,) in results[1:]:
            total = total + part
        return redistribute([total], [total.spec.layout.replicated], "the loss of a pipeline")[0]


def _warn_of_batch_norm(stages: Sequence[nn.Module], micro_batches: int) -> bool:
    """Where a module takes the statistics of what it is given, which is a micro-batch here. Did it warn?"""
    for stage, module in enumerate(stages):
        for name, m in module.named_modules():
            if isinstance(m, _BATCH_NORM) and (m.training or m.running_mean is None):
                warn(f"batch norm takes the statistics of each of {micro_batches} micro-batches, not those of the "
                     f"batch: {name or type(m).__name__} of stage {stage}"
                     "\n  why:   each runs by itself, so losses and gradients are not those of one device"
                     "\n  try:   micro_batches=1, its eval() with statistics that are kept, or nn.GroupNorm")
                return True
    return False


_BATCH_NORM = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def _shapes(tensors: Sequence[Any]) -> Hashable:
    return tuple((t.spec.layout, t.spec.shape, t.spec.dtype) for t in tensors)
