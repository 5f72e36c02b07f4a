"""Backward of layers of which not everything needs a gradient: what a mask leaves out, no rule has a layout for.

Oracle: plain torch.
"""
from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import globaltensor as gt

SEED = 71
GRID = gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
B, S = gt.sbp.broadcast, gt.sbp.split
MODULES = {                                          # and what it takes
    "layer norm": (nn.LayerNorm(8), (4, 6, 8)), "rms norm": (nn.RMSNorm(8), (4, 6, 8)),
    "group norm": (nn.GroupNorm(2, 4), (4, 4, 6)), "batch norm": (nn.BatchNorm1d(4), (4, 4, 6)),
    "batch norm, eval": (nn.BatchNorm1d(4).eval(), (4, 4, 6)),
    "instance norm": (nn.InstanceNorm1d(4, affine=True), (4, 4, 6)),
    "convolution": (nn.Conv1d(4, 6, 3), (4, 4, 9)), "transposed": (nn.ConvTranspose1d(4, 6, 3), (4, 4, 9)),
    "linear": (nn.Linear(8, 6), (4, 6, 8)), "bilinear": (nn.Bilinear(8, 8, 4), (4, 8)),
}


def backward(module, x, needs):
    """The gradients of those of input, weight and bias that need one."""
    leaves = [x, *module.parameters()]
    for leaf, yes in zip(leaves, needs):
        leaf.requires_grad_(yes)
    y = module(x, x) if isinstance(module, nn.Bilinear) else module(x)
    y.sin().sum().backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("layout", [(S(0), B), (S(0), S(1)), (B, S(1)), (B, B)], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_some(name, layout):
    module, shape = MODULES[name]
    torch.manual_seed(SEED)
    t = torch.randn(shape, dtype=torch.float64)
    for needs in itertools.product((False, True), repeat=1 + len([*module.parameters()])):
        if not any(needs):
            continue
        plain = copy.deepcopy(module).double()
        ours = gt.parallelize(copy.deepcopy(plain), GRID)
        want = backward(plain, t.clone(), needs)
        for a, b in zip(backward(ours, gt.from_full(t, GRID, layout), needs), want, strict=True):
            assert (a is None) == (b is None), (needs, SEED)
            if a is not None:
                torch.testing.assert_close(a.full_tensor(), b, msg=lambda text: f"{needs}, seed {SEED}: {text}")
