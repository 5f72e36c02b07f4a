"""The foreach and fused ops of torch's optimizers: one local call per rank for a list of global tensors.

Element i of every list is one pointwise op; its rule comes from the line of the op that the name carries
(`_foreach_add_` from `add`). Each element may lie on a placement of its own; a rank's local call gets the elements
that it holds.
"""
from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from globaltensor.boxings.run import Boxed, box
from globaltensor.dispatch.choose import choose, layouts
from globaltensor.dispatch.recipe import Recipe, spec_of_plain
from globaltensor.errors import MixedPlacementError
from globaltensor.layouts.layout import Layout, Spec, spec
from globaltensor.op_table.variants import foreach_algebra
from globaltensor.rules.call import Call, arguments
from globaltensor.rules.families import broadcast_shape, pointwise
from globaltensor.rules.language import NUMBER
from globaltensor.runtime.world import local_ranks_of, world


def is_foreach(func: OpOverload) -> bool:
    """Is this one of torch's horizontally fused pointwise ops?"""
    return foreach_algebra(func) is not None


class _Element(Call):
    """Element i of a foreach call, as a call of its own for the rule. What all elements share is whole on every rank,
    as a number is."""

    __slots__ = ()

    def __init__(self, tensors: list[Any], shared: int) -> None:
        self.tensors, self.values = tensors, {}
        self.ndims = (*(t.dim() for t in tensors), *[NUMBER] * shared)


def decide(cls: type, call: Call) -> Recipe:
    """Foreach calls are not cached element by element: what to do is found from the specs each time, quickly."""
    return Recipe(call.func, decomposition=lambda now, run: _run(cls, now))


def _run(cls: type, call: Call) -> Any:
    func = call.func
    lists = {a.name: call[a.name] for a in arguments(func) if a.tensors and call[a.name]}
    written = {a.name for a in arguments(func) if a.written and call[a.name]}
    count = len(next(iter(lists.values())))
    singles = [a.name for a in arguments(func) if a.tensor and call[a.name] is not None]
    wants, outputs = _wants(cls, call, lists, singles, written, count)
    held = _boxed(cls, lists, wants, func)
    whole = {name: _whole(call[name], [w[0] for w in wants], func) for name in singles if type(call[name]) is cls}
    made: list[dict[int, Any]] = [{} for _ in range(count)]
    for rank in world().local_ranks:
        mine = [i for i in range(count) if rank in wants[i][0].placement.coords]
        if not mine:
            continue
        local = func(*_local(call, cls, held, whole, mine, rank, False),
                     **_local(call, cls, held, whole, mine, rank, True))
        for i, result in zip(mine, local or ()):
            made[i][rank] = result
    if written:
        _write_back(lists, wants, held, written, func)
        return None
    return [cls.wrap(own, shards) for own, shards in zip(outputs, made)]


def flat_wants(cls: type, call: Call) -> list[Spec] | None:
    """The specs of the results, where every element lies as it must on all ranks driven here; else None."""
    lists = {a.name: call[a.name] for a in arguments(call.func) if a.tensors and call[a.name]}
    singles = [a.name for a in arguments(call.func) if a.tensor and call[a.name] is not None]
    written = {a.name for a in arguments(call.func) if a.written and call[a.name]}
    if any(type(t) is not cls for name in written for t in lists[name]) or any(type(call[s]) is cls for s in singles):
        return None
    wants, results = _wants(cls, call, lists, singles, written, len(next(iter(lists.values()))))
    if len({local_ranks_of(want[0].placement) for want in wants}) != 1:
        return None
    for k, tensors in enumerate(lists.values()):
        if any((t.spec.layout if type(t) is cls else want[k].whole) is not want[k] for t, want in zip(tensors, wants)):
            return None
    return results


def _whole(single: Any, places: list[Layout], func: OpOverload) -> dict[int, torch.Tensor]:
    """A tensor that all elements share (a clipping factor), whole on every rank that has an element."""
    homes = list(dict.fromkeys(place.whole for place in places))
    moved = box([Boxed(single.spec, single.shards, home) for home in homes], str(func))
    return {rank: shard for shards in moved for rank, shard in shards.items()}


def _wants(cls: type, call: Call, lists: dict, singles: list[str], written: set[str], count: int
           ) -> tuple[list[list[Layout]], list[Spec]]:
    """Per element, the layout of each list's tensor, and the spec of the result where there is one."""
    algebra = foreach_algebra(call.func)
    wants, results = [], []
    scalars = tuple(type(v) for v in call.values.values() if not isinstance(v, (list, torch.Tensor)))
    for i in range(count):
        tensors = [items[i] for items in lists.values()]
        places = {t.spec.placement for t in tensors if type(t) is cls}
        if len(places) != 1:
            mixed = list(map(str, places))
            raise MixedPlacementError(f"{call.func}: element {i} mixes {', '.join(mixed) or 'plain tensors'}",
                                      "the operands of one op live on one placement",
                                      f"x.to_global(gt.{mixed[0]}) for the others" if mixed else "")
        where = places.pop()
        specs = [t.spec if type(t) is cls else spec_of_plain(t, where) for t in tensors]
        key = (call.func, scalars, *specs, *[(tuple(call[s].shape), call[s].dtype) for s in singles])
        found = _chosen.get(key)
        if found is None:
            result = None if written else _result(call, lists, i, specs[0].layout.whole)
            if result is not None and result.shape != broadcast_shape([own.shape for own in specs]):
                inputs = [own.layout.whole for own in specs]         # no pointwise op: on whole operands
            else:
                rule = pointwise(algebra.get(len(tensors) + len(singles), ""))(_Element(tensors, len(singles)))
                target = 0 if written else None
                outputs = [(specs[0].shape, specs[0].nbytes)]
                machine = world().machine
                chosen = (choose(rule, specs, outputs, machine, target)
                          or choose(rule, specs, outputs, machine, target, moved=True))
                inputs, (give,) = layouts(chosen, specs, 1)
                result = result and result.on(give)
            found = _chosen[key] = inputs, result
        wants.append(found[0])
        results.append(found[1])
    return wants, results


_chosen: dict[tuple, tuple[list[Layout], Spec | None]] = {}


def _boxed(cls: type, lists: dict, wants: list[list[Layout]], func: OpOverload) -> dict[str, list[Any]]:
    """Every element in the layout it must have, all moved in one go: name -> element -> shards (or a plain tensor)."""
    held: dict[str, list[Any]] = {}
    items, places = [], []
    for k, (name, tensors) in enumerate(lists.items()):
        held[name] = []
        for i, t in enumerate(tensors):
            want = wants[i][k]
            own = t.spec if type(t) is cls else spec(want.whole, tuple(t.shape), t.stride(), t.dtype)
            shards = t.shards if type(t) is cls else dict.fromkeys(local_ranks_of(want.placement), t)
            held[name].append(shards if type(t) is cls else t)
            if own.layout is not want:
                items.append(Boxed(own, shards, want))
                places.append((name, i))
    for (name, i), shards in zip(places, box(items, str(func)) if items else ()):
        held[name][i] = shards
    return held


def _local(call: Call, cls: type, held: dict, whole: dict, mine: list[int], rank: int, keyword: bool) -> Any:
    """The positional or keyword arguments of one rank's local call."""
    values, count = {}, len(next(iter(held.values())))
    for a in arguments(call.func):
        if a.keyword != keyword:
            continue
        value = call[a.name]
        if a.name in held:
            value = [h[rank] if isinstance(h, dict) else h for h in (held[a.name][i] for i in mine)]
        elif isinstance(value, (list, tuple)) and len(value) == count:
            value = [value[i] for i in mine]         # one scalar per element
        elif type(value) is cls:
            value = whole[a.name][rank]
        if a.tensor and value is not None and value.dim():
            value = value[mine]                      # the same in a tensor
        values[a.name] = value
    return values if keyword else list(values.values())


def _write_back(lists: dict, wants: list[list[Layout]], held: dict, written: set[str], func: OpOverload) -> None:
    """Elements that were boxed before they were written get the new value back."""
    for k, (name, tensors) in enumerate(lists.items()):
        if name not in written:
            continue
        away = [i for i, t in enumerate(tensors)
                if isinstance(held[name][i], dict) and t.spec.layout is not wants[i][k]]
        back = box([Boxed(spec(wants[i][k], tensors[i].spec.shape, None, tensors[i].spec.dtype), held[name][i],
                          tensors[i].spec.layout) for i in away], str(func)) if away else ()
        for i, shards in zip(away, back):
            for rank, shard in tensors[i].shards.items():
                shard.copy_(shards[rank])


def _result(call: Call, lists: dict, i: int, give: Layout) -> Spec:
    """The spec of result i, by torch's meta kernel on that element alone."""
    count = len(next(iter(lists.values())))
    args, kwargs = [], {}
    for a in arguments(call.func):
        value = call[a.name]
        if a.name in lists:
            value = [_meta(value[i])]
        elif isinstance(value, torch.Tensor):
            value = _meta(value) if value.dim() == 0 else torch.ones(1, dtype=value.dtype)   # its element i is read
        elif isinstance(value, (list, tuple)) and len(value) == count:
            value = [value[i]]
        if a.keyword:
            kwargs[a.name] = value
        else:
            args.append(value)
    (made,) = call.func(*args, **kwargs)
    return spec(give, tuple(made.shape), made.stride(), made.dtype)


def _meta(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device="meta")
