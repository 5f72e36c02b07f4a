"""Prices by native code, against their twins in Python: the same numbers to the bit, and so the same decisions.

The twins are what was used before there was native code: `extreme_traffic`, `search_states` and `cheapest_by_parts`.
"""
from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from shards import place
from test_choose import PLACES, RULES

from globaltensor.boxings import native_prices, plan as plans, traffic as closed
from globaltensor.dispatch import choose as choosing, native_choice
from globaltensor.layouts.layout import layout, spec
from globaltensor.layouts.sbp import broadcast, partial_max, partial_sum, split
from globaltensor.runtime.machine import gloo, one_process
from globaltensor.runtime.native import core_lib

SEED = 20_261_124
pytestmark = [pytest.mark.usefixtures("many_ranks"),
              pytest.mark.skipif(core_lib is None, reason="the native code is not built")]
GRIDS = [(2,), (3,), (2, 2), (2, 3, 4), (3, 2, 3, 2), (5, 7, 6), (8, 4, 8, 4)]
LENGTHS = [0, 1, 2, 3, 5, 7, 16, 64, 67, 100, 251, 4096]
TWO_HOSTS = dataclasses.replace(gloo, hosts=tuple(rank // 2 % 2 for rank in range(1024)))


def pairs(count):
    """Layouts on one placement, and a shape: of steps that reduce one op at most."""
    r = random.Random(SEED)
    while count:
        axes = r.choice(GRIDS)
        where = place(torch.arange(torch.Size(axes).numel()).reshape(axes).tolist())
        states = [broadcast, split(0), split(1), split(2), r.choice([partial_sum, partial_sum, partial_max])]
        src, dst = (layout(where, tuple(r.choice(states) for _ in axes)) for _ in "ab")
        if src is not dst:
            count -= 1
            yield src, dst, tuple(r.choice(LENGTHS) for _ in range(3)), r


def test_traffic_of_steps():
    uneven = 0
    for src, dst, shape, _ in pairs(400):
        codes, sizes = [closed.axis_codes(of.sbp) for of in (src, dst)], src.placement.shape
        even = closed.even_traffic(*codes, sizes, shape)
        uneven += even is None
        want = even or closed.extreme_traffic(src, dst, shape)
        assert native_prices.step_traffic(*codes, sizes, shape) == want, f"{src} -> {dst} {shape} {SEED=}"
    assert uneven > 100


def test_states_between():
    """On several hosts too, where links differ by the axes that a step changes."""
    via = 0
    for src, dst, shape, r in pairs(200):
        machine, magnitude = r.choice([gloo, one_process, TWO_HOSTS]), r.choice([0, 10, 20, 33])
        (a, b), where = (closed.axis_codes(of.sbp) for of in (src, dst)), src.placement
        codes = dict(zip((*a, *b), (*src.sbp, *dst.sbp))) | {d: split(d) for d in range(3)}
        got = native_prices.search_between(a, b, where.shape, shape, magnitude, plans._memory_and_links(where, machine),
                                           bool(machine.hosts))
        assert got == plans.search_states(src, dst, codes, shape, magnitude, machine), f"{src} -> {dst} {shape} {SEED=}"
        via += got[2] is not None
    assert via > 20


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("ranks", [*PLACES[:-1], torch.arange(144).reshape(3, 4, 4, 3).tolist()],
                         ids=lambda ranks: "x".join(map(str, torch.tensor(ranks).shape)))
def test_choices(ranks, name, monkeypatch):
    own, ins, outs = RULES[name]
    where, r = place(ranks), random.Random(f"{SEED} {ranks} {name}")
    for nth in range((20, 20, 10, 2)[where.ndim - 1]):
        ends = {label: r.choice([1, 3, 4, 16, 67, 4096]) for label in "mnk"} | {1: 1}
        states = [broadcast, partial_max if r.random() < 0.2 else partial_sum, split(0), split(1)]
        operands = [spec(layout(where, tuple(r.choice(states) for _ in range(where.ndim))),
                         tuple(ends[label] for label in labels), None, torch.float32) for labels in ins]
        outputs = [(shape := tuple(ends[label] for label in labels), 4 * torch.Size(shape).numel()) for labels in outs]
        rule = dataclasses.replace(own, nonempty=("m",)) if r.random() < 0.3 else own
        question, = choosing._questions(rule, operands, outputs, r.choice([gloo, one_process]), None)
        with monkeypatch.context() as patch:
            patch.setattr(native_prices, "LIMITS", (0, 0))
            twin = question.cheapest_by_parts()
        assert question.cheapest() == twin, f"{[o.sbp for o in operands]} {ends}, case {nth}, {SEED=}"


def test_numbers_that_have_no_room_are_pythons(monkeypatch):
    """More axes or dims than native code takes, or integers that no double is equal to."""
    assert native_prices.is_small((2,) * 8, (1,) * 16) and not native_prices.is_small((2,) * 9, (1,))
    assert not native_prices.is_small((2,), (1,) * 17) and not native_prices.is_small((1024,), (1 << 43,))
    where = place([0, 1])
    operands = [spec(layout(where, (split(0),)), (1 << 53,), None, torch.float32)]
    assert native_choice.number_of_cheapest([[]], operands, [], gloo, [0.0, 0.0], None) is None
    src, dst = (layout(where, (state,)) for state in (split(0), broadcast))
    assert plans.plan(src, dst, (3 << 60,), 3 << 62, gloo).layouts == (src, dst)
