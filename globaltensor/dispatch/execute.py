"""Running a recipe: move what must move, all in one go; run the local op on every rank; wrap the results.

This is the interpreter of recipes in Python. The native dispatcher has one of its own (csrc/torch_ext/execute.cpp) for
those that it was handed.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from globaltensor.algorithms.aliasing import boxed_views, note_uncounted_write, note_write
from globaltensor.algorithms.completed import keep_completed
from globaltensor.algorithms.random_ops import seeded
from globaltensor.boxings.redistribute import Move, move_shards
from globaltensor.dispatch.kernel_errors import name_element_of_whole
from globaltensor.dispatch.recipe import Recipe, moved_spec, output_spec, purpose_of, spec_of_plain
from globaltensor.dispatch.verify import as_told, verify, verify_targets
from globaltensor.dispatch.view_reads import read_slices
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import Shape, Shards, Spec, completes, contiguous, spec
from globaltensor.rules.call import Call, Slot, arguments, put, set_arguments, values_of
from globaltensor.runtime.agreement import broadcast_object, compare_plain
from globaltensor.runtime.codec import message
from globaltensor.runtime.custom_ops import MADE_OF
from globaltensor.runtime.lineage import ignores_first
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.philox import draw_key
from globaltensor.runtime.torch_internals import OpOverload, break_graph, compiling, is_of_a_trace, set_view_replay
from globaltensor.runtime.world import world

_ITEM = torch.ops.aten._local_scalar_dense.default

Remake = Callable[[OpOverload, Sequence[Any]], list[Shards]]


def execute(cls: type[GlobalLike], recipe: Recipe, args: Sequence[Any], kwargs: dict[str, Any], remake: Remake) -> Any:
    """Run a recipe. A view that must be boxed is made when it is read, by `remake`."""
    if recipe.func.is_view and (torch_ext is None or args[0].traced):
        args[0].viewed = True                        # native code notes it itself
        if torch_ext is None:
            set_view_replay(True)                    # view_replay.cpp says why, and does so in transforms only
    if recipe.boxes_view:
        return _boxed_views(cls, recipe, Call(recipe.func, args, kwargs), remake)
    operands, held, results = _run_ranks(cls, recipe, args, kwargs)
    if not recipe.func._schema.returns and not recipe.written:
        return None                                  # it only checks its operands
    if recipe.single is not None and not recipe.func.is_view:
        return cls.wrap(recipe.single, all_in_order(recipe.single, results))
    if recipe.written:
        _write_back(recipe, operands, held)
        for q in recipe.written:
            (note_write if recipe.slots[q].item is None else note_uncounted_write)(operands[q])
        return _written_results(cls, recipe, operands, results)
    return _wrap(cls, recipe, operands, results)


def view_shards(cls: type[GlobalLike], recipe: Recipe, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shards]:
    """The shards of every result of a call that makes boxed views."""
    if recipe.slices is not None and recipe.outputs and recipe.outputs[0] is not None:
        call, view = Call(recipe.func, args, kwargs), recipe.outputs[0]
        shards = read_slices(recipe.slices, call.tensors[0].shards, view, str(recipe.func), purpose_of(call))
        return [all_in_order(view, shards)]
    results = _run_ranks(cls, recipe, args, kwargs)[2]
    if not results:
        return [{} for _ in recipe.outputs or ()]
    outputs = zip(recipe.outputs or (), _outputs(recipe, results))
    return [all_in_order(own, _without_lazy_bits(own, shards)) for own, shards in outputs if own is not None]


def _without_lazy_bits(own: Spec, shards: Shards) -> Shards:
    """Shards of a boxed view without the bits that it has not: what was boxed had lost its own, so that a view that
    ends them began them anew, and `view_as_real` takes none."""
    shards = shards if "conj" in own.lazy_bits else {rank: shard.resolve_conj() for rank, shard in shards.items()}
    return shards if "neg" in own.lazy_bits else {rank: shard.resolve_neg() for rank, shard in shards.items()}


def all_in_order(own: Spec, shards: Shards) -> Shards:
    """The shards with their dims in the order in memory that the spec's strides tell: what is a view of the whole is
    one of the shard, and a kernel that is chosen by the strides of the whole fits it."""
    if own.symbolic:
        return shards
    dense = own.stride == contiguous(own.shape)
    return {rank: shard if dense and shard.is_contiguous() else _in_order_of(own.stride, shard)
            for rank, shard in shards.items()}


def _in_order_of(stride: Shape, shard: torch.Tensor) -> torch.Tensor:
    order = sorted(range(shard.dim()), key=lambda d: -stride[d])
    steps = [shard.stride(d) for d in order if shard.shape[d] > 1 and stride[d]]
    if all(a >= b for a, b in zip(steps, steps[1:])):
        return shard
    return shard.permute(order).contiguous().permute([order.index(d) for d in range(shard.dim())])


def _boxed_views(cls: type[GlobalLike], recipe: Recipe, call: Call, remake: Remake) -> Any:
    specs = [own for own in recipe.outputs or () if own is not None]
    with _as_its_base(recipe, call.tensors):
        views = boxed_views(cls, specs, call.func, tuple(call.values.values()), remake)
    return views[0] if str(call.func._schema.returns[0].type) == "Tensor" else views


def _run_ranks(cls: type[GlobalLike], recipe: Recipe, args: Sequence[Any], kwargs: dict[str, Any]
               ) -> tuple[Sequence[Any], list[Shards], dict[int, Any]]:
    """The operands, what was held of them where the recipe wants them, and per rank what the local op returned."""
    func, simple, local_impl, seed = recipe.func, recipe.simple, recipe.local_impl, None
    # inductor fuses what an op is made of
    local_op: Callable[..., Any] = MADE_OF.get(func, func) if compiling() else func
    operands: Sequence[Any] = ()
    held: list[Shards] = []
    if simple is None or func.is_view:               # else there is nothing to look for, to check or to move
        operands = [_operand(args, kwargs, slot) for slot in recipe.slots]
    if simple is None:
        held = _move(cls, recipe, operands, args, kwargs)
        if recipe.seeded and any(is_global(t) and t.traced for t in operands):
            break_graph(func)                        # what it draws depends on the key's value
        if recipe.seeded:                            # drawn by every process, so that their generators stay in step
            seed = draw_key(Call(func, args, kwargs).get("generator"))
    results: dict[int, Any] = {}
    # of a number each rank has the same one, of which a graph would make a symbol for each
    for rank in recipe.ranks[:1] if func is _ITEM else recipe.ranks:
        if simple is not None:
            local_args, local_kwargs = list(args), kwargs
            for at in simple:
                local_args[at] = args[at].shards[rank]
        else:
            local_args, local_kwargs = _local_call(recipe, rank, held, args, kwargs)
        if recipe.local_args:
            set_arguments(local_args, local_kwargs, recipe.local_args[rank])
        if local_impl is not None:
            results[rank] = local_impl(recipe, rank, local_args, local_kwargs)
        elif seed is not None:
            results[rank] = seeded(func, seed, _device_of(recipe, rank), local_args, local_kwargs)
        else:
            try:
                results[rank] = local_op(*local_args, **local_kwargs)
            except RuntimeError as error:
                name_element_of_whole(error, Call(func, args, kwargs).tensors[0], rank, recipe.outputs or ())
                raise
    if recipe.home.placement.type == "meta" or any(map(is_of_a_trace, values_of(results.values()))):
        results = {rank: as_told(recipe, result) for rank, result in results.items()}
    if not recipe.verified and (func._schema.returns or recipe.written):
        verify(recipe, results)
        verify_targets(recipe, operands, held)
        recipe.verified = True
    return operands, held, results


def _operand(args: Sequence[Any], kwargs: dict[str, Any], slot: Slot) -> Any:
    value = args[slot.at] if isinstance(slot.at, int) else kwargs[slot.at]
    return value if slot.item is None else value[slot.item]


def _device_of(recipe: Recipe, rank: int) -> torch.device:
    return world().device(recipe.home.placement.type, rank)


def _on_device(plain: torch.Tensor, device: torch.device, always: bool = False) -> torch.Tensor:
    """A plain operand for a rank: among accelerators on the rank's own. One on the CPU is torch's to take or refuse,
    unless it `always` goes there."""
    return plain.to(device) if always or plain.device.type == device.type not in ("cpu", "meta") else plain


def _move(cls: type[GlobalLike], recipe: Recipe, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
          ) -> list[Shards]:
    """The shards of every operand in the layout that the recipe wants, all moved in one go."""
    held: list[Shards] = []
    items: list[Move] = []
    places: list[int] = []
    for q, (t, want) in enumerate(zip(operands, recipe.wants)):
        if type(t) is cls:
            held.append(t.shards)
            own = t.spec
        else:
            if not is_of_a_trace(t) and (q or not ignores_first(recipe.func, kwargs)):
                compare_plain(t, f"a plain operand of {recipe.func}", recipe.home.placement.flat)
            moves = want is not None and not t.dim() # torch takes a scalar of the CPU anywhere, but no kernel of ours
            held.append({rank: _on_device(t, _device_of(recipe, rank), moves) for rank in recipe.ranks})
            own = spec_of_plain(t, (want or recipe.home).placement)
        if want is not None and want is not own.layout:
            items.append(Move(own, held[q], want, t.made_after if type(t) is cls else 0))
            places.append(q)
    if items:
        purpose = purpose_of(Call(recipe.func, args, kwargs))
        for q, item, shards in zip(places, items, move_shards(items, str(recipe.func), purpose)):
            held[q] = shards
            if completes(item.spec.layout, item.dst) and not _is_aliased(recipe, q):
                keep_completed(operands[q], moved_spec(item.spec, item.dst), shards)
    return held


def _is_aliased(recipe: Recipe, q: int) -> bool:
    """Is this operand written to, or a result a view of it?"""
    at = recipe.slots[q].at
    return next(a for i, a in enumerate(arguments(recipe.func)) if at in (i, a.name)).aliased


def _local_call(recipe: Recipe, rank: int, held: list[Shards], args: Sequence[Any], kwargs: dict[str, Any]
                ) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of one rank's local call, with its own parts of the operands."""
    if recipe.elements is None:
        tensors = [shards[rank] for shards in held]
        local_args, local_kwargs = put(list(args), dict(kwargs), recipe.slots, tensors)
    else:
        here = [(slot, shards[rank]) for slot, shards in zip(recipe.slots, held) if rank in shards]
        local_args, local_kwargs = put(list(args), dict(kwargs), *zip(*here))
        _keep_elements(recipe, recipe.elements[rank], local_args, local_kwargs)
    if local_kwargs.get("device") is not None:
        local_kwargs["device"] = _device_of(recipe, rank)
    return local_args, local_kwargs


def _keep_elements(recipe: Recipe, mine: tuple[int, ...], local_args: list[Any], local_kwargs: dict[str, Any]) -> None:
    """Leave the elements that a rank does not hold out of a foreach call's lists, of tensors and of scalars."""
    count = 1 + max(slot.item or 0 for slot in recipe.slots)
    for i, a in enumerate(arguments(recipe.func)):
        holder: Any = local_args if i < len(local_args) else local_kwargs
        at: Any = i if i < len(local_args) else a.name
        value = holder[at] if i < len(local_args) or a.name in local_kwargs else None
        if isinstance(value, (list, tuple)) and len(value) == count:
            holder[at] = [value[i] for i in mine]
        elif isinstance(value, torch.Tensor) and value.dim():
            holder[at] = value[list(mine)]           # a scalar per element, in one tensor


def _write_back(recipe: Recipe, operands: Sequence[Any], held: list[Shards]) -> None:
    """Operands that were boxed before they were written get their new values, in the memory that they had."""
    if not recipe.write_back:
        return
    items = [Move(moved_spec(operands[q].spec, recipe.wants[q]), held[q], operands[q].spec.layout)
             for q in recipe.write_back]
    for q, shards in zip(recipe.write_back, move_shards(items, str(recipe.func))):
        for rank, shard in operands[q].shards.items():
            shard.copy_(shards[rank])


def _written_results(cls: type[GlobalLike], recipe: Recipe, operands: Sequence[Any], results: dict[int, Any]) -> Any:
    """Results of an op that writes: the targets themselves, or new tensors where it returns others."""
    returns = recipe.func._schema.returns
    if not returns:
        return None
    if all(r.alias_info is not None for r in returns):
        targets = [operands[q] for q in recipe.written[:len(returns)]]
        return targets[0] if len(targets) == 1 else tuple(targets)
    return _wrap(cls, recipe, operands, results)


def _wrap(cls: type[GlobalLike], recipe: Recipe, operands: Sequence[Any], results: dict[int, Any]) -> Any:
    """What ranks returned, as global tensors."""
    if not results:
        with _as_its_base(recipe, operands):
            return _result_elsewhere(cls, recipe)
    first = next(iter(results.values()))
    kind = type(first) if isinstance(first, (tuple, list)) else None
    outputs, specs = _outputs(recipe, results), recipe.outputs
    if specs is None:                                # only running the op told
        specs = [output_spec(next(iter(values.values())), recipe.home) for values in outputs]
        _announce(recipe, specs, outputs)
    with _as_its_base(recipe, operands):             # a kernel may leave out what torch's shape function promises
        wrapped: list[Any] = [next(iter(values.values())) if own is None or any(t is None for t in values.values())
                              else cls.wrap(own, values if recipe.func.is_view else all_in_order(own, values))
                              for own, values in zip(specs, outputs)]
    return wrapped[0] if kind is None else kind(wrapped)


def _outputs(recipe: Recipe, results: dict[int, Any]) -> list[dict[int, Any]]:
    """Of each output what every rank returned: a tensor, or a number."""
    if recipe.elements is not None:
        assert recipe.outputs is not None            # each element's meta kernel told
        outputs: list[dict[int, Any]] = [{} for _ in recipe.outputs]
        for rank, result in results.items():
            for i, shard in zip(recipe.elements[rank], result):
                outputs[i][rank] = shard
        return outputs
    first = next(iter(results.values()))
    if isinstance(first, (tuple, list)):
        return [{rank: result[k] for rank, result in results.items()} for k in range(len(first))]
    return [results]


def _as_its_base(recipe: Recipe, operands: Sequence[Any]) -> AbstractContextManager[Any]:
    """Inside, a view is made a tensor of inference mode where what it views is one, whatever mode it is made in."""
    if recipe.func.is_view and operands and operands[0].is_inference() != torch.is_inference_mode_enabled():
        return torch.inference_mode(operands[0].is_inference())
    return nullcontext()


def _result_elsewhere(cls: type[GlobalLike], recipe: Recipe) -> Any:
    """A process that drives no rank of the placement: global tensors without shards."""
    if recipe.outputs is None:
        announced: _Announced | None = broadcast_object(None, recipe.home.placement.flat[0])
        assert announced is not None                 # the source is another process
        leaves = [value if own is None else cls.wrap(spec(recipe.home, *own), {})
                  for own, value in zip(announced.tensors, announced.values)]
        return leaves[0] if announced.single else tuple(leaves)
    wrapped = [cls.wrap(own, {}) if own is not None else None for own in recipe.outputs]
    kinds = [str(r.type) for r in recipe.func._schema.returns]
    if len(kinds) == 1 and kinds[0] == "Tensor":
        return wrapped[0]
    return wrapped if len(kinds) == 1 else tuple(wrapped)


@message
class _Announced(NamedTuple):
    """What came out of an op where only running it told: per result shape, strides and dtype, or else its value."""

    single: bool                                     # one result, in no tuple
    tensors: list[tuple[Shape, Shape, torch.dtype] | None]
    values: list[Any]


def _announce(recipe: Recipe, specs: list[Spec | None], outputs: list[dict[int, Any]]) -> None:
    """Tell processes that drive no rank of the placement what came out, where only running the op told."""
    here = world()
    if here.single_process or len(recipe.home.placement.flat) == here.size:
        return
    single = len(recipe.func._schema.returns) == 1 and len(specs) == 1
    tensors = [None if s is None else (s.shape, s.stride, s.dtype) for s in specs]
    values = [next(iter(o.values())) if s is None else None for s, o in zip(specs, outputs)]
    broadcast_object(_Announced(single, tensors, values), recipe.home.placement.flat[0])
