"""Along an axis of one rank every sbp is the same, so that an op runs as it does in plain torch: the same kernels.

Oracle: plain torch, bit for bit, and the ops that its profiler counts.
"""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import globaltensor as gt
from globaltensor.runtime.native import torch_ext

SEED = 61
ONE = gt.placement("cpu", [0], ("dp",))
# which arithmetic a module runs beside its kernels
ARITHMETIC = ("aten::mul", "aten::sub", "aten::div", "aten::rsqrt", "aten::lerp_", "aten::var_mean", "aten::exp",
              "aten::sum", "aten::mean", "aten::amax")
MODULES = {
    "batch norm": nn.BatchNorm2d(6), "group norm": nn.GroupNorm(2, 6), "layer norm": nn.LayerNorm(4),
    "rms norm": nn.RMSNorm(4), "instance norm": nn.InstanceNorm2d(6, affine=True),
    "cross entropy": nn.CrossEntropyLoss(), "mse": nn.MSELoss(),
    "pooling": nn.AvgPool2d(2), "convolution": nn.Conv2d(6, 2, 3),
}


def run_and_count(module, x, *others):
    """Results, gradients and buffers of one step, and how often each arithmetic op of torch ran in the second one."""
    def step():
        module.zero_grad(set_to_none=True)
        y = module(x, *others)
        y.backward(torch.full_like(y, 0.5))
        return y

    step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        y = step()
    counts = {e.key: e.count for e in seen.key_averages() if e.key in ARITHMETIC}
    return [y, x.grad, *[p.grad for p in module.parameters()], *module.buffers()], counts


@pytest.mark.parametrize("name", MODULES)
def test_an_op_runs_as_it_is(name):
    torch.manual_seed(SEED)
    plain = copy.deepcopy(MODULES[name])
    ours = gt.parallelize(copy.deepcopy(plain), ONE)
    t = torch.randn(4, 6, 4, 4)
    other = {"cross entropy": [torch.randint(6, (4, 4, 4))], "mse": [torch.randn(4, 6, 4, 4)]}.get(name, [])
    x = gt.from_full(t, ONE, gt.sbp.split(0)).requires_grad_()
    want, plainly = run_and_count(plain, t.requires_grad_(), *other)
    values, counts = run_and_count(ours, x, *[gt.from_full(one, ONE, gt.sbp.split(0)) for one in other])
    assert len(values) == len(want)
    for a, b in zip(values, want, strict=True):
        assert torch.equal(a.full_tensor(), b), f"{name}, seed {SEED}"
    assert all(n <= plainly.get(op, 0) for op, n in counts.items()), f"{name}: {counts}, plain {plainly}"


GRID = gt.placement("cpu", [[0, 1]], ("one", "two"))
P, S, B = gt.sbp.partial_sum, gt.sbp.split, gt.sbp.broadcast
USES = {                                             # what needs an operand as B along the axis of one rank
    "relu": lambda t: t.relu(), "exp": lambda t: t.exp(), "product": lambda t: t * t.cos(),
    "softmax": lambda t: t.softmax(0), "stack": lambda t: torch.stack([t, t.sin()]),
}


@pytest.mark.skipif(torch_ext is None, reason="native code does it")
@pytest.mark.parametrize("name", [name for name in USES if name != "softmax"])
def test_what_an_op_reads_is_not_copied(name):
    """What is pending, or cut, along an axis of one rank is whole."""
    for along in (P, S(0), S(1)):
        x = gt.from_full(torch.randn(1000, 3), GRID, (along, S(0)))
        assert not x.spec.layout.partial
        USES[name](x)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            USES[name](x)
        assert not [e.key for e in seen.key_averages() if e.key.startswith("boxing")], along


@pytest.mark.parametrize("name", USES)
def test_what_was_read_may_be_written_afterwards(name):
    """The same memory is read by an op and written by another one: each must see what it would in plain torch."""
    def all_of(t, leaf):
        y = USES[name](t)
        seen = [y.clone()]
        with torch.no_grad():
            t.add_(1)
            seen.append(USES[name](t))
            t.view(-1)[2:5].mul_(3)
            y.mul_(2)
            seen += [t.clone(), y, USES[name](t)]
        USES[name](leaf * 2).sum().backward()
        leaf.data.mul_(2)
        return [*seen, leaf.grad, leaf]

    t, leaf = torch.randn(2, 5, 6)
    x, own = (gt.from_full(one, GRID, (P, S(1))) for one in (t, leaf))
    ours = all_of(x, own.requires_grad_())
    for a, b in zip(ours, all_of(t, leaf.requires_grad_()), strict=True):
        torch.testing.assert_close(a.full_tensor(), b)
