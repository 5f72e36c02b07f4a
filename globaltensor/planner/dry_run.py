"""What a step under a plan would move, told by running it without memory: the library decides as in the real run.

    moves = record_of_dry_run(model, example_inputs, loss, where, plan, inputs)

are what gt.record() shows of the real run.

The model is copied to the meta device, made global there as the plan says, and run forward and backward. So whatever
dispatch decides by itself is in it, algorithms too, and how gradients are reduced.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from globaltensor.boxings.watch import BoxingRecord, recorded
from globaltensor.layouts.layout import Layout, replicated
from globaltensor.layouts.placement import placement
from globaltensor.parallel.plan import parallelize
from globaltensor.planner.capture import loss_of, read_inputs
from globaltensor.planner.device_kernels_of import kernels_of
from globaltensor.runtime.torch_internals import tree_map_only
from globaltensor.simulator.cluster import hypothetical_placements
from globaltensor.tensors.factories import empty
from globaltensor.tensors.gradients import reduce_pending


def record_of_dry_run(model: nn.Module, example_inputs: Any, loss: Callable[[Any], torch.Tensor] | None,
                      where: placement, plan: Mapping[str, Any], inputs: Mapping[str, Layout] | None = None
                      ) -> list[BoxingRecord]:
    """Every boxing of a step, gradients reduced at its end, in order. The model stays as it is.

    where    the ranks, with axis names
    inputs   the layouts of the tensors among the example inputs, by the names that a captured graph gives them (input0,
             input1, ...); the others are broadcast
    """
    reduce_pending()                                 # of the program, or the record would show it
    with hypothetical_placements(), torch.enable_grad(), kernels_of("cpu"):
        on_meta = where.of_type("meta")
        stand_ins: dict[int, Any] = {id(p): nn.Parameter(_on_meta_device(p), p.requires_grad)
                                     for p in model.parameters()}
        stand_ins |= {id(b): _on_meta_device(b) for b in model.buffers()}
        copied = parallelize(copy.deepcopy(model, stand_ins), on_meta, plan)
        count = iter(range(1_000_000))

        def stand_in(t: torch.Tensor) -> Any:
            own = (inputs or {}).get(f"input{next(count)}", replicated(where))
            value = empty(t.shape, placement=on_meta, sbp=own.sbp, dtype=t.dtype)
            return value.requires_grad_(t.requires_grad)

        args, named = tree_map_only(torch.Tensor, stand_in, read_inputs(example_inputs))
        with recorded() as moves:
            result = copied(*args, **named)
            loss_of(result, loss).backward()
            for p in copied.parameters():
                _ = p.grad                           # the first read reduces all
    return moves


def _on_meta_device(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
