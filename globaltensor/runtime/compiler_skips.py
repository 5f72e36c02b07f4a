"""Functions of this package that torch.compile leaves alone: where a graph of the user's ends and the program goes on.

There it compiles each function that is called by itself: in a hook, in dispatch, in what the program calls. Ours keep
notes in Python, of which it makes graphs that nobody wants, or fails. Inside the user's functions it may follow what it
can.

It is told of all before it comes to any: when dynamo is imported, as many programs never do; and of modules of ours
that are loaded later, when they are.
"""
from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import cached_property, lru_cache, partial
from types import CellType, FunctionType, MappingProxyType
from typing import Any, TypeVar

from globaltensor.errors import OURS
from globaltensor.runtime.late_modules import when_imported
from globaltensor.runtime.torch_internals import leave_alone

T = TypeVar("T")
_COMPILER = "torch._dynamo"


def keep_compiler_out() -> None:
    """From now on, or from when there is a compiler. Again where modules of ours may have come."""
    when_imported(_COMPILER, lambda: _leave_package_alone(len(sys.modules)))


def ends_graphs(function: T) -> T:
    """Decorate a function that keeps notes in native code, of which dynamo would warn where it followed the call: a
    graph ends before it, and it runs as it stands. (`torch.compiler.disable` does that, and imports the compiler.)"""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # which is dynamo's
    return function


@lru_cache(1)
def _leave_package_alone(modules: int) -> None:
    """Done again where there are other `modules`."""
    for function in package_functions():
        leave_alone(function.__code__)


def package_functions() -> Iterator[FunctionType]:
    """All that this package's modules lead to. (Of all objects, gc.get_objects hides what a program froze.)"""
    seen: set[int] = set()
    todo: list[Any] = [vars(module) for name, module in list(sys.modules.items()) if _is_of_package(name)]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        kind = type(one)     # not isinstance, which asks a weakref.proxy of what is gone for its class, and raises
        if kind is FunctionType:
            if one.__code__.co_filename.startswith(OURS):
                yield one
            todo += [one.__closure__, vars(one)]     # not its globals: other modules' are not ours
        elif issubclass(kind, _HOLDERS) or _is_of_package((one if issubclass(kind, type) else kind).__module__):
            todo += gc.get_referents(one)


_HOLDERS = (dict, list, tuple, set, frozenset, CellType, MappingProxyType, property, staticmethod, classmethod, partial,
            cached_property, type(lru_cache(print)))


def _is_of_package(module: object) -> bool:
    return str(module).partition(".")[0] == __name__.partition(".")[0]
