"""Variants of an op: what follows from the line of the functional op.

    add_(x, y)            as add, and written into x
    transpose_(x, 0, 1)   transpose, which x then is
    maximum(x, y, out=z)  maximum, copied into z
    _foreach_add(xs, ys)  each element as add
"""
from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload

from globaltensor.algorithms.run import Decomposition
from globaltensor.errors import InPlaceError
from globaltensor.layouts.layout import spec
from globaltensor.op_table.line import Line
from globaltensor.op_table.table import TABLE
from globaltensor.rules.call import Call, arguments
from globaltensor.rules.shapes import factory_like
from globaltensor.runtime.torch_internals import is_composite

aten = torch.ops.aten


@lru_cache(None)
def line_of(func: OpOverload) -> Line | None:
    """The line of an op, or what follows from that of the functional op it is a variant of."""
    found = TABLE.get(func)
    if found is None and is_composite(func):
        return Line(factory_like, decomposition=_decomposed)
    if func._schema.name == "aten::set_":
        return Line(factory_like, decomposition=_other_memory)
    functional = functional_of(func) if found is None and func._schema.is_mutable else None
    if functional is None:
        return found
    if torch.Tag.inplace_view in func.tags:
        return Line(factory_like, decomposition=_reshaped(functional))
    if func._schema.arguments[-1].is_out:
        return Line(factory_like, decomposition=_into_out(functional))
    line = TABLE.get(functional)
    if line is None or line.decomposition is None:
        return line
    return replace(line, decomposition=_in_place(functional, line.decomposition))


def _other_memory(call: Call, run: Any) -> Any:
    raise InPlaceError(f"{call.func}: a tensor and the memory of another one, where one of them is global",
                       "a global tensor has no memory of its own, and is not made of a plain one's",
                       "x.copy_(t), or x.data = gt.from_full(t, x.placement, x.sbp)")


def _decomposed(call: Call, run: Any) -> Any:
    """An op that torch itself makes of others, which it has not done yet in inference mode."""
    args, kwargs = call.full_arguments()
    return call.func.decompose(*args, **kwargs)


def functional_of(func: OpOverload) -> OpOverload | None:
    """The op that returns what this one writes."""
    name = func._schema.name.split("::")[1]
    in_place = name.endswith("_") and not name.endswith("__")
    packet = getattr(aten, name[:-1] if in_place else name, None)
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    for overload in packet.overloads() if packet is not None else ():
        other = getattr(packet, overload)
        if not other._schema.is_mutable and wanted == [(a.name, str(a.type)) for a in other._schema.arguments]:
            return other
    return None


def _as(functional: OpOverload, call: Call) -> Call:
    """The same call of the functional op."""
    return Call(functional, (), {a.name: call[a.name] for a in arguments(functional)})


def _in_place(functional: OpOverload, decomposition: Decomposition) -> Decomposition:
    """The functional op's decomposition, written into the first operand."""

    def write(call: Call, run: Any) -> Any:
        return run(aten.copy_.default, call.tensors[0], decomposition(_as(functional, call), run))

    return write


def _reshaped(functional: OpOverload) -> Decomposition:
    """The view that the functional op makes; the operand becomes it."""

    def write(call: Call, run: Any) -> Any:
        target = call.tensors[0]
        args, kwargs = _as(functional, call).full_arguments()
        view = run(functional, *args, **kwargs)
        with torch._C._DisableTorchDispatch():       # what torch knows of the wrapper: its sizes and strides
            call.func(*call.full_arguments()[0])
        own = view.spec                              # where it was moved: the target is the copy, so nothing guards it
        target.spec, target.shards = spec(own.layout, own.shape, own.stride, own.dtype), view.shards
        return target

    return write


def _into_out(functional: OpOverload) -> Decomposition:
    """The functional op, copied into the `out` operands."""

    def write(call: Call, run: Any) -> Any:
        args, kwargs = _as(functional, call).full_arguments()
        targets = [call[a.name] for a in arguments(call.func) if a.written]
        is_global = any(hasattr(t, "spec") for t in call.tensors if not any(t is out for out in targets))
        results = run(functional, *args, **kwargs) if is_global else functional(*args, **kwargs)
        for target, result in zip(targets, results if isinstance(results, (tuple, list)) else [results]):
            if target.shape != result.shape:
                had, gets = tuple(target.shape), tuple(result.shape)
                raise InPlaceError(f"{call.func} into an `out` of shape {had}, not {gets}",
                                   "a global tensor keeps its shape, and with it what each rank holds",
                                   "x = ... without out=")
            run(aten.copy_.default, target, result)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return write


FOREACH = {                                          # algebra by the number of tensors; nonlinear where not told
    "add": {1: "A", 2: "a+b"}, "sub": {1: "A", 2: "a+b"}, "mul": {1: "a", 2: "a*b"}, "div": {1: "a", 2: "a*B"},
    "lerp": {2: "a+b", 3: "a*C+b*C"}, "addcmul": {3: "a+b*c"}, "addcdiv": {3: "a+b*C"}, "copy": {2: "b"},
    "neg": {1: "a"},
}


@lru_cache(None)
def foreach_algebra(func: OpOverload) -> dict[int, str] | None:
    """The algebra of element i of a foreach or fused op, by its number of tensors; None for any other op."""
    name = func._schema.name.split("::")[1].strip("_")
    if name.startswith(("fused_adam", "fused_sgd", "fused_adagrad")):
        return {}
    return FOREACH.get(name.removeprefix("foreach_"), {}) if name.startswith("foreach_") else None


