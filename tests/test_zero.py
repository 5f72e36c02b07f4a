"""ZeRO's stages: trained beside plain torch, their bytes sent and kept against the paper's formulas."""
from __future__ import annotations

import copy

import pytest
import torch
from shards import place
from torch import nn

import globaltensor as gt
from globaltensor.errors import SbpError
from globaltensor.tensors import gradients

SEED = 31
B, S = gt.sbp.broadcast, gt.sbp.split
ROWS = {"0.*": {"tp": S(0)}, "2.weight": {"tp": S(1)}}
PLACES = {"2": ([0, 1], ("dp",)), "3": ([0, 1, 2], ("dp",)), "2 x tp 2": ([[0, 1], [2, 3]], ("dp", "tp")),
          "hybrid": ([[0, 1], [2, 3]], ("replicas", "dp"))}
OPTIMIZERS = {"adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
              "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
              "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}


def net(inputs=6, hidden=9):
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, 4))


def spread(model, where, x):
    rows = {name: row for name, row in ROWS.items() if "tp" in where.axis_names}
    split = {axis: S(0) for axis in where.axis_names if axis != "tp"}
    return gt.parallelize(copy.deepcopy(model), where, rows), gt.from_full(x, where, split)


def same(model, plain):
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-6, atol=1e-9, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("where", PLACES)
def test_training(where, name, stage, accumulate, monkeypatch):
    monkeypatch.setattr(gradients, "EARLY", 200)      # so that stage 2 has something to do in backward
    where = place(*PLACES[where])
    plain, x = net().double(), torch.randn(5, 6).double()
    model, gx = spread(plain, where, x)
    ours, theirs = gt.zero(OPTIMIZERS[name](model.parameters()), stage=stage), OPTIMIZERS[name](plain.parameters())
    for _ in range(3):
        norms = []
        for m, data, optimizer in ((model, gx, ours), (plain, x, theirs)):
            for _ in range(accumulate):
                m(data).pow(2).mean().backward()
            norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    same(model, plain)
    for p in ours.param_groups[0]["params"]:
        state = [value for value in ours.state[p].values() if value is not None and value.dim()]
        assert p.sbp[where.axis_names.index("dp")].is_split
        assert all(value.sbp == p.sbp for value in state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("spread_first", [True, False], ids=["of a global model", "of a plain model"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "adagrad"])
def test_a_state_that_was_there_before_is_split(name, spread_first, stage, dtype):
    """Of an optimizer that has taken steps, and of one that makes it before the first."""
    where = place([0, 1, 2], ("dp",))
    optimizers = {**OPTIMIZERS, "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5)}
    plain, x = net().to(dtype), torch.randn(5, 6).to(dtype)
    model, gx = copy.deepcopy(plain), gt.from_full(x, where, S(0))
    if spread_first:
        gt.parallelize(model, where)
    ours, theirs = optimizers[name](model.parameters()), optimizers[name](plain.parameters())

    def step(m, data, optimizer):
        optimizer.zero_grad()
        m(data).pow(2).mean().backward()
        optimizer.step()

    if name != "fused" or spread_first:              # which takes no plain state beside global parameters
        step(model, gx if spread_first else x, ours)
        step(plain, x, theirs)
    gt.zero(ours if spread_first else _made_global(model, where, ours), stage=stage)
    for _ in range(2):
        step(model, gx, ours)
        step(plain, x, theirs)
    close = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.02}
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor(), q, **close)
    for p in ours.param_groups[0]["params"]:
        of_its_shape = [t for t in ours.state[p].values() if t is not None and t.dim()]
        assert of_its_shape and all(t.sbp == p.sbp and t.dtype == p.dtype for t in of_its_shape)


def _made_global(model, where, optimizer):
    gt.parallelize(model, where)
    return optimizer


@pytest.mark.parametrize("stage", [0, 1, 2, 3, "3 by layers"])
def test_what_inference_mode_reads_first_is_used_outside_of_it(stage):
    """Gradients that are reduced when they are read, parameters that are gathered when they are needed."""
    where = place([0, 1], ("dp",))
    plain, x = net().double(), torch.randn(5, 6).double()
    model, gx = spread(plain, where, x)
    ours, theirs = (OPTIMIZERS["sgd"](m.parameters()) for m in (model, plain))
    if stage:
        gt.zero(ours, stage=stage if isinstance(stage, int) else 3, model=None if isinstance(stage, int) else model)
    for _ in range(3):
        for m, data, optimizer in ((model, gx, ours), (plain, x, theirs)):
            m(data).pow(2).mean().backward()
            with torch.inference_mode():
                assert all(p.grad.norm() > 0 for p in m.parameters()) and m(data).isfinite().all()
            for p in m.parameters():
                p.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        same(model, plain)
        with torch.inference_mode():
            torch.testing.assert_close(model(gx).full_tensor(), plain(x))


def clipped(p):
    p.data.clamp_(-0.1, 0.1)


def set_by_element(p):
    p.data[0] = 0.25


def added_to_a_view(p):
    p.data.view(-1).add_(0.5)


def by_a_list(p):
    torch._foreach_mul_([p.data], 0.5)


_KEPT = {}


def kept_data(p):
    _KEPT.setdefault(p, p.data).mul_(0.5)


@pytest.mark.parametrize("write", [clipped, set_by_element, added_to_a_view, by_a_list, kept_data])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("where", ["2", "2 x tp 2"])
def test_writes_that_no_version_counts(where, stage, write):
    """By `p.data`, as weights are clipped, averaged and loaded in many a program."""
    where = place(*PLACES[where])
    plain, x = net().double(), torch.randn(5, 6).double()
    model, gx = spread(plain, where, x)
    ours, theirs = (OPTIMIZERS["sgd"](m.parameters()) for m in (model, plain))
    gt.zero(ours, stage=stage)
    for _ in range(3):
        for m, data, optimizer in ((model, gx, ours), (plain, x, theirs)):
            m(data).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for p in m.parameters():
                write(p)
        same(model, plain)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_views_of_a_parameter_follow_its_steps(stage):
    """Also those that had to be boxed, which keep a value of their own: a gathered one is a write."""
    where = place(*PLACES["2 x tp 2"])
    model, x = spread(net(), where, torch.randn(4, 6))
    optimizer, weight = gt.zero(torch.optim.SGD(model.parameters(), lr=0.1), stage=stage), model[0].weight
    views = [lambda w: w[2], lambda w: w[:, :3], lambda w: w.t(), lambda w: w.view(-1)]
    held = [view(weight.detach()) for view in views]
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for one, view in zip(held, views):
            assert torch.equal(one.full_tensor(), view(weight.detach().full_tensor()))


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_sent_and_kept_in_stage_1(n):
    where = place(list(range(n)), ("dp",))
    model, gx = spread(net(8, 16), where, torch.randn(8, 8))
    optimizer = gt.zero(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(2):
        optimizer.zero_grad()
        model(gx).pow(2).mean().backward()
        with gt.record() as moves:
            optimizer.step()
    size = sum(p.numel() * 4 for p in model.parameters())
    assert [(m.op, m.bytes * n) for m in moves] == [("gradient", size * (n - 1)), ("zero", size * (n - 1))], moves
    kept = [sum(t.shards[r].nbytes for s in optimizer.state.values() for t in s.values() if t.dim()) for r in gx.shards]
    assert kept == [2 * size // n] * len(kept)


@pytest.mark.parametrize("stage, parameters", [(1, 2.0), (2, 2.0), (3, 0.5)])
def test_16_bits_have_master_weights(stage, parameters):
    """Table 1 of the paper for N = 4: parameters 2P or 2P/N, and 12P/N of state, with the master weights in it."""
    where = place([0, 1, 2, 3], ("dp",))
    model, gx = spread(net(8, 16).bfloat16(), where, torch.randn(8, 8).bfloat16())
    optimizer = gt.zero(torch.optim.AdamW(model.parameters(), lr=0.01), stage=stage)
    before = [p.full_tensor().clone() for p in model.parameters()]
    for _ in range(2):
        model(gx).pow(2).mean().backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    n = sum(p.numel() for p in model.parameters())
    masters = optimizer.param_groups[0]["params"]
    for rank in gx.shards:
        held = sum(p.shards[rank].nbytes for p in model.parameters())
        state = sum(t.shards[rank].nbytes for s in optimizer.state.values() for t in s.values() if t.dim())
        state += sum(p.shards[rank].nbytes for p in masters)
        assert (held, state) == (parameters * n, 12 * n // 4)
    for p, master, old in zip(model.parameters(), masters, before):
        assert p.dtype == torch.bfloat16 and not p.full_tensor().equal(old)
        assert p.full_tensor().equal(master.full_tensor().bfloat16())


def test_a_scaled_loss_that_is_clipped_and_skipped():
    where = place([0, 1], ("dp",))
    plain, x = net().double(), torch.randn(5, 6).double()
    model, gx = spread(plain, where, x)
    for m, data, optimizer in ((model, gx, gt.zero(torch.optim.AdamW(model.parameters(), lr=0.1))),
                               (plain, x, torch.optim.AdamW(plain.parameters(), lr=0.1))):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for k in range(3):
            optimizer.zero_grad()
            scaler.scale(m(data).pow(2).mean() * (torch.inf if k == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 32.0
    same(model, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")], ids=str)
def test_it_goes_on_from_a_state_bit_for_bit(order, dtype):
    where = place([0, 1], ("dp",))
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(SEED)).to(dtype)

    def fresh():
        model, gx = spread(net().to(dtype), where, x)
        return {"model": model, "optimizer": gt.zero(torch.optim.AdamW(model.parameters(), lr=0.01)), "x": gx}

    def steps(run, n):
        for _ in range(n):
            run["optimizer"].zero_grad()
            run["model"](run["x"]).pow(2).mean().backward()
            run["optimizer"].step()

    first, second = fresh(), fresh()
    steps(first, 2)
    for name in order:
        second[name].load_state_dict(copy.deepcopy(first[name].state_dict()))
    steps(first, 2)
    steps(second, 2)
    for p, q in zip(first["model"].parameters(), second["model"].parameters()):
        assert p.full_tensor().equal(q.full_tensor())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", PLACES)
def test_it_goes_on_from_the_state_of_one_device(ranks, optimizer, stage):
    where, plain = place(*PLACES[ranks]), net().double()         # Adam makes much of a rounding
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    before = OPTIMIZERS[optimizer](plain.parameters())

    def steps(model, optimizer, x):
        for _ in range(2):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()

    steps(plain, before, x)
    model, gx = spread(plain, where, x)
    after = gt.zero(OPTIMIZERS[optimizer](model.parameters()), stage=stage)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    for p, state in after.state.items():
        assert all(value.sbp == p.sbp for value in state.values() if value is not None and value.shape == p.shape != ())
    steps(plain, before, x)
    steps(model, after, gx)
    same(model, plain)


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")], ids=str)
def test_weights_of_16_bits_go_on_from_the_state_of_one_device(order):
    """It has no master weights: they begin as what the parameters are."""
    where, plain = place([0, 1], ("dp",)), net().to(torch.bfloat16)
    before = torch.optim.SGD(plain.parameters(), lr=0.0, momentum=0.9)
    plain(torch.ones(5, 6, dtype=torch.bfloat16)).sum().backward()
    before.step()
    model, _ = spread(net().to(torch.bfloat16), where, torch.ones(5, 6))
    with torch.no_grad():
        plain[0].weight.fill_(0.25)
    after = gt.zero(torch.optim.SGD(model.parameters(), lr=0.0))
    ours, theirs = {"model": model, "optimizer": after}, {"model": plain, "optimizer": before}
    for name in order:
        ours[name].load_state_dict(copy.deepcopy(theirs[name].state_dict()))
    model(gt.ones(5, 6, placement=where, sbp=S(0), dtype=torch.bfloat16)).sum().backward()
    after.step()
    same(model, plain)


def test_other_weights_are_taken_over():
    where = place([0, 1], ("dp",))
    model, gx = spread(net(), where, torch.randn(5, 6))
    optimizer = gt.zero(torch.optim.SGD(model.parameters(), lr=0.0))
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    model(gx).sum().backward()
    optimizer.step()
    assert model[0].weight.full_tensor().eq(0.25).all() and not model[2].weight.full_tensor().eq(0.25).any()


def test_mistakes():
    where = place([0, 1], ("dp",))
    model, gx = spread(net(), where, torch.randn(5, 6))
    with pytest.raises(SbpError, match="ZeRO has no stage 4"):
        gt.zero(torch.optim.SGD(model.parameters()), stage=4)
    with pytest.raises(SbpError, match="only stage 3 gathers"):
        gt.zero(torch.optim.SGD(model.parameters()), stage=2, model=model)
    layouts = [p.sbp for p in model.parameters()]
    for other in (spread(net(), where, torch.randn(5, 6))[0], net()):
        with pytest.raises(SbpError, match="another model than the optimizer's"):
            gt.zero(torch.optim.SGD(model.parameters()), stage=3, model=other)
    assert [p.sbp for p in model.parameters()] == layouts
    with pytest.raises(SbpError, match="has no axis 'tp'"):
        gt.zero(torch.optim.SGD(model.parameters()), axis="tp")
    with pytest.raises(SbpError, match="is plain"):
        gt.zero(torch.optim.SGD(net().parameters()))
