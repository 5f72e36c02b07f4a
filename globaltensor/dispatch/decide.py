"""Deciding how an op runs: from the table's rule, the operands' specs and the static arguments to a recipe.

The legal signatures come from the rule, the cheapest from `choose`; what the outputs will be is told by torch's own
shape functions (runtime/meta.py), so a user's mistake (a wrong shape, a dim out of range) is torch's own error, about
global shapes. An op without a line in the table, and one whose output only running it tells, runs on all-B operands.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from math import nan, prod
from typing import Any

import torch

from globaltensor.algorithms.offer import Offer
from globaltensor.algorithms.run import Decomposition
from globaltensor.dispatch import foreach
from globaltensor.dispatch.choose import Contest, layouts
from globaltensor.dispatch.kernel_errors import of_zeros, refuse_by_kernel, refuse_dtypes, rule_of
from globaltensor.dispatch.op_errors import refuse_collectives
from globaltensor.dispatch.other_devices import check_device, decide_elsewhere
from globaltensor.dispatch.out_of_place import may_move_result, offer_result
from globaltensor.dispatch.plain_writes import write_whole, write_whole_result, writes_plain
from globaltensor.dispatch.recipe import (
    Decision,
    Recipe,
    decide_aliases,
    moved_spec,
    output_spec,
    spec_of_plain,
    static,
    written_operands,
)
from globaltensor.dispatch.scalars import bring_scalars, mixed_placements, placement_of_scalars
from globaltensor.dispatch.user_rules import results_by_rule
from globaltensor.dispatch.verify import changed_shape
from globaltensor.dispatch.view_reads import stays_split, view_slices
from globaltensor.dispatch.view_writes import restride, write_through, writes_view
from globaltensor.errors import MixedPlacementError
from globaltensor.layouts.global_like import GlobalLike
from globaltensor.layouts.layout import Spec, contiguous, replicated, same_parts
from globaltensor.layouts.placement import placement
from globaltensor.layouts.recent import Recent
from globaltensor.layouts.symbols import expected, has_symbols
from globaltensor.op_table.line import Line, always_decomposed
from globaltensor.op_table.variants import WriteResult, line_of, out_of_place
from globaltensor.rules.call import Call, arguments, values_of
from globaltensor.rules.families import of_integers
from globaltensor.rules.language import Signature, expected_rule, fits, label_sizes
from globaltensor.runtime.custom_ops import MADE_OF
from globaltensor.runtime.meta import as_on, meta
from globaltensor.runtime.torch_internals import (
    OpOverload,
    neg_view,
    shapes_of_symbols,
    tree_map_only,
)
from globaltensor.runtime.world import local_ranks_of, world


def decide(cls: type[GlobalLike], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Decision:
    """How this call runs, decided anew."""
    refuse_collectives(func)
    call = Call(func, *_for_any_float(args, kwargs))
    line = line_of(func)
    decomposition = line.decomposition if line is not None else None
    if writes_view(call) and not (decomposition and func._schema.arguments[-1].is_out):      # those make, then copy
        _check_call(cls, call)
        return write_through
    if writes_plain(call):
        return _write_result_whole(cls, call) or write_whole
    if foreach.is_foreach(func):                     # whose elements may be on different placements
        if foreach.has_plain_element(call):
            return foreach.plain_apart
        return decomposition or foreach.decide_foreach(cls, call)
    if placement_of_scalars(call) is not None:
        return bring_scalars
    where = _one_placement(cls, call)
    elsewhere = decide_elsewhere(call, where)
    if elsewhere is not None:
        return elsewhere
    if line is not None and decomposition is not None and line.offer is None and line.applies(call):
        refuse_dtypes(call, [t.spec if type(t) is cls else spec_of_plain(t, where) for t in call.tensors])
        return decomposition
    decision = _decide_by_rule(cls, call, line, where, len(args), beside=True)
    return restride if func is _as_strided and isinstance(decision, Recipe) and decision.boxes_view else decision


def _write_result_whole(cls: type[GlobalLike], call: Call) -> Decomposition | None:
    """How an op writes a plain tensor whose result is less to move than its operands; None for any other."""
    line, places = line_of(call.func), {t.spec.placement for t in call.tensors if type(t) is cls}
    if line is None or line.family is always_decomposed or len(places) > 1 or out_of_place(call) is None:
        return None
    operands = [t.spec if type(t) is cls else spec_of_plain(t, next(iter(places))) for t in call.tensors]
    results = _meta(call, operands)
    if results is None or line.offer is not None:
        return None
    choice = _contest(line, call, operands, results, (0,), beside=True).choice()
    return write_whole_result(WriteResult(choice.wants)) if isinstance(choice, Offer) else None


def decide_by_rule(cls: type[GlobalLike], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Recipe:
    """How this call runs on its own, even if a decomposition applies; of no foreach op."""
    call = Call(func, *_for_any_float(args, kwargs))
    recipe = _decide_by_rule(cls, call, line_of(func), _one_placement(cls, call), len(args))
    assert isinstance(recipe, Recipe)                # nothing else was asked
    return recipe


def _for_any_float(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The arguments with nan for a float of a graph that only values tell, such as x.item(): what is decided for nan,
    which no sum of terms may be multiplied by, holds for all."""
    if not any(type(value) is torch.SymFloat for value in values_of((*args, *kwargs.values()))):
        return args, kwargs
    return tree_map_only(torch.SymFloat, lambda _: nan, (args, kwargs))


def _decide_by_rule(cls: type[GlobalLike], call: Call, line: Line | None, where: placement, positional: int,
                    beside: bool = False) -> Decision:
    """The recipe of a call with so many positional arguments; `beside`: or its algorithm, where that is cheaper."""
    func = call.func
    if line is not None and line.family is always_decomposed:
        line = None                                  # of a call that is not: on whole operands
    check_device(call, where)
    operands = [t.spec if type(t) is cls else spec_of_plain(t, where) for t in call.tensors]
    written = written_operands(call)
    home = replicated(where)
    results = _meta(call, operands)
    if results is None and line is not None:
        results = results_by_rule(call, line, operands, torch.device(where.type))
    recipe = Recipe(func, home, local_ranks_of(where), tuple(call.slots), (home,) * len(operands), written=written,
                    # with a line, random_ops sees to it that numbers do not depend on the layout
                    seeded=line is None and torch.Tag.nondeterministic_seeded in func.tags)
    if written and results is not None:
        _check_written(call, written, results)
    if line is None or results is None:
        recipe.outputs = None if results is None else [output_spec(r, home) for r in results]
    else:
        choice = _contest(line, call, operands, results, written, beside).choice()
        if isinstance(choice, Offer):
            by_line = line.decomposition if line.offer is not None else None
            if by_line is not None:
                refuse_dtypes(call, operands)
            return by_line or WriteResult(choice.wants)
        _follow(choice, recipe, line, call, operands, results)
    recipe.wants = tuple(None if type(t) is cls and want is own.layout else want
                         for t, want, own in zip(call.tensors, recipe.wants, operands))
    decide_aliases(recipe, operands)
    views = recipe.outputs or ()
    # of symbols no slices are taken: boxed views come again with numbers (symbolic.py)
    if recipe.boxes_view and len(views) == 1 and views[0] is not None and not (
            operands[0].symbolic or views[0].symbolic or has_symbols(list(values_of(call.values.values())))):
        _take_slices(call, operands[0], recipe)
    # an argument that the caller left out is not among the local call's positions
    recipe.local_args = {rank: tuple((_passed(func, at, positional), value) for at, value in own)
                         for rank, own in recipe.local_args.items()}
    if _is_simple(recipe, call):
        recipe.simple = tuple(slot.at for slot in call.slots if isinstance(slot.at, int))
        returns = func._schema.returns
        if recipe.outputs and len(returns) == 1 and str(returns[0].type) == "Tensor":
            recipe.single = recipe.outputs[0]
    return recipe


def _take_slices(call: Call, base: Spec, recipe: Recipe) -> None:
    """Let a boxed view be made of what ranks hold of it. Of views of a boxed view only a slice that stays split is: for
    others, their base is boxed as a whole."""
    boxed, = recipe.outputs or ()
    assert boxed is not None
    view = stays_split(call, base, boxed)
    stays = view is not boxed
    if not base.copied or stays:
        recipe.slices = view_slices(call, base, view)
    if stays and recipe.slices is not None:
        recipe.outputs, recipe.wants = [view], (view.layout,)
        recipe.signature = tuple(Signature((s,), (s,), None) for s in view.sbp)


_as_strided = torch.ops.aten.as_strided.default


def _check_call(cls: type[GlobalLike], call: Call) -> None:
    """Raise what is wrong with a call whose ranks run parts that do not tell: placements, shapes, dtypes."""
    if foreach.is_foreach(call.func):
        return                                       # whose elements are checked one by one
    where = _one_placement(cls, call)
    check_device(call, where)
    results = _meta(call, [t.spec if type(t) is cls else spec_of_plain(t, where) for t in call.tensors])
    if results is not None:
        _check_written(call, written_operands(call), results)


def contest_of(cls: type[GlobalLike], call: Call) -> Contest | None:
    """What there is to choose from for a call; None where there is no rule, or nothing tells what comes out."""
    line, where = line_of(call.func), _one_placement(cls, call)
    if line is None or line.family is always_decomposed:
        return None
    operands = [t.spec if type(t) is cls else spec_of_plain(t, where) for t in call.tensors]
    results = _meta(call, operands)
    return None if results is None else _contest(line, call, operands, results, written_operands(call), beside=True)


def _contest(line: Line, call: Call, operands: list[Spec], results: list[Any], written: tuple[int, ...], beside: bool
             ) -> Contest:
    """The same, of a line; `beside`: the algorithm too."""
    rule, symbolic = expected_rule(rule_of(line, call, operands)), any(own.symbolic for own in operands)
    rule = of_integers(rule, [own.dtype for own in operands],
                       [r if r is None else r.dtype for r in _ruled(results, len(rule.outputs))])
    operands = [own.expected for own in operands]
    sizes = []
    for r in _ruled(results, len(rule.outputs)):
        shape = expected(r.shape) if r is not None else ()
        # a cast is priced as if it did not widen: gradients under autocast stay pending, and are reduced together
        of = operands[0] if call.func is torch.ops.aten._to_copy.default else r
        sizes.append((shape, prod(shape) * of.dtype.itemsize if of is not None else 0))
    assert len(sizes) == len(rule.outputs), f"{call.func}: {len(sizes)} results, {len(rule.outputs)} in its rule"
    offer = line.offer(call, operands) if beside and line.offer is not None else None
    contest = Contest(rule, operands, sizes, world().machine, written[0] if written and rule.outputs else None, offer)
    if not beside or line.offer is not None or symbolic or not may_move_result(contest):
        return contest
    free = out_of_place(call)
    gives = _meta(free, operands) if free is not None else None
    if free is None or gives is None:
        return contest
    return contest._replace(offer=offer_result(contest, _contest(line, free, operands, gives, (), beside=False)))


def _follow(signature: tuple[Signature, ...], recipe: Recipe, line: Line, call: Call, operands: list[Spec],
            results: list[Any]) -> None:
    """Fill in what a signature says: layouts of operands and outputs, and how local arguments differ on the ranks."""
    rule, recipe.signature = line.rule(call), signature
    if has_symbols([n for _, n in rule.even]):       # legal for these sizes; now a condition of the graph
        shapes = [own.shape for own in operands]
        assert fits(rule, signature, operands[0].placement.shape, label_sizes(rule, shapes))
    wants, gives = layouts(recipe.signature, operands, len(rule.outputs))
    wants = [own.layout if same_parts(own.layout, want) else want for own, want in zip(operands, wants)]
    recipe.wants = tuple(wants)
    moved = [moved_spec(own, want) for own, want in zip(operands, wants)]
    if any(new.stride != own.stride for new, own in zip(moved, operands)) and not call.func.is_view:
        # strides follow those of the operands, and new shards have no gaps; but a view has those of its base
        results = _meta(call, moved) or results
    # by identity, as the rule has no output for what a mask left out
    layout_of = {id(r): give for r, give in zip(_ruled(results, len(gives)), gives)}
    outputs = [output_spec(r, layout_of.get(id(r), recipe.home)) for r in results]
    recipe.outputs = outputs
    recipe.local_impl = line.local_impl
    if line.local_impl is not None:
        recipe.shapes = tuple(own.shape for own in operands)
        recipe.regions = tuple({r: want.region(own.shape, r) for r in recipe.ranks}
                               for own, want in zip(operands, wants))
    if line.local_args is not None:
        tensors = [own for own in outputs if own is not None]
        recipe.local_args = {rank: tuple(line.local_args(call, moved, tensors, rank)) for rank in recipe.ranks}


def _ruled(results: list[Any], outputs: int) -> list[Any]:
    """The results that the rule's outputs are: all, or all tensors (gradients that a mask left out are None)."""
    return results if len(results) == outputs else [r for r in results if isinstance(r, torch.Tensor)]


def _passed(func: OpOverload, at: int | str, positional: int) -> int | str:
    """Where an argument of the schema goes in a local call of so many positional ones."""
    return arguments(func)[at].name if isinstance(at, int) and at >= positional else at


def _is_simple(recipe: Recipe, call: Call) -> bool:
    """May the fast path take it?"""
    if not recipe.outputs or recipe.outputs[0] is None:
        return False
    return (not any(recipe.wants) and not recipe.written
            and all(isinstance(at, int) for own in recipe.local_args.values() for at, _ in own)
            and not recipe.boxes_view and not recipe.seeded and "device" not in [a.name for a in arguments(call.func)]
            and all(isinstance(s.at, int) and s.item is None for s in call.slots))


def _one_placement(cls: type[GlobalLike], call: Call) -> placement:
    """The placement that all global operands share."""
    places: dict[placement, int] = {}                # with the first operand on each
    for q, t in enumerate(call.tensors):
        if type(t) is cls:
            places.setdefault(t.spec.placement, q)
    without = next((q for place, q in places.items() if place.type == "meta"), None)
    if without is not None:
        with_values = [q for q, t in enumerate(call.tensors) if t.dim() and not t.is_meta]
        if with_values:
            raise _without_values(call, without, with_values[0])
    if len(places) > 1:
        raise mixed_placements(call, *list(places.values())[:2])
    return next(iter(places))


def _without_values(call: Call, meta: int, valued: int) -> MixedPlacementError:
    name, other = call.operand(meta), call.operand(valued)
    moved = "module" if isinstance(call.tensors[valued], torch.nn.Parameter) else other
    return MixedPlacementError(f"{call.func}: {name} has no values, as {other} has",
                               f"{name} is on the meta device; a model that was built there gets its memory last",
                               'gt.materialize(model), gt.load_safetensors(model, folder) or gt.load({"model": model}, '
                               f'folder), before the model runs; for shapes alone: {moved}.to("meta")')


def _check_written(call: Call, written: tuple[int, ...], results: list[Any]) -> None:
    """What the op returns, if it is the target, must have the target's shape."""
    returns = call.func._schema.returns
    for q in written[:1] if returns and returns[0].alias_info is not None else ():
        had, gets = tuple(call.tensors[q].shape), [tuple(r.shape) for r in results if isinstance(r, torch.Tensor)]
        if gets and gets[0] != had:
            raise changed_shape(call.func, f"from {list(had)} to {list(gets[0])}")


_TYPE_WITHOUT_VALUES = re.compile(r"\bMeta(\w+)Type\b")


def _meta(call: Call, operands: list[Spec]) -> list[Any] | None:
    """What the op returns, as meta tensors in a flat list; None where only running it tells.

    A user's mistake (shapes that do not fit, a dim out of range) raises torch's own error here, about global shapes.
    """
    symbol = next((n for sizes in (*[own.shape + own.stride for own in operands], values_of(call.values.values()))
                   for n in sizes if type(n) is torch.SymInt), None)
    if symbol is not None:
        return _symbolic_meta(call, operands, symbol)
    key = _alike_key(call, operands)
    if key is not None and (dtypes := _alike.get(key)) is not None:
        return [torch.empty(operands[0].shape, dtype=dtype, device="meta") for dtype in dtypes]
    stand_ins = [_meta_operand(own) for own in operands]
    stand_ins = _of_one_shape(stand_ins) if call.func.namespace == "prims" else stand_ins
    args, kwargs = call.arguments_with(stand_ins)
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    try:
        with torch.no_grad():
            result = as_on(operands[0].placement.type, call.func, operands, meta(call.func, args, kwargs))
    except NotImplementedError:
        return None
    except (ValueError, AssertionError, ZeroDivisionError, KeyError):        # Python's own: it checks less
        result, key = of_zeros(call, operands), None
    except (RuntimeError, IndexError) as error:
        if str(error).startswith("output with shape"):
            raise changed_shape(call.func, str(error)) from None
        text = _TYPE_WITHOUT_VALUES.sub(r"torch.\1Tensor", str(error))       # as of the tensors that these stand for
        # torch has no class of errors for "no shape function": only its words tell that from a user's mistake
        if any(word in text.lower() for word in ("meta", "data-dependent", "no fake impl", "not allocated")):
            return None
        if all(own.numel for own in operands):
            refuse_by_kernel(call, operands)
            raise (type(error)(text) if text != str(error) else error) from None
        result, key = of_zeros(call, operands), None
    flat = list(values_of((result,))) if result is not None else []
    if key is not None and all(isinstance(r, torch.Tensor) and _is_like(r, operands[0]) for r in flat):
        _alike[key] = [r.dtype for r in flat]
    return flat if all(isinstance(r, torch.Tensor) or r is None for r in flat) else None


def _symbolic_meta(call: Call, operands: list[Spec], symbol: Any) -> list[Any]:
    """The same in symbols, as torch's own tracer tells it. (Ops that only running tells come with numbers.)"""
    with shapes_of_symbols(symbol), torch.no_grad():
        stand_ins = [torch.empty_strided(own.shape, own.stride, dtype=own.dtype, device=own.placement.type)
                     for own in operands]
        args, kwargs = call.arguments_with(stand_ins)
        return list(values_of((MADE_OF.get(call.func, call.func)(*args, **kwargs),)))


def _of_one_shape(stand_ins: list[torch.Tensor]) -> list[torch.Tensor]:
    """For torch.ops.prims, which take an operand of 0 dims beside others on a CPU only: it is as large as those."""
    large = max(stand_ins, key=torch.Tensor.dim)
    return [t if t.dim() else torch.empty_like(large, dtype=t.dtype) for t in stand_ins]


def _meta_operand(own: Spec) -> torch.Tensor:
    """A meta tensor with all that torch can ask of it."""
    t = torch.empty_strided(own.shape, own.stride, dtype=own.dtype, device="meta")
    t = t.conj() if "conj" in own.lazy_bits else t
    return neg_view(t) if "neg" in own.lazy_bits else t


_alike: Recent[tuple[Any, ...], list[torch.dtype]] = Recent()


def _alike_key(call: Call, operands: list[Spec]) -> tuple[Any, ...] | None:
    """What a pointwise op on contiguous operands of one shape gives depends on dtypes alone: the key of such a call."""
    shape = operands[0].shape
    if torch.Tag.pointwise not in call.func.tags or not shape or any(
            own.shape != shape or own.stride != contiguous(shape) or own.lazy_bits for own in operands):
        return None
    others = [static(v, type(call.tensors[0])) for v in call.values.values() if not isinstance(v, (torch.Tensor, list))]
    if any(isinstance(v, torch.memory_format) for v in others):
        return None                                  # which says what strides come out, of some shapes only
    return (call.func, torch.get_default_dtype(), *[own.dtype for own in operands], *others)


def _is_like(result: torch.Tensor, own: Spec) -> bool:
    """Is it of the shape of a contiguous operand, and contiguous as that?"""
    return tuple(result.shape) == own.shape and result.stride() == own.stride
