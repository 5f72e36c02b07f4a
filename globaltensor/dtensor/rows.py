"""Each rank's own rows and the batch of which they are a part: what torch's data parallelism means by a gradient.

Every rank computes a loss of its own rows, and the gradient of a parameter is the mean of the ranks' gradients. Of
global tensors there is one loss, and its gradient. So a gradient is divided by the number of ranks where a batch is
taken apart into rows, and multiplied by it where rows are put together: what a rank computes of its rows between the
two, and the gradients of the rows it began with, are then as in torch. A gradient that is differentiated itself passes
the same places again, the other way round each time.
"""
from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.tensor import Shard

from globaltensor.dtensor.api import DTensor, on_mesh
from globaltensor.dtensor.device_mesh import DeviceMesh
from globaltensor.runtime.world import world
from globaltensor.tensors.convert import from_full
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.linear_maps import row_by_row


def batch_of(x: torch.Tensor, mesh: DeviceMesh) -> GlobalTensor:
    """Plain rows of each rank as one batch, split along the mesh. In a process that drives several ranks a plain tensor
    is the one program's, and the whole batch."""
    along = [Shard(0)] * mesh.ndim
    if len(world().local_ranks) > 1:
        return from_full(x, mesh, along)
    whole = DTensor.from_local(x, mesh, along)
    _scale_gradient(whole, mesh.size())
    return whole


def rows_of(x: Any) -> Any:
    """This rank's part, plain; in a process that drives several ranks the tensor as it is. Where it is split, the
    gradients of all ranks' parts are averaged."""
    if not on_mesh(x) or len(world().local_ranks) > 1:
        return x
    part = x.to_local()
    _scale_gradient(part, 1 / prod(n for n, s in zip(x.placement.shape, x.sbp) if s.is_split))
    return part


def _scale_gradient(x: torch.Tensor, factor: float) -> None:
    if x.requires_grad and factor != 1:
        scaled = row_by_row(lambda _, grad: _Crossing.apply(grad, factor, 1.0))
        x.register_hook(lambda grad: scaled(None, grad) if torch.is_grad_enabled() else grad * factor)


class _Crossing(torch.autograd.Function):
    """What passes between rows and the batch is multiplied by `factor`, and what comes back by `back`. (A product,
    differentiated, would multiply by the same again.)"""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float, back: float) -> Any:
        ctx.factor, ctx.back = factor, back
        return x * factor

    @staticmethod
    @row_by_row
    def backward(ctx: Any, grad: Any) -> tuple[Any, None, None]:
        return _Crossing.apply(grad, ctx.back, ctx.factor), None, None
