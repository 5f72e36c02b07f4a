"""From an op on global tensors to its results: look the recipe up, decide it where the op is new, run it.

    decide.py     legal signatures, the cheapest, what will come out
    execute.py    box, run the local op once per driven rank, wrap

A recipe is found by op, operand specs and static arguments. Ops arrive below autograd, so backward needs no more.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from globaltensor.algorithms.aliasing import note_uncounted_write, note_write, view_of_base
from globaltensor.algorithms.completed import keep_completed, with_completed
from globaltensor.algorithms.run import Run, looks_at_values
from globaltensor.boxings.redistribute import Move, move_shards, redistribute
from globaltensor.boxings.rows import RowExchange, row_exchange
from globaltensor.dispatch import foreach, native, symbolic, user_rules
from globaltensor.dispatch.decide import decide, decide_by_rule
from globaltensor.dispatch.decision_log import log_decision
from globaltensor.dispatch.execute import execute, view_shards
from globaltensor.dispatch.memory_overlap import refuse_overlap
from globaltensor.dispatch.op_errors import add_operands
from globaltensor.dispatch.recipe import Decision, Recipe, static
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import Layout, Shape, Shards, Spec, completes
from globaltensor.layouts.recent import Recent
from globaltensor.layouts.regions import Range
from globaltensor.rules.call import Call, arguments
from globaltensor.runtime import lineage, trace_order
from globaltensor.runtime.memory import refuse_fake_mode, require
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import (
    OpOverload,
    in_fake_mode,
    modes_active,
    tree_map_only,
    without_fake_mode,
    without_modes,
)
from globaltensor.tracebacks import api_boundary

_decisions: Recent[tuple[Any, ...], Decision] = Recent()


def arrive(cls: type[GlobalLike], func: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
    """An op from torch: run it. Errors leave folded, those of torch with what is known of the operands."""
    func, args = view_of_base(func, args)
    try:
        if traced_operand(args, kwargs):
            return dispatch(cls, func, args, kwargs)
        if in_fake_mode():
            return _run_without_memory(cls, func, args, kwargs)
        if lineage.kept_here():
            return lineage.call_with_lineage(func, args, kwargs, lambda: _run_arrived(cls, func, args, kwargs))
        return _run_arrived(cls, func, args, kwargs)
    except BaseException as error:
        add_operands(error, func, args, kwargs)
        raise


def _run_arrived(cls: type[GlobalLike], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op, and cache its recipe in the native dispatcher where that asked for one.

    At once where it is good for calls of other sizes; else when it comes a second time, as a shape that is seen once is
    not worth it. An operand without memory always comes here, and is refused.
    """
    if any(t._is_zerotensor() for t in _tensors(args, kwargs)):
        args, kwargs = tree_map_only(torch.Tensor, _with_memory, (args, kwargs))
    for t in _tensors(args, kwargs):
        if type(t) is not cls and not (t.is_meta and _on_meta(cls, args, kwargs)):
            require(t, f"an operand of {func}")
    if func._schema.is_mutable:
        refuse_overlap(Call(func, args, kwargs))
    keys = native.pending_keys(func) if torch_ext is not None else None
    if keys is None:
        return dispatch(cls, func, args, kwargs)
    key = _key(cls, func, args, kwargs)
    decision = _decisions.get(key)
    if decision is None:
        result = dispatch(cls, func, args, kwargs)
        decision = _decisions.get(key)
        if isinstance(decision, Recipe):             # which has run, so its results are verified
            native.cache_siblings(keys, cls, decision, func, args, kwargs)
        elif decision is not None:
            native.cache_siblings_of_mean(keys, decision, Call(func, args, kwargs), _Run(cls))
        return result
    if isinstance(decision, Recipe):
        native.cache_recipe(keys.call, cls, decision, func, args, kwargs)
        return _run_decided(cls, decision, func, args, kwargs)
    if _lacks_values(cls, decision, args, kwargs):
        return _run_decided(cls, decision, func, args, kwargs)
    call = Call(func, args, kwargs)
    # what is traced is this call itself, so it is done by that
    result = native.cache_trace(keys.call, decision, call, _Run(cls))
    _note_writes(call)
    return result


def _run_without_memory(cls: type[GlobalLike], func: OpOverload, args: tuple[Any, ...],
                        kwargs: dict[str, Any]) -> Any:
    """An op under FakeTensorMode: of global tensors on the meta device, and of plain ones as if they were there."""
    for t in _tensors(args, kwargs):
        if is_global(t):
            refuse_fake_mode(t.placement, f"{func} of a global tensor")
    with without_fake_mode():
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t if is_global(t) else torch.empty_strided(
            t.shape, t.stride(), dtype=t.dtype, device="meta"), (args, kwargs))
        return _run_arrived(cls, func, args, kwargs)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Plain ones and global ones."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        for t in value if type(value) in (list, tuple) else (value,):
            if isinstance(t, torch.Tensor):
                yield t


def traced_operand(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Does torch.compile trace this call? Then the shards of its operands are fake."""
    return any(is_global(t) and t.traced for t in _tensors(args, kwargs or {}))


def _with_memory(t: torch.Tensor) -> torch.Tensor:
    """torch's lazy zeros, which are all that an autograd formula may give, as zeros."""
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device) if t._is_zerotensor() else t


def _on_meta(cls: type[GlobalLike], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Is the op one on memory that is not there, whose plain operands need none either?"""
    return all(t.spec.placement.type == "meta" for t in _tensors(args, kwargs) if is_global(t))


def _lacks_values(cls: type[GlobalLike], decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Would a decomposition look at values, where a trace or the meta device has none?"""
    return not isinstance(decision, Recipe) and looks_at_values(decision) and (
        traced_operand(args, kwargs) or _on_meta(cls, args, kwargs))


@api_boundary
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

    Not collective, but every process gives the same rule. `gt.rules.check(op, samples)` proves it. The language:
    `globaltensor.rules.language`. Raises RuleError where the
    rule is malformed or does not fit the op, or the op is torch's own and has a rule.
    """
    func = user_rules.give(op, dims, algebra, leaves=leaves, nonempty=nonempty)
    _decisions.forget(lambda key: func in key[:2])   # decided before there was a rule
    if torch_ext is not None:
        torch_ext.clear_recipes()


def dispatch(cls: type[GlobalLike], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on operands of which at least one is a `cls`, a global tensor."""
    func, args = view_of_base(func, args)
    args, kwargs = with_completed(func, args, kwargs)
    if traced_operand(args, kwargs):
        args, kwargs = symbolic.settled(func, args, kwargs)
        if symbolic.concerned(args, kwargs):
            decision = symbolic.decide_by_symbols(cls, func, args, kwargs)
            if decision is not None:
                return _run_decided(cls, decision, func, args, kwargs)
            args, kwargs = symbolic.with_numbers(func, args, kwargs)
    return _run_decided(cls, find(cls, func, args, kwargs), func, args, kwargs)


def _run_decided(cls: type[GlobalLike], decision: Decision, func: OpOverload, args: tuple[Any, ...],
                 kwargs: dict[str, Any]) -> Any:
    before = trace_order.so_far()
    if _lacks_values(cls, decision, args, kwargs):
        decision = _by_rule(cls, func, args, kwargs)
    if isinstance(decision, Recipe):
        # Elements that are boxed are copies: written back together, one would undo what another wrote to memory they
        # share.
        if len(decision.write_back) > 1 and foreach.share_memory(call := Call(func, args, kwargs)):
            for own_args, own_kwargs in foreach.element_calls(call):
                dispatch(cls, func, tuple(own_args), own_kwargs)
            return None
        return _ordered(decision, args, kwargs, execute(cls, decision, args, kwargs, remake), before)
    call = Call(func, args, kwargs)
    result = decision(call, _Run(cls))
    _note_writes(call)
    return result


def _ordered(recipe: Recipe, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, before: int) -> Any:
    """What a recipe gave; in a trace it knows of which boxings it comes."""
    moved = before != trace_order.so_far()
    if not moved and not recipe.written and traced_operand(args, kwargs):
        number = trace_order.made_after(getattr(t, "made_after", 0) for t in _tensors(args, kwargs))
        for t in _tensors((result,), {}):
            if is_global(t) and t.origin is None:
                t.made_after = number
    return result


def _note_writes(call: Call) -> None:
    """Count what a decomposition has written, by other ops or by hand."""
    if not call.func._schema.is_mutable:
        return
    names = {a.name for a in arguments(call.func) if a.written}
    for t, name, slot in zip(call.tensors, call.names, call.slots):
        if name in names and is_global(t):
            (note_write if slot.item is None else note_uncounted_write)(t)


def remake(func: OpOverload, values: Sequence[Any]) -> list[Shards]:
    """The shards of the results of a view op that boxes its base, for arguments in the order of the schema."""
    cls, names = type(values[0]), arguments(func)
    args = tuple(value for a, value in zip(names, values) if not a.keyword)
    kwargs = {a.name: value for a, value in zip(names, values) if a.keyword}
    decision = find(cls, func, args, kwargs)
    recipe = decision if isinstance(decision, Recipe) else _by_rule(cls, func, args, kwargs)
    return view_shards(cls, recipe, args, kwargs)


def _by_rule(cls: type[GlobalLike], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe:
    """What the op's rule decides, where the op has a decomposition as well."""
    key = ("plain", func, traced_operand(args, kwargs), torch.get_default_dtype(), static(args, cls),
           static(kwargs, cls))
    recipe = _decisions.get(key)
    if not isinstance(recipe, Recipe):
        with without_modes() if modes_active() else nullcontext():
            recipe = _decisions[key] = decide_by_rule(cls, func, args, kwargs)
    return recipe


def _key(cls: type[GlobalLike], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    key: list[Any] = [func, torch.get_default_dtype()]          # which i / 2 of integers gives
    for value in args:
        if type(value) is cls:
            key.append(value.spec)
        else:
            key.append(static(value, cls))
    if kwargs:
        key.append(static(kwargs, cls))
    return tuple(key)


def find(cls: type[GlobalLike], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision:
    """What was decided for a call, or is now where it is new. For a trace it is decided apart: recipes are verified by
    what they give, and what fake kernels give is laid out and typed otherwise than what kernels do."""
    key = _key(cls, func, args, kwargs)
    key = ("traced", *key) if traced_operand(args, kwargs) else key
    decision = _decisions.get(key)
    if decision is None:
        with without_modes() if modes_active() else nullcontext():     # which would note what deciding takes
            decision = _decisions[key] = decide(cls, func, args, kwargs)
        log_decision(func, decision, args, kwargs)
    return decision


class _Run(Run):
    """The steps of a decomposition, done on global tensors of a class."""

    def __init__(self, cls: type[GlobalLike]) -> None:
        self.cls = cls

    def __call__(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        if not any(type(t) is self.cls for t in _tensors(args, kwargs)):
            return func(*args, **kwargs)             # of what is plain: the gradient of a mean, to be divided
        return dispatch(self.cls, func, args, kwargs)

    def plain(self, call: Call) -> Any:
        args, kwargs = call.full_arguments()
        return execute(self.cls, _by_rule(self.cls, call.func, tuple(args), kwargs), args, kwargs, remake)

    def redistribute(self, tensors: Sequence[GlobalLike], dsts: Sequence[Layout], op: str, keep: bool = False
                     ) -> list[GlobalLike]:
        moved = redistribute(tensors, dsts, op)
        for t, new in zip(tensors, moved):
            if keep and completes(t.spec.layout, new.spec.layout):
                keep_completed(t, new.spec, new.shards)
        return moved

    def gather_regions(self, tensors: Sequence[GlobalLike], dsts: Sequence[Layout], op: str) -> list[Shards]:
        return move_shards([Move(t.spec, t.shards, dst) for t, dst in zip(tensors, dsts)], op)

    def scatter_add_regions(self, parts: Shards, held: Layout, of: Spec, op: str) -> GlobalLike:
        shards, = move_shards([Move(of.on(held), parts, of.layout)], op)
        return self.wrap(of.on(held).moved(of.layout), shards)

    def row_exchange(self, axes: tuple[int, ...], held: Mapping[int, Range], wanted: Mapping[int, torch.Tensor],
                     row: Mapping[int, Shape], op: str, src: Layout, dst: Layout) -> RowExchange:
        return row_exchange(axes, held, wanted, row, op, src, dst)

    def wrap(self, own: Spec, shards: Shards) -> GlobalLike:
        return self.cls.wrap(own, shards)
