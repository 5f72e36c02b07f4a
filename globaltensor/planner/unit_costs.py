"""What a step takes under a plan, unit by unit: told by running it without memory, as the library decides by itself.

    costs = run_costs(model, units, [(inputs, targets)], loss, mesh, plan, cluster)

The model is copied to the meta device, made global there as the plan says, and run forward and backward once for each
micro-batch. Every op and every boxing belongs to the unit in which it happens:

    operations and bytes    of each op, for what a rank does
    seconds of a boxing     by the library's plan, on the cluster's links
    kept                    bytes that forward leaves for backward
    temporary               what backward needs beside these, at its peak

Of equal layers some stand for all (equal_layers.py).
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from globaltensor.boxings.redistribute import redistribute
from globaltensor.boxings.watch import recorded
from globaltensor.layouts.layout import replicated
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import split
from globaltensor.parallel.plan import parallelize
from globaltensor.parallel.zero import split_layout
from globaltensor.pipelining.layer_lists import SkippedLayer, cut_by_layers, without_cache
from globaltensor.pipelining.stages import StageError
from globaltensor.pipelining.units import Unit
from globaltensor.planner.capture import capture_errors, loss_of, read_inputs
from globaltensor.planner.cost_tracer import CostTracer
from globaltensor.planner.device_kernels_of import kernels_of
from globaltensor.planner.equal_layers import equal_layers, passing
from globaltensor.planner.graph import Ref
from globaltensor.planner.op_costs import OpCosts
from globaltensor.planner.tracer import as_tree
from globaltensor.planner.unit_sums import RunCosts, UnitSums
from globaltensor.runtime.torch_internals import tree_leaves, tree_map_only
from globaltensor.simulator.cluster import Cluster, hypothetical_placements
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tensors.gradients import raw_grad, replace_grad


def run_costs(model: nn.Module, units: Sequence[Unit], batches: Sequence[tuple[Any, Any]],
              loss: Callable[..., Any] | None, mesh: placement, plan: Mapping[str, Any], cluster: Cluster,
              parted: Collection[str] = ()) -> list[RunCosts]:
    """The costs of each unit for a micro-batch, whole, of each of these inputs and targets, on a mesh with the axes dp
    and tp. `parted`: names of parameters of which each rank of dp has a part, which ops gather.

    Raises CaptureError with the line where the step cannot go on without values.
    """
    with hypothetical_placements(), torch.enable_grad():
        on = mesh.of_type("meta")
        copied = _copy_on_meta(model)
        groups = equal_layers(copied)
        parallelize(copied, on, plan)
        _split_along_dp(p for name, p in copied.named_parameters() if name in parted)
        several = []
        for inputs, targets in batches:
            tracer = CostTracer(replicated(on))
            with capture_errors(model):
                passed = _run_step(copied, tracer, groups, without_cache(model), inputs, loss, targets)
            several.append(RunCosts(UnitSums(tracer, copied, units, passed, OpCosts(cluster, on)).units, tracer.whole))
        return several


def run_layers(model: nn.Module, units: Sequence[Unit], inputs: Any) -> None:
    """Run units that are layers of a list without memory, each as a stage. Raises CaptureError where one cannot be."""
    with hypothetical_placements(), torch.no_grad():
        copied, on = _copy_on_meta(model), placement("meta", [0])
        parallelize(copied, on, {})
        tracer = CostTracer(replicated(on))
        args, named = tree_map_only(torch.Tensor, lambda t: tracer.input(t, tracer.where), read_inputs(inputs))
        with capture_errors(model), kernels_of("cpu"), tracer:
            for stage in cut_by_layers(copied, [unit.name for unit in units[1:]], inputs=list(named)):
                result = stage(*args, **named)
                args, named = result, {}
            if any(isinstance(leaf, SkippedLayer) for leaf in tree_leaves(as_tree(result))):
                raise StageError("the result has parts of several layers", "the last stage has what the last gave")


def _copy_on_meta(model: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    stand_ins: dict[int, Any] = {id(p): nn.Parameter(_without_values_of(p), p.requires_grad)
                                 for p in model.parameters()}
    stand_ins |= {id(b): _without_values_of(b) for b in model.buffers()}
    return copy.deepcopy(model, stand_ins)


def _split_along_dp(parameters: Iterable[Any]) -> None:
    """As ZeRO 3 leaves them."""
    with torch.no_grad():
        for p in parameters:
            if (part := split_layout(p.spec.layout, tuple(p.shape), "dp")) is not None:
                p.data, = redistribute([p], [part], "zero")


def _run_step(copied: nn.Module, tracer: CostTracer, groups: list[list[str]], named: Mapping[str, Any], inputs: Any,
              loss: Callable[..., Any] | None, targets: Any) -> dict[str, list[str]]:
    """Forward and backward, by the kernels that a CPU has. Which layers did not run, by the one that stands for
    them."""
    where, leaves = tracer.where, dict(copied.named_parameters())
    for name, t in (*leaves.items(), *copied.named_buffers()):
        tracer.name_value(t, Ref(tracer.add_node("parameter", [t], name=name), 0))
    rows = where.with_sbp(tuple(split(0) if name == "dp" else s for name, s in zip(where.placement.names, where.sbp)))
    args, own = tree_map_only(torch.Tensor, lambda t: tracer.input(t, rows), read_inputs(inputs))
    if targets is not None and loss is not None:
        loss = partial(_with_targets, loss, tree_map_only(torch.Tensor, lambda t: tracer.input(t, rows), targets))
    try:
        with ExitStack() as stack:
            tracer.moves = stack.enter_context(recorded())
            stack.enter_context(tracer.following_modules(copied))
            passed = stack.enter_context(passing(copied, groups))
            stack.enter_context(kernels_of("cpu"))
            stack.enter_context(tracer)
            result = copied(*args, **{**named, **own})
            tracer.graph.graph["outputs"] = [tracer.ref(t) for t in tree_leaves(as_tree(result))
                                             if isinstance(t, GlobalTensor)]
            tracer.run_backward(loss_of(result, loss), result)
            tracer.note_moves(None)
        tracer.graph.graph["gradients"] = {name: tracer.ref(grad) for name, p in leaves.items()
                                           if (grad := raw_grad(p)) is not None}
    finally:
        for leaf in (*leaves.values(), *tracer.leaves_given):
            replace_grad(leaf, None)                 # else they would wait to be reduced with those of a real step
    return passed


def _with_targets(loss: Callable[..., Any], targets: Any, output: Any) -> Any:
    return loss(output, *targets) if isinstance(targets, tuple) else loss(output, targets)


def _without_values_of(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
