"""Ops whose sizes are symbols, as torch.compile has them where one graph is for many sizes.

What decides how an op runs asks its questions of the symbols, and torch keeps the answers as conditions of the graph:
under them, the decision is right for all sizes. Prices are those of the sizes that the trace began with. All ranks make
their graphs at the same calls, as conditions are on sizes of whole tensors, so they decide alike.

Not all that we do can be told of symbols. Other ops have their symbols made numbers first: the graph is then one for
these sizes.
"""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.algorithms import decompositions, random_ops
from globaltensor.dispatch.decide import decide
from globaltensor.dispatch.decision_log import log_decision
from globaltensor.dispatch.recipe import Decision, Recipe
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import Spec, spec
from globaltensor.layouts.symbols import has_symbols
from globaltensor.op_table.line import TABLE, Line
from globaltensor.op_table.variants import line_of
from globaltensor.rules import indices, shapes
from globaltensor.rules.families import is_regardless_of_size
from globaltensor.runtime.graph_symbols import in_graph
from globaltensor.runtime.torch_internals import (
    OpOverload,
    modes_active,
    tree_leaves,
    tree_map_only,
    without_modes,
)

_aten = torch.ops.aten
# They write rules of symbols, beside the families that depend on no size.
_FAMILIES = {shapes.viewed, shapes.expanded, shapes.squeezed, shapes.sliced, shapes.selected, shapes.factory_like,
             shapes.memory_like, shapes.sized_backward, shapes.split_list, shapes.unbound, shapes.padded,
             shapes.concatenated, shapes.stacked, shapes.unfolded_backward, indices.embedded,
             indices.embedded_backward, indices.embedded_backward_rows, indices.gathered, indices.scattered_value,
             *(TABLE[op].family for op in (_aten.nll_loss_forward.default, _aten.nll_loss_backward.default,
                                           _aten.mse_loss.default, _aten.mse_loss_backward.default,
                                           _aten.scatter.src, _aten.scatter_add.default))}
_DECOMPOSITIONS = {decompositions.mean, decompositions.nll_mean, decompositions.mean_loss,
                   decompositions.mean_loss_backward, decompositions.softmax, decompositions.log_softmax,
                   decompositions.softmax_backward, decompositions.log_softmax_backward, random_ops.native_dropout}


def settled(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """The call with numbers for the floats that torch knows, and with tensors that have numbers for the sizes that it
    knows by now. (A tensor cannot change its own sizes, so one of the same shards takes its place; not
    where it is written to or viewed.)"""
    stays = func.is_view or func._schema.is_mutable

    def one(x: torch.Tensor) -> torch.Tensor:
        if not is_global(x) or not x.traced:
            return x
        if x.spec.symbolic:
            own = x.spec
            x.spec = spec(own.layout, own.shape, own.stride, own.dtype, own.copied, own.lazy_bits)
        if stays or x.spec.symbolic or not has_symbols(x.shape) or x.origin is not None:
            return x
        same = type(x).wrap(x.spec, x.shards)
        same.made_after = x.made_after
        return same

    return tree_map_only(torch.SymFloat, lambda n: float(n) if n.node.has_hint() else n,
                         tree_map_only(torch.Tensor, one, (args, kwargs)))


def concerned(args: Any, kwargs: Any) -> bool:
    """Are there symbols in such a call?"""
    return any(type(value) is torch.SymInt or is_global(value) and value.spec.symbolic
               for value in tree_leaves((args, kwargs)))


def with_numbers(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """The call with numbers for symbols: the graph is now one for these sizes."""
    for x in tree_leaves((args, kwargs)):
        if is_global(x) and x.spec.symbolic:
            for n in x.spec.shape + x.spec.stride:
                int(n)                               # torch knows it from now on
    return settled(func, *tree_map_only(torch.SymInt, int, (args, kwargs)))


def decide_by_symbols(cls: type[GlobalLike], func: OpOverload, args: Any, kwargs: Any) -> Decision | None:
    """How a call with symbols runs; None where it can run with numbers only."""
    line = line_of(func)
    if line is None or not _knows_symbols(line) or any(type(n) is torch.SymBool for n in tree_leaves((args, kwargs))):
        return None
    if not modes_active():
        decision = decide(cls, func, args, kwargs)
    else:
        with without_modes():
            decision = decide(cls, func, args, kwargs)
    if isinstance(decision, Recipe) and decision.boxes_view or (
            not isinstance(decision, Recipe) and decision not in _DECOMPOSITIONS):
        return None
    log_decision(func, decision, args, kwargs)
    if isinstance(decision, Recipe):
        decision.outputs = decision.outputs and [_in_graph(own) for own in decision.outputs]
        decision.single = _in_graph(decision.single)
        for field in ("local_args", "shapes", "regions"):
            setattr(decision, field, in_graph(getattr(decision, field)))
    return decision


def _knows_symbols(line: Line) -> bool:
    return is_regardless_of_size(line.family) or line.family in _FAMILIES


def _in_graph(own: Spec | None) -> Spec | None:
    return spec(own.layout, in_graph(own.shape), in_graph(own.stride), own.dtype, own.copied, own.lazy_bits
                ) if own is not None and own.symbolic else own
