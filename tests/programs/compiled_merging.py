"""Boxings that do not lead to each other, compiled by inductor on every rank: equal to eager, and merged."""
from __future__ import annotations

import sys

import torch

import globaltensor as gt

S, B = gt.sbp.split, gt.sbp.broadcast


def program(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    q, k, v = ((x * 2 @ w).to_global(sbp=B).relu() for w in weights)
    out = torch.softmax(q @ k.T, -1) @ v
    y, z = out.to_global(sbp=S(0)).tanh(), (out * 2).to_global(sbp=S(1)).tanh()
    return (y.to_global(sbp=B) + z.to_global(sbp=B)).square().sum()


def step(f) -> tuple[list[torch.Tensor], int]:
    with gt.record() as moves:
        loss = f(*args)
        loss.backward()
        count = len(moves)
        values = [loss.full_tensor(), *(a.grad.full_tensor() for a in args)]
    for a in args:
        a.grad = None
    return values, count


where = gt.placement.all("cpu")
torch.manual_seed(5)
args = [gt.from_full(torch.randn(4, 4), where, sbp).requires_grad_() for sbp in (B, S(1), S(1), S(1))]
want, before = step(program)
compiled = torch.compile(program, fullgraph=True)
for _ in range(2):
    values, after = step(compiled)
    torch.testing.assert_close(values, want)
sys.stdout.write(f"equal: {before} -> {after}\n")
