"""A mask as the numbers of the elements that it names: x[mask] is x[mask.nonzero()].

What a mask names is known only when it runs, so by itself it would be asked on whole operands. Its numbers are few, and
indexing by numbers moves the rows that are named alone.
"""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.algorithms import grouped_mm
from globaltensor.algorithms.run import Run, of_values
from globaltensor.layouts.global_like import is_global
from globaltensor.rules.call import Call

aten = torch.ops.aten


def _masked_dim(call: Call) -> int | None:
    """The dim of x, if x is not whole, that a mask of that dim alone indexes."""
    x, indices = call["self"], call["indices"]
    dims = [d for d, t in enumerate(indices) if t is not None]
    if not is_global(x) or x.traced or all(s.is_broadcast for s in x.spec.sbp) or len(dims) != 1:
        return None
    mask = indices[dims[0]]
    fits = mask.dtype == torch.bool and mask.shape == x.shape[dims[0]:dims[0] + 1]       # else torch has the word
    return dims[0] if fits else None


def takes_named(call: Call) -> bool:
    """Are rows taken by a mask, or picked by number?"""
    return _masked_dim(call) is not None or grouped_mm.gathers_rows(call)


def _filled_mask(call: Call) -> Any:
    """The mask that one value of another dtype is written by: there torch fills, and casts."""
    x, indices, values = call["self"], call["indices"], call["values"]
    dims = [d for d, t in enumerate(indices) if t is not None]
    if values.numel() != 1 or values.dtype == x.dtype or call["accumulate"] or len(dims) != 1:
        return None
    mask, rest = indices[dims[0]], x.shape[dims[0]:]
    fits = mask.dtype == torch.bool and mask.shape == rest[:mask.dim()] and values.device.type == "cpu"
    return mask if fits else None                    # else torch has the word


def writes_named(call: Call) -> bool:
    """Are rows written by a mask, more than one value or one of another dtype, or added by number?"""
    return (_masked_dim(call) is not None and call["values"].numel() != 1 or _filled_mask(call) is not None
            or grouped_mm.scatters_rows(call))


@of_values
def take_named(call: Call, run: Run) -> Any:
    """x[mask], x[index]"""
    return grouped_mm.take_rows(call, run) if _masked_dim(call) is None else _by_numbers(call, run)


@of_values
def write_named(call: Call, run: Run) -> Any:
    """x[mask] = values, or += ; x[index] += values"""
    if (mask := _filled_mask(call)) is not None:
        x, indices, values, *_ = call.full_arguments()[0]
        ones = [1] * (x.dim() - len(indices) + 1 - mask.dim())
        fill = aten.masked_fill_.Tensor if call.func._schema.is_mutable else aten.masked_fill.Tensor
        return run(fill, x, run(aten.view.default, mask, [*mask.shape, *ones]), run(aten.view.default, values, []))
    return grouped_mm.add_rows(call, run) if _masked_dim(call) is None else _by_numbers(call, run)


def _by_numbers(call: Call, run: Run) -> Any:
    dim = _masked_dim(call)
    assert dim is not None                           # which both have asked
    numbers = run(aten.select.int, run(aten.nonzero.default, call["indices"][dim]), 1, 0)
    args, _ = call.full_arguments()
    return run(call.func, args[0], [*[None] * dim, numbers], *args[2:])
