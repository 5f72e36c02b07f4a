"""Which sizes do not matter to a recipe, so that calls of other sizes are done by it: its *siblings*.

A length that was never seen, of a batch or of a sequence, would be a new decision, of hundreds of microseconds, for
each op. But most recipes are the same whatever the size is. With such a one goes what sizes the results of a sibling
have, dim by dim, and the native dispatcher does siblings without Python (csrc/torch_ext/siblings.cpp).

That must be certain, as nobody looks again. Also, a rank that decides anew must decide as one that has a sibling's
recipe, for what is cached differs between ranks: so a price, which depends on sizes, may have no say. Hence

    the rule             knows no sizes, but for which of them are 1 (`families.regardless_of_size`); sizes of 0 and 1
                         are never taken for others
    the decomposition    applies at no size, if there is one; where it makes an offer, it is not asked if
    the signature        moves nothing, which cannot be beaten (`choose`)
    the rank's call      is the op itself, with its own arguments
    the results          have one size for each label. Where the op makes dims itself, their sizes may follow from a
                         label that stays whole; never from one that can be cut, as its parts give parts of results
"""
from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from globaltensor.algorithms import decompositions, local_impls
from globaltensor.dispatch.recipe import Recipe
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Spec
from globaltensor.op_table.line import Line
from globaltensor.op_table.variants import line_of
from globaltensor.rules.call import Call
from globaltensor.rules.families import is_regardless_of_size
from globaltensor.rules.language import Dims, Rule, signatures


class Siblings(NamedTuple):
    """What tells the siblings of a recipe. Of each dim a label, by its number, or ~n: it has the size n in all of them.

    operands     per operand its dims; none of a plain operand, which is the same in all
    outputs      per result its dims; none of one that is not a tensor
    least        per label the least size
    no_larger    they hold where the results are no larger than operand 0
    """

    operands: list[list[int]]
    outputs: list[list[int]]
    least: list[int]
    no_larger: bool


def siblings_of(recipe: Recipe, call: Call) -> Siblings | None:
    """What tells the siblings of this recipe, which was decided for this call; None where it has none."""
    line = line_of(recipe.func)
    if line is None or recipe.outputs is None or not _runs_the_op(recipe) or not _holds_at_all_sizes(line, call):
        return None
    rule = line.rule(call)
    pending = [q for q, t in enumerate(call.tensors) if is_global(t) and t.spec.layout.partial]
    if rule.even or pending and len(call.tensors) > 1 or len(rule.inputs) != len(call.tensors):
        return None
    results = [own for own in recipe.outputs if own is not None]
    if not recipe.written and len(results) != len(rule.outputs):
        return None
    sizes = _free_labels(rule, call)
    if sizes is None or not sizes:
        return None
    labels = {label: i for i, label in enumerate(sizes)}
    of_results = [] if recipe.written else [_labelled(dims, own, labels) for dims, own in zip(rule.outputs, results)]
    if None in of_results:
        return None
    rest = iter([dims or [] for dims in of_results])
    outputs = [[] if own is None or recipe.written else next(rest) for own in recipe.outputs]
    operands = [_labelled(dims, t.spec, labels) or [] if is_global(t) else []
                for dims, t in zip(rule.inputs, call.tensors)]
    least = [max(2, _parts_of_label(recipe, label) if label in rule.nonempty else 0, _size_for_index(rule, call, label))
             for label in labels]
    return Siblings(operands, outputs, least, bool(pending))


def _runs_the_op(recipe: Recipe) -> bool:
    """Does every rank run the op itself, on what it has, with the arguments of the call?"""
    cut = {sig.label for sig in recipe.signature}
    return (not any(recipe.wants) and not any(recipe.local_args.values()) and not recipe.seeded
            and not recipe.boxes_view and recipe.elements is None
            and (recipe.local_impl is None or local_impls.LABEL_OF_PART.get(recipe.local_impl, "") not in {"", *cut}))


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
