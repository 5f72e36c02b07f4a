"""Gradients of gradients through `to_local` and `from_local`, and by torch.func, one rank a process."""
import torch
from autograd_functions import differentiated_again, of_a_batch
from torch.distributed.tensor import Shard, distribute_tensor

import globaltensor as gt
from globaltensor.dtensor.own_weights import OwnCopy

B, S, P = gt.sbp.broadcast, gt.sbp.split, gt.sbp.partial_sum
place = gt.placement("cpu", range(gt.world_size()))
whole = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) / 7


def twice(function, x):
    first, = torch.autograd.grad(function(x), x, create_graph=True)
    (first ** 2).sum().backward()
    return x.grad


def thrice(function, x):
    first, = torch.autograd.grad(function(x), x, create_graph=True)
    second, = torch.autograd.grad((first ** 2).sum(), x, create_graph=True)
    (second ** 2).sum().backward()
    return x.grad


def through_parts(x):
    """The sum of x ** 3 over the whole, made of each rank's part of x."""
    back = gt.from_local(x.to_local() ** 3, place, x.sbp)
    return back.sum()


expected = twice(lambda x: (x ** 3).sum(), whole.clone().requires_grad_())
for sbp in (S(0), S(1)):
    found = twice(through_parts, gt.from_full(whole, place, sbp).requires_grad_())
    torch.testing.assert_close(found.full_tensor(), expected)

# of which torch works out shapes on the meta device, where a plain operand has no values to compare
found = torch.func.hessian(lambda v: (v ** 3).sum())(gt.from_full(whole[0], place, S(0)))
torch.testing.assert_close(found.full_tensor(), torch.diag(6 * whole[0]))
on_meta = gt.placement("meta", range(gt.world_size()))
pieces = gt.zeros(6, 5, placement=on_meta, sbp=P)
for sbp in (S(0), S(1), B):
    assert pieces.to_global(sbp=sbp).to_local().shape == gt.zeros(6, 5, placement=place, sbp=sbp).to_local().shape
assert (pieces + torch.ones(5, device="meta")).shape == (6, 5)

part = whole[gt.rank()::gt.world_size()].clone()
for sbp in (S(0), P, B):
    mine = part.clone().requires_grad_()
    found = twice(lambda x, sbp=sbp: (gt.from_local(x, place, sbp) ** 3).full_tensor().sum(), mine)
    parts = [whole[r::gt.world_size()].clone().requires_grad_() for r in range(gt.world_size())]
    total = (torch.cat(parts) if sbp == S(0) else sum(parts) if sbp == P else parts[0]) ** 3
    first = torch.autograd.grad(total.sum(), parts, create_graph=True, materialize_grads=True)
    sum((g ** 2).sum() for g in first).backward()
    if sbp == S(0):                                  # of a sum every rank squares what all have alike
        torch.testing.assert_close(found, parts[gt.rank()].grad)

# where gradients that come in can be differentiated, too
mesh = gt.dtensor.init_device_mesh("cpu", (gt.world_size(),))
theirs = torch.distributed.init_device_mesh("cpu", (gt.world_size(),))


def on_a_placement(x):
    return gt.from_local(x.to_local() ** 3, place, x.sbp).square().sum()


def on_a_mesh(x):
    return gt.dtensor.DTensor.from_local(x.to_local() ** 3, mesh, [gt.dtensor.Shard(0)]).square().sum()


def copies_of_ranks(x):
    return OwnCopy.apply(x ** 3).square().sum()           # whose gradients are averaged


def among_dtensors(x):
    ours = gt.from_dtensor(x).to_global(sbp=S(1))
    return (ours ** 3).to_dtensor().square().sum()


expected = thrice(lambda x: (x ** 6).sum(), whole.clone().requires_grad_())
programs = ((on_a_placement, gt.from_full(whole, place, S(0))),
            (on_a_mesh, gt.dtensor.distribute_tensor(whole, mesh, [gt.dtensor.Shard(0)])),
            (copies_of_ranks, gt.dtensor.distribute_tensor(whole, mesh, [gt.dtensor.Replicate()])),
            (among_dtensors, distribute_tensor(whole, theirs, [Shard(0)])))
with differentiated_again() as names:
    for program, x in programs:
        torch.testing.assert_close(thrice(program, x.requires_grad_()).full_tensor(), expected)
assert names >= {"PartOnMesh", "OwnPart", "OwnCopy", "_MeanOfRanks", "FromDTensor", "ToDTensor", "ToLocal",
                 "Spread"}, names



def at_once(function, x):
    """Through two equal gradients of what the function gives."""
    x = x.detach().requires_grad_()
    first, = torch.autograd.grad(function(x), x, torch.ones(2).double(), is_grads_batched=True, create_graph=True)
    (first ** 2).sum().backward()
    return x.grad


expected = at_once(lambda x: (x ** 6).sum(), whole)
with of_a_batch() as names:
    for program, x in programs[:3]:                  # torch has no batches for its DTensors
        torch.testing.assert_close(at_once(program, x).full_tensor(), expected)
assert names >= {"PartOnMesh", "OwnPart", "ToLocal", "FromLocal"}, names

if gt.rank() == 0:
    print("as plain torch")
