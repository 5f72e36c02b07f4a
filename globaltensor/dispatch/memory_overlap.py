"""Writes to memory that another operand reads: what torch's kernels refuse is refused where a boxing hides it.

`x[1:].copy_(x[:-1])` would read elements that it has written. A kernel refuses that, but not of what was boxed: there
ranks read copies. So here a view's place in the memory of its base is compared with that of what is written, as
torch compares them: tensors with gaps it lets pass.
"""
from __future__ import annotations

from math import prod
from typing import Any

import torch

from globaltensor.dispatch import foreach
from globaltensor.dispatch.view_writes import same_memory, start_in_base
from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.layout import Spec, dense
from globaltensor.rules.call import Call, written

aten = torch.ops.aten
# Their kernels take no operand that is the target itself.
_NOT_TARGET = {
    aten.index_add_.default, aten.index_copy_.default, aten.index_reduce_.default, aten.index_put_.default,
    aten.put_.default, aten.scatter_.src, aten.scatter_.reduce, aten.scatter_add_.default, aten.scatter_reduce_.two}


def may_hide_overlap(call: Call) -> bool:
    """Is an operand of a write a copy of memory that may be the target's? Specs do not tell: calls are looked at."""
    return call.func._schema.is_mutable and any(is_global(t) and t.spec.copied for t in call.tensors)


def refuse_overlap(call: Call) -> None:
    """Raise torch's own error for an operand that lies in the memory that is written, where kernels do not see it."""
    func, targets = call.func, written(call)
    listed = func in _NOT_TARGET
    if not (listed or func is aten.copy_.default or torch.Tag.pointwise in func.tags or foreach.is_foreach(func)):
        return
    if len(targets) != 1 or not is_global(targets[0]) or any(is_global(t) and t.traced for t in call.tensors):
        return
    target, not_target = targets[0], listed and not _fills_by_mask(call)
    for other in call.tensors[1:]:
        if is_global(other) and (not_target or target.spec.copied or other.spec.copied) and (
                _overlap(target, other, not_target)):
            raise RuntimeError("unsupported operation: some elements of the input tensor and the written-to tensor "
                               "refer to a single memory location. Please clone() the tensor before performing the "
                               "operation.")


def _fills_by_mask(call: Call) -> bool:
    """Is it `x[mask] = number`? Torch fills there, and the mask may be x itself."""
    if call.func is not aten.index_put_.default or call["accumulate"] or call["values"].numel() != 1:
        return False
    index = [i for i in call["indices"] if i is not None]
    return len(index) == 1 and index[0].dtype in (torch.bool, torch.uint8)


def _overlap(target: Any, other: Any, not_target: bool) -> bool:
    """Do elements of both lie in one memory, other than all of them in the same order?"""
    if not _is_dense(target.spec) or not _is_dense(other.spec):
        return False
    base, other_base = _at_end_of_chain(target), _at_end_of_chain(other)
    if not base.shards or not same_memory(base, other_base):
        return False
    start, other_start = start_in_base(target), start_in_base(other)
    end, other_end = start + target.spec.nbytes, other_start + other.spec.nbytes
    if (start, end) == (other_start, other_end) and target.spec.stride == other.spec.stride:
        return not_target
    return start < other_end and other_start < end


def _at_end_of_chain(t: Any) -> Any:
    """The tensor at the end of the chain."""
    while (origin := t.origin) is not None:
        t = origin.base
    return t


def _is_dense(own: Spec) -> bool:
    """Are there elements, in one piece of memory?"""
    steps = zip(own.shape, own.stride, dense(own.shape, own.stride))
    return prod(own.shape) > 0 and all(n == 1 or step == its for n, step, its in steps)
