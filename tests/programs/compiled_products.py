"""Columns, then rows, compiled by inductor on every rank: what they add up is made where the other rank reads it."""
from __future__ import annotations

import sys

import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import globaltensor as gt
from globaltensor.runtime import custom_ops
from globaltensor.runtime.native import torch_ext

B, S = gt.sbp.broadcast, gt.sbp.split
ROWS = {"up.weight": S(0), "gate.weight": S(0), "down.weight": S(1)}
OURS = "globaltensor.products_for_peers.default("


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False), nn.Linear(96, 64)

    def forward(self, x):
        return x + self.down(self.up(x) * self.gate(x).sigmoid())


where = gt.placement.all("cpu")
torch.manual_seed(5)
plain, model = Block(), Block()
model.load_state_dict(plain.state_dict())
model = model.to_global(where, lambda name, _: ROWS.get(name, B))
x = torch.randn(4, 8, 64)
given, want = gt.from_full(x, where, B).requires_grad_(), x.clone().requires_grad_()
compiled = torch.compile(lambda x: model(model(x)).square().sum(), fullgraph=True)
loss, forward = run_and_get_code(lambda: compiled(given))
_, backward = run_and_get_code(loss.backward)
plain(plain(want)).square().sum().backward()
torch.testing.assert_close(given.grad.full_tensor(), want.grad, rtol=1e-4, atol=1e-4)
for p, q in zip(model.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-4)
made = custom_ops.products_for_peers([x[0, :, :] @ x[0].T] * 2, [torch.ones(8, 512)] * 2)
assert torch_ext.in_arena(made)
sys.stdout.write(f"{forward[0].count(OURS)} forward, {backward[0].count(OURS)} backward\n")
