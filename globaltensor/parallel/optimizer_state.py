"""What an optimizer keeps of global parameters: tensors that lie like what it steps.

State of one device is plain, such as `load_state_dict` takes from a checkpoint of plain torch. Ops that are done one by
one take it as it is; a fused step does not, as it writes parameters and state at once.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from globaltensor.boxings.redistribute import redistribute
from globaltensor.layouts.sbp import broadcast
from globaltensor.runtime.torch_internals import compiling
from globaltensor.tensors.convert import from_full
from globaltensor.tensors.global_tensor import GlobalTensor


def split_state(state: Mapping[str, Any], p: Any, part: Any) -> dict[str, Any]:
    """What the optimizer has kept of a parameter, for what it steps from now on. What has another shape than that, such
    as a count of steps, stays as it is."""
    splits = {key: t if isinstance(t, GlobalTensor) else from_full(t, p.placement, broadcast)
              for key, t in state.items() if isinstance(t, torch.Tensor) and t.dim() and t.shape == part.shape}
    with torch.no_grad():
        parts = redistribute([*splits.values()], [part.spec.layout] * len(splits), "zero")
        return {**state, **{key: t.to(part.dtype) if t.dtype == p.dtype else t for key, t in zip(splits, parts)}}


def lay_like(state: Any, p: Any, part: Any) -> None:
    """Let what is as large as the part lie like it, and have its dtype where it has that of the parameter. What was
    offloaded to another type of device stays there."""
    if isinstance(state, dict):
        lies = part.placement, part.sbp, part.dtype
        others = {key: t for key, t in state.items() if not isinstance(t, GlobalTensor)
                  or t.placement.type == part.placement.type and (t.placement, t.sbp, t.dtype) != lies}
        state.update(split_state(others, p, part))


def globalize_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer's state that was loaded, from one device or of whole parameters, the layouts of what it
    steps."""
    for p, state in optimizer.state.items():
        if isinstance(p, GlobalTensor):
            lay_like(state, p, p)


def globalize_fused_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step of any optimizer."""
    if not compiling() and any(group.get("fused") for group in optimizer.param_groups):
        globalize_state(optimizer)
