"""A pipeline's step and some boxings, recorded to a file: python recorded.py FILE, in one process or one per rank."""
import sys

import torch
from torch import nn

import globaltensor as gt

torch.manual_seed(0)
P = gt.placement("cpu", [0, 1])
runner = gt.pipeline([nn.Linear(8, 6), nn.Linear(6, 8)], [gt.placement("cpu", [0]), gt.placement("cpu", [1])], "1f1b",
                     micro_batches=3, loss=nn.functional.mse_loss)
x = gt.randn(65, 7, placement=P, sbp=gt.sbp.split(0))
with gt.record(file=sys.argv[1], pipeline=runner):
    runner.step(torch.ones(6, 8), torch.zeros(6, 8))
    x.to_global(sbp=gt.sbp.split(1)).to_global(sbp=gt.sbp.broadcast)
