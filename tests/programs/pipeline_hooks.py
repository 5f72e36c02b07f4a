"""Hooks that change gradients in stages of two ranks each, with and without ZeRO: as in plain accumulation."""
import copy

import torch
import torch.nn.functional as F
from torch import nn

import globaltensor as gt


def halve(p):
    p.grad.mul_(0.5)


for schedule in ("gpipe", "zb-h1"):
    for stage in (0, 2):
        torch.manual_seed(0)
        stages = [nn.Linear(6, 6).double() for _ in range(2)]
        plain = nn.Sequential(*copy.deepcopy(stages))
        x, y = torch.randn(2, 8, 6, dtype=torch.float64)
        places = [gt.placement("cpu", ranks, ("dp",)) for ranks in ([0, 1], [2, 3])]
        runner = gt.pipeline(stages, places, schedule, 2, F.mse_loss)
        parameters = [p for module in stages for p in module.parameters()]
        if stage:
            gt.zero(torch.optim.SGD(parameters, lr=0.1), "dp", stage)
        for p in (*parameters, *plain.parameters()):
            p.register_post_accumulate_grad_hook(halve)
            p.register_hook(lambda grad: grad.clamp(-0.02, 0.02) * 3)
        for _ in range(2):
            runner.step(x, y)
            for a, b in zip(x.chunk(2), y.chunk(2)):
                (F.mse_loss(plain(a), b) / 2).backward()
        for p, q in zip(parameters, plain.parameters()):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-13)
