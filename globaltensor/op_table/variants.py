"""Variants of an op, which follow from the line of the functional op.

    add_(x, y)            add, written into x
    transpose_(x, 0, 1)   transpose, and x becomes the view
    maximum(x, y, out=z)  maximum, copied into z
    _foreach_add(xs, ys)  add, element by element
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from globaltensor.algorithms.aliasing import become, turn
from globaltensor.algorithms.run import Decomposition, Run, looks_at_values, of_values, traceable
from globaltensor.errors import InPlaceError
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Layout
from globaltensor.op_table.line import Line, always_decomposed
from globaltensor.op_table.table import TABLE
from globaltensor.rules.call import Call, arguments
from globaltensor.runtime.meta import on_one_element
from globaltensor.runtime.torch_internals import (
    OpOverload,
    break_graph,
    call_kernel,
    counting_writes,
    has_kernel,
    is_composite,
    without_modes,
)

aten = torch.ops.aten
# Composite ops that read memory before they call an op: they run on shards, as ops do that torch does not unfold.
READS_MEMORY = [aten.choose_qparams_optimized.default, aten.fbgemm_linear_quantize_weight.default,
                aten.fbgemm_pack_gemm_matrix_fp16.default, aten._rowwise_prune.default,
                aten._sobol_engine_draw.default, aten._sobol_engine_ff_.default, aten._sobol_engine_scramble_.default,
                aten._sobol_engine_initialize_state_.default]
# Composite ops that leave their `out` as it was where an operand is of a subclass, or give it the memory of a result.
_RANKS = [getattr(aten.linalg_matrix_rank, name) for name in aten.linalg_matrix_rank.overloads() if "out" in name]
LOSES_OUT = [*_RANKS, aten.matmul.out]

# They work in the dtype of their `out`, where the caller names none.
WORKS_IN_DTYPE_OF_OUT = [aten.sum.dim_IntList, aten.prod.default, aten.prod.dim_int, aten.mean.default, aten.mean.dim,
                         aten.cumsum.default, aten.cumprod.default]
# They cast to the dtype of their `out`, as elementwise ops do; `bernoulli` to any.
CASTS_TO_OUT = [*_RANKS, aten.addr.out, aten.cat.out, aten.stack.out, aten._chunk_cat.out, aten.floor_divide.out,
                aten.max.unary_out, aten.min.unary_out, aten.logsumexp.out, aten.nansum.out, aten.std.correction_out,
                aten.var.correction_out, aten._fft_c2r.out, aten.cholesky.out, aten.geqrf.a,
                aten.linalg_householder_product.out, aten.linalg_pinv.atol_rtol_tensor_out,
                aten.normal.Tensor_Tensor_out, aten.normal.Tensor_float_out, aten.normal.float_Tensor_out]


@lru_cache(None)
def line_of(func: OpOverload) -> Line | None:
    """The line of an op: its own, or what follows from that of the functional op. None where there is neither."""
    if func in TABLE:
        return TABLE[func]
    if func in READS_MEMORY:
        return None
    if is_composite(func) and func not in LOSES_OUT:
        return Line(always_decomposed, decomposition=_by_torch)
    if func._schema.name == "aten::set_":
        return Line(always_decomposed, decomposition=_other_memory)
    functional = functional_of(func) if func._schema.is_mutable else None
    if functional is None:
        return None
    if torch.Tag.inplace_view in func.tags:
        return Line(always_decomposed, decomposition=_reshaped(functional))
    if func._schema.arguments[-1].is_out:
        if any(a.alias_info is not None and not a.is_out for a in func._schema.arguments):
            return None                              # the functional op returns those too, in an order of its own
        return Line(always_decomposed, decomposition=_into_out(functional))
    line = TABLE.get(functional)
    if line is None or line.decomposition is None:
        return line
    return replace(line, decomposition=_in_place(functional, line.decomposition))


def _other_memory(call: Call, run: Run) -> Any:
    """x.set_(y): x becomes what y is, with y's layout; of global tensors only."""
    if call.func is aten.set_.source_Tensor and all(is_global(t) for t in call.tensors):
        x, y = call.tensors
        if x.traced:
            break_graph(call.func)                   # `x.data = y`, which a graph would do to what stands for x alone
        become(x, y)
        return x
    raise InPlaceError(f"{call.func}: a tensor and the memory of another one, where one of them is global",
                       "a global tensor has no memory of its own, and is not made of a plain one's",
                       "x.copy_(t), or x.data = gt.from_full(t, x.placement, x.sbp)")


def _by_torch(call: Call, run: Run) -> Any:
    """An op that torch itself makes of others: it arrives whole in inference mode, where no autograd unfolds it.

    The others are called as torch calls them: past autograd, but not past what ties views to what they view, unless the
    op itself is a view, which torch ties at its own door.
    """
    args, kwargs = call.full_arguments()
    with nullcontext() if has_kernel(call.func, "ADInplaceOrView") else counting_writes():
        return call_kernel(call.func, "CompositeImplicitAutograd", args, kwargs)


def functional_of(func: OpOverload) -> OpOverload | None:
    """The op that returns what this one writes: the one of the same name and arguments that writes nothing."""
    name = func._schema.name.split("::")[1]
    in_place = name.endswith("_") and not name.endswith("__")        # __iand__ is not an in-place __iand_
    packet = getattr(aten, name[:-1] if in_place else name, None)
    parameters = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    for overload in packet.overloads() if packet is not None else ():
        candidate = getattr(packet, overload)
        if not candidate._schema.is_mutable and parameters == [(a.name, str(a.type)) for a in
                                                               candidate._schema.arguments]:
            return candidate
    return None


def _as(functional: OpOverload, call: Call) -> Call:
    """The same call of the functional op."""
    return Call(functional, (), {a.name: call[a.name] for a in arguments(functional)})


def out_of_place(call: Call) -> Call | None:
    """The call that returns what this one writes into its first operand; None for one that does not, and for a copy,
    which would only move its operand sooner."""
    func = call.func
    if not func._schema.is_mutable or func._schema.arguments[-1].is_out or func is aten.copy_.default:
        return None
    functional = functional_of(func)
    return _as(functional, call) if functional in TABLE and call.tensors[0] is call.get("self") else None


@traceable
@dataclass(frozen=True)
class WriteResult:
    """An op in place by the one that is not: where its result, a pending sum, is less to move than its operands, which
    it `wants` so."""

    wants: tuple[Layout, ...]

    def __call__(self, call: Call, run: Run) -> Any:
        target = call.tensors[0]
        result, = run.redistribute([self.result(call, run)], [target.spec.layout], str(call.func))
        return run(aten.copy_.default, target, result)

    def result(self, call: Call, run: Run) -> Any:
        """What is to be written, laid out as ranks can make it."""
        free = out_of_place(call)
        assert free is not None                      # as it was offered
        tensors, dsts = zip(*[(t, want) for t, want in zip(free.tensors, self.wants) if is_global(t)])
        moved: Iterator[Any] = iter(run.redistribute(tensors, dsts, str(call.func)))
        args, kwargs = free.arguments_with([next(moved) if is_global(t) else t for t in free.tensors])
        return run(free.func, *args, **kwargs)


def _in_place(functional: OpOverload, decomposition: Decomposition) -> Decomposition:
    """The functional op's decomposition, written into the first operand."""

    def write(call: Call, run: Run) -> Any:
        return run(aten.copy_.default, call.tensors[0], decomposition(_as(functional, call), run))

    return of_values(write) if looks_at_values(decomposition) else write


def _reshaped(functional: OpOverload) -> Decomposition:
    """The functional op's view, which the operand then is."""

    def write(call: Call, run: Run) -> Any:
        target, *like = call.tensors
        args, options = _as(functional, call).full_arguments()       # a memory format is one
        if not is_global(target):                    # a plain tensor gets the shape of a global one
            template = torch.empty_strided(like[0].shape, like[0].stride(), dtype=target.dtype, device="meta")
            return target.resize_as_(template, **options)
        turn(target, functional, args[1:], lambda *operands: run(*operands, **options))
        return target

    return write


def _into_out(functional: OpOverload) -> Decomposition:
    """The functional op, copied into the `out` operands."""

    def write(call: Call, run: Run) -> Any:
        args, kwargs = _as(functional, call).full_arguments()
        targets = [call[a.name] for a in arguments(call.func) if a.written]
        sources = [t for t in call.tensors if not any(t is out for out in targets)]
        from_global = any(is_global(t) for t in sources)             # else only the targets are global
        if functional in WORKS_IN_DTYPE_OF_OUT and kwargs["dtype"] is None:
            kwargs["dtype"] = targets[0].dtype
        results = run(functional, *args, **kwargs) if from_global else functional(*args, **kwargs)
        pairs = list(zip(*map(_in_one_list, (targets, results if isinstance(results, (tuple, list)) else [results]))))
        for target, result in pairs:                 # all, before one is written
            _check_out(call, target, result)
        for target, result in pairs:
            if target.shape == result.shape:
                run(aten.copy_.default, target, result)
            elif is_global(target):
                become(target, run(aten._to_copy.default, result, dtype=target.dtype))
            else:
                run(aten.copy_.default, target.resize_(result.shape), result)
        if not call.func._schema.returns:
            return None                              # the targets are one list
        return targets[0] if len(targets) == 1 else tuple(targets)

    return write


def _in_one_list(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Those of an op that gives a list, too."""
    return [t for one in tensors for t in (one if isinstance(one, (tuple, list)) else [one])]


def _check_out(call: Call, target: torch.Tensor, result: torch.Tensor) -> None:
    """Raise where torch's kernel would not write such a result there, or a global tensor cannot get its shape."""
    if target.shape != result.shape:
        if target.numel() or target._is_view() or is_global(target) and not is_global(result):
            had, gets = tuple(target.shape), tuple(result.shape)
            raise InPlaceError(f"{call.func} into an `out` of shape {had}, not {gets}",
                               "a global tensor keeps its shape, and with it what each rank holds",
                               "x = ... without out=")
        if is_global(target) and target.traced:
            break_graph(call.func)                   # which would give another shape to what stands for it alone
    if target.dtype != result.dtype and not _casts(call, result.dtype, target.dtype):
        raise InPlaceError(f"{call.func} into an `out` of {target.dtype}, not {result.dtype}",
                           "the op does not cast what it gives to that dtype",
                           f"an `out` of {result.dtype}, or x = ... without out=, and x.to({target.dtype})")


def _casts(call: Call, own: torch.dtype, wanted: torch.dtype) -> bool:
    """Does torch's kernel cast a result to the dtype of its `out`? Raises its own error where it is elementwise."""
    if call.func is aten.bernoulli.out:
        return True
    if not torch.can_cast(own, wanted):
        return False
    if torch.Tag.pointwise not in call.func.tags:
        return call.func in CASTS_TO_OUT
    with without_modes():
        on_one_element(call.func, *call.full_arguments())
    return True


FOREACH = {                                          # algebra by the number of tensors; nonlinear where none stands
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


@lru_cache(None)
def foreach_is_pointwise(func: OpOverload) -> bool:
    """Is a foreach op one of single elements, by torch's tag of the op whose name it carries? `_foreach_mm` is none."""
    packet = getattr(aten, func._schema.name.split("::")[1].strip("_").removeprefix("foreach_"), None)
    return bool(foreach_algebra(func)) or packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


