"""Optimizer state in files: the numbers of state in memory, and nothing of it resident between steps. That of devices
is tested in programs/device.py."""
from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import globaltensor as gt
from globaltensor.parallel import offload

SEED, WIDTH = 20_261_123, 128
WHERE = gt.placement("cpu", [0, 1], ("dp",))
KINDS = {"AdamW": lambda p: torch.optim.AdamW(p, lr=0.1), "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
         "SGD": lambda p: torch.optim.SGD([{"params": p[:2]}, {"params": p[2:], "lr": 0.5}], lr=0.1,
                                          momentum=0.9)}


def resident(folder):
    """Bytes of this process's memory that are pages of files in a folder."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().full_tensor()


@pytest.fixture
def model(monkeypatch):
    print("seed", SEED)
    monkeypatch.setattr(offload, "PIECE", WIDTH * WIDTH * 4)     # two pieces and more
    torch.manual_seed(SEED)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)]
    return gt.parallelize(nn.Sequential(*layers), WHERE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_the_same_and_no_state_is_resident(model, kind, stage, tmp_path, monkeypatch):
    other = copy.deepcopy(model)
    x = gt.from_full(torch.randn(6, WIDTH), WHERE, gt.sbp.split(0))
    ours = gt.zero(KINDS[kind]([*model.parameters()]), stage=stage, offload=tmp_path)
    plain = gt.zero(KINDS[kind]([*other.parameters()]), stage=stage)
    during, calls = [], []
    put_away = offload.StateElsewhere.put_away
    monkeypatch.setattr(offload.StateElsewhere, "put_away", lambda *args: (during.append(resident(tmp_path)),
                                                                       put_away(*args)))
    ours.register_step_post_hook(lambda *_: calls.append(1))
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (ours, plain)]
    for turn in range(4):
        torch.testing.assert_close(step(model, ours, x), step(other, plain, x), rtol=0, atol=0)
        for schedule in schedules:
            schedule.step()
        assert resident(tmp_path) == 0 and not list(tmp_path.iterdir())
        if turn == 1:                                # what was saved is loaded, into files again
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert len(calls) == 4
    state = sum(shard.nbytes for own in ours.state.values() for t in own.values() if t.dim()
                for shard in t.shards.values())
    pages = state + 4096 * sum(len(t.shards) for own in ours.state.values() for t in own.values() if t.dim())
    assert len(during) // 4 >= 3 and 0 < max(during) < pages     # some pieces, never all
    for one, two in zip(ours.state.values(), plain.state.values(), strict=True):
        for key in one:
            torch.testing.assert_close(one[key].full_tensor() if one[key].is_global else one[key],
                                       two[key].full_tensor() if two[key].is_global else two[key], rtol=0, atol=0)


class Counting(torch.optim.Optimizer):
    """Counts its steps in a group, and scales a step by the norm of all that it steps, as many of other projects do."""

    def __init__(self, params):
        super().__init__(params, {"count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            norm = sum(p.grad.pow(2).sum() for p in group["params"]).sqrt()
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.add_(p.grad) / norm / group["count"])


def test_an_optimizer_of_others_is_stepped_once_a_step(model, tmp_path):
    other = copy.deepcopy(model)
    ours, plain = gt.zero(Counting(model.parameters()), offload=tmp_path), Counting(other.parameters())
    x = gt.from_full(torch.randn(4, WIDTH), WHERE, gt.sbp.split(0))
    for _ in range(2):
        torch.testing.assert_close(step(model, ours, x), step(other, plain, x))
    assert ours.param_groups[0]["count"] == 2
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p.full_tensor(), q.detach().full_tensor())


def test_what_cannot_be_in_files_says_so(model, tmp_path):
    with pytest.raises(gt.ArgumentError, match="of LBFGS"):
        gt.zero(torch.optim.LBFGS(model.parameters()), offload=tmp_path)
