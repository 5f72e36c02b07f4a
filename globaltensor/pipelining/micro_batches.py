"""A batch in micro-batches: tensors cut along dim 0, or a list that was cut before; on the placement of a stage."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from globaltensor.errors import ArgumentError, GlobalTensorError, ShapeError, counted, expect
from globaltensor.layouts.layout import layout
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import broadcast, split
from globaltensor.runtime.agreement import compare_plain
from globaltensor.tensors.full_value import place_full
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.redistribution import to_layout


@dataclass(frozen=True)
class MicroBatches:
    """How batches of a pipeline are cut.

    number   of micro-batches
    axis     along which plain inputs and targets are split, where a placement has it
    ranks    those of all stages, which have the same plain tensors
    """

    number: int
    axis: str
    ranks: Sequence[int]

    def cut(self, batch: Any, where: placement, what: str) -> list[tuple[Any, ...]]:
        """For each micro-batch a tuple of global tensors on a placement."""
        m = self.number
        if isinstance(batch, tuple) and not batch:
            raise ArgumentError(f"a pipeline without {what}", "it runs a batch; its stages are modules of their own",
                                "runner.eval(inputs); stage.eval() for each of runner.stages, to change their mode")
        if not isinstance(batch, list):
            batch = list(zip(*(self._split(t, what) for t in (batch if isinstance(batch, tuple) else (batch,)))))
        elif len(batch) != m:
            raise ShapeError(f"{len(batch)} {what} for {counted(m, 'micro-batch', 'micro-batches')}",
                             "a list has one for each of them", f"a list of {m}, or a tensor that is cut along dim 0")
        parts = [part if isinstance(part, tuple) else (part,) for part in batch]
        return [tuple(self._to_placement(t, where, what) for t in part) for part in parts]

    def of_rows(self, *batches: Any) -> MicroBatches:
        """The same, or as many micro-batches as these have rows, where that is less: none is empty."""
        tensors = [t for batch in batches if not isinstance(batch, list)
                   for t in (batch if isinstance(batch, tuple) else (batch,))]
        rows = [len(t) for t in tensors if isinstance(t, torch.Tensor) and t.dim()]
        return replace(self, number=max(min(self.number, *rows), 1)) if rows else self

    def _split(self, t: torch.Tensor, what: str) -> Sequence[torch.Tensor]:
        m = self.number
        if not isinstance(t, torch.Tensor) or not t.dim() or len(t) < m:
            size = f"of {list(t.shape)}" if isinstance(t, torch.Tensor) else f"that are a {type(t).__name__}"
            raise ShapeError(f"{what} {size} for {counted(m, 'micro-batch', 'micro-batches')}",
                             "a batch is cut along dim 0", f"{counted(m, 'row')} or more")
        return t.tensor_split(m)

    def _to_placement(self, t: torch.Tensor, where: placement, what: str) -> GlobalTensor:
        expect(t, torch.Tensor, f"{what} of a pipeline", "runner.step(inputs, targets)")
        if t.requires_grad:
            raise GlobalTensorError(f"{what} that require a gradient", "a step leaves gradients in parameters only",
                                    f"{what}.detach()")
        along_batch = split(0) if t.dim() else broadcast
        dst = layout(where, tuple(along_batch if name == self.axis else broadcast
                                  for name in where.axis_names or ("",) * where.ndim))
        if isinstance(t, GlobalTensor):
            return to_layout(t, dst)
        compare_plain(t, f"the {what} of a pipeline", self.ranks)
        return GlobalTensor.wrap(*place_full(t, dst))


def check_rows(inputs: Sequence[tuple[Any, ...]], targets: Sequence[tuple[Any, ...] | None]) -> None:
    """Tensors of a batch have rows for each other. What torch refuses of a whole batch could pass in parts: one of a
    single row goes with any other. Raises ShapeError."""
    columns = [[len(t) if t.dim() else 0 for t in column]      # 0: it has no rows
               for column in zip(*((*x, *(y or ())) for x, y in zip(inputs, targets)))]
    first = columns[0]
    for k, own in enumerate(columns):
        if own == first or 0 in (*own, *first):
            continue
        whole, other = sum(own), sum(first)
        if any(a * other != b * whole or 1 in (a, b) for a, b in zip(own, first)):
            what = "inputs" if k < len(inputs[0]) else "targets"
            raise ShapeError(f"{what} of {whole} rows beside inputs of {other}",
                             f"micro-batches of {own} rows do not go with those of {first}",
                             "as many rows in each tensor; or lists that have a tensor for each micro-batch")


def mean_divisors(inputs: Sequence[tuple[Any, ...]]) -> list[float]:
    """By what the mean of each micro-batch is divided, so that they add up to the mean of the batch, whose rows they
    have: of equal ones their number. Rows are those of the first input that has any."""
    rows = [next((len(t) for t in part if t.dim()), 1) for part in inputs]
    return [sum(rows) / n if n else math.inf for n in rows]


def with_named(inputs: Any, values: list[Any]) -> Any:
    """The inputs of a batch, and behind them those that have names."""
    if not values:
        return inputs
    if isinstance(inputs, list):
        raise ArgumentError("named inputs beside a list of micro-batches", "the list is not cut, and they would be",
                            "tensors of the whole batch, which are all cut alike")
    return (*(inputs if isinstance(inputs, tuple) else (inputs,)), *values)
