"""Products of matrices that lie on a grid of ranks: in panels, and with that matrix at rest that makes the least move.

C[m, n] = sum over k of A[m, k] B[k, n] is a box of work, m x k x n. Each axis of the grid cuts one of its labels, and
a rank does its part of the box: it wants the parts of A and B that are the box's shadows, and its part of C is a term
of a sum where k is cut. With A on (m, k), B on (k, n) and C wanted on (m, n), as (row, column) are cut:

    (m, n)   C rests: A passes along the rows, B along the columns       SUMMA (van de Geijn and Watts, 1997)
    (m, k)   A rests: B passes, and terms of C are summed up             which is better where A is the largest
    (k, n)   B rests: A passes, and terms of C are summed up             where B is

All are right; the one that moves the fewest bytes is taken. Of the gradients of Y = X W the same is true: dX and dW are
products of matrices on the same grid, wanted where X and W lie. What passes, passes in panels (ranges of the label that
no axis cuts), so that no rank holds the gathered form. On q x q ranks each of the two matrices that do not rest costs
(q-1)/q^2 of its bytes: 6 (q-1)/q^2 for the three products of a layer. Grids need be no square, parts not equal; on
further axes operands may lie in any way that asks for no move (a split batch leaves a weight's gradient pending).
"""
from __future__ import annotations

from functools import lru_cache
from itertools import permutations
from math import prod
from typing import Any, NamedTuple

import torch

from globaltensor.layouts.layout import Layout, Shape, Spec, layout, spec
from globaltensor.layouts.rank_regions import RankRegions, rank_regions
from globaltensor.layouts.regions import Region, intersect, slices, split_range, volume
from globaltensor.layouts.sbp import NdSbp, Sbp, broadcast, partial_sum, split
from globaltensor.rules.call import Call
from globaltensor.runtime import custom_ops
from globaltensor.runtime.dtypes import accumulation_dtype

PANEL = 1 << 24                                      # bytes of what passes from which it passes in panels

_LEADING = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Form(NamedTuple):
    """Which label of the work every axis cuts, and what follows from that."""

    terms: tuple[str, str, str]                      # the labels of A, B and C
    sizes: tuple[tuple[str, int], ...]               # of all labels
    work: Layout                                     # of the work, whose dims are the labels in the order of `sizes`
    panel: str                                       # what passes, passes in ranges of this label
    passing: int                                     # bytes that a rank would hold of it in all
    held: NdSbp                                      # of terms of C: pending where they are to be summed
    out: Layout

    @property
    def scattered(self) -> bool:
        """Is what the ranks make to be moved, and summed up, until it is C?"""
        names = [x for x, _ in self.sizes]
        made = (_state(names[s.dim] if s.is_split else None, self.terms[2]) for s in self.work.sbp)
        return tuple(made) != self.out.sbp

    def region(self, rank: int, labels: str, ends: tuple[int, int]) -> Region:
        """The part of the work of a rank that is within a range of the panel's label, seen from these labels."""
        found = dict(zip((x for x, _ in self.sizes), self.work.region(tuple(n for _, n in self.sizes), rank)))
        found[self.panel] = clip(found[self.panel], ends)
        return tuple(found[x] for x in labels)

    def rank_regions(self, labels: str, ends: tuple[int, int], sbp: NdSbp | None = None) -> RankRegions:
        where = self.work.placement
        return rank_regions(where, {rank: self.region(rank, labels, ends) for rank in where.flat}, sbp)

    def shape(self, labels: str) -> Shape:
        return tuple(dict(self.sizes)[x] for x in labels)


def clip(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """What two ranges share."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))


def equation(call: Call) -> tuple[str, str, str]:
    """The labels of both operands and of the output."""
    if "equation" in call.values:
        a, b, out = call["equation"].replace("->", ",").split(",")
        return a, b, out
    lead = _LEADING[:call["x"].dim() - 1]
    return f"{lead}k", "nk", f"{lead}n"


def on_grid(call: Call) -> bool:
    """Do both operands lie on a grid, so that their layouts say where the output is wanted?"""
    return all(hasattr(t, "spec") for t in call.tensors) and _form(call) is not None


def _form(call: Call) -> Form | None:
    return _found(equation(call), call.tensors[0].spec, call.tensors[1].spec)


@lru_cache(10_000)
def _found(terms: tuple[str, str, str], of_a: Spec, of_b: Spec) -> Form | None:
    where = of_a.placement
    if of_a.layout.partial or of_b.layout.partial or where != of_b.placement:
        return None
    cuts = [tuple(labels[s.dim] if s.is_split else None for labels, s in zip(terms, pair))
            for pair in zip(of_a.sbp, of_b.sbp)]     # per axis the labels that are cut of A and of B
    wanted = _wanted(terms, cuts)
    if wanted is None or any(where.shape[axis] == 1 for axis in wanted):     # one rank in a row is no grid
        return None
    sizes = dict(zip(terms[0], of_a.shape)) | dict(zip(terms[1], of_b.shape))
    out = tuple(_state(wanted.get(axis, x or y), terms[2]) for axis, (x, y) in enumerate(cuts))
    grid = {x: None for axis in wanted for x in (*cuts[axis], wanted[axis])}
    found = []
    for chosen in permutations(grid, 2):
        labels = dict(zip(wanted, chosen))
        panel, = set(grid) - set(chosen)
        at = [labels.get(axis, x or y) for axis, (x, y) in enumerate(cuts)]
        work = layout(where, tuple(split(list(sizes).index(x)) if x else broadcast for x in at))
        held = tuple(partial_sum if _state(x, terms[2]).is_partial else broadcast for x in at)
        found.append(_priced(Form(terms, tuple(sizes.items()), work, panel, 0, held, layout(where, out)), of_a, of_b))
    return min(found, key=lambda priced: priced[0])[1]


def _priced(form: Form, of_a: Spec, of_b: Spec) -> tuple[int, Form]:
    """The bytes that a form moves, to the rank that receives most; and the form, knowing what passes by a rank."""
    whole = 0, dict(form.sizes)[form.panel]
    moved = passing = 0
    for labels, of in zip(form.terms, (of_a, of_b)):
        want = form.rank_regions(labels, whole)
        moved += _received({rank: of.region(rank) for rank in want.regions}, want.regions) * of.dtype.itemsize
        passing += max(map(volume, want.regions.values())) * of.dtype.itemsize * (form.panel in labels)
    if form.scattered:
        shape, axes = form.shape(form.terms[2]), form.out.placement.shape
        terms = prod(n for n, held, s in zip(axes, form.held, form.out.sbp) if held.is_partial and not s.is_partial)
        own = form.rank_regions(form.terms[2], whole).regions
        moved += _received(own, {rank: form.out.region(shape, rank) for rank in own}, terms) * of_a.dtype.itemsize
    return moved, form._replace(passing=passing)


def _received(own: dict[int, Region], wanted: dict[int, Region], terms: int = 1) -> int:
    """Elements that the rank receives that receives most, where every element is a sum of so many ranks' terms."""
    held = {rank: intersect(own[rank], region) for rank, region in wanted.items()}
    return max(terms * volume(region) - (volume(held[rank]) if held[rank] else 0) for rank, region in wanted.items())


def _wanted(terms: tuple[str, str, str], cuts: list[tuple]) -> dict[int, str] | None:
    """Axes of the grid -> the label of C that is to be cut there; None where the operands do not lie on a grid."""
    a, b, out = terms
    odd = [axis for axis, (x, y) in enumerate(cuts)
           if x != y and not (x is None and y not in a) and not (y is None and x not in b)]
    if any(None in cuts[axis] for axis in odd):
        return None
    if len(odd) == 2:                                # A on (m, k), B on (k, n), the axes in any order
        row = next((axis for axis in odd if cuts[axis][0] in out and cuts[axis][1] not in out), odd[0])
        column = odd[1 - odd.index(row)]
        (m, k), (also, n) = cuts[row], cuts[column]
        good = k == also and k not in out and m in out and n in out and m not in b and n not in a
        return {row: m, column: n} if good else None
    summed = [axis for axis, (x, y) in enumerate(cuts) if x is not None and x == y and x not in out]
    if len(odd) != 1 or not summed:
        return None
    m, k = cuts[odd[0]]                              # A on (m, s), B on (k, s): m stays, k goes to the other axis
    good = m in out and k in out and m not in b and k not in a
    return {odd[0]: m, min(summed, key=lambda axis: abs(axis - odd[0])): k} if good else None


def _state(label: str | None, out: str) -> Sbp:
    """The output's sbp on an axis that cuts a label."""
    return broadcast if label is None else split(out.index(label)) if label in out else partial_sum


def product(call: Call, run: Any) -> Any:
    """The product, in panels."""
    form = _form(call)
    made = (_scattered if form.scattered else _grown)(call, run, form)
    bias = call.get("bias")
    if bias is None:
        return made
    last = tuple(split(0) if s == split(made.dim() - 1) else broadcast for s in form.out.sbp)
    bias, = run.redistribute([bias], [layout(form.out.placement, last)], str(call.func))
    for rank, shard in made.shards.items():
        shard += bias.shards[rank]
    return made


def _panels(form: Form) -> list[tuple[int, int]]:
    """Ranges of the panel's label: as many as the grid is wide, where what passes is large."""
    n = dict(form.sizes)[form.panel]
    parts = max(1, min(max(form.out.placement.shape), n, form.passing // PANEL))
    return [split_range(n, parts, i) for i in range(parts)]


def _work(call: Call, run: Any, form: Form, ends: tuple[int, int]) -> dict[int, torch.Tensor]:
    """What every rank makes of a panel."""
    left, right, out = form.terms
    wanted = [form.rank_regions(left, ends), form.rank_regions(right, ends)]
    lefts, rights = run.gather_regions(call.tensors[:2], wanted, str(call.func))
    return {rank: custom_ops.contract(f"{left},{right}->{out}", lefts[rank], rights[rank]) for rank in lefts}


def _grown(call: Call, run: Any, form: Form) -> Any:
    """C rests: every panel adds a term to it."""
    made: dict[int, torch.Tensor] = {}
    dtype = call.tensors[0].dtype
    for ends in _panels(form):
        for rank, term in _work(call, run, form, ends).items():
            made[rank] = made[rank].add_(term) if rank in made else term.to(accumulation_dtype(dtype))
    return run.wrap(spec(form.out, form.shape(form.terms[2]), None, dtype), {r: t.to(dtype) for r, t in made.items()})


def _scattered(call: Call, run: Any, form: Form) -> Any:
    """An operand rests: every panel makes the terms of a range of C, which are summed up where it shall lie."""
    out, where = form.terms[2], form.out.placement
    shape, dim, dtype = form.shape(out), out.index(form.panel), call.tensors[0].dtype
    pending = tuple(s if s.is_partial else broadcast for s in form.out.sbp)
    regions = {rank: form.out.region(shape, rank) for rank in where.flat}
    made: dict[int, torch.Tensor] = {}
    for ends in _panels(form):
        terms = _work(call, run, form, ends)
        wanted = rank_regions(where, {rank: (*region[:dim], clip(region[dim], ends), *region[dim + 1:])
                                      for rank, region in regions.items()}, pending)
        done = run.scatter_add_regions(terms, form.rank_regions(out, ends, form.held), shape, dtype, wanted,
                                       str(call.func))
        for rank, part in done.shards.items():
            made.setdefault(rank, part.new_empty(form.out.local_shape(shape, rank)))[
                slices(wanted.regions[rank], regions[rank])] = part
    return run.wrap(spec(form.out, shape, None, dtype), made)
