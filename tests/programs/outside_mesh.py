"""Parts of tensors on a mesh that leaves the last rank out: all ranks know the same shapes, values and gradients."""
import torch

import globaltensor as gt
from globaltensor.dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor, local_map

full = torch.arange(8.).view(4, 2)
mesh = DeviceMesh("cpu", [0, 1])
for how, out, function, oracle in (
        ([Shard(0)], [Shard(0)], lambda a: a * 2, lambda a: a * 2),
        ([Shard(0)], [Partial()], lambda a: a.sum(0), lambda a: a.sum(0)),
        ([Shard(1)], [Shard(0)], lambda a: a.t().contiguous(), lambda a: a.t()),
        ([Replicate()], [Replicate()], lambda a: a @ a.t(), lambda a: a @ a.t())):
    x = distribute_tensor(full.clone().requires_grad_(), mesh, how)
    plain = full.clone().requires_grad_()
    y = local_map(function, out_placements=out, in_placements=(how,), device_mesh=mesh)(x)
    want = oracle(plain)
    assert y.shape == want.shape and torch.equal(y.full_tensor(), want), (how, y)
    (y * y).sum().backward()
    (want * want).sum().backward()
    assert torch.equal(x.grad.full_tensor(), plain.grad), (how, x.grad)
x = distribute_tensor(full, mesh, [Shard(0)])
z = DTensor.from_local(x.to_local() * 2, mesh, [Shard(0)], shape=x.shape)
assert z.shape == full.shape and torch.equal(z.full_tensor(), full * 2)
try:
    z = DTensor.from_local(x.to_local() * 2, mesh, [Shard(0)])
except gt.errors.ShapeError as error:
    print("outside:", error.why)
else:
    assert z.shape == full.shape
