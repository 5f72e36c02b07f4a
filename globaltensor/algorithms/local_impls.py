"""Local ops that stand in for the op itself, where a rank must do something of its own with its part.

Each takes (recipe, rank, args, kwargs) of the local call. `recipe.regions[q][rank]` is the part that the rank has of
operand q, `recipe.shapes[q]` the operand's global shape.

Indices into a cut dim: a rank does those that fall into its part, shifted to where its part begins. For the others
it looks up a row that it has and puts zeros in its place, or adds zeros to such a row, or writes to a row that it
throws away.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def view(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """A view where the shard's strides allow it, as the global strides do; else a copy."""
    try:
        return recipe.func(*args, **kwargs)
    except RuntimeError:
        return aten.reshape.default(*args, **kwargs)


def resolved(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """conj() without the lazy bit: below the Python dispatch key, kernels do not look at it."""
    return torch.conj_physical(args[0]) if recipe.func is aten._conj.default else torch.neg(args[0])


def squeeze(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """Only the dims that have size 1 in the whole tensor: a part may be 1 long where the whole is not."""
    shape = recipe.shapes[0]
    dims = range(len(shape)) if len(args) == 1 else args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    return aten.squeeze.dims(args[0], [d for d in dims if shape and shape[d] == 1])


def extremum(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """amax, amin: of nothing, the value that any other one beats."""
    x, dim = args[0], args[1] if len(args) > 1 else []
    keepdim = len(args) > 2 and args[2]
    if x.numel():
        return recipe.func(*args, **kwargs)
    dims = {d % max(x.dim(), 1) for d in dim} or set(range(x.dim()))
    shape = [1 if i in dims else n for i, n in enumerate(x.shape) if keepdim or i not in dims]
    return x.new_full(shape, least(x.dtype) if recipe.func is aten.amax.default else most(x.dtype))


def least(dtype: torch.dtype) -> float | int:
    """The value that every other one is larger than."""
    return -torch.inf if dtype.is_floating_point else 0 if dtype == torch.bool else torch.iinfo(dtype).min


def most(dtype: torch.dtype) -> float | int:
    """The value that every other one is smaller than."""
    return torch.inf if dtype.is_floating_point else 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _own(recipe: Any, rank: int, dim: int, operand: int = 0) -> tuple[int, int] | None:
    """Start and stop of this rank's part of a dim of an operand; None where it has all of it."""
    n, part = recipe.shapes[operand][dim], recipe.regions[operand][rank][dim]
    return None if part == (0, n) else part


def _mine(index: Tensor, part: tuple[int, int], n: int) -> tuple[Tensor, Tensor]:
    """Which indices fall into the part, and the indices within it, 0 for the others."""
    index = torch.where(index < 0, index + n, index)
    mine = (index >= part[0]) & (index < part[1])
    return mine, torch.where(mine, index - part[0], 0)


def embedding(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    weight, indices, *rest = args
    part = _own(recipe, rank, 0)
    if part is None:
        return recipe.func(*args, **kwargs)
    if part[0] == part[1]:
        return weight.new_zeros(*indices.shape, weight.shape[1])
    mine, at = _mine(indices, part, recipe.shapes[0][0])
    return recipe.func(weight, at, *rest, **kwargs).masked_fill_(~mine.unsqueeze(-1), 0)


def embedding_backward(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """The gradient of this rank's rows."""
    grad, indices, rows, padding = args
    part = _own(recipe, rank, 0, 2)
    if part is None:
        return recipe.func(*args)
    if part[0] == part[1]:
        return grad.new_zeros(0, grad.shape[-1])
    mine, at = _mine(indices, part, recipe.shapes[2][0])
    if padding >= 0:
        mine &= indices != padding
    return recipe.func(grad.masked_fill(~mine.unsqueeze(-1), 0), at, rows, -1)


def gather(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, dim, index, *rest = args
    part = _own(recipe, rank, dim) if x.dim() else None
    if part is None:
        return recipe.func(*args, **kwargs)
    if part[0] == part[1]:
        return x.new_zeros(index.shape)
    mine, at = _mine(index, part, recipe.shapes[0][dim])
    return recipe.func(x, dim, at, *rest, **kwargs).masked_fill_(~mine, 0)


def index_select(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, dim, index = args
    part = _own(recipe, rank, dim) if x.dim() else None
    return recipe.func(*args) if part is None else _lookup(x, dim % x.dim(), index, part, recipe.shapes[0][dim])


def index(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """x[:, i]: by one index, where it stands along a cut dim."""
    x, indices = args
    where = [i for i, t in enumerate(indices) if t is not None]
    part = _own(recipe, rank, where[0]) if len(where) == 1 else None
    if part is None:
        return recipe.func(*args)
    return _lookup(x, where[0], indices[where[0]], part, recipe.shapes[0][where[0]])


def _lookup(x: Tensor, dim: int, index: Tensor, part: tuple[int, int], n: int) -> Tensor:
    """x[:, index] with zeros for the indices outside the part."""
    if part[0] == part[1]:
        return x.new_zeros(*x.shape[:dim], *index.shape, *x.shape[dim + 1:])
    mine, at = _mine(index, part, n)
    found = x[(slice(None),) * dim + (at,)]
    return found.masked_fill_(~mine.view(*mine.shape, *[1] * (x.dim() - dim - 1)), 0)


def scatter(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """scatter, scatter_add: what others write goes into one more row, which is then cut off."""
    x, dim, index, *rest = args
    part = _own(recipe, rank, dim) if x.dim() else None
    if part is None:
        return recipe.func(*args, **kwargs)
    mine, at = _mine(index, part, recipe.shapes[0][dim])
    size = part[1] - part[0]
    row = list(x.shape)
    row[dim] = 1
    made = recipe.func(torch.cat([x, x.new_zeros(row)], dim), dim, torch.where(mine, at, size), *rest, **kwargs)
    return _returned(recipe, x, made.narrow(dim, 0, size))


def index_add(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """Rows of others are added as zeros."""
    x, dim, index, source = args
    part = _own(recipe, rank, dim) if x.dim() else None
    if part is None:
        return recipe.func(*args, **kwargs)
    if part[0] == part[1]:
        return _returned(recipe, x, x.clone())
    mine, at = _mine(index, part, recipe.shapes[0][dim])
    row = [1] * source.dim()
    row[dim] = -1
    return recipe.func(x, dim, at, source.masked_fill(~mine.reshape(row), 0), **kwargs)


def index_put(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """x[:, i] += values, where one index stands along a cut dim: values for others are added as zeros."""
    x, indices, values, *_ = args
    where = [i for i, t in enumerate(indices) if t is not None]
    part = _own(recipe, rank, where[0]) if len(where) == 1 and indices[where[0]].dtype != torch.bool else None
    if part is None:
        return recipe.func(*args, **kwargs)
    if part[0] == part[1]:
        return _returned(recipe, x, x.clone())
    dim, given = where[0], indices[where[0]]
    mine, at = _mine(given, part, recipe.shapes[0][dim])
    mine = mine.view(*mine.shape, *[1] * (x.dim() - dim - 1))
    return recipe.func(x, [*indices[:dim], at, *indices[dim + 1:]], torch.where(mine, values, 0), True)


def _returned(recipe: Any, x: Tensor, value: Tensor) -> Tensor:
    """The result, written into the operand by an in-place op."""
    return x.copy_(value) if recipe.func._schema.is_mutable else value


IGNORED = -100


def nll(recipe: Any, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """nll_loss forward and backward where classes are cut: targets of other ranks are ignored."""
    at = 1 if recipe.func in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default) else 0
    classes = recipe.regions[at][rank][1 if len(recipe.shapes[at]) > 1 else 0]
    n = recipe.shapes[at][1 if len(recipe.shapes[at]) > 1 else 0]
    if classes == (0, n):
        return recipe.func(*args, **kwargs)
    target, ignore = args[at + 1].long(), args[at + 4]
    mine = (target >= classes[0]) & (target < classes[1]) & (target != ignore)
    args = [*args]
    args[at + 1], args[at + 4] = torch.where(mine, target - classes[0], IGNORED), IGNORED
    if classes[0] == classes[1]:
        return torch.zeros_like(args[1]) if at else _no_loss(args[0], target, args[3])
    return recipe.func(*args, **kwargs)


def _no_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """What a rank without classes adds: nothing."""
    return x.new_zeros(target.shape if reduction == 0 else ()), x.new_zeros(())


_BY_DIM = {gather: 0, index_select: 0, scatter: 0, index_add: 0}


def idle(recipe: Any, args: tuple) -> bool:
    """Does the op itself do on every rank driven here, since nothing that it looks up is cut?"""
    local_impl = recipe.local_impl
    if local_impl in (embedding, embedding_backward):
        return all(_own(recipe, rank, 0, 0 if local_impl is embedding else 2) is None for rank in recipe.ranks)
    if local_impl in _BY_DIM:
        return not recipe.shapes[0] or all(_own(recipe, rank, args[1]) is None for rank in recipe.ranks)
    if local_impl in (index, index_put):
        where = [i for i, t in enumerate(args[1]) if t is not None]
        return len(where) != 1 or all(_own(recipe, rank, where[0]) is None for rank in recipe.ranks)
    if local_impl is nll:
        at = 1 if recipe.func in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default) else 0
        return all(_own(recipe, rank, 1 if len(recipe.shapes[at]) > 1 else 0, at) is None for rank in recipe.ranks)
    if local_impl is extremum:
        return all(b > a for rank in recipe.ranks for a, b in recipe.regions[0][rank])
    return False
