"""The backward pass of a stage in two halves: first the gradients of its inputs, later those of its weights.

The stage before waits for the first half only, so the second can fill a gap (Qi et al., "Zero Bubble Pipeline
Parallelism", arXiv:2401.10241). In the graph that autograd recorded, the first half runs through the *trunk*, the nodes
from which an input can be reached; weights hang on it by branches of their own:

    output <- mm <- gelu <- mm <- input              trunk
              |             |
              weight        weight                   branches

While the first half walks the trunk, the gradients that arrive at each fork are kept. The second half starts at every
fork with what arrived there, and goes up its branch only: of a matrix product each half computes one of the two
gradients, and nothing is computed twice. A weight that hangs on several forks (one that a stage uses twice) could be
reached from one fork over another, and would count twice; such weights get their gradients from the outputs again.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from globaltensor.tensor import backward


class Start(NamedTuple):
    """Where the second half starts: a fork, the gradients that arrived there, and the leaves up its branches."""

    edges: list[GradientEdge]
    grads: list[torch.Tensor]
    leaves: list[GradientEdge]


class Halves:
    """`inputs_first()`, once, and then `weights()`, once."""

    def __init__(self, outputs: Sequence[torch.Tensor], grads: Sequence[Any], inputs: Sequence[torch.Tensor]) -> None:
        pairs = [(get_gradient_edge(y), g) for y, g in zip(outputs, grads) if y.requires_grad and g is not None]
        self.edges, self.grads = [edge for edge, _ in pairs], [g for _, g in pairs]
        self.inputs = [get_gradient_edge(x) for x in inputs if x.requires_grad]
        self.starts: list[Start] = []
        self.again: list[GradientEdge] = []          # leaves that are reached from several forks

    def inputs_first(self) -> list[Any]:
        """The gradients of those inputs that need one, in their order; None where none arrives."""
        if not self.inputs or not self.edges:
            self.again = _leaves_of(_walk([edge.node for edge in self.edges]), {e.node for e in self.inputs})
            return [None] * len(self.inputs)
        forks = self._forks()
        arrived: dict[Node, tuple] = {}
        hooks = [fork.register_prehook(lambda grads, fork=fork: arrived.__setitem__(fork, grads)) for fork in forks]
        try:
            found = torch.autograd.grad(self.edges, self.inputs, self.grads, retain_graph=True, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        for fork, leaves in forks.items():
            here = [(GradientEdge(fork, i), g) for i, g in enumerate(arrived.get(fork, ())) if g is not None]
            if here:
                self.starts.append(Start([e for e, _ in here], [g for _, g in here], leaves))
        return list(found)

    def weights(self) -> None:
        """Accumulate the gradients of everything else."""
        if self.again:
            backward.backward(self.edges, self.grads, retain_graph=bool(self.starts), inputs=self.again)
        for edges, grads, leaves in self.starts:
            backward.backward(edges, grads, inputs=leaves)
        self.starts, self.edges, self.grads = [], [], []

    def _forks(self) -> dict[Node, list[GradientEdge]]:
        """Nodes of the trunk with branches, and the leaves of these that no other fork reaches."""
        order = _walk([edge.node for edge in self.edges])
        trunk = {edge.node for edge in self.inputs}
        for node in order:
            if any(child in trunk for child, _ in node.next_functions):
                trunk.add(node)
        inside = {node for node in order if node in trunk}
        forks: dict[Node, list[Node]] = {}
        reached: dict[Node, int] = {}
        for node in order:
            if node in inside:
                branches = [child for child, _ in node.next_functions if child is not None and child not in trunk]
                leaves = [leaf for leaf in _walk(branches) if hasattr(leaf, "variable")] if branches else []
                if leaves:
                    forks[node] = leaves
        bare = [edge.node for edge in self.edges if edge.node not in trunk]     # outputs that no input leads to
        outside = {leaf for leaf in _walk(bare) if hasattr(leaf, "variable")}
        for leaves in [*forks.values(), list(outside)]:
            for leaf in leaves:
                reached[leaf] = reached.get(leaf, 0) + 1
        self.again = [GradientEdge(leaf, 0) for leaf, n in reached.items() if n > 1 or leaf in outside]
        alone = {fork: [GradientEdge(leaf, 0) for leaf in leaves if reached[leaf] == 1]
                 for fork, leaves in forks.items()}
        return {fork: leaves for fork, leaves in alone.items() if leaves}


def _walk(roots: Sequence[Node]) -> list[Node]:
    """All nodes that can be reached, each behind those that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None and child not in seen)
    return order


def _leaves_of(nodes: Sequence[Node], but: set[Node]) -> list[GradientEdge]:
    return [GradientEdge(node, 0) for node in nodes if hasattr(node, "variable") and node not in but]
