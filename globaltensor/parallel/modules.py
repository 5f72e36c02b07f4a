"""Making the parameters of a module global: `gt.to_global(module, placement, sbp)` and `module.to_global(...)`; and
plain again: `module.to_local()`.

The module stays what it is, and so do its parameters: the same objects, with another value (parameter_swap.py).
"""
from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from globaltensor.errors import SbpError, expect
from globaltensor.layouts.layout import Layout
from globaltensor.layouts.placement import placement as Placement
from globaltensor.layouts.sbp import Sbp, SbpLike, broadcast, split
from globaltensor.parallel.optimizer_state import globalize_fused_state
from globaltensor.parallel.pretrained import learn_save_pretrained
from globaltensor.tensors.convert import from_full_of_model
from globaltensor.tensors.factories import empty
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.materialize import named_tensors, set_device_to_be
from globaltensor.tensors.parameter_swap import check_convertible, convert, weights_made_again
from globaltensor.tensors.redistribution import resolve_layout, to_local
from globaltensor.tracebacks import api_boundary

M = TypeVar("M", bound=nn.Module)


@api_boundary
def to_global(module: M, placement: Placement, sbp: SbpLike | Callable[[str, Any], SbpLike] = broadcast) -> M:
    """Give every parameter and buffer a global value, the same as before (each process holds the same module).

    sbp   one for all; a function (name, parameter) -> sbp; or a dict of name patterns (as in fnmatch, the first that
          fits) -> sbp, where names that fit none are broadcast
    Parameters stay the objects that they are: an optimizer made before goes on training them, and tied ones stay tied.
    (One that has taken steps keeps its plain state, which a fused optimizer refuses.) Those that are global already
    are boxed. Collective. Returns the module. Raises, before anything is changed, SbpError for a pattern that fits no
    name and for an sbp that does not fit a parameter, GlobalTensorError for a parameter that a forward pass without its
    backward, or `gt.zero`, holds on to.
    """
    check_module(module, placement, "to_global")
    if isinstance(sbp, Mapping) and not _by_axis(sbp, placement):
        _check_patterns(module, sbp)
    tensors = list(named_tensors(module))
    with weights_made_again(module):
        layouts: dict[int, Layout] = {}              # all before any is changed: an error leaves the module as it was
        for name, _, _, tensor, _ in tensors:
            check_convertible(tensor, name)
            if id(tensor) not in layouts:
                layouts[id(tensor)] = resolve_layout(placement, _sbp_of(name, tensor, sbp, placement), tensor.dim())
        converted: dict[int, torch.Tensor] = {}
        for name, owner, key, tensor, kind in tensors:
            if id(tensor) not in converted:          # tied ones are converted once, and stay tied
                own = layouts[id(tensor)].sbp
                converted[id(tensor)] = new = convert(tensor, partial(_place, name, placement, own))
                if new.is_meta:
                    set_device_to_be(new, placement.type)
            getattr(owner, kind)[key] = converted[id(tensor)]
    learn_save_pretrained(module)
    return module


@api_boundary
def module_to_local(module: M) -> M:
    """Give every global parameter and buffer, in place, what its `to_local()` is: this rank's part, in its memory.

    A module of broadcast parameters is plain then and whole, a copy on each rank that computes for itself. Of a weight
    that is split it has the rank's rows or columns alone, which its forward may not fit; for whole weights load
    `{name: t.full_tensor() for name, t in module.state_dict().items()}` into a plain module. Parameters stay the
    objects that they are, with their optimizers, and their gradients become parts too. Returns the module.

    Raises GlobalTensorError, before anything is changed, in a process that drives several ranks, or none of a tensor's,
    and for a parameter that a forward pass without its backward, or `gt.zero`, holds on to.
    """
    expect(module, nn.Module, "to_local of no module", "module.to_local()")
    tensors = [row for row in named_tensors(module) if isinstance(row[3], GlobalTensor)]
    with weights_made_again(module):
        for name, _, _, tensor, _ in tensors:
            check_convertible(tensor, name, torch.Tensor)
            to_local(tensor)                         # the errors of tensors that have no one local part
        converted: dict[int, torch.Tensor] = {}
        for _, owner, key, tensor, kind in tensors:
            if id(tensor) not in converted:
                converted[id(tensor)] = convert(tensor, to_local)
            getattr(owner, kind)[key] = converted[id(tensor)]
    return module


def check_module(module: Any, placement: Any, name: str) -> None:
    """The errors of arguments that are something else, or in another order."""
    expect(module, nn.Module, f"gt.{name} of no module", f"gt.{name}(module, placement)")
    resolve_layout(placement, broadcast, 0)


def _place(name: str, placement: Placement, sbp: Any, tensor: torch.Tensor) -> GlobalTensor:
    """A tensor that every process holds whole, or a global one, in this layout; one on the meta device stays there."""
    if tensor.is_meta:
        return empty(tensor.shape, placement=placement.of_type("meta"), sbp=sbp, dtype=tensor.dtype)
    if isinstance(tensor, GlobalTensor):
        return tensor.to_global(placement, sbp)
    return from_full_of_model(tensor, name, placement, sbp)


def _by_axis(sbp: Mapping[str, Any], placement: Any) -> bool:
    """Is this dict by axis name, not by name pattern?"""
    return bool(placement.names) and set(sbp) <= set(placement.names)


def first_fit(rows: Mapping[str, Any], name: str, default: Any) -> Any:
    """What the first of the patterns stands for that fits a name."""
    return next((row for pattern, row in rows.items() if fnmatch.fnmatchcase(name, pattern)), default)


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


register_optimizer_step_pre_hook(api_boundary(globalize_fused_state))
