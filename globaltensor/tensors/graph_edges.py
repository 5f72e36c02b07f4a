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
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch

from globaltensor.algorithms.aliasing import note_write
from globaltensor.errors import InPlaceError
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.symbols import expected
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


class _ShardPlace(NamedTuple):
    """Where a shard lies: in which memory, from which element on, and how."""

    memory: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def meets(self, other: _ShardPlace) -> bool:
        """Do they share an element? Also where that is too hard to tell."""
        if self.memory != other.memory:
            return False
        exactly: Any = numpy.shares_memory           # whose types know no bound for the work
        try:
            return bool(exactly(self._bytes(), other._bytes(), max_work=10**6))
        except numpy.exceptions.TooHardError:
            return True

    def _bytes(self) -> Any:
        """An array that lies so, as if elements were of one byte each. Nothing may read it."""
        offset, = expected((self.offset,))
        return numpy.asarray(SimpleNamespace(__array_interface__={
            "data": (1 + offset, True), "shape": expected(self.shape), "strides": expected(self.stride),
            "typestr": "|u1", "version": 3}))


@lru_cache(1)
def watch_graph_edges() -> None:
    """Have what makes and runs graphs do so. Called where one is made, so that torch's modules for it are there."""
    tracer: Any = sys.modules["torch.fx.experimental.symbolic_shapes"].PropagateUnbackedSymInts
    run = tracer.run

    @wraps(run)
    def run_to_the_edge(self: Any, *args: Any, **options: Any) -> Any:
        expect_global_tangents(any(is_global(t) for t in args if isinstance(t, torch.Tensor)))
        pieces = [_places_of(t) for t in args]       # before a write, which gives a traced tensor a new memory
        results = run(self, *args, **options)
        _read_views(results)
        _check_inputs(args, pieces)
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


_told_torch = False                                  # what we have set, and not the program


def expect_global_tangents(ours: bool) -> None:
    """Have torch take the gradient of an argument that a graph writes to for a global tensor, in a graph of ours. It
    guesses a plain one, of zeros, which is so where what was written is not used afterwards; that one can be laid out
    as a global one, but not the other way round. Graphs of other subclasses are left to its guess."""
    global _told_torch
    config: Any = sys.modules["torch._functorch.config"]
    if ours and not config.disable_guess_zero_tangent_for_mutated_input_subclass:
        config.disable_guess_zero_tangent_for_mutated_input_subclass = _told_torch = True
    elif not ours and _told_torch:
        config.disable_guess_zero_tangent_for_mutated_input_subclass = _told_torch = False


def is_view_to_torch(x: Any) -> bool:
    """What `x._is_view()` tells: torch would make a boxed view that goes into a graph anew, of a base that it lacks."""
    return TensorBase._is_view(x) and not (compiling() and not x.traced and x.origin is not None)


def _read_views(results: Any) -> None:
    for t in tree_leaves(results):
        if is_global(t) and t.traced and t.origin is not None:
            _ = t.shards


def _check_inputs(inputs: tuple[Any, ...], pieces: list[list[_ShardPlace]]) -> None:
    traced = [t for t in inputs if isinstance(t, torch.Tensor) and is_global(t) and t.traced]
    written = [n for n, t in enumerate(inputs) if isinstance(t, torch.Tensor) and _is_written(t)]
    if written and any(t.spec.copied for t in traced):
        raise InPlaceError("a compiled function writes to an argument, and another one, or the same, is a boxed view",
                           "the graph has a copy of what the view shows, and would miss a write to its base",
                           "the function with view.clone(), or what it writes outside of what is compiled")
    for n in written:
        if any(a.meets(b) for m, others in enumerate(pieces) if m != n for a in pieces[n] for b in others):
            raise InPlaceError("a compiled function writes to an argument that shares memory with another one",
                               "the graph takes them for tensors of their own, and would miss the write in the other",
                               "the function with one of them, and a view of it made inside; or with y.clone()")


def _places_of(t: Any) -> list[_ShardPlace]:
    """Where the shards of a traced tensor lie in memory."""
    if not (isinstance(t, torch.Tensor) and is_global(t) and t.traced and t.origin is None):
        return []
    shards: list[Any] = [*t.shards.values()]
    fakes: list[Any] = [functional_value(one.elem) if _is_functional(one) else one for one in shards]
    return [_ShardPlace(storage_id(one), one.storage_offset(), tuple(one.shape), one.stride()) for one in fakes
            if one.numel()]


def _is_written(t: Any) -> bool:
    shards: list[Any] = [*t.shards.values()] if is_global(t) else [t]
    return any(_is_functional(one) and was_written_in_trace(one.elem) for one in shards)


def _is_functional(one: Any) -> bool:
    return type(one).__name__ == "FunctionalTensor"
