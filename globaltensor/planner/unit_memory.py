"""What lives while a run without memory goes backward, unit by unit.

    kept      what forward leaves for backward, which goes away unit by unit
    moments   after each op of a unit's backward: what is left of the unit's kept tensors, what backward made and still
              needs, and the gradients of its parameters, which stay; or, where micro-batches before have left some,
              the new ones alone, which go once they are added to those
    unsaved   what later units take in forward that backward needs nowhere: a stage that ends here has it all the same

Autograd lets go of what an op of forward saved, and of the gradients that came for it, when all ops of its backward are
done. A tensor is taken to live in the unit that made it.
"""
from __future__ import annotations

from globaltensor.planner.cost_tracer import CostTracer
from globaltensor.planner.graph import Ref
from globaltensor.planner.op_costs import OpCosts


class UnitMemory:
    """Bytes by unit. What a layer has that stands for others, those have, too.

    at                  of each node its unit, and those of the layers that it stands for
    unit_of_gradient    of each parameter that has a gradient its unit, by name
    """

    def __init__(self, tracer: CostTracer, costs: OpCosts, at: list[list[int]], units: int,
                 unit_of_gradient: dict[str, int]) -> None:
        self.tracer, self.graph, self.costs, self.at = tracer, tracer.graph, costs, at
        self._bases: dict[Ref, Ref] = {}
        self.kept, self.gradients = [0] * units, [0] * units
        self.first: list[list[int]] = [[] for _ in range(units)]
        self.later: list[list[int]] = [[] for _ in range(units)]
        self.groups = self._groups_of_nodes()
        self.last_use, self.saved = self._uses()
        self.gradient_units = {self.base(ref): unit_of_gradient[name]
                               for name, ref in self.graph.graph["gradients"].items()}
        self.unsaved = self._unsaved()
        for base in self.saved:
            for unit in at[base.node]:
                self.kept[unit] += self.size(base)
        self._follow_backward()

    def base(self, ref: Ref) -> Ref:
        """The tensor whose memory it is."""
        if ref not in self._bases:
            self._bases[ref] = ref
            a = self.graph.nodes[ref.node]
            if a["kind"] == "op" and (a["op"].is_view or a["op"]._schema.is_mutable):
                taken = sorted((operand, Ref(s, o)) for s in self.graph.pred[ref.node]
                               for o, operand in self.graph.edges[s, ref.node]["uses"])
                if taken:
                    self._bases[ref] = self.base(taken[0][1])
        return self._bases[ref]

    def size(self, ref: Ref) -> int:
        """Bytes on a rank; parameters and inputs are counted by themselves."""
        a = self.graph.nodes[ref.node]
        lies = self.tracer.layouts[ref.node][ref.output]
        if a["kind"] not in ("op", "constant", "seed") or a["shapes"][ref.output] is None or lies is None:
            return 0
        return self.costs.part(lies, a["shapes"][ref.output], a["dtypes"][ref.output].itemsize)

    def outputs(self, node: int) -> list[Ref]:
        """The tensors that a node makes."""
        return [ref for k in range(len(self.graph.nodes[node]["shapes"])) if self.base(ref := Ref(node, k)) == ref]

    def _groups_of_nodes(self) -> list[int]:
        """For each node of backward the last one that is done for the same op of forward."""
        last = list(range(len(self.graph)))
        nodes = self.graph.nodes
        for node in reversed(range(len(last) - 1)):
            origin = nodes[node]["origin"]
            if origin is not None and origin == nodes[node + 1]["origin"]:
                last[node] = last[node + 1]
        return last

    def _uses(self) -> tuple[dict[Ref, int], set[Ref]]:
        """Of each tensor the node that uses it last; and those of forward that backward takes."""
        last: dict[Ref, int] = {}
        saved: set[Ref] = set()
        for node, a in self.graph.nodes.items():
            for source in self.graph.pred[node]:
                for output, _ in self.graph.edges[source, node]["uses"]:
                    base = self.base(Ref(source, output))
                    last[base] = max(last.get(base, 0), self.groups[node])
                    if a["phase"] == "backward" and self.graph.nodes[base.node]["phase"] == "forward":
                        saved.add(base)
        return last, saved

    def _unsaved(self) -> list[int]:
        crossing: list[set[Ref]] = [set() for _ in self.kept]
        for source, target, uses in self.graph.edges(data="uses"):
            a, b = self.graph.nodes[source], self.graph.nodes[target]
            if a["kind"] == "op" and b["phase"] == "forward":
                for unit in range(self.at[source][0], self.at[target][0]):
                    crossing[unit] |= {self.base(Ref(source, output)) for output, _ in uses} - self.saved
        return [sum(map(self.size, bases)) for bases in crossing]

    def _times(self, ref: Ref) -> int:
        """How many tensors of the same unit it stands for."""
        units = self.at[ref.node]
        return units.count(units[0])

    def _follow_backward(self) -> None:
        """Live bytes after each node of backward, less what units before keep, and gradients of units behind. Where
        layers of one unit stand for others, what these keep goes and their gradients come all at once."""
        units = range(len(self.kept))
        dies: dict[int, list[Ref]] = {}
        for base, node in self.last_use.items():
            dies.setdefault(node, []).append(base)
        kept, gradients = ([0] * len(self.kept) for _ in range(2))
        for base in self.saved:
            kept[self.at[base.node][0]] += self.size(base) * self._times(base)
        for base, unit in self.gradient_units.items():
            gradients[unit] += self.size(base) * self._times(base)
        before, behind = [sum(kept[:u]) for u in units], [sum(gradients[u + 1:]) for u in units]
        left, passing, whole, coming, fresh = sum(kept), 0, 0, 0, list[Ref]()
        for node, a in self.graph.nodes.items():
            if a["phase"] != "backward":
                continue
            unit, outputs = self.at[node][0], self.outputs(node)
            if self._times(Ref(node, 0)) == 1:
                whole, coming = whole + coming, 0
            for ref in outputs:
                if ref in self.gradient_units:
                    whole, coming = whole + self.size(ref), coming + self.size(ref) * (self._times(ref) - 1)
                    fresh.append(ref)
                else:
                    passing += self.size(ref)
            live = left - before[unit] + passing
            for other in dict.fromkeys(self.at[node]):
                self.first[other].append(max(live + whole - behind[unit], 0))
                self.later[other].append(max(live + sum(map(self.size, fresh)), 0))
            for base in {*dies.get(node, []), *(ref for ref in outputs if ref not in self.last_use)}:
                if base in self.saved:
                    left -= self.size(base) * self._times(base)
                elif self.graph.nodes[base.node]["phase"] == "backward" and base not in self.gradient_units:
                    passing -= self.size(base)
            fresh = [ref for ref in fresh if max(self.last_use.get(ref, 0), self.groups[ref.node]) > node]
