"""Products of a graph that other processes of this host read next are made where they can: a boxing copies none.

    box(mm(a, b))                ->   box(products_for_peers([a], [b]))
    box(mm(a, b) + mm(c, d))     ->   box(products_for_peers([a, c], [b, d]))

Eager code makes all that is pending in the arena, which every process of a host can read. Inductor's memory is not, so
that a boxing copies what it is given there first. A sum of products is made by one op too: each adds to the one before
it, in a pass over memory less. What inductor makes by loops of its own, it makes where it likes.

It is a pass of inductor's, as graph_merging.py is.
"""
from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from globaltensor.runtime import custom_ops
from globaltensor.runtime.graph_effects import add_inductor_pass, is_effect
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.world import world

aten = torch.ops.aten
_VIEWS: set[Any] = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_PRODUCTS: dict[Any, int] = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1}    # its first factor


def make_products_for_peers(graph: Graph) -> None:
    """Do it."""
    if torch_ext is None or world().single_process:
        return
    for effect in [node for node in graph.nodes if is_effect(node)]:
        if effect.args[1] is custom_ops.box:
            for shard in effect.args[2]:
                _make(graph, shard)


def register_product_pass() -> None:
    """Have inductor do it from now on, if it is there."""
    add_inductor_pass(make_products_for_peers, __file__)


def _make(graph: Graph, shard: Node) -> None:
    """Where a shard is a product, or a sum of some, have one op of ours make it."""
    total = _without_views(shard)
    products = _summands(total, total)
    if not products or total.meta["val"].device.type != "cpu":
        return
    bare = [_without_views(one) for one in products]
    if len(set(map(_size_and_dtype, bare))) > 1:
        return
    at = _PRODUCTS[bare[0].target]
    factors: list[Any] = [one.args[_PRODUCTS[one.target]:][:2] for one in bare]
    with graph.inserting_before(total):
        product = graph.call_function(custom_ops.products_for_peers, (*map(list, zip(*factors)), *bare[0].args[:at]))
        product.meta = {**bare[0].meta}
        result = _viewed_alike(graph, products[0], product)
    total.replace_all_uses_with(result)
    _erase(graph, total)


def _without_views(node: Node) -> Node:
    """The node of which this one is a view."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def _size_and_dtype(node: Node) -> tuple[str, torch.dtype]:
    """As text, since symbols cannot be put into sets."""
    value = node.meta["val"]
    return str(value.shape), value.dtype


def _summands(node: Any, total: Node) -> list[Node]:
    """The products of which `node` is the sum, as the sum sees them; none where it is something else, or where somebody
    else wants a part of it."""
    if not isinstance(node, Node):
        return []
    if node.target is aten.add.Tensor and not node.kwargs and (node is total or len(node.users) == 1):
        parts = [_summands(one, total) for one in node.args]
        like = set(map(_size_and_dtype, (node, *node.all_input_nodes)))
        biased = any(_without_views(one).target is aten.addmm.default for part in parts for one in part)
        return [] if biased or not all(parts) or len(like) > 1 else [one for part in parts for one in part]
    product, chain = node, [node]
    while product.target in _VIEWS:
        chain.append(product := product.all_input_nodes[0])
    alone = node is total or all(len(one.users) == 1 for one in chain)
    return [node] if product.target in _PRODUCTS and not product.kwargs and alone else []


def _viewed_alike(graph: Graph, node: Node, product: Node) -> Node:
    """The product, viewed as `node` views another one."""
    target: Any = node.target
    if target not in _VIEWS:
        return product
    view = graph.call_function(target, (_viewed_alike(graph, node.all_input_nodes[0], product), *node.args[1:]))
    view.meta = {**node.meta}
    return view


def _erase(graph: Graph, node: Node) -> None:
    """Take out what nobody uses any more: a sum, and what only it used."""
    if not node.users and (node.target in _PRODUCTS or node.target in _VIEWS or node.target is aten.add.Tensor):
        before = node.all_input_nodes
        graph.erase_node(node)
        for one in before:
            _erase(graph, one)
