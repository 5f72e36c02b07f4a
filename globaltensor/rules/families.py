"""Families: functions that write an op's rule from its arguments, for ops whose dims depend on them.

A family is a function Call -> Rule, or makes one from options, so that a line of the table reads `reduction("a")`.
Here are those of arithmetic; `shapes.py` has those of views, `indices.py` of indexing, `layers.py` of networks.

The value of an int argument may decide a rule, that of a float may not: what was decided for one call is used for all
calls that differ in floats only. (Whether a float is 0, and whether it is finite, all of these have alike.)
"""
from __future__ import annotations

from cmath import isfinite
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from globaltensor.layouts.layout import Shape
from globaltensor.rules.call import Call
from globaltensor.rules.language import NUMBER, Dims, Rule
from globaltensor.rules.parse import rule
from globaltensor.runtime.dtypes import is_inexact

Family = Callable[[Call], Rule]
_regardless_of_size: set[Family] = set()


def regardless_of_size(family: Family) -> Family:
    """Marks a family whose rules depend on no size, but for which sizes are 1, and have one size for each label."""
    _regardless_of_size.add(family)
    return family


def is_regardless_of_size(family: Family) -> bool:
    """Is it marked so?"""
    return family in _regardless_of_size


def fixed(dims: str, algebra: str = "", *, leaves: str = "sum", nonempty: str = "") -> Family:
    """A rule that does not depend on the arguments, apart from `b*` and absent operands."""
    return regardless_of_size(lambda call: rule(dims, algebra, ndims=call.ndims, leaves=leaves, nonempty=nonempty))


def kept_whole(of: Rule) -> Rule:
    """The same rule where nothing can be cut; sums may still be pending."""

    def stay(tensors: tuple[Dims, ...]) -> tuple[Dims, ...]:
        return tuple(tuple(tuple(x if x == "1" or x.endswith("!") else f"{x}!" for x in d) for d in t) for t in tensors)

    # `even` names labels that are cut, and none is any more
    return replace(of, inputs=stay(of.inputs), outputs=stay(of.outputs), even=())


def of_numbers(of: Rule, call: Call) -> Rule:
    """The same rule for the Python numbers of a call. Linear holds for finite ones: the terms of a pending sum, times
    inf or divided by 0, may be inf and -inf, whose sum is nan."""
    numbers = [number for value in call.values.values() for number in (value if type(value) is list else [value])
               if type(number) in (bool, int, float, complex)]
    if all(map(isfinite, numbers)) and (all(numbers) or "div" not in call.func._schema.name):
        return of
    return replace(of, algebra=tuple(tuple(tuple((q, False) for q, _ in term) for term in terms)
                                     for terms in of.algebra))


def of_integers(of: Rule, operands: Sequence[torch.dtype], results: Sequence[torch.dtype | None]) -> Rule:
    """The same rule for operands and results of these dtypes. Sums of integers wrap, and those of floats and of wider
    integers do not: so where a result is of another dtype than an integer operand, it is not linear in it."""
    if all(map(is_inexact, operands)):
        return of
    return replace(of, algebra=tuple(
        tuple(tuple((q, linear and (is_inexact(operands[q]) or gives in (None, operands[q]))) for q, linear in term)
              for term in terms) for terms, gives in zip(of.algebra, results)))


def masked_outputs(family: Family, mask: str, always: Collection[int] = ()) -> Family:
    """The rule of an op that returns only the outputs that flags in argument `mask` ask for, and None for the rest;
    those in `always` whatever their flags are."""

    def write(call: Call) -> Rule:
        of, flags = family(call), [yes or k in always for k, yes in enumerate(call[mask])]
        return replace(of, outputs=tuple(d for d, yes in zip(of.outputs, flags) if yes),
                       algebra=tuple(a for a, yes in zip(of.algebra, flags) if yes))

    return regardless_of_size(write) if is_regardless_of_size(family) else write


def dim_labels(n: int) -> list[str]:
    """n labels: d0 d1 ..."""
    return [f"d{i}" for i in range(n)]


def with_nonlinear(terms: str, more: int) -> str:
    """A product of `terms` and `more` nonlinear operands after them: with_nonlinear("a", 2) is a*B*C."""
    used = terms.count("*") + 1
    return "*".join([terms, *(chr(ord("A") + used + i) for i in range(more))])


def broadcast_labels(shape: Shape, out: Shape, labels: list[str]) -> str:
    """The dims of an operand of `shape` that is broadcast to `out` of these labels: 1 where it is repeated."""
    first = len(out) - len(shape)
    # Where the result has size 1 as well, nothing is repeated: with its label, the dim can be split (into one part, and
    # empty ones) in operand and result alike.
    return " ".join("1" if n == 1 and out[first + i] != 1 else labels[first + i] for i, n in enumerate(shape))


def broadcast_shape(shapes: list[Shape]) -> Shape:
    """The shape that shapes broadcast to; sizes that do not fit are left for torch to complain about."""
    out: list[int] = []
    for i in range(max((len(s) for s in shapes), default=0)):
        sizes = [s[-1 - i] for s in shapes if i < len(s) and s[-1 - i] != 1]
        # 1 gives way to 0 as to any other size: the result is empty
        out.append(0 if 0 in sizes else max(sizes, default=1))
    return tuple(reversed(out))


def keeping(keeps: str, family: Family) -> Family:
    """A rule by which operands that are pending by "max" or "min" leave a result that is."""
    return regardless_of_size(lambda call: replace(family(call), keeps=keeps))


def pointwise(algebra: str = "", *, outputs: int = 1) -> Family:
    """Element by element over operands that broadcast; left out, the algebra is nonlinear in all of them."""

    def write(call: Call) -> Rule:
        shapes = call.shapes
        out = broadcast_shape(shapes)
        lhs = iter([broadcast_labels(s, out, dim_labels(len(out))) for s in shapes])
        # absent operands and numbers count in the algebra (a, b, c by the schema), so they keep a place here
        dims = ", ".join("" if n in (None, NUMBER) else next(lhs) for n in call.ndims) if call.ndims else ""
        rhs = ", ".join([" ".join(dim_labels(len(out)))] * outputs)
        return rule(f"{dims} -> {rhs}", ";".join([algebra] * outputs) if algebra else "", ndims=call.ndims)

    return regardless_of_size(write)


def zeroing(value: str, linear: str, other: str) -> Family:
    """Fills some elements: linear where argument `value` is the int 0. (0.0 is a float: no float decides a rule.)"""
    return regardless_of_size(
        lambda call: pointwise(linear if type(call[value]) in (int, bool) and call[value] == 0 else other)(call))


def keeps_sums(src: torch.dtype, dst: torch.dtype) -> bool:
    """Is a sum of casts the cast of the sum, up to rounding? Not where a cast rounds to integers, nor from integers,
    whose sums wrap, nor from bool, whose sums are none."""
    return src == dst or is_inexact(src) and is_inexact(dst)


@regardless_of_size
def copied(call: Call) -> Rule:
    """_to_copy: linear if the cast is."""
    src = call.tensors[0].dtype
    return pointwise("a" if keeps_sums(src, call["dtype"] or src) else "A")(call)


@regardless_of_size
def copied_over(call: Call) -> Rule:
    """copy: the second operand, a tensor or a number, takes the shape and the dtype of the first."""
    target, *sources = [t.dtype for t in call.tensors]
    return pointwise("b" if all(keeps_sums(src, target) for src in sources) else "B")(call)


def dims_of(call: Call, ndim: int, name: str = "dim") -> list[int]:
    """The dims that an op reduces: those of its `dim` argument; all of them if that is None, empty or missing."""
    dim = call.get(name)
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(ndim))
    return [d % max(ndim, 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim])]


def reduction(algebra: str = "A", *, leaves: str = "sum", outputs: int = 1, uncut: bool = False, or_none: bool = False
              ) -> Family:
    """Reduces the dims of its `dim` argument, all if it has none; `uncut`: these dims stay whole; `or_none`: an empty
    list is no dim."""

    def write(call: Call) -> Rule:
        ndim = call.tensors[0].dim()
        gone = dims_of(call, ndim) if ndim and not (or_none and call["dim"] is not None and not call["dim"]) else []
        keep = bool(call.get("keepdim", False))
        lhs = " ".join(f"d{i}!" if uncut and i in gone else f"d{i}" for i in range(ndim))
        rhs = " ".join("1" if i in gone else f"d{i}" for i in range(ndim) if keep or i not in gone)
        return rule(f"{lhs} -> {', '.join([rhs] * outputs)}", ";".join([_sum_algebra(call, algebra)] * outputs),
                    leaves=leaves)

    return regardless_of_size(write)


def _sum_algebra(call: Call, algebra: str) -> str:
    """The algebra of a reduction that casts its operand to `dtype` first: nonlinear if the cast is."""
    src = call.tensors[0].dtype
    return algebra if keeps_sums(src, call.get("dtype") or src) else algebra.upper()


def along(algebra: str = "A", *, name: str = "dim", operands: int = 1, outputs: int = 1, resizes: bool = False
          ) -> Family:
    """Works along one dim, which stays whole, on operands of the same shape: softmax, sort, cumsum. `resizes`: it has
    another size in the results, as that of topk."""

    def write(call: Call) -> Rule:
        ndim = call.tensors[0].dim()
        uncut = dims_of(call, ndim, name) if ndim else []
        dims = " ".join(f"d{i}!" if i in uncut else f"d{i}" for i in range(ndim))
        out = " ".join(f"o{i}!" if i in uncut else f"d{i}" for i in range(ndim)) if resizes else dims
        return rule(f"{', '.join([dims] * operands)} -> {', '.join([out] * outputs)}",
                    ";".join([_sum_algebra(call, algebra)] * outputs))

    return regardless_of_size(write)


@regardless_of_size
def contraction(call: Call) -> Rule:
    """globaltensor::contract, an einsum of two tensors: its equation is its rule."""
    sides = [" ".join(t) for t in call["equation"].replace("->", ",").split(",")]
    return rule(f"{sides[0]}, {sides[1]} -> {sides[2]}", "a*b")


def broadcasting_addmm(left: str, right: str, out: str) -> Family:
    """addmm and similar ops: a + b*c, where a broadcasts to the product."""

    def write(call: Call) -> Rule:
        labels = out.split()
        shape = call.shapes[0]
        full = labels[len(labels) - len(shape):]
        sizes = dict(zip(left.split(), call.shapes[1])) | dict(zip(right.split(), call.shapes[2]))
        # a is repeated along dims where it has size 1, unless the product has size 1 as well
        first = " ".join("1" if n == 1 and sizes[x] != 1 else x for x, n in zip(full, shape))
        return rule(f"{first}, {left}, {right} -> {out}", "a+b*c")

    return regardless_of_size(write)


def loss(*, backward: bool = False) -> Family:
    """A loss, element by element, or its gradient. A mean stays whole: a kernel would divide by the number of elements
    of its own part."""

    def write(call: Call) -> Rule:
        each = pointwise(with_nonlinear("a", len(call.ndims) - 1) if backward else "")(call)
        if call["reduction"] == NONE:
            return each
        # without labels in the result, any cut of the operands leaves it pending: `leaves`
        of = each if backward else replace(each, outputs=((),))
        return kept_whole(of) if call["reduction"] == MEAN else of

    return regardless_of_size(write)


NONE, MEAN, SUM = 0, 1, 2                            # torch's numbers for a loss's `reduction`


def option(call: Call, name: str, default: Any) -> Any:
    """Argument `name`, `default` where it is None or missing."""
    value = call.get(name)
    return default if value is None else value
