"""bincount of numbers that are split: each rank counts its own, and a sum stays pending.

How many counts there are depends on the greatest number. So torch's own bincount is asked about the least and the
greatest number alone, which tells every rank the size, and refuses what must be refused; then ranks add ones, or their
weights, to zeros of that size.
"""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.algorithms.decompositions import extrema
from globaltensor.algorithms.run import Run, of_values
from globaltensor.layouts.global_like import is_global
from globaltensor.rules.call import Call

aten = torch.ops.aten


def _counts_split(call: Call) -> bool:
    """Are there numbers to count, of which ranks have parts?"""
    x, weights = call["self"], call["weights"]
    return (is_global(x) and any(s.is_split for s in x.spec.sbp) and x.dim() == 1 and x.numel() > 0
            and x.dtype != torch.bool and not x.dtype.is_floating_point and not x.dtype.is_complex
            and (weights is None or weights.shape == x.shape and not weights.dtype.is_complex))


@of_values
def bincount(call: Call, run: Run) -> Any:
    """How often each number is there; or the sums of the weights."""
    if not _counts_split(call):
        return run.plain(call)
    x, weights = call["self"], call["weights"]
    ends = run.redistribute(extrema(run, x, [0], True), [x.spec.layout.replicated] * 2, str(call.func))
    zeros = run(aten.zeros_like.default, run(aten.bincount.default, run(aten.cat.default, ends), None,
                                             call["minlength"]), dtype=_dtype_of_sums(weights))
    index = x if x.dtype in (torch.int32, torch.int64) else run(aten._to_copy.default, x, dtype=torch.int64)
    if weights is None:
        weights = run(aten.ones_like.default, index, dtype=zeros.dtype)
    elif weights.dtype != zeros.dtype:
        weights = run(aten._to_copy.default, weights, dtype=zeros.dtype)
    return run(aten.index_add.default, zeros, 0, index, weights)


def _dtype_of_sums(weights: Any) -> torch.dtype:
    """torch adds up floats of 32 bits as such, all else as those of 64."""
    return torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
