"""The foreach and fused ops of torch's optimizers: one local call per rank for a list of global tensors.

Element i of every list is one pointwise op; its rule comes from the line of the op that the name carries
(`_foreach_add_` from `add`). Each element may lie on a placement of its own; a rank's local call gets the elements
that it holds.
"""
from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from globaltensor import comm
from globaltensor.boxing.run import Boxed, box
from globaltensor.dispatch.choose import choose, layouts
from globaltensor.dispatch.recipe import Recipe
from globaltensor.errors import InPlaceError, MixedPlacementError
from globaltensor.layout import Layout, Spec, layout, spec
from globaltensor.rules.call import Call, arguments
from globaltensor.rules.table import foreach_algebra
from globaltensor.rules.families import pointwise
from globaltensor.rules.language import Rule
from globaltensor.sbp import broadcast


def is_foreach(func: OpOverload) -> bool:
    """Is this one of torch's horizontally fused pointwise ops?"""
    return foreach_algebra(func) is not None


class _Element(Call):
    """Element i of a foreach call, as a call of its own for the rule."""

    __slots__ = ()

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors, self.ndims, self.values = tensors, tuple(t.dim() for t in tensors), {}


def decide(cls: type, call: Call) -> Recipe:
    """Foreach calls are not cached element by element: what to do is found from the specs each time, quickly."""
    return Recipe(call.func, rewrite=lambda now, run: _run(cls, now))


def _run(cls: type, call: Call) -> Any:
    func = call.func
    lists = {a.name: call[a.name] for a in arguments(func) if a.tensors and call[a.name]}
    written = {a.name for a in arguments(func) if a.written and call[a.name]}
    count = len(next(iter(lists.values())))
    singles = [a.name for a in arguments(func) if a.tensor and call[a.name] is not None]
    wants, gives = _wants(cls, call, lists, singles, written, count)
    held = _boxed(cls, lists, wants, func)
    whole = {name: box([Boxed(call[name].spec, call[name].shards, _home(call[name].spec.layout))], str(func))[0]
             for name in singles if type(call[name]) is cls}
    made: list[dict[int, Any]] = [{} for _ in range(count)]
    for rank in comm.world().driven:
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
    outputs = _specs(call, lists, gives, singles, count)
    return [cls.wrap(own, shards) for own, shards in zip(outputs, made)]


def _wants(cls: type, call: Call, lists: dict, singles: list[str], written: set[str], count: int
           ) -> tuple[list[list[Layout]], list[Layout]]:
    """Per element, the layout of each list's tensor, and of the result."""
    algebra = foreach_algebra(call.func)
    wants, gives = [], []
    for i in range(count):
        tensors = [items[i] for items in lists.values()]
        places = {t.spec.placement for t in tensors if type(t) is cls}
        if len(places) != 1:
            raise MixedPlacementError(f"{call.func}: element {i} mixes {', '.join(map(str, places)) or 'plain tensors'}",
                                      "the operands of one op live on one placement", "to_global one of them")
        where = places.pop()
        home = layout(where, (broadcast,) * where.ndim)
        specs = [t.spec if type(t) is cls else spec(home, tuple(t.shape), t.stride(), t.dtype) for t in tensors]
        key = (call.func, *specs, *[tuple(call[s].shape) for s in singles])
        found = _chosen.get(key)
        if found is None:
            rule = _rule(algebra, tensors + [call[s] for s in singles])
            target = 0 if written else None
            outputs = [(specs[0].shape, specs[0].nbytes)]
            every = specs + [spec(home, tuple(call[s].shape), None, call[s].dtype) for s in singles]
            machine = comm.world().machine
            chosen = (choose(rule, every, outputs, machine, target)
                      or choose(rule, every, outputs, machine, target, moved=True))
            found = _chosen[key] = layouts(chosen, every, 1)
        wants.append(found[0])
        gives.append(found[1][0])
    return wants, gives


def _home(of: Layout) -> Layout:
    """All broadcast on the same placement."""
    return of.with_sbp((broadcast,) * of.placement.ndim)


_chosen: dict[tuple, tuple[list[Layout], list[Layout]]] = {}


def _rule(algebra: str, tensors: list[Any]) -> Rule:
    return pointwise(algebra)(_Element(tensors))


def _boxed(cls: type, lists: dict, wants: list[list[Layout]], func: OpOverload) -> dict[str, list[Any]]:
    """Every element in the layout it must have, all moved in one go: name -> element -> shards (or a plain tensor)."""
    held: dict[str, list[Any]] = {}
    items, places = [], []
    for k, (name, tensors) in enumerate(lists.items()):
        held[name] = []
        for i, t in enumerate(tensors):
            want = wants[i][k]
            own = t.spec if type(t) is cls else spec(_home(want), tuple(t.shape), t.stride(), t.dtype)
            shards = t.shards if type(t) is cls else {r: t for r in comm.world().driven if r in want.placement.coords}
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
        values[a.name] = value
    return values if keyword else list(values.values())


def _write_back(lists: dict, wants: list[list[Layout]], held: dict, written: set[str], func: OpOverload) -> None:
    """Elements that were boxed before they were written get the new value back."""
    for k, (name, tensors) in enumerate(lists.items()):
        if name not in written:
            continue
        away = [i for i, t in enumerate(tensors) if isinstance(held[name][i], dict) and held[name][i] is not t.shards]
        back = box([Boxed(spec(wants[i][k], tensors[i].spec.shape, None, tensors[i].spec.dtype), held[name][i],
                          tensors[i].spec.layout) for i in away], str(func)) if away else ()
        for i, shards in zip(away, back):
            for rank, shard in tensors[i].shards.items():
                shard.copy_(shards[rank])


def _specs(call: Call, lists: dict, gives: list[Layout], singles: list[str], count: int) -> list[Spec]:
    """What comes out, by torch's meta kernels."""
    def meta(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device="meta")

    values = []
    for a in arguments(call.func):
        value = call[a.name]
        if a.name in lists:
            value = [meta(t) for t in value]
        elif a.name in singles:
            value = meta(value)
        values.append(value)
    results = call.func(*values)
    return [spec(give, tuple(r.shape), r.stride(), r.dtype) for give, r in zip(gives, results)]
