"""Observers of quantization-aware training: what their kernel gives a size inside, they get before it runs.

The observer of a weight per channel begins with buffers that hold nothing (`running_min` of shape [0]); at its first
call the kernel makes them as long as the weight has channels. Ranks would do so with their parts, or with copies.
"""
from __future__ import annotations

from math import inf
from typing import Any

import torch

from globaltensor.algorithms.aliasing import become, check_writable
from globaltensor.algorithms.run import Run
from globaltensor.rules.call import Call
from globaltensor.runtime.torch_internals import break_graph

aten = torch.ops.aten
# What torch's kernel begins with; it leaves scales and zero points to be written.
_FRESH = {"running_min": inf, "running_max": -inf, "scale": 1, "zero_point": 0}


def is_fresh(call: Call) -> bool:
    """Would the kernel give the buffers another shape?"""
    return bool(call["per_row_fake_quant"]) and not call["running_min"].numel()


def size_buffers(call: Call, run: Run) -> Any:
    """The op on buffers of the size that it gives them, each in the layout that it had."""
    channels = call["self"].size(call["ch_axis"])
    for name in _FRESH:                              # all, before one changes
        check_writable(call[name], call.func, name)
        if call[name].traced:
            break_graph(call.func)                   # which would give another shape to what stands for it alone
    for name, value in _FRESH.items():
        buffer = call[name]
        sized = run(aten.new_full.default, buffer, [channels], value)
        become(buffer, *run.redistribute([sized], [buffer.spec.layout], str(call.func)))
    args, kwargs = call.full_arguments()
    return run(call.func, *args, **kwargs)
