"""Doing what a schedule says, for one step: forwards, backwards, their two halves, and what goes between the stages.

A process that drives one rank goes through the list of its rank of the schedule, beside the others. A process that
drives all ranks goes through all lists in turns, each as far as it can. Either way a value has one path:

    F of a stage -> outbox -> SEND_F ... RECV_F -> inbox -> F of the next stage         and back, with B, from stage to
    (from here on the same rank, straight into the inbox)                               stage before

Random numbers belong to the micro-batch: micro-batch j starts from a seed of its own, and each stage goes on where the
one before left off. So they do not depend on the schedule, the cut, or which process runs what.
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from globaltensor.errors import ShapeError
from globaltensor.layouts.placement import placement
from globaltensor.pipelining.split_backward import inputs_first, passed_back, weights
from globaltensor.pipelining.stage_comm import (
    AHEAD,
    Arrival,
    Parcel,
    Post,
    Route,
    backward_layout,
    carried,
    forward_layout,
    parcel,
)
from globaltensor.pipelining.stage_placement import Homes
from globaltensor.runtime.agreement import uncoordinated
from globaltensor.schedules.schedule import KINDS, RECV_B, RECV_F, SEND_B, SEND_F, Actions, B, F, I, Schedule, W
from globaltensor.schedules.timetable import Event
from globaltensor.tensors import gradients
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.products import DeferredGrad

STATE = torch.get_rng_state().numel()                # bytes of the state of random numbers


@dataclass
class Model:
    """What stays the same from step to step."""

    stages: Sequence[nn.Module]
    places: Sequence[placement]
    homes: Homes
    loss: Callable[..., Any] | None
    reduction: str
    recompute: bool


@dataclass
class Kept:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    given: Parcel
    outputs: tuple[Any, ...] = ()
    inputs: list[Any] = field(default_factory=list)
    form: tuple = ()                                 # of the outputs
    later: list[DeferredGrad] = field(default_factory=list)    # between I and W


class Step:
    """One step: `run(program)`, and then `results` and `events`.

    inputs, targets   for each micro-batch a tuple of global tensors, on the first and on the last placement
    keys              for each micro-batch what its shapes follow from
    autocast          (dtype, enabled) of the caller, in force inside the stages only
    """

    def __init__(self, model: Model, schedule: Schedule, post: Post | None, inputs: Sequence[tuple],
                 targets: Sequence[tuple | None], keys: Sequence[Hashable], seeds: Sequence[int], train: bool,
                 autocast: tuple[torch.dtype, bool]) -> None:
        self.model, self.schedule, self.post, self.train, self.autocast = model, schedule, post, train, autocast
        self.targets, self.keys = targets, keys
        self.last = schedule.stages - 1
        self.inbox: dict[tuple[int, str, int], Parcel] = {}
        self.outbox: dict[tuple[int, str, int], tuple[Parcel, list[Any]]] = {}
        self.kept: dict[tuple[int, int], Kept] = {}
        self.coming: dict[int, Arrival] = {}         # letters of which the receive is posted
        self.results: dict[int, Any] = {}            # by micro-batch: what the last stage gave, or its loss
        self.events: list[Event] = []
        self.left = [schedule.micro_batches] * schedule.stages      # backward passes that a stage still has to end
        self.before: dict[int, list[tuple[Any, Any]]] = {}          # by stage, gradients from before this step
        if inputs:
            for j, (tensors, seed) in enumerate(zip(inputs, seeds)):
                state = torch.Generator().manual_seed(seed).get_state()
                self.inbox[0, "F", j] = parcel(tensors, state)

    # ------------------------------------------------------------------------------------------- going through lists

    def run(self, ranks: Sequence[int]) -> None:
        """Do the lists of these ranks of the schedule: all of them, or one."""
        for stage in (s for rank in ranks for s in self.schedule.stages_of[rank]) if self.train else ():
            self.before[stage] = gradients.set_aside(self.model.homes.reduced(stage))
        with gradients.no_early_reduction():
            if len(ranks) == self.schedule.ranks and self.post is None:
                self._in_turns()
            else:
                with uncoordinated():
                    for rank in ranks:
                        self._alone(rank, self.schedule.actions[rank])
        assert not (self.kept or self.inbox or self.outbox or self.coming), "a checked schedule leaves nothing behind"

    def _in_turns(self) -> None:
        rows = [deque(row.codes) for row in self.schedule.actions]
        while any(rows):
            for rank, row in enumerate(rows):
                while row and self._ready(row[0]):
                    self._do(rank, row.popleft())

    def _ready(self, code: int) -> bool:
        """Has what an action receives been sent?"""
        kind, (mb, stage) = code & 7, divmod(code >> 3, self.schedule.stages)
        return kind not in (RECV_F, RECV_B) or (stage, "F" if kind == RECV_F else "B", mb) in self.inbox

    def _alone(self, rank: int, row: Actions) -> None:
        self.channels: dict[int, deque[int]] = {}    # by the rank of the sender, what is still to be received
        for code in row.codes:
            if code & 7 in (RECV_F, RECV_B):
                self.channels.setdefault(self._peer(code), deque()).append(code)
        for code in row.codes:
            self._do(rank, code)

    def _do(self, rank: int, code: int) -> None:
        kind, (mb, stage) = code & 7, divmod(code >> 3, self.schedule.stages)
        if kind >= SEND_F:
            if kind in (SEND_F, SEND_B):
                self._send(stage, "F" if kind == SEND_F else "B", mb)
            elif self.post is not None:
                self._receive(code)
            return
        began = time.perf_counter()
        with self.model.homes.replicas_in(stage):
            {F: self._forward, B: self._backward, I: self._input_gradients, W: self._weight_gradients}[kind](stage, mb)
        ended = time.perf_counter()
        self.events.append(Event(rank, stage, KINDS[kind], mb, began, ended))
        self.left[stage] -= kind in (B, W)
        leaves = [] if self.left[stage] else self.model.homes.reduced(stage)
        if leaves:                                   # it was the stage's last backward pass: others go on meanwhile
            gradients.reduce_pending(leaves)
            gradients.restore(self.before.pop(stage))
            self.events.append(Event(rank, stage, "R", mb, ended, time.perf_counter()))

    # ---------------------------------------------------------------------------------------------- between the stages

    def _peer(self, code: int) -> int:
        return self.schedule.rank_of[(code >> 3) % self.schedule.stages + (-1 if code & 7 == RECV_F else 1)]

    def _hand(self, stage: int, way: str, mb: int, given: Parcel, layouts: list[Any]) -> None:
        """Put what a stage made where it goes next, to lie there in these layouts."""
        to = stage + (1 if way == "F" else -1)
        if self.schedule.rank_of[to] == self.schedule.rank_of[stage]:
            self.inbox[to, way, mb] = carried(given, layouts)
        else:
            self.outbox[stage, way, mb] = given, layouts

    def _send(self, stage: int, way: str, mb: int) -> None:
        given, layouts = self.outbox.pop((stage, way, mb))
        to = stage + (1 if way == "F" else -1)
        if self.post is None:
            self.inbox[to, way, mb] = carried(given, layouts)
        else:
            self.post.send((self.keys[mb], to, way), given, layouts, self._route(stage, to), (to, way, mb))

    def _route(self, stage: int, to: int) -> Route:
        return Route(self.model.places[stage], self.model.places[to])

    def _receive(self, code: int) -> None:
        """Take a letter in, and be ready for those that follow in its channel."""
        channel = self.channels[self._peer(code)]
        channel.popleft()                            # letters come in the order of the list: the check saw to it
        arrival = self.coming.pop(code, None) or self._expect(code)
        mb, stage = divmod(code >> 3, self.schedule.stages)
        given = arrival.open()
        if code & 7 == RECV_B:
            self.post.mail.taken((stage + 1, "F", mb))    # whose gradient this is
        self.inbox[stage, "F" if code & 7 == RECV_F else "B", mb] = given
        for later in list(channel)[:AHEAD]:
            if later not in self.coming:
                found = self._expect(later, ahead=True)
                if found is None:
                    break
                self.coming[later] = found

    def _expect(self, code: int, ahead: bool = False) -> Arrival | None:
        """Post the receive of a letter. `ahead` of its turn: None where its form, or how it shall lie, is not known."""
        kind, (mb, stage) = code & 7, divmod(code >> 3, self.schedule.stages)
        way = "F" if kind == RECV_F else "B"
        key, route = (self.keys[mb], stage, way), self._route(stage + (-1 if way == "F" else 1), stage)
        if ahead and key not in self.post.lines:
            return None
        if way == "F":
            line = self.post.line(key, route, lambda form: layouts_forward(form, route.readers))
        else:
            line = self.post.line(key, route, lambda _: layouts_backward(self.kept[stage, mb].form))
        return Arrival(self.post.mail, line, STATE if way == "F" else 0, (stage, way, mb))

    # ------------------------------------------------------------------------------------------------- the four actions

    def _forward(self, stage: int, mb: int) -> None:
        given = self.inbox.pop((stage, "F", mb))
        keeps = self.train and not self.model.recompute
        inputs, outputs = self.call(stage, mb, given, grad=keeps)
        random = torch.get_rng_state()
        if stage == self.last:
            self._result(mb, outputs)
        form: tuple = ()
        if stage != self.last:
            made = parcel(outputs, random)
            if self.train and not keeps:             # what runs without a graph does not say what will need a gradient
                made = made._replace(form=self._needs(stage, made.form, inputs, outputs, given))
            form = made.form
            self._hand(stage, "F", mb, made, layouts_forward(form, self.model.places[stage + 1]))
        if self.train:
            self.kept[stage, mb] = Kept(given, outputs if keeps else (), inputs if keeps else [], form)

    def _backward(self, stage: int, mb: int) -> None:
        kept, grads = self._resumed(stage, mb)
        self._pass_back(stage, mb, passed_back(kept.outputs, grads, kept.inputs))
        del self.kept[stage, mb]

    def _input_gradients(self, stage: int, mb: int) -> None:
        kept, grads = self._resumed(stage, mb)
        found, kept.later = inputs_first(kept.outputs, grads, kept.inputs)
        self._pass_back(stage, mb, found)
        kept.outputs, kept.inputs = (), []

    def _weight_gradients(self, stage: int, mb: int) -> None:
        weights(self.kept.pop((stage, mb)).later)

    def _resumed(self, stage: int, mb: int) -> tuple[Kept, Sequence[Any]]:
        """What the forward kept, made again where it kept the input only, and the gradients of its outputs."""
        kept = self.kept[stage, mb]
        if self.model.recompute:
            with buffers_left_alone(self.model.stages[stage]):
                kept.inputs, kept.outputs = self.call(stage, mb, kept.given, grad=True)
        if stage == self.last:
            return kept, [torch.ones_like(y) for y in kept.outputs]
        return kept, self.inbox.pop((stage, "B", mb)).tensors

    def _pass_back(self, stage: int, mb: int, grads: Sequence[Any]) -> None:
        if stage:
            layouts = layouts_backward(self.kept[stage, mb].given.form)
            self._hand(stage, "B", mb, parcel(grads), layouts)

    # ------------------------------------------------------------------------------------------------- running a stage

    def call(self, stage: int, mb: int, given: Parcel, grad: bool) -> tuple[list[Any], tuple[Any, ...]]:
        """Run a stage from the random state that came with its input; its inputs as leaves, and its outputs. The last
        stage's output, in training, is the micro-batch's part of the loss."""
        inputs = [t.detach() for t in given.tensors]
        for leaf, part in zip(inputs, given.form):
            if grad and part.needs_grad:
                torch._C.TensorBase.requires_grad_(leaf, True)
        torch.set_rng_state(given.random)
        dtype, enabled = self.autocast
        kind = self.model.places[stage].type
        with torch.set_grad_enabled(grad), torch.autocast(kind, dtype, enabled, cache_enabled=False):
            outputs = _tensors(self.model.stages[stage](*inputs), stage)
            if stage == self.last and (self.train or self.targets[mb] is not None):
                outputs = (self._loss(outputs, mb),)
        return inputs, outputs

    def _loss(self, outputs: tuple[Any, ...], mb: int) -> Any:
        loss, target = outputs[0], self.targets[mb]
        if self.model.loss is not None:
            output = outputs if len(outputs) > 1 else outputs[0]
            loss = self.model.loss(output) if target is None else self.model.loss(output, *target)
        if not isinstance(loss, GlobalTensor) or loss.numel() != 1:
            raise ShapeError(f"the loss of micro-batch {mb} is {_described(loss)}",
                             "a step begins its backward passes with one number", "loss=a function that gives a scalar")
        return loss / len(self.keys) if self.model.reduction == "mean" else loss

    def _result(self, mb: int, outputs: tuple[Any, ...]) -> None:
        self.results[mb] = tuple(y.detach() for y in outputs)

    def _needs(self, stage: int, form: tuple, inputs: Sequence[Any], outputs: Sequence[Any], given: Parcel) -> tuple:
        """Which outputs need a gradient, without a graph: an input that is handed along does where it did; others that
        are no integers do where an input or a parameter does."""
        came = {id(x): part.needs_grad for x, part in zip(inputs, given.form)}
        some = any(came.values()) or any(p.requires_grad for p in self.model.stages[stage].parameters())
        return tuple(part._replace(needs_grad=came.get(id(y), some and (y.is_floating_point() or y.is_complex())))
                     for part, y in zip(form, outputs))


def layouts_forward(form: tuple, where: placement) -> list[Any]:
    """How the tensors of a parcel of this form lie on the next stage."""
    return [forward_layout(part.layout, where) for part in form]


def layouts_backward(form: tuple) -> list[Any]:
    """How the gradients of tensors of this form lie where they arrive."""
    return [backward_layout(part.layout) for part in form]


def _tensors(value: Any, stage: int) -> tuple[Any, ...]:
    made = (value,) if isinstance(value, torch.Tensor) else tuple(value) if isinstance(value, (tuple, list)) else None
    for one in (value,) if made is None else made:
        if not isinstance(one, GlobalTensor):
            raise ShapeError(f"stage {stage} gave {_described(one)}", "global tensors go from stage to stage",
                             "a stage that gives a tensor, or a tuple of tensors, made of its inputs and parameters")
    return made


def _described(value: Any) -> str:
    return f"a plain tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) and not value.is_global else (
        f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}")


@contextmanager
def buffers_left_alone(module: nn.Module) -> Iterator[None]:
    """Inside, the module works on copies of its buffers: running statistics must not count a micro-batch twice."""
    held = [(m._buffers, key, b) for m in module.modules() for key, b in m._buffers.items() if b is not None]
    for buffers, key, b in held:
        buffers[key] = b.clone()
    try:
        yield
    finally:
        for buffers, key, b in held:
            buffers[key] = b
