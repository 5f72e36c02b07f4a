"""Global values written into plain tensors by processes of which some hold no part: each one's is the whole value.

    globaltensor run -n 3 tests/programs/plain_writes.py
"""
from __future__ import annotations

import torch
from torch import nn

import globaltensor as gt
from tests import test_plain_writes as table

B, S = gt.sbp.broadcast, gt.sbp.split


class Tagger(nn.Module):
    """Torch's code makes the plain tensor that its rows are padded into."""

    def __init__(self):
        super().__init__()
        self.rnn, self.linear = nn.LSTM(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        rows = nn.utils.rnn.pack_padded_sequence(x.transpose(0, 1), torch.full((len(x),), 5))
        return self.linear(nn.utils.rnn.pad_packed_sequence(self.rnn(rows)[0])[0].transpose(0, 1))


def main():
    for name in ("a sum of losses", "copy_", "part of it", "foreach", "the running statistics of a plain module",
                 "pad_sequence", "packed sequences", "vander"):
        wanted = table.whole(table.PROGRAMS[name](table.plain))
        for ranks in ([0], [1], [1, 0], [0, 1, 2], [[0, 2]]):
            where = gt.placement("cpu", ranks)
            for sbp in (B, S(0)):
                got = table.whole(table.PROGRAMS[name](
                    lambda t: gt.from_full(t, where, [sbp if t.dim() else B] * where.ndim)))
                for g, w in zip(got, wanted, strict=True):
                    torch.testing.assert_close(g, w)
    x = gt.from_full(table.X, gt.placement("cpu", [1]), S(0)).requires_grad_()
    nn.utils.rnn.pad_sequence([x, x[:2]]).square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * table.X + torch.cat([2 * table.X[:2], torch.zeros(4, 4)]))

    torch.manual_seed(0)
    stages, rows, targets = [Tagger(), nn.Linear(4, 2)], torch.randn(4, 5, 4), torch.zeros(4, 5, 2)
    with torch.no_grad():
        wanted = nn.functional.mse_loss(nn.Sequential(*stages)(rows), targets)
    runner = gt.pipeline(stages, [gt.placement("cpu", [0]), gt.placement("cpu", [1, 2])], "1f1b", 2,
                         nn.functional.mse_loss)
    torch.testing.assert_close(runner.step(rows, targets).full_tensor(), wanted)


if __name__ == "__main__":
    main()
