"""DTensor.from_local of parts cut as torch.chunk cuts, and as here: the same values, gradients in the part's cut."""
import torch

import globaltensor as gt
from globaltensor.dtensor import DTensor, Shard, distribute_tensor, init_device_mesh


def of_torch(t, sizes, at):
    """A rank's part, as torch's DTensor cuts dim 0 along the axes of a mesh."""
    for parts, i in zip(sizes, at):
        t = [*t.chunk(parts), *[t[:0]] * parts][i]
    return t


n, rank = gt.world_size(), gt.rank()
for sizes, at in (((n,), (rank,)), ((2, n // 2), divmod(rank, n // 2))):
    mesh, how = init_device_mesh("cpu", sizes), [Shard(0)] * len(sizes)
    for rows in range(1, 2 * n + 2):
        whole = torch.arange(2. * rows).view(rows, 2) + 1
        for part in (of_torch(whole, sizes, at), distribute_tensor(whole, mesh, how).to_local()):
            t = part.clone().requires_grad_()
            x = DTensor.from_local(t, mesh, how, shape=whole.shape, stride=whole.stride())
            assert torch.equal(x.full_tensor(), whole), (sizes, rows, x.full_tensor())
            grad, = torch.autograd.grad((x * x * x).sum(), t, create_graph=True)
            again, = torch.autograd.grad((grad * part).sum(), t)
            assert torch.equal(grad, 3 * part * part) and torch.equal(again, 6 * part * part), (sizes, rows, grad)
if n == 4:                                           # one part fits each way, but they do not fit together
    mesh, mixed = init_device_mesh("cpu", (n,)), (2, 2, 1, 1)[rank]
    try:
        DTensor.from_local(torch.ones(mixed, 2), mesh, [Shard(0)], shape=(5, 2))
    except gt.errors.ShapeError as error:
        assert f"a part of [{mixed}, 2] on rank {rank}" in str(error) and "as torch cuts" in str(error), error
print("each in its own cut")
