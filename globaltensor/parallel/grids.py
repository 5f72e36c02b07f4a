"""Tensor parallelism in two and three dims: the rows of a plan that lays layers on a grid of ranks.

In one dim each rank holds a part of every weight and all of the activations between the layers. On a grid both are
cut along all axes, so that nothing is held twice, and what a product needs comes to it in parts. Of a linear layer
X [m, k] W [k, n] = Y [m, n], per rank and in parts of a matrix's bytes (a weight of torch's is W turned, [n, k]):

    2D, on (row, column) of q x q ranks: SUMMA (van de Geijn and Watts, 1997; Xu et al., arXiv:2104.05343)
        X (S0, S1), W (S0, S1) -> Y (S0, S1)         6 (q-1)/q^2 forward and backward
        That dispatch finds: X is gathered along the columns, W along the rows; sums are scattered in backward.
    2.5D, on (depth, row, column) (Wang et al., arXiv:2105.14500)
        the same, with batch S(0) and weights B along depth, which is what data parallelism does with any plan
    3D, on (j, i, l) of q x q x q ranks (Agarwal et al., 1995; Bian et al., arXiv:2105.14450)
        X [b, s, k] (S1, S0, S2), W [n, k] (S0, S0, S1) -> Y (S2, S0, S0)        6 (q-1)/q^3
        X is gathered along j, W along i and the sum scattered along l; what is gathered is kept for backward, which
        again gathers one and scatters two. In the next layer j and l change their parts. A part must lie within what
        it is gathered to, so that W's outputs (in the next layer inputs) are cut along j first and then along i, and
        what j and i would both cut of X, one cuts along the sequence.

The number of ranks need not be a square or a cube, and sizes need not divide evenly.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from globaltensor.layouts.sbp import Sbp, broadcast, split

PlanRow = dict[str, Sbp]                             # axis name -> how along that axis
PlanRows = dict[str, PlanRow]                        # by name or pattern
NamedLayers = Iterable[tuple[str, nn.Module, str | None]]    # name, layer, kind: columns, rows, vocabulary or None


def plan_rows(layers: NamedLayers, axes: tuple[str, ...]) -> tuple[PlanRows, PlanRows]:
    """The rows of tensors and those of what modules take and give, for two or three axes."""
    tensors: PlanRows = {}
    moved: PlanRows = {}
    for name, layer, kind in layers:
        of_tensors, of_moved = (_summa_2d if len(axes) == 2 else _agarwal_3d)(layer, kind, axes)
        tensors |= {f"{name}.{key}".lstrip("."): row for key, row in of_tensors.items()}
        moved |= {f"{name}{suffix}": row for suffix, row in of_moved.items()}
    return tensors, moved


def _summa_2d(layer: nn.Module, kind: str | None, axes: tuple[str, ...]) -> tuple[PlanRows, PlanRows]:
    row, column = axes
    lie = {" ->": {row: split(0), column: split(-1)}}
    if kind == "vocabulary":
        return {"weight": {row: split(0), column: split(1)}}, lie
    if kind:
        return _weights(layer, {column: 0, row: 1}), lie
    return (_norm(layer, column) if _is_norm(layer) else {}), {}


def _agarwal_3d(layer: nn.Module, kind: str | None, axes: tuple[str, ...]) -> tuple[PlanRows, PlanRows]:
    j, i, l = axes
    if kind == "vocabulary":
        return ({"weight": {j: split(0), i: split(0), l: split(1)}},
                {" ->": {j: split(1), i: split(0), l: split(-1)}})
    if kind == "columns":                            # what comes in was gathered behind the norm, once for all of them
        return _weights(layer, {j: 0, l: 1}, {i: 0}), {" ->": {l: split(0)}, ".weight ->": {i: broadcast}}
    if kind == "rows":
        return _weights(layer, {l: 0, j: 1}, {i: 1}), {" <-": {l: broadcast}, " ->": {j: split(1)},
                                                       ".weight ->": {i: broadcast}}
    return (_norm(layer, l), {" ->": {j: broadcast}}) if _is_norm(layer) else ({}, {})


def _weights(layer: Any, dims: dict[str, int], again: dict[str, int] | None = None) -> PlanRows:
    """Weight [outputs, inputs] and bias, cut along outputs (0) and inputs (1); the weight once more along `again`."""
    transposed = not isinstance(layer, nn.Linear)        # a Conv1D of GPT-2 is [inputs, outputs]
    rows = {"weight": {axis: split(int(bool(dim) != transposed)) for axis, dim in (dims | (again or {})).items()}}
    if getattr(layer, "bias", None) is not None:
        rows["bias"] = {axis: split(0) for axis, dim in dims.items() if dim == 0}
    return rows


def _norm(layer: nn.Module, axis: str) -> PlanRows:
    """Scale and shift of what lies split along the hidden dim."""
    return {key: {axis: split(0)} for key in ("weight", "bias") if getattr(layer, key, None) is not None}


def _is_norm(layer: nn.Module) -> bool:
    """LayerNorm, RMSNorm and those of transformers' models."""
    return type(layer).__name__.endswith("Norm")
