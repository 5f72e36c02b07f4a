"""Products of strategies: one GPT under all of them, each equal to plain torch on one device.

    axes       dp, tp, sp and their products, 2 ranks each
    sequence   between the layers: whole, split over tp, split over sp
    zero       stages of ZeRO along dp
    how        gradients accumulated over two parts of the batch, blocks recomputed in backward, or neither
"""
from __future__ import annotations

import itertools
import os
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from harness import ROOT
from shards import place
from torch import nn
from torch.utils.checkpoint import checkpoint

import globaltensor as gt

sys.path.insert(0, os.fspath(ROOT / "examples"))
from gpt import GPT

SEED = 41
VOCAB, SEQ, HIDDEN, BATCH = 32, 8, 16, 4
AXES = [("dp",), ("tp",), ("sp",), ("dp", "tp"), ("dp", "sp"), ("tp", "sp"), ("dp", "tp", "sp")]
HOW = ["", "accumulate", "recompute"]


def products():
    for axes, zero, how in itertools.product(AXES, range(4), HOW):
        for sequence in [*[""] * ("sp" not in axes), *[axis for axis in ("tp", "sp") if axis in axes]]:
            if "dp" in axes or not zero:
                yield axes, sequence, zero, how


def trained(model, x, y, how, zero=0, steps=2):
    """Losses and gradient norms of some steps."""
    if how == "recompute":
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if zero:
        gt.zero(optimizer, "dp", zero)
    parts = 2 if how == "accumulate" else 1
    told = []
    for _ in range(steps):
        for some, target in zip(x[parts], y[parts]):
            loss = F.cross_entropy(model(some).flatten(0, 1), target.flatten()) / parts
            loss.backward()
            told.append(loss.item())
        told.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return told


@pytest.mark.sample(4)
@pytest.mark.parametrize("axes, sequence, zero, how", list(products()), ids=str)
def test_a_product_is_one_device(axes, sequence, zero, how):
    where = place(torch.arange(2 ** len(axes)).view([2] * len(axes)).tolist(), axes)
    torch.manual_seed(SEED)
    plain = GPT(VOCAB, SEQ, 1, HIDDEN, 2).double()
    model = GPT(VOCAB, SEQ, 1, HIDDEN, 2).double()
    model.load_state_dict(plain.state_dict())
    gt.parallelize(model, where, gt.Plan.of(model, "tp" if "tp" in axes else "", sequence))
    ids = torch.randint(VOCAB, (BATCH, SEQ + 1))
    x, y = ({n: whole.contiguous().chunk(n) for n in (1, 2)} for whole in (ids[:, :-1], ids[:, 1:]))
    rows = {"dp": gt.sbp.split(0)} if "dp" in axes else gt.sbp.broadcast
    gx, gy = ({n: [gt.from_full(t, where, rows) for t in parts] for n, parts in given.items()} for given in (x, y))
    assert trained(model, gx, gy, how, zero) == pytest.approx(trained(plain, x, y, how), rel=1e-8)
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-7, atol=1e-10, msg=lambda m: f"{name}: {m}")
