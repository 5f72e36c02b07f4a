"""Global values that are written into plain tensors, as plain torch does it: the tensor stays plain, and whole."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import globaltensor as gt
from tests.harness import PROGRAMS as FOLDER, RUN, good

B, P, S = gt.sbp.broadcast, gt.sbp.partial_sum, gt.sbp.split
WHERE = gt.placement("cpu", [0, 1, 2])
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(20_261_122))
RNN = nn.LSTM(4, 3)


def accumulated(place):
    total = torch.zeros(())
    for _ in range(3):
        total += place(X).square().sum()
    return total


def state_of_batch_norm(place):
    norm = nn.BatchNorm1d(4)
    return norm(place(X)), norm.running_mean, norm.running_var


def lazy_batch_norm(place):
    norm = nn.LazyBatchNorm1d()
    return norm(place(X)), norm.running_mean


def packed(place):
    rows = nn.utils.rnn.pack_padded_sequence(place(X.reshape(3, 2, 4)), torch.tensor([3, 1]))
    return nn.utils.rnn.pad_packed_sequence(rows)[0]


def rnn_of_packed(place):
    rnn = copy.deepcopy(RNN) if place is plain else copy.deepcopy(RNN).to_global(WHERE, B)
    rows = nn.utils.rnn.pack_padded_sequence(place(X.reshape(3, 2, 4)), [3, 1])
    return nn.utils.rnn.pad_packed_sequence(rnn(rows)[0])[0]


PROGRAMS = {
    "a sum of losses": accumulated,
    "copy_": lambda place: torch.zeros(6, 4).copy_(place(X)),
    "add_ that is repeated": lambda place: torch.zeros(2, 6, 4).add_(place(X)),
    "lerp_": lambda place: torch.ones(6, 4).lerp_(place(X), 0.1),
    "part of it": lambda place: torch.zeros(8, 4)[1:7].mul_(place(X)),
    "an assignment": lambda place: torch.zeros(8, 4).index_put_((torch.arange(6),), place(X)),
    "foreach": lambda place: torch._foreach_add([torch.ones(6, 4)], [place(X)])[0],
    "the running statistics of a plain module": state_of_batch_norm,
    "a lazy module": lazy_batch_norm,
    "pad_sequence": lambda place: nn.utils.rnn.pad_sequence([place(X), place(X[:2])]),
    "packed sequences": packed,
    "an RNN of packed sequences": rnn_of_packed,
    "vander": lambda place: torch.vander(place(X[0])),
    "combinations": lambda place: torch.combinations(place(X[0])),
}


def plain(t):
    return t


def whole(result):
    results = result if isinstance(result, tuple) else (result,)
    return [t.full_tensor() if isinstance(t, gt.GlobalTensor) else t for t in results]


@pytest.mark.parametrize("sbp", [S(0), B, P], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_written_is_the_whole_value(name, sbp):
    for _ in range(2):                               # the second time by what was cached
        got = whole(PROGRAMS[name](lambda t: gt.from_full(t, WHERE, B).to_global(sbp=sbp if t.dim() else B)))
        for g, w in zip(got, whole(PROGRAMS[name](plain)), strict=True):
            torch.testing.assert_close(g, w)


@pytest.mark.parametrize("sbp", [S(0), S(1), B], ids=str)
def test_gradients_flow_back(sbp):
    x = gt.from_full(X, WHERE, sbp).requires_grad_()
    total = torch.zeros(6, 4)
    total += x                                       # the gradient comes to the leaf as a plain tensor
    total.square().sum().backward()
    assert x.grad.sbp == x.sbp
    torch.testing.assert_close(x.grad.full_tensor(), 2 * X)
    nn.utils.rnn.pad_sequence([x, x[:2]]).square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 4 * X + torch.cat([2 * X[:2], torch.zeros(4, 4)]))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_plain_module_is_trained_on_global_inputs(kind, foreach):
    models = [nn.Linear(4, 3), nn.Linear(4, 3)]
    models[1].load_state_dict(models[0].state_dict())
    for model, x in zip(models, (gt.from_full(X, WHERE, S(0)), X)):
        optimizer = kind(model.parameters(), lr=0.1, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for got, want in zip(models[0].parameters(), models[1].parameters()):
        assert not isinstance(got, gt.GlobalTensor)
        torch.testing.assert_close(got, want)


FOREACH = {
    "add_": lambda own, t: torch._foreach_add_(own, [t(), t(), t()]),
    "add_ of numbers": lambda own, t: torch._foreach_add_(own, [1.0, 2.0, 3.0]),
    "mul_ by one tensor": lambda own, t: torch._foreach_mul_(own, t().sum()),
    "lerp_": lambda own, t: torch._foreach_lerp_(own, [t(), t(), t()], 0.3),
    "addcmul_ with a tensor of scalars": lambda own, t: torch._foreach_addcmul_(
        own, [t(), t(), t()], [t(), t(), t()], torch.tensor([1.0, 2.0, 3.0])),
}


@pytest.mark.parametrize("sbp", [S(0), B, P], ids=str)
@pytest.mark.parametrize("name", FOREACH)
def test_a_list_of_plain_and_global_members_is_written_member_by_member(name, sbp):
    for _ in range(2):                               # the second time by what was cached
        own = [gt.from_full(X, WHERE, S(0)), X.clone(), gt.from_full(X, WHERE, B)]
        FOREACH[name](own, lambda: gt.from_full(X, WHERE, B).to_global(sbp=sbp))
        want = [X.clone() for _ in own]
        FOREACH[name](want, lambda: X)
        assert [isinstance(t, gt.GlobalTensor) for t in own] == [True, False, True]
        for g, w in zip(whole(tuple(own)), want, strict=True):
            torch.testing.assert_close(g, w)


def norms_and_unscaled(own):
    flag = torch.zeros(1)
    unscaled = [t.clone() for t in own]
    torch._amp_foreach_non_finite_check_and_unscale_(unscaled, flag, torch.full((1,), 0.5))
    return *torch._foreach_norm(own), *unscaled, flag


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("at", range(3))
def test_gradients_of_plain_and_global_parameters_are_clipped_and_unscaled(at, bad):
    grads = [X.clone() for _ in range(3)]
    if bad:
        grads[at][1, 2] = torch.inf
    got = norms_and_unscaled([t if i == 1 else gt.from_full(t, WHERE, S(0)) for i, t in enumerate(grads)])
    for g, w in zip(whole(got), norms_and_unscaled(grads), strict=True):
        torch.testing.assert_close(g, w, equal_nan=True)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_an_optimizer_steps_plain_and_global_parameters_together(kind, foreach):
    ways = []
    for place in (lambda t: gt.from_full(t, WHERE, B), plain):
        params = [torch.ones(4, requires_grad=True), place(X.clone()).requires_grad_()]
        optimizer = kind(params, lr=0.1, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            (params[0] * params[1]).square().sum().backward()
            nn.utils.clip_grad_norm_(params, 1.0, foreach=foreach)
            optimizer.step()
        ways.append(whole(tuple(p.detach() for p in params)))
    for g, w in zip(*ways, strict=True):
        torch.testing.assert_close(g, w)


def test_processes_that_hold_no_part_write_the_same():
    good([*RUN, "-n", 3, FOLDER / "plain_writes.py"])
