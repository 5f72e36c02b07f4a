"""Writes of global values into plain tensors: `total += loss`, the state of an optimizer of plain parameters.

A plain tensor counts as broadcast, so it can take a value that every process knows whole: operands are boxed to that,
and the op is done once per process, on plain tensors; or the op out of place, whose result is boxed, where that is less
to move. Processes outside the placement get the value too, as `x.full_tensor()` gives it to them: torch's own code
makes plain tensors for global values (`pad_sequence`, `vander`). A stage of a pipeline runs on its own processes alone,
and these alone have its plain tensors.
"""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.algorithms.aliasing import check_writable
from globaltensor.algorithms.run import Decomposition, Run
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import Layout, replicated
from globaltensor.layouts.placement import placement
from globaltensor.op_table.variants import WriteResult
from globaltensor.rules.call import Call, written
from globaltensor.runtime.agreement import ranks_apart
from globaltensor.runtime.world import world


def writes_plain(call: Call) -> bool:
    """Does the op write elements of plain tensors only? (`set_` and others change which memory a tensor has.)"""
    targets = written(call) if torch.Tag.inplace_view not in call.func.tags else []
    return bool(targets) and not any(map(is_global, targets))


def _known_whole(t: GlobalLike) -> Layout:
    """Where every process that does the op has the whole value."""
    own, everybody = t.spec.placement, range(world().size)
    if world().single_process or ranks_apart() or {*own.flat} == {*everybody}:
        return t.spec.layout.replicated
    return replicated(placement(own.type, everybody))


def write_whole(call: Call, run: Run) -> Any:
    """The op on whole values."""
    operands = [t for t in call.tensors if is_global(t)]
    whole = {id(t): value for t, value in zip(operands, _whole_values(call, run, operands))}
    args, kwargs = call.arguments_with([whole.get(id(t), t) for t in call.tensors])
    return call.func(*args, **kwargs)


def write_whole_result(by: WriteResult) -> Decomposition:
    """The op on what ranks have, where its result, a pending sum, is less to move than its operands."""

    def write(call: Call, run: Run) -> Any:
        whole, = _whole_values(call, run, [by.result(call, run)])
        return call.tensors[0].copy_(whole)

    return write


def _whole_values(call: Call, run: Run, operands: list[GlobalLike]) -> list[torch.Tensor]:
    boxed = run.redistribute(operands, [_known_whole(t) for t in operands], str(call.func))
    if not all(t.shards for t in boxed):             # of other processes than those of the stage
        check_writable(written(call)[0], call.func, "its target")
    return [next(iter(t.shards.values())) for t in boxed]
