"""What torch's wrappers ask of a tensor, by which a global one knows them: it refuses those that take it for a part.

A wrapper of torch.distributed works on what each rank has for itself, and its first collective refuses a global tensor.
That may be steps after it was made, on some ranks only. So the calls by which it looks at what it is given tell it.
"""
from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from globaltensor.errors import GlobalTensorError, warnings_at_program
from globaltensor.runtime.torch_internals import compiling
from globaltensor.tracebacks import api_boundary, torch_boundary

if TYPE_CHECKING:
    from globaltensor.tensors.tensor_methods import TensorMethods
else:
    TensorMethods = torch.Tensor

# By the module that asks: what it would do, why not, and what to type.
_REFUSED = {
    "torch.distributed.fsdp":
        ("torch's fully_shard or replicate of a global model",
         "it splits what each rank has for itself, and a global parameter is one value on all ranks",
         "gt.parallelize and gt.zero(optimizer, stage=3, model=model), without fully_shard"),
    "torch.distributed.optim":
        ("torch's ZeroRedundancyOptimizer of a global model",
         "each rank steps some of the parameters and sends them to the others, and a global parameter is one value on "
         "all ranks",
         "gt.zero(torch.optim.AdamW(model.parameters())), of a model under gt.parallelize"),
    "torch.distributed.tensor":
        ("torch's DTensor of a global tensor, as a rank's part",
         "a DTensor is made of what each rank has for itself, and a global tensor is the whole value",
         "x.to_dtensor(), or DTensor.from_local(x.to_local(), ...)"),
}


def _refuse_for(caller: FrameType | None) -> None:
    """Raise where the caller is a module of torch's that would wrap a global tensor."""
    module = "" if caller is None else str(caller.f_globals.get("__name__"))
    for wrapper, row in _REFUSED.items():
        if module.startswith(wrapper):
            raise GlobalTensorError(*row)


class TorchMethods(TensorMethods):
    """The methods that torch's wrappers call, for `GlobalTensor`."""

    @property
    @api_boundary
    def fsdp_pre_all_gather(self) -> Any:
        """What fully_shard, and replicate, which is made of it, look for: each parameter's own way to be gathered."""
        raise GlobalTensorError(*_REFUSED["torch.distributed.fsdp"])

    @torch_boundary
    def type(self, *args: Any, **kwargs: Any) -> Any:          # for ZeroRedundancyOptimizer
        if not compiling():
            _refuse_for(sys._getframe(2).f_back)     # torch.typename lies between, and the boundary
        with warnings_at_program(self.is_complex() and not compiling()):         # that the imaginary part is lost
            return super().type(*args, **kwargs)

    @torch_boundary
    def view_as(self, other: torch.Tensor) -> Any:   # for DTensor.from_local
        if not compiling():
            _refuse_for(sys._getframe(2))
        return super().view_as(other)

    @torch_boundary
    def requires_grad_(self, requires_grad: bool = True) -> Any:     # for distribute_tensor, which need not send
        if not compiling():
            _refuse_for(sys._getframe(4))            # the method of GlobalTensor lies between, and two boundaries
        return super().requires_grad_(requires_grad)

    def _use_count(self) -> int:
        """How many hold this tensor in C++. torch.utils.swap_tensors, by which `module.to` and remove_parametrizations
        change a parameter, refuses one that a graph has saved. That graph keeps the value as it was; so it is told of
        no more than the node that would accumulate a gradient, which it makes raise in a backward pass to come."""
        count: int = super()._use_count()            # type: ignore[misc]  # not in torch's stubs
        if self.is_leaf and sys._getframe(1).f_globals.get("__name__") == "torch.utils":
            return min(count, 2 if self.requires_grad else 1)
        return count
