"""`gt.audit` finds every copy that is none: which tensor, on which ranks, at which element; and nothing else."""
from __future__ import annotations

import pytest
import torch
from harness import PROGRAMS, RUN, environment, good, run
from torch import nn

import globaltensor as gt

S, B = gt.sbp.split, gt.sbp.broadcast
GRID = gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))


@pytest.fixture(autouse=True, scope="module")
def world_of_eight():
    if gt.world_size() != 8:
        pytest.skip("written for the default world of 8 ranks")


def trained(steps=2):
    """A model with a broadcast, a split and a plain tensor, and an optimizer with state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model = gt.parallelize(model, GRID, {"0.weight": {"tp": S(0)}, "0.bias": {"tp": S(0)}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(gt.randn(8, 4, placement=GRID, sbp=(S(0), B))).square().sum().backward()
        optimizer.step()
    return model, optimizer


def spoil(x, rank, at, by=0.5):
    """Another value in one rank's copy."""
    with torch.no_grad():
        x.detach().shards[rank].view(-1)[at] += by


def error_of(*args, **options):
    with pytest.raises(gt.DisagreementError) as caught:
        gt.audit(*args, **options)
    return str(caught.value)


def test_what_is_alike_passes():
    model, optimizer = trained()
    values = 4 + 2 + 3 + 3 * 6 + len([key for key in optimizer.param_groups[0] if key != "params"])
    assert gt.audit(model, optimizer) == values
    assert gt.audit(None, optimizer) == values - 3       # without the buffers of batch norm
    assert gt.audit(model) == 4 + 2 + 3


# what is spoiled, on which rank, which of its elements, and what the error says
SPOILED = {
    "a copy": (lambda m, o: m[2].weight, 3, 7, "2.weight: rank 3 beside rank 0: at [1, 1] "),
    "a part with copies": (lambda m, o: m[0].weight, 2, 5, "0.weight: rank 2 beside rank 0: at [1, 1] "),
    "the second part": (lambda m, o: m[0].weight, 3, 5, "0.weight: rank 3 beside rank 1: at [4, 1] "),
    "a bias": (lambda m, o: m[0].bias, 3, 0, "0.bias: rank 3 beside rank 1: at [3] "),
    "a buffer": (lambda m, o: m[1].running_mean, 1, 2, "1.running_mean: rank 1 beside rank 0: at [2] "),
    "a moment": (lambda m, o: o.state[m[2].weight]["exp_avg"], 1, 0, "optimizer.state[2.weight]['exp_avg']: rank 1 "),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_differs_is_named(name):
    model, optimizer = trained()
    pick, rank, at, text = SPOILED[name]
    x = pick(model, optimizer)
    before = x.detach().shards[rank].view(-1)[at].item()
    spoil(x, rank, at)
    told = error_of(model, optimizer)
    assert text in told and f"{before} on rank" in told and f"on rank {rank}" in told, told
    assert told.count("beside rank") == 1, told
    assert "test_audit.py:" in told


def test_all_that_differs_is_told_and_the_first_element_is_the_first():
    model, _ = trained()
    for rank, at in ((1, 9), (1, 4), (3, 11)):
        spoil(model[2].weight, rank, at)
    spoil(model[2].bias, 2, 0)
    told = error_of(model)
    assert "2.weight: ranks 1, 3 beside rank 0: at [0, 4] " in told and "2.bias: rank 2 beside rank 0: at [0] " in told


def test_nan_is_no_difference_and_a_zero_of_the_other_sign_is_one():
    where = gt.placement("cpu", [0, 1])
    model = nn.Linear(2, 2).to_global(where, B)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
        model.bias.fill_(0.0)
    gt.audit(model)
    model.bias.detach().shards[1].neg_()
    assert "at [0] 0.0 on rank 0, -0.0 on rank 1" in error_of(model)


def test_a_sample_sees_what_differs_widely_and_moves_on():
    model = nn.Linear(512, 512).to_global(gt.placement("cpu", [0, 1]), B)
    assert gt.audit(model, sample=16) == 2
    with torch.no_grad():
        model.weight.detach().shards[1].mul_(1.5)
    assert "weight: rank 1 beside rank 0: at [0, 0]" in error_of(model, sample=16)


def test_a_large_tensor_is_searched():
    model = nn.Linear(700, 900, bias=False).to_global(gt.placement("cpu", [0, 1]), B)
    spoil(model.weight, 1, 523 * 700 + 41)
    assert "at [523, 41]" in error_of(model)


def test_ranks_of_processes_agree_on_what_differs():
    out = good([*RUN, "-n", 2, PROGRAMS / "audited.py"])
    assert out.count("all is found") == 2, out


def test_the_variable_audits_optimizers_by_themselves():
    code, _, err = run([*RUN, "-n", 2, PROGRAMS / "audited.py", "by itself"], environment(GLOBALTENSOR_AUDIT="4"))
    assert code == 1, err
    assert "optimizer.param_groups[0]['lr']: rank 1 beside rank 0: 0.1 on rank 0, 0.2 on rank 1" in err, err
    assert "step 4" not in err
    assert "globaltensor/debug" not in err, err      # but for the line where it is
