"""From a captured graph to what is to be chosen, and from the choice to rows of a plan.

A parameter is two variables. One is how it is stored: B on every axis, or split. The other is how its gradient is
reduced, which is where the optimizer works: the new value goes from there to where the parameter is stored. With both
broadcast that is data parallelism, with the second one split ZeRO 1 and 2, with both split ZeRO 3.

A block that repeats has one set of variables. What enters a later member of the list enters the first one's ops, and
what leaves it leaves theirs.
"""
from __future__ import annotations

import dataclasses
from collections import defaultdict
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from globaltensor.dispatch.choose import Contest
from globaltensor.layouts.layout import Layout, spec
from globaltensor.layouts.placement import placement
from globaltensor.op_table.variants import line_of
from globaltensor.parallel.plan import Plan
from globaltensor.planner.graph import Block, Ref
from globaltensor.planner.op_costs import OpCosts, Option, TensorSize, call_of
from globaltensor.planner.within_stage import Choices, Solution, Use, solve
from globaltensor.rules.language import expected_rule
from globaltensor.simulator.cluster import Cluster, hypothetical_placements

if TYPE_CHECKING:
    import networkx

ADAM = 8                                             # bytes per element: two moments in float32

Taker = tuple[int, int]                              # a variable and an operand of it


class OpPlan(NamedTuple):
    """An op under the plan: its layouts, its seconds, what each rank receives at most before it, and how often it runs.
    `dispatch` is what dispatch would decide by itself for operands that lie as the plan leaves them, where that is
    something else: the layouts it wants."""

    node: int
    op: str
    module: str
    phase: str
    line: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]
    seconds: float
    nbytes: int
    times: int
    dispatch: tuple[Layout, ...] | None


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """How a stage runs: `plan` for gt.parallelize; layouts of the inputs, by name; layouts in which gradients are
    reduced and the optimizer works, by parameter; each op. Seconds of a step, by the costs that were given; no choice
    takes less than `lower_bound`. `memory`: bytes of a rank."""

    plan: Plan
    inputs: dict[str, Layout]
    optimizer: dict[str, Layout]
    ops: list[OpPlan]
    seconds: float
    lower_bound: float
    memory: float


def plan_stage(graph: networkx.DiGraph, on: Cluster, where: placement, memory: float = inf, zero: bool = True,
               optimizer_bytes: int = ADAM, time_limit: float = 60.0, whole_inputs: bool = False) -> StagePlan:
    """The layouts under which the step of a captured graph costs least.

    where             the ranks, with axis names; they need not exist
    memory            bytes of a rank, for parameters, gradients, optimizer and what forward keeps for backward
    zero              may the optimizer work on parts of what is stored whole? (`gt.zero` does that)
    optimizer_bytes   per element of a parameter
    whole_inputs      inputs lie broadcast: another axis splits the batch
    Raises PlanningError where nothing fits.
    """
    with hypothetical_placements():
        stage = StageChoices(graph, OpCosts(on, where), zero, optimizer_bytes, whole_inputs)
        return stage.plan_of(solve(stage.choices, memory, time_limit))


class StageChoices:
    """The choices of a captured graph. `variable` says which variable a node is."""

    def __init__(self, graph: networkx.DiGraph, costs: OpCosts, zero: bool = True, optimizer_bytes: int = ADAM,
                 whole_inputs: bool = False) -> None:
        self.whole_inputs = whole_inputs
        self.graph, self.costs, self.zero, self.optimizer_bytes = graph, costs, zero, optimizer_bytes
        self.choices = Choices(costs)
        self.variable: dict[int, int] = {}
        self.reduced: dict[str, int] = {}            # of a parameter: the variable of its gradient
        self._block: dict[int, int | None] = {}      # of a variable
        self._takers: dict[Ref, list[Taker]] = defaultdict(list)
        for node in graph:
            self._add_node(node)
        for name, ref in graph.graph["gradients"].items():
            self._add_gradient(name, self._canonical(ref))
        self._add_uses()
        self._weigh_activations()

    # ---------------------------------------------------------------------------------------------------- variables

    @cached_property
    def _blocks(self) -> dict[int, Block]:
        return self.graph.graph["blocks"]

    def _times(self, block: int | None) -> int:
        return 1 if block is None else 1 + len(self._blocks[block].repeats)

    def _takes(self, node: int) -> list[Ref]:
        """The operands of a node, in order."""
        uses = [(operand, Ref(source, output)) for source in self.graph.pred[node]
                for output, operand in self.graph.edges[source, node]["uses"]]
        return [ref for _, ref in sorted(uses)]

    def operand(self, ref: Ref) -> TensorSize:
        """What is known of a value."""
        attributes = self.graph.nodes[ref.node]
        return TensorSize(attributes["shapes"][ref.output], attributes["dtypes"][ref.output])

    def _home(self, node: int) -> int | None:
        """The block that a node belongs to: its own, or that of a parameter's only ops."""
        attributes = self.graph.nodes[node]
        if attributes["kind"] not in ("parameter", "buffer"):
            return attributes["block"]
        homes = {self.graph.nodes[n]["block"] for n in self.graph.succ[node] if self.graph.nodes[n]["kind"] != "repeat"}
        return homes.pop() if len(homes) == 1 else None

    def _twin(self, node: int) -> int:
        """The leaf of the first block that this one of a later block stands for; itself where there is none."""
        takers = list(self.graph.succ[node])
        if self.graph.nodes[node]["kind"] in ("op", "seed", "input", "constant") or len(takers) != 1:
            return node
        repeat = self.graph.nodes[takers[0]]
        if repeat["kind"] != "repeat":
            return node
        (_, operand), = self.graph.edges[node, takers[0]]["uses"]
        return self._blocks[repeat["args"]["block"]].inputs[operand].node

    def _add_node(self, node: int) -> None:
        attributes = self.graph.nodes[node]
        kind = attributes["kind"]
        if kind == "repeat" or self._twin(node) != node:
            return
        block = self._home(node)
        if kind == "op":
            takes = self._takes(node)
            options = self.costs.options(attributes, [self.operand(ref) for ref in takes])
        elif kind == "output":                       # whoever takes it: whole or split, but no pending sum
            takes = self._takes(node)
            options = [Option((one,), ()) for one in self.costs.storages(self.operand(takes[0]).shape)]
        else:
            takes = []
            cut = (kind == "parameter" or kind == "input" and not self.whole_inputs
                   or kind == "seed" and bool(attributes["shapes"][0]))
            lies = self.costs.storages(attributes["shapes"][0], cut)
            options = [Option((one,) if kind == "parameter" else (), (one,)) for one in lies]
        self.variable[node] = variable = self.choices.add(node, options, self._times(block))
        self._block[variable] = block
        for operand, ref in enumerate(takes):
            if self.graph.nodes[ref.node]["kind"] != "repeat":
                self._takers[ref].append((variable, operand))
        if kind == "parameter":
            value = self.operand(Ref(node, 0))
            self.choices.memory[variable] = [self._times(block) * self.costs.part(
                one, value.shape, value.dtype.itemsize) for one in lies]

    def _add_gradient(self, name: str, ref: Ref) -> None:
        leaf = next(n for n, a in self.graph.nodes.items() if a["name"] == name)
        if leaf not in self.variable or self.graph.nodes[leaf]["kind"] != "parameter":
            return
        value, block = self.operand(ref), self._home(leaf)
        lies = self.costs.storages(value.shape)
        self.reduced[name] = variable = self.choices.add(name, [Option((one,), (one,)) for one in lies],
                                                         self._times(block))
        self._block[variable] = block
        self._takers[ref].append((variable, 0))
        self.choices.memory[variable] = [self._times(block) * self.costs.part(
            one, value.shape, value.dtype.itemsize + self.optimizer_bytes) for one in lies]
        stored = [(self.variable[leaf], 0)]          # the new value goes to where the parameter lies
        self.choices.uses.append(Use(variable, 0, tuple(stored), value, self._times(block), not self.zero))

    # --------------------------------------------------------------------------------------------------------- uses

    def _canonical(self, ref: Ref) -> Ref:
        """A value of a later block as that of the first."""
        attributes = self.graph.nodes[ref.node]
        if attributes["kind"] != "repeat":
            return ref
        block = self._blocks[attributes["args"]["block"]]
        same = block.outputs if attributes["phase"] == "forward" else block.input_grads
        value = same[ref.output]
        assert value is not None                     # somebody takes it
        return value

    def _within(self, ref: Ref, block: int | None) -> set[Taker]:
        """Who takes a value inside a block."""
        return {taker for taker in self._takers[ref] if block is not None and self._block[taker[0]] == block}

    def _outside(self, ref: Ref, block: int | None) -> set[Taker]:
        """Who takes a value outside of the block in which it is made, later blocks included."""
        takers = {taker for taker in self._takers[ref] if block is None or self._block[taker[0]] != block}
        for target in self.graph.succ[ref.node]:
            attributes = self.graph.nodes[target]
            uses = [operand for output, operand in self.graph.edges[ref.node, target]["uses"] if output == ref.output]
            if attributes["kind"] == "repeat":
                number = attributes["args"]["block"]
                block_of = self._blocks[number]
                enters = block_of.inputs if attributes["phase"] == "forward" else [
                    one for one in block_of.output_grads if one is not None]
                for operand in uses:
                    takers |= self._within(enters[operand], number)
            elif self._canonical(ref) != ref:        # a value of a later block, whose takers are not noted
                takers |= {(self.variable[target], operand) for operand in uses}
        return takers

    def _add_uses(self) -> None:
        many: dict[tuple[Ref, frozenset[Taker]], int] = defaultdict(int)
        for node in self.variable:
            block = self._home(node)
            repeats = self._blocks[block].repeats if block is not None else []
            for k, shape in enumerate(self.graph.nodes[node]["shapes"]):
                ref = Ref(node, k)
                if shape is None:
                    continue
                inside = self._within(ref, block)
                many[ref, frozenset(inside | self._outside(ref, block))] += 1
                for nodes in repeats:
                    outside = [self._outside(Ref(n, j), block) for n in nodes
                               for j in range(len(self.graph.nodes[n]["shapes"])) if self._is(Ref(n, j), ref)]
                    many[ref, frozenset(inside.union(*outside))] += 1
        for (ref, takers), times in many.items():
            if takers:
                self.choices.uses.append(Use(self.variable[ref.node], ref.output, tuple(sorted(takers)),
                                             self.operand(ref), times))

    def _is(self, later: Ref, first: Ref) -> bool:
        attributes = self.graph.nodes[later.node]
        block = self._blocks[attributes["args"]["block"]]
        same = block.outputs if attributes["phase"] == "forward" else block.input_grads
        return same[later.output] == first

    def _weigh_activations(self) -> None:
        """What forward keeps for backward, in the layout that it was made in; of views what they view."""
        kept: set[Ref] = set()
        for ref, takers in self._takers.items():
            if self.graph.nodes[ref.node]["phase"] == "forward" and any(self._is_backward(v) for v, _ in takers):
                kept.add(self._base(ref))
        for ref in kept:
            if self.graph.nodes[ref.node]["kind"] != "op":
                continue
            variable, value = self.variable[ref.node], self.operand(ref)
            for k, option in enumerate(self.choices.options[variable]):
                held = option.outputs[ref.output]
                if held is not None:
                    self.choices.memory[variable][k] += self.choices.times[variable] * self.costs.part(
                        held, value.shape, value.dtype.itemsize)

    def _is_backward(self, variable: int) -> bool:
        node = self.choices.nodes[variable]
        return isinstance(node, int) and self.graph.nodes[node]["phase"] == "backward"

    def _base(self, ref: Ref) -> Ref:
        while self.graph.nodes[ref.node]["kind"] == "op" and self.graph.nodes[ref.node]["op"].is_view:
            ref = self._takes(ref.node)[0]
        return self._canonical(ref)

    # ------------------------------------------------------------------------------------------------------- result

    def plan_of(self, solution: Solution) -> StagePlan:
        """The plan that a solution means."""
        chosen = [options[k] for options, k in zip(self.choices.options, solution.chosen)]
        rows: dict[str, dict[str, Any]] = {}
        inputs, names = {}, self.costs.where.names
        for node, attributes in self.graph.nodes.items():
            if attributes["kind"] in ("parameter", "input"):
                held = chosen[self.variable[self._twin(node)]].outputs[0]
                assert held is not None              # a leaf has a layout
                if attributes["kind"] == "input":
                    inputs[attributes["name"]] = held
                else:
                    rows[attributes["name"]] = dict(zip(names, held.sbp))
        rows |= {f"{name} ->": row for name, row in self._used_elsewhere(chosen).items()}
        reduced = {name: chosen[variable].inputs[0] for name, variable in self.reduced.items()}
        moved: set[tuple[Ref, Layout]] = set()       # what one op has brought to a layout, others find there
        ops = [self._op_plan(node, variable, chosen, moved) for node, variable in self.variable.items()
               if self.graph.nodes[node]["kind"] == "op"]
        return StagePlan(Plan(rows), inputs, reduced, ops, solution.seconds, solution.lower_bound, solution.nbytes)

    def _used_elsewhere(self, chosen: list[Option]) -> dict[str, dict[str, Any]]:
        """Parameters that forward takes in one layout that is not the one they are stored in."""
        rows = {}
        for node, attributes in self.graph.nodes.items():
            if attributes["kind"] == "parameter":
                first = self._twin(node)
                stored = chosen[self.variable[first]].outputs[0]
                wants = {chosen[v].inputs[q] for v, q in self._takers[Ref(first, 0)] if not self._is_backward(v)}
                if len(wants) == 1 and (want := wants.pop()) != stored and not any(s.is_partial for s in want.sbp):
                    rows[attributes["name"]] = dict(zip(self.costs.where.names, want.sbp))
        return rows

    def _op_plan(self, node: int, variable: int, chosen: list[Option], moved: set[tuple[Ref, Layout]]) -> OpPlan:
        attributes, option = self.graph.nodes[node], chosen[variable]
        refs = [self._canonical(ref) for ref in self._takes(node)]
        held = [chosen[self.variable[self._twin(ref.node)]].outputs[ref.output] for ref in refs]
        values = [self.operand(ref) for ref in refs]
        received = sum(self.costs.boxing_bytes(src, dst, one.shape, one.dtype.itemsize)
                       for ref, src, dst, one in zip(refs, held, option.inputs, values)
                       if src is not None and (ref, dst) not in moved)
        moved |= set(zip(refs, option.inputs))
        return OpPlan(node, str(attributes["op"]), attributes["module"], attributes["phase"], attributes["line"],
                      option.inputs, option.outputs, option.seconds, received, self.choices.times[variable],
                      self._decided_otherwise(attributes, option, held, values))

    def _decided_otherwise(self, attributes: dict[str, Any], option: Option, held: list[Layout | None],
                           values: list[TensorSize]) -> tuple[Layout, ...] | None:
        if not option.signature:
            return None
        line, call = line_of(attributes["op"]), call_of(attributes, values)
        assert line is not None                      # it has signatures
        operands = [spec(src, one.shape, None, one.dtype) for src, one in zip(held, values) if src is not None]
        outputs = [(tuple(s), TensorSize(s, d).nbytes) for s, d in zip(attributes["shapes"], attributes["dtypes"])
                   if s is not None]
        choice: Any = Contest(expected_rule(line.rule(call)), operands, outputs, self.costs.machine).choice()
        wants = tuple(option.inputs[0].with_sbp(tuple(sig.inputs[q] for sig in choice)) for q in range(len(values)))
        return None if wants == option.inputs else wants
