"""searchsorted and bucketize of sorted rows of floats that are split: nan in them counts as for the whole.

What the parts of a row count adds up, of numbers. But torch's binary search takes nan, which sorting puts last, for
less than all where it comes upon one; then all of the row counts as less. It goes by the middle of what is left, so it
comes upon nan where the value is above the last number among the row's middle, the middle of the half behind it, and so
on. These few are boxed; all elements above the greatest of them are taken for equal to it, and no part has a nan.
(Where all of them are nan, all elements are taken for that.)
"""
from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from globaltensor.algorithms.decompositions import sbps_of_several
from globaltensor.algorithms.run import Run
from globaltensor.layouts.global_like import is_global
from globaltensor.rules.call import Call

aten = torch.ops.aten


def _place_of_row(call: Call) -> str:
    return "boundaries" if "boundaries" in call.values else "sorted_sequence"


def searches_split_floats(call: Call) -> bool:
    """May ranks search parts of a row that has nan? One with a sorter stays whole."""
    row = call[_place_of_row(call)]
    return (is_global(row) and row.dtype.is_floating_point and row.dim() > 0 and row.shape[-1] > 0
            and call.get("sorter") is None
            and any(s.is_partial or s.is_split and s.dim == row.dim() - 1 for s in sbps_of_several(row.spec.layout)))


def search_without_nan(call: Call, run: Run) -> Any:
    """The search, of a row without nan that gives the same."""
    place = _place_of_row(call)
    row = call[place]
    n = int(row.shape[-1])
    middles = [n // 2]
    while middles[-1] < n - 1:
        middles.append((middles[-1] + 1 + n) // 2)
    few = run(aten.index_select.default, row, -1, torch.tensor(middles, device=row.device))
    few, = run.redistribute([few], [few.spec.layout.replicated], str(call.func))
    last = reduce(lambda a, b: run(aten.fmax.default, a, b),
                  [run(aten.slice.Tensor, few, -1, k, k + 1) for k in range(len(middles))])
    args, kwargs = call.full_arguments()
    at = call.position(place)
    assert isinstance(at, int)                       # both ops take it by position
    # the second one gives nan throughout where all of those few are
    args[at] = run(aten.minimum.default, run(aten.fmin.default, row, last), last)
    return run.plain(Call(call.func, args, kwargs))
