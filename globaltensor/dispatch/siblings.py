"""Which sizes do not matter to a recipe, so that calls of other sizes are done by it: its *siblings*.

A length that was never seen, of a batch or of a sequence, would be a new decision, of hundreds of microseconds, for
each op. But most recipes are the same whatever the size is. With such a one goes what sizes the results of a sibling
have, dim by dim, and the native dispatcher does siblings without Python (csrc/torch_ext/siblings.cpp).

That must be certain, as nobody looks again. Also, a rank that decides anew must decide as one that has a sibling's
recipe, for what is cached differs between ranks: so a price, which depends on sizes, may have no say. Hence

    the rule             knows no sizes, but for which of them are 1 (`families.regardless_of_size`); sizes of 0 and 1
                         are never taken for others
    the decomposition    applies at no size, if there is one; where it makes an offer, it is not asked if
    the signature        moves nothing, which cannot be beaten (`choose`); or nothing that others do not move too
                         (`Contest.wins_at_any_size`), as where a gradient that several results need is reduced first
    the rank's call      is the op itself, with its own arguments
    the results          have one size for each label. Where the op makes dims itself, their sizes may follow from a
                         label that stays whole; never from one that can be cut, as its parts give parts of results

Rules of ops that name sizes (a view, a slice and its gradient) know them. What a rule takes from them is written down:
which dims are as long as before, which make up which, and which are cut evenly (`_Named`). torch's own shape functions
say what comes out of these and of all views, in C++, as memory may have gaps.
"""
from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch

from globaltensor.algorithms import decompositions, local_impls
from globaltensor.algorithms.run import Decomposition
from globaltensor.dispatch.choose import Contest
from globaltensor.dispatch.recipe import Recipe
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Layout, Spec
from globaltensor.op_table.line import Line
from globaltensor.op_table.variants import line_of
from globaltensor.rules import shapes
from globaltensor.rules.call import Call
from globaltensor.rules.families import Family, dims_of, is_regardless_of_size
from globaltensor.rules.language import Dims, Rule, inner_labels, signatures

aten = torch.ops.aten


class Siblings(NamedTuple):
    """What tells the siblings of a recipe. Of each dim a label, by its number, or ~n: it has the size n in all of them.
    The twin of Sibling in csrc/torch_ext/siblings.cpp.

    operands     per operand its dims; none of a plain operand, which is the same in all
    outputs      per return and result its dims; none of one that is not a tensor
    least        per label the least size
    sums         labels that come after these: each is as long as some of them together
    numbers      the ints in arguments that name sizes; None where any will do
    no_larger    they hold where the results are no larger than operand 0
    told_by_torch      a shape function says what the results are, and not `outputs`
    kept, groups, even, local_size      as in `_Named`
    """

    operands: list[list[int]]
    outputs: list[list[list[int]]]
    least: list[int]
    sums: list[list[int]]
    numbers: list[int | None]
    no_larger: bool
    told_by_torch: bool
    kept: list[tuple[int, int, bool]] = []
    groups: list[tuple[list[int], list[int]]] = []
    even: list[tuple[bool, int, int]] = []
    local_size: int = -1


class _Named(NamedTuple):
    """What the rule of an op that names sizes takes from them, of operand 0 and result 0.

    kept         (dim of the operand, of the result, whether they are as long)
    groups       of a view, dims that hold the same elements; one side merges what the other has
    even         (of the result, dim, number): dims that are a multiple of it, as they are cut into parts of others
    local_size   the argument that is the size of what a rank gets, or -1
    """

    kept: list[tuple[int, int, bool]] = []
    groups: list[tuple[list[int], list[int]]] = []
    even: list[tuple[bool, int, int]] = []
    local_size: int = -1


def siblings_of(recipe: Recipe, call: Call, contest: Callable[[], Contest | None]) -> Siblings | None:
    """What tells the siblings of this recipe, which was decided for this call; None where it has none. `contest` tells
    what there was to choose from."""
    line = line_of(recipe.func)
    if line is None or recipe.outputs is None or not _runs_the_op(line, recipe):
        return None
    pending = [q for q, t in enumerate(call.tensors) if is_global(t) and t.spec.layout.partial]
    if any(recipe.wants) or pending and len(call.tensors) > 1:
        return _of_boxed(line, recipe, call, contest)
    if line.family in _NAMED:
        return _of_named_sizes(line, recipe, call, bool(pending))
    if line.family is shapes.concatenated:
        return _of_cat(line.rule(call), recipe, call)
    return _by_labels(line, recipe, call, bool(pending)) if _holds_at_all_sizes(line, call) else None


def _of_boxed(line: Line, recipe: Recipe, call: Call, contest: Callable[[], Contest | None]) -> Siblings | None:
    """Where there was more to choose from than what moves nothing."""
    if recipe.written or recipe.func.is_view or recipe.local_impl is not None or not _holds_at_all_sizes(line, call):
        return None
    if not all(is_global(t) and t.dim() for t in call.tensors):
        return None
    chosen_from = contest()
    if chosen_from is None or not chosen_from.wins_at_any_size(recipe.signature):
        return None
    return _by_labels(line, recipe, call, False, chosen=True)


def siblings_of_mean(decomposition: Decomposition, call: Call) -> Siblings | None:
    """What tells the siblings of the mean of all elements that is made of a sum: it moves nothing at any size, and each
    signature would gather the operand, which loses to it (`Offer.extra`)."""
    x = call.tensors[0]
    if decomposition is not decompositions.mean or not is_global(x) or x.spec.layout.partial or x.spec.lazy_bits:
        return None
    if len(dims_of(call, x.dim())) < x.dim() or not x.dim() or min(call.shapes[0]) < 2:
        return None
    if not (call.get("dtype") or x.dtype).is_floating_point or max(map(x.spec.layout.num_parts, range(x.dim()))) < 2:
        return None
    return Siblings([list(range(x.dim()))], [[]], [2] * x.dim(), [], _named_numbers(call, ()), False, False)


def _by_labels(line: Line, recipe: Recipe, call: Call, pending: bool, chosen: bool = False) -> Siblings | None:
    """Where the rule knows no sizes. `chosen`: from more than what moves nothing, so that no part may be empty."""
    rule = line.rule(call)
    if rule.even or len(rule.inputs) != len(call.tensors):
        return None
    assert recipe.outputs is not None
    results = [own for own in recipe.outputs if own is not None]
    if not recipe.written and len(results) != len(rule.outputs):
        return None
    sizes = _free_labels(rule, call)
    if sizes is None or not sizes:
        return None
    labels = {label: i for i, label in enumerate(sizes)}
    by_torch = _told_by_torch(recipe, call)
    of_results = [] if recipe.written else [_labelled(dims, own, labels) for dims, own in zip(rule.outputs, results)]
    if None in of_results and not by_torch:
        return None
    rest = iter([dims or [] for dims in of_results])
    outputs = [[] if own is None or recipe.written else [next(rest)] for own in recipe.outputs]
    operands = [_labelled(dims, t.spec, labels) or [] if is_global(t) else []
                for dims, t in zip(rule.inputs, call.tensors)]
    least = [max(2, _parts_of_label(recipe, label) if chosen or label in rule.nonempty else 0,
                 _size_for_index(rule, call, label))
             for label in labels]
    return Siblings(operands, outputs, least, [], _named_numbers(call, _SCALED.get(call.func, ())), pending, by_torch)


# --------------------------------------------------------------------------------------------- ops that name sizes


def _of_named_sizes(line: Line, recipe: Recipe, call: Call, pending: bool) -> Siblings | None:
    """Where the rule knows sizes that the call names, and those of the operand."""
    assert recipe.outputs is not None
    if not all(own is not None and type(own.layout) is Layout for own in recipe.outputs) or not recipe.outputs:
        return None
    named = _NAMED[line.family](line.rule(call), recipe, call)
    if named is None or not is_global(call.tensors[0]) or not _told_by_torch(recipe, call):
        return None
    shape = call.shapes[0]
    free = [d for d, n in enumerate(shape) if n > 1]
    dims = [free.index(d) if n > 1 else ~n for d, n in enumerate(shape)]
    if not (free or call.func is aten.expand.default) or 0 in shape:
        return None
    numbers = _named_numbers(call, _SIZE_ARGUMENTS)
    return Siblings([dims], [[] for _ in recipe.outputs], [2] * len(free), [], numbers, pending, True, *named)


def _told_by_torch(recipe: Recipe, call: Call) -> bool:
    """Is it an op of one operand whose shape function is in C++, as those of all views are?"""
    return ((recipe.func.is_view or recipe.func in _NO_VIEWS) and len(call.tensors) == 1
            and not call.tensors[0].spec.lazy_bits and not any(own and own.lazy_bits for own in recipe.outputs or ()))


_NO_VIEWS = {aten.slice_backward.default, aten.select_backward.default}


def _of_view(rule: Rule, recipe: Recipe, call: Call) -> _Named | None:
    """Dims in groups, one side of which has one dim that is longer than 1: so other sizes make the same groups."""
    result = (recipe.outputs or [None])[0]
    assert result is not None
    groups = shapes.grouped(call.shapes[0], result.shape)
    for src, dst in groups:
        if min(sum(call.shapes[0][d] > 1 for d in src), sum(result.shape[d] > 1 for d in dst)) > 1:
            return None
    even = []
    cut = {sig.label for sig in recipe.signature if sig.label is not None}
    for label in sorted(cut & {label for label, _ in rule.even}):
        if label in inner_labels(rule):              # cut where the outer ones have parts of one element
            return None
        at = [(of_result, dim) for of_result, tensor in enumerate((rule.inputs[0], rule.outputs[0]))
              for dim, own in enumerate(tensor) if own == (label,)]
        if not at:
            return None
        even.append((bool(at[0][0]), at[0][1], _parts_of_label(recipe, label)))
    return _Named(groups=groups, even=even, local_size=_argument_number(call, "size"))


def _of_expand(rule: Rule, recipe: Recipe, call: Call) -> _Named | None:
    """Which dims are repeated."""
    result = (recipe.outputs or [None])[0]
    assert result is not None
    shape = call.shapes[0]
    first = result.ndim - len(shape)
    return _Named([(d, first + d, n == result.shape[first + d]) for d, n in enumerate(shape)],
                  local_size=_argument_number(call, "size"))


def _of_slice(rule: Rule, recipe: Recipe, call: Call) -> _Named | None:
    """Whether it is all of the dim."""
    result = (recipe.outputs or [None])[0]
    assert result is not None
    dim = call["dim"] % result.ndim
    return _Named([(dim, dim, call.shapes[0][dim] == result.shape[dim])])


def _of_parts(rule: Rule, recipe: Recipe, call: Call) -> _Named | None:
    """split, unbind: how many parts there are, which is looked at always."""
    return _Named()


def _of_sized_gradient(rule: Rule, recipe: Recipe, call: Call) -> _Named | None:
    return _Named(local_size=_argument_number(call, "input_sizes"))


_NAMED: dict[Family, Callable[[Rule, Recipe, Call], _Named | None]] = {
    shapes.viewed: _of_view, shapes.expanded: _of_expand, shapes.sliced: _of_slice, shapes.split_list: _of_parts,
    shapes.unbound: _of_parts, shapes.sized_backward: _of_sized_gradient}


def _argument_number(call: Call, name: str) -> int:
    """Where an argument is in the schema."""
    return list(call.values).index(name)


_SIZE_ARGUMENTS = ("size", "shape", "input_sizes", "split_size", "split_sizes", "start", "end")
# arguments whose values a rule knows nothing of: a mean is a sum divided by a count
_SCALED = {aten.div.Scalar: ("other",), aten.mul.Scalar: ("other",)}


def _named_numbers(call: Call, free: tuple[str, ...]) -> list[int | None]:
    """The ints that keys of kinds leave out (`is_size` in csrc/torch_ext/recipe_cache.cpp), None where any will do."""
    numbers: list[int | None] = []
    for name, value in call.values.items():
        if name in _SIZE_ARGUMENTS or name in _SCALED.get(call.func, ()):
            ints = [n for n in (value if isinstance(value, (list, tuple)) else [value]) if type(n) is int]
            numbers += [None if name in free else n for n in ints]
    return numbers


def _of_cat(rule: Rule, recipe: Recipe, call: Call) -> Siblings | None:
    """cat: the dim is as long as all of the operands' together; no operand is left out."""
    result = (recipe.outputs or [None])[0]
    if result is None or recipe.written or not all(is_global(t) and t.dim() == result.ndim for t in call.tensors):
        return None
    dim = call["dim"] % result.ndim
    if any(n < 2 for shape in call.shapes for n in shape):
        return None
    sizes = result.ndim - 1                          # labels of the other dims
    dims = list(range(dim)), list(range(dim, sizes))
    operands = [[*dims[0], sizes + q, *dims[1]] for q in range(len(call.tensors))]
    least = [2] * (sizes + len(operands))
    return Siblings(operands, [[[*dims[0], len(least), *dims[1]]]], least, [list(range(sizes, len(least)))],
                    _named_numbers(call, ()), False, False)


# ----------------------------------------------------------------------------------------------------- conditions


def _runs_the_op(line: Line, recipe: Recipe) -> bool:
    """Does every rank run the op itself, on what it has, with the arguments of the call, but for sizes named there?"""
    cut = {sig.label for sig in recipe.signature}
    if recipe.seeded or recipe.boxes_view or recipe.elements is not None:
        return False
    if any(recipe.local_args.values()) and line.family not in _NAMED:
        return False
    return (recipe.local_impl in (None, local_impls.view)
            or local_impls.LABEL_OF_PART.get(recipe.local_impl, "") not in {"", *cut})


def _holds_at_all_sizes(line: Line, call: Call) -> bool:
    if not is_regardless_of_size(line.family):
        return False
    return (line.decomposition is None or line.offer is not None
            or line.applies is decompositions.is_mean and not decompositions.is_mean(call))


def _free_labels(rule: Rule, call: Call) -> dict[str, int] | None:
    """The labels whose size does not matter, each with the size that it has here; None where one has several."""
    sizes: dict[str, int] = {}
    fixed: set[str] = set()
    for dims, t in zip(rule.inputs, call.tensors):
        for dim, n in zip(dims, t.shape):
            label = dim[0].rstrip("!")
            if sizes.setdefault(label, n) != n and label != "1":
                return None
            if len(dim) > 1 or n < 2 or not is_global(t):
                fixed.update(x.rstrip("!") for x in dim)
    kept = {x.rstrip("!") for dims in rule.outputs for dim in dims for x in dim} - {"1"}
    free = {sig.label for sig in signatures(rule)} | (sizes.keys() if kept <= sizes.keys() else set())
    return {label: n for label, n in sizes.items() if label in free - fixed}


def _labelled(dims: Dims, own: Spec, labels: dict[str, int]) -> list[int] | None:
    """Per dim of a tensor the number of its label, or ~n; None where a result's size does not follow from labels."""
    return [labels.get(dim[0].rstrip("!"), ~n) for dim, n in zip(dims, own.shape)] if len(dims) == own.ndim else None


def _size_for_index(rule: Rule, call: Call, label: str) -> int:
    """How many elements of a label there must be for the index that a call has: of fewer, torch's error is about the
    global shape only where the call is decided."""
    if call.func is not torch.ops.aten.select.int or not rule.inputs[0][call["dim"]][0].startswith(f"{label}!"):
        return 0
    index: int = call["index"]
    return index + 1 if index >= 0 else -index


def _parts_of_label(recipe: Recipe, label: str) -> int:
    """Into how many parts a label is cut."""
    return prod(n for sig, n in zip(recipe.signature, recipe.home.placement.shape) if sig.label == label)
