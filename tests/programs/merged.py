"""A step of a pipeline and a boxing, profiled on all ranks; the trace is written, and what was recorded is printed.

    python merged.py FILE      in one process, or one per rank
    python merged.py clocks    what is told of a clock that is 2.5 s ahead of that of rank 0
"""
import json
import sys
import time

import torch
from torch import nn

import globaltensor as gt
from globaltensor.debug.merged_trace import clock_offset

torch.manual_seed(0)
P = gt.placement("cpu", [0, 1])


def traced(file):
    places = [gt.placement("cpu", [0]), gt.placement("cpu", [1])]
    runner = gt.pipeline([nn.Sequential(nn.Linear(8, 6), nn.GELU()), nn.Linear(6, 8)], places, "1f1b",
                         micro_batches=3, loss=nn.functional.mse_loss)
    x = gt.randn(65, 7, placement=P, sbp=gt.sbp.split(0))

    def step():
        runner.step(torch.ones(6, 8), torch.zeros(6, 8))
        for dim in (1, 0, 1):
            x.to_global(sbp=gt.sbp.split(dim)).to_global(sbp=gt.sbp.broadcast)

    step()
    with gt.record() as moves:
        step()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    gt.export_chrome_trace(profile, file, pipeline=runner)
    print(json.dumps({"rank": gt.rank(), "moves": [[move.op, move.bytes] for move in moves]}))


def clocks():
    gt.init()
    ahead = 2_500_000_000 if gt.rank() else 0
    print(json.dumps({"rank": gt.rank(), "offset": clock_offset(lambda: time.time_ns() + ahead)}))


if __name__ == "__main__":
    clocks() if sys.argv[1] == "clocks" else traced(sys.argv[1])
