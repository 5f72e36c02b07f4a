"""Schedules run on ranks: gradients against plain gradient accumulation, in one process and in one for each rank."""
from __future__ import annotations

import copy
import itertools
import re
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from harness import PROGRAMS, PYTHON, RUN, by_hand, environment, good, good_all, results
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import globaltensor as gt
from globaltensor.errors import GlobalTensorError, PlacementError, ShapeError
from globaltensor.pipelining import kept_buffers
from globaltensor.pipelining.split_backward import backward_input, backward_weight
from globaltensor.pipelining.stages import StageError, balanced, cut_sequence, measured
from globaltensor.schedules.schedule import ScheduleError
from globaltensor.schedules.text import parse_schedule
from globaltensor.schedules.timetable import as_text
from globaltensor.tensors import gradients

SEED = 17
PIPELINE = str(PROGRAMS / "pipeline.py")
NAMES = ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
CHUNKS = {"interleaved": 2, "bfs": 2, "zb-v": 2, "dualpipe-v": 2}


@pytest.fixture(autouse=True)
def seeded():
    print(f"seed {SEED}")
    torch.manual_seed(SEED)


def alone(ranks):
    """A placement of one rank for each rank of a schedule."""
    return [gt.placement("cpu", [r]) for r in range(ranks)]


def accumulated(model, parts, loss):
    """The loss and the gradients of a plain loop over micro-batches of (inputs, targets), whose means count by their
    rows."""
    model, total = copy.deepcopy(model), 0.0
    rows = sum(len(targets) for _, targets in parts)
    for inputs, targets in parts:
        value = loss(model(*inputs) if isinstance(inputs, tuple) else model(inputs), targets) / (rows / len(targets))
        value.backward()
        total = total + value.detach()
    return total, {name: p.grad for name, p in model.named_parameters()}


def same_bits(model, total, want, loss):
    assert loss.item() == total.item()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad.full_tensor(), want[name]), name


def tanhs(n, width=6):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(n))).double()


def blocks(n, width=6, dropout=0.25):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(width))
                           for _ in range(n))).double()


# -------------------------------------------------------------------------------------------------- the same gradients


@pytest.mark.sample(3)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("m", [1, 3, 4, 8])
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_gives_the_bits_of_gradient_accumulation(name, p, m, recompute):
    model = tanhs(p * CHUNKS.get(name, 1))
    x, y = torch.randn(2, 9, 6, dtype=torch.float64)
    total, want = accumulated(model, list(zip(x.tensor_split(m), y.tensor_split(m))), F.mse_loss)
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in x.tensor_split(m)])
    runner = gt.pipeline(list(model), alone(p), name, m, F.mse_loss, recompute=recompute)
    same_bits(model, total, want, runner.step(x, y))
    assert torch.equal(runner.eval(x).full_tensor(), outputs)
    assert runner.eval(x, y).item() == total.item()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows, m", [(9, 4), (5, 3), (8, 4), (3, 4), (1, 8)])
def test_the_loss_is_that_of_the_batch_on_one_device(name, rows, m):
    """However it is cut."""
    model = tanhs(2 * CHUNKS.get(name, 1))
    x, y = torch.randn(2, rows, 6, dtype=torch.float64)
    plain = copy.deepcopy(model)
    loss = F.mse_loss(plain(x), y)
    loss.backward()
    runner = gt.pipeline(list(model), alone(2), name, m, F.mse_loss)
    ours = runner.step(x, y)
    for value in (ours, runner.eval(x, y)):
        torch.testing.assert_close(value.full_tensor(), loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(runner.eval(x).full_tensor(), plain(x).detach(), rtol=1e-12, atol=1e-14)
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-14)


def test_a_second_step_adds_to_the_gradients_of_the_first():
    model = tanhs(2)
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    _, want = accumulated(model, list(zip(x.chunk(4), y.chunk(4))), F.mse_loss)
    runner = gt.pipeline(list(model), alone(2), "1f1b", 4, F.mse_loss)
    for _ in range(2):
        runner.step(x, y)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), 2 * want[name], rtol=1e-12, atol=1e-15)


class Failing(nn.Linear):
    """Raises in its forward of this number, if any."""

    calls, fails_at = 0, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.fails_at:
            raise ValueError("a bad batch")
        return super().forward(x)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("stage, micro_batch", [(0, 1), (1, 1), (1, 2), (1, 4)])
@pytest.mark.parametrize("unused", [False, True])
def test_a_step_that_raises_leaves_the_gradients_that_were_there(name, stage, micro_batch, unused):
    """Stages on several ranks, which reduce their gradients at the end, beside stages on one."""
    model = nn.Sequential(Failing(6, 6), Failing(6, 6)).double()
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    seen, sums = [], []
    for places in (alone(2), grid(2, 1, 2)):
        own = copy.deepcopy(model)
        runner = gt.pipeline(list(own), places, name, 4, F.mse_loss)
        runner.step(x, y)
        if unused:
            own[0].weight.grad = None                # nothing is there to be kept
        own[stage].fails_at = own[stage].calls + micro_batch
        with pytest.raises(ValueError, match="a bad batch"):
            runner.step(x, y)
        seen.append([p.grad.full_tensor() for p in own.parameters() if p.grad is not None])
        runner.step(x, y)
        sums.append([p.grad.full_tensor() for p in own.parameters()])
    for one, several in zip(seen[0] + sums[0], seen[1] + sums[1], strict=True):
        torch.testing.assert_close(several, one, rtol=1e-12, atol=1e-15)


def test_a_schedule_from_a_text(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("0F0 0F1 0F2 0B2 0I1 0B0 0W1\n1F0 1F1 1F2 1B2 1B1 1I0 1W0\n")
    model = tanhs(2)
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    total, want = accumulated(model, list(zip(x.tensor_split(3), y.tensor_split(3)))[::-1], F.mse_loss)
    loss = gt.pipeline(list(model), alone(2), str(file), loss=F.mse_loss).step(x, y)
    torch.testing.assert_close(loss.full_tensor(), total, rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), want[name], rtol=1e-12, atol=1e-15)


class Counted(nn.Linear):
    """Gives a number of rows beside its output."""

    def forward(self, x):
        y = super().forward(x)
        return y, (y[:, 0] > -99).sum()


def test_a_count_that_is_added_up_stays_an_integer():
    x = torch.randn(9, 6, dtype=torch.float64)
    stages = [nn.Linear(6, 6).double(), Counted(6, 6).double()]
    _, count = gt.pipeline(stages, alone(2), "1f1b", 4, lambda y: y[0].mean(), reduction="sum").eval(x)
    assert count.dtype == torch.int64 and count.item() == 9


def test_the_sum_of_losses():
    model = tanhs(2)
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    mean = gt.pipeline(list(copy.deepcopy(model)), alone(2), "1f1b", 4, F.mse_loss).step(x, y)
    total = gt.pipeline(list(model), alone(2), "1f1b", 4, F.mse_loss, reduction="sum").step(x, y)
    assert total.item() == pytest.approx(4 * mean.item(), rel=1e-12)


# ----------------------------------------------------------------------------------------------------- what models have


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_dropout_follows_the_seeds_of_micro_batches_only(name, recompute):
    model = blocks(4)
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    eager = gt.to_global(copy.deepcopy(model), gt.placement("cpu", [5]))
    runner = gt.pipeline(model, alone(2), name, 4, F.mse_loss, recompute=recompute)
    before = torch.get_rng_state()
    loss = runner.step(x, y)
    after = torch.get_rng_state()
    assert len(set(runner.seeds)) == 4 and not torch.equal(before, after)
    total = 0.0
    for seed, a, b in zip(runner.seeds, x.chunk(4), y.chunk(4)):
        torch.manual_seed(seed)
        value = F.mse_loss(eager(gt.from_full(a, gt.placement("cpu", [5]), gt.sbp.broadcast)),
                           gt.from_full(b, gt.placement("cpu", [5]), gt.sbp.broadcast)) / 4
        value.backward()
        total += value.item()
    assert loss.item() == total
    for (n, p), q in zip(model.named_parameters(), eager.parameters()):
        assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor()), n
    torch.set_rng_state(before)
    assert runner.step(x, y).item() == loss.item(), "the same seed, the same numbers"
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("recompute", [False, True])
def test_batch_norm(recompute):
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(6, 6), nn.BatchNorm1d(6)))).double()
    plain = copy.deepcopy(model)
    x, y = torch.randn(2, 12, 6, dtype=torch.float64)
    total = 0.0
    for a, b in zip(x.chunk(3), y.chunk(3)):
        value = F.mse_loss(plain(a), b) / 3
        value.backward()
        total = total + value.item()
    runner = gt.pipeline([model[:2], model[2:4], model[4:]], alone(3), "1f1b", 3, F.mse_loss, recompute=recompute)
    with pytest.warns(UserWarning, match="each of 3 micro-batches, not those of the batch: 1 of stage 0") as warned:
        assert runner.step(x, y).item() == pytest.approx(total, rel=1e-12)
    for (n, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-14, msg=n)
    for (n, p), q in zip(model.named_buffers(), plain.buffers()):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-12, atol=1e-15, msg=n)
    assert len(warned) == 1 and __file__.endswith(warned[0].filename)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner.step(x[:6], y[:6])                    # once
        copied = copy.deepcopy(plain).eval()         # nor where it takes no statistics, or those of the batch
        gt.pipeline([copied[:2], copied[2:]], alone(2), "1f1b", 3, F.mse_loss).step(x, y)
        gt.pipeline([plain[:2], plain[2:]], alone(2), "1f1b", 1, F.mse_loss).step(x, y)


class Averaging(nn.Module):
    """Adds an average of what has come so far, which it changes first: `how` it does so."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(6, 6), how
        self.register_buffer("average", None if how == "late" else torch.zeros(6))
        self.register_buffer("mask", torch.ones(6))

    def forward(self, x):
        x = self.linear(x) * self.mask
        new = x.detach().mean(0)
        if self.how == "in place":
            self.average.mul_(0.5).add_(new)
        elif self.how == "data":
            self.average.data.mul_(0.5).add_(new)
        else:
            self.average = new if self.average is None else self.average * 0.5 + new
        return x.sin() * self.average


BUFFERED = {how: lambda how=how: Averaging(how) for how in ("in place", "data", "anew", "late")} | {
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))}


@pytest.mark.parametrize("large", [0, 1 << 20])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("name", BUFFERED)
def test_a_stage_runs_again_on_the_buffers_that_it_had(name, schedule, large, monkeypatch):
    """Later micro-batches have changed them by then. Versions do not tell: writes to .data leave them."""
    monkeypatch.setattr(kept_buffers, "MANY_BYTES", large)
    model = nn.Sequential(nn.Linear(6, 6), BUFFERED[name](), nn.Linear(6, 6), BUFFERED[name]()).double()
    plain = copy.deepcopy(model)
    runner = gt.pipeline([model[:2], model[2:]], alone(2), schedule, 4, F.mse_loss, recompute=True)
    for x, y in torch.randn(2, 2, 8, 6, dtype=torch.float64):
        runner.step(x, y)
        for a, b in zip(x.chunk(4), y.chunk(4)):
            (F.mse_loss(plain(a), b) / 4).backward()
    for (n, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-14, msg=n)
    for (n, p), q in zip(model.named_buffers(), plain.buffers()):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-12, atol=1e-15, msg=n)


def test_a_large_buffer_that_stays_is_copied_once_for_all_micro_batches(monkeypatch):
    monkeypatch.setattr(kept_buffers, "MANY_BYTES", 0)
    model = gt.to_global(Averaging("data"), alone(1)[0])
    several = []
    for _ in range(3):
        several.append(kept_buffers.buffers_of(model))
        model(gt.from_full(torch.randn(4, 6), alone(1)[0], gt.sbp.broadcast))
    assert len({id(one[1][2]) for one in several}) == 1 and len({id(one[0][2]) for one in several}) == 3


class Skipping(nn.Module):
    """(x, skip, mask) handed along; the last stage adds the skip in."""

    def __init__(self, adds):
        super().__init__()
        self.linear, self.adds = nn.Linear(6, 6), adds

    def forward(self, x, skip, mask):
        x = torch.tanh(self.linear(x)) * mask
        return x + skip * 2 if self.adds else (x, skip, mask)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_several_inputs_and_a_skip_over_stages(name, recompute):
    p = 2 if name == "zb-v" else 4
    first, rest = nn.Linear(6, 6), [Skipping(k == 2) for k in range(3)]

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = first

        def forward(self, x, mask):
            x = self.linear(x)
            return x, torch.sin(x), mask

    stages = nn.ModuleList([First(), *rest]).double()

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = stages

        def forward(self, x, mask):
            given = (x, mask)
            for stage in self.stages:
                given = stage(*given)
            return given

    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    mask = torch.randint(2, (8, 1))
    whole = Whole()
    parts = [((a, c), b) for a, b, c in zip(x.chunk(4), y.chunk(4), mask.chunk(4))]
    total, want = accumulated(whole, parts, F.mse_loss)
    runner = gt.pipeline(list(stages), alone(p), name, 4, F.mse_loss, recompute=recompute)
    same_bits(whole, total, want, runner.step((x, mask), y))


@pytest.mark.parametrize("zero", [0, 1, 3, "layer"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_tied_weights_stay_one_parameter(name, zero):
    token, middle, head = nn.Embedding(11, 6), blocks(2, dropout=0.0), nn.Linear(6, 11, bias=False)
    head.weight = token.weight
    model = nn.Sequential(token, *middle, head).double()
    ids, y = torch.randint(11, (2, 8, 5))

    def loss(logits, targets):
        return F.cross_entropy(logits.reshape(-1, 11), targets.reshape(-1))

    total, want = accumulated(model, list(zip(ids.chunk(4), y.chunk(4))), loss)
    names, count = list(model.state_dict()), len(list(model.parameters()))
    groups = [gt.placement("cpu", ranks, axis_names=("dp",)) for ranks in ([0, 1], [2, 3])] if zero else alone(2)
    runner = gt.pipeline(model, groups, name, 4, loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if zero:
        gt.zero(optimizer, "dp", 3 if zero == "layer" else zero, model=model if zero == "layer" else None)
    assert runner.step(ids, y).item() == pytest.approx(total.item(), rel=1e-12)
    assert head.weight is token.weight and len(list(model.parameters())) == count
    assert list(model.state_dict()) == names
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), want[n], rtol=1e-10, atol=1e-14)
    optimizer.step()
    after = runner.eval(ids, y).item()
    assert after < total.item()
    with torch.no_grad():
        whole = nn.Sequential(*(copy.deepcopy(layer) for layer in model))
        for layer in whole:
            gt.to_global(layer, gt.placement("cpu", [0]))
        logits = whole(gt.from_full(ids, gt.placement("cpu", [0]), gt.sbp.broadcast)).full_tensor()
    assert loss(logits, y).item() == pytest.approx(after, rel=1e-9), "the head has the new weight, too"


def test_mixed_precision_inside_the_stages():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)))
    x, y = torch.randn(2, 8, 16)
    plain, total = copy.deepcopy(model), 0.0
    for a, b in zip(x.chunk(4), y.chunk(4)):
        with torch.autocast("cpu", torch.bfloat16):
            value = F.mse_loss(plain(a).float(), b) / 4
        value.backward()
        total = total + value.detach()
    for recompute in (False, True):
        own = copy.deepcopy(model)
        runner = gt.pipeline(list(own), alone(2), "1f1b", 4, lambda out, y: F.mse_loss(out.float(), y),
                             recompute=recompute)
        with torch.autocast("cpu", torch.bfloat16):
            loss = runner.step(x, y)
        same_bits(own, total, {n: p.grad for n, p in plain.named_parameters()}, loss)


def test_micro_batches_of_their_own_lengths():
    model = tanhs(2)
    parts = [(torch.randn(2, n, 6, dtype=torch.float64), torch.randn(2, n, 6, dtype=torch.float64)) for n in (3, 5, 4)]
    total, want = accumulated(model, parts, F.mse_loss)
    runner = gt.pipeline(list(model), alone(2), "1f1b", 3, F.mse_loss)
    same_bits(model, total, want, runner.step([x for x, _ in parts], [y for _, y in parts]))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_frozen_and_unused_parameters(name):
    model = tanhs(3)
    model[1][0].weight.requires_grad_(False)
    for p in model[0].parameters():
        p.requires_grad_(False)
    model[2].spare = nn.Parameter(torch.ones(3, dtype=torch.float64))
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    total, want = accumulated(model, list(zip(x.chunk(4), y.chunk(4))), F.mse_loss)
    loss = gt.pipeline(list(model), alone(3), name, 4, F.mse_loss).step(x, y)
    assert loss.item() == total.item()
    for n, p in model.named_parameters():
        assert (p.grad is None) == (want[n] is None), n
        assert p.grad is None or torch.equal(p.grad.full_tensor(), want[n]), n


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_frozen_and_what_trains_may_change_between_steps(name, recompute):
    model = tanhs(4)
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    runner = gt.pipeline(list(model), alone(2 if name == "zb-v" else 4), name, 4, F.mse_loss, recompute=recompute)
    plain = tanhs(4)
    plain.load_state_dict({key: p.full_tensor() for key, p in model.state_dict().items()})
    for learning in ((2, 3), (1, 3), (0, 1, 2, 3), (2,)):
        for k in range(4):
            for both in (model, plain):
                both[k].requires_grad_(k in learning)
        total, want = accumulated(plain, list(zip(x.chunk(4), y.chunk(4))), F.mse_loss)
        assert runner.step(x, y).item() == total.item()
        for n, p in model.named_parameters():
            assert (p.grad is None) == (want[n] is None), n
            assert p.grad is None or torch.equal(p.grad.full_tensor(), want[n]), n
        model.zero_grad()


class Writing(nn.Module):
    """Writes to its inputs before it does anything else, and passes one on that it has made depend on a weight."""

    def __init__(self, first):
        super().__init__()
        self.linear, self.scale, self.first = nn.Linear(6, 6), nn.Parameter(torch.randn(6)), first

    def forward(self, x, carried=None):
        x.add_(1)
        nn.functional.leaky_relu_(x, 0.3)
        carried = x * 2 if self.first else carried.mul_(self.scale)
        return self.linear(x), carried


class Joined(nn.Module):
    def forward(self, x, carried):
        return x.sub_(carried)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_stages_may_write_to_their_inputs(name, recompute):
    stages = nn.ModuleList([Writing(True), Writing(False), Writing(False), Joined()]).double()

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = stages

        def forward(self, x):
            given = (x,)
            for stage in self.stages[:-1]:
                given = stage(*given)
            return self.stages[-1](*given)

    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    total, want = accumulated(Whole(), list(zip(x.clone().chunk(4), y.chunk(4))), F.mse_loss)
    before = x.clone()
    runner = gt.pipeline(list(stages), alone(2 if name == "zb-v" else 4), name, 4, F.mse_loss, recompute=recompute)
    for _ in range(2):                               # the first one also tries whether the stages fit
        loss = runner.step(x, y)
        assert loss.item() == total.item() == runner.eval(x, y).item() and torch.equal(x, before)
        for n, p in stages.named_parameters():
            assert (p.grad is None) == (want[f"stages.{n}"] is None), n
            if p.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), want[f"stages.{n}"], rtol=1e-12, atol=1e-15, msg=n)
        stages.zero_grad()


def test_tensors_of_a_batch_that_are_cut_alike():
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double()
    ids, y = torch.randint(11, (2, 8, 5))

    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    total, want = accumulated(model, list(zip(ids.chunk(4), y.chunk(4))), loss)
    runner = gt.pipeline(list(model), alone(2), "1f1b", 4, loss)
    for targets in (y, y.flatten(), list(y.flatten().chunk(4))):     # five rows go with each row of the inputs
        same_bits(model, total, want, runner.step(ids, targets))
        model.zero_grad()


# --------------------------------------------------------------------------------------------------------------- hybrid


def grid(dp, tp, pp, start=0):
    ranks = torch.arange(pp * dp * tp).view(pp, dp, tp) + start
    return [gt.placement("cpu", stage.tolist(), ("dp", "tp")) for stage in ranks]


@pytest.mark.sample(4)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dp, tp, pp, name", [(2, 1, 2, "1f1b"), (1, 2, 2, "interleaved"), (2, 2, 2, "1f1b"),
                                              (2, 2, 2, "zb-v"), (2, 1, 4, "zb-h1"), (1, 2, 4, "gpipe")])
def test_hybrids_train_as_one_device(dp, tp, pp, name, recompute, zero, monkeypatch):
    monkeypatch.setattr(gradients, "EARLY", 200)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(8))).double()
    plain, places = copy.deepcopy(model), grid(dp, tp, pp)
    rows = {"*.0.*": {"tp": gt.sbp.split(0)}, "*.2.weight": {"tp": gt.sbp.split(1)}}
    gt.parallelize(model, places[0], gt.Plan(rows))
    runner = gt.pipeline(model, places, name, 4, F.mse_loss, recompute=recompute)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    if zero:
        gt.zero(ours, "dp", zero)
    for _ in range(3):
        x, y = torch.randn(2, 16, 6, dtype=torch.float64)
        loss = runner.step(x, y)
        total = 0.0
        for a, b in zip(x.chunk(4), y.chunk(4)):
            value = F.mse_loss(plain(a), b) / 4
            value.backward()
            total += value.item()
        assert loss.item() == pytest.approx(total, rel=1e-9)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.3) for m in (model, plain)]
        assert norms[0].item() == pytest.approx(norms[1].item(), rel=1e-9)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (n, p), q in zip(model.named_parameters(), plain.named_parameters()):
        torch.testing.assert_close(p.full_tensor(), q[1].detach(), rtol=1e-7, atol=1e-9, msg=n)


def test_stages_of_different_sizes():
    model = tanhs(3)
    places = [gt.placement("cpu", [0, 1, 2], ("dp",)), gt.placement("cpu", [3], ("dp",)),
              gt.placement("cpu", [[4, 5], [6, 7]], ("dp", "tp"))]
    x, y = torch.randn(2, 12, 6, dtype=torch.float64)
    total, want = accumulated(model, list(zip(x.chunk(4), y.chunk(4))), F.mse_loss)
    runner = gt.pipeline(list(model), places, "1f1b", 4, F.mse_loss)
    assert runner.step(x, y).item() == pytest.approx(total.item(), rel=1e-12)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), want[n], rtol=1e-10, atol=1e-14)


def test_gradients_are_reduced_once_for_each_stage_and_step():
    model = tanhs(2)
    model_before = copy.deepcopy(model)
    places = [gt.placement("cpu", [0, 1], ("dp",)), gt.placement("cpu", [2, 3], ("dp",))]
    x, y = torch.randn(2, 16, 6, dtype=torch.float64)
    runner = gt.pipeline(list(model), places, "1f1b", 8, F.mse_loss)
    runner.step(x, y)                                # the first one also tries whether the stages fit
    for _ in range(2):                               # the second adds to gradients that are reduced already
        with gt.record() as moves:
            runner.step(x, y)
        assert [(move.op, move.tensors) for move in moves if "add" in move.op or move.op == "gradient"] == [
            ("gradient", 2), ("gradient", 2)]
    crossing = [move for move in moves if move.src.placement != move.dst.placement]
    assert [move.bytes for move in crossing] == [8 * 6] * 16, "a row and its gradient, on each of two ranks"
    with gt.record() as moves:
        grads = [p.grad for p in model.parameters()]
    assert not moves
    _, want = accumulated(model_before, list(zip(x.chunk(8), y.chunk(8))), F.mse_loss)
    for grad, one in zip(grads, want.values()):
        torch.testing.assert_close(grad.full_tensor(), 3 * one, rtol=1e-12, atol=1e-15)


class Mixing(nn.Module):
    def forward(self, x):
        return x @ x.T @ x                           # of rows that lie on two ranks


def test_the_first_step_counts_what_the_others_count():
    x, y = torch.randn(2, 6, 4)
    places = [gt.placement("cpu", [0, 1], ("dp",))]
    runners = [gt.pipeline([nn.Sequential(nn.Linear(4, 4), Mixing())], places, "1f1b", 1, F.mse_loss) for _ in range(2)]
    counted = []
    for rows in (6, 6, 4, 4):
        with gt.record() as moves:
            runners[0].step(x[:rows], y[:rows])
        counted.append([(move.op, move.bytes) for move in moves])
    assert counted[0] == counted[1] and counted[2] == counted[3]
    budget = sum(nbytes for _, nbytes in counted[0])
    with gt.boxing(budget=budget):
        runners[1].step(x, y)
    with pytest.raises(gt.BoxingError), gt.boxing(budget=budget - 1):
        runners[1].step(x, y)
    again = gt.pipeline(runners[1].stages, places, "1f1b", 1, F.mse_loss)
    with pytest.raises(StageError, match="BoxingError"), gt.boxing("forbid"):
        again.step(x, y)
    with pytest.warns(UserWarning) as told, gt.boxing("warn"):
        again.step(x, y)
    assert len(told) == sum(nbytes > 0 for _, nbytes in counted[0])


# ------------------------------------------------------------------------------------------------------ the two halves


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.globaltensor.contract.default
        return func(*args, **(kwargs or {}))


def test_each_half_of_a_backward_makes_its_own_products_only():
    model, x, g = blocks(5, dropout=0.0), torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    _, want = accumulated(model, [(x, g)], lambda y, g: (y * g).sum())
    (where,) = alone(1)
    gt.to_global(model, where)
    x, g = (gt.from_full(t, where, gt.sbp.broadcast) for t in (x, g))
    x.requires_grad_()
    y = model(x)
    with Products() as first:
        _, later = backward_input([y], [g], [x])
    assert all((p.grad is None) == (p.dim() == 2) for p in model.parameters()), "products wait, the rest does not"
    with Products() as second:
        backward_weight(later)
    assert [first.count, second.count] == [5, 5]
    for n, p in model.named_parameters():
        assert torch.equal(p.grad.full_tensor(), want[n]), n


class Twice(nn.Module):
    """Weights met on several ways: one used twice, one that no input leads to, one output that is an input."""

    def __init__(self):
        super().__init__()
        self.shared, self.own, self.bare = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.randn(6))
        self.mix = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        x = torch.einsum("bi,ij->bj", x, self.mix)   # of an input, which is waited for, and a weight, which is not
        return self.shared(torch.tanh(self.own(self.shared(x)))) * self.bare.exp(), self.bare * 2 + self.own.bias, x


def test_weights_that_are_used_more_than_once_count_once():
    model, x = Twice().double(), torch.randn(4, 6, dtype=torch.float64)
    gs = [torch.randn(*size, dtype=torch.float64) for size in ((4, 6), (6,), (4, 6))]
    _, want = accumulated(model, [(x, gs)], lambda ys, gs: sum((y * g).sum() for y, g in zip(ys, gs)))
    leaf = x.clone().requires_grad_()
    sum((y * g).sum() for y, g in zip(copy.deepcopy(model)(leaf), gs)).backward()
    (where,) = alone(1)
    gt.to_global(model, where)
    x, *gs = (gt.from_full(t, where, gt.sbp.broadcast) for t in (x, *gs))
    x.requires_grad_()
    (found,), later = backward_input(model(x), gs, [x])
    torch.testing.assert_close(found.full_tensor(), leaf.grad, rtol=1e-12, atol=1e-15)
    backward_weight(later)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), want[n], rtol=1e-12, atol=1e-15, msg=n)


# -------------------------------------------------------------------------------------------------------------- stages


def test_the_cut_makes_the_dearest_stage_as_cheap_as_can_be():
    generator = torch.Generator().manual_seed(SEED)
    for n, k in [(1, 1), (5, 2), (7, 3), (8, 4), (8, 8)]:
        costs = torch.randint(1, 20, (n,), generator=generator).tolist()
        starts = balanced(costs, k)
        assert starts[0] == 0 and len(starts) == k and starts == sorted(set(starts))

        def dearest(starts):
            return max(sum(costs[a:b]) for a, b in zip(starts, [*starts[1:], n]))

        best = min(dearest([0, *rest]) for rest in itertools.combinations(range(1, n), k - 1))
        assert dearest(starts) == best, f"seed {SEED}: {costs}, {k}"


def test_a_cut_by_names_and_by_a_cost_of_ones_own():
    model = nn.Sequential()
    for name in ("token", "a", "b", "c", "head"):
        model.add_module(name, nn.Linear(2, 2))
    assert [len(stage) for stage in cut_sequence(model, ["b", "head"])] == [2, 2, 1]
    stages = cut_sequence(model, 2, lambda layer: 9.0 if layer is model.token else 1.0)
    assert [len(stage) for stage in stages] == [1, 4]
    assert [len(stage) for stage in cut_sequence(model, 3)] == [1, 2, 2]
    with pytest.raises(StageError, match="no layer is called 'd'"):
        cut_sequence(model, ["d"])
    with pytest.raises(StageError, match="do not come in this order"):
        cut_sequence(model, ["c", "a"])


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.02)
        return x


def test_a_cut_by_measured_cost():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), Slow(), *(nn.Linear(64, 64) for _ in range(4)))
    cost = measured(model, torch.zeros(2, 64))
    assert 0 < cost(model[0]) < 0.02 <= cost(model[4])
    assert [len(stage) for stage in cut_sequence(model, 3, cost)] == [4, 1, 4]
    assert model.training and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Plain(nn.Module):
    def forward(self, x):
        return 3.0


@pytest.mark.parametrize("kind, text, build", [
    (StageError, "4 stages of 2 layers", lambda: gt.pipeline(tanhs(2), alone(4), "1f1b")),
    (StageError, "2 stages for zb-v, which has 4 on 2 ranks", lambda: gt.pipeline(list(tanhs(2)), alone(2), "zb-v")),
    (PlacementError, "2 placements for 1 stage on 1 rank\n", lambda: gt.pipeline(nn.Linear(6, 6), alone(1) * 2)),
    (PlacementError, "try:   1 placement; for more stages on the same ranks",
     lambda: gt.pipeline(nn.Linear(6, 6), alone(1) * 2)),
    (PlacementError, "try:   2 placements, or 4; for",
     lambda: gt.pipeline(list(tanhs(4)), [*alone(2), *alone(1)], "zb-v")),
    (StageError, "1 stage for zb-v, which has 2 on 1 rank\n", lambda: gt.pipeline([tanhs(1)], alone(1), "zb-v")),
    (StageError, "2 stages of 1 layer\n", lambda: gt.pipeline(nn.Sequential(nn.Linear(6, 6)), alone(2))),
    (StageError, "stage 1 is an int", lambda: gt.pipeline([nn.Linear(6, 6), 3], alone(2))),
    (StageError, "a Linear cannot be cut", lambda: cut_sequence(nn.Linear(6, 6), 2)),
    (ScheduleError, "there is no schedule '1f1c'", lambda: gt.pipeline(list(tanhs(2)), alone(2), "1f1c")),
    (ScheduleError, "0 micro-batches", lambda: gt.pipeline(list(tanhs(2)), alone(2), "1f1b", 0)),
    (ScheduleError, "never does 1B0", lambda: gt.pipeline(list(tanhs(2)), alone(2), parse_schedule("0F0 0B0\n1F0"))),
    (StageError, "5 micro-batches for own",
     lambda: gt.pipeline(list(tanhs(2)), alone(2), parse_schedule("0F0 0B0\n1F0 1B0"), 5)),
    (PlacementError, "3 placements for the 2 ranks",
     lambda: gt.pipeline(list(tanhs(2)), alone(3), parse_schedule("0F0 0B0\n1F0 1B0"))),
    (PlacementError, "ranks [1] would have to run two micro-batches",
     lambda: gt.pipeline(list(tanhs(2)), [gt.placement("cpu", [0, 1]), gt.placement("cpu", [1, 2])])),
    (PlacementError, "stage 2 on", lambda: gt.pipeline(
        list(tanhs(4)), [gt.placement("cpu", [r]) for r in (0, 1, 0, 1)], "zb-v")),
    (GlobalTensorError, "reduction='max'", lambda: gt.pipeline(list(tanhs(2)), alone(2), reduction="max")),
    (ShapeError, "inputs of [0, 6] for 1 micro-batch",
     lambda: gt.pipeline(list(tanhs(2)), alone(2), loss=F.mse_loss).step(torch.ones(0, 6), torch.ones(0, 6))),
    (ShapeError, "2 inputs for 4 micro-batches",
     lambda: gt.pipeline(list(tanhs(2)), alone(2), loss=F.mse_loss).step([torch.ones(3, 6)] * 2)),
    (ShapeError, "targets of 3 rows beside inputs of 4",
     lambda: gt.pipeline(list(tanhs(2)), alone(2), micro_batches=2, loss=F.mse_loss).step(
         torch.ones(4, 6), torch.ones(3, 6))),
    (ShapeError, "targets of 2 rows beside inputs of 4",
     lambda: gt.pipeline(list(tanhs(2)), alone(2), micro_batches=2, loss=F.mse_loss).step(
         torch.ones(4, 6), torch.ones(2, 6))),
    (ShapeError, "inputs of 5 rows beside inputs of 4",
     lambda: gt.pipeline(list(tanhs(2)), alone(2), micro_batches=2).step((torch.ones(4, 6), torch.ones(5, 6)))),
    (GlobalTensorError, "inputs that require a gradient",
     lambda: gt.pipeline(list(tanhs(2)), alone(2)).step(torch.ones(4, 6, requires_grad=True))),
    (StageError, "stage 1 of 2 fails on [1, 6] float32",
     lambda: gt.pipeline([nn.Linear(6, 6), nn.Linear(5, 6)], alone(2)).step(torch.ones(4, 6))),
    (StageError, "stage 0 returned a float",
     lambda: gt.pipeline([Plain(), nn.Linear(5, 6)], alone(2)).step(torch.ones(4, 6))),
    (StageError, "the loss of micro-batch 0 is a tensor of [1, 6]",
     lambda: gt.pipeline([nn.Linear(6, 6), nn.Linear(6, 6)], alone(2)).step(torch.ones(4, 6))),
    (StageError, "loss=F.cross_entropy",
     lambda: gt.pipeline([nn.Linear(6, 6), nn.Linear(6, 6)], alone(2)).step(torch.ones(4, 6), torch.ones(4, 6))),
])
def test_mistakes(kind, text, build):
    with pytest.raises(kind) as error:
        build()
    assert text in str(error.value), error.value


# ------------------------------------------------------------------------------------------------------ real processes


# Of the cases, those whose ranks do the most different things. `make test-all` runs all of them without native code.
MIXED = ("zb-v", "skip", "dp, zero 1, gradients that stay", "dp, zero 2", "three and one", "frozen in turn")


@pytest.mark.processes
@pytest.mark.parametrize("ranks, native, cases", [
    pytest.param(2, "1", (), id="2-native"),
    pytest.param(4, "0", MIXED, id="4-python-mixed", marks=pytest.mark.long),
    *[pytest.param(ranks, native, (), id=name, marks=pytest.mark.long) for ranks, native, name in
      ((2, "0", "2-python"), (4, "0", "4-python"), (4, "1", "4-native"))]])
def test_processes_give_the_bits_of_one_process(ranks, native, cases, tmp_path):
    for folder in ("one", "many"):
        (tmp_path / folder).mkdir()
    good_all(([PYTHON, PIPELINE, tmp_path / "one", *cases], {"GLOBALTENSOR_RANKS": str(ranks)}),
             ([*RUN, "-n", ranks, PIPELINE, tmp_path / "many", *cases], {"GLOBALTENSOR_NATIVE": native}), timeout=240)
    (one,), seen = results(tmp_path / "one").values(), results(tmp_path / "many")
    assert sorted(seen) == list(range(ranks))
    assert len(one) == (len(cases) or {2: 21, 4: 28}[ranks])
    for rank, found in seen.items():
        assert found.keys() == one.keys()
        for case, values in found.items():
            assert values == one[case], f"rank {rank}: {case}"


@pytest.mark.processes
@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_micro_batches_overlap(native, tmp_path):
    """Stages that sleep: what overlaps takes less than the sum. By schedules, and by plain `to_global`."""
    good([*RUN, "-n", 2, PIPELINE, tmp_path, "overlap"], environment(GLOBALTENSOR_NATIVE=native))
    found = results(tmp_path)[0]["overlap"]["seconds"]
    # 4 micro-batches, 2 stages, 0.1 s each: 0.8 s one after the other, 0.5 s overlapped, forward and backward 1.0 s
    assert 0.5 <= found["eval"] < 0.7, found
    assert 0.5 <= found["eager forward"] < 0.7, found
    for name in ("gpipe", "1f1b", "zb-h1", "eager"):
        assert 1.0 <= found[name] < 1.35, found


@pytest.mark.processes
@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_a_rank_that_dies_in_mid_pipeline(native):
    ranks = by_hand([PIPELINE, "/dev/null", "dies"], 4, GLOBALTENSOR_NATIVE=native)
    ended = [rank.end(60) for rank in ranks]
    text = (PROGRAMS / "pipeline.py").read_text().splitlines()
    line = next(k for k, words in enumerate(text, 1) if "the line that must be named" in words)
    assert ended[2][0] == -9
    seconds = []
    for rank in (0, 1, 3):
        code, out, err = ended[rank]
        assert code == 1, out + err
        lost = f"rank {rank} lost touch with rank {2 if native == '1' else ''}"
        ended_early = "rank 2 was killed, crashed or ended early"        # as the kernel tells while gloo still waits
        assert f"TransportError: {lost}" in err or native == "0" and f"TransportError: {ended_early}" in err, err
        assert f"where: pipeline.py:{line}" in err, err
        seconds.append(float(re.search(r"after ([\d.]+) s", out)[1]))
    assert max(seconds[1:]) < 2, "its neighbours hear of it at once"
    assert seconds[0] < (2 if native == "1" else 30), "so does everybody over shared memory, else when these have ended"


@pytest.mark.processes
def test_layers_and_shared_weights_that_some_steps_leave_out():
    """Which parameters have gradients is what each step says, and not what the first one of its shapes said."""
    good([*RUN, "-n", 4, PROGRAMS / "pipeline_uses.py"])


@pytest.mark.processes
def test_stages_that_do_not_fit_are_told_on_every_rank(tmp_path):
    good([*RUN, "-n", 2, PIPELINE, tmp_path, "misfits"])
    for rank, found in results(tmp_path).items():
        kind, text = found["misfits"]["error"]
        assert kind == "StageError" and "stage 1 of 2 fails on [1, 5] float64" in text, f"rank {rank}: {text}"
        kind, text = found["misfits"]["rows"]
        assert kind == "StageError" and "The size of tensor a (2) must match" in text, f"rank {rank}: {text}"
        kind, text = found["misfits"]["later"]
        if rank == 0:
            assert kind == "ShapeError" and "[2, 4] float32 B with a gradient instead of [2, 4] float64 B" in text, text
        else:
            assert kind == "TransportError", text


def test_measured_events_are_a_timetable():
    model = tanhs(2)
    runner = gt.pipeline(list(model), alone(2), "zb-h1", 3, F.mse_loss)
    began = time.perf_counter()
    runner.step(*torch.randn(2, 6, 6, dtype=torch.float64))
    ended = time.perf_counter()
    actions = [[(e.stage, e.kind, e.micro_batch) for e in runner.events if e.rank == rank] for rank in range(2)]
    assert actions == [[a for a in row if a.kind in "FBIW"] for row in runner.schedule.actions]
    assert all(began <= e.start <= e.end <= ended for e in runner.events)
    assert runner.gathered_events() == runner.events
    assert as_text(runner.events).startswith("rank 0")
