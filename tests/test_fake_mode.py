"""Global tensors under FakeTensorMode: on the meta device as without it, elsewhere an error; never a death.

Oracle: the same step on the CPU, whose shapes and layouts those on the meta device must have.
"""
from __future__ import annotations

import children
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import globaltensor as gt
from globaltensor.errors import GlobalTensorError

S, B = gt.sbp.split, gt.sbp.broadcast
AXES = ("dp", "tp")
LAYOUTS = {"dp": (S(0), B), "dp and tp": (S(0), S(1)), "broadcast": (B, B)}


def place(kind):
    return gt.placement(kind, [[0, 1], [2, 3]], AXES)


def described(t):
    return tuple(t.shape), t.dtype, t.sbp, {rank: tuple(shard.shape) for rank, shard in t.shards.items()}


def net(kind):
    with torch.device(kind):
        model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Dropout(0.1), nn.Linear(5, 4))
    return gt.parallelize(model, place(kind), {"0.weight": {"tp": S(0)}, "0.bias": {"tp": S(0)},
                                               "4.weight": {"tp": S(1)}})


def step(model, sbp):
    """What all tensors of a step of training are."""
    kind = model[0].weight.device.type
    x = gt.randn(7, 6, placement=place(kind), sbp=sbp)
    classes = gt.zeros(7, dtype=torch.int64, placement=place(kind), sbp=(sbp[0], B))
    out = model(x) + torch.ones(4, device=kind)
    loss = nn.functional.cross_entropy(out, classes)
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    rows = out[1:3].to_global(sbp=B)
    return [*map(described, (out, loss, rows)), *(described(p.grad) for p in model.parameters()),
            *(described(state["exp_avg"]) for state in optimizer.state.values())]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"allow_non_fake_inputs": True}])
def test_a_step_without_memory_has_the_layouts_of_one_with_it(layout, options):
    want, without_memory = step(net("cpu"), LAYOUTS[layout]), net("meta")
    with FakeTensorMode(**options):
        got = step(without_memory, LAYOUTS[layout])
    assert got == want == step(net("meta"), LAYOUTS[layout])


PLACE = gt.placement("cpu", [0, 1])
X = gt.ones(4, 3, placement=PLACE, sbp=S(0)).requires_grad_()
W = gt.ones(3, 2, placement=PLACE, sbp=B).requires_grad_()
WAITING = (X @ W).sum()
REFUSED = {
    "factory": lambda: gt.zeros(4, placement=PLACE, sbp=B), "random": lambda: gt.randn(4, placement=PLACE, sbp=S(0)),
    "arange": lambda: gt.arange(4, placement=PLACE, sbp=S(0)), "like": lambda: gt.zeros_like(X),
    "from_full": lambda: gt.from_full(torch.ones(4), PLACE, S(0)),
    "from_local": lambda: gt.from_local(torch.ones(4), PLACE, S(0)),
    "op": lambda: X + 1, "product": lambda: X @ W, "linear": lambda: nn.functional.linear(X, W.T),
    "beside a fake one": lambda: X + torch.ones(3), "boxing": lambda: X.to_global(sbp=B),
    "view": lambda: X[1] * 2, "write": lambda: X.detach().add_(1), "value": lambda: X.full_tensor(),
    "number": lambda: X.sum().item(), "text": lambda: str(X), "backward": lambda: WAITING.backward(),
    "module": lambda: nn.Linear(2, 2).to_global(PLACE, B),
}


def outcome(name):
    for _ in range(3):                               # the native code knows these
        (X.detach() + 1).sum().item()
        X @ W
    try:
        with FakeTensorMode():
            REFUSED[name]()
    except GlobalTensorError as error:
        after = [t.full_tensor().tolist() for t in (X.detach() + 1, X @ W)]
        assert after == [[[2.0] * 3] * 4, [[3.0] * 2] * 4]
        return str(error)
    return "nothing was raised"


def test_what_has_memory_is_refused_in_our_words():
    came = children.outcomes(REFUSED, outcome)
    wrong = {name: text for name, text in came.items() if "where: tests/test_fake_mode.py" not in text.replace(
        f"where: {__file__}", "where: tests/test_fake_mode.py").replace("where: test_fake", "where: tests/test_fake")}
    assert not wrong, wrong
    by_us = {name for name, text in came.items() if "under FakeTensorMode" in text}
    assert set(REFUSED) - by_us == {"arange", "from_full", "from_local", "module"}, came     # of fake tensors
    assert all('gt.placement("meta", [0, 1])' in came[name] for name in by_us)
