"""Programs as users write them. A type checker at its strictest finds nothing wrong in this file (tests/test_types.py).

It is also run, so that what it shows is true.
"""
from __future__ import annotations

import torch
from torch import nn

import globaltensor as gt

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
GRID = gt.placement("cpu", [[0, 1], [2, 3]], axis_names=("dp", "tp"))
ONE = gt.placement("cpu", range(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x).relu())
        return x + y


def layouts() -> tuple[gt.GlobalTensor, ...]:
    """Every way to write an sbp."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    return (gt.ones(4, 4, placement=GRID, sbp=S(0)), gt.ones((4, 4), placement=GRID, sbp="S(0)"),
            gt.zeros(4, 4, placement=GRID, sbp=(S(0), "B")), gt.zeros([4, 4], placement=GRID, sbp="(S(0), B)"),
            gt.rand(4, 4, placement=GRID, sbp={"dp": S(0)}), gt.rand(4, 4, placement=GRID, sbp=Shard(0)),
            gt.randn(4, 4, placement=GRID, sbp=[Replicate(), Partial()]), gt.empty(4, placement=ONE, sbp=P),
            gt.full((4, 4), 2.5, placement=ONE, sbp=B), gt.arange(8, placement=ONE, sbp=S(0), dtype=gt.float32),
            gt.eye(4, placement=ONE, sbp="B"), gt.tensor([1.0, 2.0], placement=ONE, sbp=B, requires_grad=True),
            gt.randint(0, 9, (4,), placement=ONE, sbp=S(0)), gt.randperm(4, placement=ONE, sbp=S(0)),
            gt.linspace(0, 1, 5, placement=ONE, sbp=B), gt.normal(0.0, 1.0, (4,), placement=ONE, sbp=B))


def arithmetic(x: gt.GlobalTensor, w: gt.GlobalTensor) -> gt.GlobalTensor:
    y: gt.GlobalTensor = (2 * x @ w - 1) / 3
    y = y.transpose(0, 1).reshape(-1).view(4, 4)[1:, ...].sum(dim=0, keepdim=True)
    values, indices = y.sort(dim=1)
    values = values + indices.to(y.dtype) + values.max(dim=1).values
    y = y.exp().clamp(max=3.0).masked_fill(values > 0, 0.5)
    y += 1
    return y.mean()


def gradients() -> tuple[torch.Size, gt.GlobalTensor]:
    w = gt.randn(4, 4, placement=ONE, sbp=B, requires_grad=True)
    loss = arithmetic(gt.randn(4, 4, placement=ONE, sbp=S(0)), w)
    with gt.record() as moves:
        loss.backward()
        assert w.grad is not None
    print(f"{loss.item():.3f}", sum(move.bytes for move in moves), [str(move.src) for move in moves])
    return w.grad.shape, w.grad


def plain_code(t: torch.Tensor) -> str:
    """What is not global is torch's: names, types, and no sbp."""
    y = gt.matmul(gt.nn.functional.relu(t), gt.ones(4, 4))
    if isinstance(y, gt.GlobalTensor):
        return f"{y.placement} {y.sbp} {y.to_local().shape}"
    with gt.no_grad():
        return f"{y.to(gt.float64).sum().item():.1f}"


def training() -> list[float]:
    plan = {"up.weight": {"tp": "S(0)"}, "up.bias": {"tp": S(0)}, "down.weight": {"tp": S(1)}}
    model = gt.parallelize(Mlp(), GRID, plan)
    optimizer = gt.zero(torch.optim.AdamW(model.parameters(), lr=1e-2), axis="dp")
    x = gt.from_full(torch.randn(6, 4), GRID, {"dp": S(0)})
    losses: list[float] = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(model.up.in_features, [p.shape for p in model.parameters()])
    return losses


def conversions() -> bool:
    module = gt.to_global(nn.Linear(4, 4), ONE, lambda name, parameter: S(0) if name == "weight" else "B")
    parts = gt.from_shards({0: torch.ones(1, 4), 1: torch.ones(1, 4)}, ONE, S(0))
    moved = gt.from_local(torch.ones(2, 4), ONE, "S(0)").to_global(gt.placement("cpu", [2]), B, grad_sbp="B")
    print(module.out_features, parts.full_tensor().shape, moved.shards[2].shape, parts.numpy().shape)
    with gt.boxing("forbid"):
        same: bool = gt.rank() < gt.world_size() and parts.is_global
    return same


if __name__ == "__main__":
    gt.manual_seed(0)
    print(len(layouts()), gradients(), plain_code(torch.ones(2, 4)), training(), conversions())
