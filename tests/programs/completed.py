"""A pending tensor that ops need whole, on processes that do different things beside: all of them decide alike."""
from contextlib import ExitStack

import torch
from torch.utils.flop_counter import FlopCounterMode

import globaltensor as gt

P = gt.placement("cpu", [0, 1, 2])
here = gt.placement("cpu", [0, 1])                   # of which one process has no part
for where in (P, here):
    torch.manual_seed(0)
    a, b, c = torch.randn(4, 6), torch.randn(6, 5), torch.randn(5, 5)
    x = gt.from_full(a, where, gt.sbp.split(1)) @ gt.from_full(b, where, gt.sbp.split(0))
    plain = a @ b
    c = gt.from_full(c, where, gt.sbp.broadcast)
    assert x.sbp == (gt.sbp.partial_sum,)
    with ExitStack() as beside:
        if gt.rank() == 0:
            beside.enter_context(gt.record())
        if gt.rank() == 1:
            beside.enter_context(FlopCounterMode(display=False))
        if gt.rank() == 2:
            kept = (x.shards, x.detach(), x.view(-1))
        for _ in range(3):
            y = x.exp() + x.relu() @ c + x
            x.mul_(0.5)
        z = x.softmax(0) + y
    expected = plain
    for _ in range(3):
        right = expected.exp() + expected.relu() @ c.full_tensor() + expected
        expected = expected * 0.5
    torch.testing.assert_close(z.to_global(P, gt.sbp.broadcast).full_tensor(), expected.softmax(0) + right)
print("right")
