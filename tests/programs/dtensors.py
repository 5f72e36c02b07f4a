"""DTensors become global tensors and come back: values, gradients, memory, and what is refused. Of two processes, a few
cases; of four, all."""
from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import globaltensor as gt

gt.init()
ALL = gt.world_size() == 4
MESHES = [init_device_mesh("cpu", (gt.world_size(),))]
if ALL:
    MESHES.insert(0, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
HOW = [Shard(0), Shard(1), Replicate(), Partial(), Partial("max"), Partial("avg")]
SEED = 5


def values(shape):
    torch.manual_seed(SEED)
    return torch.randn(shape)


def spread(mesh, how, shape):
    """A DTensor of that value which lies so; what is pending is not the same on all ranks."""
    d = distribute_tensor(values(shape), mesh, [p if p.is_shard() else Replicate() for p in how])
    if not any(p.is_partial() for p in how):
        return d
    index = [i for i, p in zip(mesh.get_coordinate(), how) if p.is_partial()]
    local = d.to_local() * (1 + sum(index))
    return DTensor.from_local(local, mesh, how, run_check=False, shape=d.shape, stride=d.stride())


def check_round_trip(mesh, how, shape, even):
    d = spread(mesh, how, shape)
    with gt.record() as moves:
        x = gt.from_dtensor(d)
        back = x.to_dtensor(mesh)
    assert x.placement == gt.from_mesh(mesh) and x.shape == d.shape and x.is_global
    assert even <= (not moves), moves
    if not moves and not any(p.is_partial() and p.reduce_op == "avg" for p in how):
        part = x.shards[gt.rank()]
        assert part.data_ptr() == d.to_local().data_ptr() == back.to_local().data_ptr()
        assert tuple(back.placements) == tuple(d.placements)
    expected = d.full_tensor()
    torch.testing.assert_close(x.full_tensor(), expected, msg=lambda text: f"{how} {shape}: {text}")
    torch.testing.assert_close(back.full_tensor(), expected, msg=lambda text: f"{how} {shape}, back: {text}")


def check_gradients(mesh, how, shape):
    """DTensor -> global -> DTensor: the gradient of each is that of plain torch."""
    plain = values(shape).requires_grad_()
    (plain * 2).pow(3).sum().backward()
    d = distribute_tensor(values(shape), mesh, how).requires_grad_()
    x = gt.from_dtensor(d * 2)
    x.pow(3).sum().backward()
    assert isinstance(d.grad, DTensor)
    torch.testing.assert_close(d.grad.full_tensor(), plain.grad)
    x = gt.from_full(values(shape), gt.from_mesh(mesh), tuple(how)).requires_grad_()
    (x * 2).to_dtensor().pow(3).sum().full_tensor().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


def check_meshes():
    where = gt.placement("cpu", [[3, 1], [0, 2]], ("a", "b"))
    mesh = gt.to_mesh(where)
    assert mesh.mesh.tolist() == [[3, 1], [0, 2]] and mesh.mesh_dim_names == ("a", "b")
    assert gt.from_mesh(mesh) == where and gt.to_mesh(where) is mesh
    own = gt.from_mesh(MESHES[0]["tp"])              # a sub-mesh: the ranks of this process's row
    assert own == gt.placement("cpu", [[0, 1], [2, 3]][gt.rank() // 2], ("tp",))
    part = gt.to_mesh(gt.placement("cpu", [2, 1]))
    x = gt.from_full(values((4, 3)), gt.placement("cpu", [2, 1]), gt.sbp.split(0))
    d = x.to_dtensor(part)
    assert d.to_local().shape == ((2, 3) if gt.rank() in (1, 2) else (0,))


def check_sub_mesh():
    """Two groups of ranks, each with a DTensor of its own on its sub-mesh."""
    group = gt.rank() // 2
    d = distribute_tensor(values((4, 3)) * (group + 1), MESHES[0]["tp"], [Shard(0)])
    y = gt.from_dtensor(d).exp().to_global(sbp=gt.sbp.broadcast).to_dtensor(MESHES[0]["tp"])
    torch.testing.assert_close(y.to_local(), (values((4, 3)) * (group + 1)).exp())


def check_refusals():
    mesh, x = MESHES[-1], gt.ones(4, placement=gt.from_mesh(MESHES[-1]), sbp=gt.sbp.split(0))
    d = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    for mixed in (lambda: x + d, lambda: d + x, lambda: torch.cat([d, x]), lambda: d.add_(x), lambda: x.copy_(d),
                  lambda: gt.from_full(d, x.placement, "B")):
        with pytest.raises(gt.GlobalTensorError, match=r"a DTensor(.|\n)*try:   gt.from_dtensor\(t\), or x.to_dtensor"):
            mixed()
    with pytest.raises(gt.SbpError, match="has no sbp"):
        gt.from_dtensor(DTensor.from_local(torch.ones(4), mesh, [Partial("product")], run_check=False))
    whole = gt.ones(4, placement=gt.from_mesh(mesh), sbp=gt.sbp.broadcast)
    layer = gt.parallelize(torch.nn.Linear(4, 4), gt.from_mesh(mesh))
    for nested in (lambda: DTensor.from_local(x, mesh, [Shard(0)], run_check=False),
                   lambda: DTensor.from_local(whole, mesh, [Replicate()], run_check=False),
                   lambda: DTensor.from_local(x, mesh, [Shard(0)], shape=x.shape, stride=x.stride()),
                   lambda: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None),
                   lambda: parallelize_module(layer, mesh, ColwiseParallel(), src_data_rank=None)):
        with pytest.raises(gt.GlobalTensorError, match=r"DTensor of a global tensor(.|\n)*try:   x.to_dtensor\(\)"):
            nested()
    d = DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False)
    d._local_tensor = x                              # in a way that torch has not yet
    with pytest.raises(gt.GlobalTensorError, match="whose part is a global tensor"):
        gt.from_dtensor(d)
    with pytest.raises(gt.PlacementError, match="on another mesh"):
        x.to_dtensor(init_device_mesh("cpu", (gt.world_size(), 1)))
    with pytest.raises(gt.ArgumentError, match="from_dtensor of no DTensor"):
        gt.from_dtensor(torch.ones(4))


for mesh in MESHES:
    for how in itertools.product(HOW, repeat=mesh.ndim):
        kinds = {p.reduce_op for p in how if p.is_partial()}
        if len(kinds) < 2:                           # which torch refuses
            check_round_trip(mesh, how, (8, 4), True)
            check_round_trip(mesh, how, (5, 3), False)
    for how in itertools.product(HOW[:3], repeat=mesh.ndim):
        check_gradients(mesh, how, (5, 6))
if ALL:
    check_meshes()
    check_sub_mesh()
check_refusals()
print("all is well")
