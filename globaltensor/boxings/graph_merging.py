"""Boxings of a graph that meet are done as one, and a boxing begins as early as its input is there.

    box(a)  mm  box(b)   ->   mm  box(a, b)          where a does not lead to b

Small boxings cost a fixed time each, whatever they move. So a boxing joins the first one before it that has the same
ranks, does not lead to it (nor does any between them), and has room: large boxings gain nothing, and all parameters
gathered at once would need the memory of all.

All ranks decide alike: by what the program said of each boxing (trace_order.py), layouts and sizes of whole tensors.
What else is in a rank's graph is only put in an order that fits. It is a pass of inductor's, after its own of joint
graphs; other backends run the boxings of the program one by one.
"""
from __future__ import annotations

import ast
import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from globaltensor.runtime import custom_ops
from globaltensor.runtime.graph_effects import add_inductor_pass, is_effect

ROOM = 4 << 20                                       # bytes of whole tensors that are moved as one

_TOKEN, _OP, _SHARDS, _LAYOUTS, _SIZES, _FOR, _PURPOSE, _UNRELATED = range(8)     # the arguments of its node


def merge_boxings(graph: Graph) -> None:
    """Do it. Called once a graph is otherwise as torch wants it."""
    effects = [node for node in graph.nodes if is_effect(node)]
    groups = _groups([node for node in effects if node.args[_OP] is custom_ops.box])
    if not groups:
        return
    first_of = {node: group[0] for group in groups for node in group}
    merged = {group[0]: _one_boxing(graph, group) for group in groups if len(group) > 1}
    chain = [merged.get(node, node) for node in effects if first_of.get(node, node) is node]
    _tie(effects, chain)
    _sort(graph, chain)
    graph.lint()


def inductor_merges() -> None:
    """Have inductor do it from now on, if it is there."""
    add_inductor_pass(merge_boxings, __file__)


def _groups(boxes: Sequence[Node]) -> list[list[Node]]:
    """Which are done together, each group by its place in the program."""
    groups: list[tuple[int, list[Node]]] = []
    for nth, node in enumerate(boxes):
        unrelated: Any = node.args[_UNRELATED]
        for first, group in groups:
            together = sum(map(_nbytes, [*group, node]))
            if nth - first <= unrelated and _places(group[0]) == _places(node) and together <= ROOM:
                group.append(node)
                break
        else:
            groups.append((nth, [node]))
    return [group for _, group in groups]


def _moved(node: Node) -> list[Any]:
    return list(ast.literal_eval(str(node.args[_LAYOUTS])))


def _places(node: Node) -> set[Any]:
    """All placements that it has to do with."""
    return {layout[:2] for src, dst, *_ in _moved(node) for layout in (src, dst)}


def _nbytes(node: Node) -> int:
    """Of the whole tensors; a symbol counts as what it was when the graph was made."""
    numbers: Any = node.args[_SIZES]
    sizes = [_hint(n) for n in numbers]
    total = 0
    for _, _, dtype, ndim in _moved(node):
        total += prod(sizes[:ndim]) * getattr(torch, dtype).itemsize
        sizes = sizes[2 * ndim:]
    return total


def _hint(n: Any) -> int:
    value = n.meta["val"] if isinstance(n, Node) else n
    return int(value.node.hint) if isinstance(value, torch.SymInt) else int(value)


def _one_boxing(graph: Graph, group: Sequence[Node]) -> Node:
    """One boxing of all that these move; it gives what they gave."""
    first: Any = group[0]
    arguments: list[Any] = [[*one] for one in zip(*(node.args for node in group))]
    shards, sizes = ([value for own in arguments[at] for value in own] for at in (_SHARDS, _SIZES))
    layouts = repr([moved for node in group for moved in _moved(node)])
    names = [" and ".join(dict.fromkeys(arguments[at])) for at in (_FOR, _PURPOSE)]
    with graph.inserting_before(first):
        node = graph.call_function(first.target, (first.args[_TOKEN], custom_ops.box, shards, layouts, sizes, *names,
                                                  first.args[_UNRELATED]))
        results = graph.call_function(operator.getitem, (node, 1))
    values = [value for one in group for value in one.meta["val"][1]]
    node.meta = {**first.meta, "val": (first.meta["val"][0], values)}
    results.meta = {**first.meta, "val": values}
    before = 0
    for one in group:
        for part in _taken_out(one, 1):
            for result in list(part.users):
                at: Any = result.args[1]
                result.args = (results, before + at)
            graph.erase_node(part)
        before += len(one.meta["val"][1])
    return node


def _taken_out(effect: Node, nth: int) -> list[Node]:
    """What takes the token (0) or the results (1) out of an effect's."""
    return [user for user in effect.users if user.args[1] == nth]


def _tie(effects: Sequence[Node], chain: Sequence[Node]) -> None:
    """Let each effect of the chain wait for the one before it, and what waited for the last of all wait for its end."""
    tokens = {node: _token(node) for node in {*effects, *chain}}
    last, end = tokens[effects[-1]], tokens[chain[-1]]
    if end is not last:
        last.replace_all_uses_with(end)
    for node, before in zip(chain, [effects[0].args[_TOKEN], *(tokens[node] for node in chain)]):
        node.update_arg(_TOKEN, before)
    for node in reversed(effects):
        if node not in chain:
            node.graph.erase_node(tokens[node])
            node.graph.erase_node(node)


def _token(effect: Node) -> Node:
    tokens = _taken_out(effect, 0)
    if not tokens:
        with effect.graph.inserting_after(effect):
            tokens = [effect.graph.call_function(operator.getitem, (effect, 0))]
        tokens[0].meta["val"] = effect.meta["val"][0]
    return tokens[0]


def _sort(graph: Graph, chain: Sequence[Node]) -> None:
    """Put the nodes in an order in which inputs come first, each effect as early as that allows, the rest as it was."""
    placed: dict[Node, None] = {}
    seen: set[Node] = set()
    waiting = list(chain)

    def place(node: Node) -> None:
        todo = [node]
        while todo:
            missing = [one for one in todo[-1].all_input_nodes if one not in placed]
            if not missing:
                placed.setdefault(todo.pop())
                continue
            assert todo[-1] not in seen, f"{todo[-1]} leads to itself"
            seen.add(todo[-1])
            todo += missing

    tokens = {token for node in chain for token in _taken_out(node, 0)}
    nodes = list(graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            place(node)
    for node in nodes:
        place(node)
        while waiting and all(one in placed or one in tokens for one in waiting[0].all_input_nodes):
            place(waiting.pop(0))
    before, *others = placed
    for node in others:
        before.append(node)
        before = node
