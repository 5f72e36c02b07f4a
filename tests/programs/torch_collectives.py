"""torch's collectives and wrappers refuse global tensors on every rank, and say what to type. Of two processes.

CALLS has every public function of torch.distributed, and of its functional collectives, that takes a tensor, each with
a global tensor wherever a tensor may stand: as an operand, as a result, in a list, in a list of lists, in an object.
"""
from __future__ import annotations

import inspect
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import globaltensor as gt

warnings.simplefilter("ignore", FutureWarning)       # of what torch deprecates
P = gt.placement("cpu", [0, 1], axis_names=("dp",))
RANK = gt.rank()
WORLD = dist.group.WORLD
ALONE = [dist.new_group([rank]) for rank in (0, 1)][RANK]        # where one rank is the source, or the destination


def model():
    torch.manual_seed(0)
    return gt.parallelize(nn.Sequential(nn.Linear(4, 4)), P)


def one():
    return torch.zeros(4)


def parts():
    return [one(), one()]


def batched(x):
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - RANK), dist.P2POp(dist.irecv, one(), 1 - RANK)]):
        work.wait()


CALLS = {
    dist: {
        "all_reduce": [dist.all_reduce, lambda x: dist.all_reduce(x, async_op=True)],
        "all_reduce_coalesced": [lambda x: dist.all_reduce_coalesced([x])],
        "broadcast": [lambda x: dist.broadcast(x, 0)],
        "reduce": [lambda x: dist.reduce(x, 0)],
        "all_gather": [lambda x: dist.all_gather(parts(), x), lambda x: dist.all_gather([x, x], one()),
                       lambda x: dist.all_gather([one(), x], one())],
        "all_gather_coalesced": [lambda x: dist.all_gather_coalesced([parts()], [x]),
                                 lambda x: dist.all_gather_coalesced([[x, x]], [one()])],
        "all_gather_into_tensor": [lambda x: dist.all_gather_into_tensor(torch.zeros(8), x)],
        "all_gather_single": [lambda x: dist.all_gather_single(torch.zeros(8), x),
                              lambda x: dist.all_gather_single(x, torch.zeros(2))],
        "gather": [lambda x: dist.gather(x, parts() if RANK == 0 else None),
                   lambda x: dist.gather(one(), [x], RANK, ALONE)],
        "scatter": [lambda x: dist.scatter(x, [one()], RANK, ALONE), lambda x: dist.scatter(one(), [x], RANK, ALONE)],
        "reduce_scatter": [lambda x: dist.reduce_scatter(x, parts()), lambda x: dist.reduce_scatter(one(), [x, x])],
        "reduce_scatter_tensor": [lambda x: dist.reduce_scatter_tensor(torch.zeros(2), x)],
        "reduce_scatter_single": [lambda x: dist.reduce_scatter_single(torch.zeros(2), x)],
        "all_to_all": [lambda x: dist.all_to_all(parts(), [x, x]), lambda x: dist.all_to_all([x, x], parts())],
        "all_to_all_single": [lambda x: dist.all_to_all_single(one(), x), lambda x: dist.all_to_all_single(x, one())],
        "send": [lambda x: dist.send(x, 1) if RANK == 0 else dist.recv(x, 0)],
        "recv": [lambda x: dist.recv(x, 1 - RANK)],
        "isend": [lambda x: dist.isend(x, 1 - RANK)],
        "irecv": [lambda x: dist.irecv(x, 1 - RANK)],
        "batch_isend_irecv": [batched],
        "all_gather_object": [lambda x: dist.all_gather_object([None, None], {"loss": x})],
        "gather_object": [lambda x: dist.gather_object([x], [None], RANK, ALONE)],
        "broadcast_object_list": [lambda x: dist.broadcast_object_list([x], RANK, ALONE)],
        "scatter_object_list": [lambda x: dist.scatter_object_list([None], [x], RANK, ALONE)],
        "send_object_list": [lambda x: dist.send_object_list([x], 1 - RANK)],
    },
    functional: {
        "all_reduce": [lambda x: functional.all_reduce(x, "sum", WORLD)],
        "all_reduce_coalesced": [lambda x: functional.all_reduce_coalesced([x], "sum", WORLD)],
        "all_gather_tensor": [lambda x: functional.all_gather_tensor(x, 0, WORLD)],
        "all_gather_single": [lambda x: functional.all_gather_single(x, 0, WORLD)],
        "all_gather_tensor_autograd": [lambda x: functional.all_gather_tensor_autograd(x, 0, WORLD)],
        "all_gather_single_autograd": [lambda x: functional.all_gather_single_autograd(x, 0, WORLD)],
        "all_gather_into_tensor_coalesced": [lambda x: functional.all_gather_into_tensor_coalesced([x], WORLD)],
        "all_gather_single_coalesced": [lambda x: functional.all_gather_single_coalesced([x], WORLD)],
        "reduce_scatter_tensor": [lambda x: functional.reduce_scatter_tensor(x, "sum", 0, WORLD)],
        "reduce_scatter_single": [lambda x: functional.reduce_scatter_single(x, "sum", 0, WORLD)],
        "reduce_scatter_tensor_autograd": [lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, WORLD)],
        "reduce_scatter_single_autograd": [lambda x: functional.reduce_scatter_single_autograd(x, "sum", 0, WORLD)],
        "reduce_scatter_tensor_coalesced":
            [lambda x: functional.reduce_scatter_tensor_coalesced([x], "sum", [0], WORLD)],
        "reduce_scatter_single_coalesced":
            [lambda x: functional.reduce_scatter_single_coalesced([x], "sum", [0], WORLD)],
        "all_to_all_single": [lambda x: functional.all_to_all_single(x, [2, 2], [2, 2], WORLD)],
        "all_to_all_single_autograd": [lambda x: functional.all_to_all_single_autograd(x, [2, 2], [2, 2], WORLD)],
        "broadcast": [lambda x: functional.broadcast(x, 0, WORLD)],
        "permute_tensor": [lambda x: functional.permute_tensor(x, [1, 0], WORLD)],
        "wait_tensor": [functional.wait_tensor],
    },
    differentiable: {
        "all_reduce": [differentiable.all_reduce],
        "all_gather": [differentiable.all_gather],
        "all_to_all": [lambda x: differentiable.all_to_all([x, x], [x, x])],
        "all_to_all_single": [lambda x: differentiable.all_to_all_single(one(), x)],
        "broadcast": [lambda x: differentiable.broadcast(x, 0)],
        "gather": [differentiable.gather],
        "reduce": [lambda x: differentiable.reduce(x, 0)],
        "reduce_scatter": [lambda x: differentiable.reduce_scatter(one(), [x, x])],
        "scatter": [lambda x: differentiable.scatter([x, x])],
    },
}
for name in ("gather_single", "gather_into_tensor"):  # since torch 2.14
    if gather := getattr(dist, name, None):
        CALLS[dist][name] = [lambda x, gather=gather: gather(x, torch.zeros(8) if RANK == 0 else None, 0),
                             lambda x, gather=gather: gather(one(), x, RANK, ALONE)]
WRAPPERS = {
    "DistributedDataParallel": lambda x: DistributedDataParallel(model()),
    "fully_shard": lambda x: fully_shard(model()),  # where it is typed, not in the first forward pass
    "replicate": lambda x: replicate(model()),
    "FullyShardedDataParallel": lambda x: FullyShardedDataParallel(model(), device_id=torch.device("cpu")),
    "ZeroRedundancyOptimizer": lambda x: of_zero(model()),  # where it is typed, not in its first step
    "ZeroRedundancyOptimizer of buckets": lambda x: of_zero(model(), parameters_as_bucket_view=True),
    "ZeroRedundancyOptimizer beside DistributedDataParallel": lambda x: of_zero(model(), overlap_with_ddp=True),
    "ZeroRedundancyOptimizer of a part": lambda x: of_zero(nn.ModuleList([nn.Linear(4, 4), model()])),
    "PostLocalSGDOptimizer": lambda x: step_of_local_sgd(model(), x[None]),
}


def of_zero(net, **options):
    ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, **options)


def step_of_local_sgd(net, x):
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), PeriodicModelAverager(2, 0))
    net(x).sum().backward()
    optimizer.step()


TAKES = ("tensor", "tensors", "tensor_list", "output_tensor", "output_tensor_lists", "output_tensor_list", "output",
         "self", "inputs", "obj", "object_list", "scatter_object_input_list", "p2p_op_list")
NOT_OPERANDS = {"recv_object_list"}                  # it fills a list with whatever comes


def missing(module):
    """The public functions of a module that take tensors, and are not in the table."""
    public = {name: one for name, one in vars(module).items() if not name.startswith(("_", "legacy_"))
              and inspect.isfunction(one) and one.__module__.startswith("torch.distributed")
              and not name.endswith(("_inplace", "_backward", "_context"))}
    return {name for name, one in public.items() if set(inspect.signature(one).parameters) & set(TAKES)
            } - CALLS[module].keys() - NOT_OPERANDS


for module in CALLS:
    assert not missing(module), f"{module.__name__}: {sorted(missing(module))}"
ROWS = [(f"{module.__name__}.{name}", call) for module, rows in CALLS.items() for name, calls in rows.items()
        for call in calls] + list(WRAPPERS.items())
for name, call in ROWS:
    for sbp in (gt.sbp.broadcast, gt.sbp.split(0), gt.sbp.partial_sum):
        x = gt.from_full(torch.arange(4.0), P, sbp)
        try:
            call(x)
        except gt.GlobalTensorError as error:
            fix = "full_tensor()" if "object" in name else "gt.parallelize"
            assert fix in str(error) and "torch_collectives.py" in error.where, f"{name}: {error}"
        else:
            raise AssertionError(f"{name} of {sbp} was done")
        assert x.full_tensor().tolist() == [0, 1, 2, 3], f"{name} of {sbp} has changed its operand"
plain = torch.ones(2)                                # the same calls on what each rank has are torch's
dist.all_reduce(plain)
assert plain.tolist() == [2, 2]
of_ranks = [torch.zeros(1), torch.zeros(1)]
dist.all_gather(of_ranks, torch.tensor([float(RANK)]))
assert torch.cat(of_ranks).tolist() == [0, 1]
summed = torch.zeros(1)
dist.reduce_scatter(summed, [torch.tensor([float(RANK)]), torch.tensor([1.0])])
assert summed.tolist() == [1 + RANK]
with torch.inference_mode():
    dist.scatter(summed, [torch.tensor([5.0]), torch.tensor([6.0])] if RANK == 0 else None)
    assert summed.tolist() == [5 + RANK]
    try:
        dist.all_gather([gt.ones(1, placement=P, sbp="B")] * 2, torch.zeros(1))
    except gt.GlobalTensorError:
        pass
    else:
        raise AssertionError("all_gather of inference mode was done")
print("all is well")
