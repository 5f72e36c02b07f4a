"""Families of indexing: looking up along a dim by the values of another tensor, and writing back.

    looked up     x[.. v ..], index[k]  ->  out[.. k ..]      linear in x
    written       x[.. v ..], index[k], source[.. k ..]  ->  out[.. v ..]

Dims that the index does not touch, and those of the index itself, can be cut freely. The dim that is indexed can be
cut if the op has a local implementation (`algorithms/local_impls.py`) with which each rank handles the indices into its
own part: then a look-up is a pending sum, to which the other ranks add zeros, and what is written stays cut.
"""
from __future__ import annotations

from dataclasses import replace

import torch

from globaltensor.layouts.layout import Shape
from globaltensor.rules.call import Call
from globaltensor.rules.families import (
    Family,
    broadcast_labels,
    broadcast_shape,
    keeps_sums,
    regardless_of_size,
    with_nonlinear,
)
from globaltensor.rules.language import Rule
from globaltensor.rules.parse import rule


@regardless_of_size
def embedded(call: Call) -> Rule:
    """weight[indices]. The indices lead: to gather them would be cheap, but what follows from them is large, and should
    stay cut as they are."""
    idx = " ".join(f"n{i}" for i in range(call.tensors[1].dim()))
    return replace(rule(f"v d, {idx} -> {idx} d", "a*B"), leads=1)


@regardless_of_size
def embedded_backward(call: Call) -> Rule:
    """The gradient's rows added up per index. Scaled by frequency, an index must be counted in all of them."""
    # The rows stay whole (v!): a number alone tells the op how many there are, so a rank cannot be told which are its
    # own.
    whole = "!" if call["scale_grad_by_freq"] else ""
    idx = " ".join(f"n{i}{whole}" for i in range(call.tensors[1].dim()))
    return rule(f"{idx} d, {idx} -> v! d", "a*B")


@regardless_of_size
def embedded_backward_rows(call: Call) -> Rule:
    """globaltensor::embedding_backward: its last operand, [v, 0], only says how the result shall be laid out."""
    idx = " ".join(f"n{i}" for i in range(call.tensors[1].dim()))
    return rule(f"{idx} d, {idx}, v e! -> v d", "a*B")


def _labels_along(call: Call, dim: str, touched: str) -> tuple[list[str], int]:
    """Labels of the first operand, `touched` for the dim that argument `dim` indexes; and that dim."""
    n = call.tensors[0].dim()
    at = call[dim] % max(n, 1)
    return [touched if i == at else f"d{i}" for i in range(n)], at


def index_selected(call: Call) -> Rule:
    """index_select: a 1-d index along `dim`."""
    row, at = _labels_along(call, "dim", "v")
    idx = "k" if call.tensors[1].dim() else ""
    if not row:                                      # of a tensor without dims
        return rule(f", {idx and 'k!'} -> ", "a*B")
    out = [(idx or "1") if i == at else x for i, x in enumerate(row)]
    return rule(f"{' '.join(row)}, {idx} -> {' '.join(out)}", "a*B")


def index_written(algebra: str, *, touched: str = "v", index: str = "k") -> Family:
    """index_add, index_copy, index_fill: rows of `source` (or one value) into the rows that a 1-d index names."""

    def write(call: Call) -> Rule:
        row, at = _labels_along(call, "dim", touched)
        idx = index if call.tensors[1].dim() else ""
        if not row:                                  # into a tensor without dims
            idx = idx and "k!"
        operands = [" ".join(row), idx]
        if len(call.tensors) > 2:
            operands.append(" ".join((index if call.tensors[1].dim() else "1") if i == at else x
                                     for i, x in enumerate(row[:call.tensors[2].dim()])))
        linear = all(keeps_sums(t.dtype, call.tensors[0].dtype) for t in call.tensors[2:])       # index_fill casts
        return rule(f"{', '.join(operands)} -> {' '.join(row)}", algebra if linear else "")

    return write


def _along_index(call: Call, touched: str, index: str) -> tuple[str, str, str]:
    """Labels of x, index and source of gather and scatter, where the index has as many dims as x and may be shorter.

    A dim flows through only if all of them have the same size there: else parts of the one are not parts of the other.
    """
    row, at = _labels_along(call, "dim", touched)
    shapes = call.shapes
    if len({len(s) for s in shapes}) > 1:            # torch takes 0-dim operands beside those of one dim
        x, k, s, *_ = [name if shape else "" for name, shape in zip(("v!", "k!", "s!"), (*shapes, ()))]
        return x, k, s
    same = [all(s[i] == shapes[0][i] for s in shapes) for i in range(len(row))]
    sides = []
    for name in ("x", index, "s"):
        dims = []
        for i, x in enumerate(row):
            if i != at:
                dims.append(x if same[i] else f"{name.rstrip('!')}{i}!")
            elif name == "x":
                dims.append(x)
            elif name == "s" and len(shapes) > 2 and shapes[2][i] != shapes[1][i]:
                dims.append("s!")                    # the source is longer: where both are cut, parts would not match
            else:
                dims.append(index)
        sides.append(" ".join(dims))
    return sides[0], sides[1], sides[2]


def gathered(call: Call) -> Rule:
    x, index, _ = _along_index(call, "v", "k")
    return rule(f"{x}, {index} -> {index}", "a*B")


def scattered(algebra: str, *, touched: str = "v", index: str = "k!") -> Family:
    """scatter and similar ops; an index that is cut leaves a sum, so only scatter_add allows it."""

    def write(call: Call) -> Rule:
        shapes = call.shapes
        short = len(shapes) > 2 and shapes[2] != shapes[1]   # the source is longer than the index
        x, idx, source = _along_index(call, touched, "k!" if short else index)
        operands = [x, idx] + ([source] if len(call.tensors) > 2 else [])
        return rule(f"{', '.join(operands)} -> {x}", algebra)

    return write


def _combined(call: Call) -> tuple[str, str, str]:
    """How what is written is combined with what there is: the algebra, what an index that is cut leaves, and the
    index's label. The target counts once in a sum, and may count often in a maximum. To leave it out where something is
    written, and to divide by how much is, a rank must know the whole index."""
    how, of, source = call["reduce"], call.tensors[0].dtype, "c" if len(call.tensors) > 2 else ""
    with_self = call.get("include_self", True)
    if how in ("amax", "amin") and with_self:
        return "", how[1:], "k"
    if of != torch.bool and how in ("sum", "add") and with_self:
        return f"a+B*{source}" if source else "a+B", "sum", "k"
    if of != torch.bool and how in ("sum", "add") or how == "mean" and (of.is_floating_point or of.is_complex):
        return f"a*B+B*{source}", "sum", "k!"
    return ("a*B*C" if source else "a*B") if with_self and how in ("prod", "multiply") else "", "sum", "k!"


def scatter_reduced(call: Call) -> Rule:
    """scatter_reduce, and scatter of a tensor or a number with a `reduce`."""
    algebra, leaves, index = _combined(call)
    return replace(scattered(algebra, index=index)(call), leaves=leaves)


def index_reduced(call: Call) -> Rule:
    algebra, leaves, index = _combined(call)
    return replace(index_written(algebra, index=index)(call), leaves=leaves)


def put_flat(call: Call) -> Rule:
    """put: elements named by their numbers in the whole tensor."""
    x, index, source = call.shapes
    whole = "" if index == source and call["accumulate"] else "!"
    parts = [" ".join(f"{name}{i}{whole}" for i in range(len(own))) for name, own in
             (("k", index), ("k" if not whole else "s", source))]
    target = " ".join(f"d{i}!" for i in range(len(x)))
    return rule(f"{target}, {', '.join(parts)} -> {target}", "a+B*c" if call["accumulate"] else "a*B+B*c")


def _by_zero(call: Call, algebra: str) -> str:
    """Linear where the int 0 is written."""
    return algebra if type(call["value"]) is int and call["value"] == 0 else algebra.upper()


def scattered_value(call: Call) -> Rule:
    return scattered(_by_zero(call, "a*B"))(call)


def index_filled(call: Call) -> Rule:
    # The index is whole, unlike index_add's: a rank that has a part of it would know nothing of what others write.
    return index_written(_by_zero(call, "a*B"), index="k!")(call)


def _indexed_dims(call: Call) -> list[int]:
    return [i for i, t in enumerate(call["indices"]) if t is not None]


def _index_labels(call: Call, assigns: bool = False) -> tuple[list[str], list[str], list[str], Shape]:
    """Labels of x, of each index and of x[indices], and the shape of that. Who `assigns` needs whole indices.

    As in numpy, the dims of the indices replace the indexed ones if these are neighbours, and else come first.
    """
    where, shape = _indexed_dims(call), call.shapes[0]
    shapes = call.shapes[1:1 + len(where)]
    idx = broadcast_shape(shapes)
    # Several indices name an element together: a rank looks up, or writes, those of which it holds all dims.
    x = [("v" if len(where) == 1 else f"v{i}") if i in where else f"d{i}" for i in range(len(shape))]
    labels = [f"k{i}!" if assigns else f"k{i}" for i in range(len(idx))]
    first = where[0] if where and where[-1] - where[0] + 1 == len(where) else 0
    rest = [i for i in range(len(shape)) if i not in where]
    out = [x[i] for i in rest[:first]] + labels + [x[i] for i in rest[first:]]
    size = (*(shape[i] for i in rest[:first]), *idx, *(shape[i] for i in rest[first:]))
    return x, [broadcast_labels(s, idx, labels) for s in shapes], out, size


def indexed(call: Call) -> Rule:
    """x[i, :, j] by integers. (What a mask selects is known only when it runs, on all-B.)"""
    x, indices, out, _ = _index_labels(call)
    return rule(f"{', '.join([' '.join(x), *indices])} -> {' '.join(out)}", with_nonlinear("a", len(indices)))


def index_assigned(call: Call) -> Rule:
    """x[i, :, j] = values, or += where they accumulate; x[mask] = value."""
    if any(t.dtype in (torch.bool, torch.uint8) for t in call.tensors[1:-1]):
        return _masked_put(call)
    x, indices, out, size = _index_labels(call, not call["accumulate"])
    values = broadcast_labels(call.shapes[-1], size, out)
    return rule(f"{', '.join([' '.join(x), *indices, values])} -> {' '.join(x)}", _put_algebra(call))


def _put_algebra(call: Call) -> str:
    """The values, plus a: all of it if they accumulate, else where the indices do not point."""
    last = len(call.tensors) - 1
    indices = [chr(ord("A") + q) for q in range(1, last)]
    values = "*".join([*indices, chr(ord("a") + last)])
    if call["accumulate"]:
        return f"a+{values}"
    return f"{'*'.join(['a', *indices])}+{values}" if indices else values


def _masked_put(call: Call) -> Rule:
    """One mask and one value: element by element. In any other form nothing is cut."""
    where, n = _indexed_dims(call), call.tensors[0].dim()
    if len(where) == 1 and call.tensors[-1].numel() == 1:
        x = [f"d{i}" for i in range(n)]
        mask = x[where[0]:where[0] + call.tensors[1].dim()]
        ones = " ".join("1" * call.tensors[-1].dim())
        return rule(f"{' '.join(x)}, {' '.join(mask)}, {ones} -> {' '.join(x)}", _put_algebra(call))
    operands = [" ".join(f"{chr(ord('a') + q)}{i}!" for i in range(t.dim())) for q, t in enumerate(call.tensors)]
    return rule(f"{', '.join(operands)} -> {operands[0]}", _put_algebra(call))
