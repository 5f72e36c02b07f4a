"""Ops of which torch reads values, or strides, before it dispatches them: taken at the key of global tensors alone."""
from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from globaltensor.errors import GlobalTensorError, warnings_at_program, where
from globaltensor.layouts.global_like import is_global
from globaltensor.runtime.memory import require
from globaltensor.runtime.torch_internals import (
    OWN_KEYS,
    ExcludeDispatchKeys,
    OpOverload,
    compiling,
    is_of_a_trace,
    reaching_subclasses,
)
from globaltensor.tensors.full_value import whole_value
from globaltensor.tensors.lookup import check_classes
from globaltensor.tensors.redistribution import to_layout
from globaltensor.tracebacks import api_boundary, note_on_torch_error, torch_boundary

aten = torch.ops.aten


def may_take_data(x: Any, value: Any) -> bool:
    """May `x.data = value` be done, and may a module change its parameter that way?"""
    return is_global(x) and is_global(value)


@torch_boundary
def assign(x: Any, index: Any, value: Any) -> None:
    """x[index] = value, as torch does it; but of a value without memory it would look at the sizes."""
    if isinstance(value, torch.Tensor) and not is_global(value) and not is_of_a_trace(value):
        require(value, "the value of an assignment x[...] = t")
    with warnings_at_program(loses_part(x, value)):
        torch.Tensor.__setitem__(x, index, value)


def loses_part(x: torch.Tensor, value: Any) -> bool:
    """Does torch warn, where this is written to x, that the imaginary part is lost?"""
    return isinstance(value, torch.Tensor) and value.is_complex() and not x.is_complex() and not compiling()


def new_plain(x: torch.Tensor, data: Any, options: dict[str, Any]) -> torch.Tensor:
    """A plain tensor of this data. torch warns of data that is a tensor."""
    with warnings_at_program(isinstance(data, torch.Tensor) and not compiling()):
        return torch.empty(0, dtype=x.dtype, device=x.device).new_tensor(data, **options)


def one_hot(x: Any, num_classes: int = -1) -> torch.Tensor:
    """torch's own, after a look at the values, of which a pending sum has only terms."""
    if is_global(x) and x.dtype == torch.int64:      # torch refuses the others
        x = to_layout(x, x.spec.layout.without_partials)
        if num_classes == -1 and x.numel():
            num_classes = max(int(x.max().item()), 0) + 1
        check_classes(x, num_classes)
    with ExcludeDispatchKeys(OWN_KEYS):
        # torch compares where it cannot scatter, and a comparison has the strides of what is compared
        return aten.one_hot.default(aten.contiguous.default(x), num_classes)


def tensor_split(x: Any, indices: Any, dim: int = 0) -> list[torch.Tensor]:
    """torch's own, which reads the indices from memory."""
    if is_global(indices):
        indices = whole_value(indices)
    else:
        require(indices, "the indices of tensor_split")
    with ExcludeDispatchKeys(OWN_KEYS):
        return aten.tensor_split.tensor_indices_or_sections(x, indices, dim)


def fill_diagonal(x: torch.Tensor, value: Any, wrap: bool = False) -> torch.Tensor:
    """As views of x, where torch goes by strides and an offset in memory, which not every view has here."""
    if x.dim() < 2 or x.dim() > 2 and len(set(x.shape)) > 1:
        with ExcludeDispatchKeys(OWN_KEYS):
            return aten.fill_diagonal_.default(x, value, wrap)       # which raises
    rows, columns = x.shape[:2]
    for start in range(0, rows if wrap and x.dim() == 2 and rows > columns else 1, columns + 1):
        diagonal = x[start:]
        while diagonal.dim() > 1:
            diagonal = diagonal.diagonal()
        diagonal.fill_(value)
    return x


_WARNS = ("__float__", "__complex__")
_told = False                                        # that a gradient ends there


def _warns_of_gradient(x: torch.Tensor) -> bool:
    """Does torch warn that a gradient ends there? It does once, unless it is to do so always."""
    global _told
    if not x.requires_grad or compiling() or _told and not torch.is_warn_always_enabled():
        return False
    _told = True
    return True


def _read_within(name: str) -> Callable[[torch.Tensor], Any]:
    """One of torch's conversions to a Python number, also where torch itself asks for it: `torch.tensor([x, y])`."""
    own: Callable[[torch.Tensor], Any] = getattr(torch.Tensor, name)

    @wraps(own)
    def number(x: torch.Tensor) -> Any:
        try:
            with reaching_subclasses(), warnings_at_program(name in _WARNS and _warns_of_gradient(x)):
                return own(x)
        except (RuntimeError, TypeError, ValueError) as error:       # of several elements, mostly
            if not isinstance(error, GlobalTensorError):
                note_on_torch_error(error, f"  where: {where()}")
            raise

    return api_boundary(number)


# in this order, __float__, ...
NUMBERS: Any = [_read_within(f"__{name}__") for name in ("float", "int", "index", "bool", "complex")]
KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten.one_hot.default: one_hot, aten.fill_diagonal_.default: fill_diagonal,
    aten.tensor_split.tensor_indices_or_sections: tensor_split}
TAKEN: dict[Callable[..., Any], Callable[..., Any]] = {torch.Tensor.__setitem__: assign}
