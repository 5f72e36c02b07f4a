"""A pending tensor is completed once, however many ops need it whole.

    x = row_parallel(h)            P
    y = x.pow(2).mean(-1)          boxes x to B, and keeps what came out beside x
    z = x * y.rsqrt()              takes that: nothing moves

Else each of them would reduce x anew: a norm that is written in small ops, the residual stream in every layer, and
backward once more for each op that saved x. x itself stays as it is, pending, with the memory that it has: views of it,
writes to it and `to_local` mean what they meant. What is kept goes with x, and a write to the memory of x, by whatever
alias, ends it.

All ranks decide by it, so all must have it alike: it is kept where an op boxes an operand, which every rank does, and
never where a rank may do something by itself. Twin: csrc/torch_ext/completed.cpp.
"""
from __future__ import annotations

from typing import Any, NamedTuple

from globaltensor.layouts.global_like import is_global, spec_of
from globaltensor.layouts.layout import Shards, Spec
from globaltensor.rules.call import arguments
from globaltensor.runtime.memory_writes import MemoryWrites, current_version, watched_writes
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import OpOverload, is_composite

# Ops of ours that want values; the others want what each rank holds.
_OF_VALUES = {"globaltensor::linear", "globaltensor::contract"}
# Their schemas do not say so, but what they give shares the operand's memory.
_SHARES_MEMORY = {"aten::lift", "aten::unsafe_split", "aten::unsafe_split_with_sizes"}


class Completed(NamedTuple):
    """What came out, and as of which write to the memory of the pending tensor, and which version of it."""

    whole: Any
    memory: MemoryWrites
    writes: int
    version: int


def keep_completed(t: Any, own: Spec, shards: Shards) -> None:
    """Keep what the boxing of a pending tensor gave that left nothing pending."""
    if torch_ext is not None and not t.traced:
        torch_ext.keep_completed(t, own, shards)
        return
    whole = (type(t).wrap_traced if t.traced else type(t).wrap)(own, shards)
    whole.lineage = t.lineage
    memory = watched_writes(t)
    t.completed = Completed(whole, memory, memory.count, current_version(t))


def _completed(t: Any) -> Any:
    """The completed form of a pending tensor; the tensor where there is none, or where it was written to since."""
    if spec_of(t) is None:
        return t
    if torch_ext is not None and not t.traced:
        return torch_ext.completed(t)
    kept: Completed | None = t.completed
    if kept is None or kept.writes != kept.memory.count or kept.version != current_version(t):
        return t
    return kept.whole


def with_completed(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
                   ) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with completed operands where there are some, but for those that are written to or viewed. What an
    op that torch makes of others does with its operands, those will tell."""
    name = func._schema.name
    if func.namespace == "globaltensor" and name not in _OF_VALUES or name in _SHARES_MEMORY or is_composite(func):
        return args, kwargs
    by_name = {a.name: a for a in arguments(func)}
    of_args = tuple(value if a.aliased else _with_completed(value) for a, value in zip(by_name.values(), args))
    return of_args, {name: value if by_name[name].aliased else _with_completed(value) for name, value in kwargs.items()}


def _with_completed(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_completed, value)) if any(map(is_global, value)) else value
    return _completed(value)
