"""torch's multi-head attention with our products inside.

`F.multi_head_attention_forward` is Python, and so is what it is made of. torch hands it to a subclass as a whole,
which would then run it with overrides off: its projections would flatten a batch that stands second, and gather it. So
here it runs as it is written, but for the question whether to hand it over.
"""
from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch.nn import functional as F


def _asked_no_more(function: Any) -> Callable[..., Any]:
    """The same function, where `has_torch_function` says no."""
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    same = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    same.__kwdefaults__ = function.__kwdefaults__
    return same


TAKEN: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: _asked_no_more(F.multi_head_attention_forward),
}
