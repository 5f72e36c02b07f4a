"""Small programs as people write them, on global tensors: what earlier versions did not run, and what they lean on.

Oracle: the same program in plain torch. A program is told where to put its model and its batches.
"""
from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import _refs, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import globaltensor as gt

SEED = 61
S, B = gt.sbp.split, gt.sbp.broadcast
PLACEMENTS = {
    "dp": gt.placement("cpu", [0, 1], ("dp",)),
    "tp": gt.placement("cpu", [0, 1], ("tp",)),
    "dp x tp": gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp")),
}


class Put:
    """Puts models and batches on a placement, or leaves them plain."""

    def __init__(self, where):
        self.where = where

    def model(self, model):
        return model if self.where is None else gt.parallelize(model, self.where)

    def batch(self, *shape):
        x = torch.randn(*shape)
        return x if self.where is None else gt.from_full(x, self.where, {"dp": S(0)} if "dp" in self.where.names else B)


def trained(put, model, loss_of, steps=3):
    model = put.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def normed(norm, put):
    """Weights that are made of others."""
    model = nn.Sequential(norm(nn.Linear(6, 8)), nn.ReLU(), norm(nn.Linear(8, 6)))
    return trained(put, model, lambda m: m(put.batch(4, 6)).square().mean())


class Warped(nn.Module):
    """A spatial transformer: its grid is learned, or given."""

    def __init__(self, learned):
        super().__init__()
        self.conv, self.angle, self.learned = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(2, 6), learned

    def forward(self, x):
        maps = self.angle(x.mean((2, 3))).view(-1, 2, 3)
        grid = F.affine_grid(maps if self.learned else maps.detach(), x.shape, align_corners=False)
        return F.grid_sample(self.conv(x), grid, align_corners=False)


def warped(learned, put):
    return trained(put, Warped(learned), lambda m: m(put.batch(4, 2, 5, 5)).square().mean())


def warped_image(put):
    """Only the grid has a gradient."""
    angle = put.model(nn.Linear(2, 6))
    x = put.batch(4, 2, 5, 5)
    grid = F.affine_grid(angle(x.mean((2, 3))).view(-1, 2, 3), x.shape, align_corners=False)
    F.grid_sample(x, grid, align_corners=False).square().mean().backward()
    return [angle.weight.grad, angle.bias.grad]


def gradient_penalty(put):
    """A critic whose gradient has a norm of 1: a second derivative."""

    def loss_of(critic):
        real, fake, mixed = put.batch(4, 6), put.batch(4, 6), put.batch(4, 1).sigmoid()
        x = (mixed * real + (1 - mixed) * fake).requires_grad_()
        told = critic(x)
        grad, = torch.autograd.grad(told, x, torch.ones_like(told), create_graph=True)
        return told.mean() + 10 * (grad.norm(2, dim=1) - 1).square().mean()

    return trained(put, nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), loss_of)


def double_q_learning(put):
    """Masked targets of a network that lags behind, by its state_dict."""
    network = put.model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    target = copy.deepcopy(network)
    optimizer = torch.optim.RMSprop(network.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(2):
        state, after, reward = put.batch(8, 4), put.batch(8, 4), put.batch(8)
        ended, action = reward > 0.5, (put.batch(8, 1) > 0).long()
        value = torch.zeros_like(reward)
        with torch.no_grad():
            value[~ended] = target(after[~ended]).amax(1)
        loss = F.smooth_l1_loss(network(state).gather(1, action), (reward + 0.9 * value)[:, None])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(network.parameters(), 0.1)
        optimizer.step()
        mixed = target.state_dict()
        for key, value in network.state_dict().items():
            mixed[key] = 0.1 * value + 0.9 * mixed[key]
        target.load_state_dict(mixed)
    return [loss.detach(), *target.state_dict().values()]


PROGRAMS = {
    "weight_norm": partial(normed, parametrizations.weight_norm), "older weight_norm": partial(
        normed, nn.utils.weight_norm), "older spectral_norm": partial(normed, nn.utils.spectral_norm),
    "learned grid": partial(warped, True), "given grid": partial(warped, False), "warped image": warped_image,
    "gradient penalty": gradient_penalty, "double q": double_q_learning,
}


@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_as_people_write_it(program, where):
    print(f"seed {SEED}")
    results = []
    for put in (Put(None), Put(PLACEMENTS[where])):
        torch.manual_seed(SEED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)           # torch's older weight_norm is deprecated
            results.append(PROGRAMS[program](put))
    plain, spread = results
    torch.testing.assert_close([x.full_tensor() for x in spread], plain, rtol=1e-4, atol=1e-5)


def test_a_plan_leaves_weights_that_are_made_of_others_whole():
    model = nn.ModuleDict({"up": parametrizations.weight_norm(nn.Linear(4, 8)), "down": nn.Linear(8, 4)})
    plan = gt.Plan.of(model)
    assert list(plan) == ["down.weight"] and "weight_norm, parametrize" in plan.whole[
        "up.parametrizations.weight.original0"]


REFS = ["add", "sub", "mul", "true_divide", "floor_divide", "remainder", "fmod", "pow", "float_power", "lt", "eq", "ne",
        "maximum", "fmin", "atan2", "copysign", "hypot", "nextafter", "bitwise_and", "logical_xor", "where"]


@pytest.mark.parametrize("sbp", [B, S(0), S(1)], ids=str)
@pytest.mark.parametrize("name", REFS)
def test_references_of_torch_take_operands_of_0_dims(name, sbp):
    """Of torch.ops.prims, of which torch's own references are made."""
    torch.manual_seed(SEED)
    whole = name.startswith("bitwise")
    x, one = (torch.randint(1, 9, size) if whole else torch.rand(size) + 0.5 for size in ((5, 4), ()))

    def called(a, b):
        return getattr(_refs, name)(*([a > 1] if name == "where" else []), a, b)

    on = PLACEMENTS["dp"]
    for a, b in ((x, one), (one, x), (x, x.t().contiguous().t()), (x.t(), one)):
        want = called(a, b)
        put = [gt.from_full(t, on, sbp if t.dim() else B) for t in (a, b)]
        for operands in (put, [put[0], b], [a, put[1]]):
            got = called(*operands)
            assert got.dtype == want.dtype and got.stride() == want.stride(), (got.stride(), want.stride())
            assert torch.equal(got.full_tensor(), want)


@pytest.mark.parametrize("sbp", [B, S(0)], ids=str)
def test_references_of_torch_give_numbers(sbp):
    torch.manual_seed(SEED)
    x = torch.randint(1, 9, (5, 4))
    y = gt.from_full(x, PLACEMENTS["dp"], sbp)
    for a, b in ((x, y), (x * 0.5, y * 0.5), (x > 3, y > 3)):
        assert torch.equal(a[:1].sum().view(1), torch.tensor([_refs.item(b[:1].sum())]))
        assert type(torch.ops.prims.item(b.sum())) is type(torch.ops.prims.item(a.sum()))
        assert _refs.equal(b, b) is True and _refs.equal(b, ~b if b.dtype is torch.bool else b + 1) is False
