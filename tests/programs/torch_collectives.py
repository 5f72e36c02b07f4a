"""torch's collectives and wrappers refuse global tensors on every rank, and say what to type. Of two processes."""
from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import globaltensor as gt

P = gt.placement("cpu", [0, 1], axis_names=("dp",))


def model():
    torch.manual_seed(0)
    return gt.parallelize(nn.Sequential(nn.Linear(4, 4)), P)


def parts():
    return [torch.zeros(4), torch.zeros(4)]


CALLS = {
    "all_reduce": dist.all_reduce,
    "all_reduce(async_op=True)": lambda x: dist.all_reduce(x, async_op=True),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_gather": lambda x: dist.all_gather(parts(), x),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(torch.zeros(8), x),      # which torch deprecates
    "all_to_all": lambda x: dist.all_to_all(parts(), [x, x]),
    "send": lambda x: dist.send(x, 1) if gt.rank() == 0 else dist.recv(x, 0),
    "functional all_reduce": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD),
    "DistributedDataParallel": lambda x: DistributedDataParallel(model()),
    "fully_shard": lambda x: fully_shard(model())(x[None]),
}

for name, call in CALLS.items():
    for sbp in (gt.sbp.broadcast, gt.sbp.split(0), gt.sbp.partial_sum):
        x = gt.from_full(torch.arange(4.0), P, sbp)
        try:
            call(x)
        except gt.GlobalTensorError as error:
            assert "gt.parallelize" in str(error) and "torch_collectives.py" in error.where, f"{name}: {error}"
        else:
            raise AssertionError(f"{name} of {sbp} was done")
        assert x.full_tensor().tolist() == [0, 1, 2, 3], f"{name} of {sbp} has changed its operand"
plain = torch.ones(2)                                # the same calls on what each rank has are torch's
dist.all_reduce(plain)
assert plain.tolist() == [2, 2]
print("all is well")
