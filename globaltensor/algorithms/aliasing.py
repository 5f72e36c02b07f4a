"""What of an op's operands and results is one memory: writes, and views that had to be copies.

A view of a tensor that must be boxed first is a *copy*: it holds the value, but not the memory. Its spec says so, and
its `guard` is the version that the original had. Nothing may write to it, as the write would not reach the original;
and it is out of date as soon as the original is written to.
"""
from __future__ import annotations

from typing import Any

from globaltensor.errors import InPlaceError
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Spec, spec
from globaltensor.runtime.torch_internals import OpOverload


def copy_of(view: Spec) -> Spec:
    """The spec of a view that is a copy."""
    return spec(view.layout, view.shape, view.stride, view.dtype, copied=True)


def version(t: Any) -> int | None:
    """How often a tensor was written to; None in inference mode, which does not count."""
    return None if t.is_inference() else t._version


def check_guard(t: Any) -> None:
    """Raise InPlaceError for a copy whose original was written to."""
    if t.spec.copied and version(t) != t.guard:
        raise InPlaceError("a view is used after the tensor it was made from was written to",
                           "making the view needed a boxing, so it holds the old value",
                           "make the view again after the write")


def check_writable(t: Any, func: OpOverload, name: str) -> None:
    """Raise InPlaceError for an operand that cannot take what an op writes: a plain tensor, or a copy."""
    if not is_global(t):
        raise InPlaceError(f"{func} would write a global value into a plain tensor ({name})",
                           "a plain tensor has no placement to hold it", "x.full_tensor() for a plain operand")
    if t.spec.copied:
        raise InPlaceError(f"{func} writes into a view whose layout had to change",
                           "it is a copy by now: the write would not reach the tensor it was made from",
                           "write into the tensor itself, or clone() the view first")
