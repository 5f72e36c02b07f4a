"""Algorithms compete with signatures, by price: what is cheaper is taken, and `gt.explain` names the other."""
from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from shards import place

import globaltensor as gt
from globaltensor.algorithms.offer import Offer
from globaltensor.boxings.plan import boxing_cost, least_cost
from globaltensor.dispatch.decide import contest_of, decide
from globaltensor.layouts.layout import layout, spec
from globaltensor.op_table.table import TABLE
from globaltensor.rules.call import Call
from globaltensor.runtime import world
from globaltensor.runtime.machine import gloo, nccl, one_process

SEED = 20_261_123
S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
aten = torch.ops.aten
# op -> its arguments after the operand
OPS = {"softmax": (aten._softmax.default, (1, False)), "logsumexp": (aten.logsumexp.default, ([1],)),
       "norm": (aten.linalg_vector_norm.default, (2, [1])), "variance": (aten.var.correction, ([1],)),
       "mean": (aten.mean.dim, ([1],)), "cumsum": (aten.cumsum.default, (1,)), "topk": (aten.topk.default, (2, 1)),
       "argmax": (aten.argmax.default, (1,)), "maximum": (aten.max.dim, (1,)), "product": (aten.prod.dim_int, (1,))}


@pytest.fixture
def machine():
    """Sets the rates of the machine."""
    own = world.world()
    yield lambda rates: world.begin(replace(own, machine=rates))
    world.begin(own)


def lying(where, nd, shape, dtype=torch.float32):
    """A global tensor without values, whose ranks nobody drives."""
    return gt.GlobalTensor.wrap(spec(layout(where, nd), shape, None, dtype),
                                {r: torch.empty(layout(where, nd).local_shape(shape, r), dtype=dtype)
                                 for r in where.flat})


def choice(x, name):
    func, rest = OPS[name]
    return contest_of(gt.GlobalTensor, Call(func, (x, *rest), {}))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("ranks", [[2, 0, 1], [[3, 1, 5], [0, 2, 4]]], ids=str)
def test_the_cheapest_is_taken(ranks, name):
    """Of all, with nothing left out by what it costs at least; and an offer costs no less than its bound."""
    where, r, wins = place(ranks), random.Random(f"{SEED} {ranks} {name}"), 0
    for nth in range(10):
        x = lying(where, (S(1), *(r.choice([B, P, S(0), S(1)]) for _ in range(where.ndim - 1))),
                  (r.choice([3, 64, 1000]), r.choice([4, 65, 4096])))
        contest = choice(x, name)._replace(machine=r.choice([gloo, one_process, nccl]))
        ranking, taken = contest.ranking(), contest.choice()
        of_taken = next(one for one in ranking if one.choice == taken)
        assert of_taken.counts <= ranking[0].counts + 1e-15, f"{x.spec} on {contest.machine}, case {nth}, SEED={SEED}"
        bound, seconds = (contest.offer.seconds(contest.machine, cost) for cost in (least_cost, boxing_cost))
        assert 0 < bound <= seconds * (1 + 1e-12)
        wins += taken is contest.offer
    assert wins


@pytest.mark.parametrize("name", OPS)
def test_nobody_gathers_what_an_algorithm_need_not_hold(name, machine):
    """Though one gathering starts sooner than two reductions: a rank would hold the whole."""
    func, rest = OPS[name]
    for rates in (gloo, one_process, nccl):
        machine(rates)
        x = lying(place([0, 1, 2, 3]), (S(1),), (1, 8))
        assert isinstance(choice(x, name).choice(), Offer)
        assert decide(gt.GlobalTensor, func, (x, *rest), {}) is TABLE[func].decomposition


def test_the_runner_up_of_a_softmax_and_of_its_rival_are_told():
    where = place([0, 1])
    long, short = (gt.ones(*shape, placement=where, sbp=S(1)) for shape in ((64, 4096), (65536, 2)))
    row, = gt.explain(lambda: torch.softmax(long, 1)).rows
    assert row.algorithm == "maxima and sums of the parts" and row.chosen == f"S(1) -> S(1) by {row.algorithm}"
    assert row.second == "S(0) -> S(0)" and row.dearer > 0
    row, = gt.explain(lambda: torch.softmax(short, 1)).rows
    assert row.chosen == "S(0) -> S(0)" and row.algorithm == ""
    assert row.second == "S(1) -> S(1) by maxima and sums of the parts" and row.dearer > 0
    tiny = gt.ones(1, 8, placement=where, sbp=S(1))
    text = str(gt.explain(lambda: torch.softmax(tiny, 1)))
    assert "sooner, but ranks would hold more" in text and "by maxima and sums of the parts" in text


def test_other_rates_make_another_choice(machine):
    """An algorithm goes over its part more often, and sends less: where computing is slow, the signature is taken."""
    x = lying(place([0, 1]), (S(1),), (4096, 64))
    call = (aten._softmax.default, (x, 1, False), {})
    machine(one_process)
    assert decide(gt.GlobalTensor, *call).__name__ == "softmax"
    machine(replace(one_process, work=1e8))
    assert [sig.inputs for sig in decide(gt.GlobalTensor, *call).signature] == [(S(0),)]


def test_all_ranks_choose_alike():
    """What is chosen does not depend on who asks."""
    own, where = world.world(), place([[0, 1], [2, 3]])
    x, chosen = lying(where, (S(0), S(1)), (67, 131)), []
    try:
        for rank in range(4):
            world.begin(replace(own, local_ranks=(rank,)))
            chosen.append([choice(x, name).choice() for name in OPS])
    finally:
        world.begin(own)
    assert all(other == chosen[0] for other in chosen)


def test_panels_and_moved_matrices_compete(machine):
    """Matrices on a grid: in panels; but where they are long along what is summed, it is cheaper to sum the products of
    parts that are moved there. What would gather a matrix is no rival."""
    where = place([[0, 1], [2, 3]])
    x, w = (lying(where, (S(0), S(1)), shape) for shape in ((512, 512), (512, 512)))
    call = Call(torch.ops.globaltensor.contract.default, ("mk,kn->mn", x, w), {})
    machine(gloo)
    first, second, *_ = contest_of(gt.GlobalTensor, call).ranking()
    assert first.choice.name == "panels of SUMMA" and second.seconds > first.seconds
    assert [(sig.inputs, sig.outputs) for sig in second.choice] == [((S(1), S(0)), (P,))] * 2
    machine(replace(gloo, latency=1.0))
    assert isinstance(contest_of(gt.GlobalTensor, call).choice(), Offer)     # one start, of both matrices


def test_rows_at_the_seams_and_moved_images_compete(machine):
    """A halo is small, but where kernels are about as long as the parts."""
    where = place([0, 1, 2, 3])
    weight = torch.ones(4, 4, 33, 1)
    for rows, wins in ((4096, True), (34, False)):
        x = lying(where, (S(2),), (64, 4, rows, 256))
        call = Call(aten.convolution.default, (x, weight, None, [1, 1], [16, 0], [1, 1], False, [0, 0], 1), {})
        machine(replace(gloo, work=1e15))
        first, second, *_ = contest_of(gt.GlobalTensor, call).ranking()
        halo, images = (first, second) if wins else (second, first)
        assert halo.choice.name == "halo exchange" and [sig.outputs for sig in images.choice] == [(S(0),)]


def test_a_split_that_does_not_fit_is_no_choice():
    """Heads that cannot be dealt evenly: nobody may insist on that axis staying as it is."""
    q, k = (gt.ones(2, heads, 6, 4, placement=place([[0, 1], [2, 3]]), sbp=(S(1), S(2))) for heads in (6, 3))
    for causal in (False, True):
        got = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=True)
        torch.testing.assert_close(got.full_tensor(), torch.ones(2, 6, 6, 4))
