"""One rank records what is boxed, so that its ops go through Python, while those of the other one do not."""
import contextlib

import torch

import globaltensor as gt
from globaltensor.runtime import agreement

where = gt.placement.all("cpu")
for k in range(6):                                   # known to the native dispatcher from the third time on
    x = gt.ones(4, 4, placement=where, sbp=gt.sbp.partial_sum)
    records = k % 2 == 0 and gt.rank() == k // 2 % 2
    with gt.record() if records else contextlib.nullcontext() as log:
        y = torch.relu(x)
        z = x.to_global(sbp=gt.sbp.broadcast)
    assert float(y.sum()) == float(z.sum()) == 16.0
    assert not records or len(log) == 2, log

# Plain operands are compared at some of their uses: at the same ones on both ranks, whichever way their ops take.
w = gt.from_full(torch.arange(16.0).reshape(4, 4), where, gt.sbp.split(1))
for k in range(20):
    with gt.record() if k > 2 and gt.rank() == 0 else contextlib.nullcontext():
        y = torch.maximum(w.sum(1), torch.ones(4)) + (w * torch.ones(4, 4)).sum(1)
        loss = torch.nn.functional.cross_entropy(w, torch.tensor([0, 1, 2, 3]))
        w[1:3] += torch.zeros(2, 4)
        total = torch.zeros(())
        total += loss
        rows = w[torch.tensor([0, 3])]
        assert float(y.sum()) == 2 * 120.0 and float(total) > 0 and float(rows.sum()) == 6.0 + 54.0

# Counts are dropped where kinds of operands pile up: on both ranks at the same use, also those that recipes hold.
agreement._MOST_KEYS = 5
for k in range(120):
    size = 2 + k % 3 if k % 10 else 7 + k            # three shapes that come again and again, and others that do not
    rows = gt.ones(size, 2, placement=where, sbp=gt.sbp.split(0))
    with gt.record() if gt.rank() == 0 and k % 4 else contextlib.nullcontext():
        y = rows * torch.full((size, 2), 3.0) + torch.nn.functional.layer_norm(rows, [2], torch.ones(2), torch.ones(2))
        loss = torch.nn.functional.cross_entropy(rows, torch.zeros(size, dtype=torch.long))
        assert float(y.sum()) == 2 * size * 4.0 and float(loss) > 0
