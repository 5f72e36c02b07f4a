"""Which of the package's functions of autograd went through a backward pass that can be differentiated itself."""
from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch.autograd import Function

import globaltensor
from globaltensor.runtime.torch_internals import in_batch

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


def _can_be_differentiated(name, grads, out):
    if not torch.is_grad_enabled() or not any(isinstance(g, torch.Tensor) and g.requires_grad for g in grads):
        return False
    several = out if isinstance(out, tuple) else (out,)
    assert all(g.requires_grad for g in several if isinstance(g, torch.Tensor) and g.is_floating_point()), (
        f"{name}: a gradient that cannot be differentiated")
    return True


def _is_of_a_batch(name, grads, out):
    return any(isinstance(g, torch.Tensor) and in_batch(g) for g in grads)


def differentiated_again():
    """Inside, the names are noted. Raises AssertionError where a gradient that can be differentiated gives one that
    cannot: a term is then left out, and nobody is told."""
    return _noted(_can_be_differentiated)


def of_a_batch():
    """Inside, the names of those are noted that take a batch of gradients at once (`is_grads_batched`)."""
    return _noted(_is_of_a_batch)


def batch_of(y):
    """A batch of gradients of y."""
    return torch.stack([y.detach(), y.detach().cos()])


def in_batches(function, x):
    """First and second derivatives by a batch of gradients each, and a third."""
    x = x.detach().requires_grad_()
    derivatives = [function(x).sin()]                # of which there are any number
    for _ in range(2):
        derivatives += torch.autograd.grad(derivatives[-1], x, batch_of(derivatives[-1]), is_grads_batched=True,
                                           create_graph=True)
    derivatives[-1].sin().sum().backward()
    return [*derivatives, x.grad]


@contextmanager
def _noted(which: Callable[..., bool]) -> Iterator[set[str]]:
    noted: set[str] = set()
    before = {cls: cls.__dict__.get("backward") for cls in functions_of_autograd()}

    def watched(cls, backward):
        def run(ctx, *grads):
            out = backward(ctx, *grads)
            if which(cls.__name__, grads, out):
                noted.add(cls.__name__)
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
