"""A run without memory added up, unit by unit: operations, boxings, bytes.

A node belongs to the unit whose module runs, one outside of all modules to the unit before it, a backward one to that
of its forward op. A layer that stands for others counts in their units, too.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from globaltensor.boxings.seen import most_received, plan_together
from globaltensor.boxings.watch import BoxingRecord, MovedTensor
from globaltensor.layouts.layout import Layout, Shape
from globaltensor.parallel.model_layers import layers_of
from globaltensor.pipelining.units import Unit
from globaltensor.planner.cost_tracer import CostTracer
from globaltensor.planner.graph import Ref
from globaltensor.planner.op_costs import OpCosts, TensorSize
from globaltensor.planner.op_kinds import kind_of
from globaltensor.planner.recomputing import is_kept
from globaltensor.planner.unit_memory import UnitMemory
from globaltensor.tensors.global_tensor import GlobalTensor


@dataclass
class PassCost:
    """Of a pass over a unit: operations and bytes of each op, on the busiest rank, and its kind; seconds and bytes that
    a rank receives in boxings, by axis."""

    operations: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    kinds: list[int] = field(default_factory=list)

    def add_op(self, func: Any, operations: float, nbytes: float) -> None:
        """One more op, which does so many operations on so many bytes."""
        self.kinds.append(kind_of(func))
        self.operations.append(operations)
        self.moved.append(nbytes)


@dataclass(frozen=True)
class ParameterCost:
    """A parameter, or a buffer without a gradient: how it lies, and its gradient, on the mesh. `gathers`: how often
    ZeRO 3 gathers its layer for a micro-batch."""

    name: str
    shape: Shape
    dtype: torch.dtype
    lies: Layout
    gradient: Layout | None
    gathers: int = 2

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class UnitCost:
    """Of a unit, for a micro-batch. `weights`: the part of backward that gives gradients of parameters alone. `passed`:
    bytes of what later units take, those of a rank, and whole. `again`: the part of forward that runs again where the
    unit recomputes selectively, and `selected`: bytes that it keeps then, besides what enters it. `kept`, `unsaved`,
    and the moments of its `first` backward and of `later` ones: see unit_memory.py. `buffers`: bytes."""

    forward: PassCost = field(default_factory=PassCost)
    inputs: PassCost = field(default_factory=PassCost)
    weights: PassCost = field(default_factory=PassCost)
    kept: int = 0
    unsaved: int = 0
    passed: int = 0
    passed_whole: int = 0
    operations: float = 0.0
    parameters: list[ParameterCost] = field(default_factory=list)
    again: PassCost = field(default_factory=PassCost)
    selected: int = 0
    first: list[int] = field(default_factory=list)
    later: list[int] = field(default_factory=list)
    buffers: int = 0


class RunCosts(NamedTuple):
    """Of each unit; and ops that are planned on whole operands, as nothing tells how they run split, with a line."""

    units: list[UnitCost]
    whole: dict[str, str]


class UnitSums:
    """Adds up nodes and boxings, unit by unit."""

    def __init__(self, tracer: CostTracer, model: nn.Module, units: Sequence[Unit], passed: dict[str, list[str]],
                 costs: OpCosts) -> None:
        self.tracer, self.graph, self.costs, self.passed = tracer, tracer.graph, costs, passed
        self.units = [UnitCost() for _ in units]
        self.parts = {part: k for k, unit in enumerate(units) for part in unit.parts}
        self.names = costs.where.names
        self.at: list[list[int]] = self._units_of_nodes()
        self.weight_nodes = self._of_weights_alone()
        for node, attributes in self.graph.nodes.items():
            if attributes["kind"] == "op":
                self._add_op(node, attributes)
        for move, node, _ in tracer.moved:
            self._add_move(move, min(node, len(self.at) - 1))
        self._add_memory()
        self._add_parameters(model)

    def unit_of(self, name: str) -> int | None:
        """The unit that a module or parameter of this name is in."""
        while name:
            if name in self.parts:
                return self.parts[name]
            name = name.rpartition(".")[0]
        return self.parts.get("")

    def _units_of_nodes(self) -> list[list[int]]:
        """For each node its unit, and those of the layers that it stands for."""
        at: list[list[int]] = []
        last = 0
        for a in self.graph.nodes.values():
            known = self.unit_of(a["module"])
            if known is None and a["origin"] is not None:
                last = at[a["origin"]][0]
            elif known is not None:
                last = known
            standing = [self.unit_of(name) for first, names in self.passed.items()
                        if f"{a['module']}.".startswith(f"{first}.") for name in names]
            at.append([last, *[k for k in standing if k is not None]])
        return at

    def _of_weights_alone(self) -> set[int]:
        """Backward nodes that give gradients of parameters: a pass of its own in some schedules."""
        wanted = {ref.node for ref in self.graph.graph["gradients"].values()}
        alone: set[int] = set()
        for node in reversed(list(self.graph)):
            a = self.graph.nodes[node]
            if a["kind"] == "op" and a["phase"] == "backward":
                takers = list(self.graph.succ[node])
                if node in wanted or takers and a["op"].is_view and all(t in alone for t in takers):
                    alone.add(node)
        return alone

    def _pass(self, unit: int, node: int) -> PassCost:
        of = self.units[unit]
        if self.graph.nodes[node]["phase"] == "forward":
            return of.forward
        return of.weights if node in self.weight_nodes else of.inputs

    def _taken(self, node: int) -> list[tuple[TensorSize, Layout | None]]:
        refs = sorted((operand, source, output) for source in self.graph.pred[node]
                      for output, operand in self.graph.edges[source, node]["uses"])
        return [(TensorSize(self.graph.nodes[s]["shapes"][o], self.graph.nodes[s]["dtypes"][o]),
                 self.tracer.layouts[s][o]) for _, s, o in refs]

    def _add_op(self, node: int, a: dict[str, Any]) -> None:
        if self.costs.is_free(a["op"]):
            for unit in self.at[node]:
                self._pass(unit, node).add_op(a["op"], 0.0, 0.0)
            return
        taken = self._taken(node)
        own = self.tracer.layouts[node]
        moved = self._moved(node) if self._has_moves(node) else {}
        layouts = [moved.get((lies, size.shape), lies) for size, lies in taken if lies is not None] + [
            lies for lies in own if lies is not None]
        ways = 1
        for axis, size in enumerate(self.costs.where.shape):
            if any(lies.sbp[axis].is_split for lies in layouts):
                ways *= size
        parts = [self._local(size.shape, None if lies is None else moved.get((lies, size.shape), lies))
                 * size.dtype.itemsize for size, lies in taken]
        parts += [self._local(s, lies) * d.itemsize for s, d, lies in zip(a["shapes"], a["dtypes"], own)
                  if s is not None]
        operations = self.costs.operations(a, [size for size, _ in taken])
        for unit in self.at[node]:
            self._pass(unit, node).add_op(a["op"], operations / ways, float(sum(parts)))
            if a["phase"] == "forward" and is_kept(a["op"], self.graph.pred[node], self._is_of_parameter):
                self.units[unit].selected += sum(parts[len(taken):])
            elif a["phase"] == "forward":
                self.units[unit].again.add_op(a["op"], operations / ways, float(sum(parts)))
            self.units[unit].operations += operations

    def _is_of_parameter(self, node: int) -> bool:
        """From nothing else, by ops of one operand each."""
        while self.graph.nodes[node]["kind"] == "op" and self.graph.in_degree(node) == 1:
            node, = self.graph.pred[node]
        return bool(self.graph.nodes[node]["kind"] == "parameter")

    def _moved(self, node: int) -> dict[tuple[Layout, Shape], Layout]:
        """Where operands of a node were brought to, by their layouts and shapes."""
        return {(one.spec.layout, one.spec.shape): one.dst for move, at, of_operands in self.tracer.moved
                if at == node and of_operands for one in move.moved if isinstance(one.dst, Layout)}

    def _has_moves(self, node: int) -> bool:
        if not hasattr(self, "_with_moves"):
            self._with_moves = {at for _, at, of_operands in self.tracer.moved if of_operands}
        return node in self._with_moves

    def _local(self, shape: Shape, lies: Layout | None) -> int:
        if lies is None:
            return int(torch.Size(shape).numel())
        return self.costs.part(lies, shape, 1)

    def _add_move(self, move: BoxingRecord, node: int) -> None:
        if not move.bytes:
            return
        received = move.bytes if not move.moved else most_received(
            move.moved, plan_together(move.moved, self.costs.transport_rates))
        alone = _moved_tensor(move)
        if alone is not None:
            seconds = self.costs.boxing(move.src, alone.dst, alone.spec.shape, alone.spec.nbytes)
        else:
            link = self.costs.link()
            seconds = link.latency + received / link.bandwidth
        axes = [name for name, a, b in zip(self.names, move.src.sbp, move.dst.sbp) if a != b] or [self.names[-1]]
        for unit in self.at[node]:
            of = self._pass(unit, node)
            of.seconds[axes[-1]] = of.seconds.get(axes[-1], 0.0) + seconds
            of.bytes[axes[-1]] = of.bytes.get(axes[-1], 0) + received
            if of is self.units[unit].forward:
                self.units[unit].selected += received if alone is None else (
                    self.costs.part(alone.dst, alone.spec.shape, alone.spec.dtype.itemsize))

    # ------------------------------------------------------------------------------------------------------ memory

    def _add_memory(self) -> None:
        of_gradients = {name: self.unit_of(name) or 0 for name in self.graph.graph["gradients"]}
        self.memory = UnitMemory(self.tracer, self.costs, self.at, len(self.units), of_gradients)
        for unit, of in enumerate(self.units):
            of.kept, of.unsaved = self.memory.kept[unit], self.memory.unsaved[unit]
            of.first, of.later = self.memory.first[unit], self.memory.later[unit]
        self._add_passed()

    def _add_passed(self) -> None:
        """What later units take in forward."""
        for source, target, uses in self.graph.edges(data="uses"):
            a, b = self.graph.nodes[source], self.graph.nodes[target]
            if a["kind"] != "op" or a["phase"] != "forward" or b["phase"] != "forward":
                continue
            if self.at[source][0] < self.at[target][0]:
                for output in {output for output, _ in uses}:
                    whole = TensorSize(a["shapes"][output], a["dtypes"][output]).nbytes
                    for unit in range(self.at[source][0], self.at[target][0]):
                        self.units[unit].passed = max(self.units[unit].passed, self.memory.size(Ref(source, output)))
                        self.units[unit].passed_whole = max(self.units[unit].passed_whole, whole)

    def _add_parameters(self, model: nn.Module) -> None:
        gradients = {name: self.tracer.layouts[ref.node][ref.output]
                     for name, ref in self.graph.graph["gradients"].items()}
        instead = {name: first for first, names in self.passed.items() for name in names}
        gathers = {layer: self._gathers(layer, instead.get(layer, layer)) for layer, _ in layers_of(model)}
        for name, t in model.named_parameters():
            layer = next((layer for layer in gathers if name.startswith(f"{layer}.")), "")
            of = next((f"{first}{name[len(own):]}" for own, first in instead.items()
                       if name.startswith(f"{own}.")), name)
            unit, value = self.unit_of(name), t
            assert isinstance(value, GlobalTensor)   # parallelize made it so
            self.units[unit or 0].parameters.append(ParameterCost(
                name, tuple(t.shape), t.dtype, value.spec.layout, gradients.get(of), gathers.get(layer, 2)))
        for name, b in model.named_buffers():
            if isinstance(b, GlobalTensor):
                self.units[self.unit_of(name) or 0].buffers += self.costs.part(b.spec.layout, b.shape, b.itemsize)

    def _gathers(self, layer: str, like: str) -> int:
        """At each of its calls in forward, and once for backward if that goes through the one that is like it."""
        return self.tracer.calls[layer] + any(f"{a['module']}.".startswith(f"{like}.")
                                              for a in self.graph.nodes.values() if a["phase"] == "backward")


def _moved_tensor(move: BoxingRecord) -> MovedTensor | None:
    """The tensor of a boxing that moves one, from one layout to another."""
    return move.moved[0] if len(move.moved) == 1 and all(
        isinstance(end, Layout) for end in (move.moved[0].spec.layout, move.moved[0].dst)) else None
