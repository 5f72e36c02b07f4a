"""A compiled step on batches of many sizes, split between ranks: as eager, and each rank says when it made a graph."""
from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional as F

import globaltensor as gt

where, graphs, counts = gt.placement.all("cpu"), [], []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)).softmax(0)).square().mean()


def backend(module, inputs, **options):
    graphs.append(module)
    return torch._dynamo.lookup_backend(sys.argv[1])(module, inputs, **options)


def step(f, x: torch.Tensor) -> list[torch.Tensor]:
    loss = f(x)
    loss.backward()
    values = [loss.full_tensor(), *(p.grad.full_tensor() for p in model.parameters())]
    model.zero_grad()
    return values


torch.manual_seed(5)
model = Net().to_global(where, gt.sbp.broadcast)
f = torch.compile(model, fullgraph=True, backend=backend)
for rows in (5, 6, 7, 6, 8, 5, 9, 12, 1):            # of 5 and of 6 rows, rank 0 has 3
    x = gt.from_full(torch.randn(rows, 6), where, gt.sbp.split(0))
    torch.testing.assert_close(step(f, x), step(model, x), rtol=1e-5, atol=1e-6)
    counts.append(len(graphs))
sys.stdout.write(f"{','.join(map(str, counts))}\n")
