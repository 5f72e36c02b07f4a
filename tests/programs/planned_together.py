"""Processes ask for a strategy together: rank 0 plans, all have it, random numbers go on as if nobody had, it runs."""
import torch
from torch import nn

import globaltensor as gt

where, x = gt.placement.all("cpu"), torch.zeros(8, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))
torch.manual_seed(1)
drawn = torch.rand(1).item()
torch.manual_seed(1)
stages = gt.strategy(model, x, devices=2, pp=2)["stages"]      # a rank of two is in no mesh that rank 0 tries
assert [stage["ranks"] for stage in stages] == [[0], [1]], stages
for wrong, kind in (({"pins": ["nothing=tp:S(0)"]}, "PinError"), ({"global_batch": 3, "dp": 2}, "BatchError")):
    try:
        gt.strategy(model, x, devices=2, **wrong)
        raise AssertionError(f"{wrong} was planned")
    except gt.GlobalTensorError as error:
        assert type(error).__name__ == kind, error
strategy = gt.strategy(model, x, devices=2, global_batch=8, loss=lambda y: y.square().mean())
assert torch.rand(1).item() == drawn
a = gt.randn(4, 4, placement=where, sbp=gt.sbp.split(0))
assert (a @ a).full_tensor().shape == (4, 4)         # no rank is ahead
runner, _ = strategy.apply(model, lambda y, t: (y - t).square().mean(), torch.optim.AdamW)
runner.step(torch.ones(8, 8), torch.zeros(8, 8))
print("planned together")
