"""Families of indexing: looking up along a dim by the values of another tensor, and writing back.

    looked up     x[.. v ..], index[k]  ->  out[.. k ..]      linear in x
    written       x[.. v ..], index[k], source[.. k ..]  ->  out[.. v ..]

Dims that the index does not touch, and those of the index itself, can be cut freely. The dim that is indexed can be
cut where a local implementation (`local_impls.py`) lets each rank do the indices that are its own: then what is looked
up is a pending sum, to which the other ranks give zeros, and what is written stays cut.
"""
from __future__ import annotations

from dataclasses import replace

import torch

from globaltensor.rules.call import Call
from globaltensor.rules.families import Family, Shape, aligned, letters, out_shape
from globaltensor.rules.language import Rule
from globaltensor.rules.parse import rule


def embedding(call: Call) -> Rule:
    """weight[indices]. The indices lead: they are cheap to move, but where they are cut the samples are, and all that
    follows is large."""
    idx = " ".join(f"n{i}" for i in range(call.tensors[1].dim()))
    return replace(rule(f"v d, {idx} -> {idx} d", "a*B"), leads=1)


def embedding_backward(call: Call) -> Rule:
    """Rows added up, by frequency: as often as an index stands in all of them."""
    whole = "!" if call["scale_grad_by_freq"] else ""
    idx = " ".join(f"n{i}{whole}" for i in range(call.tensors[1].dim()))
    return rule(f"{idx} d, {idx} -> v! d", "a*B")


def embedding_rows(call: Call) -> Rule:
    """Our own embedding_backward: its last operand has no elements, but lies as the rows of the result shall."""
    idx = " ".join(f"n{i}" for i in range(call.tensors[1].dim()))
    return rule(f"{idx} d, {idx}, v e! -> v d", "a*B")


def _rows(call: Call, dim: str, touched: str) -> tuple[list[str], int]:
    """Labels of the first operand, `touched` for the dim that is indexed; and that dim."""
    n = call.tensors[0].dim()
    at = call[dim] % max(n, 1)
    return [touched if i == at else f"d{i}" for i in range(n)], at


def index_selected(call: Call) -> Rule:
    """index_select: a 1-d index along `dim`."""
    row, at = _rows(call, "dim", "v")
    idx = "k" if call.tensors[1].dim() else ""
    out = [(idx or "1") if i == at else x for i, x in enumerate(row)]
    return rule(f"{' '.join(row)}, {idx} -> {' '.join(out)}", "a*B")


def index_written(algebra: str, *, touched: str = "v", index: str = "k") -> Family:
    """index_add, index_copy, index_fill: rows of `source` (or one value) into the rows that a 1-d index names."""

    def write(call: Call) -> Rule:
        row, at = _rows(call, "dim", touched)
        idx = index if call.tensors[1].dim() else ""
        operands = [" ".join(row), idx]
        if len(call.tensors) > 2:
            operands.append(" ".join((index if call.tensors[1].dim() else "1") if i == at else x
                                     for i, x in enumerate(row[:call.tensors[2].dim()])))
        return rule(f"{', '.join(operands)} -> {' '.join(row)}", algebra)

    return write


def _along_index(call: Call, touched: str, index: str) -> tuple[str, str, str]:
    """Labels of x, index and source for gather and scatter, where the index has as many dims as x and may be shorter.

    Only dims of one size on all of them flow through.
    """
    row, at = _rows(call, "dim", touched)
    shapes = call.shapes
    same = [len({s[i] for s in shapes if len(s) == len(shapes[0])}) == 1 for i in range(len(row))]
    sides = []
    for name in ("x", index, "s"):
        dims = []
        for i, x in enumerate(row):
            if i != at:
                dims.append(x if same[i] else f"{name.rstrip('!')}{i}!")
            elif name == "x":
                dims.append(x)
            elif name == "s" and len(shapes) > 2 and shapes[2][i] != shapes[1][i]:
                dims.append("s!")
            else:
                dims.append(index)
        sides.append(" ".join(dims))
    return sides[0], sides[1], sides[2]


def gathered(call: Call) -> Rule:
    x, index, _ = _along_index(call, "v", "k")
    return rule(f"{x}, {index} -> {index}", "a*B")


def scattered(algebra: str, *, touched: str = "v", index: str = "k!") -> Family:
    """scatter and its kin; an index that is cut leaves a sum, so only scatter_add allows it."""

    def write(call: Call) -> Rule:
        shapes = call.shapes
        short = len(shapes) > 2 and shapes[2] != shapes[1]   # the source is longer than the index
        x, idx, source = _along_index(call, touched, "k!" if short else index)
        operands = [x, idx] + ([source] if len(call.tensors) > 2 else [])
        return rule(f"{', '.join(operands)} -> {x}", algebra)

    return write


def _by_zero(call: Call, algebra: str) -> str:
    """Linear where the int 0 is written."""
    return algebra if type(call["value"]) is int and call["value"] == 0 else algebra.upper()


def scattered_value(call: Call) -> Rule:
    return scattered(_by_zero(call, "a*B"))(call)


def index_filled(call: Call) -> Rule:
    return index_written(_by_zero(call, "a*B"), touched="v!", index="k!")(call)


def _indexed_dims(call: Call) -> list[int]:
    return [i for i, t in enumerate(call["indices"]) if t is not None]


def _places(call: Call, stay: str = "") -> tuple[list[str], list[str], list[str], Shape]:
    """Labels of x, of each index and of x[indices], and the shape of that; `stay` "!" keeps what is indexed whole.

    The dims of the indices come where the first of them stands if the indexed dims are neighbours, else first.
    """
    where, shape = _indexed_dims(call), call.shapes[0]
    shapes = call.shapes[1:1 + len(where)]
    idx = out_shape(shapes)
    x = [(f"v{stay}" if len(where) == 1 else f"d{i}!") if i in where else f"d{i}" for i in range(len(shape))]
    labels = [f"k{i}{stay}" for i in range(len(idx))]
    first = where[0] if where and where[-1] - where[0] + 1 == len(where) else 0
    rest = [i for i in range(len(shape)) if i not in where]
    out = [x[i] for i in rest[:first]] + labels + [x[i] for i in rest[first:]]
    size = (*(shape[i] for i in rest[:first]), *idx, *(shape[i] for i in rest[first:]))
    return x, [aligned(s, idx, labels) for s in shapes], out, size


def indexed(call: Call) -> Rule:
    """x[i, :, j] by integers. (What a mask selects is known only when it runs, on all-B.)"""
    x, indices, out, _ = _places(call)
    return rule(f"{', '.join([' '.join(x), *indices])} -> {' '.join(out)}", letters("a", len(indices)))


def index_put(call: Call) -> Rule:
    """x[i, :, j] = values, or += where they accumulate; x[mask] = value."""
    if any(t.dtype in (torch.bool, torch.uint8) for t in call.tensors[1:-1]):
        return _masked_put(call)
    x, indices, out, size = _places(call, "" if call["accumulate"] else "!")
    values = aligned(call.shapes[-1], size, out)
    return rule(f"{', '.join([' '.join(x), *indices, values])} -> {' '.join(x)}", _put_algebra(call))


def _put_algebra(call: Call) -> str:
    """a where it is not written to, plus the values; or plus all of a."""
    last = len(call.tensors) - 1
    inner = "*".join(chr(ord("A") + q) for q in range(1, last))
    values = f"{inner}*{chr(ord('a') + last)}"
    return f"a+{values}" if call["accumulate"] else f"a*{inner}+{values}"


def _masked_put(call: Call) -> Rule:
    """One mask and one value go element by element; of anything else nothing is cut."""
    where, n = _indexed_dims(call), call.tensors[0].dim()
    if len(where) == 1 and call.tensors[-1].numel() == 1:
        x = [f"d{i}" for i in range(n)]
        mask = x[where[0]:where[0] + call.tensors[1].dim()]
        ones = " ".join("1" * call.tensors[-1].dim())
        return rule(f"{' '.join(x)}, {' '.join(mask)}, {ones} -> {' '.join(x)}", _put_algebra(call))
    operands = [" ".join(f"{chr(ord('a') + q)}{i}!" for i in range(t.dim())) for q, t in enumerate(call.tensors)]
    return rule(f"{', '.join(operands)} -> {operands[0]}", _put_algebra(call))
