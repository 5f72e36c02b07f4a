"""A module that became global and goes on plain, as this rank's parts: `module.to_local()`.

Oracle: a module that was plain all the time. Runs in a process that drives one rank, alone or with others. Prints the
name of each check that passed.
"""
from __future__ import annotations

import copy
import sys

import torch
from torch import nn

import globaltensor as gt
from globaltensor.errors import GlobalTensorError

SEED = 20_261_122
print(f"plain_again.py: SEED={SEED}", file=sys.stderr)
S, B = gt.sbp.split, gt.sbp.broadcast
ALL = gt.placement.all("cpu")
torch.manual_seed(SEED)
X = torch.randn(4, 6)


def net():
    torch.manual_seed(SEED)
    m = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6, bias=False))
    m[3].weight = m[0].weight                        # tied
    return m


def step(m, optimizer):
    where = m[0].weight.is_global
    optimizer.zero_grad()
    m(gt.from_full(X, ALL, S(0)) if where else X).square().sum().backward()
    optimizer.step()


def alike(got, want):
    for (name, g), w in zip(got.state_dict().items(), want.state_dict().values(), strict=True):
        torch.testing.assert_close(g, w, msg=lambda text, name=name: f"{name}: {text}")


def trains_on_with_what_it_had():
    plain, m = net(), net()
    old, calls = list(m.parameters()), []
    m[0].weight.register_hook(lambda grad: calls.append(grad.is_global))
    m[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.is_global))
    m[0].weight.mine = "mine"
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, m)]
    m.to_global(ALL, B)
    for one, optimizer in zip((plain, m), optimizers):
        step(one, optimizer)
    calls.clear()
    assert m.to_local() is m and all(p is o for p, o in zip(m.parameters(), old, strict=True))
    assert not any(t.is_global for t in m.state_dict().values()) and m[0].weight.mine == "mine"
    assert type(m[0].weight) is nn.Parameter and vars(m[0].weight).keys() == {"mine"} and m[3].weight is m[0].weight
    torch.testing.assert_close(m[0].weight.grad, plain[0].weight.grad)
    for one, optimizer in zip((plain, m), optimizers):
        step(one, optimizer)
    assert calls == [False, False], calls
    alike(m, plain)
    alike(copy.deepcopy(m), plain)


def parts_are_those_of_the_rank():
    plain, m = net(), net()
    m.to_global(ALL, lambda name, t: S(0) if t.dim() else B)
    want = {name: t.to_local().clone() for name, t in m.state_dict().items()}
    m.to_local()
    assert m.state_dict().keys() == want.keys() and all(torch.equal(m.state_dict()[k], t) for k, t in want.items())
    assert m[0].weight.shape == (len(torch.arange(6).tensor_split(gt.world_size())[gt.rank()]), 6)
    m = net().to_global(ALL, B).to_local().to_global(ALL, B)
    assert m[0].weight.is_global
    torch.testing.assert_close(m[0].weight.full_tensor(), plain[0].weight.detach())


def rnns_find_their_weights():
    rnn = nn.LSTM(4, 4)
    plain, x = copy.deepcopy(rnn), torch.randn(3, 2, 4)
    torch.testing.assert_close(rnn.to_global(ALL, B).to_local()(x), plain(x))


def refusals():
    m = net().to_global(ALL, B)
    waiting = m(gt.from_full(X, ALL, B)).sum()
    for one, why in ((m, "backward"), (zeroed(), "gt.zero")):
        try:
            one.to_local()
        except GlobalTensorError as error:
            assert why in error.why and "plain_again.py" in error.where, error
        else:
            raise AssertionError(f"not refused: {why}")
        assert all(p.is_global for p in one.parameters())
    waiting.backward()
    m.to_local()


def zeroed():
    m = net()
    gt.parallelize(m, gt.placement("cpu", ALL.ranks, ("dp",)))
    gt.zero(torch.optim.SGD(m.parameters(), lr=0.1))
    return m


for check in (trains_on_with_what_it_had, parts_are_those_of_the_rank, rnns_find_their_weights, refusals):
    check()
    if gt.rank() == 0:
        print(check.__name__, flush=True)
