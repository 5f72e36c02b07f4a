"""Running a schedule: a model in stages, each on its placement, trained on micro-batches.

    stages = [nn.Sequential(embedding, *blocks[:4]), nn.Sequential(*blocks[4:], head)]
    places = [gt.placement("cpu", [0]), gt.placement("cpu", [1])]
    runner = gt.pipeline(stages, places, "1f1b", micro_batches=8, loss=loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for inputs, targets in batches:
        runner.step(inputs, targets)                 # leaves the gradients of all micro-batches, as a plain loop does
        optimizer.step()
        optimizer.zero_grad()

The same program runs in one process that drives all ranks and in one process for each. In the latter each process runs
only the stages that it has a part of, so what runs inside a stage must concern the stage's ranks alone: no `.item()`,
no `full_tensor()`. Before and after a step all processes are together again.

What a step costs beyond the schedule: parameters that several stages share travel once each way; a stage on several
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
from globaltensor.errors import GlobalTensorError, ShapeError
from globaltensor.layouts.layout import layout, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import broadcast, split
from globaltensor.pipelining.actions import Model, Step
from globaltensor.pipelining.dry_run import trial
from globaltensor.pipelining.stage_comm import Part, Post
from globaltensor.pipelining.stage_placement import Homes, groups, homes
from globaltensor.pipelining.stages import StageError, by_hand, cut
from globaltensor.pipelining.tracing import traced
from globaltensor.runtime.agreement import agree_on, checking, gather_objects
from globaltensor.runtime.p2p import ROOM
from globaltensor.runtime.world import world
from globaltensor.schedules.check import check
from globaltensor.schedules.communication import communicate
from globaltensor.schedules.early_send import early
from globaltensor.schedules.generators import TABLE, generate
from globaltensor.schedules.schedule import F, Schedule
from globaltensor.schedules.text import read
from globaltensor.schedules.timetable import Event
from globaltensor.tensors import gradients
from globaltensor.tensors.global_tensor import GlobalTensor, place_full, to_layout


def pipeline(model: Any, placements: Sequence[placement], schedule: str | os.PathLike[str] | Schedule = "1f1b",
             micro_batches: int | None = None, loss: Callable[..., Any] | None = None, *, chunks: int | None = None,
             starts: Sequence[str] | None = None, cost: Callable[[nn.Module], float] | None = None, batch: str = "dp",
             reduction: str = "mean", recompute: bool = False) -> Runner:
    """A model in stages, ready to be trained by a schedule. Its parameters become global, on the stages' placements:
    make the optimizer after this. Parameters that are global already keep their sbp.

    model          the stages, as a list of modules; or a module, which is cut into stages of equal cost: an
                   nn.Sequential, or any other whose forward torch.fx can follow (its blocks' forwards may do anything)
    placements     one for each rank of the schedule, or one for each stage; of any sizes and layouts
    schedule       a name (gpipe, 1f1b, interleaved, bfs, zb-h1, zb-h2, zb-v, dualpipe-v), a file, or a Schedule. What
                   has a name may hand gradients on early (schedules/early_send.py), a file or Schedule is run as it is
    micro_batches  into how many a batch is cut (default 4, or what the schedule says)
    loss           of the last stage's output and the targets, a scalar (default: the last stage gives it itself)
    chunks         stages on each rank, where the schedule leaves that free
    starts, cost   of a module that is cut: the names of the layers with which later stages begin; the cost of a layer
                   (default: its parameters; `globaltensor.pipeline.stages.measured(model, inputs)` measures)
    batch          the axis along which plain inputs and targets are split, where a placement has it
    reduction      "mean": the loss of a step is the mean of those of its micro-batches; "sum": their sum
    recompute      keep only the inputs of stages, and run them again before their backward passes
    Raises ScheduleError, StageError and PlacementError for what does not fit together, on every rank.
    """
    if reduction not in ("mean", "sum"):
        raise GlobalTensorError(f"reduction={reduction!r}", "losses of micro-batches are added or averaged",
                                'reduction="mean" or "sum"')
    plan = _schedule(schedule, len(groups(placements)), micro_batches, chunks, model)
    program = check(plan, ROOM).program
    places = homes(plan, placements)
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        by = cut if isinstance(model, nn.Sequential) else traced
        stages = by(model, plan.stages if starts is None else starts, cost)
    else:
        stages = by_hand(model)
    if len(stages) != plan.stages:
        raise StageError(f"{len(stages)} stages for {plan.name}, which has {plan.stages} on {plan.ranks} ranks",
                         "each stage of the schedule is a module", f"{plan.stages} modules, or an nn.Sequential")
    made = Model(stages, places, Homes(stages, places), loss, reduction, recompute)
    return Runner(made, program, batch)


@contextmanager
def collector_off() -> Iterator[None]:
    """Inside, Python looks for no cycles: it would go through all objects of all graphs, while the neighbours wait."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _schedule(schedule: Any, ranks: int, micro_batches: int | None, chunks: int | None, model: Any) -> Schedule:
    if isinstance(schedule, str) and (schedule in TABLE or not os.path.exists(schedule)):
        if chunks is None and schedule in TABLE and TABLE[schedule][1] is None and isinstance(model, (list, tuple)):
            chunks = max(len(model) // ranks, 1)
        return early(generate(schedule, ranks, 4 if micro_batches is None else micro_batches, chunks))
    found = schedule if isinstance(schedule, Schedule) else read(schedule)
    if micro_batches not in (None, found.micro_batches):
        raise StageError(f"{micro_batches} micro-batches for {found.name}", f"it has {found.micro_batches}",
                         f"micro_batches={found.micro_batches}")
    return found


class Runner:
    """Made by `gt.pipeline`.

    stages     the modules, by stage
    schedule   as it was checked, with its sends and receives
    events     the actions of the last step in this process, with their times in seconds of one clock per host
    seeds      of the random numbers of the last step, by micro-batch: a plain loop that calls `torch.manual_seed` with
               them before each micro-batch draws the same
    """

    def __init__(self, model: Model, schedule: Schedule, batch: str) -> None:
        here = world()
        self.stages, self.schedule, self.model, self.batch = model.stages, schedule, model, batch
        self.evaluation = communicate(schedule.only([F]))
        self.events: list[Event] = []
        self.seeds: list[int] = []
        homes = [model.places[stages[0]] for stages in schedule.stages_of]
        everyone = sorted({rank for where in homes for rank in where.flat})
        self._post = None if here.single_process else Post(everyone)
        self._ranks = [r for r, where in enumerate(homes) if here.single_process or here.rank in where.coords]
        self._tried: set[Hashable] = set()
        self._learned: dict[Hashable, tuple[Any, ...]] = {}      # what all processes know of steps of such shapes

    def step(self, inputs: Any, targets: Any = None) -> GlobalTensor:
        """Forward and backward of a batch: gradients are left in the parameters. The loss, on the last placement.

        inputs, targets   a tensor, or a tuple of several, cut into micro-batches along dim 0; or a list that has a
                          tensor or tuple for each micro-batch. Plain ones are the same on every process
        """
        results = self._run(inputs, targets, True, self.schedule)
        return self._total(results)

    def eval(self, inputs: Any, targets: Any = None) -> Any:
        """Forward only, without gradients: what the last stage gives, the micro-batches put together again along dim 0;
        with targets, the loss. Call `eval()` of the modules first where they behave differently then."""
        results = self._run(inputs, targets, False, self.evaluation)
        if targets is not None or self.model.loss is None and all(len(r) == 1 and not r[0].dim() for r in results):
            return self._total(results)
        whole = tuple(torch.cat(parts) for parts in zip(*results))
        return whole if len(whole) > 1 else whole[0]

    def gathered_events(self) -> list[Event]:
        """The events of all processes, for `timetable`. Where several ranks run the same stages, those of the first."""
        first = not self._ranks or world().rank == self.model.places[self.schedule.stages_of[self._ranks[0]][0]].flat[0]
        mine = tuple(self.events) if first or world().single_process else ()
        return [Event(*event) for said in gather_objects(mine, "the events of a pipeline") for event in said]

    # -------------------------------------------------------------------------------------------------------- one step

    def _run(self, inputs: Any, targets: Any, train: bool, schedule: Schedule) -> list[tuple[Any, ...]]:
        """What the last stage gave for each micro-batch, on every process."""
        first, last = self.model.places[0], self.model.places[-1]
        kind = first.type
        autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False), torch.no_grad():
            parts = self._parts(inputs, first, "inputs")
            goals = [None] * len(parts) if targets is None else self._parts(targets, last, "targets")
        mode = train, autocast, tuple(m.training for m in self.stages)
        keys = [(mode, _shapes(part), _shapes(goal or ())) for part, goal in zip(parts, goals)]
        base = int(torch.randint(1 << 62, ()))
        self.seeds = [base + j for j in range(len(parts))]
        after = torch.get_rng_state()
        step = Step(self.model, schedule, self._post, parts if 0 in self._ranks or self._has(0) else (), goals, keys,
                    self.seeds, train, autocast)
        if self._post is not None:
            self._post.begin()
        try:
            with torch.autocast(kind, enabled=False):
                self.model.homes.make()
                self._try(step, parts, mode)
                with collector_off():
                    step.run(self._ranks)
                if self._post is not None:
                    self._post.mail.finish()
                return self._together(step, tuple(keys), train)
        finally:
            torch.set_rng_state(after)
            self.events = step.events

    def _try(self, step: Step, parts: Sequence[tuple[Any, ...]], mode: Hashable) -> None:
        """Inputs of a kind that was not seen before: do the stages fit?"""
        for mb, part in enumerate(parts):
            kind = mode, tuple((t.dim(), t.dtype) for t in (*part, *(step.targets[mb] or ())))
            if kind not in self._tried:
                trial(step, mb, part, [stage for stage in range(len(self.stages)) if self._has(stage)])
                self._tried.add(kind)

    def _has(self, stage: int) -> bool:
        """Does this process run the stage?"""
        return self.schedule.rank_of[stage] in self._ranks

    def _together(self, step: Step, keys: Hashable, train: bool) -> list[tuple[Any, ...]]:
        """All processes agree again on what there is: results, and gradients of parameters that live elsewhere."""
        own = [stage for stage in range(len(self.stages)) if self._has(stage)]
        results = None
        if self._has(len(self.stages) - 1):
            results = [step.results[j] for j in range(len(step.keys))]
        if keys not in self._learned or self._post is None:
            without = {(s, k) for s in own for k, p in enumerate(self.stages[s].parameters())
                       if gradients.raw_grad(p) is None} if train else set()
            unused = self.model.homes.unused(own) if train else set()
            forms = None if results is None else [[Part(y.spec.layout, y.spec.shape, y.spec.dtype, False) for y in r]
                                                  for r in results]
            said = gather_objects((without, unused, forms), "what a step of a pipeline gave")
            self._learned[keys] = (set().union(*(s[0] for s in said)), set().union(*(s[1] for s in said)),
                                   next(s[2] for s in said if s[2] is not None))
        without, unused, forms = self._learned[keys]
        if train:
            self.model.homes.settle(unused)
            self._mark_elsewhere(own, without)
        if results is None:
            results = [tuple(GlobalTensor.wrap(part.spec, {}) for part in form) for form in forms]
        return results

    def _mark_elsewhere(self, own: Sequence[int], without: set[tuple[int, int]]) -> None:
        """A parameter of a stage that other processes run has a gradient here too, of which no part is here: so that
        clipping and optimizers do the same everywhere."""
        for stage in set(range(len(self.stages))) - set(own):
            for k, p in enumerate(self.stages[stage].parameters()):
                if p.requires_grad and (stage, k) not in without and gradients.raw_grad(p) is None:
                    lies = p.__dict__.get("_aim") or p.spec.layout
                    p.grad = GlobalTensor.wrap(spec(lies, p.spec.shape, None, p.spec.dtype), {})

    def _total(self, results: Sequence[tuple[Any, ...]]) -> GlobalTensor:
        """The sum of scalars, one for each micro-batch, on the last placement."""
        total = results[0][0]
        for (part,) in results[1:]:
            total = total + part
        return redistribute([total], [total.spec.layout.replicated], "the loss of a pipeline")[0]

    # ---------------------------------------------------------------------------------------------------- micro-batches

    def _parts(self, given: Any, where: placement, what: str) -> list[tuple[Any, ...]]:
        """For each micro-batch a tuple of global tensors on a placement."""
        m = self.schedule.micro_batches
        if not isinstance(given, list):
            given = list(zip(*(self._cut(t, what) for t in (given if isinstance(given, tuple) else (given,)))))
        elif len(given) != m:
            raise ShapeError(f"{len(given)} {what} for {m} micro-batches", "a list has one for each of them",
                             f"a list of {m}, or a tensor that is cut along dim 0")
        parts = [part if isinstance(part, tuple) else (part,) for part in given]
        return [tuple(self._placed(t, where, what) for t in part) for part in parts]

    def _cut(self, t: torch.Tensor, what: str) -> Sequence[torch.Tensor]:
        m = self.schedule.micro_batches
        if not isinstance(t, torch.Tensor) or not t.dim() or len(t) < m:
            size = f"of {list(t.shape)}" if isinstance(t, torch.Tensor) else f"that are a {type(t).__name__}"
            raise ShapeError(f"{what} {size} for {m} micro-batches", "a batch is cut along dim 0",
                             f"{m} rows or more, or fewer micro-batches")
        return t.tensor_split(m)

    def _placed(self, t: torch.Tensor, where: placement, what: str) -> GlobalTensor:
        if t.requires_grad:
            raise GlobalTensorError(f"{what} that require a gradient", "a step leaves gradients in parameters only",
                                    f"{what}.detach()")
        rows = split(0) if t.dim() else broadcast
        own = layout(where, tuple(rows if name == self.batch else broadcast
                                  for name in where.axis_names or ("",) * where.ndim))
        if t.is_global:
            return to_layout(t, own)
        if checking():
            agree_on(t, f"the {what} of a pipeline")
        return place_full(t, own)


def _shapes(tensors: Sequence[Any]) -> Hashable:
    return tuple((t.spec.layout, t.spec.shape, t.spec.dtype) for t in tensors)
