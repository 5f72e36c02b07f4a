"""Convolutions and pooling of split images, in whatever way of running; each process writes to FOLDER/<rank>.json what
it sees of their values, what plain torch gives, and what was moved."""
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import globaltensor as gt
from globaltensor.runtime.machine import gloo

S, B = gt.sbp.split, gt.sbp.broadcast


class Net(nn.Module):
    """Halos of all kinds: a stride, a dilation, groups, both poolings, batch norm."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 5, stride=2, padding=2), nn.BatchNorm2d(4)
        self.wide, self.head = nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2), nn.Linear(6, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = F.avg_pool2d(self.wide(x), 2, 1, 1, count_include_pad=False)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def trained(spread):
    """Losses, parameters and the gradient of the image after two steps; `spread` makes module and images global."""
    torch.manual_seed(3)
    net, image = spread(Net().double(), torch.randn(2, 3, 21, 11, dtype=torch.float64))
    image.requires_grad_()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = net(image).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    found += [p.detach() for p in net.parameters()] + [image.grad]
    return [(t.full_tensor() if t.is_global else t).tolist() for t in found]


def wide(spread):
    """The gradient of an image whose halo is large enough for ways of moving that small ones do not take."""
    torch.manual_seed(4)
    net, image = spread(nn.Conv2d(8, 8, 5, padding=2).double(), torch.randn(1, 8, 6, 300, dtype=torch.float64))
    image.requires_grad_()
    net(image).square().sum().backward()
    grad = image.grad.full_tensor() if image.is_global else image.grad
    return [(grad * torch.arange(300.)).sum(3).tolist()]


def main(folder):
    gt.init(machine=gloo)
    where = gt.placement("cpu", [1, 0])
    with gt.record() as moves:
        values = [t for f in (trained, wide)
                  for t in f(lambda net, image: (net.to_global(where, B), gt.from_full(image, where, S(2))))]
    seen = {"values": values, "plain": [t for f in (trained, wide) for t in f(lambda net, image: (net, image))],
            "moves": [[m.op, m.bytes, str(m.dst)] for m in moves if m.op.startswith("aten.")]}
    Path(folder, f"{gt.rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
