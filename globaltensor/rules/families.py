"""Families: functions that write an op's rule from its arguments, for ops whose dims depend on them.

Each takes options and returns a function Call -> Rule, so that a line of the table reads `reduction("a")`.
"""
from __future__ import annotations

from collections.abc import Callable
from math import gcd, prod

import torch

from globaltensor.rules.call import Call
from globaltensor.rules.language import Rule, rule

Family = Callable[[Call], Rule]
Shape = tuple[int, ...]


def fixed(dims: str, algebra: str = "", *, leaves: str = "sum", nonempty: bool = False) -> Family:
    """A rule that is the same for all arguments but for `b*` and absent operands."""
    return lambda call: rule(dims, algebra, ndims=call.ndims, leaves=leaves, nonempty=nonempty)


def names(n: int) -> list[str]:
    """n labels: d0 d1 ..."""
    return [f"d{i}" for i in range(n)]


def broadcast_dims(shape: Shape, out: Shape) -> str:
    """The dims of an operand of `shape` that is broadcast to `out`: its labels are out's, 1 where it is repeated."""
    first = len(out) - len(shape)
    return " ".join("1" if n == 1 and out[first + i] != 1 else f"d{first + i}" for i, n in enumerate(shape))


def out_shape(shapes: list[Shape]) -> Shape:
    """The shape that shapes broadcast to; sizes that do not fit are left for torch to complain about."""
    out: list[int] = []
    for i in range(max((len(s) for s in shapes), default=0)):
        sizes = {s[-1 - i] for s in shapes if i < len(s)} - {1}
        out.append(max(sizes) if sizes and 0 not in sizes else min(sizes, default=1))
    return tuple(reversed(out))


def pointwise(algebra: str = "", *, outputs: int = 1) -> Family:
    """Element by element over operands that broadcast; left out, the algebra is nonlinear in all of them."""

    def write(call: Call) -> Rule:
        shapes = call.shapes
        out = out_shape(shapes)
        lhs = iter([broadcast_dims(s, out) for s in shapes])
        dims = ", ".join("" if n is None else next(lhs) for n in call.ndims) if call.ndims else ""
        rhs = ", ".join([" ".join(names(len(out)))] * outputs)
        return rule(f"{dims} -> {rhs}", algebra, ndims=call.ndims)

    return write


def linear_by_scalar(tensor: str, scalar: str) -> Family:
    """`tensor` where both operands are tensors, `scalar` where the second is a Python number."""
    both, one = pointwise(tensor), pointwise(scalar)
    return lambda call: both(call) if len(call.tensors) > 1 else one(call)


def dims_of(call: Call, ndim: int, name: str = "dim") -> list[int]:
    """The dims an op reduces: its `dim` argument, all where it is None, empty or missing."""
    dim = call.get(name)
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(ndim))
    return [d % max(ndim, 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim])]


def reduction(algebra: str = "A", *, leaves: str = "sum", outputs: int = 1, whole: bool = False,
              nonempty: bool = False) -> Family:
    """Reduces the dims of its `dim` argument (all without it), honours `keepdim`; `whole`: they cannot be cut."""

    def write(call: Call) -> Rule:
        ndim = call.tensors[0].dim()
        gone = dims_of(call, ndim) if ndim else []
        keep = bool(call.get("keepdim", False))
        lhs = " ".join(f"d{i}!" if whole and i in gone else f"d{i}" for i in range(ndim))
        rhs = " ".join("1" if i in gone else f"d{i}" for i in range(ndim) if keep or i not in gone)
        return rule(f"{lhs} -> {', '.join([rhs] * outputs)}", algebra, leaves=leaves, nonempty=nonempty)

    return write


def along(algebra: str = "A", *, name: str = "dim", operands: int = 1, outputs: int = 1,
          nonempty: bool = False) -> Family:
    """Works along one dim, which stays whole, on operands of one shape: softmax, sort, cumsum."""

    def write(call: Call) -> Rule:
        ndim = call.tensors[0].dim()
        whole = dims_of(call, ndim, name) if ndim else []
        dims = " ".join(f"d{i}!" if i in whole else f"d{i}" for i in range(ndim))
        return rule(f"{', '.join([dims] * operands)} -> {', '.join([dims] * outputs)}", algebra, nonempty=nonempty)

    return write


def permuted(order: Callable[[Call, int], list[int]]) -> Family:
    """Output dim i is input dim order[i]."""

    def write(call: Call) -> Rule:
        n = call.tensors[0].dim()
        return rule(f"{' '.join(names(n))} -> {' '.join(f'd{i}' for i in order(call, n))}", "a")

    return write


def swapped(call: Call, n: int) -> list[int]:
    """The order of `transpose(dim0, dim1)`; of `t()` where there are no dims."""
    order = list(range(n))
    if n:
        i, j = (call.get("dim0", 0) % n, call.get("dim1", 1) % n) if n > 1 else (0, 0)
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
                return [(list(range(len(src))), list(range(len(dst))))]      # sizes of 0: no grouping to be had
        groups.append((a, b))
    return groups


def reshaped(src: Shape, dst: Shape) -> Rule:
    """The rule of a view: within a group only the outermost dim that is longer than 1 can be cut, and evenly."""
    lhs, rhs, even = ["1"] * len(src), ["1"] * len(dst), []
    if 0 in src:
        groups = [([i], [j]) for i, j in zip(range(len(src)), range(len(dst)))] if src == dst else []
    else:
        groups = grouped(src, dst)
    for g, (a, b) in enumerate(groups):
        a, b = [k for k in a if src[k] != 1], [k for k in b if dst[k] != 1]
        if not a or not b:
            continue
        if len(a) == len(b) == 1:
            lhs[a[0]] = rhs[b[0]] = f"g{g}"
            continue
        # the outermost label is shared by both sides: its parts must be parts of both outermost dims
        for side, group in ((lhs, a), (rhs, b)):
            for place, k in enumerate(group):
                side[k] = f"(g{g} r{g}.{place})" if place == 0 else f"r{g}.{k}!"
        even.append((f"g{g}", gcd(src[a[0]], dst[b[0]])))
    return rule(f"{' '.join(lhs)} -> {' '.join(rhs)}", "a", even=tuple(even))


def viewed(call: Call) -> Rule:
    """view, reshape, _unsafe_view: sizes may hold one -1."""
    src = tuple(call.tensors[0].shape)
    size = list(call.get("size") if call.get("size") is not None else call["shape"])
    if -1 in size:
        rest = prod(n for n in size if n != -1)
        size[size.index(-1)] = prod(src) // rest if rest else 0
    return reshaped(src, tuple(size))


def expanded(call: Call) -> Rule:
    """expand to `size`: dims that are repeated cannot be cut on the input, but the output keeps them whole too."""
    src = tuple(call.tensors[0].shape)
    first = len(call["size"]) - len(src)
    size = [src[i - first] if n == -1 else n for i, n in enumerate(call["size"])]
    lhs = ["1" if src[i] == 1 and size[first + i] != 1 else f"d{first + i}" for i in range(len(src))]
    rhs = [f"e{i}!" if i < first or lhs[i - first] == "1" else f"d{i}" for i in range(len(size))]
    return rule(f"{' '.join(lhs)} -> {' '.join(rhs)}", "a")


def unsqueezed(call: Call) -> Rule:
    n = call.tensors[0].dim()
    rhs = names(n)
    rhs.insert(call["dim"] % (n + 1), "1")
    return rule(f"{' '.join(names(n))} -> {' '.join(rhs)}", "a")


def squeezed(call: Call) -> Rule:
    shape = call.shapes[0]
    dims = dims_of(call, len(shape)) if "dim" in call.values else range(len(shape))
    gone = {d for d in dims if len(shape) and shape[d] == 1}
    lhs = ["1" if i in gone else f"d{i}" for i in range(len(shape))]
    return rule(f"{' '.join(lhs)} -> {' '.join(x for i, x in enumerate(lhs) if i not in gone)}", "a")


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
    """slice: a full slice of a dim changes nothing."""
    shape = list(call.shapes[0])
    dim = call["dim"] % len(shape)
    start, end, step = call["start"] or 0, call["end"], call["step"]
    size = len(range(*slice(start, end, step).indices(shape[dim])))
    out = list(shape)
    out[dim] = size
    return changes(tuple(shape), tuple(out))


def padded(call: Call) -> Rule:
    """constant_pad_nd: pads are given from the last dim backwards; linear only when padding with 0."""
    shape, pad = call.shapes[0], call["pad"]
    touched = {len(shape) - 1 - k // 2 for k, n in enumerate(pad) if n}
    out = tuple(n + (i in touched) for i, n in enumerate(shape))
    found = changes(shape, out)
    return found if not call["value"] else rule(_text(found), "A")


def _text(of: Rule) -> str:
    return " -> ".join(", ".join(" ".join(d[0] for d in t) for t in side) for side in (of.inputs, of.outputs))


def split_list(call: Call) -> Rule:
    """split, split_with_sizes: as many outputs as parts, the dim whole."""
    shape, dim = call.shapes[0], call["dim"] % max(call.tensors[0].dim(), 1)
    sizes = call.get("split_sizes")
    parts = len(sizes) if sizes is not None else max(-(-shape[dim] // max(call["split_size"], 1)), 1)
    out = tuple(-1 if i == dim else n for i, n in enumerate(shape))
    return changes(shape, out, parts)


def unbound(call: Call) -> Rule:
    one = selected(call)
    parts = call.shapes[0][call["dim"] % call.tensors[0].dim()]
    return Rule(one.inputs, one.outputs * parts, one.algebra * parts)


def concatenated(call: Call) -> Rule:
    """cat: the dim stays whole; every operand is a term. Empty 1-d tensors are skipped, as torch does."""
    shapes = call.shapes
    n = max(len(s) for s in shapes)
    dim = call["dim"] % n
    row = " ".join(f"d{i}" if i != dim else "d!" for i in range(n))
    lhs = ", ".join(row if len(s) == n else "e!" for s in shapes)
    return sum_of(f"{lhs} -> {row}", [q for q, s in enumerate(shapes) if len(s) == n])


def sum_of(dims: str, operands: list[int]) -> Rule:
    """A rule in which each of these operands is a linear term of its own, however many there are."""
    of = rule(dims, ndims=())
    return Rule(of.inputs, of.outputs, (tuple(((q, True),) for q in operands),))


def stacked(call: Call) -> Rule:
    n = call.tensors[0].dim()
    row = names(n)
    out = list(row)
    out.insert(call["dim"] % (n + 1), "s!")
    k = len(call.tensors)
    return sum_of(f"{', '.join([' '.join(row)] * k)} -> {' '.join(out)}", list(range(k)))


def repeated(call: Call) -> Rule:
    """repeat: dims repeated once flow through."""
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
    """zeros_like, new_zeros, fill: the values of the operand do not matter; the sbp is taken over where sizes agree.

    A pending operand gives a broadcast result: every rank makes the whole value.
    """
    src = call.shapes[0]
    out = tuple(call["size"]) if call.get("size") is not None else src
    same = len(src) == len(out)
    lhs = " ".join(f"d{i}" for i in range(len(src)))
    rhs = " ".join(f"d{i}" if same and src[i] == n else f"o{i}!" for i, n in enumerate(out))
    lhs = " ".join(f"d{i}" if same and src[i] == out[i] else f"d{i}!" for i in range(len(src)))
    return Rule(rule(f"{lhs} -> {rhs}").inputs, rule(f"{lhs} -> {rhs}").outputs, ((),))


def copied(call: Call) -> Rule:
    """_to_copy: linear between floating dtypes, for rounding aside a sum of casts is the cast of the sum."""
    dtype = call["dtype"] or call.tensors[0].dtype
    linear = dtype.is_floating_point and call.tensors[0].dtype.is_floating_point or dtype == call.tensors[0].dtype
    return pointwise("a" if linear else "A")(call)


def broadcasting_addmm(left: str, right: str, out: str) -> Family:
    """addmm and its kin: a + b*c, where a broadcasts to the product."""

    def write(call: Call) -> Rule:
        labels = out.split()
        shape = call.shapes[0]
        full = labels[len(labels) - len(shape):]
        sizes = dict(zip(left.split(), call.shapes[1])) | dict(zip(right.split(), call.shapes[2]))
        first = " ".join("1" if n == 1 and sizes[x] != 1 else x for x, n in zip(full, shape))
        return rule(f"{first}, {left}, {right} -> {out}", "a+b*c")

    return write


def reduction_of(operands: int = 2) -> Family:
    """A loss of two tensors: summed to a scalar, or element by element where `reduction` is none."""

    def write(call: Call) -> Rule:
        each = pointwise()(call)
        if call["reduction"] == 0:
            return each
        return Rule(each.inputs, ((),), each.algebra)

    return write


def embedding(call: Call) -> Rule:
    """weight[indices]: a cut vocabulary leaves P, by a runner that looks up only its own rows."""
    n = call.tensors[1].dim()
    idx = " ".join(f"n{i}" for i in range(n))
    return rule(f"v d, {idx} -> {idx} d", "a*B")


def embedding_backward(call: Call) -> Rule:
    n = call.tensors[1].dim()
    idx = " ".join(f"n{i}" for i in range(n))
    return rule(f"{idx} d, {idx} -> v! d", "a*B")


def gathered(kind: str) -> Family:
    """index_select (1-d index along a dim) and gather (index of as many dims)."""

    def write(call: Call) -> Rule:
        n = call.tensors[0].dim()
        dim = call["dim"] % max(n, 1)
        row = [f"d{i}!" if i == dim else f"d{i}" for i in range(n)]
        if kind == "select":
            out = ["k" if i == dim else x for i, x in enumerate(row)]
            return rule(f"{' '.join(row)}, {'k' if call.tensors[1].dim() else ''} -> {' '.join(out)}", "a*B")
        same = [a == b for a, b in zip(call.shapes[0], call.shapes[1])]
        lhs = [x if i == dim or same[i] else f"d{i}!" for i, x in enumerate(row)]
        idx = ["k" if i == dim else (f"d{i}" if same[i] else f"k{i}!") for i in range(n)]
        return rule(f"{' '.join(lhs)}, {' '.join(idx)} -> {' '.join(idx)}", "a*B")

    return write


def indexed(call: Call) -> Rule:
    """x[i, j, :]: indexed dims stay whole, the index's own dims and the untouched dims flow through.

    Only adjacent integer indices; anything else (masks, separated indices) runs on all-B.
    """
    x, shape = call.tensors[0], call.shapes[0]
    given = list(call["indices"])
    where = [i for i, t in enumerate(given) if t is not None]
    whole = rule(f"{' '.join(f'd{i}!' for i in range(x.dim()))}, "
                 f"{', '.join(' '.join(f'i{q}.{k}!' for k in range(t.dim())) for q, t in enumerate(call.tensors[1:]))}"
                 " -> " + " ".join(f"o{i}!" for i in range(64)), "*".join(["a", *map(str.upper, letters(9)[1:len(call.tensors)])]))
    adjacent = where and where[-1] - where[0] + 1 == len(where)
    if not adjacent or any(t.dtype in (torch.bool, torch.uint8) for t in call.tensors[1:]):
        return whole
    idx = out_shape(call.shapes[1:])
    lhs = [f"d{i}!" if i in where else f"d{i}" for i in range(len(shape))]
    ops = [broadcast_dims(s, idx).replace("d", "k") for s in call.shapes[1:]]
    out = [f"d{i}" for i in range(where[0])] + [f"k{i}" for i in range(len(idx))] + [
        f"d{i}" for i in range(where[-1] + 1, len(shape))]
    terms = "*".join(["a", *map(str.upper, letters(len(call.tensors))[1:])])
    return rule(f"{' '.join(lhs)}, {', '.join(ops)} -> {' '.join(out)}", terms)


def convolution(call: Call) -> Rule:
    """Batch and channels can be cut, space cannot; with groups only whole groups would do, so channels stay."""
    space = call.tensors[0].dim() - 2
    s, k, o = (" ".join(f"{x}{i}!" for i in range(space)) for x in "ykz")
    cin, cw, out = ("c", "c", "o") if call["groups"] == 1 else ("c!", "w!", "o!")
    if call["transposed"]:
        weight = f"{cin} {out} {k}" if call["groups"] == 1 else f"c! w! {k}"
    else:
        weight = f"{out} {cw} {k}"
    bias = f", {out}" if call.ndims[2] is not None else ""
    return rule(f"n {cin} {s}, {weight}{bias} -> n {out} {o}", "a*b+c" if bias else "a*b", nonempty=True)


def convolution_backward(call: Call) -> Rule:
    """Gradients of input, weight and bias; each by its own contraction."""
    space = call.tensors[1].dim() - 2
    s, k, o = (" ".join(f"{x}{i}!" for i in range(space)) for x in "ykz")
    cin, cw, out = ("c", "c", "o") if call["groups"] == 1 else ("c!", "w!", "o!")
    weight = f"{cin} {out} {k}" if call["transposed"] and call["groups"] == 1 else (
        f"c! w! {k}" if call["transposed"] else f"{out} {cw} {k}")
    wanted = [(f"n {cin} {s}", "a*C"), (weight, "a*B"), (out, "a")]
    given = [w for w, yes in zip(wanted, call["output_mask"]) if yes]
    return rule(f"n {out} {o}, n {cin} {s}, {weight} -> {', '.join(d for d, _ in given)}",
                ";".join(a for _, a in given), nonempty=True)
