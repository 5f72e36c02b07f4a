"""What crosses the edge of a graph that torch.compile makes: boxed views that go in or come out, and writes.

    a boxed view comes out      it is read at the end of what is traced, while its boxing can be an op of the graph
    a boxed view goes in        as a tensor of its own, with the value that it has when the graph is called. The graph
                                knows nothing of its base; so it may write to none of its inputs, which may be that
    an input was written to     by shards, which our dispatch does not see: torch tells it by the input's version, and
                                boxed views of that memory are then out of date (algorithms/aliasing.py)
    a region begins             that the program marks (`torch.compiler.nested_compile_region`), to be compiled once for
                                many calls: it is a part of the graph like any other, once per call
"""
from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache, wraps
from typing import Any

import torch

from globaltensor.algorithms.aliasing import note_write
from globaltensor.errors import InPlaceError
from globaltensor.layouts.global_like import is_global
from globaltensor.runtime.torch_internals import (
    TRACED_KEY,
    TensorBase,
    compiling,
    functional_value,
    invoke_subgraph,
    storage_id,
    take_higher_order_op,
    tree_leaves,
    was_written_in_trace,
)

Span = tuple[int, int, int]                          # a memory, the first element in it, and the one behind the last


@lru_cache(1)
def watch_graph_edges() -> None:
    """Have what makes and runs graphs do so. Called where one is made, so that torch's modules for it are there."""
    tracer: Any = sys.modules["torch.fx.experimental.symbolic_shapes"].PropagateUnbackedSymInts
    run = tracer.run

    @wraps(run)
    def run_to_the_edge(self: Any, *args: Any, **options: Any) -> Any:
        spans = [_spans(t) for t in args]            # before a write, which gives a traced tensor a new memory
        results = run(self, *args, **options)
        _read_views(results)
        _check_inputs(args, spans)
        return results

    count = torch.autograd.graph.increment_version

    @wraps(count)
    def count_and_note(tensor: torch.Tensor | Iterable[torch.Tensor]) -> None:
        written = (tensor,) if isinstance(tensor, torch.Tensor) else tuple(tensor)
        count(written)
        for t in written:
            if is_global(t):
                note_write(t)

    tracer.run, torch.autograd.graph.increment_version = run_to_the_edge, count_and_note
    take_higher_order_op(invoke_subgraph, TRACED_KEY, lambda region, name, *operands: region(*operands))


def is_view_to_torch(x: Any) -> bool:
    """What `x._is_view()` tells: torch would make a boxed view that goes into a graph anew, of a base that it lacks."""
    return TensorBase._is_view(x) and not (compiling() and not x.traced and x.origin is not None)


def _read_views(results: Any) -> None:
    for t in tree_leaves(results):
        if is_global(t) and t.traced and t.origin is not None:
            _ = t.shards


def _check_inputs(inputs: tuple[Any, ...], spans: list[list[Span]]) -> None:
    traced = [t for t in inputs if isinstance(t, torch.Tensor) and is_global(t) and t.traced]
    written = [n for n, t in enumerate(inputs) if isinstance(t, torch.Tensor) and _is_written(t)]
    if written and any(t.spec.copied for t in traced):
        raise InPlaceError("a compiled function writes to an argument, and another one, or the same, is a boxed view",
                           "the graph has a copy of what the view shows, and would miss a write to its base",
                           "the function with view.clone(), or what it writes outside of what is compiled")
    for n in written:
        if any(_overlap(spans[n], other) for m, other in enumerate(spans) if m != n):
            raise InPlaceError("a compiled function writes to an argument that shares memory with another one",
                               "the graph takes them for tensors of their own, and would miss the write in the other",
                               "the function with one of them, and a view of it made inside; or with y.clone()")


def _spans(t: Any) -> list[Span]:
    """Where the shards of a traced tensor lie in memory."""
    if not (isinstance(t, torch.Tensor) and is_global(t) and t.traced and t.origin is None):
        return []
    shards: list[Any] = [*t.shards.values()]
    fakes: list[Any] = [functional_value(one.elem) if _is_functional(one) else one for one in shards]
    return [(storage_id(one), one.storage_offset(), one.storage_offset() + 1 + sum(
             (n - 1) * step for n, step in zip(one.shape, one.stride()))) for one in fakes if one.numel()]


def _overlap(ours: list[Span], others: list[Span]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in ours for b in others)


def _is_written(t: Any) -> bool:
    shards: list[Any] = [*t.shards.values()] if is_global(t) else [t]
    return any(_is_functional(one) and was_written_in_trace(one.elem) for one in shards)


def _is_functional(one: Any) -> bool:
    return type(one).__name__ == "FunctionalTensor"
