"""Train a small residual network on images of stripes, each image spread over ranks by its rows: data x space.

    python examples/vision.py                                   one process drives all ranks
    globaltensor run -n 4 examples/vision.py --dp 2 --sp 2      one process per rank

Along dp each rank has its own images; along sp each has some rows of every image, and of its neighbours' it gets no
more than its kernels reach. So an image may be larger than a device can hold. --verify trains by plain torch beside it.
"""
from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import globaltensor as gt

CLASSES = ((1, 0), (0, 1), (1, 1), (1, -1))          # directions of the stripes


class Block(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))), [n, c, y, x] -> [n, c, y, x]"""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.norm2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def network(c: int) -> nn.Module:
    """Images [n, 1, y, x] -> one of the classes [n, 4]."""
    return nn.Sequential(nn.Conv2d(1, c, 5, 2, padding=2), nn.BatchNorm2d(c), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1),
                         Block(c), nn.Conv2d(c, 2 * c, 3, 2, padding=1), Block(2 * c),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * c, len(CLASSES)))


def stripes(n: int, size: int) -> tuple[Tensor, Tensor]:
    """Noisy images [n, 1, size, size] and their classes [n]; the same in every process."""
    kind, at = torch.randint(len(CLASSES), (n,)), torch.arange(size) * 0.8
    across, down = torch.tensor(CLASSES)[kind].T.view(2, n, 1, 1, 1)
    return torch.sin(across * at + down * at.unsqueeze(1)) + 0.5 * torch.randn(n, 1, size, size), kind


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, kind: Tensor) -> tuple[float, float]:
    """One step of training; loss and accuracy."""
    optimizer.zero_grad()
    said = model(images)
    loss = F.cross_entropy(said, kind)
    loss.backward()
    optimizer.step()
    return loss.item(), (said.argmax(1) == kind).float().mean().item()


def main(argv: list[str] | None = None) -> tuple[list[float], float]:
    """Losses, and with --verify the largest difference to those of plain torch."""
    parser = argparse.ArgumentParser(description="Train a residual network over dp x sp ranks.")
    for name, default in ("dp", 2), ("sp", 2), ("steps", 30), ("batch", 16), ("size", 64), ("channels", 8):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--verify", action="store_true", help="train by plain torch beside it")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    ranks = torch.arange(options.dp * options.sp).view(options.dp, options.sp).tolist()
    where = gt.placement("cpu", ranks, axis_names=("dp", "sp"))
    plain = network(options.channels)
    model = gt.to_global(copy.deepcopy(plain), where, gt.sbp.broadcast)
    optimizer, beside = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    losses, worst = [], 0.0
    for i in range(1, options.steps + 1):
        images, kind = stripes(options.batch, options.size)
        spread = gt.from_full(images, where, {"dp": gt.sbp.split(0), "sp": gt.sbp.split(2)})
        with gt.record() as moves:
            loss, right = step(model, optimizer, spread, gt.from_full(kind, where, {"dp": gt.sbp.split(0)}))
        losses.append(loss)
        moved, rows = (sum(m.bytes for m in moves if m.op.startswith(of)) for of in ("", ("aten.conv", "aten.max")))
        if gt.rank() == 0:
            print(f"step {i:3}   loss {loss:.4f}   accuracy {right:.0%}   bytes {moved:,}, {rows:,} of them rows")
        if options.verify:
            worst = max(worst, abs(loss - step(plain, beside, images, kind)[0]))
    if options.verify and gt.rank() == 0:
        print(f"The largest difference to the losses of plain torch: {worst:.1e}")
    return losses, worst


if __name__ == "__main__":
    main()
