"""What is chosen is the cheapest of all choices, the first of equals, though most are never priced.

Oracle: the price of every choice.
"""
from __future__ import annotations

import random

import pytest
import torch
from shards import place

from globaltensor.dispatch import choose as choosing
from globaltensor.layouts.layout import layout, spec
from globaltensor.layouts.sbp import broadcast, partial_max, partial_sum, split
from globaltensor.rules.parse import rule
from globaltensor.runtime.machine import gloo, one_process

SEED = 20_261_123
pytestmark = pytest.mark.usefixtures("many_ranks")
PLACES = [[0, 1], [2, 0, 1], [[0, 1], [2, 3]], [[3, 1, 5], [0, 2, 4]], torch.arange(8).reshape(2, 2, 2).tolist(),
          torch.arange(64).reshape(4, 4, 4).tolist(),
          pytest.param(torch.arange(1024).reshape(8, 4, 8, 4).tolist(), marks=pytest.mark.long)]
# rule -> shapes of the operands and of what comes out
RULES = {
    "add": (rule("m n, m n -> m n", "a+b"), [("m", "n")] * 2, [("m", "n")]),
    "multiply": (rule("m n, m n -> m n", "a*b"), [("m", "n")] * 2, [("m", "n")]),
    "multiply rows": (rule("m n, m 1 -> m n", "a*b"), [("m", "n"), ("m", 1)], [("m", "n")]),
    "matmul": (rule("m k, k n -> m n", "a*b"), [("m", "k"), ("k", "n")], [("m", "n")]),
    "where": (rule("m n, m n, m n -> m n", "A*b+A*c"), [("m", "n")] * 3, [("m", "n")]),
    "exp": (rule("m n -> m n", ""), [("m", "n")], [("m", "n")]),
    "sum": (rule("m n -> m", "a"), [("m", "n")], [("m",)]),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("ranks", PLACES, ids=lambda ranks: "x".join(map(str, torch.tensor(ranks).shape)))
def test_the_first_of_the_cheapest_is_chosen(ranks, name):
    own, ins, outs = RULES[name]
    where, r = place(ranks), random.Random(f"{SEED} {ranks} {name}")
    for nth in range((25, 25, 5, 1)[where.ndim - 1]):
        ends = {label: r.choice([1, 3, 4, 16, 100, 4096]) for label in "mnk"} | {1: 1}
        states = [broadcast, partial_max if r.random() < 0.2 else partial_sum, split(0), split(1)]
        operands = [spec(layout(where, tuple(r.choice(states) for _ in range(where.ndim))),
                         tuple(ends[label] for label in labels), None, torch.float32) for labels in ins]
        outputs = [(shape := tuple(ends[label] for label in labels), 4 * torch.Size(shape).numel())
                   for labels in outs]
        machine = r.choice([gloo, one_process])
        question, = choosing._questions(own, operands, outputs, machine, None)
        choices = list(question.fitting())
        prices = [question.price(nd) for nd in choices]
        best = min(prices)
        first = next(nd for nd, price in zip(choices, prices) if price <= best + 1e-15)
        assert question.cheapest() == first, f"{[o.sbp for o in operands]} {ends} {machine}, case {nth}, SEED={SEED}"
