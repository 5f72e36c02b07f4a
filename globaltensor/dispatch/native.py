"""Caching decisions in the native dispatcher, so that the next such call need not enter Python.

A call that it does not know comes to Python with a *pending key*, by which the answer is cached: the recipe, flat, or
the trace of what a decomposition did. What only Python can do (a local_impl that looks at its part, an op that draws
random numbers) is cached as a call that goes to Python.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from globaltensor.algorithms import local_impls
from globaltensor.algorithms.run import Decomposition, Run, is_traceable
from globaltensor.boxings.native import find_boxing, reachable
from globaltensor.dispatch.decide import contest_of
from globaltensor.dispatch.memory_overlap import may_hide_overlap
from globaltensor.dispatch.recipe import Recipe, purpose_of, spec_of_plain
from globaltensor.dispatch.siblings import siblings_of, siblings_of_mean
from globaltensor.dispatch.trace import Trace
from globaltensor.layouts.global_like import GlobalLike
from globaltensor.layouts.layout import Spec
from globaltensor.layouts.view_parts import Slice
from globaltensor.rules.call import Call, arguments
from globaltensor.runtime.agreement import agree_on, plain_key
from globaltensor.runtime.lineage import checking, ignores_first
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import OpOverload
from globaltensor.runtime.world import world
from globaltensor.tracebacks import api_boundary

aten = torch.ops.aten

class PendingKeys(NamedTuple):
    """The keys of the call that is to be decided: its own, and that of all calls like it at other sizes."""

    call: bytes
    kind: bytes


def pending_keys(func: OpOverload) -> PendingKeys | None:
    """None where the native dispatcher did not see the call."""
    keys = torch_ext.pending_keys()
    if keys is None:
        torch_ext.claim_op(func._schema.name, func._schema.overload_name)
    return keys and PendingKeys(*keys)


def cache_recipe(key: bytes, cls: type[GlobalLike], recipe: Recipe, func: OpOverload, args: tuple[Any, ...],
                 kwargs: dict[str, Any]) -> None:
    """Cache the recipe of a call, or that the call goes to Python."""
    call = Call(func, args, kwargs)
    flat = _flat(cls, recipe, call)
    if flat is None:
        torch_ext.cache_python_fallback(key)
    else:
        torch_ext.cache_recipe(key, func._schema.name, func._schema.overload_name, **flat._asdict())


def cache_trace(key: bytes, decomposition: Decomposition, call: Call, run: Run) -> Any:
    """Do a decomposition, and cache the trace of it, or that the call goes to Python."""
    if checking() or not is_traceable(decomposition) or not Trace.fits(call) or may_hide_overlap(call):
        torch_ext.cache_python_fallback(key)
        return decomposition(call, run)
    call = _told_apart(call, run)
    trace = Trace(run, call)
    result = decomposition(call, trace)
    places = trace.results(result)
    if trace.steps is None:
        torch_ext.cache_python_fallback(key)
    else:
        floats = [(i, value) for i, value in enumerate(call.values.values()) if isinstance(value, float)]
        torch_ext.cache_trace(key, _slots(call), trace.steps, places, floats)
    return result


def _told_apart(call: Call, run: Run) -> Call:
    """The call with an alias for each tensor that stands there again: a trace tells operands by identity, and the next
    call of this key may have different ones."""
    if len(call.tensors) == len({id(t) for t in call.tensors}):
        return call
    tensors: list[Any] = []
    for t in call.tensors:
        tensors.append(run(aten.alias.default, t) if any(t is one for one in tensors) else t)
    args, kwargs = call.arguments_with(tensors)
    return Call(call.func, args, kwargs)


def cache_siblings_of_mean(keys: PendingKeys, decomposition: Decomposition, call: Call, run: Run) -> None:
    """Cache the mean of all elements for calls of other sizes too: a sum, which is divided by how many there are. It
    moves nothing, so doing it once more for the trace is seen by nobody."""
    siblings = None if checking() else siblings_of_mean(decomposition, call)
    if siblings is None:
        return
    trace = Trace(run, call)
    places = trace.results(decomposition(call, trace))
    if trace.steps is None or any(len(step) == 2 for step in trace.steps):
        return
    steps = [(*step[:2], [step[2][0], ("count", 0)], step[3]) if step[0] == "aten::div" else step
             for step in trace.steps]
    torch_ext.cache_trace(keys.call, _slots(call), steps, places, [])
    torch_ext.cache_sibling(keys.kind, keys.call, siblings._asdict())


def cache_siblings(keys: PendingKeys, cls: type[GlobalLike], recipe: Recipe, func: OpOverload, args: tuple[Any, ...],
                   kwargs: dict[str, Any]) -> None:
    """Cache the recipe of a call for calls of other sizes, and so for this one too, if it is good for them."""
    call = Call(func, args, kwargs)
    siblings = siblings_of(recipe, call, lambda: contest_of(cls, call))
    if siblings is None:
        return
    flat = _flat(cls, recipe, call)
    if flat is None or not siblings.told_by_torch and any(len(specs) > 1 for specs in flat.outputs):
        return
    torch_ext.cache_recipe(keys.call, func._schema.name, func._schema.overload_name, **flat._asdict())
    outputs = [siblings.outputs[k] if specs else [] for k, specs in enumerate(flat.outputs)]
    torch_ext.cache_sibling(keys.kind, keys.call, siblings._replace(outputs=outputs)._asdict())


class FlatRecipe(NamedTuple):
    """A recipe as the native dispatcher keeps it (csrc/torch_ext/recipe.h): per slot (operand), return or local rank.

    Every place that must know a new field: docs/native-twins.md.
    """

    ranks: list[int]
    slots: list[tuple[int, int]]                     # argument, and index in its list or -1
    boxings: list[Any]                               # per slot: how the operand is boxed first, or None
    outputs: list[list[Spec | None]]                 # per return: specs; none where it is an operand
    written: list[int]                               # per return: the slot of the operand that it is, or -1
    local_args: list[list[tuple[int, Any]]] = []     # per rank: arguments that differ from the global ones
    local_op: str = ""                               # the op that ranks run, where it is another one
    boxes_view: bool = False                         # the results are boxed views
    slices_boxing: Any = None                        # how a view is made of slices of the base, where it is
    slices: list[tuple[Any, ...]] = []               # per rank: start, size, dims (-1: none) and steps
    writes: list[int] = []                           # the operands that are written to
    plain_ranks: Sequence[int] = ()                  # that compare plain operands, if there are any
    plain_keys: list[str] = []                       # per slot, if there are such ranks: what counts its uses, or ""
    purpose: str = ""                                # of its boxings


def _flat(cls: type[GlobalLike], recipe: Recipe, call: Call) -> FlatRecipe | None:
    """None for what is Python's."""
    local_op = _local(recipe, call)
    if local_op is None or recipe.outputs is None or recipe.seeded or may_hide_overlap(call):
        return None
    if checking() and any(type(t) is not cls for t in call.tensors):
        return None
    if recipe.boxes_view and (call.tensors[0].spec.lazy_bits or any(own and own.lazy_bits for own in recipe.outputs)):
        return None                                  # what is boxed loses these bits: execute.py sees to it
    if recipe.write_back or recipe.elements is not None or any(_travels(t, recipe) for t in call.tensors
                                                               if type(t) is not cls):
        return None
    boxings: list[Any] = []
    slices, slices_boxing = recipe.slices, None
    if slices is not None and recipe.outputs[0] is not None:
        dst = recipe.outputs[0].layout
        slices_boxing = find_boxing(slices.held, dst) if reachable(dst, dst) else None
        if slices_boxing is None:
            return None
    for t, want in zip(call.tensors, recipe.wants):
        if slices is not None:
            boxings.append(None)
            continue
        own = t.spec if type(t) is cls else spec_of_plain(t, recipe.home.placement)
        boxings.append(None if want is None or want is own.layout else find_boxing(own, want))
        if want is not None and want is not own.layout and boxings[-1] is None:
            return None
    returns = _returns(call.func, recipe.written, recipe.outputs)
    if returns is None:
        return None
    outputs, written = returns
    local_args = [[(_index(call.func, at), value) for at, value in (*recipe.local_args.get(rank, ()),
                                                                     *_named_device(call, recipe, rank))]
                  for rank in recipe.ranks]
    ranks = recipe.home.placement.flat
    keys = ["" if type(t) is cls or not q and ignores_first(call.func, call.values) else
            plain_key(t, f"a plain operand of {recipe.func}") for q, t in enumerate(call.tensors)]
    compared = not world().single_process and bool(recipe.ranks) and any(keys)
    return FlatRecipe(list(recipe.ranks), _slots(call), boxings, outputs, written,
                      local_args if any(local_args) else [], local_op, recipe.boxes_view, slices_boxing,
                      [] if slices is None else [_flat_slice(slices.of_rank[rank]) for rank in recipe.ranks],
                      list(recipe.written),
                      ranks if compared else (), keys if compared else [], purpose_of(call))


def _flat_slice(of: Slice) -> tuple[Any, ...]:
    return of.start, of.size, [-1 if d is None else d for d in of.dims], of.steps


def _local(recipe: Recipe, call: Call) -> str | None:
    """The op that every rank runs, "" for the op itself; None where a local_impl must look at each rank's part."""
    if recipe.local_impl is None:
        return ""
    if recipe.local_impl is local_impls.view:
        return "aten::reshape"                       # a view where the shard's strides allow one
    return "" if local_impls.is_idle(recipe, call.full_arguments()[0]) else None


def _travels(plain: torch.Tensor, recipe: Recipe) -> bool:
    """Is a plain operand on an accelerator that is not that of every rank? Then execute.py copies it to them."""
    type = recipe.home.placement.type
    return plain.device.type == type not in ("cpu", "meta") and any(
        world().device(type, rank) != plain.device for rank in recipe.ranks)


def _named_device(call: Call, recipe: Recipe, rank: int) -> list[tuple[str, torch.device]]:
    """The argument `device` on a rank, where the call has it: each has one of its own."""
    if call.get("device") is None or recipe.home.placement.type == "cpu":
        return []
    return [("device", world().device(recipe.home.placement.type, rank))]


def _returns(func: OpOverload, written: tuple[int, ...], outputs: Sequence[Spec | None]
             ) -> tuple[list[list[Spec | None]], list[int]] | None:
    """Per return, the specs of what comes out, or the operand that was written to."""
    returns = func._schema.returns
    if written and returns and all(r.alias_info is not None for r in returns):
        return [[] for _ in returns], list(written[:len(returns)])
    if len(returns) == 1 and str(returns[0].type) in ("List[Tensor]", "Tensor[]"):
        return [list(outputs)], [-1]
    if len(outputs) != len(returns) or any("Tensor" != str(r.type) for r in returns):
        return None
    return [[o] for o in outputs], [-1] * len(outputs)


def _slots(call: Call) -> list[tuple[int, int]]:
    return [(_index(call.func, s.at), -1 if s.item is None else s.item) for s in call.slots]


def _index(func: OpOverload, at: int | str) -> int:
    """The place of an argument in the schema."""
    return at if isinstance(at, int) else next(i for i, a in enumerate(arguments(func)) if a.name == at)


def _compare_plain(t: torch.Tensor, op: str, ranks: list[int]) -> None:
    """What the native dispatcher calls for some uses of a plain operand. Raises DisagreementError."""
    agree_on(t, f"a plain operand of {op}", ranks)


if torch_ext is not None:
    torch_ext.on_resized_boxing(api_boundary(find_boxing))
    torch_ext.on_plain_operand(api_boundary(_compare_plain))
