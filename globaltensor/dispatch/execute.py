"""Running a recipe: box what must move, all in one go; run the local op on every rank; wrap what comes out."""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.algorithms.random_ops import seeded
from globaltensor.boxings.run import Boxed, Shards, box
from globaltensor.dispatch.recipe import Recipe, moved_spec, output_spec, put, spec_of_plain
from globaltensor.errors import InPlaceError
from globaltensor.layouts.layout import Spec, spec
from globaltensor.rules.call import Call, Slot, arguments
from globaltensor.runtime.agreement import agree_on, broadcast_object, checking
from globaltensor.runtime.philox import draw_key
from globaltensor.runtime.world import world


def _operand(args: tuple, kwargs: dict[str, Any], slot: Slot) -> Any:
    value = args[slot.at] if isinstance(slot.at, int) else kwargs[slot.at]
    return value if slot.item is None else value[slot.item]


def execute(cls: type, recipe: Recipe, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a recipe that is no decomposition."""
    operands = [_operand(args, kwargs, slot) for slot in recipe.slots]
    for q in recipe.guarded:
        check_guard(operands[q])
    moved = _boxed(cls, recipe, operands)
    results: dict[int, Any] = {}
    key = _key(recipe, args, kwargs) if recipe.seeded else None
    for rank in recipe.ranks:
        local_args, local_kwargs = put(list(args), dict(kwargs), recipe.slots, [held[rank] for held in moved])
        for at, value in recipe.local_args.get(rank, ()):
            if isinstance(at, int) and at < len(local_args):
                local_args[at] = value
            else:
                local_kwargs[arguments(recipe.func)[at].name if isinstance(at, int) else at] = value
        if local_kwargs.get("device") is not None:
            local_kwargs["device"] = world().device(recipe.home.placement.type, rank)
        if key is not None:
            results[rank] = seeded(recipe.func, key, world().device(recipe.home.placement.type, rank),
                                   local_args, local_kwargs)
        elif recipe.local_impl is not None:
            results[rank] = recipe.local_impl(recipe, rank, local_args, local_kwargs)
        else:
            results[rank] = recipe.func(*local_args, **local_kwargs)
    if recipe.written:
        _write_back(recipe, operands, moved)
        return _aliases(recipe, operands, results, cls)
    return wrap_results(cls, recipe, operands, results)


def _key(recipe: Recipe, args: tuple, kwargs: dict[str, Any]) -> int:
    """From which every rank draws the same; processes without one draw the key too, and so stay in step."""
    return draw_key(Call(recipe.func, args, kwargs).get("generator"))


def _boxed(cls: type, recipe: Recipe, operands: list[Any]) -> list[Shards]:
    """The shards of every operand in the layout the recipe wants, all moved in one go."""
    held: list[Shards] = []
    items: list[Boxed] = []
    places: list[int] = []
    for q, (t, want) in enumerate(zip(operands, recipe.wants)):
        if type(t) is cls:
            held.append(t.shards)
            own = t.spec
        else:
            if checking():
                agree_on(t, f"a plain operand of {recipe.func}")
            held.append(dict.fromkeys(recipe.ranks, t))
            own = spec_of_plain(t, recipe.home.placement)
        if want is not None and want is not own.layout:
            items.append(Boxed(own, held[q], want))
            places.append(q)
    if items:
        for q, shards in zip(places, box(items, str(recipe.func))):
            held[q] = shards
    return held


def _write_back(recipe: Recipe, operands: list[Any], moved: list[Shards]) -> None:
    """An operand that was boxed before it was written gets the new value back, into the memory it had."""
    for q in recipe.written:
        target = operands[q]
        if recipe.wants[q] is not None:
            back = box([Boxed(moved_spec(target.spec, recipe.wants[q]), moved[q], target.spec.layout)],
                       str(recipe.func))[0]
            for rank, shard in target.shards.items():
                shard.copy_(back[rank])


def _aliases(recipe: Recipe, operands: list[Any], results: dict[int, Any], cls: type) -> Any:
    """Results of an op that writes: the targets themselves, and fresh tensors for what else it returns."""
    returns = recipe.func._schema.returns
    if not returns:
        return None
    targets = iter([operands[q] for q in recipe.written])
    if all(r.alias_info is not None for r in returns):
        found = [next(targets) for _ in returns]
        return found[0] if len(found) == 1 else tuple(found)
    return wrap_results(cls, recipe, operands, results)


def wrap_results(cls: type, recipe: Recipe, operands: list[Any], results: dict[int, Any]) -> Any:
    specs = recipe.outputs
    if not results:
        return _result_elsewhere(cls, recipe)
    first = next(iter(results.values()))
    if isinstance(first, torch.Tensor):
        made, kind = [results], None
    elif isinstance(first, (tuple, list)):
        made, kind = [{rank: r[k] for rank, r in results.items()} for k in range(len(first))], type(first)
    else:
        made, kind = [results], None                 # a number, a bool, nothing
    if specs is None:
        specs = [output_spec(next(iter(values.values())), recipe.home) for values in made]
        _announce(recipe, specs, made)
    wrapped = [next(iter(shards.values())) if own is None else cls.wrap(own, shards)
               for own, shards in zip(specs, made)]
    if recipe.is_view and (any(recipe.wants) or recipe.guarded):
        for w in wrapped:
            w.spec = spec(w.spec.layout, w.spec.shape, w.spec.stride, w.spec.dtype, copied=True)
            w.guard = operands[0].guard if recipe.guarded else _version(operands[0])
    return wrapped[0] if kind is None else kind(wrapped)


def _version(t: Any) -> int | None:
    """How often a tensor was written to; tensors of inference mode do not count."""
    return None if t.is_inference() else t._version


def check_guard(t: Any) -> None:
    """A view that was boxed is a copy: it must not be used after the tensor it was made from changed."""
    if t.spec.copied and _version(t) != t.guard:
        raise InPlaceError("a view is used after the tensor it was made from was written to",
                           "making the view needed a boxing, so it holds the old value",
                           "make the view again after the write")


def _result_elsewhere(cls: type, recipe: Recipe) -> Any:
    """A process that drives no rank of the placement: global tensors without shards."""
    if recipe.outputs is None:
        kind, payload = broadcast_object(None, recipe.home.placement.flat[0])
        leaves = [spec(recipe.home, *p) if isinstance(p, tuple) else None for p in payload[0]]
        wrapped = [cls.wrap(own, {}) if own is not None else value for own, value in zip(leaves, payload[1])]
        return wrapped[0] if kind == "one" else tuple(wrapped)
    wrapped = [cls.wrap(own, {}) if own is not None else None for own in recipe.outputs]
    kinds = [str(r.type) for r in recipe.func._schema.returns]
    if len(kinds) == 1 and kinds[0] == "Tensor":
        return wrapped[0]
    return wrapped if len(kinds) == 1 else tuple(wrapped)


def _announce(recipe: Recipe, specs: list[Spec | None], made: list[Shards]) -> None:
    """Tell processes that drive no rank of the placement what came out, where only running the op told."""
    here = world()
    if here.single_process or len(recipe.home.placement.flat) == here.size:
        return
    kind = "one" if len(recipe.func._schema.returns) == 1 and len(specs) == 1 else "many"
    shapes = [None if s is None else (s.shape, s.stride, s.dtype) for s in specs]
    values = [next(iter(m.values())) if s is None else None for s, m in zip(specs, made)]
    broadcast_object((kind, (shapes, values)), recipe.home.placement.flat[0])
