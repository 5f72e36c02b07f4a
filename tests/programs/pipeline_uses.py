"""Stages on processes of their own that leave layers out, or do not use what they share, in some steps only: gradients,
clipping and AdamW as in plain torch, whatever the first step used."""
import copy

import torch
import torch.nn.functional as F
from torch import nn

import globaltensor as gt


class Block(nn.Module):
    """A layer that some steps leave out; two of them may share a weight."""

    def __init__(self, weight=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6)) if weight is None else weight
        self.bias = nn.Parameter(torch.randn(6))
        self.used = True

    def forward(self, x):
        return x + torch.tanh(x @ self.weight + self.bias) if self.used else x


torch.set_default_dtype(torch.float64)
# which of the blocks each step uses: the last one shares the weight of the first
USED = [(1, 1, 0, 0), (1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1), (1, 1, 1, 1), (1, 1, 0, 0)]
# the schedule, the order of these steps, the stage of ZeRO, and whether gradients are set to zero or dropped
CASES = [("gpipe", 1, 0, False), ("zb-h1", -1, 0, True), ("1f1b", 1, 1, False), ("1f1b", -1, 1, True),
         ("gpipe", 1, 2, True), ("1f1b", 1, 3, True)]
for schedule, order, zero, kept in CASES:
    torch.manual_seed(0)
    first = Block()
    plain = nn.Sequential(nn.Linear(6, 6), first, Block(), nn.Linear(6, 6), Block(), Block(first.weight))
    blocks = list(copy.deepcopy(plain))
    runner = gt.pipeline([nn.Sequential(*blocks[:3]), nn.Sequential(*blocks[3:])],
                         [gt.placement("cpu", ranks, ("dp",)) for ranks in ([0, 1], [2, 3])], schedule, 2, F.mse_loss)
    own = [*nn.ModuleList(blocks).parameters()]
    optimizers = [torch.optim.AdamW(parameters, lr=0.01) for parameters in (own, plain.parameters())]
    if zero:
        gt.zero(optimizers[0], "dp", zero)
    for step, used in enumerate(USED[::order]):
        for model in (blocks, plain):
            for block, is_used in zip((model[1], model[2], model[4], model[5]), used):
                block.used = bool(is_used)
        x, y = torch.randn(2, 8, 6)
        loss = runner.step(x, y)
        want = sum(F.mse_loss(plain(a), b) / 2 for a, b in zip(x.chunk(2), y.chunk(2)))
        want.backward()
        for p, q in zip(own, plain.parameters()):
            where = f"rank {gt.rank()}, {schedule}, step {step} of order {order}, ZeRO {zero}, kept: {kept}"
            assert (p.grad is None) == (q.grad is None), where
            if q.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-12, msg=where)
        norms = [nn.utils.clip_grad_norm_(parameters, 0.5) for parameters in (own, plain.parameters())]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(loss.full_tensor(), want, rtol=1e-9, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not kept)


class Two(nn.Module):
    """Gives its input twice; or takes two, and may leave the second one."""

    def __init__(self):
        super().__init__()
        self.inner, self.used = nn.Linear(6, 6), True

    def forward(self, x, y=None):
        return (self.inner(x), x + self.inner.bias) if y is None else self.inner(x + y if self.used else x)


stages = [Two(), Two()]
runner = gt.pipeline(stages, [gt.placement("cpu", [rank]) for rank in range(2)], "1f1b", 2, F.mse_loss)
runner.step(x, y)
stages[1].used = False
try:
    runner.step(x, y)
except gt.GlobalTensorError as error:                # the last thing that is done: the ranks are apart now
    kind, words = ("ShapeError", "gradients of what stage 1 takes from stage 0") if gt.rank() == 1 else (
        "TransportError", "lost touch with rank 1")
    assert type(error).__name__ == kind and words in str(error), error
else:
    raise AssertionError("the stage before knows by the shapes what comes")
