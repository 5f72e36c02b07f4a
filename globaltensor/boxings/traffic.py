"""How many elements one step of a boxing moves, in closed form: no rank is compared with another.

A rank r of dst wants the region W(r), and holds H(r) of src. With T terms of a sum (1 where nothing is reduced),

    r receives   T |W(r)| - |W(r) and H(r)|
    q sends      c |E(q)| - what goes to ranks that hold the same

where E(q) is what q sends to each that wants it (`BoxingRoute.source_part`) and c the number of those that want each
element. Each size is a product over dims, and each factor the overlap of a range with the parts of a path
(layouts/paths.py). Where every split is even, all ranks have the same sizes, and but for their overlaps, which are
nothing somewhere if two different axes split a dim, nothing depends on the rank. Else the extremes lie at few ranks: at
the first and the last of an axis, and where the larger parts end.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain, product
from math import prod
from typing import NamedTuple

from globaltensor.boxings import native_prices
from globaltensor.boxings.roles import tied_dim
from globaltensor.boxings.route import BoxingRoute, disjoint, is_listed, route
from globaltensor.layouts.layout import Layout, Shape
from globaltensor.layouts.paths import overlap, part_at
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.regions import volume
from globaltensor.layouts.sbp import NdSbp


class StepTraffic(NamedTuple):
    """Elements: that the busiest rank receives or sends, and that the rank reads that reads most, its own included."""

    crossing: int
    touched: int


@remembered
def traffic(src: Layout, dst: Layout, shape: Shape) -> StepTraffic:
    """What this step moves for a tensor of `shape`."""
    by_rank = isinstance(src, RankRegions) or isinstance(dst, RankRegions)
    if not by_rank and src.placement == dst.placement:
        even = even_traffic(axis_codes(src.sbp), axis_codes(dst.sbp), src.placement.shape, shape)
        if even is not None:
            return even
    if by_rank or is_listed(src, dst):
        return counted_traffic(src, dst, shape)
    if src.placement == dst.placement:
        return uneven_traffic(src, dst, shape)
    step = route(src, dst, shape)
    assert isinstance(step, BoxingRoute)
    takers, senders = extreme_ranks(step)
    received, touched = zip(*(_received(step, rank) for rank in takers))
    return StepTraffic(max(*received, *_sent(step, senders)), max(touched))


def uneven_traffic(src: Layout, dst: Layout, shape: Shape) -> StepTraffic:
    """Of a step on one placement whose parts may differ."""
    known = native_prices.step_traffic(axis_codes(src.sbp), axis_codes(dst.sbp), src.placement.shape, shape)
    return extreme_traffic(src, dst, shape) if known is None else StepTraffic(*known)


def extreme_traffic(src: Layout, dst: Layout, shape: Shape) -> StepTraffic:
    """The same without native code."""
    step = route(src, dst, shape)
    assert isinstance(step, BoxingRoute)             # as on one placement
    got, gave, read = _extremes_within(step)
    return StepTraffic(max(got, gave), read)


BROADCAST, SUM = -1, -2                              # of axis_codes; less are maxima and minima, the others dims
_CODES = {("B", ""): BROADCAST, ("P", "sum"): SUM, ("P", "max"): -3, ("P", "min"): -4}


def axis_codes(sbp: NdSbp) -> tuple[int, ...]:
    """An nd-sbp as numbers, as it is compared faster: the dim of a split, the others below zero."""
    return tuple(s.dim if s.kind == "S" else _CODES[s.kind, s.op] for s in sbp)


def even_traffic(src: Sequence[int], dst: Sequence[int], sizes: Sequence[int], shape: Shape) -> StepTraffic | None:
    """Of a step on one placement of axes of these sizes, where each part of a dim is as large as the others; else None.

    All ranks together send what they receive, and the copies share it evenly: so none sends more than the one that
    receives most receives.
    """
    terms = shared = summed = 1
    common, cut, kept_cut, cut_by_dst, shares = ([1] * len(shape) for _ in range(5))
    for s, t, parts in zip(src, dst, sizes):
        if parts == 1 or s == t < 0:
            continue
        if s < BROADCAST:
            terms *= parts
        if t == SUM and s < 0:                       # a tied axis
            summed *= parts
            shared *= parts if s == BROADCAST else 1
        elif t == SUM:                               # a loose one
            kept_cut[s] *= parts
        if s >= 0:
            if s == t and cut[s] == cut_by_dst[s] == kept_cut[s] == 1:
                common[s] *= parts
                continue
            cut[s] *= parts
        if t >= 0:
            cut_by_dst[t] *= parts
            shares[t] *= parts if s == BROADCAST else 1
    moving = terms > 1 or cut != kept_cut
    if moving and any(n > 1 for n in kept_cut):
        return None
    if moving and summed > 1 and shape:
        d = tied_dim(shape, [both * b for both, b in zip(common, cut_by_dst)], summed)
        cut_by_dst[d] *= summed
        shares[d] *= shared
    wanted = own = near = 1
    for n, both, a, b, share in zip(shape, common, cut, cut_by_dst, shares):
        crosses = moving and a > 1 and b > 1
        if n % (both * a * (share if crosses else 1)) or n % (both * b):
            return None
        wanted *= n // (both * b)
        near *= n // (both * max(a, b))
        own *= 0 if crosses else n // (both * max(a, b))
    return StepTraffic(terms * wanted - own, terms * wanted) if moving else StepTraffic(0, near)


def least_traffic(src: Sequence[int], dst: Sequence[int], sizes: Sequence[int], shape: Shape) -> tuple[float, float]:
    """The same of a step on one placement, or less, by arithmetic on its sizes: of the rank that wants most, which
    receives all terms of that but what it may hold."""
    terms = shares = 1
    cut, cut_by_dst = [1] * len(shape), [1] * len(shape)
    for s, t, parts in zip(src, dst, sizes):
        if s >= 0:
            cut[s] *= parts
        elif s < BROADCAST and s != t:
            terms *= parts
        if t >= 0:
            cut_by_dst[t] *= parts
        elif t == SUM != s:
            shares *= parts
    wanted, held = (prod(-(-n // parts) for n, parts in zip(shape, by)) for by in (cut_by_dst, cut))
    share = wanted / shares
    return terms * share - min(share, held), terms * share


def least_received(src: Sequence[int], dst: Sequence[int], sizes: Sequence[int], shape: Shape) -> float:
    """Elements that some rank receives at least, by whatever steps: who holds a part in the end and did not before has
    got it. Of a sum, all ranks together receive each term but one, and the sum once for each that has it but one."""
    terms = kept = shares = 1
    cut, cut_by_dst = [1] * len(shape), [1] * len(shape)
    for s, t, parts in zip(src, dst, sizes):
        if s >= 0:
            cut[s] *= parts
        elif s < BROADCAST:
            terms, kept = (terms, kept * parts) if s == t else (terms * parts, kept)
        if t >= 0:
            cut_by_dst[t] *= parts
        elif t < BROADCAST and s != t:
            shares *= parts
    wanted, held = (prod(-(-n // parts) for n, parts in zip(shape, by)) for by in (cut_by_dst, cut))
    share = wanted / shares
    if terms == 1:
        return share - min(share, held)
    holders = prod(sizes) / (prod(cut_by_dst) * kept * shares)
    return max(share, prod(shape) * kept * (terms - 1 + max(holders - 1, 0)) / prod(sizes))


def counted_traffic(src: Layout, dst: Layout, shape: Shape) -> StepTraffic:
    """The same, of the pieces of all ranks."""
    step, sent, most, touched = route(src, dst, shape), dict.fromkeys(src.placement.flat, 0), 0, 0
    for rank in dst.placement.flat:
        crossed = read = 0
        for region, sources in step.pieces(rank):
            size = volume(region)
            for source in sources:
                read += size
                if source != rank:
                    crossed += size
                    sent[source] += size
        most, touched = max(most, crossed), max(touched, read)
    return StepTraffic(max(most, *sent.values()), touched)


def _received(step: BoxingRoute, rank: int) -> tuple[int, int]:
    """Elements that a rank of dst receives, and that it reads."""
    at, own, wanted = step.dst.placement.coords[rank], step.src.placement.coords.get(rank), step.wanted(rank)
    if wanted is None:
        return 0, 0
    read, held = step.num_terms, 1
    for n, sizes, path, cut, within in zip(step.shape, step.sizes, step.paths, step.roles.cut, wanted):
        read *= overlap(n, sizes, [at[axis] if axis in step.roles.loose else None for axis in path], within)
        if own is not None:
            held *= overlap(n, sizes, [own[axis] if axis in cut else None for axis in path], within)
    return (read if own is None else read - held), read


def _sent(step: BoxingRoute, senders: Sequence[int]) -> list[int]:
    """Elements that each of these ranks of src sends to another placement."""
    coords, ranks = step.src.placement.coords, step.src.placement.flat
    sent = {rank: _wanted_of(step, coords[rank]) for rank in senders}
    for rank in step.dst.placement.flat:
        own = coords.get(rank)
        if own is not None:                          # it takes from itself what otherwise these would send
            for region, base, _ in step.cells(rank, {axis: own[axis] for axis in step.holding}):
                sent[ranks[base + step.own_term(own)]] -= volume(region)
    return list(sent.values())


def _wanted_of(step: BoxingRoute, at: Sequence[int]) -> int:
    """Elements that are wanted of the source at these coordinates, also by ranks that hold them themselves."""
    return step.takers_alike(at) * prod(
        overlap(n, step.dst_sizes[d], step.taking(at, d), part)
        for d, (n, part) in enumerate(zip(step.shape, step.source_part(at))))


@remembered
def received_at_most(src: Layout, dst: Layout, shape: Shape) -> int:
    """Elements that the rank receives that receives most, in a step on one placement."""
    even = even_traffic(axis_codes(src.sbp), axis_codes(dst.sbp), src.placement.shape, shape)
    if even is not None:
        return even.crossing
    step = route(src, dst, shape)
    assert isinstance(step, BoxingRoute)             # as on one placement
    return _extremes_within(step)[0]


def _extremes_within(step: BoxingRoute) -> tuple[int, int, int]:
    """Elements that are received, sent and read on one placement, by the ranks that do that most. What a dim adds
    depends on the digits of the axes that split it, and is seldom more than a few different sizes: so those of dims
    that share no axis are multiplied, not those of all ranks."""
    along = [tuple(sorted({*path, *by_dst})) for path, by_dst in zip(step.paths, step.roles.cut_by_dst)]
    digits = {axis: tuple(_extreme_digits(step, axis)) for axis in {*chain(*along)}}
    factors = [_sizes_together(step, dims, along, digits) for dims in _joined_dims(along)]
    alike_takers = step.takers_alike((0,) * step.src.placement.ndim)   # on axes that split nothing the first is extreme
    received = most_sent = touched = 0
    for sizes in product(*factors):
        read, held, sent, alike = map(prod, zip(*sizes)) if sizes else (1, 1, 1, 1)
        received = max(received, step.num_terms * read - held)
        most_sent = max(most_sent, alike_takers * sent - alike)
        touched = max(touched, step.num_terms * read)
    return received, most_sent, touched


def _joined_dims(along: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """The dims, those that share an axis, by way of others too, together."""
    joined: list[list[int]] = []
    for d, axes in enumerate(along):
        meeting = [dims for dims in joined if any(not set(axes).isdisjoint(along[e]) for e in dims)]
        joined = [dims for dims in joined if dims not in meeting] + [[*chain(*meeting), d]]
    return joined


def _sizes_together(step: BoxingRoute, dims: Sequence[int], along: Sequence[tuple[int, ...]],
                    digits: Mapping[int, tuple[int, ...]]) -> Collection[Sizes]:
    """The different sizes of these dims, multiplied (`_sizes_along`)."""
    does, tables = step.roles, []
    for d in dims:
        path, by_dst, sharing = step.paths[d], does.cut_by_dst[d], does.sharing[d]
        tables.append(_sizes_along(
            step.shape[d], path, step.sizes[d], by_dst, step.dst_sizes[d], tuple([a for a in path if a in does.loose]),
            does.cut[d], tuple([a for a in by_dst if a in does.copies and a not in sharing]), sharing,
            tuple([digits[a] for a in along[d]])))
    if len(dims) == 1:
        return set(tables[0].values())
    axes = sorted({*chain(*(along[d] for d in dims))})
    places = [[axes.index(a) for a in along[d]] for d in dims]
    different = {tuple([table[tuple([at[place] for place in own])] for table, own in zip(tables, places)])
                 for at in product(*(digits[a] for a in axes))}
    return {(prod(a), prod(b), prod(c), prod(e)) for a, b, c, e in (zip(*sizes) for sizes in different)}


Sizes = tuple[int, int, int, int]
Axes = tuple[int, ...]


@remembered
def _sizes_along(n: int, path: Axes, sizes: Axes, by_dst: Axes, dst_sizes: Axes, read: Axes, cut: Axes, matched: Axes,
                 sharing: Axes, digits: tuple[Axes, ...]) -> dict[tuple[int, ...], Sizes]:
    """Along a dim, how much of a term a rank reads, and how much of that it holds; how much of what it sends ranks
    want, and how much of that they hold themselves: by the rank's digits on the axes that split the dim."""
    axes, table = sorted({*path, *by_dst}), {}
    for own in product(*digits):
        at = dict(zip(axes, own))
        wanted, part = part_at(n, dst_sizes, [at[a] for a in by_dst]), part_at(n, sizes, [at[a] for a in path])
        table[own] = (overlap(n, sizes, [at[a] if a in read else None for a in path], wanted),
                      overlap(n, sizes, [at[a] if a in cut else None for a in path], wanted),
                      overlap(n, dst_sizes, [at[a] if a in matched else None for a in by_dst], part),
                      overlap(n, dst_sizes, [None if a in sharing else at[a] for a in by_dst], part))
    return table


def extreme_ranks(step: BoxingRoute) -> tuple[list[int], list[int]]:
    """Ranks of dst and of src among which are those that receive, read and send most."""
    a, b = step.src.placement, step.dst.placement
    if disjoint(a, b):
        return [b.flat[0]], [a.flat[0]]              # on every axis the first parts are the largest
    return list(b.flat), list(a.flat)


def _extreme_digits(step: BoxingRoute, axis: int) -> list[int]:
    """Where along an axis of the one placement the extremes are: at both ends, and where the larger parts end; and near
    the ends, where a loose axis splits the same dim: there the first may want what it holds, and the next may not."""
    parts, digits = step.src.placement.shape[axis], {0}
    for n, *paths in zip(step.shape, step.roles.cut, step.roles.cut_by_dst):
        for path in paths:
            if axis in path and any(other in step.roles.loose for other in paths[0]):
                digits |= {*range(parts)[:3], *range(parts)[-3:]}
            if axis in path:
                outer = prod(step.src.placement.shape[other] for other in path[:path.index(axis)])
                more = -(-n // outer) % parts
                digits |= {parts - 1, more, max(more - 1, 0)}
    return sorted(digits)


def elements_received(src: Layout, dst: Layout, shape: Shape) -> dict[int, int]:
    """Elements that each destination rank receives from others in this step."""
    step = route(src, dst, shape)
    if isinstance(step, BoxingRoute):
        return {rank: _received(step, rank)[0] for rank in dst.placement.flat}
    return {rank: sum(volume(region) for region, sources in step.pieces(rank) for source in sources if source != rank)
            for rank in dst.placement.flat}
