"""The foreach and fused ops of torch's optimizers: one local call per rank for a list of global tensors.

Element i of every list is one pointwise op; its rule comes from the line of the op that the name carries
(`_foreach_add_` from `add`). Each element may be on a placement of its own: a rank's local call gets the elements that
it holds. Tensors that all elements share (a clipping factor) are whole on every rank that holds an element.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from globaltensor.algorithms.run import Run
from globaltensor.dispatch.choose import choose, layouts
from globaltensor.dispatch.recipe import Recipe, decide_aliases, spec_of_plain, written_operands
from globaltensor.dispatch.scalars import mixed_placements
from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import Layout, Spec, spec
from globaltensor.layouts.placement import placement
from globaltensor.op_table.variants import foreach_algebra, foreach_is_pointwise
from globaltensor.rules.call import Call, Slot, arguments, written
from globaltensor.rules.families import broadcast_shape, of_integers, of_numbers, pointwise
from globaltensor.rules.language import NUMBER
from globaltensor.runtime.memory_writes import memory_id
from globaltensor.runtime.meta import meta
from globaltensor.runtime.torch_internals import OpOverload
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


def decide_foreach(cls: type[GlobalLike], call: Call) -> Recipe:
    """The recipe of a foreach call: what is decided for each element, side by side."""
    lists = {a.name: call[a.name] for a in arguments(call.func) if a.tensors and call[a.name]}
    targets = written_operands(call)
    wants, results = _decide_elements(cls, call, lists, bool(targets))
    homes = list(dict.fromkeys(layouts_of[0].replicated for layouts_of in wants))
    operands: list[tuple[Slot, Any, Layout | None]] = []
    for t, slot, name in zip(call.tensors, call.slots, call.names):
        if slot.item is not None:
            operands.append((slot, t, wants[slot.item][list(lists).index(name)]))
        else:                                        # shared: once for each placement that has an element
            operands += [(slot, t, home) for home in homes] if type(t) is cls else [(slot, t, None)]
    specs = [t.spec if type(t) is cls else spec_of_plain(t, (want or homes[0]).placement) for _, t, want in operands]
    holds = {rank: tuple(i for i, layouts_of in enumerate(wants) if rank in layouts_of[0].placement.coords)
             for rank in sorted({rank for home in homes for rank in local_ranks_of(home.placement)})}
    holds = {rank: elements for rank, elements in holds.items() if elements}       # torch refuses an empty list
    everywhere = len(homes) == 1
    recipe = Recipe(call.func, homes[0], tuple(holds), tuple(slot for slot, _, _ in operands),
                    tuple(None if want is own.layout else want for (_, _, want), own in zip(operands, specs)),
                    [] if targets else results, targets, elements=None if everywhere else holds)
    decide_aliases(recipe, specs)
    return recipe


def has_plain_element(call: Call) -> bool:
    """Is any of several elements a plain one, or one that writes to a plain tensor? So it is where gradients of a
    global module and of a plain one are clipped, and where an optimizer has parameters of both."""
    return len(_element_groups(call)) > 1


def plain_apart(call: Call, run: Run) -> list[Any] | None:
    """The op on the plain elements, on those that write to plain tensors, and on the others: each group in one go."""
    return _in_groups(call, run, _element_groups(call))


def one_by_one(call: Call, run: Run) -> list[Any] | None:
    """The op on one element after the other."""
    return _in_groups(call, run, [[i] for i in range(_element_count(call))])


def _in_groups(call: Call, run: Run, groups: list[list[int]]) -> list[Any] | None:
    results: dict[int, Any] = {}
    for elements in groups:
        args, kwargs = _of_elements(call, elements)
        results.update(zip(elements, run(call.func, *args, **kwargs) or ()))
    return [results[i] for i in sorted(results)] if call.func._schema.returns else None


def _element_groups(call: Call) -> list[list[int]]:
    """The elements by whether they have global tensors, and whether they write to plain ones."""
    lists = [(a.written, call[a.name]) for a in arguments(call.func) if a.tensors and call[a.name]]
    groups: dict[tuple[bool, bool], list[int]] = {}
    for i, element in enumerate(zip(*[tensors for _, tensors in lists])):
        writes_plain = any(writes and not is_global(t) for (writes, _), t in zip(lists, element))
        groups.setdefault((any(map(is_global, element)), writes_plain), []).append(i)
    return list(groups.values())


def share_memory(call: Call) -> bool:
    """Do elements that a foreach op writes share memory? If they are boxed, one is done after the other."""
    memories = [memory_id(t) for t in written(call) if t.shards]
    return is_foreach(call.func) and len(set(memories)) < len(memories)


def element_calls(call: Call) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """The arguments of the same op for each element alone."""
    for i in range(_element_count(call)):
        yield _of_elements(call, [i])


def _element_count(call: Call) -> int:
    return len(next(call[a.name] for a in arguments(call.func) if isinstance(call[a.name], (list, tuple))))


def _of_elements(call: Call, elements: list[int]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the same op for some of its elements."""
    count = _element_count(call)

    def only(value: Any) -> Any:
        per_element = isinstance(value, (list, tuple)) or isinstance(value, torch.Tensor) and value.dim() == 1
        if not per_element or len(value) != count or len(elements) == count:
            return value
        return value[elements] if isinstance(value, torch.Tensor) else [value[i] for i in elements]

    args, kwargs = call.full_arguments()
    return [only(value) for value in args], {name: only(value) for name, value in kwargs.items()}


def _decide_elements(cls: type[GlobalLike], call: Call, lists: dict[str, list[Any]], writes: bool
                     ) -> tuple[list[list[Layout]], list[Spec]]:
    """Per element, the layout of each list's tensor; and the specs of the results, unless the first list is written."""
    shared = [call[a.name] for a in arguments(call.func) if a.tensor and call[a.name] is not None]
    decided: dict[tuple[Spec, ...], tuple[list[Layout], Spec | None]] = {}
    elements = []
    for i, tensors in enumerate(zip(*lists.values())):
        where = _placement_of_element(cls, call, i, tensors)
        specs = tuple(t.spec if type(t) is cls else spec_of_plain(t, where) for t in tensors)
        # a model has hundreds of parameters, and few kinds of them
        if specs not in decided:
            result = _result(call, lists, i, specs[0].layout.replicated)
            decided[specs] = _decide_element(call, list(tensors), specs, len(shared), result, writes)
        elements.append(decided[specs])
    return [wants for wants, _ in elements], [result for _, result in elements if result is not None]


def _decide_element(call: Call, tensors: list[Any], specs: tuple[Spec, ...], shared: int, result: Spec | None,
                    writes: bool) -> tuple[list[Layout], Spec | None]:
    """The layouts of one element's tensors, and the spec of its result."""
    if result is not None and (result.shape != broadcast_shape([own.shape for own in specs])
                               or not foreach_is_pointwise(call.func)):
        return [own.layout.replicated for own in specs], result      # no pointwise op: on whole operands
    algebra = (foreach_algebra(call.func) or {}).get(len(tensors) + shared, "")
    rule = of_numbers(pointwise(algebra)(_Element(tensors, shared)), call)
    rule = of_integers(rule, [own.dtype for own in specs], [(result or specs[0]).dtype])
    chosen = choose(rule, list(specs), [(specs[0].shape, specs[0].nbytes)], world().machine, 0 if writes else None)
    wants, (give,) = layouts(chosen, list(specs), 1)
    return wants, result and result.on(give)


def _placement_of_element(cls: type[GlobalLike], call: Call, i: int, tensors: tuple[Any, ...]) -> placement:
    """The placement that the global tensors of element i share; where all are plain, that of what elements share."""
    places: dict[placement, int] = {}                # with the first operand on each
    plain = not any(type(t) is cls for t in tensors)
    for q, (t, slot) in enumerate(zip(call.tensors, call.slots)):
        if type(t) is cls and slot.item == (None if plain else i):
            places.setdefault(t.spec.placement, q)
    if len(places) > 1:
        raise mixed_placements(call, *list(places.values())[:2])
    return next(iter(places))


def _result(call: Call, lists: dict[str, list[Any]], i: int, give: Layout) -> Spec | None:
    """The spec of result i, by torch's meta kernel on that element alone; None where the first list is written.

    It is asked then, too: shapes that do not fit may make parts that do, and a rank may hold no element at all."""
    count = len(next(iter(lists.values())))
    args, kwargs = [], {}
    for a in arguments(call.func):
        value = call[a.name]
        if a.name in lists:
            value = [_meta_like(value[i])]
        elif isinstance(value, torch.Tensor):
            element = torch.ones(1, dtype=value.dtype, device="cpu")
            value = _meta_like(value) if value.dim() == 0 else element
        elif isinstance(value, (list, tuple)) and len(value) == count:
            value = [value[i]]
        if a.keyword:
            kwargs[a.name] = value
        else:
            args.append(value)
    if "_fused_" in call.func._schema.name:          # whose kernels check nothing, and of which most have no other
        _check_state(call, lists, i)
        return None
    results = meta(call.func, args, kwargs)
    if results is None:
        return None
    (result,) = results
    return spec(give, tuple(result.shape), result.stride(), result.dtype)


def _check_state(call: Call, lists: dict[str, list[Any]], i: int) -> None:
    """Refuse what an optimizer keeps for a parameter of another shape: its kernel would read beyond the end."""
    of = tuple(call["self"][i].shape)
    for name, tensors in lists.items():
        had = tuple(tensors[i].shape)
        if had != of and name != "state_steps":
            raise GlobalTensorError(f"{call.func}: {name}[{i}] has shape {had}, its parameter {of}",
                                    "what an optimizer keeps of a parameter, and its gradient, are of its shape",
                                    "optimizer.load_state_dict() of a state that was saved for this model")


def _meta_like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device="meta")
