"""What was decided for an op, ready to be done again: looked up by op, specs and static arguments.

A recipe is made in one place and run in several. A new field of `Recipe` must be known to

    decide.py, foreach.py     which decide it, for one op and for a list of elements
    execute.py                which runs recipes in Python
    native.py                 which hands it to the native dispatcher, or leaves the call to Python;
    csrc/torch_ext            where recipe.h holds it, recipe.cpp reads it, and execute.cpp runs by it
    debug/explain.py          which shows it
"""
from __future__ import annotations

from cmath import isfinite
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any

import torch

from globaltensor.algorithms.aliasing import check_writable, view_spec
from globaltensor.algorithms.run import Decomposition
from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.global_like import GlobalLike
from globaltensor.layouts.layout import Layout, Shape, Spec, lazy_bits_of, replicated, spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.regions import Region
from globaltensor.layouts.view_parts import ViewSlices
from globaltensor.rules.call import Call, Slot, arguments
from globaltensor.rules.language import Signature
from globaltensor.runtime.memory import refuse_nested
from globaltensor.runtime.torch_internals import OpOverload

RankArgs = dict[int, tuple[tuple[int | str, Any], ...]]


@dataclass(slots=True)
class Recipe:
    """How to run one op on operands of these specs.

    home           all broadcast on the placement: plain operands, and outputs of which no rule knows
    ranks          the ranks that this process drives, of those that hold operands
    slots          where the operands stand in the call
    wants          the layout each of them must have, None if it has it already
    outputs        the spec of each result in order, None for one that is not a tensor; None instead of the list if only
                   running the op tells (all of them are then broadcast)
    written        operands that the op writes to, which are what it returns
    write_back     those of them that are boxed first, so that their new value must be moved back
    boxes_view     the results are boxed views: of operands that must be boxed, or are such views themselves
    slices         of the one boxed view, what ranks hold of it; None where its base is boxed instead
    local_args     per rank, arguments by position or name that differ there: sizes of its part, offsets
    local_impl     runs instead of the op itself: local_impl(recipe, rank, args, kwargs)
    shapes         for local_impl, the global shapes of the operands, and `regions`, per rank, the parts it has of them
    seeded         the op draws random numbers that no rule takes care of
    elements       of a foreach op, per rank, the elements that it holds; None if every rank holds all
    signature      what was chosen on each axis; empty for an op without a rule
    simple         fast path: operands stand at these positions, are global, and stay as they are; `single`: and one
                   tensor comes out
    verified       it ran once, and its results were what `outputs` says (verify.py)
    """

    func: OpOverload
    home: Layout
    ranks: tuple[int, ...]
    slots: tuple[Slot, ...]
    wants: tuple[Layout | None, ...]
    outputs: Sequence[Spec | None] | None = None
    written: tuple[int, ...] = ()
    write_back: tuple[int, ...] = ()
    boxes_view: bool = False
    slices: ViewSlices | None = None
    local_args: RankArgs = field(default_factory=dict)
    local_impl: Callable[..., Any] | None = None
    shapes: tuple[Shape, ...] = ()
    regions: tuple[dict[int, Region], ...] = ()
    seeded: bool = False
    elements: dict[int, tuple[int, ...]] | None = None
    signature: tuple[Signature, ...] = ()
    simple: tuple[int, ...] | None = None
    single: Spec | None = None
    verified: bool = False


Decision = Recipe | Decomposition                    # how an op runs: by its rule, or by other ops


def written_operands(call: Call) -> tuple[int, ...]:
    """The operands that the op writes to. Raises InPlaceError for one that cannot take a global value."""
    names = {a.name for a in arguments(call.func) if a.written}
    written = tuple(q for q, name in enumerate(call.names) if name in names)
    for q in written:
        check_writable(call.tensors[q], call.func, call.operand(q))
    return written


def decide_aliases(recipe: Recipe, operands: Sequence[Spec]) -> None:
    """Which written operands must be moved back, and whether the results are views, or boxed ones."""
    recipe.write_back = tuple(q for q in recipe.written if recipe.wants[q] is not None)
    tells = recipe.outputs is not None               # else it runs at once, as only running it tells what it views
    recipe.boxes_view = tells and recipe.func.is_view and (any(recipe.wants) or operands[0].copied)
    if recipe.boxes_view:
        recipe.outputs = [own and view_spec(own) for own in recipe.outputs or ()]


def static(value: Any, cls: type[GlobalLike]) -> Any:
    """The part of a cache key for one argument: the spec of a tensor, the type of a float or generator, else the value.

    So no decision may depend on the value of a float, but for whether it is 0, and finite. An int is not taken for the
    bool that equals it.
    """
    kind = type(value)
    if kind is cls:
        return value.spec
    # a learning rate that changes every step must not be a new decision every step
    if kind is float or kind is complex:
        return kind, value == 0, isfinite(value)
    if kind is torch.SymFloat:                       # of a graph: only values tell it
        return static(nan, cls)
    if kind is torch.Generator:
        return kind
    if kind is int or kind is bool:
        return kind, value
    if kind is list or kind is tuple:
        return (list, *[static(v, cls) for v in value])
    if isinstance(value, torch.Tensor):
        sizes = tuple(map(int, value.shape)), tuple(map(int, value.stride()))      # symbols, where torch.compile traces
        return "plain", *sizes, value.dtype, value.device
    if kind is dict:
        return (dict, *[(k, static(v, cls)) for k, v in value.items()])
    return value


def purpose_of(call: Call) -> str:
    """An op with the numbers and texts of its arguments, `aten.select.int(dim=0, index=7)`: what all ranks must mean
    alike where operands are boxed for it. Floats are not told, as recipes know nothing of them."""
    spelled = [f"{a.name}={value}" for a in arguments(call.func)
               if _is_spelled(value := call.values[a.name]) and value != a.default]
    return f"{call.func}({', '.join(spelled)})" if spelled else str(call.func)


def _is_spelled(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_spelled, value))
    return value is None or isinstance(value, (int, str))


def spec_of_plain(t: torch.Tensor, where: placement) -> Spec:
    """A plain tensor counts as broadcast."""
    return spec(replicated(where), tuple(t.shape), t.stride(), t.dtype, lazy_bits=lazy_bits_of(t))


def output_spec(result: Any, where: Layout) -> Spec | None:
    """The spec of a result in this layout; None for what is not a tensor."""
    if not isinstance(result, torch.Tensor):
        return None
    if result.is_nested:
        refuse_nested()
    if result.layout is not torch.strided or result.is_quantized:
        kind = "quantized" if result.is_quantized else f"of layout {result.layout}"
        raise GlobalTensorError(f"a tensor made of a global one would be {kind}",
                                "the shards of a global tensor are parts of it, of its dtype, in plain memory",
                                "the same of x.full_tensor(), which is a plain tensor")
    return spec(where, tuple(result.shape), result.stride(), result.dtype, lazy_bits=lazy_bits_of(result))


def moved_spec(of: Spec, dst: Layout | None) -> Spec:
    """The spec after a boxing, None for no boxing."""
    return of if dst is None else of.moved(dst)
