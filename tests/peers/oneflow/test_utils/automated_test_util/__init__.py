"""Random sizes, layouts and tensors, and `autotest`: a program run on plain tensors, and once more on global ones."""
from __future__ import annotations

import functools
import itertools
import os
import random as stdlib_random
import sys
import unittest
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

import globaltensor as gt
import oneflow as flow

__all__ = ["all_cpu_placement", "all_placement", "all_sbp", "autotest", "choice_tensor", "constant", "globaltest",
           "nothing", "oneof", "os", "random", "random_bool", "random_device", "random_dtype", "random_or_nothing",
           "random_placement", "random_sbp", "random_tensor", "torch"]
MOST_TURNS = 2
sizes, layouts = stdlib_random.Random(0), stdlib_random.Random(0)


class Drawn:
    """A value that was drawn, which the tests think of as one that will be."""

    low: Any
    high: Any

    def value(self) -> Any:
        return self

    eval = value

    def to(self, kind: Any) -> Any:
        if kind is bool:
            return sizes.random() < 0.5
        if kind is float and isinstance(self, int):
            return _drawn(self + sizes.random())
        return self if kind in (int, float) else _drawn(self)

    def __or__(self, other: Any) -> Any:
        return self if isinstance(other, nothing) or sizes.random() < 0.5 else other


def _math(name: str) -> Callable[..., Any]:
    return lambda self, *others: _drawn(getattr(type(self).__mro__[2], name)(self, *others))


_MATH = {name: _math(name) for name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__")}
DrawnInt, DrawnFloat = type("DrawnInt", (Drawn, int), _MATH), type("DrawnFloat", (Drawn, float), _MATH)


DrawnStr, DrawnTuple = type("DrawnStr", (Drawn, str), {}), type("DrawnTuple", (Drawn, tuple), {})


def _drawn(value: Any) -> Any:
    """A bool and a dtype are what they are: nobody derives from them."""
    kinds = {int: DrawnInt, float: DrawnFloat, str: DrawnStr, tuple: DrawnTuple, list: DrawnTuple}
    return kinds[type(value)](value) if type(value) in kinds else value


class nothing:
    """The argument is left out."""


def random(low: Any = 1, high: Any = 6) -> Any:
    if isinstance(low, float) or isinstance(high, float):
        return _drawn(sizes.uniform(low, high))
    return _drawn(sizes.randrange(int(low), int(high)))


def constant(value: Any) -> Any:
    return _drawn(value)


def oneof(*values: Any, possibility: Any = None) -> Any:
    return _drawn(sizes.choice([value for value in values if not isinstance(value, nothing)]))


def random_or_nothing(low: Any, high: Any) -> Any:
    return random(low, high)


def random_bool() -> bool:
    return sizes.random() < 0.5


def random_device() -> Any:
    return DrawnStr("cpu")


def random_dtype(names: Iterable[str]) -> torch.dtype:
    return torch.int64 if "int" in names else torch.float32


def random_tensor(ndim: Any = None, *dims: Any, low: Any = None, high: Any = None, dtype: Any = float,
                  requires_grad: bool = True, pin_memory: bool = False, **named: Any) -> torch.Tensor:
    """A plain tensor, the same in the run on plain and in the run on global tensors."""
    ndim = sizes.randrange(1, 6) if ndim is None else int(ndim)
    wanted = [*dims, *[None] * 5][:5]
    wanted = [named.get(f"dim{i}", size) for i, size in enumerate(wanted)]
    shape = [sizes.randrange(1, 8) if size is None else int(size) for size in wanted[:ndim]]
    if dtype is float:
        t = torch.rand(shape) * ((1 if high is None else high) - (low := -1 if low is None else low)) + low
        t.requires_grad_(requires_grad)
    elif dtype is complex:
        t = torch.randn(shape, dtype=torch.complex64)
    else:
        t = torch.randint(int(-10 if low is None else low), int(11 if high is None else high), shape)
    leaves.append(t)
    return t


def choice_tensor(a: Any, size: Any = None, replace: bool = True, dtype: Any = int, **_: Any) -> torch.Tensor:
    drawn = [sizes.randrange(int(a)) for _ in range(torch.Size(size).numel())]
    return torch.tensor(drawn).reshape(size)


def all_placement() -> list[Any]:
    hosts = [[0, 1], [2, 3]]
    return [gt.placement("cpu", [0, 1, 2, 3]), gt.placement("cpu", hosts)]


all_cpu_placement = all_placement


def random_placement() -> Any:
    return layouts.choice(all_placement())


def all_sbp(placement: Any = None, dim: int = 1, max_dim: Any = 0, except_split: bool = False,
            except_broadcast: bool = False, except_partial_sum: bool = False, valid_split_axis: Any = None
            ) -> list[Any]:
    axes = dim if placement is None else placement.ndim
    if not max_dim:
        return [[gt.sbp.broadcast] * axes]
    valid = [valid_split_axis] if isinstance(valid_split_axis, int) else valid_split_axis
    sbps = [gt.sbp.split(d) for d in range(int(max_dim)) if (valid is None or d in valid) and not except_split]
    sbps += [gt.sbp.broadcast] * (not except_broadcast) + [gt.sbp.partial_sum] * (not except_partial_sum)
    return list(itertools.product(sbps, repeat=axes))


def random_sbp(*args: Any, **kwargs: Any) -> Any:
    return layouts.choice(all_sbp(*args, **kwargs))


def globaltest(test: Any) -> Any:
    return test


leaves: list[torch.Tensor] = []
runs: Counter[str] = Counter()                       # of autotests: compared, and refused by plain torch


def autotest(n: int = 1, auto_backward: Any = True, rtol: float = 1e-4, atol: float = 1e-5, **_: Any) -> Any:
    def decorate(program: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(program)
        def run(*args: Any, **kwargs: Any) -> None:
            for turn in range(min(n, MOST_TURNS)):
                seed = zlib.crc32(f"{program.__module__}{program.__name__}{turn}".encode())
                try:
                    expected = _results(program, args, kwargs, seed, auto_backward, plain=True)
                except unittest.SkipTest:
                    raise
                except Exception:                    # plain torch takes no such arguments
                    runs["plain torch refuses"] += 1
                    continue
                got = _results(program, args, kwargs, seed, auto_backward, plain=False)
                torch.testing.assert_close(got, expected, rtol=max(rtol, 1e-4), atol=max(atol, 1e-4), equal_nan=True)
                runs["compared"] += 1
        return run
    return decorate


def _results(program: Any, args: Any, kwargs: Any, seed: int, auto_backward: Any, plain: bool) -> list[Any]:
    """What the program gives, and the gradients of its leaves, as plain tensors."""
    sizes.seed(seed)
    torch.manual_seed(seed)
    leaves.clear()
    flow.is_plain = plain
    try:
        result = program(*args, **kwargs)
        results = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        if auto_backward and any(t.requires_grad for t in results):
            sum(t.sum() for t in results if t.requires_grad).backward()
        return [_whole(t) for t in results] + [_whole(t.grad) for t in leaves if t.grad is not None]
    finally:
        flow.is_plain = False


def _whole(t: torch.Tensor) -> torch.Tensor:
    return t.detach().full_tensor() if t.is_global else t.detach()


def broadcast(value: Any, src: int = 0) -> Any:
    """From a rank to the others, which are in this process."""
    return value


for _part in ("generators", "torch_flow_dual_object", "util"):
    sys.modules[f"{__name__}.{_part}"] = sys.modules[__name__]
