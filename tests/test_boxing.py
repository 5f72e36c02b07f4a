"""Every pair of layouts: the value survives, nothing is aliased, and few bytes move."""
from __future__ import annotations

import itertools
import random
import re
from math import prod

import pytest
import torch
from shards import gather, place, scatter

import globaltensor as gt
from globaltensor.boxings.plan import bytes_received, plan
from globaltensor.boxings.redistribute import Move, move_shards
from globaltensor.layouts.layout import layout, spec
from globaltensor.layouts.rank_regions import rank_regions
from globaltensor.layouts.regions import slices
from globaltensor.layouts.sbp import broadcast, partial_max, partial_min, partial_sum, split
from globaltensor.runtime.machine import gloo, nccl, one_process, shared_memory

SEED = 20_240_521


def states(ndim, axes, more=()):
    return list(itertools.product([broadcast, partial_sum, *[split(d) for d in range(ndim)], *more], repeat=axes))


def make(shape, where, sbp, generator):
    """A tensor in a layout, pending parts at random, cut by hand; and its value."""
    value = torch.randn(shape, dtype=torch.float64, generator=generator)
    return scatter(value, where, sbp, generator), value


def whole(x):
    """The value, put together by hand where this process has all shards."""
    return gather(x) if gt.init().single_process else x.full_tensor()


def check(x, value, dst):
    """Box x to `dst` and compare; where other processes have the other shards, with the part of the value."""
    y = x.to_global(dst.placement, dst.sbp)
    assert y.sbp == dst.sbp and y.placement == dst.placement and y.shape == value.shape
    regions = {r: dst.region(tuple(value.shape), r) for r in y.shards}
    for r, shard in y.shards.items():
        assert tuple(shard.shape) == dst.local_shape(tuple(value.shape), r)
        if not dst.partial:
            part = value[tuple(slice(*ends) for ends in regions[r])]
            torch.testing.assert_close(shard, part, rtol=0, atol=1e-12, msg=lambda m: f"{x.spec} -> {dst}\n{m}")
    torch.testing.assert_close(whole(y), value, rtol=0, atol=1e-12, msg=lambda m: f"{x.spec} -> {dst}\n{m}")
    begun = x.to_global(dst.placement, dst.sbp, wait=False)
    assert begun.spec is y.spec and all(torch.equal(begun.shards[r], y.shards[r]) for r in y.shards)


SHAPES = [(6, 4), (5, 3), (1, 7), (0, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ranks", [[0], [0, 1], [2, 0, 1], [0, 1, 2, 3]], ids=str)
def test_one_axis(ranks, shape):
    g = torch.Generator().manual_seed(SEED)
    where = place(ranks)
    for src, dst in itertools.product(states(2, 1, (partial_max, partial_min) if len(ranks) > 1 else ()), repeat=2):
        x, value = make(shape, where, src, g)
        check(x, value, layout(where, dst))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[3, 1], [0, 2]], [[0, 1, 2], [3, 4, 5]]], ids=str)
def test_two_axes(ranks, shape):
    g = torch.Generator().manual_seed(SEED)
    where = place(ranks)
    for src, dst in itertools.product(states(2, 2), repeat=2):
        x, value = make(shape, where, src, g)
        check(x, value, layout(where, dst))


def test_sums_and_maxima_at_once():
    g = torch.Generator().manual_seed(SEED)
    where = place([[0, 1], [2, 3]])
    mixed = list(states(1, 2, (partial_max, partial_min)))
    for src, dst in itertools.product(mixed, repeat=2):
        x, value = make((5,), where, src, g)
        check(x, value, layout(where, dst))


def test_three_axes_pairs():
    """A seeded sample of the pairs of all nd-sbps on 2x2x2; `test_three_axes_all` does every one."""
    g, pick = torch.Generator().manual_seed(SEED), random.Random(SEED)
    where = place([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    for src, dst in pick.sample(list(itertools.product(states(2, 3), repeat=2)), 400):
        x, value = make((5, 4), where, src, g)
        check(x, value, layout(where, dst))


@pytest.mark.long
@pytest.mark.parametrize("shape", [(8, 4), (5, 3)], ids=str)
def test_three_axes_all(shape):
    g = torch.Generator().manual_seed(SEED)
    where = place([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    for src, dst in itertools.product(states(2, 3), repeat=2):
        x, value = make(shape, where, src, g)
        check(x, value, layout(where, dst))


PAIRS = {"equal": ([0, 1], [0, 1]), "contained": ([0, 1, 2], [1]), "containing": ([1], [0, 1, 2]),
         "overlapping": ([0, 1, 2], [2, 3]), "disjoint": ([0, 1], [2, 3, 4]), "permuted": ([0, 1, 2], [2, 0, 1]),
         "more axes": ([0, 1, 2, 3], [[0, 1], [2, 3]]), "fewer axes": ([[0, 1], [2, 3]], [1, 2, 3]),
         "transposed": ([[0, 1], [2, 3]], [[0, 2], [1, 3]]), "3 to 2 axes": ([[[0, 1]], [[2, 3]]], [[4, 5], [6, 7]])}


@pytest.mark.sample(3)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_between_placements(pair):
    g = torch.Generator().manual_seed(SEED)
    a, b = map(place, PAIRS[pair])
    for shape in [(4, 6), (5, 3), (1, 1), (0, 2)]:
        for src, dst in itertools.product(states(2, a.ndim), states(2, b.ndim)):
            x, value = make(shape, a, src, g)
            check(x, value, layout(b, dst))


@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
def test_small_tensors(shape):
    g = torch.Generator().manual_seed(SEED)
    a, b = place([0, 1, 2, 3]), place([[4, 0], [1, 5]])
    for src, dst in itertools.product(states(len(shape), 1), states(len(shape), 2)):
        x, value = make(shape, a, src, g)
        check(x, value, layout(b, dst))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.bool, torch.complex64], ids=str)
def test_dtypes(dtype):
    where = place([0, 1, 2])
    value = torch.arange(12).reshape(4, 3).remainder(5).to(dtype)
    for src, dst in itertools.product([broadcast, split(0), split(1)], repeat=2):
        y = gt.from_full(value, where, src).to_global(sbp=dst)
        assert y.dtype == dtype and torch.equal(y.full_tensor(), value)


def test_sixteen_bit_sums_round_once():
    where = place([0, 1, 2, 3])
    parts = {r: torch.full((3,), v, dtype=torch.bfloat16) for r, v in enumerate([256.0, 1.0, 1.0, 1.0])}
    got = gt.from_shards(parts, where, gt.sbp.partial_sum).to_global(sbp=gt.sbp.broadcast)
    assert torch.equal(got.full_tensor(), torch.full((3,), 259.0).bfloat16())       # in bfloat16 steps it would be 256


@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_sums_of_dtypes_that_the_kernel_does_not_add(dtype):
    where = place([0, 1, 2])
    part = torch.arange(6).to(torch.float32).to(dtype)
    for dst in (gt.sbp.broadcast, split(0)):
        got = gt.from_shards(dict.fromkeys(range(3), part), where, gt.sbp.partial_sum).to_global(sbp=dst)
        assert got.dtype == dtype
        wide = torch.complex64 if dtype.is_complex else torch.float32
        assert torch.equal(got.full_tensor().to(wide), (3 * part.to(wide)).to(dtype).to(wide))


@pytest.mark.parametrize("src", states(2, 1), ids=str)
@pytest.mark.parametrize("dst", states(2, 1), ids=str)
def test_results_never_alias_their_source(src, dst):
    where = place([0, 1])
    x, value = make((4, 4), where, src, torch.Generator().manual_seed(SEED))
    y = x.to_global(sbp=dst)
    if src != dst:
        for shard in y.shards.values():
            shard.fill_(7)
        torch.testing.assert_close(whole(x), value)


GRAD_PLACES = [([0, 1], [0, 1]), ([0, 1, 2], [2, 3]), ([[0, 1], [2, 3]], [[0, 1], [2, 3]]), ([0, 1], [2])]


@pytest.mark.parametrize("ranks", GRAD_PLACES, ids=str)
def test_gradients_of_every_boxing(ranks):
    g = torch.Generator().manual_seed(SEED)
    a, b = map(place, ranks)
    for src, dst in itertools.product(states(2, a.ndim), states(2, b.ndim)):
        x, value = make((5, 4), a, src, g)
        x.requires_grad_()
        weight = torch.randn(5, 4, dtype=torch.float64, generator=g)
        (x.to_global(b, dst) * gt.from_full(weight, b, broadcast)).sum().backward()
        assert x.grad.sbp == x.sbp
        torch.testing.assert_close(x.grad.full_tensor(), weight)


def test_grad_sbp_decides_how_the_gradient_leaves():
    where = place([0, 1])
    x = gt.from_full(torch.randn(4, 4), where, broadcast).requires_grad_()
    for grad_sbp in (broadcast, partial_sum, split(0), split(1)):
        y = x.to_global(sbp=split(0), grad_sbp=grad_sbp)
        (grad,) = torch.autograd.grad((y * y).sum(), x)
        assert grad.sbp == (grad_sbp,)
        torch.testing.assert_close(grad.full_tensor(), 2 * x.full_tensor())


def test_the_gradient_lies_dual():
    where = place([0, 1])
    for src, dual in ((split(0), split(0)), (partial_sum, broadcast)):
        x = gt.from_full(torch.randn(4, 4), where, src).requires_grad_()
        (grad,) = torch.autograd.grad(x.to_global(sbp=broadcast).sum(), x)
        assert grad.sbp == (dual,), src


# ------------------------------------------------------------------------------------- a region per rank


def random_regions(where, shape, rng, sbp=None):
    """Boxes at random, empty ones too; ranks alike on the broadcast axes (where others are pending) have the same."""
    kept = [i for i, s in enumerate(sbp or ()) if s.is_partial]
    found = {}
    for rank, at in where.coords.items():
        key = tuple(at[i] for i in kept) if sbp else rank
        ends = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in shape]
        found.setdefault(key, tuple(map(tuple, ends)))
    return rank_regions(where, {rank: found[tuple(at[i] for i in kept) if sbp else rank]
                           for rank, at in where.coords.items()}, sbp)


WINDOW_PLACES = [[0, 1], [2, 0, 1], [[0, 1], [2, 3]]]


@pytest.mark.parametrize("ranks", WINDOW_PLACES, ids=str)
def test_any_layout_to_a_region_per_rank(ranks):
    g, rng, where = torch.Generator().manual_seed(SEED), random.Random(SEED), place(ranks)
    for src in states(2, where.ndim):
        x, value = make((5, 4), where, src, g)
        for _ in range(4):
            dst = random_regions(where, (5, 4), rng)
            shards, = move_shards([Move(x.spec, x.shards, dst)], "test")
            for rank, shard in shards.items():
                part = value[tuple(slice(*ends) for ends in dst.rule.region(rank))]
                torch.testing.assert_close(shard, part, rtol=0, atol=1e-12,
                                           msg=lambda m: f"{src} -> {dst.rule}\n{m}")


@pytest.mark.parametrize("ranks", WINDOW_PLACES, ids=str)
def test_windows_are_summed_into_any_layout(ranks):
    g, rng, where = torch.Generator().manual_seed(SEED), random.Random(SEED), place(ranks)
    pending = [sbp for sbp in itertools.product([broadcast, partial_sum], repeat=where.ndim) if partial_sum in sbp]
    for sbp, dst in itertools.product(pending, states(2, where.ndim)):
        if any(a.is_partial and b.is_partial for a, b in zip(sbp, dst)):
            continue
        src = random_regions(where, (5, 4), rng, sbp)
        kept = [i for i, s in enumerate(sbp) if s.is_partial]
        terms = {}                                   # those that are copies of each other hold the same
        for rank, at in where.coords.items():
            box_of = src.local_shape((5, 4), rank)
            terms.setdefault(tuple(at[i] for i in kept), (rank, torch.randn(box_of, dtype=torch.float64, generator=g)))
        value = torch.zeros(5, 4, dtype=torch.float64)
        for rank, part in terms.values():
            value[tuple(slice(*ends) for ends in src.rule.region(rank))] += part
        own = {r: terms[tuple(where.coords[r][i] for i in kept)][1] for r in where.flat if r in gt.init().local_ranks}
        dst = layout(where, dst)
        shards, = move_shards([Move(spec(src, (5, 4), None, torch.float64), own, dst)], "test")
        got = gt.from_shards(shards, where, dst.sbp)
        torch.testing.assert_close(got.full_tensor(), value, rtol=0, atol=1e-12)


# -------------------------------------------------------------------------------------- how many bytes it takes


def least_received(src, dst):
    """Elements of an 8 x 8 tensor that all ranks together must receive, whatever the algorithm.

    What no rank of a group that shares a pending sum holds must come from elsewhere. To reduce n terms that lie on n
    ranks takes n - 1 messages, and each further copy of the result one more.
    """
    axes = src.placement.shape
    kept = [a.is_partial and a == b for a, b in zip(src.sbp, dst.sbp)]
    terms = prod(n for a, k, n in zip(src.sbp, kept, axes) if a.is_partial and not k)
    copies = prod(n for b, n in zip(dst.sbp, axes) if b.is_broadcast)
    tensors = prod(n for k, n in zip(kept, axes) if k)
    if terms > 1:
        return tensors * 64 * (terms - 1 + copies - 1)
    free = [i for i, (b, k) in enumerate(zip(dst.sbp, kept)) if b.is_partial and not k]
    groups = {}
    for rank, at in dst.placement.coords.items():
        groups.setdefault(tuple(0 if i in free else x for i, x in enumerate(at)), []).append(rank)
    missing = 0
    for ranks in groups.values():
        wanted, held = torch.zeros(8, 8, dtype=torch.bool), torch.zeros(8, 8, dtype=torch.bool)
        wanted[slices(dst.region((8, 8), ranks[0]), ((0, 8), (0, 8)))] = True
        for rank in ranks:
            held[slices(src.region((8, 8), rank), ((0, 8), (0, 8)))] = True
        missing += int((wanted & ~held).sum())
    return missing


@pytest.mark.parametrize("machine", [gloo, one_process], ids=["gloo", "one process"])
@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]], ids=["2x2", "2x2x2"])
def test_bytes_stay_near_the_lower_bound(ranks, machine):
    """Bytes received per rank, the mean over all pairs of layouts, against the least that any algorithm needs."""
    where = place(ranks)
    moved = bound = 0
    ratios = []
    for src, dst in itertools.product(states(2, where.ndim), repeat=2):
        a, b = layout(where, src), layout(where, dst)
        got = sum(bytes_received(plan(a, b, (1024, 1024), 4 << 20, machine).layouts, (8, 8), 1).values())
        need = least_received(a, b)
        assert got >= need, f"{src} -> {dst} receives {got} of the {need} it needs"
        assert need or not got, f"{src} -> {dst} is local but moves {got}"
        moved, bound = moved + got, bound + need
        ratios += [got / need] if need else []
    print(f"bytes / bound: {moved / bound:.3f} in all, {sum(ratios) / len(ratios):.3f} the mean of the pairs")
    assert moved / bound < 1.25 and sum(ratios) / len(ratios) < 1.25


@pytest.mark.parametrize("src, dst, factor", [
    (broadcast, split(0), 0), (broadcast, partial_sum, 0), (split(0), partial_sum, 0), (split(0), broadcast, 3 / 4),
    (split(0), split(1), 3 / 16), (partial_sum, split(0), 3 / 4), (partial_sum, broadcast, 6 / 4)], ids=str)
def test_bytes_recorded_are_the_textbook_ones(src, dst, factor):
    """4 ranks: all-gather (n-1)/n, all-to-all (n-1)/n^2, reduce-scatter (n-1)/n, all-reduce 2(n-1)/n of the tensor."""
    where = place([0, 1, 2, 3])
    x = gt.from_full(torch.randn(512, 512), where, src)
    with gt.record() as moves:
        x.to_global(sbp=dst)
    assert [m.bytes for m in moves] == [factor * 512 * 512 * 4]
    assert moves[0].op == "to_global" and moves[0].where.split(":")[0].endswith("test_boxing.py")
    assert (moves[0].src.sbp, moves[0].dst.sbp) == ((src,), (dst,)) and moves[0].seconds > 0


SBPS = {"S(i)": split(0), "S(j)": split(1), "B": broadcast, "P": partial_sum}
PRICES = [(src, dst, int(rounds), price) for src, dst, rounds, price in re.findall(
    r"(?m)^ {12}(\S+) +(\S+) +[a-z-]+ +(\d) +(.+)$", gt.GlobalTensor.to_global.__doc__)]


@pytest.mark.parametrize("machine", [gloo, one_process, shared_memory, nccl], ids="gloo process memory nccl".split())
@pytest.mark.parametrize("n", [3, 4, 8])
def test_the_table_of_to_global_is_what_plans_do(n, machine):
    """Rounds and bytes received, on every machine, of a tensor whose bytes matter."""
    assert {(src, dst) for src, dst, _, _ in PRICES} == {
        (src, dst) for src in ("S(i)", "B", "P") for dst in ("S(i)", "B", "P")} | {("S(i)", "S(j)")}
    where, size = place([*range(n)]), (1024 * n, 1024 * n)
    for src, dst, rounds, price in PRICES:
        path = plan(layout(where, (SBPS[src],)), layout(where, (SBPS[dst],)), size, 4 * prod(size), machine).layouts
        received = [max(bytes_received(step, size, 4).values()) for step in itertools.pairwise(path)]
        assert sum(map(bool, received)) == rounds, f"{src} -> {dst} of {n} ranks takes {path}"
        assert sum(received) == eval(price, {"n": n, "T": 4 * prod(size)}), f"{src} -> {dst} of {n} ranks"


def test_what_the_text_below_that_table_says():
    where, size = place([0, 1, 2, 3]), (4096, 4096)
    p_max, p, b = (layout(where, (sbp,)) for sbp in (partial_max, partial_sum, broadcast))
    whole = 4 * prod(size)
    path = plan(p_max, p, size, whole, gloo).layouts
    assert sum(bytes_received(path, size, 4).values()) / 4 == 3 / 4 * whole
    path = plan(p, b, (2,), 8, gloo).layouts
    assert path == (p, b) and set(bytes_received(path, (2,), 4).values()) == {3 * 8}
    p, b = (layout(place([0, 1]), (sbp,)) for sbp in (partial_sum, broadcast))
    path = plan(p, b, size, whole, gloo).layouts
    assert path == (p, b) and set(bytes_received(path, size, 4).values()) == {whole}


def test_every_link_carries_a_share():
    """One rank to four: it sends the tensor once, not four times."""
    a, b = place([0]), place([1, 2, 3, 4])
    way = plan(layout(a, (broadcast,)), layout(b, (broadcast,)), (1024, 1024), 4 << 20, gloo)
    assert [step.sbp for step in way.layouts] == [(broadcast,), (split(0),), (broadcast,)]
