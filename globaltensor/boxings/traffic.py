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

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from globaltensor.boxings.roles import tied_dim
from globaltensor.boxings.route import BoxingRoute, disjoint, is_listed, route
from globaltensor.layouts.layout import Layout, Shape
from globaltensor.layouts.paths import overlap, part_at
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.layouts.recent import KEPT
from globaltensor.layouts.regions import volume
from globaltensor.layouts.sbp import NdSbp


class StepTraffic(NamedTuple):
    """Elements: that the busiest rank receives or sends, and that the rank reads that reads most, its own included."""

    crossing: int
    touched: int


@lru_cache(KEPT)
def traffic(src: Layout, dst: Layout, shape: Shape) -> StepTraffic:
    """What this step moves for a tensor of `shape`."""
    by_rank = isinstance(src, RankRegions) or isinstance(dst, RankRegions)
    if not by_rank and src.placement == dst.placement:
        even = even_traffic(axis_codes(src.sbp), axis_codes(dst.sbp), src.placement.shape, shape)
        if even is not None:
            return even
    if by_rank or is_listed(src, dst):
        return counted_traffic(src, dst, shape)
    step = route(src, dst, shape)
    assert isinstance(step, BoxingRoute)
    if step.roles.same:
        return _traffic_within(step)
    takers, senders = extreme_ranks(step)
    received, touched = zip(*(_received(step, rank) for rank in takers))
    return StepTraffic(max(*received, *_sent(step, senders)), max(touched))


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


def _traffic_within(step: BoxingRoute) -> StepTraffic:
    """Of a step on one placement. What a dim adds depends on the digits of the axes that split it, so many ranks share
    that."""
    along = [sorted({*path, *cut_by_dst}) for path, cut_by_dst in zip(step.paths, step.roles.cut_by_dst)]
    known: list[dict[tuple[int, ...], tuple[int, ...]]] = [{} for _ in along]
    crossing = touched = 0
    for at in product(*(_extreme_digits(step, axis) for axis in range(step.src.placement.ndim))):
        factors = []
        for d, axes in enumerate(along):
            digits = tuple(at[axis] for axis in axes)
            if digits not in known[d]:
                known[d][digits] = _sizes_along(step, d, at)
            factors.append(known[d][digits])
        read, held, sent, alike = map(prod, zip(*factors)) if factors else (1, 1, 1, 1)
        if any(at[axis] for axis in step.roles.first):         # another takes all
            read = held = alike = 0
        crossing = max(crossing, step.num_terms * read - held, step.takers_alike(at) * sent - alike)
        touched = max(touched, step.num_terms * read)
    return StepTraffic(crossing, touched)


def _sizes_along(step: BoxingRoute, d: int, at: Sequence[int]) -> tuple[int, int, int, int]:
    """Along a dim, how much of a term the rank at these coordinates reads, and how much of that it holds; how much of
    what it sends ranks want, and how much of that they hold themselves."""
    does, n, sizes, path, by_dst = step.roles, step.shape[d], step.sizes[d], step.paths[d], step.roles.cut_by_dst[d]
    wanted = part_at(n, step.dst_sizes[d], [at[axis] for axis in by_dst])
    part = part_at(n, sizes, [at[axis] for axis in path])
    return (overlap(n, sizes, [at[axis] if axis in does.loose else None for axis in path], wanted),
            overlap(n, sizes, [at[axis] if axis in does.cut[d] else None for axis in path], wanted),
            overlap(n, step.dst_sizes[d], step.taking(at, d), part),
            overlap(n, step.dst_sizes[d], [None if axis in does.sharing[d] else at[axis] for axis in by_dst], part))


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
