"""torch's names for distributed tensors, on global tensors: a program in torch's style changes its imports.

    from globaltensor.dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from globaltensor.dtensor import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

What these make are global tensors, whose placement is a `DeviceMesh` of ours: ops, random numbers, `gt.record` and the
checks are this library's; `to_local`, `redistribute`, `device_mesh` and `placements` are torch's, gradients included. A
part is cut as this library cuts, as equal as can be, where `torch.chunk` leaves the last one short.

torch's own DTensors and meshes are taken and given by `gt.from_dtensor`, `x.to_dtensor()`, `gt.from_mesh` and
`gt.to_mesh`.
"""
from __future__ import annotations

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from globaltensor.dtensor.api import (
    DTensor,
    distribute_module,
    distribute_tensor,
    local_map,
    loss_parallel,
)
from globaltensor.dtensor.device_mesh import DeviceMesh, init_device_mesh
from globaltensor.dtensor.factories import empty, full, linspace, logspace, ones, rand, randn, zeros
from globaltensor.dtensor.fsdp_module import FSDPModule, register_fsdp_forward_method
from globaltensor.dtensor.fully_sharded import fully_shard
from globaltensor.dtensor.styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

__all__ = ["ColwiseParallel", "DTensor", "DeviceMesh", "FSDPModule", "ParallelStyle", "Partial", "Placement",
           "PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput", "Replicate", "RowwiseParallel",
           "SequenceParallel", "Shard", "distribute_module", "distribute_tensor", "empty", "full", "fully_shard",
           "init_device_mesh", "linspace", "local_map", "logspace", "loss_parallel", "ones", "parallelize_module",
           "rand", "randn", "register_fsdp_forward_method", "zeros"]
