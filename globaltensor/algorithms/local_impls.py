"""Local implementations: what runs on a rank instead of the op itself, where it depends on which part the rank has.

Each takes (recipe, rank, args, kwargs) of the local call. `recipe.regions[q][rank]` is the part that the rank has of
operand q, `recipe.shapes[q]` the operand's global shape.

Indices into a cut dim: a rank handles those that fall into its part, counted from where its part begins. For the others
it looks up some row of its own and replaces it by zeros, or adds zeros to such a row, or writes to an extra row that is
thrown away.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from globaltensor.algorithms.row_writes import assign_own, listed
from globaltensor.errors import OutOfRangeError
from globaltensor.layouts.layout import Layout, Shape, dense
from globaltensor.layouts.regions import Range, Region
from globaltensor.runtime import custom_ops
from globaltensor.runtime.dtypes import FLOAT8, SIGNED, highest_value, lowest_value
from globaltensor.runtime.graph_effects import call_effect
from globaltensor.runtime.torch_internals import OpOverload, assert_async, is_of_a_trace, order_effects

aten = torch.ops.aten


class LocalRecipe(Protocol):
    """What a local implementation reads of its recipe (dispatch/recipe.py)."""

    @property
    def func(self) -> OpOverload: ...
    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def wants(self) -> Sequence[Layout | None]: ...
    @property
    def shapes(self) -> Sequence[Shape]: ...
    @property
    def regions(self) -> Sequence[Mapping[int, Region]]: ...
    @property
    def local_impl(self) -> Callable[..., Any] | None: ...


def view(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """A view if the shard's strides allow one, as the global strides do; else a copy."""
    try:
        return recipe.func(*args, **kwargs)
    except RuntimeError:                             # the strides do not allow it
        return aten.reshape.default(*args, **kwargs)


def squeeze(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """Only dims that have size 1 in the whole tensor: a part may be 1 long where the whole is not."""
    shape = recipe.shapes[0]
    dims = range(len(shape)) if len(args) == 1 else args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    return aten.squeeze.dims(args[0], [d for d in dims if shape and shape[d] == 1])


def extremum(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """amax, amin: of an empty part, the value that any other one beats."""
    x, dim = args[0], args[1] if len(args) > 1 else []
    keepdim = len(args) > 2 and args[2]
    if x.numel():
        return recipe.func(*args, **kwargs)
    dims = {d % max(x.dim(), 1) for d in dim} or set(range(x.dim()))
    shape = [1 if i in dims else n for i, n in enumerate(x.shape) if keepdim or i not in dims]
    return x.new_full(shape, lowest_value(x.dtype) if recipe.func is aten.amax.default else highest_value(x.dtype))


def complex_pairs(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """view_as_complex: of an empty part, which kernels return with any strides, those that the op wants of pairs."""
    x = args[0]
    pairs = x if x.numel() else x.as_strided(x.shape, x.new_empty(x.shape).stride())
    return recipe.func(pairs)


def log_sigmoid(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """log_sigmoid_forward: its gradient reads the buffer on a CPU only, and other devices return an empty one."""
    out, buffer = recipe.func(*args, **kwargs)
    return out, buffer if buffer.shape == out.shape else torch.empty_like(out)


def contiguous_norm(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Of one sample, whose strides torch's check and its kernel read in different ways (channels last, or not). And of
    a gradient and an operand that lie differently, because one of them was boxed: the kernel takes them for alike."""
    n = 1 if recipe.func is aten.native_group_norm.default else 2
    alike = args[0].shape[0] > 1 and args[0].stride() == args[n - 1].stride()
    return recipe.func(*(args[:n] if alike else [t.contiguous() for t in args[:n]]), *args[n:], **kwargs)


def lstm_layer(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """mkldnn_rnn_layer: of a part of the batch its workspace, which no shape function describes, is not kept."""
    output, hy, cy, workspace = recipe.func(*args, **kwargs)
    keeps = workspace is None or _own_range(recipe, rank, 1) is None
    return output, hy, cy, workspace if keeps else workspace.new_empty(0)


def lstm_layer_backward(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """mkldnn_rnn_layer_backward, with a workspace for the same part of the batch: made once more where it is not."""
    *operands, reverse, mode, hidden, layers, biases, train, both_ways, sizes, batch_first, workspace = args
    if not workspace.numel() or _own_range(recipe, rank, 1) is not None:
        with torch.enable_grad():                    # else it leaves the workspace out
            workspace = aten.mkldnn_rnn_layer.default(*operands[:7], reverse, sizes, mode, hidden, layers, biases,
                                                      both_ways, batch_first, train)[3]
    return recipe.func(*args[:-1], workspace, **kwargs)


# ------------------------------------------------------------------------------------- indices into a rank's own part


def _own_range(recipe: LocalRecipe, rank: int, dim: int, operand: int = 0) -> Range | None:
    """Start and stop of this rank's part of a dim of an operand; None if it has all of it."""
    n, own = recipe.shapes[operand][dim], recipe.regions[operand][rank][dim]
    return None if own == (0, n) else own


def check_range(index: Tensor, n: int, what: str, *, lowest: int = 0) -> None:
    """Raises OutOfRangeError for an index that is not in [lowest, n): no rank's kernel would look for it. On a GPU it
    is an assertion of the device, as torch's own kernels make it, since reading it here would wait for the GPU. In a
    graph of torch.compile it is an op."""
    if is_of_a_trace(index):
        call_effect(custom_ops.check_range, index, n, what, lowest)
        return
    if not index.numel():
        return
    least, greatest = index.aminmax()
    if index.device.type != "cpu":
        assert_async((least >= lowest) & (greatest < n), f"{what} out of range")
    elif least < lowest or greatest >= n:
        value = int(least if least < lowest else greatest)
        raise OutOfRangeError(f"{what} {value} is out of bounds for a dim of size {n}",
                              f"the smallest that there is is {lowest}, the largest {n - 1}")


def _check_in_graph(index: Tensor, n: int, what: str, least: int) -> None:
    check_range(index, n, what, lowest=least)


custom_ops.implement(custom_ops.check_range, _check_in_graph)
custom_ops.tell_shapes(custom_ops.check_range, lambda index, n, what, least: None)
order_effects(custom_ops.check_range)


def _within(index: Tensor, own: Range, n: int) -> tuple[Tensor, Tensor]:
    """Which indices fall into the part; and all of them counted from its start, 0 for the others."""
    index = torch.where(index < 0, index + n, index)
    inside = (index >= own[0]) & (index < own[1])
    return inside, torch.where(inside, index - own[0], 0)


def _zeroed(rows: Tensor, where: Tensor) -> Tensor:
    """With zeros there, in place."""
    bits = torch.uint8 if rows.dtype in FLOAT8 else SIGNED.get(rows.dtype)
    (rows if bits is None else rows.view(bits)).masked_fill_(where, 0)
    return rows


def own_embedding(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """Rows of the rank's part of the weight, zeros for indices outside it."""
    weight, indices, *rest = args
    own = _own_range(recipe, rank, 0)
    if own is None:
        return recipe.func(*args, **kwargs)
    check_range(indices, recipe.shapes[0][0], "index")
    if own[0] == own[1]:
        return weight.new_zeros(*indices.shape, weight.shape[1])
    inside, at = _within(indices, own, recipe.shapes[0][0])
    return _zeroed(recipe.func(weight, at, *rest, **kwargs), ~inside.unsqueeze(-1))


def own_embedding_backward(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """The gradient of the rank's part of the weight."""
    grad, indices, rows, padding = args
    own = _own_range(recipe, rank, 0, 2)
    if own is None:
        return recipe.func(*args)
    if own[0] == own[1]:
        return grad.new_zeros(0, grad.shape[-1])
    inside, at = _within(indices, own, recipe.shapes[2][0])
    # Counted from where the part begins, the padding row would be another number: it is masked here instead.
    if padding >= 0:
        inside &= indices != padding
    return recipe.func(grad.masked_fill(~inside.unsqueeze(-1), 0), at, rows, -1)


def own_gather(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """Elements of the rank's part, zeros for indices outside it."""
    x, dim, index, *rest = args
    own = _own_range(recipe, rank, dim) if x.dim() else None
    if own is None:
        return recipe.func(*args, **kwargs)
    check_range(index, recipe.shapes[0][dim], "index")
    if own[0] == own[1]:
        return x.new_zeros(index.shape)
    inside, at = _within(index, own, recipe.shapes[0][dim])
    return _zeroed(recipe.func(x, dim, at, *rest, **kwargs), ~inside)


def own_index_select(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """Rows of the rank's part along `dim`, zeros for indices outside it."""
    x, dim, index = args
    own = _own_range(recipe, rank, dim) if x.dim() else None
    if own is None:
        return recipe.func(*args)
    check_range(index, recipe.shapes[0][dim], "index")
    dim %= x.dim()
    if own[0] == own[1]:
        return x.new_zeros((*x.shape[:dim], index.numel(), *x.shape[dim + 1:]))
    inside, at = _within(index.reshape(-1), own, recipe.shapes[0][dim])
    return _zeroed(recipe.func(x, dim, at), ~_with_dims(inside, x.dim() - dim - 1))


def own_index(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """x[i, :, j], along cut dims: elements of the rank's part, zeros for those outside it."""
    x, indices = args
    dims = [d for d, t in enumerate(indices) if t is not None]
    parts = _own_parts(recipe, rank, dims)
    if not parts:
        return recipe.func(*args)
    inside, at = _all_within(recipe, indices, parts)
    if any(start == stop for start, stop in parts.values()):          # zeros, in the order in memory that rows have
        size = tuple(n or 1 if d in parts else n for d, n in enumerate(x.shape))
        return recipe.func(x.new_empty_strided(size, dense(size, x.stride())).zero_(), at)
    return _zeroed(recipe.func(x, at), ~_with_dims(inside, _dims_behind(dims, x.dim())))


def _all_within(recipe: LocalRecipe, indices: list[Any], parts: dict[int, Range]) -> tuple[Tensor, list[Any]]:
    """Which elements fall into all of these parts; and the indices counted from where these start, 0 for the others."""
    at, inside = list(indices), None
    for d, own in parts.items():
        index, n = indices[d], recipe.shapes[0][d]
        if 0 not in recipe.shapes[0]:                # where there is nothing to look up, torch does not look
            check_range(index, n, "index", lowest=-n)
        within, at[d] = _within(index, own, n)
        inside = within if inside is None else inside & within
    assert inside is not None
    return inside, at


def _with_dims(mask: Tensor, n: int) -> Tensor:
    """With n more dims of size 1."""
    return mask[(..., *[None] * n)]


def own_scatter(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """scatter, scatter_add: what belongs to other ranks goes into one more row, which is then cut off."""
    x, dim, index, *rest = args
    own = _own_range(recipe, rank, dim) if x.dim() else None
    if own is None:
        return recipe.func(*args, **kwargs)
    check_range(index, recipe.shapes[0][dim], "index")
    inside, at = _within(index, own, recipe.shapes[0][dim])
    size = own[1] - own[0]
    row = list(x.shape)
    row[dim] = 1
    longer = recipe.func(torch.cat([x, x.new_zeros(row)], dim), dim, torch.where(inside, at, size), *rest, **kwargs)
    return _written(recipe, x, longer.narrow(dim, 0, size))


def own_index_add(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """Rows that belong to other ranks are added as zeros."""
    x, dim, index, source = args
    own = _own_range(recipe, rank, dim) if x.dim() else None
    if own is None:
        return recipe.func(*args, **kwargs)
    check_range(index, recipe.shapes[0][dim], "index")
    if own[0] == own[1]:
        return _written(recipe, x, x.clone())
    inside, at = _within(index, own, recipe.shapes[0][dim])
    row = [1] * source.dim()
    row[dim] = -1
    return recipe.func(x, dim, at, source.masked_fill(~inside.reshape(row), 0), **kwargs)


def own_index_put(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """x[i, :, j] += values, along cut dims: values that belong to other ranks are added as zeros. x[i, j] = values:
    those are left out."""
    x, indices, values, *accumulate = args
    dims = [i for i, t in enumerate(indices) if t is not None]
    if any(indices[d].dtype in (torch.bool, torch.uint8) for d in dims):
        return recipe.func(*args, **kwargs)
    parts = _own_parts(recipe, rank, dims)
    if not parts:
        return recipe.func(*args, **kwargs)
    inside, at = _all_within(recipe, indices, parts)
    if not any(accumulate):
        return _assigned(recipe, x, {d: at[d] for d in dims}, inside, values)
    if any(start == stop for start, stop in parts.values()):
        return _written(recipe, x, x.clone())
    own_values = torch.where(_with_dims(inside, _dims_behind(dims, x.dim())), values, values.new_zeros(()))
    return recipe.func(x, at, own_values, True)


def _dims_behind(dims: list[int], n: int) -> int:
    """How many dims of x[indices] follow those of the indices, which take the place of neighbours, or come first."""
    return n - 1 - dims[-1] if dims[-1] - dims[0] + 1 == len(dims) else n - len(dims)


def own_rows(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """index_copy, index_fill: rows that belong to other ranks are left out."""
    x, dim, index, value = args
    parts = _own_parts(recipe, rank, [dim] if x.dim() else [])
    if not parts:
        return recipe.func(*args, **kwargs)
    n = recipe.shapes[0][dim]
    copies = recipe.func in (aten.index_copy.default, aten.index_copy_.default)
    if recipe.func is aten.index_copy.default:
        x = x.contiguous()                           # as torch's result lies
    check_range(index, n, "index", lowest=0 if copies else -n)
    values = value.to(x.dtype) if isinstance(value, Tensor) else torch.tensor(value, dtype=x.dtype, device=x.device)
    (d, own), = parts.items()
    inside, at = _within(index.reshape(-1), own, n)
    return _assigned(recipe, x, {d: at}, inside, values)


def _own_parts(recipe: LocalRecipe, rank: int, dims: list[int]) -> dict[int, Range]:
    """The rank's parts of those dims of the first operand that are cut."""
    parts = {d % len(recipe.shapes[0]): _own_range(recipe, rank, d) for d in dims}
    return {d: own for d, own in parts.items() if own is not None}


def _assigned(recipe: LocalRecipe, x: Tensor, indices: dict[int, Tensor], own: Tensor, values: Tensor) -> Tensor:
    """x[indices] = values, for those elements that are the rank's own."""
    own, *whole = torch.broadcast_tensors(own, *indices.values())
    if not x.numel() or not own.numel():
        return _written(recipe, x, x.clone())
    lists = {d: t.reshape(-1) for d, t in zip(indices, whole)}
    rows = listed(x, lists, own.shape, values)
    return assign_own(x, lists, own.reshape(-1), rows, recipe.func._schema.is_mutable)


def _written(recipe: LocalRecipe, x: Tensor, value: Tensor) -> Tensor:
    """The result; of an in-place op, written into its operand."""
    return x.copy_(value) if recipe.func._schema.is_mutable else value


IGNORED = -100                                       # torch's own default of ignore_index: no class has it


def own_nll(recipe: LocalRecipe, rank: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """nll_loss forward and backward where classes are cut: targets that belong to other ranks are ignored."""
    operand, dim = _classes(recipe)
    own = _own_range(recipe, rank, dim, operand)
    if own is None:
        return recipe.func(*args, **kwargs)
    target, ignore = args[operand + 1].long(), args[operand + 4]
    if operand == 0:                                 # the loss was asked before its gradient
        wanted = target != ignore                    # how many there are is not known without values
        unknown = is_of_a_trace(target) or target.is_meta
        asked = torch.where(wanted, target, 0) if unknown else target[wanted]
        check_range(asked, recipe.shapes[0][dim], "target")
    inside = (target >= own[0]) & (target < own[1]) & (target != ignore)
    args = [*args]
    args[operand + 1], args[operand + 4] = torch.where(inside, target - own[0], IGNORED), IGNORED
    if own[0] == own[1]:
        return torch.zeros_like(args[1]) if operand else _no_loss(args[0], target, args[3])
    return recipe.func(*args, **kwargs)


def _classes(recipe: LocalRecipe) -> tuple[int, int]:
    """The operand that holds log-probabilities (the second one of a backward op), and its dim of classes."""
    operand = 1 if recipe.func in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default) else 0
    return operand, 1 if len(recipe.shapes[operand]) > 1 else 0


def _no_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """What a rank without classes adds to the loss and to the weight: nothing."""
    return x.new_zeros(target.shape if reduction == 0 and x.dim() > 1 else ()), x.new_zeros(())


# These do what the op does where no axis cuts this label.
LABEL_OF_PART: dict[Any, str] = {own_embedding: "v", own_embedding_backward: "v"}


def is_idle(recipe: LocalRecipe, args: Sequence[Any]) -> bool:
    """Would the op itself do, on every rank of this process, since nothing that it indexes is cut?"""
    impl = recipe.local_impl
    if impl in (own_embedding, own_embedding_backward):
        indexed = [(0, 0 if impl is own_embedding else 2)]
    elif impl in (own_gather, own_index_select, own_scatter, own_index_add, own_rows):
        indexed = [(args[1], 0)] if recipe.shapes[0] else []
    elif impl in (own_index, own_index_put):
        indexed = [(d, 0) for d, t in enumerate(args[1]) if t is not None]
    elif impl is own_nll:
        operand, dim = _classes(recipe)
        indexed = [(dim, operand)]
    elif impl is log_sigmoid:
        return bool(args[0].device.type == "cpu")
    elif impl is contiguous_norm:
        samples = [recipe.regions[0][rank][0] for rank in recipe.ranks]
        return all(stop - start > 1 for start, stop in samples) and not any(recipe.wants)
    else:
        return impl in (extremum, complex_pairs) and all(
            stop > start for rank in recipe.ranks for start, stop in recipe.regions[0][rank])
    return all(_own_range(recipe, rank, dim, operand) is None for rank in recipe.ranks for dim, operand in indexed)
