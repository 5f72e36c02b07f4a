"""Which of the package's functions of autograd went through a backward pass that can be differentiated itself."""
from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch.autograd import Function

import globaltensor

_ENTRY_POINTS = {"globaltensor.__main__"}


def functions_of_autograd() -> list[type[Function]]:
    """All that the package has, but for those that only say what others have in common."""
    for module in pkgutil.walk_packages(globaltensor.__path__, "globaltensor."):
        if module.name not in _ENTRY_POINTS and not module.name.startswith("globaltensor._"):
            with suppress(ModuleNotFoundError):      # an extra that is not installed
                importlib.import_module(module.name)
    found, new = {}, [Function]
    while new:
        new = [one for cls in new for one in cls.__subclasses__()]
        found |= {one.__name__: one for one in new if one.__module__.startswith("globaltensor.")}
    return [cls for name, cls in sorted(found.items()) if name != "LinearMap"]


@contextmanager
def differentiated_again() -> Iterator[set[str]]:
    """Inside, the names are noted. Raises AssertionError where a gradient that can be differentiated gives one that
    cannot: a term is then left out, and nobody is told."""
    noted: set[str] = set()
    before = {cls: cls.__dict__.get("backward") for cls in functions_of_autograd()}

    def watched(cls, backward):
        def run(ctx, *grads):
            out = backward(ctx, *grads)
            if torch.is_grad_enabled() and any(isinstance(g, torch.Tensor) and g.requires_grad for g in grads):
                noted.add(cls.__name__)
                several = out if isinstance(out, tuple) else (out,)
                assert all(g.requires_grad for g in several if isinstance(g, torch.Tensor) and g.is_floating_point()), (
                    f"{cls.__name__}: a gradient that cannot be differentiated")
            return out
        return staticmethod(run)

    try:
        for cls in before:
            cls.backward = watched(cls, cls.backward)
        yield noted
    finally:
        for cls, backward in before.items():
            if backward is None:
                del cls.backward
            else:
                cls.backward = backward
