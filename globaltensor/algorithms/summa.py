"""Products of matrices on a grid of ranks: in panels, and with that matrix stationary that minimises communication.

C[m, n] = sum over k of A[m, k] B[k, n] is a cuboid of work, m x k x n. Each axis of the grid cuts one of these labels,
and a rank does its part of the cuboid: it needs the parts of A and B that are the projections of its part, and what it
makes of C is a term of a sum if k is cut. With A on (m, k), B on (k, n), C wanted on (m, n), as (row, column) are cut:

    (m, n)   C is stationary: A passes along the rows, B along the columns    SUMMA (van de Geijn and Watts, 1997)
    (m, k)   A is stationary: B passes, and terms of C are summed             better if A is the largest
    (k, n)   B is stationary: A passes, and terms of C are summed             better if B is

All give the same result; the one that communicates the fewest bytes is taken. The gradients of Y = X W are products on
the same grid, dX and dW wanted where X and W are. What passes, passes in panels (ranges of the label that is not cut),
so that no rank holds a gathered matrix. On q x q ranks each of the two matrices that are not stationary costs (q-1)/q^2
of its bytes: 6 (q-1)/q^2 for the three products of a layer. Grids need not be square, nor parts equal; on further axes
the operands may have any sbp that needs no communication (a split batch leaves a weight's gradient pending).
"""
from __future__ import annotations

from itertools import permutations
from typing import NamedTuple

from globaltensor.algorithms.offer import Offer, boxings_to, largest_part
from globaltensor.algorithms.run import Run
from globaltensor.boxings.traffic import received_at_most
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import Layout, Shape, Shards, Spec, layout, replicated, spec
from globaltensor.layouts.rank_regions import regions_by
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.regions import Range, Region, slices, split_range, volume
from globaltensor.layouts.sbp import NdSbp, Sbp, broadcast, partial_sum, split
from globaltensor.rules.call import Call
from globaltensor.runtime import custom_ops
from globaltensor.runtime.dtypes import accumulation_dtype

PANEL = 1 << 24                                      # bytes of passing parts, from which they pass in panels

_LINEAR_DIMS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"          # labels for the leading dims of a linear layer's input

Cuts = tuple[str | None, str | None]                 # which label of A, and which of B, an axis cuts


class GridProduct(NamedTuple):
    """One way to do a product on a grid: which label of the work every axis cuts, and what follows from that."""

    terms: tuple[str, str, str]                      # the labels of A, B and C
    sizes: tuple[tuple[str, int], ...]               # of all labels
    work: Layout                                     # of the work, whose dims are the labels in the order of `sizes`
    panel: str                                       # the label in whose ranges parts pass
    passing: int                                     # bytes of what passes by a rank, in all
    received: int                                    # bytes, by the rank that receives most
    terms_sbp: NdSbp                                 # of what ranks make of C: pending where it is to be summed
    out: Layout

    @property
    def moves_result(self) -> bool:
        """Must what the ranks make be moved, and summed, to become C?"""
        names = [x for x, _ in self.sizes]
        own = tuple(_output_sbp(names[s.dim] if s.is_split else None, self.terms[2]) for s in self.work.sbp)
        return own != self.out.sbp

    def region(self, rank: int, labels: str, ends: Range) -> Region:
        """A rank's part of the work, within a range of the panel's label, projected on these labels."""
        part = dict(zip((x for x, _ in self.sizes), self.work.region(tuple(n for _, n in self.sizes), rank)))
        part[self.panel] = clip(part[self.panel], ends)
        return tuple(part[x] for x in labels)

    def held(self, labels: str, ends: Range, sbp: NdSbp | None = None) -> Layout:
        """The same for every rank, as a layout; on axes that cut none of these labels as in `sbp`, else broadcast."""
        if self.is_whole(ends):
            return _projected_work(self, labels, sbp)
        return regions_by(self.work.placement, _WorkPart(self, labels, ends), sbp)

    def is_whole(self, ends: Range) -> bool:
        """Is this panel the only one?"""
        return ends == (0, dict(self.sizes)[self.panel])

    def shape(self, labels: str) -> Shape:
        """The sizes of these labels."""
        return tuple(dict(self.sizes)[x] for x in labels)


class _WorkPart(NamedTuple):
    """Which part of these labels each rank has in a panel."""

    plan: GridProduct
    labels: str
    ends: Range

    def region(self, rank: int) -> Region:
        return self.plan.region(rank, self.labels, self.ends)


class _Clipped(NamedTuple):
    """What of these rows of a dim is in each rank's part."""

    of: Layout
    shape: Shape
    dim: int
    ends: Range

    def region(self, rank: int) -> Region:
        region = self.of.region(self.shape, rank)
        return (*region[:self.dim], clip(region[self.dim], self.ends), *region[self.dim + 1:])


def clip(a: Range, b: Range) -> Range:
    """What two ranges share."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))


def equation(call: Call) -> tuple[str, str, str]:
    """The labels of both operands and of the output."""
    if "equation" in call.values:
        a, b, out = call["equation"].replace("->", ",").split(",")
        return a, b, out
    lead = _LINEAR_DIMS[:call["x"].dim() - 1]
    return f"{lead}k", "nk", f"{lead}n"


def offer(call: Call, operands: list[Spec]) -> Offer | None:
    """What the product takes, if both operands are on a grid, so that their layouts say where the output is wanted."""
    plan = _of_call(call) if all(is_global(t) for t in call.tensors) else None
    if plan is None:
        return None
    wants = tuple(own.layout for own in operands[:2])
    if len(operands) > 2:
        wants = (*wants, _bias_layout(plan))
    work = largest_part(plan.work, tuple(n for _, n in plan.sizes))
    return Offer("panels of SUMMA", wants, (plan.out,), work, (boxings_to(operands, wants),),
                 exchanges=len(_panels(plan)) * (1 + plan.moves_result), received=plan.received)


def _of_call(call: Call) -> GridProduct | None:
    return grid_product(equation(call), call.tensors[0].spec, call.tensors[1].spec)


@remembered
def grid_product(terms: tuple[str, str, str], of_a: Spec, of_b: Spec) -> GridProduct | None:
    """The product that communicates the fewest bytes; None if the operands are not on a grid."""
    where = of_a.placement
    if of_a.layout.partial or of_b.layout.partial or where != of_b.placement:
        return None
    cuts: list[Cuts] = [(terms[0][s.dim] if s.is_split else None, terms[1][t.dim] if t.is_split else None)
                        for s, t in zip(of_a.sbp, of_b.sbp)]
    wanted = _wanted(terms, cuts)
    if wanted is None or any(where.shape[axis] == 1 for axis in wanted):     # one rank in a row is not a grid
        return None
    sizes = dict(zip(terms[0], of_a.shape)) | dict(zip(terms[1], of_b.shape))
    out = tuple(_output_sbp(wanted.get(axis, x or y), terms[2]) for axis, (x, y) in enumerate(cuts))
    grid = list(dict.fromkeys(x for axis in wanted for x in (*cuts[axis], wanted[axis]) if x is not None))
    products = []
    for chosen in permutations(grid, 2):             # of the three labels, the two that the grid's axes cut
        labels = dict(zip(wanted, chosen))
        panel, = set(grid) - set(chosen)
        axes = [labels.get(axis, x or y) for axis, (x, y) in enumerate(cuts)]
        work = layout(where, tuple(split(list(sizes).index(x)) if x else broadcast for x in axes))
        terms_sbp = tuple(partial_sum if _output_sbp(x, terms[2]).is_partial else broadcast for x in axes)
        products.append(_priced(GridProduct(terms, tuple(sizes.items()), work, panel, 0, 0, terms_sbp,
                                            layout(where, out)), of_a, of_b))
    return min(products, key=lambda plan: plan.received)


def _priced(plan: GridProduct, of_a: Spec, of_b: Spec) -> GridProduct:
    """The product, with the bytes that pass by a rank, and those that the rank receives that receives most."""
    received = passing = 0
    first = plan.work.placement.flat[0]              # no rank's parts are larger
    for labels, own in zip(plan.terms, (of_a, of_b)):
        want = _projected_work(plan, labels)
        received += received_at_most(own.layout, want, own.shape) * own.dtype.itemsize
        passing += volume(want.region(own.shape, first)) * own.dtype.itemsize * (plan.panel in labels)
    if plan.moves_result:
        received += received_at_most(_projected_work(plan, plan.terms[2], plan.terms_sbp), plan.out,
                                  plan.shape(plan.terms[2])) * of_a.dtype.itemsize
    return plan._replace(passing=passing, received=received)


def _projected_work(plan: GridProduct, labels: str, others: NdSbp | None = None) -> Layout:
    """A rank's part of the work, projected on these labels, as a layout; on axes that cut none of them as in `others`,
    else broadcast."""
    names = [x for x, _ in plan.sizes]
    cuts = [names[s.dim] if s.is_split else "" for s in plan.work.sbp]
    return layout(plan.work.placement, tuple(split(labels.index(x)) if x and x in labels else other for x, other in
                                             zip(cuts, others or replicated(plan.work.placement).sbp)))


def _wanted(terms: tuple[str, str, str], cuts: list[Cuts]) -> dict[int, str] | None:
    """Axes of the grid -> the label of C that is to be cut there; None if the operands are not on a grid.

    An axis of the grid is one where A and B are cut differently, in a way that no rule allows.
    """
    a, b, out = terms
    odd: dict[int, tuple[str, str]] = {}
    for axis, (x, y) in enumerate(cuts):
        if x == y or x is None and (y is None or y not in a) or y is None and (x is None or x not in b):
            continue
        if x is None or y is None:
            return None
        odd[axis] = x, y
    if len(odd) == 2:                                # A on (m, k), B on (k, n), the axes in any order
        row = next((axis for axis, (x, y) in odd.items() if x in out and y not in out), min(odd))
        column, = odd.keys() - {row}
        (m, k), (k_of_a, n) = odd[row], odd[column]
        fits = k == k_of_a and k not in out and m in out and n in out and m not in b and n not in a
        return {row: m, column: n} if fits else None
    summed = [axis for axis, (x, y) in enumerate(cuts) if x is not None and x == y and x not in out]
    if len(odd) != 1 or not summed:
        return None
    (own, (m, k)), = odd.items()                     # A on (m, s), B on (k, s): m stays, k goes to an axis of s
    fits = m in out and k in out and m not in b and k not in a
    return {own: m, min(summed, key=lambda axis: abs(axis - own)): k} if fits else None


def _output_sbp(label: str | None, out: str) -> Sbp:
    """The output's sbp on an axis that cuts a label of the work."""
    return broadcast if label is None else split(out.index(label)) if label in out else partial_sum


def product(call: Call, run: Run) -> GlobalLike:
    """The product, in panels, and its bias."""
    plan = _of_call(call)
    assert plan is not None                          # there was an offer
    out = (_sum_terms if plan.moves_result else _accumulate)(call, run, plan)
    if call.get("bias") is None:
        return out
    bias, = run.redistribute([call["bias"]], [_bias_layout(plan)], str(call.func))
    for rank, shard in out.shards.items():
        shard += bias.shards[rank]
    return out


def _bias_layout(plan: GridProduct) -> Layout:
    """Of a bias: as the last dim of what comes out; pending where that is, as all of its terms would add it."""
    last = split(len(plan.terms[2]) - 1)
    return plan.out.with_sbp(tuple(split(0) if s == last else s if s.is_partial else broadcast for s in plan.out.sbp))


def _panels(plan: GridProduct) -> list[Range]:
    """Ranges of the panel's label: one; or, if much passes, up to as many as the grid is wide."""
    n = dict(plan.sizes)[plan.panel]
    parts = max(1, min(max(plan.out.placement.shape), n, plan.passing // PANEL))
    return [split_range(n, parts, i) for i in range(parts)]


def _work(call: Call, run: Run, plan: GridProduct, ends: Range) -> Shards:
    """What every rank makes of C from a panel."""
    left, right, out = plan.terms
    wanted = [plan.held(left, ends), plan.held(right, ends)]
    lefts, rights = run.gather_regions(call.tensors[:2], wanted, str(call.func))
    return {rank: custom_ops.contract(f"{left},{right}->{out}", lefts[rank], rights[rank]) for rank in lefts}


def _accumulate(call: Call, run: Run, plan: GridProduct) -> GlobalLike:
    """C is stationary: every panel adds a term to each rank's part of it."""
    totals: Shards = {}
    dtype = call.tensors[0].dtype
    for ends in _panels(plan):
        for rank, term in _work(call, run, plan, ends).items():
            totals[rank] = totals[rank].add_(term) if rank in totals else term.to(accumulation_dtype(dtype))
    return run.wrap(spec(plan.out, plan.shape(plan.terms[2]), None, dtype), {r: t.to(dtype) for r, t in totals.items()})


def _sum_terms(call: Call, run: Run, plan: GridProduct) -> GlobalLike:
    """An operand is stationary: every panel makes terms of a range of C, which are summed where that is wanted."""
    out = plan.terms[2]
    shape, dim, dtype = plan.shape(out), out.index(plan.panel), call.tensors[0].dtype
    panels = _panels(plan)
    if plan.is_whole(panels[0]):
        return run.scatter_add_regions(_work(call, run, plan, panels[0]), plan.held(out, panels[0], plan.terms_sbp),
                                       spec(plan.out, shape, None, dtype), str(call.func))
    pending = tuple(s if s.is_partial else broadcast for s in plan.out.sbp)
    shards: Shards = {}
    for ends in panels:
        terms = _work(call, run, plan, ends)
        wanted = regions_by(plan.out.placement, _Clipped(plan.out, shape, dim, ends), pending)
        panel = run.scatter_add_regions(terms, plan.held(out, ends, plan.terms_sbp), spec(wanted, shape, None, dtype),
                                        str(call.func))
        for rank, part in panel.shards.items():
            shard = shards.setdefault(rank, part.new_empty(plan.out.local_shape(shape, rank)))
            shard[slices(wanted.region(shape, rank), plan.out.region(shape, rank))] = part
    return run.wrap(spec(plan.out, shape, None, dtype), shards)
