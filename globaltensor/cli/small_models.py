"""Small models whose steps are measured by `globaltensor calibrate --here`: what ops take among others, in training.

Four compute little, with few ops, with many, with many parameters; or they compute much. The others are what models are
made of, in two sizes each: blocks of a transformer, of a convolutional network, and of gated experts.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_WIDTH = 256
_VOCAB, _HEADS = 256, 8


class SmallModel(NamedTuple):
    """A model, what it takes in a micro-batch, and its loss."""

    module: nn.Module
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


class _TransformerBlock(nn.Module):
    """x + causal attention + a feed-forward layer, [b, s, hidden]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, hidden = x.shape
        y = self.before(x)
        q, k, v = (project(y).view(b, s, _HEADS, -1).transpose(1, 2) for project in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, hidden))
        return x + self.down(F.gelu(self.up(self.between(x))))


class _Convolutions(nn.Module):
    """relu(x + two convolutions, normalized over the batch), [b, c, y, x]."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(c, c, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class _Experts(nn.Module):
    """x + feed-forward layers, weighed by a gate, [n, hidden]."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts)
        shapes = (experts, hidden, 2 * hidden), (experts, 2 * hidden, hidden)
        self.up, self.down = (nn.Parameter(torch.full(shape, 1 / hidden, dtype=torch.float32, device="cpu"))
                              for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu(torch.einsum("nh,ehf->enf", x, self.up))
        return x + torch.einsum("enf,efh,ne->nh", inside, self.down, self.gate(x).softmax(-1))


def _of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _stack(rows: int, *layers: nn.Module) -> SmallModel:
    first = layers[0]
    assert isinstance(first, nn.Linear)
    x = torch.zeros(rows, first.in_features, dtype=torch.float32, device="cpu")
    return SmallModel(nn.Sequential(*layers), x, x, F.mse_loss)


def _transformer(hidden: int, rows: int, positions: int) -> SmallModel:
    ids = torch.zeros(rows, positions, dtype=torch.long, device="cpu")
    layers = (nn.Embedding(_VOCAB, hidden), _TransformerBlock(hidden), _TransformerBlock(hidden),
              nn.Linear(hidden, _VOCAB))
    return SmallModel(nn.Sequential(*layers), ids, ids, _of_tokens)


def _convolutional(c: int, rows: int, size: int) -> SmallModel:
    images = torch.zeros(rows, 3, size, size, dtype=torch.float32, device="cpu")
    layers = (nn.Conv2d(3, c, 3, 2, padding=1), nn.MaxPool2d(2), _Convolutions(c), _Convolutions(c),
              nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 4))
    return SmallModel(nn.Sequential(*layers), images, torch.zeros(rows, dtype=torch.long, device="cpu"),
                      F.cross_entropy)


def _experts(hidden: int, rows: int) -> SmallModel:
    x = torch.zeros(rows, hidden, dtype=torch.float32, device="cpu")
    return SmallModel(nn.Sequential(_Experts(hidden, 4), _Experts(hidden, 4)), x, x, F.mse_loss)


def small_models() -> list[SmallModel]:
    """All of them; a step of some micro-batches takes as many times their inputs."""
    n = _WIDTH
    return [_stack(4, *[nn.Linear(n, n) for _ in range(4)]),
            _stack(4, nn.Linear(n, n), *[nn.Tanh() for _ in range(48)]),
            _stack(4, *[nn.Linear(n, n) for _ in range(24)]),
            _stack(64, *[one for _ in range(6) for one in (nn.Linear(2 * n, 2 * n), nn.GELU())]),
            _transformer(64, 2, 32), _transformer(256, 4, 64),
            _convolutional(8, 4, 32), _convolutional(32, 8, 64), _experts(32, 32), _experts(128, 192)]


def small_plans(ranks: int) -> list[tuple[int, dict[str, Any]]]:
    """Models by their number, and plans of each in which so many ranks communicate, or blocks recompute: arguments of
    `gt.strategy`, but for the global batch, a micro-batch for each rank of dp and each stage."""
    alone: dict[str, Any] = {"dp": 1, "tp": 1, "pp": 1, "zero": 0, "recompute": "none", "schedule": "1f1b", "chunks": 1}
    again: list[tuple[int, dict[str, Any]]] = [(k, {"dp": ranks, "recompute": how}) for k in (4, 5)
                                               for how in ("none", "full", "selective")]
    if ranks == 1:
        return [(k, alone | fixed) for k, fixed in again]
    along_tp = [(4, {"tp": ranks}), (5, {"tp": ranks})] if _HEADS % ranks == 0 else []
    stages = [(3, {"pp": ranks})] if ranks <= 12 else []
    zeros = [(4, {"dp": ranks, "zero": zero}) for zero in (1, 3)]
    return [(k, alone | fixed) for k, fixed in (*zeros, (7, {"dp": ranks}), *along_tp, *stages, *again)]
