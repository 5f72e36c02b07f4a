"""A model that is built on the meta device and started by the ranks of a job: the memory that it takes.

Rank 0 prints how many times its parts the peak of memory grew by, of the rank where that is most.
"""
import sys

import torch
from torch import nn

import globaltensor as gt
from globaltensor.runtime.agreement import gather_objects

WIDTH, LAYERS = int(sys.argv[1]), int(sys.argv[2])


def memory(line):
    """Bytes, as the kernel counts them for this process."""
    with open("/proc/self/status") as status:
        return next(int(row.split()[1]) * 1024 for row in status if row.startswith(line))


P = gt.placement("cpu", list(range(gt.world_size())), ("tp",))
gt.manual_seed(5)
gt.materialize(gt.parallelize(nn.Linear(8, 8, device="meta"), P, {"weight": {"tp": gt.sbp.split(0)}}))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")                                  # the peak begins anew
before = memory("VmRSS")
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
gt.parallelize(model, P, {"*.weight": {"tp": gt.sbp.split(0)}})
gt.materialize(model)
parts = sum(shard.nbytes for p in model.parameters() for shard in p.shards.values())
most = max(gather_objects((memory("VmHWM") - before) / parts, "memory"))
assert all(p.shards[gt.rank()].isfinite().all() for p in model.parameters())
if gt.rank() == 0:
    print(parts, most)
