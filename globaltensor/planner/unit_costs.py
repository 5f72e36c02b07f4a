"""What a step takes under a plan, unit by unit: told by running it without memory, as the library decides by itself.

    costs = run_costs(model, units, inputs, loss, mesh, plan, cluster)

The model is copied to the meta device, made global there as the plan says, and run forward and backward once for a
micro-batch. Every op and every boxing belongs to the unit in which it happens:

    operations and bytes    of each op, for what a rank does
    seconds of a boxing     by the library's plan, on the cluster's links
    kept                    bytes that forward leaves for backward
    temporary               what backward needs beside these, at its peak

Of a list of more than `REAL` equal layers the first two and the last run; what enters another leaves it as it came, so
layouts stay what they are, and it costs what the second one does.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from globaltensor.boxings.watch import BoxingRecord, record
from globaltensor.errors import raised_at, where
from globaltensor.layouts.layout import Layout, Shape, layout, replicated
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import split
from globaltensor.parallel.plan import Plan, parallelize
from globaltensor.pipelining.layer_lists import without_cache
from globaltensor.pipelining.units import Unit
from globaltensor.planner.capture import loss_within, read_inputs
from globaltensor.planner.device_kernels_of import kernels_of
from globaltensor.planner.graph import CaptureError, Ref
from globaltensor.planner.op_costs import OpCosts, TensorSize
from globaltensor.planner.repeats import structure_of
from globaltensor.planner.tracer import Tracer, as_tree
from globaltensor.rules.call import Call
from globaltensor.runtime.torch_internals import (
    OpOverload,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    without_modes,
)
from globaltensor.simulator.cluster import Cluster, hypothetical_placements
from globaltensor.tensors.factories import empty
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.gradients import raw_grad

REAL = 3
_NO_VALUES = "Cannot copy out of meta tensor"        # torch's words


@dataclass
class PassCost:
    """Of a pass over a unit: operations and bytes of each op, on the busiest rank; seconds and bytes that a rank
    receives in boxings, by axis."""

    operations: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ParameterCost:
    """A parameter, or a buffer without a gradient: how it lies, and its gradient, on the mesh."""

    name: str
    shape: Shape
    dtype: torch.dtype
    lies: Layout
    gradient: Layout | None


@dataclass
class UnitCost:
    """Of a unit, for a micro-batch. `weights`: the part of backward that gives gradients of parameters alone. `passed`:
    bytes of what later units take, those of a rank, and whole."""

    forward: PassCost = field(default_factory=PassCost)
    inputs: PassCost = field(default_factory=PassCost)
    weights: PassCost = field(default_factory=PassCost)
    kept: int = 0
    temporary: int = 0
    passed: int = 0
    passed_whole: int = 0
    operations: float = 0.0
    parameters: list[ParameterCost] = field(default_factory=list)


class RunCosts(NamedTuple):
    """Of each unit; and ops that are planned on whole operands, as nothing tells how they run split, with a line."""

    units: list[UnitCost]
    whole: dict[str, str]


def run_costs(model: nn.Module, units: Sequence[Unit], inputs: Any, loss: Callable[..., Any] | None, mesh: placement,
              plan: Mapping[str, Any], cluster: Cluster, targets: Any = None) -> RunCosts:
    """The costs of each unit for a micro-batch of these inputs, whole, on a mesh with the axes dp and tp.

    Raises CaptureError with the line where the step cannot go on without values.
    """
    with hypothetical_placements(), torch.enable_grad(), kernels_of("cpu"):
        on = placement("meta", mesh.ranks, mesh.axis_names)
        stand_ins: dict[int, Any] = {id(p): nn.Parameter(_on_meta(p), p.requires_grad) for p in model.parameters()}
        stand_ins |= {id(b): _on_meta(b) for b in model.buffers()}
        copied = copy.deepcopy(model, stand_ins)
        groups = _equal_layers(copied)
        parallelize(copied, on, plan)
        tracer = _CostTracer(replicated(on))
        for name, t in (*copied.named_parameters(), *copied.named_buffers()):
            tracer.name_value(t, Ref(tracer.add_node("parameter", [t], name=name), 0))
        rows = layout(on, tuple(split(0) if name == "dp" else s for name, s in zip(on.axis_names, replicated(on).sbp)))
        args, named = tree_map_only(torch.Tensor, lambda t: tracer.input(t, rows), read_inputs(inputs))
        if targets is not None and loss is not None:
            loss = partial(_with_targets, loss, tree_map_only(torch.Tensor, lambda t: tracer.input(t, rows), targets))
        named = without_cache(model) | named
        try:
            passed = _run(copied, tracer, groups, args, named, loss)
        except CaptureError:
            raise
        except Exception as error:                   # anything may be raised by a forward that finds no values
            message = (str(error).splitlines() or [""])[0]
            raise CaptureError(f"the step of a {type(model).__name__} cannot be captured",
                               f"{type(error).__name__}: {message}",
                               "a forward that does not look at the values of tensors (`.item()`, `if x.any():`)",
                               raised_at(error)) from error
        return RunCosts(_Sums(tracer, copied, units, passed, OpCosts(cluster, on)).units, tracer.whole)


def _run(copied: nn.Module, tracer: _CostTracer, groups: list[list[str]], args: Any, named: Any,
         loss: Callable[[Any], torch.Tensor] | None) -> dict[str, list[str]]:
    with ExitStack() as stack:
        tracer.moves = stack.enter_context(record())
        stack.enter_context(tracer.following_modules(copied))
        passed = stack.enter_context(_passing(copied, groups))
        stack.enter_context(tracer)
        result = copied(*args, **named)
        tracer.graph.graph["outputs"] = [tracer.ref(t) for t in tree_leaves(as_tree(result))
                                         if isinstance(t, GlobalTensor)]
        tracer.run_backward(loss_within(result) if loss is None else loss(result), result)
        tracer.note_moves(None)
    leaves = dict(copied.named_parameters())
    tracer.graph.graph["gradients"] = {name: tracer.ref(grad) for name, p in leaves.items()
                                       if (grad := raw_grad(p)) is not None}
    return passed


def _with_targets(loss: Callable[..., Any], targets: Any, output: Any) -> Any:
    return loss(output, *targets) if isinstance(targets, tuple) else loss(output, targets)


def _on_meta(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


# ------------------------------------------------------------------------------------------------------- looking on


class _CostTracer(Tracer):
    """Notes for each node in which layouts its operands lie, and for each boxing between which nodes it happens."""

    def __init__(self, where: Layout) -> None:
        super().__init__(where)
        self.moves: list[BoxingRecord] = []
        self.layouts: dict[int, list[Layout | None]] = {}                # of a node: of its outputs
        self.moved: list[tuple[BoxingRecord, int, list[tuple[Layout, Shape, torch.dtype]]]] = []
        self.whole: dict[str, str] = {}              # ops that are planned on whole operands, with a line
        self._noted = 0
        self._operands: list[tuple[Layout, Shape, torch.dtype]] = []

    def input(self, t: torch.Tensor, rows: Layout) -> Any:
        """A stand-in of an input, whose rows dp splits."""
        own = rows if t.dim() else replicated(rows.placement)
        value: Any = empty(t.shape, placement=own.placement, sbp=own.sbp, dtype=t.dtype)
        self.name_value(value, Ref(self.add_node("input", [value], name=f"input{len(self._inputs)}"), 0))
        self._inputs[f"input{len(self._inputs)}"] = value
        return value.requires_grad_(t.requires_grad)

    def add_node(self, kind: str, outputs: list[Any], **more: Any) -> int:
        node = super().add_node(kind, outputs, **more)
        self.layouts[node] = [t.spec.layout if isinstance(t, GlobalTensor) else None for t in outputs]
        if kind == "op":
            self.note_moves(node)
        return node

    def before_op(self, call: Call) -> None:
        self.note_moves(None)
        self._operands = [(t.spec.layout, tuple(t.shape), t.dtype) for t in call.tensors
                          if isinstance(t, GlobalTensor)]

    def call_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op whose values decide what moves is planned on whole operands, and named."""
        try:
            return super().call_op(func, args, kwargs)
        except NotImplementedError as error:
            if _NO_VALUES not in str(error):
                raise
        self.whole.setdefault(str(func), where())
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, GlobalTensor) and (dst := replicated(t.placement)) is not t.spec.layout:
                received = t.spec.nbytes - max(part.nbytes for part in t.shards.values())
                self.moves.append(BoxingRecord(str(func), where(), t.spec.layout, dst, received, 0.0))
        return self.shapes_alone(func, args, kwargs)

    def note_moves(self, node: int | None) -> None:
        """Boxings since the last time belong to this node, or to the next one."""
        for move in self.moves[self._noted:]:
            self.moved.append((move, len(self.graph) if node is None else node, [] if node is None else self._operands))
        self._noted = len(self.moves)

    def like(self, t: torch.Tensor) -> GlobalTensor:
        if not isinstance(t, GlobalTensor):
            return super().like(t)
        with without_modes():
            return empty(t.shape, placement=t.placement, sbp=t.spec.layout.dual.without_partials.sbp, dtype=t.dtype)


# ------------------------------------------------------------------------------------------------------ equal layers


def _equal_layers(model: nn.Module) -> list[list[str]]:
    """Names of equal neighbours in a list, where there are many."""
    groups: list[list[str]] = []
    for path, several in model.named_modules():
        if not isinstance(several, (nn.ModuleList, nn.Sequential)):
            continue
        run: list[str] = []
        last: Any = None
        for name, member in several.named_children():
            own = structure_of(member)
            if own != last:
                groups += [run] if len(run) > REAL else []
                run, last = [], own
            run.append(f"{path}.{name}".lstrip("."))
        groups += [run] if len(run) > REAL else []
    return [group for group in groups if not any(
        group[0].startswith(f"{other}.") for outer in groups if outer is not group for other in outer)]


@contextmanager
def _passing(model: nn.Module, groups: list[list[str]]) -> Iterator[dict[str, list[str]]]:
    """Inside, of equal layers but the first two and the last do not run: what enters leaves as it came. Gives the
    names of those that did not, by the one that stands for them."""
    passed: dict[str, list[str]] = {}
    changed: list[nn.Module] = []
    modules = dict(model.named_modules())
    try:
        for group in groups:
            known: list[Any] = []
            second = modules[group[1]]
            vars(second)["forward"] = _noting(second.forward, known)
            changed.append(second)
            for name in group[2:-1]:
                member = modules[name]
                vars(member)["forward"] = _pass_on(member.forward, known, name, passed.setdefault(group[1], []))
                changed.append(member)
        yield passed
    finally:
        for member in changed:
            del vars(member)["forward"]


def _noting(forward: Callable[..., Any], known: list[Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        known[:] = [tree_flatten(result)]
        return result

    return call


def _pass_on(forward: Callable[..., Any], known: list[Any], name: str, passed: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        x = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)), None)
        leaves, tree = known[0]
        alike = [t for t in leaves if isinstance(t, torch.Tensor)]
        if x is None or len(alike) != 1 or alike[0].shape != x.shape or alike[0].dtype != x.dtype:
            return forward(*args, **kwargs)
        passed.append(name)
        return tree_unflatten([x if isinstance(t, torch.Tensor) else t for t in leaves], tree)

    return call


# ------------------------------------------------------------------------------------------------------- adding up


class _Sums:
    """Adds up nodes and boxings, unit by unit."""

    def __init__(self, tracer: _CostTracer, model: nn.Module, units: Sequence[Unit], passed: dict[str, list[str]],
                 costs: OpCosts) -> None:
        self.tracer, self.graph, self.costs, self.passed = tracer, tracer.graph, costs, passed
        self.units = [UnitCost() for _ in units]
        self.parts = {part: k for k, unit in enumerate(units) for part in unit.parts}
        self.names = costs.where.axis_names
        self.at: list[list[int]] = self._units_of_nodes()
        self.weight_nodes = self._of_weights_alone()
        for node, attributes in self.graph.nodes.items():
            if attributes["kind"] == "op":
                self._add_op(node, attributes)
        for move, node, operands in tracer.moved:
            self._add_move(move, min(node, len(self.at) - 1), operands)
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
        for _, a in self.graph.nodes.items():
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
        taken = self._taken(node)
        own = self.tracer.layouts[node]
        moved = {move.src: move.dst for move, at, operands in self.tracer.moved
                 if at == node and operands and isinstance(move.dst, Layout)} if self._has_moves(node) else {}
        layouts = [moved.get(lies, lies) for _, lies in taken if lies is not None] + [
            lies for lies in own if lies is not None]
        ways = 1
        for axis, size in enumerate(self.costs.where.shape):
            if any(lies.sbp[axis].is_split for lies in layouts):
                ways *= size
        parts = [self._local(size.shape, moved.get(lies, lies) if lies is not None else None) * size.dtype.itemsize
                 for size, lies in taken]
        parts += [self._local(s, lies) * d.itemsize for s, d, lies in zip(a["shapes"], a["dtypes"], own)
                  if s is not None]
        if self.costs.is_free(a["op"]):
            return
        operations = self.costs.operations(a, [size for size, _ in taken])
        for unit in self.at[node]:
            of = self._pass(unit, node)
            of.operations.append(operations / ways)
            of.moved.append(float(sum(parts)))
            self.units[unit].operations += operations

    def _has_moves(self, node: int) -> bool:
        if not hasattr(self, "_with_moves"):
            self._with_moves = {at for _, at, operands in self.tracer.moved if operands}
        return node in self._with_moves

    def _local(self, shape: Shape, lies: Layout | None) -> int:
        if lies is None:
            return int(torch.Size(shape).numel())
        return self.costs.part(lies, shape, 1)

    def _add_move(self, move: BoxingRecord, node: int, operands: list[tuple[Layout, Shape, torch.dtype]]) -> None:
        if not move.bytes:
            return
        same = next(((shape, dtype) for lies, shape, dtype in operands if lies == move.src), None)
        if same is not None and move.tensors == 1 and isinstance(move.dst, Layout):
            shape, dtype = same
            seconds = self.costs.boxing(move.src, move.dst, shape, TensorSize(shape, dtype).nbytes)
        else:
            link = self.costs.link()
            seconds = link.latency + move.bytes / link.bandwidth
        axes = [name for name, a, b in zip(self.names, move.src.sbp, move.dst.sbp) if a != b] or [self.names[-1]]
        for unit in self.at[node]:
            of = self._pass(unit, node)
            of.seconds[axes[-1]] = of.seconds.get(axes[-1], 0.0) + seconds
            of.bytes[axes[-1]] = of.bytes.get(axes[-1], 0) + move.bytes

    # ------------------------------------------------------------------------------------------------------ memory

    def _base(self, ref: Ref) -> Ref:
        """The tensor whose memory it is."""
        while self.graph.nodes[ref.node]["kind"] == "op":
            op = self.graph.nodes[ref.node]["op"]
            if not (op.is_view or op._schema.is_mutable):
                break
            refs = sorted((operand, Ref(s, o)) for s in self.graph.pred[ref.node]
                          for o, operand in self.graph.edges[s, ref.node]["uses"])
            if not refs:
                break
            ref = refs[0][1]
        return ref

    def _size(self, ref: Ref) -> int:
        a = self.graph.nodes[ref.node]
        lies = self.tracer.layouts[ref.node][ref.output]
        if a["kind"] not in ("op", "constant") or a["shapes"][ref.output] is None or lies is None:
            return 0                                 # parameters and inputs are counted by themselves
        return self._local(a["shapes"][ref.output], lies) * a["dtypes"][ref.output].itemsize

    def _add_memory(self) -> None:
        last: dict[Ref, int] = {}
        first_use: dict[Ref, int] = {}
        for node in self.graph:
            for source in self.graph.pred[node]:
                for output, _ in self.graph.edges[source, node]["uses"]:
                    base = self._base(Ref(source, output))
                    last[base], first_use[base] = node, first_use.get(base, node)
        grads = {self._base(ref) for ref in self.graph.graph["gradients"].values()}
        outputs = {self._base(ref) for ref in self.graph.graph["outputs"]}
        dies: dict[int, list[Ref]] = {}
        for base, node in last.items():
            dies.setdefault(node, []).append(base)
            a, taker = self.graph.nodes[base.node], self.graph.nodes[node]
            if a["phase"] == "forward" and taker["phase"] == "backward" and base not in outputs:
                for unit in self.at[base.node]:
                    self.units[unit].kept += self._size(base)
        self._add_passed(last)
        live = peak = 0
        current: int | None = None
        for node, a in self.graph.nodes.items():
            if a["phase"] == "forward":
                continue
            if self.at[node][0] != current:
                current, live, peak = self.at[node][0], 0, 0
            live += sum(self._size(Ref(node, k)) for k in range(len(a["shapes"]))
                        if Ref(node, k) == self._base(Ref(node, k)) and Ref(node, k) not in grads)
            peak = max(peak, live)
            for unit in self.at[node]:
                self.units[unit].temporary = max(self.units[unit].temporary, peak)
            live -= sum(self._size(ref) for ref in dies.get(node, []) if ref not in grads)

    def _add_passed(self, last: dict[Ref, int]) -> None:
        """What later units take in forward."""
        for source, target, uses in self.graph.edges(data="uses"):
            a, b = self.graph.nodes[source], self.graph.nodes[target]
            if a["kind"] != "op" or a["phase"] != "forward" or b["phase"] != "forward":
                continue
            if self.at[source][0] < self.at[target][0]:
                for output in {output for output, _ in uses}:
                    whole = TensorSize(a["shapes"][output], a["dtypes"][output]).nbytes
                    for unit in range(self.at[source][0], self.at[target][0]):
                        self.units[unit].passed = max(self.units[unit].passed, self._size(Ref(source, output)))
                        self.units[unit].passed_whole = max(self.units[unit].passed_whole, whole)

    def _add_parameters(self, model: nn.Module) -> None:
        gradients = {name: self.tracer.layouts[ref.node][ref.output]
                     for name, ref in self.graph.graph["gradients"].items()}
        instead = {name: first for first, names in self.passed.items() for name in names}
        for name, t in model.named_parameters():
            of = next((f"{first}{name[len(own):]}" for own, first in instead.items()
                       if name.startswith(f"{own}.")), name)
            unit, value = self.unit_of(name), t
            assert isinstance(value, GlobalTensor)   # parallelize made it so
            self.units[unit or 0].parameters.append(ParameterCost(name, tuple(t.shape), t.dtype, value.spec.layout,
                                                                  gradients.get(of)))
