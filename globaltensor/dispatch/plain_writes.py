"""Writes of global values into plain tensors: `total += loss`, the state of an optimizer of plain parameters.

A plain tensor counts as broadcast, so it can take a value that every process knows whole: operands are boxed to that,
and the op is done once per process, on plain tensors. Where some process holds no part of the operands, it could not
write what the others write: an InPlaceError.
"""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.algorithms.run import Run
from globaltensor.layouts.global_like import is_global
from globaltensor.rules.call import Call, written
from globaltensor.runtime.world import world


def writes_plain(call: Call) -> bool:
    """Does the op write elements of plain tensors only, on processes that all know the values? (`set_` and others
    change which memory a tensor has.)"""
    targets = written(call) if torch.Tag.inplace_view not in call.func.tags else []
    if not targets or any(map(is_global, targets)):
        return False
    held = {rank for t in call.tensors if is_global(t) for rank in t.spec.placement.flat}
    return world().single_process or len(held) == world().size


def write_whole(call: Call, run: Run) -> Any:
    """The op on whole values."""
    op = str(call.func)
    operands = [t for t in call.tensors if is_global(t)]
    boxed = run.redistribute(operands, [t.spec.layout.replicated for t in operands], op)
    whole = {id(t): next(iter(value.shards.values())) for t, value in zip(operands, boxed)}
    args, kwargs = call.arguments_with([whole.get(id(t), t) for t in call.tensors])
    return call.func(*args, **kwargs)
