"""torch's `MixedPrecisionPolicy` of a module under fully_shard: in which dtypes it works, and what goes in and out.

    param_dtype            weights are gathered in it, and inputs are cast to it; the optimizer steps the parameters
    reduce_dtype           in which gradients are sent; by default that of the weights. They are added up in float32
    output_dtype           what the module gives is cast to it
    cast_forward_inputs    whether inputs are cast
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from globaltensor.errors import ArgumentError
from globaltensor.runtime.torch_internals import tree_map_only
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.reduce_dtype import set_grad_reduce_dtype
from globaltensor.tracebacks import api_boundary

if TYPE_CHECKING:                                    # the import takes long, and who has a policy has done it
    from torch.distributed.fsdp import MixedPrecisionPolicy


def precision_of(policy: Any) -> MixedPrecisionPolicy | None:
    """The policy, if it asks for anything. Raises ArgumentError for what is none, or has dtypes that are none."""
    if policy is None:
        return None
    if type(policy).__name__ != "MixedPrecisionPolicy":
        raise ArgumentError(f"fully_shard(mp_policy={policy!r})", "that is not a MixedPrecisionPolicy",
                            "mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)")
    dtypes = (policy.param_dtype, policy.reduce_dtype, policy.output_dtype)
    for dtype in dtypes:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(f"fully_shard(mp_policy={policy})", f"{dtype!r} is not a floating-point dtype",
                                "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)")
    return None if dtypes == (None, None, None) else policy


def set_precision(module: nn.Module, precision: MixedPrecisionPolicy, parameters: list[GlobalTensor]) -> None:
    """Cast what goes into the module and what comes out, and send the gradients of these parameters as it says."""
    if precision.param_dtype is not None and precision.cast_forward_inputs:
        cast = _caster(precision.param_dtype)
        module.register_forward_pre_hook(api_boundary(lambda module, args, named: (cast(args), cast(named))),
                                         with_kwargs=True)
    if precision.output_dtype is not None:
        cast_out = _caster(precision.output_dtype)
        module.register_forward_hook(api_boundary(lambda module, args, out: cast_out(out)))
    if (sent := precision.reduce_dtype or precision.param_dtype) is not None:
        set_grad_reduce_dtype([p for p in parameters if p.is_floating_point() and p.requires_grad], sent)


def _caster(dtype: torch.dtype) -> Callable[[Any], Any]:
    def cast(x: Any) -> Any:
        """Floating-point tensors, in whatever they are."""
        return tree_map_only(object, cast_leaf, x)

    def cast_leaf(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(dtype) if x.is_floating_point() else x
        if not dataclasses.is_dataclass(x) or isinstance(x, type):
            return x
        before = {field.name: getattr(x, field.name) for field in dataclasses.fields(x) if field.init}
        after = {name: cast(value) for name, value in before.items()}
        return x if all(after[name] is before[name] for name in before) else dataclasses.replace(x, **after)
    return cast
