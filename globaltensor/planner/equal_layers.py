"""Of a list of more than `REAL` equal layers only some run: the first two and the last.

What enters another leaves it as it came, so layouts stay what they are, forward and backward; the second layer stands
for it. (repeats.py does without even these, but knows no layouts.)
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from globaltensor.planner.repeats import LISTS, structure_of
from globaltensor.runtime.torch_internals import tree_flatten, tree_leaves, tree_unflatten

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
            known: list[Any] = []
            second = modules[group[1]]
            second.forward = _noting(second.forward, known)
            changed.append(second)
            for name in group[2:-1]:
                member = modules[name]
                member.forward = _pass_on(member.forward, known, name, passed.setdefault(group[1], []))
                changed.append(member)
        yield passed
    finally:
        for member in changed:
            del member.forward


def _noting(forward: Callable[..., Any], known: list[Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        known[:] = [tree_flatten(result)]
        return result

    return call


def _pass_on(forward: Callable[..., Any], known: list[Any], name: str, passed: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        x = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)), None)
        leaves, tree = known[0]
        alike = [t for t in leaves if isinstance(t, torch.Tensor)]
        if x is None or len(alike) != 1 or alike[0].shape != x.shape or alike[0].dtype != x.dtype:
            return forward(*args, **kwargs)
        passed.append(name)
        return tree_unflatten([x if isinstance(t, torch.Tensor) else t for t in leaves], tree)

    return call
