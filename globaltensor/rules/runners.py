"""Local ops that stand in for the op itself, where a rank must do something of its own with its part.

Each takes (recipe, rank, args, kwargs) of the local call.
"""
from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def view(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """A view where the shard's strides allow it, as the global strides do; else a copy."""
    try:
        return recipe.func(*args, **kwargs)
    except RuntimeError:
        return aten.reshape.default(*args, **kwargs)


def embedding(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Rows of a cut vocabulary: a rank looks up the indices that are its own, and gives zeros for the others."""
    weight, indices, *rest = args
    first, last = recipe.boxes[0][rank][0]
    if last - first == recipe.shapes[0][0]:
        return recipe.func(*args, **kwargs)
    mine = (indices >= first) & (indices < last)
    if last == first:
        return weight.new_zeros(*indices.shape, weight.shape[1])
    rows = recipe.func(weight, torch.where(mine, indices - first, 0), *rest, **kwargs)
    return rows.masked_fill_(~mine.unsqueeze(-1), 0)
