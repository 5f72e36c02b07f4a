"""Making the parameters of a module global: `gt.to_global(module, placement, sbp)` and `module.to_global(...)`.

The module stays what it is; its parameters and buffers are replaced in place. Tied parameters stay tied.
"""
from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from globaltensor.errors import SbpError
from globaltensor.layouts.placement import placement as Placement
from globaltensor.layouts.sbp import Sbp, SbpLike, broadcast, split
from globaltensor.tensors.convert import from_full
from globaltensor.tensors.global_tensor import GlobalTensor

M = TypeVar("M", bound=nn.Module)


def to_global(module: M, placement: Placement, sbp: SbpLike | Callable[[str, Any], SbpLike] = broadcast) -> M:
    """Replace every parameter and buffer by a global one of the same value (each process holds the same module).

    sbp   one for all; a function (name, parameter) -> sbp; or a dict of name patterns (as in fnmatch, the first that
          fits) -> sbp, where names that fit none are broadcast
    Those that are global already are boxed. Returns the module. Raises SbpError for a pattern that fits no name.
    """
    if isinstance(sbp, Mapping) and not _by_axis(sbp, placement):
        _check_patterns(module, sbp)
    made: dict[int, torch.Tensor] = {}
    for name, owner, key, tensor, kind in list(named_tensors(module)):
        if id(tensor) not in made:
            made[id(tensor)] = _moved(tensor, placement, _sbp_of(name, tensor, sbp, placement))
        getattr(owner, kind)[key] = made[id(tensor)]
    return module


def _moved(tensor: torch.Tensor, placement: Any, sbp: Any) -> torch.Tensor:
    with torch.no_grad():
        moved = (tensor.to_global(placement, sbp) if isinstance(tensor, GlobalTensor) else
                 from_full(tensor.detach(), placement, sbp))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved


def named_tensors(module: nn.Module) -> Any:
    """(name, owner, key, tensor, "_parameters" or "_buffers") of everything a module holds, tied ones each time."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(owner, kind).items():
                if tensor is not None:
                    yield f"{prefix}.{key}" if prefix else key, owner, key, tensor, kind


def stand_in(owner: nn.Module, key: str, tensor: torch.Tensor) -> None:
    """Let a tensor stand before a module's parameter, which a module looks up last, until `step_back`."""
    owner.__dict__[key] = tensor


def step_back(owner: nn.Module, key: str) -> None:
    owner.__dict__.pop(key, None)


def _by_axis(sbp: Mapping[str, Any], placement: Any) -> bool:
    """Is this dict by axis name, not by name pattern?"""
    return bool(placement.names) and set(sbp) <= set(placement.names)


def first_fit(rows: Mapping[str, Any], name: str, default: Any) -> Any:
    """What the first of the patterns stands for that fits a name."""
    return next((found for pattern, found in rows.items() if fnmatch.fnmatchcase(name, pattern)), default)


def _sbp_of(name: str, tensor: torch.Tensor, sbp: Any, placement: Any) -> Any:
    if callable(sbp) and not isinstance(sbp, (Sbp, type)) and sbp is not split:
        return sbp(name, tensor)
    if isinstance(sbp, Mapping) and not _by_axis(sbp, placement):
        return first_fit(sbp, name, broadcast)
    return sbp


def _check_patterns(module: nn.Module, sbp: Mapping[str, Any]) -> None:
    names = [name for name, *_ in named_tensors(module)]
    for pattern in sbp:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise SbpError(f"the pattern {pattern!r} fits no parameter or buffer of the module",
                           f"its names are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}",
                           "a pattern as in fnmatch, such as '*.weight'")
