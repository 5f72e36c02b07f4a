"""From an op on global tensors to its results: look the recipe up, decide it where the op is new, run it.

    decide.py     legal signatures, the cheapest, what will come out
    execute.py    box, run the local op once per driven rank, wrap

A recipe is found by op, operand specs and static arguments. Ops arrive below autograd, so backward needs no more.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from globaltensor.algorithms.aliasing import check_guard
from globaltensor.algorithms.run import Run, is_traceable
from globaltensor.boxings.redistribute import Move, move_shards, redistribute
from globaltensor.boxings.rows import RowExchange, row_exchange
from globaltensor.dispatch import native, user_rules
from globaltensor.dispatch.decide import decide
from globaltensor.dispatch.execute import execute
from globaltensor.dispatch.recipe import Recipe, static
from globaltensor.layouts.global_like import GlobalLike
from globaltensor.layouts.layout import Layout, Shape, Shards, Spec, spec
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.layouts.regions import Range
from globaltensor.rules.call import Call
from globaltensor.runtime.memory import require
from globaltensor.runtime.native import torch_ext

_recipes: dict[tuple, Recipe] = {}
_LIMIT = 50_000


def arrive(cls: type, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An op from torch: run it, and cache its recipe in the native dispatcher where that asked for one.

    Only what comes a second time is cached: a shape that is seen once is not worth it. An operand without memory always
    comes here, and is refused.
    """
    for value in (*args, *kwargs.values()) if kwargs else args:
        for t in value if type(value) in (list, tuple) else (value,):
            if isinstance(t, torch.Tensor) and type(t) is not cls:
                require(t, f"an operand of {func}")
    pending_key = native.pending_key(func) if torch_ext is not None else None
    if pending_key is not None:
        recipe = _recipes.get(_key(cls, func, args, kwargs))
        if recipe is not None and is_traceable(recipe.decomposition):
            return native.cache_trace(pending_key, recipe.decomposition, Call(func, args, kwargs), _Run(cls))
        if recipe is not None:
            native.cache_recipe(pending_key, cls, recipe, func, args, kwargs)
    return dispatch(cls, func, args, kwargs)


def rule(op: Any, dims: str, algebra: str = "", *, leaves: str = "sum", nonempty: str = "") -> None:
    """Give an op its rule, so that it runs on shards instead of gathered operands; before or after its first call.

        gt.rule(torch.ops.mine.twice, "b* -> b*", "a")

    op        an op of torch.ops, a custom op (torch.library.custom_op, triton_op), or its name "mine::twice"
    dims      a label per dim, operand by operand, then result by result: "m k, k n -> m n". `k!` stays whole on every
              rank, `(h w)` is one dim made of two, `1` is repeated to fit, `b*` is as many dims as there are
    algebra   how each result depends on the operands a, b, c, in order: "a*b", "a+b*c"; lower case linearly, upper case
              not, left out not at all; results are separated by ";". Left out: nonlinearly on all of them
    leaves    what a label that is in no result leaves pending: "sum", "max" or "min"
    nonempty  labels, separated by blanks, of which no part may be empty since the kernel refuses it

    `gt.rules.check(op, samples)` proves it. The language: `globaltensor.rules.language`. Raises RuleError where the
    rule is malformed or does not fit the op, or the op is torch's own and has a rule.
    """
    func = user_rules.give(op, dims, algebra, leaves=leaves, nonempty=nonempty)
    for key in [key for key in _recipes if func in key[:2]]:
        del _recipes[key]                            # decided before there was a rule
    if torch_ext is not None:
        torch_ext.clear_recipes()


def dispatch(cls: type, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run `func` on operands of which at least one is a `cls`, a global tensor."""
    recipe = find(cls, func, args, kwargs)
    if recipe.decomposition is not None:
        return recipe.decomposition(Call(func, args, kwargs), _Run(cls))
    return execute(cls, recipe, args, kwargs)


def _key(cls: type, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple:
    key: list[Any] = [func]
    for value in args:
        kind = type(value)
        if kind is cls:
            key.append(value.spec)
        elif kind is float:
            key.append(float)
        else:
            key.append(static(value, cls))
    if kwargs:
        key.append(static(kwargs, cls))
    return tuple(key)


def find(cls: type, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Recipe:
    """The recipe of a call, decided where it is new."""
    key = _key(cls, func, args, kwargs)
    recipe = _recipes.get(key)
    if recipe is None:
        recipe = decide(cls, func, args, kwargs)
        if len(_recipes) > _LIMIT:
            _recipes.clear()
        _recipes[key] = recipe
    return recipe


class _Run(Run):
    """The steps of a decomposition, done on global tensors of a class."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __call__(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        return dispatch(self.cls, func, args, kwargs)

    def plain(self, call: Call) -> Any:
        args, kwargs = call.full_arguments()
        key = ("plain", call.func, static(args, self.cls), static(kwargs, self.cls))
        recipe = _recipes.get(key)
        if recipe is None:
            recipe = _recipes[key] = decide(self.cls, call.func, args, kwargs, decompose=False)
        return execute(self.cls, recipe, args, kwargs)

    def redistribute(self, tensors: Sequence[GlobalLike], dsts: Sequence[Layout], op: str) -> list[GlobalLike]:
        for t in tensors:
            check_guard(t)
        return redistribute(tensors, dsts, op)

    def gather_regions(self, tensors: Sequence[GlobalLike], dsts: Sequence[Layout], op: str) -> list[Shards]:
        for t in tensors:
            check_guard(t)
        return move_shards([Move(t.spec, t.shards, dst) for t, dst in zip(tensors, dsts)], op)

    def scatter_add_regions(self, parts: Shards, held: RankRegions, shape: Shape, dtype: torch.dtype, dst: Layout,
                            op: str) -> GlobalLike:
        shards, = move_shards([Move(spec(held, shape, None, dtype), parts, dst)], op)
        return self.wrap(spec(dst, shape, None, dtype), shards)

    def row_exchange(self, axes: tuple[int, ...], held: Mapping[int, Range], wanted: Mapping[int, torch.Tensor],
                     row: Mapping[int, Shape], op: str, src: Layout, dst: Layout) -> RowExchange:
        return row_exchange(axes, held, wanted, row, op, src, dst)

    def wrap(self, own: Spec, shards: Shards) -> GlobalLike:
        return self.cls.wrap(own, shards)
