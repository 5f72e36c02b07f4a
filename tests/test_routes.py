"""Routes and prices in closed form, against the enumeration of every rank's pieces and every holder of them.

`ListedRoute` lists all pieces of all ranks. It is the oracle of `BoxingRoute`, which lists none; and the pieces of all
ranks, counted one by one, are the oracle of `traffic`, of `elements_received` and so of `plan`.
"""
from __future__ import annotations

import itertools
import operator
import random
from math import prod
from typing import NamedTuple

import pytest
import torch
from shards import place

from globaltensor.algorithms.ring_attention import ring_steps
from globaltensor.boxings import listed_route, native_prices, plan as plans, traffic as closed
from globaltensor.boxings.listed_route import ListedRoute
from globaltensor.boxings.roles import summed_axes
from globaltensor.boxings.route import BoxingRoute, is_listed, route
from globaltensor.layouts.layout import Layout, layout
from globaltensor.layouts.paths import overlap, part_at, parts_within
from globaltensor.layouts.rank_regions import RankRegions, exchanging_axes, rank_regions, regions_by
from globaltensor.layouts.regions import intersect, volume
from globaltensor.layouts.sbp import broadcast, partial_max, partial_sum, split
from globaltensor.runtime.machine import gloo, one_process

SEED = 20_261_122
pytestmark = pytest.mark.usefixtures("many_ranks")
STATES = [broadcast, partial_sum, split(0), split(1)]
SHAPES = [(16, 8), (6, 4), (5, 3), (1, 7), (0, 3), (11, 13), (24, 36)]


def test_parts_along_a_path():
    r = random.Random(SEED)
    for _ in range(500):
        n, sizes = r.randint(0, 40), [r.randint(1, 5) for _ in range(r.randint(0, 3))]
        digits = [r.choice([None, r.randrange(parts)]) for parts in sizes]
        within = tuple(sorted((r.randint(0, n), r.randint(0, n))))
        every = {at: part_at(n, sizes, at) for at in itertools.product(*map(range, sizes))}
        shared = {at: (max(a, within[0]), min(b, within[1])) for at, (a, b) in every.items()
                  if all(d is None or d == i for d, i in zip(digits, at))}
        shared = {at: (a, b) for at, (a, b) in shared.items() if a < b}
        assert {at: ends for ends, at in parts_within((0, n), sizes, digits, within)} == shared
        assert overlap(n, sizes, digits, within) == sum(b - a for a, b in shared.values()), (n, sizes, digits, within)


# --------------------------------------------------------------------------------------------- pieces of a rank


def terms_of(src, dst):
    """The axes of src that are reduced, and how many terms each element is the sum of."""
    same = src.placement == dst.placement
    reduced = [axis for axis, s in enumerate(src.sbp) if s.is_partial and not (same and s == dst.sbp[axis])]
    return reduced, prod(src.placement.shape[axis] for axis in reduced)


def check_pieces(src, dst, shape):
    """Every element that dst wants is taken once, of one holder of each term; ranks that share a sum divide it."""
    step, (reduced, terms), shared = route(src, dst, shape), terms_of(src, dst), summed_axes(src, dst)
    pieces = {rank: step.pieces(rank) for rank in dst.placement.flat}
    taken, wanted = {}, {}
    for rank, own in pieces.items():
        key = tuple(i for axis, i in enumerate(dst.placement.coords[rank]) if axis not in shared)
        count = taken.setdefault(key, torch.zeros(shape, dtype=torch.int64))
        wanted[key] = dst.region(shape, rank)
        for region, sources in own:
            count[tuple(slice(*ends) for ends in region)] += 1
            held = [src.region(shape, source) for source in sources]
            assert all(a <= start and stop <= b for region_of in (*held, dst.region(shape, rank))
                       for (a, b), (start, stop) in zip(region_of, region))
            assert len({tuple(src.placement.coords[s][axis] for axis in reduced) for s in sources}) == terms
    for key, count in taken.items():
        want = torch.zeros(shape, dtype=torch.int64)
        want[tuple(slice(*ends) for ends in wanted[key])] = 1
        assert torch.equal(count, want), f"{src} -> {dst} {shape} at {key}"
    return pieces


def check_takers(src, dst, shape, pieces):
    """What a source thinks is taken from it is what the others take."""
    step, takers = route(src, dst, shape), {}
    for rank, own in pieces.items():
        for region, sources in own:
            for source in {*sources} - {rank}:
                takers.setdefault(source, []).append((rank, region))
    for source in src.placement.flat:
        assert sorted(step.takers(source)) == sorted(takers.get(source, [])), f"{src} -> {dst} {shape}: {source}"


def received_in(pieces):
    return {rank: sum(volume(region) * sum(source != rank for source in sources) for region, sources in own)
            for rank, own in pieces.items()}


def check_step(src, dst, shape):
    """All that is said of one step, against the enumeration."""
    pieces = check_pieces(src, dst, shape)
    check_takers(src, dst, shape, pieces)
    received = received_in(pieces)
    assert closed.elements_received(src, dst, shape) == received, f"{src} -> {dst} {shape}"
    assert closed.traffic(src, dst, shape) == closed.counted_traffic(src, dst, shape), f"{src} -> {dst} {shape}"
    if src.placement == dst.placement and not isinstance(dst, RankRegions):
        assert closed.received_at_most(src, dst, shape) == max(received.values()), f"{src} -> {dst} {shape}"
        least = closed.least_traffic(*(closed.axis_codes(of.sbp) for of in (src, dst)), src.placement.shape, shape)
        assert all(map(operator.le, least, closed.traffic(src, dst, shape))), f"{src} -> {dst} {shape}: {least}"
    listed = ListedRoute(src, dst, shape)
    enumerated = received_in({rank: listed.pieces(rank) for rank in dst.placement.flat})
    if summed_axes(src, dst):                        # where ranks share a sum, there are many ways to divide it
        assert sum(received.values()) <= sum(enumerated.values()), f"{src} -> {dst} {shape}"
    else:
        assert received == enumerated, f"{src} -> {dst} {shape}"


PLACES = [[1, 0], [2, 0, 1], [[0, 1], [2, 3]], [[3, 1, 5], [0, 2, 4]], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
          [[[3, 1, 2]], [[7, 5, 4]]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[*range(8)], [*range(8, 16)]],
          [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]], [*range(7)],
          torch.randperm(16, generator=torch.Generator().manual_seed(SEED)).reshape(4, 4).tolist(),
          torch.arange(16).reshape(2, 2, 2, 2).tolist()]
BETWEEN = [([0, 1], [0, 1, 2]), ([0, 1, 2], [1]), ([1], [0, 1, 2]), ([0, 1, 2], [2, 3]), ([0, 1], [2, 3, 4]),
           ([0, 1, 2], [2, 0, 1]), ([0, 1, 2, 3], [[0, 1], [2, 3]]), ([[0, 1], [2, 3]], [1, 2, 3]),
           ([[0, 1], [2, 3]], [[0, 2], [1, 3]]), ([[[0, 1]], [[2, 3]]], [[4, 5], [6, 7]]),
           ([[0, 1, 2], [3, 4, 5]], [[6, 7], [8, 9]]), ([*range(6)], [*range(6, 16)])]
PAIRS = [*((ranks, ranks) for ranks in PLACES), *BETWEEN]


def pairs_of_layouts(pair, most):
    """(src, dst) of the two placements: all, or as many as `most` at random; without steps that reduce two ops."""
    r, (a, b) = random.Random(SEED), map(place, pair)
    states = [list(itertools.product([*STATES, partial_max] if where.ndim < 3 else STATES, repeat=where.ndim))
              for where in (a, b)]
    if len(states[0]) * len(states[1]) <= most:
        chosen = itertools.product(*states)
    else:
        chosen = ((r.choice(states[0]), r.choice(states[1])) for _ in range(most))
    for src, dst in chosen:
        if len({s.op for s in src if s.is_partial}) < 2 and (a != b or src != dst):
            yield layout(a, src), layout(b, dst)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_steps_are_those_of_the_enumeration(pair):
    for src, dst in pairs_of_layouts(pair, 12):
        for shape in SHAPES:
            check_step(src, dst, shape)


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_all_steps_are_those_of_the_enumeration(pair):
    for src, dst in pairs_of_layouts(pair, 300):
        for shape in SHAPES:
            check_step(src, dst, shape)


def test_steps_of_tensors_without_dims():
    for pair in PAIRS:
        for src, dst in pairs_of_layouts(pair, 60):
            if not any(s.is_split for s in (*src.sbp, *dst.sbp)):
                check_step(src, dst, ())


def test_windows():
    """To a region per rank; from one, the holders are listed, which is the oracle."""
    r = random.Random(SEED)
    for ranks in PLACES[:6]:
        where = place(ranks)
        for sbp in itertools.product(STATES, repeat=where.ndim):
            shape = r.choice(SHAPES)
            regions = {rank: tuple(tuple(sorted((r.randint(0, n), r.randint(0, n)))) for n in shape)
                       for rank in where.flat}
            src, dst = layout(where, sbp), rank_regions(where, regions)
            assert isinstance(route(src, dst, shape), BoxingRoute) and is_listed(dst, src)
            check_step(src, dst, shape)


class Widened(NamedTuple):
    """A rank's part of a layout, and a row more on both sides."""

    of: Layout
    shape: tuple[int, ...]

    def region(self, rank):
        (start, stop), *others = self.of.region(self.shape, rank)
        return ((max(start - 1, 0), min(stop + 1, self.shape[0])), *others)


@pytest.mark.parametrize("ranks", PLACES[2:4], ids=str)
def test_windows_that_say_along_which_axes_they_differ(ranks):
    """From and to every layout, also those that cut what the windows have whole, or in another order."""
    where = place(ranks)
    for sbp, other in itertools.product(itertools.product(STATES, repeat=2), repeat=2):
        like, of = layout(where, tuple(broadcast if s.is_partial else s for s in sbp)), layout(where, other)
        axes = tuple(axis for axis, s in enumerate(like.sbp) if s == split(0))
        pending = tuple(partial_sum if axis in axes else broadcast for axis in range(2))
        for shape in SHAPES[1:3]:
            check_step(of, regions_by(where, Widened(like, shape), None, like, axes), shape)
            windows = regions_by(where, Widened(like, shape), pending, like, axes)
            listed = rank_regions(where, {rank: windows.region(shape, rank) for rank in where.flat}, pending)
            own, whole = ListedRoute(windows, of, shape), ListedRoute(listed, of, shape)
            for rank in where.flat:
                assert [(region, len(sources)) for region, sources in own.pieces(rank)] == [
                    (region, len(sources)) for region, sources in whole.pieces(rank)], f"{like} {of} {shape} {rank}"


@pytest.mark.parametrize("sizes", [((2, 3, 9, 2), (2, 6, 7, 2)), ((5, 4, 16, 1), (5, 4, 16, 1))], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_groups_that_exchange_nothing_are_listed_apart(sizes, causal):
    """Blocks of keys in ring attention: what is worked out for the groups is what the list of all ranks gives."""
    r, states = random.Random(SEED), [split(0), split(1), split(2), broadcast]
    where = place(torch.randperm(24, generator=torch.Generator().manual_seed(SEED)).reshape(2, 3, 4).tolist())
    seen = 0
    for sbp in r.sample([*itertools.product(states, repeat=3)], 24):
        queries = layout(where, sbp)
        keys = queries.with_sbp(tuple(broadcast if s == split(2) and r.random() < 0.3 else s for s in sbp))
        home, *steps = ring_steps(queries, keys, *sizes, causal)
        for step in steps:
            for (src, dst), shape in (((keys, step.kv), sizes[1]), ((step.dkv, home.dkv), sizes[1])):
                axes = exchanging_axes(src, dst)
                assert axes == tuple(axis for axis, s in enumerate(keys.sbp) if s == split(2))
                windows = src if src is step.dkv else dst
                listed = rank_regions(where, {rank: windows.region(shape, rank) for rank in where.flat}, windows.sbp)
                assert len(exchanging_axes(listed, keys)) == 3
                whole = route(*(listed if of is windows else of for of in (src, dst)), shape)
                own = route(src, dst, shape)
                for rank in where.flat:
                    group = {*where.ranks_along(axes, rank)}
                    taken = own.pieces(rank)
                    assert [region for region, _ in taken] == [region for region, _ in whole.pieces(rank)]
                    assert all(group.issuperset(sources) for _, sources in taken)
                    assert sorted(own.takers(rank)) == sorted(
                        (taker, region) for taker in sorted(group - {rank})
                        for region, sources in own.pieces(taker) if rank in sources)
                    seen += 1
    assert seen > 1_000


def test_pieces_of_some_of_many_ranks():
    """Of 1,024 ranks in any order, uneven: the pieces of 20 are what all holders have of what these want."""
    r = random.Random(SEED)
    flat = [*range(1024)]
    r.shuffle(flat)
    for axes in ((8, 128), (4, 16, 16), (4, 8, 4, 8)):
        where = place(torch.tensor(flat).reshape(axes).tolist())
        for _ in range(3):
            src, dst = (layout(where, tuple(r.choice([broadcast, split(0), split(1)]) for _ in axes)) for _ in "ab")
            shape = (r.randint(100, 3000), r.randint(100, 3000))
            step, held = route(src, dst, shape), {rank: src.region(shape, rank) for rank in flat}
            for rank in r.sample(flat, 20):
                wanted = dst.region(shape, rank)
                overlapping = {part for region in held.values() if (part := intersect(region, wanted)) is not None}
                covered = dict.fromkeys(overlapping, 0)
                for region, (source,) in step.pieces(rank):
                    part = intersect(held[source], wanted)
                    assert intersect(part, region) == region and (source == rank) == (intersect(held[rank], region)
                                                                                     == region)
                    covered[part] += volume(region)
                assert covered == {part: volume(part) for part in overlapping}, f"{src} -> {dst} {shape}: {rank}"


def held_in_windows(shape, axes, reach):
    """Of an image whose dims are split on all axes but the last: each rank's part and so many rows around it, pending;
    and the layout of the parts."""
    where = place(torch.arange(prod(axes)).reshape(axes).tolist())
    parts = layout(where, (*map(split, range(len(axes) - 1)), broadcast))
    windows = {rank: tuple((max(a - reach, 0), min(b + reach, n)) for (a, b), n in zip(region, shape))
               for rank in where.flat for region in [parts.region(shape, rank)]}
    return rank_regions(where, windows, (*[partial_sum] * (len(axes) - 1), broadcast)), parts


@pytest.mark.parametrize("axes", [(2, 2, 2), (3, 2, 2), (4, 3, 1)], ids=str)
def test_windows_are_summed_from_every_rank_that_holds_a_part(axes):
    shape = (13, 11)
    src, dst = held_in_windows(shape, axes, 2)
    step = ListedRoute(src, dst, shape)
    for rank in dst.placement.flat:
        for element in itertools.product(*(range(*ends) for ends in dst.region(shape, rank))):
            sources = [sources for region, sources in step.pieces(rank)
                       if all(a <= i < b for i, (a, b) in zip(element, region))]
            terms = {src.placement.coords[source][:-1] for source in sources[0]}
            assert len(sources) == 1 and len(terms) == len(sources[0]), (rank, element)
            assert terms == {at[:-1] for holder, at in src.placement.coords.items()
                             if all(a <= i < b for i, (a, b) in zip(element, src.region(shape, holder)))}
            assert rank in sources[0]


def test_the_sources_of_a_rank_are_looked_up_not_compared(monkeypatch):
    """As many comparisons for each of 1,024 ranks as for each of 64; and copies are taken from all who hold them."""
    compared = []
    monkeypatch.setattr(listed_route, "intersect", lambda a, b: compared.append(1) or intersect(a, b))
    per_rank = {}
    for side in (4, 16):
        shape, axes = (8 * side, 8 * side), (side, side, 4)
        compared.clear()
        step = ListedRoute(*held_in_windows(shape, axes, 1), shape)
        per_rank[side] = len(compared) / prod(axes)
    assert per_rank[16] <= 2 * per_rank[4] and per_rank[16] < 50, per_rank
    asked = [len(step.takers(rank)) for rank in range(prod(axes))]
    assert all(len({*asked[first:first + 4]}) == 1 for first in range(0, prod(axes), 4)), asked


# ----------------------------------------------------------------------------------------------------- plans


@pytest.fixture
def enumerated(monkeypatch):
    """A `plan` that prices every step by the pieces of all ranks."""
    def enumerated_plan(*args):
        with monkeypatch.context() as patch:
            patch.setattr(native_prices, "search_between", lambda *args: None)
            patch.setattr(plans, "even_traffic", lambda *args: None)
            patch.setattr(plans, "traffic", closed.counted_traffic)
            patch.setattr(plans, "least_traffic", lambda *args: (0.0, 0.0))
            plans._search.cache_clear()
            best = plans.plan(*args)
        plans._search.cache_clear()
        return best
    return enumerated_plan


def check_plans(enumerated, pair, most):
    for src, dst in pairs_of_layouts(pair, most):
        for shape, machine, nbytes in itertools.product(SHAPES[:6], (gloo, one_process), (400, 1 << 24)):
            best = plans.plan(src, dst, shape, nbytes, machine)
            assert best == enumerated(src, dst, shape, nbytes, machine), f"{src} -> {dst} {shape}"
            assert sum(plans.least_cost(src, dst, shape, nbytes, machine)) <= best.seconds(nbytes) * (1 + 1e-12)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_plans_are_those_of_the_enumeration(pair, enumerated):
    check_plans(enumerated, pair, 3)


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_all_plans_are_those_of_the_enumeration(pair, enumerated):
    check_plans(enumerated, pair, 100)
