"""Assigning elements by number, of which some belong to other ranks.

Who reads no values cannot leave any out: on a GPU that would wait for it, in a graph there are none. So an element
that another rank holds is replaced by the one before it in the list, or else by the first of the rank's own. That one
is then written twice; and of those that go to one place, the last stays the last.
"""
from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def assign_own(x: Tensor, lists: dict[int, Tensor], own: Tensor, values: Tensor, in_place: bool) -> Tensor:
    """x with these values at the elements that the lists, by dim, name together, but for those that are not `own`."""
    numbers = torch.arange(len(own), device=own.device)
    before = torch.where(own, numbers, -1).cummax(0).values
    source = torch.where(before < 0, own.int().argmax(), before)
    at = [lists[d][source] if d in lists else None for d in range(max(lists) + 1)]
    kept = aten.index.Tensor(x, at)                  # what it has: for a rank to which none belongs
    write = aten.index_put_.default if in_place else aten.index_put.default
    return write(x, at, torch.where(own.any(), values.index_select(_place_of_list(lists), source), kept))


def listed(x: Tensor, dims: dict[int, Tensor], index: torch.Size, values: Tensor) -> Tensor:
    """The values for x[indices] where indices of this shape are lists: their dims as one."""
    at, rest = _place_of_list(dims), [n for d, n in enumerate(x.shape) if d not in dims]
    return values.expand(*rest[:at], *index, *rest[at:]).reshape(*rest[:at], index.numel(), *rest[at:])


def _place_of_list(dims: dict[int, Tensor]) -> int:
    """Where in x[indices] the dims of the indices are: in the place of neighbours, else first."""
    return min(dims) if max(dims) - min(dims) + 1 == len(dims) else 0
