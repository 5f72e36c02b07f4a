"""Of a list of more than `REAL` equal layers that run one behind the other only some run: the first two and the last.

What enters another leaves it as it came, if the second one gives what it takes, laid out as that was: so layouts stay
what they are, forward and backward, and the second layer stands for it. Layers that are used otherwise, such as experts
beside each other, all run. (repeats.py does without even these, but knows no layouts.)
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from globaltensor.planner.repeats import LISTS, structure_of
from globaltensor.runtime.torch_internals import tree_flatten, tree_leaves, tree_unflatten
from globaltensor.tensors.global_tensor import GlobalTensor

REAL = 3


def equal_layers(model: nn.Module) -> list[list[str]]:
    """Names of equal neighbours in a list, where there are many."""
    groups: list[list[str]] = []
    for path, several in model.named_modules():
        if not isinstance(several, LISTS):
            continue
        run: list[str] = []
        last: Any = None
        for name, member in several.named_children():
            own = structure_of(member)
            if own != last:
                groups += [run] if len(run) > REAL else []
                run, last = [], own
            run.append(f"{path}.{name}".lstrip("."))
        groups += [run] if len(run) > REAL else []
    return [group for group in groups if not any(
        group[0].startswith(f"{other}.") for outer in groups if outer is not group for other in outer)]


@contextmanager
def passing(model: nn.Module, groups: list[list[str]]) -> Iterator[dict[str, list[str]]]:
    """Inside, of equal layers but the first two and the last do not run: what enters leaves as it came. Gives the
    names of those that did not, by the one that stands for them."""
    passed: dict[str, list[str]] = {}
    changed: list[nn.Module] = []
    modules = dict(model.named_modules())
    try:
        for group in groups:
            state = _Chain()
            second = modules[group[1]]
            second.forward = partial(state.run_second, second.forward)
            changed.append(second)
            for name in group[2:-1]:
                member = modules[name]
                member.forward = partial(state.pass_on, member.forward, name, passed.setdefault(group[1], []))
                changed.append(member)
        yield passed
    finally:
        for member in changed:
            del member.forward


class _Chain:
    """Equal layers while they run: what the second gave, and what the last that ran did."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.tree: Any = None
        self.result: Any = None                      # the only tensor of the last one, if what it took lay so, too

    def run_second(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """It runs."""
        result = forward(*args, **kwargs)
        self.leaves, self.tree = tree_flatten(result)
        self.result = None
        tensors, x = [t for t in self.leaves if isinstance(t, GlobalTensor)], _first((args, kwargs))
        if len(tensors) == 1 and x is not None and _shape_and_layout(x) == _shape_and_layout(tensors[0]):
            self.result = tensors[0]
        return result

    def pass_on(self, forward: Callable[..., Any], name: str, passed: list[str], *args: Any, **kwargs: Any) -> Any:
        """Another does not, if it takes what the one before gave."""
        x = _first((args, kwargs))
        if x is None or x is not self.result:
            self.result = None
            return forward(*args, **kwargs)
        if name not in passed:
            passed.append(name)
        return tree_unflatten([x if isinstance(t, torch.Tensor) else t for t in self.leaves], self.tree)


def _first(arguments: Any) -> Any:
    return next((t for t in tree_leaves(arguments) if isinstance(t, GlobalTensor)), None)


def _shape_and_layout(t: GlobalTensor) -> Any:
    return tuple(t.shape), t.dtype, t.spec.layout
