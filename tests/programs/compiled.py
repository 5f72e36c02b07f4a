"""Columns, then rows, of an MLP with a cut vocabulary, compiled by inductor on every rank: equal to plain torch."""
from __future__ import annotations

import copy
import sys

import torch
from torch import nn

import globaltensor as gt

B, S = gt.sbp.broadcast, gt.sbp.split
ROWS = {"0.weight": S(0), "1.weight": S(0), "1.bias": S(0), "3.weight": S(1)}
where = gt.placement.all("cpu")
torch.manual_seed(5)
plain = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
model = copy.deepcopy(plain).to_global(where, lambda name, _: ROWS.get(name, B))
ids = torch.arange(9).repeat(2)
f = torch.compile(model, fullgraph=True, backend=sys.argv[1] if len(sys.argv) > 1 else "inductor")
for _ in range(2):
    loss, want = f(gt.from_full(ids, where, B)).square().sum(), plain(ids).square().sum()
    loss.backward()
    want.backward()
torch.testing.assert_close(loss.full_tensor(), want)
for p, q in zip(model.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-5)
sys.stdout.write("equal\n")
