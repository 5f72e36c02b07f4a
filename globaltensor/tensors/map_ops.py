"""The linear maps of linear_maps.py as ops: what they do on plain tensors, on global ones, and above autograd.

A dispatch mode sees them, and a graph that was traced calls them by name.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from globaltensor.algorithms.run import Decomposition, Run
from globaltensor.layouts.layout import Layout, Shape, spec
from globaltensor.op_table.line import TABLE, Line, always_decomposed
from globaltensor.rules.call import Call
from globaltensor.runtime import custom_ops
from globaltensor.runtime.torch_internals import OpOverload
from globaltensor.runtime.world import local_ranks_of
from globaltensor.tensors.convert import FromLocal, join_alike
from globaltensor.tensors.full_value import FromFull, FullTensor, place_full, whole_value
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.linear_maps import how_of
from globaltensor.tensors.redistribution import Part, Redistribute, Spread, ToLocal, box, own_part, sum_parts


def _spread(t: torch.Tensor, dst: Layout, shape: Shape) -> GlobalTensor:
    ranks = local_ranks_of(dst.placement)
    # memory of its own for each: ops may write in place
    shards = {r: t.clone() for r in ranks} if len(ranks) > 1 else {r: t.contiguous() for r in ranks}
    return GlobalTensor.wrap(spec(dst, shape, None, t.dtype), shards)


_ON_PLAIN: dict[OpOverload, Callable[..., torch.Tensor]] = {
    FromFull.op: lambda t, dst: GlobalTensor.wrap(*place_full(t, dst)),
    FromLocal.op: join_alike,
    Spread.op: _spread,
}
_ON_GLOBAL: dict[OpOverload, Callable[..., Any]] = {
    Redistribute.op: lambda x, dst, grad_layout=None: box(x, dst),
    FullTensor.op: whole_value,
    ToLocal.op: own_part,
    Part.op: sum_parts,
}


def register_maps() -> None:
    """Register what the ops do."""
    for op, kernel in _ON_PLAIN.items():
        custom_ops.implement(op, _read_names(kernel))
    for op, kernel in _ON_GLOBAL.items():
        TABLE[op] = Line(always_decomposed, decomposition=_decomposition(kernel))
    for function in (Redistribute, FullTensor, FromFull, ToLocal, FromLocal, Spread, Part):
        # so that a traced graph, which calls ops, is differentiated as what was traced
        custom_ops.implement(function.op, _read_names(function.of), "Autograd")
        function.kernel = staticmethod((_ON_PLAIN | _ON_GLOBAL)[function.op])


def _read_names(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *arguments: kernel(x, *how_of(arguments))


def _decomposition(kernel: Callable[..., Any]) -> Decomposition:

    def decomposition(call: Call, run: Run) -> Any:
        x, *arguments = call.values.values()
        return kernel(x, *how_of(arguments))

    return decomposition
