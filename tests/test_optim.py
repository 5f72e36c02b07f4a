"""torch's optimizers, loss scaling, averages and 16-bit training on global parameters, beside plain torch."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from shards import place
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal import common_methods_invocations

import globaltensor as gt

SEED = 23
B, S = gt.sbp.broadcast, gt.sbp.split
ROWS = {"0.*": {"tp": S(0)}, "2.weight": {"tp": S(1)}}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam one by one": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
    "two groups": lambda p: torch.optim.AdamW(
        [{"params": p[:2], "lr": 0.1}, {"params": p[2:], "weight_decay": 0.5}], lr=0.01),
}
PLACES = {"dp": ([0, 1], ("dp",)), "tp": ([0, 1], ("tp",)), "dp x tp": ([[0, 1], [2, 3]], ("dp", "tp"))}


def pair(where):
    """A plain model and a global one, with their batches: 5 rows, an uneven split."""
    torch.manual_seed(SEED)
    plain, x = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 4)).double(), torch.randn(5, 6).double()
    rows = {name: row for name, row in ROWS.items() if "tp" in where.axis_names}
    model = gt.parallelize(copy.deepcopy(plain), where, rows)
    return plain, model, x, gt.from_full(x, where, {"dp": S(0)} if "dp" in where.axis_names else B)


def same(model, plain):
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-6, atol=1e-9, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("place_", PLACES)
@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "muon"])
def test_optimizers_go_on_from_the_state_of_one_device(name, loaded, place_):
    """Which a checkpoint has, or they have themselves: they were made and stepped before the model became global."""
    plain, model, x, gx = pair(place(*PLACES[place_]))
    optimizer = OPTIMIZERS[name](list(plain.parameters()))

    def steps(net, data, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            net(data).pow(2).mean().backward()
            optimizer.step()

    steps(plain, x, optimizer)
    if loaded:
        own = OPTIMIZERS[name.replace("adamw fused", "adamw")](list(model.parameters()))
        model.load_state_dict(plain.state_dict())
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        model, own = copy.deepcopy((plain, optimizer))
        rows = {row: sbps for row, sbps in ROWS.items() if "tp" in gx.placement.axis_names}
        gt.parallelize(model, gx.placement, rows)
    steps(plain, x, optimizer)
    steps(model, gx, own)
    same(model, plain)


@pytest.mark.parametrize("place_", PLACES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, place_):
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    plain, model, x, gx = pair(place(*PLACES[place_]))
    for net, data in ((plain, x), (model, gx)):
        if name == "muon":                           # it computes in bfloat16: the same numbers need the same floats
            net.float()
            data = data.float()
        optimizer = OPTIMIZERS[name](list(net.parameters()))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for _ in range(4):
            optimizer.zero_grad()
            net(data).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    if name == "muon":
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.full_tensor(), q, rtol=1e-2, atol=2e-3)
    else:
        same(model, plain)


@pytest.mark.parametrize("place_", PLACES)
def test_muon_differs_by_the_rounding_of_bfloat16_alone(place_, monkeypatch):
    """Muon makes its matrices orthogonal in bfloat16. With as many digits as the rest, nothing differs."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    plain, model, x, gx = pair(place(*PLACES[place_]))
    before = copy.deepcopy(plain)
    for net, data in ((plain, x), (model, gx)):
        optimizer = OPTIMIZERS["muon"](list(net.parameters()))
        for _ in range(4):
            optimizer.zero_grad()
            net(data).pow(2).mean().backward()
            optimizer.step()
    same(model, plain)
    assert all((p - q).abs().max() > 0.01 for p, q in zip(plain.parameters(), before.parameters()) if p.dim() == 2)


@pytest.mark.parametrize("place_", PLACES)
def test_a_step_of_an_optimizer_moves_only_the_gradients(place_):
    _, model, _, gx = pair(place(*PLACES[place_]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(gx).pow(2).mean().backward()
        with gt.record() as moves:
            optimizer.step()
            optimizer.zero_grad()
    assert [m.op for m in moves] == ["gradient"] * ("dp" in gx.placement.axis_names), moves


@pytest.mark.parametrize("place_", PLACES)
def test_a_loss_scaler_sees_an_overflow_on_any_rank(place_):
    plain, model, x, gx = pair(place(*PLACES[place_]))
    scales = []
    for net, data in ((plain, x), (model, gx)):
        optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for k in range(4):
            optimizer.zero_grad()
            loss = net(data).pow(2).mean() * (torch.inf if k == 1 else 1.0)
            if k == 2:                               # in one element of one gradient, which one rank alone may hold
                loss = loss + (list(net.parameters())[0] * 1e306).pow(2)[-1, -1]
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    assert scales[:4] == scales[4:] == [1024.0, 512.0, 256.0, 256.0], scales
    same(model, plain)


def test_an_average_of_the_weights():
    plain, model, x, gx = pair(place(*PLACES["tp"]))
    averages = []
    for net, data in ((plain, x), (model, gx)):
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(data).pow(2).mean().backward()
            optimizer.step()
            with gt.record() as moves:
                average.update_parameters(net)
            assert not moves, moves
        averages.append(average)
    same(averages[1].module, averages[0].module)


@pytest.mark.parametrize("place_", PLACES)
def test_autocast(place_):
    plain, model, x, gx = pair(place(*PLACES[place_]))
    losses = []
    for net, data in ((plain.float(), x.float()), (model.float(), gx.float())):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = net(data)
            assert out.dtype == torch.bfloat16
            loss = out.float().pow(2).mean()
            loss.backward()
            assert all(p.grad.dtype == p.dtype == torch.float32 for p in net.parameters())
            optimizer.step()
            losses.append(loss.item())
    torch.testing.assert_close(losses[:3], losses[3:], rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_in_float32_of_classes_that_are_split(dtype):
    """Logits of 16 bits, cut along the classes: widened rank by rank, and only float32 statistics are sent."""
    generator, where = torch.Generator().manual_seed(SEED), place([0, 1, 2])
    logits = torch.randn(16, 50, generator=generator).to(dtype)
    target = torch.randint(50, (16,), generator=generator)
    plain, ours = logits.clone().requires_grad_(), gt.from_full(logits, where, gt.sbp.split(1)).requires_grad_()
    expected = F.cross_entropy(plain.float(), target)
    expected.backward()
    with gt.record() as moves:
        got = F.cross_entropy(ours.float(), gt.from_full(target, where, gt.sbp.broadcast))
        got.backward()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.full_tensor(), expected)
    torch.testing.assert_close(ours.grad.full_tensor(), plain.grad, rtol=0, atol=torch.finfo(dtype).eps * 0.1)
    assert max(m.bytes for m in moves) <= 2 * 16 * 4, "a number or two for each sample, no logits"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_may_be_reduced_in_16_bits(stage):
    """Half the bytes; each rank's term is rounded, once, and the sum, made in float32, once more."""
    where = place([0, 1, 2, 3], ("dp",))
    torch.manual_seed(SEED)
    plain, x = nn.Linear(16, 8, bias=False), torch.randn(8, 16)
    moved, grads = [], []
    for dtype in (None, torch.bfloat16):
        model = gt.parallelize(copy.deepcopy(plain), where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = gt.zero(optimizer, stage=stage) if stage else optimizer
        gt.set_grad_reduce_dtype(model.parameters(), dtype)
        model(gt.from_full(x, where, S(0))).pow(2).sum().backward()
        with gt.record() as moves:
            grads.append(model.weight.grad)
        moved.append(sum(m.bytes for m in moves))
        optimizer.step()
    terms = []
    for rows in x.split(2):
        part = copy.deepcopy(plain)
        part(rows).pow(2).sum().backward()
        terms.append(part.weight.grad.bfloat16().float())
    assert moved[1] * 2 == moved[0] > 0 and grads[1].dtype == torch.float32
    torch.testing.assert_close(grads[1].full_tensor(), sum(terms).bfloat16().float(), rtol=2 ** -7, atol=0)
    assert not grads[1].full_tensor().equal(grads[0].full_tensor())


def test_gradients_are_not_reduced_in_integers():
    with pytest.raises(TypeError, match="floating point"):
        gt.set_grad_reduce_dtype([], torch.int32)


def test_a_plain_parameter_has_no_gradient_to_reduce():
    model = nn.Sequential(nn.Linear(4, 4).to_global(place([0, 1]), B), nn.Linear(4, 4))
    with pytest.raises(gt.GlobalTensorError, match="of a plain parameter"):
        gt.set_grad_reduce_dtype(model.parameters(), torch.bfloat16)


# ------------------------------------------------------------------ lists that an op writes
WRITES_LISTS = [op for kind in ("unary", "binary", "pointwise", "other")
                for op in getattr(common_methods_invocations, f"foreach_{kind}_op_db") if op.inplace_variant]


def copied(value, copy_of):
    """Arguments with a copy of each tensor."""
    if isinstance(value, list):
        return [copied(v, copy_of) for v in value]
    return copy_of(value.detach().clone()) if isinstance(value, torch.Tensor) and value.dim() else value


@pytest.mark.sample(4)
@pytest.mark.parametrize("op", WRITES_LISTS, ids=lambda op: op.name)
def test_a_list_that_is_written_has_new_values_and_versions(op):
    """Versions are what ZeRO and autograd know of writes by."""
    where, seen = gt.placement("cpu", [0, 1]), 0
    for sample in list(op.sample_inputs("cpu", torch.float32, noncontiguous=False))[::3]:
        own = [sample.input, *sample.args]
        plain, ours = copied(own, lambda t: t), copied(own, lambda t: gt.from_full(t, where, S(0)))
        try:
            op.inplace_variant(*plain, **sample.kwargs)
        except RuntimeError:
            continue                                 # torch refuses the sample
        op.inplace_variant(*ours, **sample.kwargs)
        for a, b in zip(ours[0], plain[0]):
            if b.dim():
                seen += 1
                assert (a._version > 0) == (b._version > 0), (a._version, b._version)
                torch.testing.assert_close(a.full_tensor(), b, equal_nan=True)
    assert seen


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_undoes_what_backward_needs_is_an_error(fused):
    plain, model, x, gx = pair(place(*PLACES["dp"]))
    for net, data in ((plain, x), (model, gx)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=not fused, fused=fused)
        loss = net(data).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        if net is plain and fused:                   # torch misses it there
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ------------------------------------------------------------------ norms of several placements
@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("places", [([0], [1]), ([0, 1], [2, 3, 4]), ([0, 1, 2], [1])], ids=str)
def test_gradients_of_all_stages_are_clipped_together(places, foreach, norm):
    plain, ours = [], []
    for k, ranks in enumerate(places):
        for size in (5, 3):
            full, where = torch.randn(size, 4, generator=torch.Generator().manual_seed(k)), place(ranks)
            plain.append(nn.Parameter(full.clone()))
            ours.append(nn.Parameter(gt.from_full(full, where, S(0) if size == 5 else B)))
            plain[-1].grad, ours[-1].grad = full * 3, gt.from_full(full * 3, where, S(0) if size == 5 else B)
    want = nn.utils.clip_grad_norm_(plain, 0.7, norm, foreach=foreach)
    torch.testing.assert_close(nn.utils.clip_grad_norm_(ours, 0.7, norm, foreach=foreach).full_tensor(), want)
    for p, q in zip(ours, plain):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def test_scalars_go_to_where_the_rest_of_an_op_is():
    here, there = place([0, 1]), place([2])
    x, scalar = gt.from_full(torch.arange(6.0), here, S(0)), gt.from_full(torch.tensor(2.0), there, B)
    for value in (x * scalar, scalar + x, torch.where(x > scalar, x, scalar), x.clone().div_(scalar)):
        assert value.placement == here
    assert torch.equal((x * scalar).full_tensor(), torch.arange(6.0) * 2)
    assert (scalar * x.sum()).placement == there and (x.sum() * scalar).placement == here
    with pytest.raises(gt.MixedPlacementError, match="one placement"):
        scalar.mul_(x.sum()).add_(x)
    with pytest.raises(gt.MixedPlacementError, match="one placement"):     # its gradient would be on another placement
        x * scalar.clone().requires_grad_()
