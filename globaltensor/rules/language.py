"""The rule language: two strings say everything that matters about an op.

    dims      a label per dim, tensor by tensor       "m k, k n -> m n"
    algebra   how each output depends on its operands  "a*b"  "a+b*c"  "A"      outputs separated by ";"

In the algebra a, b, c are the op's tensor arguments in order: an output is linear in a lower-case one, not linear in an
upper-case one, and does not depend on one that is not named. Without an algebra, every output depends nonlinearly on
every operand. In the dims

    k!        stays whole (softmax, sort)
    (h w)     a dim made of several labels, outermost first: it can be cut at the first only, and evenly; at the next
              one, if its size is known, on axes within those that have cut the first into parts of one
    1         a dim of size 1 that is repeated to fit
    b*        as many dims as are left, each with a label of its own

The legal *signatures* on one placement axis follow: either one label is cut, or none.

    a label that an output has flows through as S        a label that no output has is summed away and leaves P
    P enters only through a linear operand, once in a product, and in every term of a sum
    all-B is always legal

A Python number in the place of an operand is the same on every rank. It has no dims and no sbp to choose, but a term of
numbers alone is B, so that no other term of the sum may be P.

On several axes an op may have a different signature on each: an nd signature is a product of one-axis ones.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, combinations, product
from typing import NamedTuple

import torch

from globaltensor.layouts.sbp import NdSbp, Sbp, broadcast, partial_max, partial_min, partial_sum, split
from globaltensor.layouts.symbols import expected
from globaltensor.runtime.dtypes import is_inexact

Dims = tuple[tuple[str, ...], ...]                   # per dim its labels, outermost first
Sizes = dict[str, int]                               # label -> size
Term = tuple[tuple[int, bool], ...]                  # factors: (operand, enters linearly)

NUMBER = -1                                          # in `ndims`: a Python number stands in the operand's place

LEAVES = {"sum": partial_sum, "max": partial_max, "min": partial_min}


@dataclass(frozen=True)
class Rule:
    """A parsed rule. Operands are counted as the op's present tensor arguments; a term without any is a number."""

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    algebra: tuple[tuple[Term, ...], ...]            # per output its terms
    leaves: str = "sum"                              # what a label that is reduced away leaves pending
    even: tuple[tuple[str, int], ...] = ()           # labels of dims made of several, with sizes: they are cut evenly
    nonempty: tuple[str, ...] = ()                   # labels of which no part may be empty
    leads: int | None = None                         # an operand whose splits stay: the data, where it is small
    keeps: str = ""                                  # operands pending by it ("max", "min") leave results so: max(P, x)

    def __str__(self) -> str:
        """As it is written: `m k, k n -> m n    a*b`."""
        sides = (", ".join(" ".join(labels[0] if len(labels) == 1 else f"({' '.join(labels)})" for labels in dims)
                           for dims in side) for side in (self.inputs, self.outputs))
        outputs = [" + ".join("*".join(chr(97 + q) if linear else chr(65 + q) for q, linear in term) or "1"
                              for term in terms) for terms in self.algebra]
        return f"{' -> '.join(sides)}    {'; '.join(outputs)}"


class Signature(NamedTuple):
    """One legal way to run an op on one axis; `label` is the label that is cut, None if nothing is."""

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]
    label: str | None


def cut_dim(tensor: Dims, label: str, inner: bool) -> int | None:
    """The dim to cut when `label` is cut; None where the tensor lacks it. LookupError where it is not outermost, unless
    it may be an inner one."""
    for i, dim in enumerate(tensor):
        if label in dim:
            if dim[0] != label and not inner:
                raise LookupError(label)
            return i
    return None


def inner_labels(of: Rule) -> frozenset[str]:
    """Labels that can be cut though another one is outside them in some dim."""
    return frozenset(_outside(of))


def _outside(of: Rule) -> dict[str, set[str]]:
    return _outside_of(of.inputs + of.outputs, tuple(label for label, _ in of.even))


@lru_cache(10_000)
def _outside_of(tensors: tuple[Dims, ...], sized: tuple[str, ...]) -> dict[str, set[str]]:
    """Inner labels that can be cut, each with those outside it in some dim."""
    outside: dict[str, set[str]] = {}
    for dim in chain(*tensors):
        for place, label in enumerate(dim):
            if place and label in sized:
                outside.setdefault(label, set()).update(dim[:place])
    return outside


def signatures(of: Rule) -> tuple[Signature, ...]:
    """Every legal signature on one axis, all-B first. How long a label is does not matter, so one answer serves all."""
    return _signatures(replace(of, even=tuple((label, 0) for label, _ in of.even)) if of.even else of)


@lru_cache(10_000)
def _signatures(of: Rule) -> tuple[Signature, ...]:
    inner = _outside(of)
    labels = dict.fromkeys(x for t in of.inputs for d in t for x in d
                           if (x == d[0] or x in inner) and not x.endswith("!") and x != "1")
    legal: dict[tuple[NdSbp, NdSbp], Signature] = {}         # labels that cut the same dims are one signature
    for label in (None, *labels):
        try:
            cuts = [cut_dim(t, label, label in inner) if label else None for t in of.inputs]
            outs = [cut_dim(t, label, label in inner) if label else None for t in of.outputs]
        except LookupError:                          # inner label, of unknown size, of a composite dim somewhere
            continue
        for pending in _pending_sets(of, cuts):
            states = tuple(split(d) if d is not None else partial_sum if q in pending else broadcast
                           for q, d in enumerate(cuts))
            outcomes = _outcomes(of, outs, states)
            if outcomes is not None:
                legal.setdefault((states, outcomes), Signature(states, outcomes, label))
    if of.keeps:                                     # whichever are pending: a maximum may count an operand many times
        kept = LEAVES[of.keeps]
        for states in list(product((broadcast, kept), repeat=len(of.inputs)))[1:]:
            legal[states, (kept,) * len(of.outputs)] = Signature(states, (kept,) * len(of.outputs), None)
    return tuple(legal.values())


def signatures_from(of: Rule, states: list[Sbp], dtypes: list[torch.dtype]) -> Iterator[Signature]:
    """The signatures for operands of these dtypes that have these sbps on an axis. No factor beside one of floats
    becomes a pending sum that is none: its terms would be 0 on all ranks but one, and 0 times inf is nan."""
    factors = {q for terms in of.algebra for term in terms for q, _ in term
               if any(is_inexact(dtypes[other]) for other, _ in term if other != q)}
    for sig in signatures(of):
        if not any(sig.inputs[q].is_partial and not states[q].is_partial for q in factors):
            yield sig


def _pending_sets(of: Rule, cuts: list[int | None]) -> list[frozenset[int]]:
    """Sets of operands that may be pending at once: none, or one linear factor in every term that nothing cuts.

    They are candidates, in a fixed order; `_outcome` decides which are legal.
    """
    sets = {frozenset[int](): None}                  # a dict for its order: every process tries them alike
    for terms in of.algebra:
        # of each term one factor is pending, or none if a cut label leaves the term pending by itself
        choices = [[(q,) for q, linear in term if linear and cuts[q] is None] +
                   ([()] if any(cuts[q] is not None for q, _ in term) else []) for term in terms]
        for chosen in product(*choices):
            sets[frozenset(chain(*chosen))] = None
    if len(of.algebra) > 1 and len(sets) < 8:        # for several outputs; bounded, as it squares their number
        sets |= {a | b: None for a, b in combinations(list(sets), 2)}
    used = {q for terms in of.algebra for term in terms for q, _ in term}
    free = [q for q in range(len(of.inputs)) if q not in used and cuts[q] is None]
    for q in free[:4]:                               # no output depends on it; bounded, as it doubles their number
        sets |= {s | {q}: None for s in list(sets)}
    return list(sets)


def _outcomes(of: Rule, cuts: list[int | None], states: tuple[Sbp, ...]) -> tuple[Sbp, ...] | None:
    """The sbp of every output, None where the states are not legal for one of them."""
    sbps = []
    for k, dim in enumerate(cuts):
        sbp = _outcome(of, k, dim, states)
        if sbp is None:
            return None
        sbps.append(sbp)
    return tuple(sbps)


def _outcome(of: Rule, k: int, dim: int | None, states: tuple[Sbp, ...]) -> Sbp | None:
    """The sbp of output k, or None where the states are not legal for it."""
    used = {q for term in of.algebra[k] for q, _ in term}
    if dim is not None:                              # parts of a pending sum would be neither parts nor terms
        return split(dim) if not any(states[q].is_partial for q in used) else None
    kinds = set()                                    # of the terms: all must be pending in the same way, or none
    for term in of.algebra[k]:
        if any(not linear and states[q].is_partial for q, linear in term):
            return None                              # a pending sum may only enter linearly
        pending = sum(states[q].is_partial for q, _ in term)
        summed = any(states[q].is_split for q, _ in term)
        if pending + summed > 1:
            return None                              # P * P, or P times a summed label
        kinds.add(partial_sum if pending else LEAVES[of.leaves] if summed else broadcast)
    if len(kinds) > 1:
        return None                                  # B + P would add B once per rank
    return kinds.pop() if kinds else broadcast


def sized_rule(of: Rule, shapes: list[tuple[int, ...]]) -> Rule:
    """The rule for operands of these shapes: a dim of size 1 that is repeated to fit is cut nowhere, so it becomes `1`;
    a label whose sizes differ otherwise stays whole, as its parts would not meet."""
    sizes: dict[str, list[int]] = {}
    for dims, shape in zip(of.inputs, shapes):
        for dim, n in zip(dims, shape):
            if len(dim) == 1 and n not in (seen := sizes.setdefault(dim[0], [])):    # no set: symbols have no hash
                seen.append(n)
    differing = {label for label, seen in sizes.items() if len(seen) > 1 and label != "1"}
    if not differing:
        return of
    repeated = {label for label in differing if sum(bool(n != 1) for n in sizes[label]) == 1}

    def mark(dims: Dims, shape: tuple[int | None, ...]) -> Dims:
        return tuple(("1",) if n == 1 and dim[0] in repeated else
                     tuple(f"{x}!" if x in differing - repeated and not x.endswith("!") else x for x in dim)
                     for dim, n in zip(dims, shape))

    return replace(of, inputs=tuple(mark(dims, shape) for dims, shape in zip(of.inputs, shapes)),
                   outputs=tuple(mark(dims, (None,) * len(dims)) for dims in of.outputs))


def expected_rule(of: Rule) -> Rule:
    """The rule with numbers for symbols."""
    return replace(of, even=tuple((label, n) for (label, _), n in zip(of.even, expected([n for _, n in of.even]))))


def label_sizes(of: Rule, shapes: list[tuple[int, ...]]) -> Sizes:
    """The size of every label that has a dim of its own in an operand."""
    sizes = {dim[0].rstrip("!"): n for dims, shape in zip(of.inputs, shapes) for dim, n in zip(dims, shape)
             if len(dim) == 1 and dim[0] != "1"}
    sizes.update(of.even)
    return sizes


def fits(of: Rule, nd: tuple[Signature, ...], axes: tuple[int, ...], sizes: Sizes) -> bool:
    """Are labels that need it cut evenly, inner ones where all outside them are cut up, and none into empty parts where
    the kernel does not take them?"""
    if not of.even and not of.nonempty:
        return True
    even, outside = dict(of.even), _outside(of)
    ways: dict[str, int] = {}
    for sig, parts in zip(nd, axes):
        if sig.label is not None:
            if any(ways.get(x, 1) != even.get(x) for x in outside.get(sig.label, ())):
                return False
            ways[sig.label] = ways.get(sig.label, 1) * parts
    return all((label not in even or even[label] % n == 0) and (label not in of.nonempty or sizes.get(label, 0) >= n)
               for label, n in ways.items())
