"""What of an op's operands and results is one memory: writes, and boxed views.

A view of a tensor that must be boxed first cannot share its memory. Such a *boxed view* remembers the call that made
it instead, its *origin*, with the base in it:

    y = x[2]           x is S(0): nothing moves yet, y knows (select, (x, 0, 2))
    y + 1              y is read: the call is done, boxing and all, and its result kept
    x.add_(1)          a write to the memory of x: what was kept is out of date, and is made anew when it is next read
    y.add_(1)          a write through y goes to the memory of x (dispatch/view_writes.py)

The base may be a boxed view too, but a `view` of a `view` is one of the first base where that need not be boxed. The
memory at the end of the chain counts the writes to it, whichever alias they come by (a view, `x.detach()`, `x.data`;
runtime/memory_writes.py).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from threading import RLock
from typing import Any, NamedTuple

import torch

from globaltensor.errors import InPlaceError
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Shards, Spec, spec
from globaltensor.layouts.symbols import expected, has_symbols
from globaltensor.rules.call import arguments
from globaltensor.runtime import lineage, trace_order
from globaltensor.runtime.memory_writes import MemoryWrites, count_write, watched_writes
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import DisableTorchDispatch, OpOverload, below_transforms

aten = torch.ops.aten


class Origin(NamedTuple):
    """The call of which a boxed view is result `nth`: its arguments by the schema, the base first."""

    func: OpOverload
    values: tuple[Any, ...]
    nth: int

    @property
    def base(self) -> Any:
        return self.values[0]


# View ops from a base on: each with its arguments, lists as tuples, and which result it is.
ViewSteps = tuple[tuple[OpOverload, tuple[Any, ...], int], ...]


def base_and_steps(view: Any) -> tuple[Any, ViewSteps]:
    """The tensor with memory at the end of the chain, and the view ops from there on."""
    steps: list[tuple[OpOverload, tuple[Any, ...], int]] = []
    base = view
    while (origin := base.origin) is not None:
        values = tuple(tuple(v) if isinstance(v, list) else v for v in origin.values[1:])
        steps.insert(0, (origin.func, values, origin.nth))
        base = origin.base
    return base, tuple(steps)


def replay_views(steps: ViewSteps, view: Any, run: Callable[..., Any]) -> Any:
    """The view at the end of a chain from this base on."""
    for func, values, nth in steps:
        names = arguments(func)
        args = [view, *[value for a, value in zip(names[1:], values) if not a.keyword]]
        result = run(func, *args, **{a.name: value for a, value in zip(names[1:], values) if a.keyword})
        view = result[nth] if isinstance(result, (tuple, list)) else result
    return view


def view_spec(view: Spec) -> Spec:
    """The spec of a boxed view."""
    return spec(view.layout, view.shape, view.stride, view.dtype, copied=True, lazy_bits=view.lazy_bits)


def value_spec(of: Spec) -> Spec:
    """The spec of a tensor of its own that has the value of this one, as `clone` makes it."""
    return spec(of.layout, of.shape, of.stride, of.dtype, lazy_bits=of.lazy_bits)


def check_writable(t: Any, func: OpOverload, name: str) -> None:
    """Raise InPlaceError for an operand that cannot take what an op writes: a plain tensor beside global ones that
    are written too, or in a stage of a pipeline on processes that do not know the value (dispatch/plain_writes.py)."""
    if not is_global(t):
        raise InPlaceError(f"{func} would write a global value into a plain tensor ({name})",
                           "other operands that it writes are global, or processes of this stage of a pipeline do "
                           "not know the value",
                           "x.full_tensor() for a plain operand")


class ViewCall:
    """A call of a view op that boxes its base: done when one of its results is read, for all of them."""

    def __init__(self, func: OpOverload, values: tuple[Any, ...], memory: MemoryWrites,
                 run: Callable[..., list[Shards]]) -> None:
        self.func, self.values, self.memory, self._run = func, values, memory, run
        self._lineage = lineage.current()
        self._results: list[Shards | None] = []
        self._made = -1
        self.one_at_a_time = RLock()                 # of the threads that read its results

    def result(self, nth: int) -> Shards:
        """The shards of result `nth`, made now unless they were for another one."""
        if self._made != self.memory.count or self._results[nth] is None:
            # torch.compile reads views while a transform of torch.func is traced, which would wrap what is made here
            with lineage.within(self._lineage), below_transforms():
                self._results = list(self._run(self.func, self.values))
            self._made = self.memory.count
        # Handed over, not kept: the view holds on to them, and the call would keep their memory alive beyond it.
        shards, self._results[nth] = self._results[nth], None
        assert shards is not None
        return shards


class BoxedView:
    """What a boxed view knows: of which call it is which result, and what it held when it was last read."""

    def __init__(self, call: ViewCall, nth: int) -> None:
        self.call, self.nth = call, nth
        self._shards: Shards = {}
        self._made = -1

    def read(self) -> Shards:
        """The view's shards, as of the last write to the memory at the end of the chain."""
        if self._made != self.call.memory.count:
            with self.call.one_at_a_time:
                # as of before the call: a write that another thread does meanwhile is not lost
                if self._made != (writes := self.call.memory.count):
                    self._shards = self.call.result(self.nth)
                    self._made = writes
        return self._shards

    @property
    def origin(self) -> Origin:
        return Origin(self.call.func, self.call.values, self.nth)


def boxed_views(cls: Any, specs: list[Spec], func: OpOverload, values: tuple[Any, ...], run: Callable[..., list[Shards]]
                ) -> list[Any]:
    """The results of a call of a view op that boxes its base, which come first in `values`; nothing is done yet.
    `run(func, values)` does the call."""
    if torch_ext is not None and not values[0].traced:
        return torch_ext.boxed_views(specs, func._schema.name, func._schema.overload_name, values)
    base = alias(values[0])
    call = ViewCall(func, (base, *values[1:]), watched_writes(base), run)
    views = [_wrapper(base)(own, {}) for own in specs]
    for nth, view in enumerate(views):
        view.boxed_view = BoxedView(call, nth)
        view.made_after = 0                          # the boxing comes when it is read
    return views


def view_of_base(func: OpOverload, args: Any) -> tuple[OpOverload, Any]:
    """A `view` of a boxed `view` as one of that one's base, where every part of the base stays where it is then:
    nothing moves. `_unsafe_view` is `view` here and below: autograd alone tells them apart, and `reshape` is one or the
    other by the strides that the rank's kernels have returned."""
    if func is aten._unsafe_view.default:
        func = aten.view.default
    if func is not aten.view.default or not is_global(args[0]) or (origin := args[0].origin) is None:
        return func, args
    base = origin.base
    if origin.func is not func or base.spec.symbolic or not _parts_stay(base.spec, args[1]):
        return func, args
    view: Any = args[0]
    if torch_ext is None or view.traced:
        view.viewed = True                           # native code notes it itself
    return func, (base, *args[1:])


def sizes_of_rows(x: Any) -> list[int] | None:
    """The sizes of which the rows of a boxed `view` were melted, and that of its columns, where a `view` that undoes it
    leaves every part where it is; else None."""
    origin = x.origin
    if origin is None or origin.func is not aten.view.default:
        return None
    sizes, rest = [], x.shape[0]
    for n in origin.base.shape:
        if rest > 1 and n and rest % n == 0:
            sizes.append(n)
            rest //= n
        else:
            break
    sizes += [rest, x.shape[1]] if rest > 1 else [x.shape[1]]
    # a view of two dims is no parting: its rows would be asked for again, for ever
    return sizes if len(sizes) > 2 and _parts_stay(origin.base.spec, sizes) else None


def _parts_stay(of: Spec, size: Sequence[int]) -> bool:
    """Does every part stay where it is, in a `view` at this size? Twin: `parts_stay` in boxed_view.cpp."""
    if has_symbols(size):
        return False
    sizes = [of.numel // -prod(size) if n == -1 and of.numel else n for n in size]
    for dim, n in enumerate(of.shape):
        parts, before = of.layout.num_parts(dim), prod(of.shape[:dim])
        if parts == 1:
            continue
        at = next((i for i, own in enumerate(sizes) if prod(sizes[:i]) >= before and own != 1), None)
        if not of.numel or at is None or prod(sizes[:at]) != before:
            return False
        outer, inner = sorted((n, sizes[at]))
        if n != sizes[at] and (inner % outer or outer % parts):
            return False
    return True


def alias(t: Any) -> Any:
    """Another tensor of the same memory, that no autograd knows."""
    same = _wrapper(t)(t.spec, t.shards if t.boxed_view is None else {})
    same.boxed_view, same.lineage, same.made_after = t.boxed_view, t.lineage, t.made_after
    return same


def _wrapper(like: Any) -> Callable[[Spec, Shards], Any]:
    """What makes tensors beside this one."""
    return type(like).wrap_traced if like.traced else type(like).wrap


def become(t: Any, view: Any) -> None:
    """Let `t` be what `view` is: its spec, and its memory or its origin."""
    if torch_ext is not None and not t.traced:
        torch_ext.become(t, view)
    else:
        with DisableTorchDispatch():                 # sizes and strides of the wrapper, which torch itself reads
            aten.set_.source_Tensor(t, view)
        take_memory(t, view)


def _was_viewed(target: Any) -> bool:
    return target.viewed if torch_ext is None or target.traced else torch_ext.was_viewed(target)


def _forget_views(target: Any) -> None:
    if torch_ext is None or target.traced:
        target.viewed = False
    else:
        torch_ext.forget_views(target)


def _has_views(target: Any) -> bool:
    """Of a tensor that the dispatcher was called with. Autograd has views hold their base, and a view may be gone."""
    own = 3                                          # its Python object, and the dispatcher's arguments twice
    return _was_viewed(target) and target._use_count() > own


def turn(target: Any, func: OpOverload, others: Sequence[Any], run: Callable[..., Any]) -> None:
    """Let `target` become func(target, *others), a view of it, as `t_()` does, and autograd know of it.

    autograd does the calls again that made a view, when its base was written to; this one is added to them. Raises
    InPlaceError where the target is itself the base of views, whose calls would find it turned; without native code
    where it is a view too, as torch has no way in Python.
    """
    moves = func is not aten.detach.default
    in_python = torch_ext is None or target.traced
    if moves and target.requires_grad and (in_python if target._is_view() else _has_views(target)):
        name = func._schema.name.split("::")[1]
        raise InPlaceError(f"{name}_ of a tensor whose gradient is wanted, and that has views",
                           "autograd makes views anew by calls that know nothing of it", f"x = x.{name}(...)")
    was_viewed = _was_viewed(target)
    turned = run(func, target, *others)
    if not was_viewed:                               # but by this call, whose result nobody gets
        _forget_views(target)
    if moves and target._is_view() and not in_python:
        torch_ext.note_turn(target, func._schema.name, func._schema.overload_name, list(others))
    become(target, turned)                           # of which a boxed view keeps an alias as it was


def take_memory(t: Any, of: Any) -> None:
    """The part of `become` that torch knows nothing of, without native code."""
    t.lineage = of.lineage
    t.spec, t.shards, t.boxed_view = of.spec, {} if of.boxed_view else of.shards, of.boxed_view


def has_own_memory(t: Any) -> bool:
    """Is it all that its memory holds: no boxed view, and no view of a larger tensor?"""
    return t.origin is None and all(_fills_memory(shard) for shard in t.shards.values())


def _fills_memory(shard: torch.Tensor) -> bool:
    elements = prod(expected(shard.shape))           # in a graph a dim may be a symbol
    return not elements or expected((shard.untyped_storage().nbytes(),)) == (elements * shard.itemsize,)


def note_write(t: Any) -> None:
    """Count a write to the memory of `t`, that of its base where it is a boxed view."""
    if t.traced:
        trace_order.note_traced_write()
    count_write(t)


def note_uncounted_write(t: Any) -> None:
    """The same of a write whose version torch's dispatcher does not count: past it, or to an element of a list, where
    torch's kernels do so for plain tensors."""
    note_write(t)
    if not t.traced and not t.is_inference():
        torch.autograd.graph.increment_version(t)
