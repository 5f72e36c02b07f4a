"""Executing a schedule for one step: forwards, backwards, split backwards, and the transfers between stages.

A process that drives one rank runs that rank's list of the schedule, beside the others. A process that drives all ranks
runs all lists in turn, each as far as it can go. Either way a value takes the same path:

    F of a stage -> outbox -> SEND_F ... RECV_F -> inbox -> F of the next stage         and back, with B, from stage to
    (to a stage on the same rank: straight into the inbox)                              stage before

Random numbers belong to the micro-batch: micro-batch j starts from a seed of its own, and each stage continues where
the one before left off. So they do not depend on the schedule, the cut, or which process runs what.
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from globaltensor.errors import ShapeError
from globaltensor.layouts.placement import placement
from globaltensor.pipelining.earlier_grads import restore, set_aside
from globaltensor.pipelining.kept_buffers import Buffers, buffers_left_alone, buffers_of
from globaltensor.pipelining.split_backward import (
    backward_full,
    backward_input,
    backward_weight,
    has_backward_hooks,
)
from globaltensor.pipelining.stage_comm import (
    PREFETCHED,
    ActivationBundle,
    BundleMeta,
    Layouts,
    PendingReceive,
    StageComm,
    StageLink,
    backward_layout,
    bundle,
    forward_layout,
    move_bundle,
)
from globaltensor.pipelining.stage_placement import StageParameters
from globaltensor.runtime.agreement import uncoordinated
from globaltensor.runtime.torch_internals import TensorBase
from globaltensor.schedules.schedule import Action, Actions, Schedule
from globaltensor.schedules.timetable import Event
from globaltensor.tensors import gradients
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.products import DeferredGrad

RANDOM_STATE_BYTES = torch.get_rng_state().numel()


@dataclass
class PipelineModel:
    """What stays the same from step to step."""

    stages: Sequence[nn.Module]
    placements: Sequence[placement]
    parameters: StageParameters
    loss: Callable[..., Any] | None
    reduction: str
    recompute: bool


@dataclass
class SavedForBackward:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    received: ActivationBundle
    outputs: tuple[Any, ...] = ()
    inputs: list[Any] = field(default_factory=list)
    meta: BundleMeta = ()                            # of the outputs
    deferred: list[DeferredGrad] = field(default_factory=list)     # between I and W
    buffers: Buffers = field(default_factory=list)   # those that it runs on again


class PipelineStep:
    """One step: `run(program)`, and then `results` and `events`.

    inputs, targets   for each micro-batch a tuple of global tensors, on the first and on the last placement
    keys              for each micro-batch, what the shapes inside the stages follow from
    names             of those inputs that the first stage takes by name, the last ones
    autocast          (dtype, enabled) of the caller, in force inside the stages only
    divisors          of the losses of micro-batches, which are added up
    """

    def __init__(self, model: PipelineModel, schedule: Schedule, comm: StageComm | None,
                 inputs: Sequence[tuple[Any, ...]], targets: Sequence[tuple[Any, ...] | None],
                 keys: Sequence[Hashable], seeds: Sequence[int], train: bool,
                 autocast: tuple[torch.dtype, bool], names: tuple[str, ...], divisors: Sequence[float]) -> None:
        self.model, self.schedule, self.comm, self.train, self.autocast = model, schedule, comm, train, autocast
        self.targets, self.keys, self.names, self.divisors = targets, keys, names, divisors
        self.last = schedule.stages - 1
        self.inbox: dict[tuple[int, str, int], ActivationBundle] = {}              # (stage, "F" or "B", micro-batch)
        self.outbox: dict[tuple[int, str, int], tuple[ActivationBundle, Layouts]] = {}
        self.saved: dict[tuple[int, int], SavedForBackward] = {}                   # (stage, micro-batch)
        self.posted: dict[Action, PendingReceive] = {}               # receives that are posted and not yet waited for
        self.results: dict[int, Any] = {}            # by micro-batch: the outputs of the last stage, or its loss
        self.events: list[Event] = []
        self.backwards_left = [schedule.micro_batches] * schedule.stages
        self.earlier_grads: dict[int, list[tuple[Any, Any]]] = {}    # by stage, gradients from before this step
        self.modules: dict[int, list[nn.Module]] = {}                # of stages, as they are listed while it runs
        if inputs:
            for j, (tensors, seed) in enumerate(zip(inputs, seeds)):
                state = torch.Generator().manual_seed(seed).get_state()
                self.inbox[0, "F", j] = bundle(tensors, state)

    # ------------------------------------------------------------------------------------------------ running lists

    def run(self, ranks: Sequence[int]) -> None:
        """Run the lists of these ranks of the schedule: all of them, or one."""
        for stage in (s for rank in ranks for s in self.schedule.stages_of[rank]) if self.train else ():
            # A stage's sum over micro-batches is reduced on its own; what was there before must not be reduced again.
            # Hooks may read and change that: it stays, and costs a reduction per micro-batch.
            leaves = [] if self._has_hooks(stage) else self.model.parameters.reduced_by_stage(stage)
            self.earlier_grads[stage] = set_aside(leaves)
        try:
            # Gradients that ZeRO splits early are not sent once a micro-batch where other stages would wait for it.
            with gradients.no_early_reduction() if self.schedule.stages > 1 else nullcontext():
                if len(ranks) == self.schedule.ranks and self.comm is None:
                    self._run_all_lists()
                else:
                    with uncoordinated():
                        for rank in ranks:
                            self._run_list(rank, self.schedule.actions[rank])
        finally:                                     # where a stage raised, its gradients from before are still aside
            with uncoordinated():
                for before in self.earlier_grads.values():
                    restore(before)
        assert not (self.saved or self.inbox or self.outbox or self.posted), "a checked schedule leaves nothing behind"

    def _run_all_lists(self) -> None:
        rows = [deque(row) for row in self.schedule.actions]
        while any(rows):
            for rank, row in enumerate(rows):
                while row and self._can_run(row[0]):
                    self._run_action(rank, row.popleft())

    def _can_run(self, action: Action) -> bool:
        """Has what this action receives been sent?"""
        return not action.kind.startswith("RECV") or (action.stage, action.kind[-1], action.micro_batch) in self.inbox

    def _run_list(self, rank: int, row: Actions) -> None:
        self.unreceived: dict[int, deque[Action]] = {}       # by the rank of the sender, in the order of its sends
        actions = list(row)
        for action in actions:
            if action.kind.startswith("RECV"):
                self.unreceived.setdefault(self._sender(action), deque()).append(action)
        for action in actions:
            self._run_action(rank, action)

    def _run_action(self, rank: int, action: Action) -> None:
        stage, kind, mb = action
        if kind.startswith("SEND"):
            self._send(stage, kind[-1], mb)
            return
        if kind.startswith("RECV"):
            if self.comm is not None:
                self._receive(self.comm, action)
            return
        began = time.perf_counter()
        compute = {"F": self._forward, "B": self._backward, "I": self._backward_input, "W": self._backward_weight}
        with self.model.parameters.replicas_in(stage):
            compute[kind](stage, mb)
        ended = time.perf_counter()
        self.events.append(Event(rank, stage, kind, mb, began, ended))
        self.backwards_left[stage] -= kind in "BW"
        leaves = [] if self.backwards_left[stage] else self.model.parameters.reduced_by_stage(stage)
        if leaves:                                   # after the stage's last backward, while other stages are at work
            gradients.reduce_pending(leaves)
            restore(self.earlier_grads.pop(stage))
            self.events.append(Event(rank, stage, "R", mb, ended, time.perf_counter()))

    # ------------------------------------------------------------------------------------------ between the stages

    def _sender(self, receive: Action) -> int:
        """The rank that sends what this receives."""
        return self.schedule.rank_of[receive.stage + (-1 if receive.kind == "RECV_F" else 1)]

    def _pass_on(self, stage: int, direction: str, mb: int, outgoing: ActivationBundle, layouts: Layouts) -> None:
        """Put what a stage computed into the inbox of the stage that needs it, in these layouts; or into the outbox."""
        to = stage + (1 if direction == "F" else -1)
        if self.schedule.rank_of[to] == self.schedule.rank_of[stage]:
            self.inbox[to, direction, mb] = move_bundle(outgoing, layouts)
        else:
            self.outbox[stage, direction, mb] = outgoing, layouts

    def _send(self, stage: int, direction: str, mb: int) -> None:
        outgoing, layouts = self.outbox.pop((stage, direction, mb))
        to = stage + (1 if direction == "F" else -1)
        if self.comm is None:
            self.inbox[to, direction, mb] = move_bundle(outgoing, layouts)
        else:
            self.comm.send((self.keys[mb], to, direction), outgoing, layouts, self._link(stage, to),
                           (to, direction, mb))

    def _link(self, stage: int, to: int) -> StageLink:
        return StageLink(self.model.placements[stage], self.model.placements[to])

    def _receive(self, comm: StageComm, action: Action) -> None:
        """Complete a receive, and post those that follow in its channel."""
        stage, kind, mb = action
        channel = self.unreceived[self._sender(action)]
        channel.popleft()                            # this action: the check made the lists agree with the channels
        pending = self.posted.pop(action, None) or self._post_receive(comm, action)
        received = pending.wait()
        if kind == "RECV_B":                         # its gradient is here, so the activation sent has been received
            comm.free_sent((stage + 1, "F", mb))
        self.inbox[stage, kind[-1], mb] = received
        for later in list(channel)[:PREFETCHED]:
            if later in self.posted:
                continue
            if self._plan_key(later) not in comm.plans:          # its meta must be received first, in its turn
                break                                # nor may those behind it be posted before it
            self.posted[later] = self._post_receive(comm, later)

    def _plan_key(self, receive: Action) -> Hashable:
        """The kind of the bundle that this receives."""
        return self.keys[receive.micro_batch], receive.stage, receive.kind[-1]

    def _post_receive(self, comm: StageComm, action: Action) -> PendingReceive:
        """Post a receive; where the meta of the bundle is not known yet, wait for that."""
        stage, kind, mb = action
        direction = kind[-1]
        link = self._link(stage + (-1 if direction == "F" else 1), stage)
        if direction == "F":
            transfer = comm.plan(self._plan_key(action), link, lambda meta: layouts_forward(meta, link.receivers))
        else:
            transfer = comm.plan(self._plan_key(action), link, lambda _: layouts_backward(self.saved[stage, mb].meta))
        return PendingReceive(comm, transfer, RANDOM_STATE_BYTES if direction == "F" else 0,
                              (stage, direction, mb))

    # ---------------------------------------------------------------------------------------- the actions that compute

    def _forward(self, stage: int, mb: int) -> None:
        received = self.inbox.pop((stage, "F", mb))
        with_graph = self.train and not self.model.recompute
        buffers = buffers_of(self.model.stages[stage]) if self.train and not with_graph else []
        inputs, outputs = self.call(stage, mb, received, grad=with_graph, again=self.train and not with_graph)
        random = torch.get_rng_state()
        meta: BundleMeta = ()
        if stage == self.last:
            self.results[mb] = tuple(y if y is None else y.detach() for y in outputs)
        else:
            outgoing = bundle(outputs, random)
            if self.train and not with_graph:        # without a graph, outputs do not know whether they need a gradient
                needs_grad = self._needs_grad(stage, outgoing.meta, inputs, outputs, received)
                outgoing = outgoing._replace(meta=needs_grad)
            meta = outgoing.meta
            self._pass_on(stage, "F", mb, outgoing, layouts_forward(meta, self.model.placements[stage + 1]))
        if self.train:
            self.saved[stage, mb] = SavedForBackward(received, outputs if with_graph else (),
                                                     inputs if with_graph else [], meta, buffers=buffers)

    def _backward(self, stage: int, mb: int) -> None:
        saved, grads = self._resume(stage, mb)
        self._pass_back(stage, mb, backward_full(saved.outputs, grads, saved.inputs))
        del self.saved[stage, mb]

    def _backward_input(self, stage: int, mb: int) -> None:
        saved, grads = self._resume(stage, mb)
        if self._has_hooks(stage):
            input_grads = backward_full(saved.outputs, grads, saved.inputs)
        else:
            input_grads, saved.deferred = backward_input(saved.outputs, grads, saved.inputs)
        self._pass_back(stage, mb, input_grads)
        saved.outputs, saved.inputs = (), []         # frees the graph: W needs the deferred products only

    def _has_hooks(self, stage: int) -> bool:
        """Do hooks of users, which may come at any time, run within the backward pass of this stage?"""
        if stage not in self.modules:
            self.modules[stage] = list(self.model.stages[stage].modules())
        return has_backward_hooks(self.modules[stage])

    def _backward_weight(self, stage: int, mb: int) -> None:
        backward_weight(self.saved.pop((stage, mb)).deferred)

    def _resume(self, stage: int, mb: int) -> tuple[SavedForBackward, Sequence[Any]]:
        """What the forward saved, recomputed where that was the input only, and the gradients of its outputs."""
        saved = self.saved[stage, mb]
        if self.model.recompute:
            with buffers_left_alone(self.model.stages[stage], saved.buffers):
                saved.inputs, saved.outputs = self.call(stage, mb, saved.received, grad=True)
            saved.buffers = []
        if stage == self.last:
            return saved, [torch.ones_like(y) for y in saved.outputs]
        return saved, self.inbox.pop((stage, "B", mb)).tensors

    def _pass_back(self, stage: int, mb: int, grads: Sequence[Any]) -> None:
        if stage:
            layouts = layouts_backward(self.saved[stage, mb].received.meta)
            self._pass_on(stage, "B", mb, bundle(grads), layouts)

    # ------------------------------------------------------------------------------------------------- running a stage

    def call(self, stage: int, mb: int, received: ActivationBundle, grad: bool, again: bool = False
             ) -> tuple[list[Any], tuple[Any, ...]]:
        """Run a stage from the random state that came with its input; its inputs as leaves, and its outputs. The last
        stage's output, in training, is the micro-batch's part of the loss.

        again   it will be run on the same once more: what it writes to its inputs goes to copies
        """
        assert received.random is not None           # a bundle that goes forward has it
        inputs = [t if t is None else t.detach().clone() if again else t.detach() for t in received.tensors]
        for leaf, part in zip(inputs, received.meta):
            if grad and part is not None and part.needs_grad:
                TensorBase.requires_grad_(leaf, True)
        arguments = inputs if not grad else [
            t if t is None else _SameMemory.apply(t) if t.requires_grad else t.detach() for t in inputs]
        torch.set_rng_state(received.random)
        dtype, enabled = self.autocast
        device_type = self.model.placements[stage].type
        with torch.set_grad_enabled(grad), torch.autocast(device_type, dtype, enabled, cache_enabled=False):
            names = self.names if stage == 0 else ()
            positional, named = arguments[:len(arguments) - len(names)], arguments[len(arguments) - len(names):]
            output = self.model.stages[stage](*positional, **dict(zip(names, named)))
            if stage == self.last and (self.train or self.targets[mb] is not None):
                return inputs, (self._loss(output, mb),)
        return inputs, _checked_outputs(output, stage)

    def _loss(self, output: Any, mb: int) -> Any:
        target = self.targets[mb]
        if self.model.loss is not None:              # it takes what the stage returns, whatever that is
            loss = self.model.loss(output) if target is None else self.model.loss(output, *target)
        else:                                        # what the stage returns: alone, or beside logits and the like
            outputs = _checked_outputs(output, self.last)
            numbers = [y for y in outputs if y is not None and y.numel() == 1]
            loss = numbers[0] if len(numbers) == 1 else outputs[0]
        if not isinstance(loss, GlobalTensor) or loss.numel() != 1:
            raise ShapeError(f"the loss of micro-batch {mb} is {_describe_output(loss)}",
                             "a step begins its backward passes with one number",
                             "loss=a function that returns a scalar")
        return loss if self.divisors[mb] == 1 else loss / self.divisors[mb]

    def _needs_grad(self, stage: int, meta: BundleMeta, inputs: Sequence[Any], outputs: Sequence[Any],
                    received: ActivationBundle) -> BundleMeta:
        """Which outputs need a gradient, without a graph: an input that is passed through does if it did; others that
        are not integers do if any input or parameter does."""
        of_input = {id(x): part.needs_grad for x, part in zip(inputs, received.meta)
                    if part is not None and not x._version}      # not written to: x is a copy, which begins at 0
        anything = (any(part.needs_grad for part in received.meta if part is not None)
                    or any(p.requires_grad for p in self.model.stages[stage].parameters()))
        return tuple(part and part._replace(needs_grad=of_input.get(id(y), anything and (y.is_floating_point()
                                                                                        or y.is_complex())))
                     for part, y in zip(meta, outputs))


class _SameMemory(torch.autograd.Function):
    """A leaf as a tensor that a stage may write to, as it may to what another layer made. Torch lets nobody write to a
    leaf that requires a gradient, nor to a view of it; what this makes is none for autograd."""

    @staticmethod
    def forward(ctx: Any, leaf: Any) -> Any:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


def layouts_forward(meta: BundleMeta, where: placement) -> Layouts:
    """The layouts of the tensors of such a bundle on the next stage."""
    return [part and forward_layout(part.layout, where) for part in meta]


def layouts_backward(meta: BundleMeta) -> Layouts:
    """The layouts in which gradients of tensors of such a bundle arrive."""
    return [part and backward_layout(part.layout) for part in meta]


def _checked_outputs(value: Any, stage: int) -> tuple[Any, ...]:
    """The outputs of a stage as a tuple of global tensors, with None where it has None."""
    values = value.values() if isinstance(value, dict) else value    # such as an output of transformers
    outputs = tuple(values) if isinstance(value, (tuple, list, dict)) else (value,)
    for output in outputs:
        if not isinstance(output, GlobalTensor) and (output is not None or len(outputs) == 1):
            raise ShapeError(f"stage {stage} returned {_describe_output(output)}",
                             "stages pass global tensors to each other",
                             "a stage that returns a tensor, or a tuple of tensors and None, computed from its inputs "
                             "and parameters")
    return outputs


def _describe_output(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a {'' if isinstance(value, GlobalTensor) else 'plain '}tensor of {list(value.shape)}"
