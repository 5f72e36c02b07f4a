"""The first run of a recipe is verified: what every rank returned must be what the specs say.

Native code reads shards by their specs. So a rule that does not fit its kernel, or an operand that is repeated where
the rule does not know it, would read memory that is not its own; here it becomes an error that names op and rank. It
is one run, in Python: later ones are not compared, nor recipes that native code makes of known ones at other sizes
(csrc/torch_ext/siblings.cpp), nor ops whose results tell the specs.

Strides are what the kernels returned, where all parts have one size: torch's shape functions tell those of some ops
wrongly, as of a convolution of channels-last images. Ops above dispatch go by a spec's strides (the gradient of group
norm: is this contiguous, or does its kernel need a copy?), so they must be the shards'.
Where parts do not tell, the spec stays as it is, and they are laid out by it (`all_in_order` in execute.py).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from globaltensor.dispatch.recipe import Recipe, output_spec
from globaltensor.errors import InPlaceError, RuleError
from globaltensor.layouts.layout import Shards, Spec, spec
from globaltensor.runtime.torch_internals import OpOverload


def verify(recipe: Recipe, results: Mapping[int, Any]) -> None:
    """Raises RuleError unless the results of every rank have the shapes and dtypes of the recipe's outputs.

    What is broadcast was made whole on every rank: there torch's shape function was wrong, and what came out is right.
    """
    if not recipe.outputs or recipe.elements is not None:
        return                                       # what came out tells the specs; each rank has other elements
    outputs = list(recipe.outputs)
    for rank, result in results.items():
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        if len(tensors) != len(outputs):
            raise _rule_error(recipe, rank, f"{len(tensors)} results", f"{len(outputs)}")
        for k, (own, tensor) in enumerate(zip(outputs, tensors)):
            if own is None or tensor is None:        # a kernel may leave one out: the workspace of an LSTM
                continue
            returned = _shape_and_dtype(tensor)
            if returned == (tuple(own.local_shape(rank)), own.dtype):
                if not (recipe.boxes_view or recipe.written or _is_view(recipe)):
                    outputs[k] = _strided_as(own, tensor)
                continue
            if not own.numel and returned[0] == tuple(own.local_shape(rank)):
                # of nothing, kernels do not bother about dtypes
                outputs[k] = spec(own.layout, own.shape, own.stride, tensor.dtype)
                continue
            if own.layout is not recipe.home or recipe.boxes_view:
                name = f"result {k}" if len(outputs) > 1 else "a result"
                raise _rule_error(recipe, rank, f"{name} {_text(*returned)}", _part_text(own, rank))
            outputs[k] = output_spec(tensor, recipe.home)
    recipe.outputs = outputs
    if recipe.single is not None:
        recipe.single = outputs[0]


def as_told(recipe: Recipe, result: Any) -> Any:
    """What a rank's op gave without values, on the meta device or in a trace, in the dtypes that its kernel gives:
    torch's fake kernels tell others of mixed operands, as of the statistics of norms, and compilers may compute so."""
    if recipe.outputs is None or recipe.elements is not None or recipe.boxes_view or recipe.written or (
            _is_view(recipe)):
        return result
    several = isinstance(result, (tuple, list))
    tensors = result if several else (result,)
    if len(tensors) != len(recipe.outputs) or all(
            own is None or not isinstance(t, torch.Tensor) or t.dtype == own.dtype
            for own, t in zip(recipe.outputs, tensors)):
        return result
    typed = [t if own is None or t is None else t.to(own.dtype) for own, t in zip(recipe.outputs, tensors)]
    return type(result)(typed) if several else typed[0]


def verify_targets(recipe: Recipe, operands: Sequence[Any], held: Sequence[Shards]) -> None:
    """Raises InPlaceError where a kernel has given what it writes another shape, which no schema tells: its spec, and
    what a boxing back reads, would be of the old one. The parts get that again."""
    if recipe.elements is not None:
        return
    changes: list[str] = []
    for q in recipe.written:
        own = operands[q].spec if recipe.wants[q] is None else operands[q].spec.moved(recipe.wants[q])
        for rank, part in held[q].items():
            if (shape := tuple(part.shape)) != (had := tuple(own.local_shape(rank))):
                part.resize_(had)
                changes.append(f"on rank {rank} from {list(had)} to {list(shape)}")
    if changes:
        raise changed_shape(recipe.func, changes[0])


def changed_shape(func: OpOverload, how: str) -> InPlaceError:
    """The error of a target whose shape would change."""
    return InPlaceError(f"{func} would change the shape of its target: {how}",
                        "a tensor that is written to in place keeps its shape, and a global one what each rank holds",
                        "x = ... without out=" if func._schema.arguments[-1].is_out else
                        f"x = x.{func._schema.name.split('::')[1].rstrip('_')}(...)")


def _is_view(recipe: Recipe) -> bool:
    return any(returned.alias_info is not None for returned in recipe.func._schema.returns)


def _strided_as(own: Spec, part: torch.Tensor) -> Spec:
    """The spec with its dims in the order in memory that a rank's part has, if the part tells: if it is dense, and has
    a size of 1 only where the whole has.

    All processes must come to one spec, and each sees its own parts only. So parts of several sizes change nothing:
    kernels choose the order by the size, and a part of one sample does not tell it.
    """
    if any(n % own.layout.num_parts(d) for d, n in enumerate(own.shape)):
        return own
    dims = [d for d, n in enumerate(own.shape) if n > 1]
    steps: tuple[int, ...] = part.stride()
    in_memory = sorted(dims, key=lambda d: -steps[d])
    if in_memory == sorted(dims, key=lambda d: -own.stride[d]) or any(part.shape[d] < 2 for d in dims):
        return own
    if not part.permute([*in_memory, *(d for d in range(part.dim()) if d not in dims)]).is_contiguous():
        return own
    strides, step = dict.fromkeys(range(part.dim()), 1), 1
    for d in reversed(in_memory):
        strides[d], step = step, step * own.shape[d]
    return spec(own.layout, own.shape, tuple(strides.values()), own.dtype, lazy_bits=own.lazy_bits)


def _shape_and_dtype(tensor: Any) -> tuple[Any, Any]:
    return (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else (None, None)


def _text(shape: Any, dtype: Any) -> str:
    return "that is not a tensor" if shape is None else f"of shape {list(shape)}, {dtype}"


def _part_text(own: Spec, rank: int) -> str:
    return f"{_text(own.local_shape(rank), own.dtype)}: its part of {list(own.shape)} as {own.layout}"


def _rule_error(recipe: Recipe, rank: int, got: str, wanted: str) -> RuleError:
    name = recipe.func._schema.name
    return RuleError(f"{name} on rank {rank} returned {got}, and its rule says {wanted}",
                     "the rule of an op must tell the layouts of what its kernel returns",
                     f"gt.rules.check(torch.ops.{name.replace('::', '.')}, samples), which shows what is wrong with it")
