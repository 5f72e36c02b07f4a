"""Families of views and of ops that only move elements: which dim of the operand becomes which of the result.

Where dims are merged or split, elements keep their order: a part along the outermost label of a group is a part on both
sides, provided the cut is even; and a part of such a part along the next label, where that has one element of the
first. A dim that is sliced, flipped, padded or concatenated stays whole.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd, prod
from sys import maxsize

from globaltensor.layouts.layout import Shape
from globaltensor.layouts.symbols import has_symbols, surely_equal
from globaltensor.rules.call import Call
from globaltensor.rules.families import Family, dim_labels, dims_of, keeps_sums, regardless_of_size
from globaltensor.rules.language import Rule
from globaltensor.rules.parse import rule


def permuted(order: Callable[[Call, int], list[int]]) -> Family:
    """Output dim i is input dim order[i]."""

    def write(call: Call) -> Rule:
        n = call.tensors[0].dim()
        return rule(f"{' '.join(dim_labels(n))} -> {' '.join(f'd{i}' for i in order(call, n))}", "a")

    return regardless_of_size(write)


def swapped(call: Call, n: int) -> list[int]:
    """The order of `transpose(dim0, dim1)`; of `t()` where there are no dims."""
    order = list(range(n))
    if n:
        i, j = (call.get("dim0", 0) % n, call.get("dim1", 1) % n) if n > 1 else (0, 0)  # t() of a vector is the vector
        order[i], order[j] = order[j], order[i]
    return order


def grouped(src: Shape, dst: Shape) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of dims of src and dst that hold the same elements, for a view from src to dst."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(src) or j < len(dst):
        a, b = [i] if i < len(src) else [], [j] if j < len(dst) else []
        i, j = i + len(a), j + len(b)
        while (m := prod(src[k] for k in a)) != (n := prod(dst[k] for k in b)):
            if m < n and i < len(src):
                a.append(i)
                i += 1
            elif j < len(dst):
                b.append(j)
                j += 1
            else:
                return [(list(range(len(src))), list(range(len(dst))))]      # sizes of 0 match anything: one group
        groups.append((a, b))
    return groups


def reshaped(src: Shape, dst: Shape) -> Rule:
    """The rule of a view: within a group the outermost dim that is longer than 1 can be cut, evenly; once its parts are
    one element long, the next one."""
    lhs, rhs, even = ["1"] * len(src), ["1"] * len(dst), []
    if 0 in src:
        # Without elements, sizes do not tell which dim has become which: nothing flows through but by the identity.
        groups = [([i], [j]) for i, j in zip(range(len(src)), range(len(dst)))] if src == dst else []
    else:
        groups = grouped(src, dst)
    for g, (a, b) in enumerate(groups):
        if len(a) > 1 or len(b) > 1:                 # dims of size 1 hold no order: only the others matter
            a, b = [k for k in a if src[k] != 1], [k for k in b if dst[k] != 1]
        if not a or not b:
            continue
        if len(a) == len(b) == 1:
            lhs[a[0]] = rhs[b[0]] = f"g{g}"
            continue
        shared = _shared_sizes([src[k] for k in a], [dst[k] for k in b])
        labels = [(f"g{g}.{i}", n) for i, n in enumerate(shared)]
        even += labels
        for side, group, shape, rest in ((lhs, a, src, "s"), (rhs, b, dst, "t")):
            left = list(labels)
            for k in group:
                side[k] = _dim_of(left, shape[k], f"{rest}{g}.{k}")
    return replace(rule(f"{' '.join(lhs)} -> {' '.join(rhs)}", "a"), even=tuple(even))


def _shared_sizes(src: list[int], dst: list[int]) -> list[int]:
    """The sizes of the labels that both sides are made of, outermost first, as far as they go: each the largest that
    divides what is left of the outermost dims of both."""
    a, b = list(reversed(src)), list(reversed(dst))
    shared = []
    while a and b and (n := _common(a[-1], b[-1])) > 1:
        shared.append(n)
        for side in (a, b):
            side[-1] //= n
            if side[-1] == 1:
                side.pop()
    return shared


def _common(m: int, n: int) -> int:
    """What divides both, the largest there is; of symbols, one of them where it divides the other."""
    if not has_symbols((m, n)):
        return gcd(m, n)
    return n if m % n == 0 else m if n % m == 0 else gcd(int(m), int(n))


def _dim_of(left: list[tuple[str, int]], size: int, rest: str) -> str:
    """The text of a dim of that size: the first of the labels that are left, and what they do not hold, `rest`."""
    names = []
    while left and size % left[0][1] == 0:
        name, n = left.pop(0)
        names.append(name)
        size //= n
    if not names:
        return f"{rest}!"
    return f"({' '.join([*names, rest] if size > 1 else names)})"


def viewed(call: Call) -> Rule:
    """view, reshape, _unsafe_view: one of the sizes may be -1."""
    src = tuple(call.tensors[0].shape)
    size = list(call.get("size") if call.get("size") is not None else call["shape"])
    if -1 in size:
        rest = prod(n for n in size if n != -1)
        size[size.index(-1)] = prod(src) // rest if rest else 0
    return reshaped(src, tuple(size))


def expanded(call: Call) -> Rule:
    """expand to `size`: a repeated dim is whole in operand and result."""
    src = tuple(call.tensors[0].shape)
    first = len(call["size"]) - len(src)
    size = [src[i - first] if n == -1 else n for i, n in enumerate(call["size"])]
    lhs = ["1" if src[i] == 1 and size[first + i] != 1 else f"d{first + i}" for i in range(len(src))]
    rhs = [f"e{i}!" if i < first or lhs[i - first] == "1" else f"d{i}" for i in range(len(size))]
    return rule(f"{' '.join(lhs)} -> {' '.join(rhs)}", "a")


@regardless_of_size
def unsqueezed(call: Call) -> Rule:
    """unsqueeze: a dim of size 1 more."""
    n = call.tensors[0].dim()
    rhs = dim_labels(n)
    rhs.insert(call["dim"] % (n + 1), "1")
    return rule(f"{' '.join(dim_labels(n))} -> {' '.join(rhs)}", "a")


def squeezed(call: Call) -> Rule:
    """squeeze: dims of size 1 go; with `dim`, those of them alone."""
    shape = call.shapes[0]
    dims = dims_of(call, len(shape)) if "dim" in call.values else range(len(shape))
    gone = {d for d in dims if len(shape) and shape[d] == 1}
    lhs = ["1" if i in gone else f"d{i}" for i in range(len(shape))]
    return rule(f"{' '.join(lhs)} -> {' '.join(x for i, x in enumerate(lhs) if i not in gone)}", "a")


@regardless_of_size
def selected(call: Call) -> Rule:
    """One index of a dim: that dim stays whole."""
    n = call.tensors[0].dim()
    dim = call["dim"] % n if n else 0
    lhs = [f"d{i}!" if i == dim else f"d{i}" for i in range(n)]
    return rule(f"{' '.join(lhs)} -> {' '.join(x for i, x in enumerate(lhs) if i != dim)}", "a")


def changes(shape: Shape, out: Shape, outputs: int = 1) -> Rule:
    """Dims whose size changes stay whole; the others flow through."""
    lhs = " ".join(f"d{i}" if a == b else f"d{i}!" for i, (a, b) in enumerate(zip(shape, out)))
    rhs = " ".join(f"d{i}" if a == b else f"o{i}!" for i, (a, b) in enumerate(zip(shape, out)))
    return rule(f"{lhs} -> {', '.join([rhs] * outputs)}", "; ".join(["a"] * outputs))


def sliced(call: Call) -> Rule:
    """slice: a slice of all of a dim leaves it free to be cut."""
    shape = list(call.shapes[0])
    dim = call["dim"] % len(shape)
    start, end, step = call["start"] or 0, call["end"], call["step"]
    if has_symbols((start, end, shape[dim])):        # of all of a dim where that is sure; a part may be all of it, too
        if start == 0 and step == 1 and (end is None or end == maxsize or surely_equal(end, shape[dim])):
            return changes(tuple(shape), tuple(shape))
        return changes(tuple(shape), (*shape[:dim], -1, *shape[dim + 1:]))
    size = len(range(*slice(start, end, step).indices(shape[dim])))
    out = list(shape)
    out[dim] = size
    return changes(tuple(shape), tuple(out))


@regardless_of_size
def padded(call: Call) -> Rule:
    """constant_pad_nd: pads come in pairs from the last dim backwards; linear only when padding with the int 0."""
    shape, pad = call.shapes[0], call["pad"]
    touched = {len(shape) - 1 - k // 2 for k, n in enumerate(pad) if n}
    linear = changes(shape, tuple(n + (i in touched) for i, n in enumerate(shape)))   # any other size marks a dim
    if type(call["value"]) is int and call["value"] == 0:
        return linear
    # one output, of one term, of one factor: the operand, nonlinearly
    return replace(linear, algebra=((((0, False),),),))


def split_list(call: Call) -> Rule:
    """split, split_with_sizes: an output per part; the dim stays whole."""
    shape, dim = call.shapes[0], call["dim"] % max(call.tensors[0].dim(), 1)
    sizes = call.get("split_sizes")
    # An empty dim gives one empty part, and may be split by 0.
    parts = len(sizes) if sizes is not None else max(-(-shape[dim] // max(call["split_size"], 1)), 1)
    out = tuple(-1 if i == dim else n for i, n in enumerate(shape))      # -1: unlike the operand's size
    return changes(shape, out, parts)


def unbound(call: Call) -> Rule:
    """unbind: an output per index of a dim, which stays whole."""
    one = selected(call)
    parts = call.shapes[0][call["dim"] % call.tensors[0].dim()]
    return replace(one, outputs=one.outputs * parts, algebra=one.algebra * parts)


def concatenated(call: Call) -> Rule:
    """cat: the dim stays whole; every operand is a term. Empty 1-d operands are skipped, as torch skips them."""
    shapes = call.shapes
    n = max(len(s) for s in shapes)
    dim = call["dim"] % n
    row = " ".join(f"d{i}" if i != dim else "d!" for i in range(n))
    lhs = ", ".join(row if len(s) == n else "e!" for s in shapes)
    return sum_of(f"{lhs} -> {row}", [q for q, s in enumerate(shapes) if len(s) == n])


def sum_of(dims: str, operands: list[int]) -> Rule:
    """A rule in which each of these operands is a linear term of its own, however many there are."""
    return replace(rule(dims), algebra=(tuple(((q, True),) for q in operands),))


@regardless_of_size
def stacked(call: Call) -> Rule:
    """stack: a new dim, which stays whole; every operand is a term."""
    n = call.tensors[0].dim()
    row = dim_labels(n)
    out = list(row)
    out.insert(call["dim"] % (n + 1), "s!")
    k = len(call.tensors)
    return sum_of(f"{', '.join([' '.join(row)] * k)} -> {' '.join(out)}", list(range(k)))


@regardless_of_size
def repeated(call: Call) -> Rule:
    """repeat: a dim that is repeated once, that is, not at all, flows through."""
    shape, repeats = call.shapes[0], call["repeats"]
    first = len(repeats) - len(shape)
    lhs = [f"d{first + i}" if repeats[first + i] == 1 else f"d{first + i}!" for i in range(len(shape))]
    rhs = [f"o{i}!" if i < first or repeats[i] != 1 else f"d{i}" for i in range(len(repeats))]
    return rule(f"{' '.join(lhs)} -> {' '.join(rhs)}", "a")


def sized_backward(call: Call) -> Rule:
    """select_backward, slice_backward: the gradient put into zeros of `input_sizes`; the dim stays whole."""
    sizes = list(call["input_sizes"])
    dim = call["dim"] % len(sizes)
    rhs = [f"o{i}!" if i == dim else f"d{i}" for i in range(len(sizes))]
    lhs = [f"g{i}!" if i == dim else f"d{i}" for i in range(len(sizes))]
    if call.tensors[0].dim() < len(sizes):
        del lhs[dim]
    return rule(f"{' '.join(lhs)} -> {' '.join(rhs)}", "a")


def factory_like(call: Call) -> Rule:
    """zeros_like, new_zeros, fill: the operand's values do not matter; its sbp is the result's where sizes agree.

    The result of a pending operand is broadcast: every rank makes the whole value.
    """
    # no terms: the result depends on no operand, so nothing of it can be pending
    return replace(memory_like(call), algebra=((),))


def memory_like(call: Call) -> Rule:
    """new_empty_strided: as `factory_like`, but the memory of a pending operand is pending. Autograd copies a gradient
    into it whose strides are not its parameter's, and that gradient goes on waiting for its reduction."""
    src = call.shapes[0]
    out = tuple(call["size"]) if call.get("size") is not None else src
    kept = {i for i, (m, n) in enumerate(zip(src, out)) if m == n} if len(src) == len(out) else set()
    rhs = " ".join(f"d{i}" if i in kept else f"o{i}!" for i in range(len(out)))
    return rule(f"{' '.join(dim_labels(len(src)))} -> {rhs}", "a")


@regardless_of_size
def filled_like(call: Call) -> Rule:
    """zeros_like, fill: the same of the operand's own size."""
    return factory_like(call)


def halved(operands: int = 1) -> Family:
    """glu and its gradient: the last operand has twice the length along `dim`, which stays whole."""

    def write(call: Call) -> Rule:
        ndim = call.tensors[-1].dim()
        dim = call["dim"] % max(ndim, 1)
        short, long = (" ".join(f"{x}!" if i == dim else f"d{i}" for i in range(ndim)) for x in ("h", "l"))
        return rule(f"{long} -> {short}") if operands == 1 else rule(f"{short}, {long} -> {long}", "a*B")

    return write


def _diagonal_dims(call: Call, ndim: int) -> tuple[int, int]:
    """The two dims whose diagonal it is; both stay whole."""
    return call["dim1"] % ndim, call["dim2"] % ndim


@regardless_of_size
def diagonal(call: Call) -> Rule:
    """diagonal: two dims become one, the last."""
    n = call.tensors[0].dim()
    gone = _diagonal_dims(call, n)
    lhs = " ".join(f"d{i}!" if i in gone else f"d{i}" for i in range(n))
    return rule(f"{lhs} -> {' '.join(f'd{i}' for i in range(n) if i not in gone)} o!", "a")


@regardless_of_size
def diagonal_backward(call: Call) -> Rule:
    """diagonal_backward, diag_embed: the last dim becomes two."""
    n = len(call["input_sizes"]) if "input_sizes" in call.values else call.tensors[0].dim() + 1
    gone = _diagonal_dims(call, n)
    rhs = " ".join(f"d{i}!" if i in gone else f"d{i}" for i in range(n))
    return rule(f"{' '.join(f'd{i}' for i in range(n) if i not in gone)} o! -> {rhs}", "a")


def diagonal_scattered(call: Call) -> Rule:
    """diagonal_scatter: a copy whose diagonal is the second operand."""
    n = call.tensors[0].dim()
    gone = _diagonal_dims(call, n)
    row = " ".join(f"d{i}!" if i in gone else f"d{i}" for i in range(n))
    return rule(f"{row}, {' '.join(f'd{i}' for i in range(n) if i not in gone)} o! -> {row}", _copied_into(call))


def _copied_into(call: Call) -> str:
    """The algebra of a copy of which a part is the second operand, cast to the dtype of the first."""
    own, source = (t.dtype for t in call.tensors)
    return "a+b" if keeps_sums(source, own) else ""


def scattered_into(call: Call) -> Rule:
    """slice_scatter, select_scatter: a copy of which a part along one dim is the second operand."""
    n = call.tensors[0].dim()
    dim = call["dim"] % max(n, 1)
    row = [f"d{i}!" if i == dim else f"d{i}" for i in range(n)]
    part = [f"s{i}!" if i == dim else f"d{i}" for i in range(n)]
    if call.tensors[1].dim() < n:
        del part[dim]
    return rule(f"{' '.join(row)}, {' '.join(part)} -> {' '.join(row)}", _copied_into(call))


@regardless_of_size
def turned(call: Call) -> Rule:
    """rot90: of two dims one is reversed and stays whole; both where they are not exchanged."""
    n, k = call.tensors[0].dim(), call["k"] % 4
    one, other = (d % n for d in call["dims"])
    row = dim_labels(n)
    for d in {0: (), 1: (other,), 2: (one, other), 3: (one,)}[k]:
        row[d] += "!"
    out = list(row)
    if k % 2:
        out[one], out[other] = row[other], row[one]
    return rule(f"{' '.join(row)} -> {' '.join(out)}", "a")


def _dims_in_steps(call: Call, n: int, dim: int, size: int) -> tuple[str, str, tuple[tuple[str, int], ...]]:
    """The dims of a tensor and of its windows, and what must be cut evenly: where windows do not overlap, the dim can
    be cut between them."""
    row = [f"d{i}!" if i == dim else f"d{i}" for i in range(n)]
    step = call["step"]
    if not n or not call["size"] or call["size"] > step or size % step:
        return " ".join(row), f"{' '.join(row)} w!", ()
    row[dim] = f"d{dim}"
    return " ".join([*row[:dim], f"(d{dim} p)", *row[dim + 1:]]), f"{' '.join(row)} w!", ((f"d{dim}", size // step),)


def unfolded(call: Call) -> Rule:
    """Tensor.unfold: a dim becomes positions of a window and, as the last dim, the elements within it."""
    n = call.tensors[0].dim()
    dim = call["dimension"] % max(n, 1)
    whole, pieces, even = _dims_in_steps(call, n, dim, call.shapes[0][dim] if n else 1)
    return rule(f"{whole} -> {pieces}", "a", even=even)


def unfolded_backward(call: Call) -> Rule:
    """unfold_backward: elements that several windows hold are added up, so the dim stays whole. torch repeats a
    gradient of size 1 along another dim, as `torch._refs.istft` asks of it."""
    sizes = call["input_sizes"]
    n = len(sizes)
    dim = call["dim"] % max(n, 1)
    whole, pieces, even = _dims_in_steps(call, n, dim, sizes[dim] if n else 1)
    repeated = {f"d{i}" for i, own in enumerate(call.shapes[0][:n]) if i != dim and own == 1 != sizes[i]}
    pieces = " ".join("1" if label in repeated else label for label in pieces.split(" "))
    whole = " ".join(f"e{label[1:]}!" if label in repeated else label for label in whole.split(" "))
    return rule(f"{pieces} -> {whole}", "a", even=even)


def triangle(call: Call) -> Rule:
    """tril, triu: in a part, the diagonal has another offset (`op_table/line.py`)."""
    return rule(f"{' '.join(dim_labels(call.tensors[0].dim()))} -> {' '.join(dim_labels(call.tensors[0].dim()))}", "a")
