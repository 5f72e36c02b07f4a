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
