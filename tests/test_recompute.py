"""Recomputation in backward, whole and selective: the same values, dropout bit for bit, and fewer things kept."""
from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from shards import place
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import globaltensor as gt
from globaltensor.planner.recomputing import recompute_block
from globaltensor.runtime import custom_ops

S, B = gt.sbp.split, gt.sbp.broadcast
SEED = 5
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, custom_ops.linear, custom_ops.contract}


def keep_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(8, 16), nn.Linear(16, 8), 0

    def forward(self, x):
        self.calls += 1
        return x + F.dropout(self.down(F.dropout(F.gelu(self.up(x)), 0.3)), 0.3)


HOW = {"none": None, "whole": {},
       "selective": {"context_fn": partial(create_selective_checkpoint_contexts, keep_products)}}


def trained(how, where, sbp):
    """Outputs and gradients of two steps, and how often the block ran."""
    torch.manual_seed(SEED)
    block = Block()
    x = torch.randn(6, 5, 8)
    gt.to_global(block, where, {"up.*": sbp["up"], "down.weight": sbp["down"]} if sbp["up"] != B else B)
    x = gt.from_full(x, where, sbp["x"])
    found = []
    for _ in range(2):
        torch.manual_seed(SEED + 1)
        run = block if HOW[how] is None else lambda t: checkpoint(block, t, use_reentrant=False, **HOW[how])
        y = run(x)
        y.sum().backward()
        found += [y.full_tensor(), *[p.grad.full_tensor() for p in block.parameters()]]
        block.zero_grad()
    return found, block.calls


@pytest.mark.parametrize("how", ["whole", "selective"])
@pytest.mark.parametrize("sbp", [{"up": B, "down": B, "x": S(0)}, {"up": S(0), "down": S(1), "x": B},
                                 {"up": B, "down": B, "x": S(1)}], ids=["dp", "tp", "sp"])
def test_recomputed_bit_for_bit(how, sbp):
    where = place([0, 1])
    expected, once = trained("none", where, sbp)
    got, calls = trained(how, where, sbp)
    assert once == 2 and calls == 4                  # forward, and again in backward
    for a, b in zip(got, expected):
        assert torch.equal(a, b)


def test_what_the_policy_keeps_is_not_made_again():
    """Local products of a rank's step: 2 forward and 4 backward; recomputed as a whole, 2 more."""
    where, products = place([0, 1]), {}
    for how in HOW:
        torch.manual_seed(SEED)
        block = gt.to_global(Block(), where)
        x = gt.from_full(torch.randn(6, 5, 8), where, S(0)).requires_grad_()
        run = block if HOW[how] is None else lambda t: checkpoint(block, t, use_reentrant=False, **HOW[how])
        run(x).sum().backward()                      # deciding how an op runs asks meta kernels, too
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            run(x).sum().backward()
        counts = {e.key: e.count for e in seen.key_averages()}
        products[how] = sum(counts.get(key, 0) for key in ("aten::mm", "aten::addmm", "aten::bmm"))
    driven = len(block.up.weight.shards)
    assert products == {"none": 6 * driven, "whole": 8 * driven, "selective": 6 * driven}


class Mixed(nn.Module):
    """Attention as products by hand, and experts, whose products have a parameter: all are batched."""

    def __init__(self, dtype):
        super().__init__()
        self.experts, self.dtype = nn.Parameter(torch.randn(2, 8, 8)), dtype

    def forward(self, x):                            # [b, h, s, d]
        mixed = torch.softmax(x @ x.transpose(-1, -2), -1) @ x
        return x + torch.einsum("bhsd,hde->bhse", mixed.to(self.dtype), self.experts.to(self.dtype)).relu()


def runs_of(key, profile):
    """How often an op ran: one that a mode looks at is seen once more within itself."""
    def within(event):
        return [one for child in event.cpu_children for one in (child, *within(child))]

    return sum(event.name == key and not any(one.name == key for one in within(event)) for event in profile.events())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks, sbp", [([0], B), ([0, 1], S(0)), ([0, 1], S(1))], ids=["1", "2, rows", "2, heads"])
def test_selectively_products_with_parameters_are_kept_and_attention_is_not(ranks, sbp, dtype):
    runs, gradients = {}, {}
    for how in ("none", "full", "selective"):
        torch.manual_seed(SEED)
        block = gt.to_global(Mixed(dtype), place(ranks), {"experts": S(0)} if sbp == S(1) else B)
        if how != "none":
            recompute_block(block, how)
        x = gt.from_full(torch.randn(4, 2, 8, 8), place(ranks), sbp).requires_grad_()
        block(x).sum().backward()                    # deciding how an op runs asks meta kernels, too
        block.zero_grad()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            block(x).sum().backward()
        gradients[how] = block.experts.grad.full_tensor()
        runs[how] = runs_of("aten::bmm", profile)
    driven = len(block.experts.shards)               # none by a process that has no rank of it
    assert runs["full"] - runs["none"] == 3 * driven and runs["selective"] - runs["none"] == 2 * driven, runs
    assert all(torch.equal(one, gradients["none"]) for one in gradients.values())


class Averaging(nn.Module):
    """Uses an average of what has come so far, beside running statistics."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        x = self.norm(self.linear(x))
        self.average.mul_(0.5).add_(x.detach().mean(0) + x.detach().std(0))
        return (x + self.average).sin()


@pytest.mark.parametrize("how", ["full", "selective"])
def test_a_block_runs_again_on_the_buffers_that_it_had_and_leaves_those_of_now(how):
    results = []
    for own in ("none", how):
        torch.manual_seed(SEED)
        block = gt.to_global(Averaging(), place([0, 1]))
        if own != "none":
            recompute_block(block, own)
        outputs = [block(gt.from_full(torch.randn(6, 8), place([0, 1]), S(0))) for _ in range(3)]
        for y in outputs:
            y.square().sum().backward()
        results.append([p.grad.full_tensor() for p in block.parameters()] + [b.full_tensor() for b in block.buffers()])
    assert all(map(torch.equal, *results))
