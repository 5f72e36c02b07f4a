"""Ops with an ordered effect, in the graphs that torch.compile makes: boxings, draws of keys, checks of ranges.

Their calls stay in order, and none is left out or done twice. In a graph such a call is a node `with_effects(token, op,
...)`, which gives a token for the next one, and results.
"""
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from globaltensor.runtime.torch_internals import TORCH, OpOverload, nodes_of_trace


class _KeptNode(dict[str, Any]):
    """What torch notes of a node whose result is kept. torch.utils.checkpoint has other plans for all that an op of the
    program leaves in the graph, when the op is done."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, CheckpointPolicy.MUST_SAVE if key == "recompute" else value)


def call_effect(op: OpOverload, *args: Any) -> Any:
    """Put an op with an ordered effect into the graph that is being traced. Where torch.utils.checkpoint has what is
    around it done again in backward, it is not: its results are kept."""
    nodes = nodes_of_trace()
    before = len(nodes)
    results = op(*args)
    for node in islice(reversed(nodes), len(nodes) - before):
        if "recompute" in node.meta:
            node.meta = _KeptNode(node.meta)
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return results


def is_effect(node: Node) -> bool:
    """Is this a call of such an op?"""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "with_effects"


def add_inductor_pass(change: Callable[[Graph], None], file: str) -> None:
    """Have inductor, if it is there, change every graph so, behind the passes that are set. `file` defines it.

    torch before 2.13 takes one pass: there it is one that does the one before it first.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    if config is None:
        return
    before = config.post_grad_custom_pre_pass
    passes = [*before] if isinstance(before, (list, tuple)) else [] if before is None else [before]
    if any(change in getattr(one, "changes", ()) for one in passes):
        return
    custom: Any = importlib.import_module("torch._inductor.custom_graph_pass")
    many = TORCH >= "2.13"
    first = None if many else before

    def run(self: Any, graph: Graph, **options: Any) -> None:
        if first is not None:
            first(graph, **options)
        change(graph)

    def uuid(self: Any) -> Any:
        """By which graphs on disk are found; None where the program's pass has none."""
        own = custom.get_hash_for_files((file,))
        known = first.uuid() if isinstance(first, custom.CustomGraphPass) else None
        return own if first is None else None if known is None else (known, own)

    aware: Any = getattr(custom, "CustomInferenceAwareGraphPass", custom.CustomGraphPass)      # torch gives it more
    kind = type("Pass", (aware if isinstance(first, aware) else custom.CustomGraphPass,), {
        "changes": (*getattr(first, "changes", ()), change), "__call__": run, "uuid": uuid})
    config.post_grad_custom_pre_pass = [*passes, kind()] if many else kind()
