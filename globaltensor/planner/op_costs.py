"""What an op of a captured graph costs on a cluster, in each way that its rule allows; what a boxing and a tensor cost.

    seconds of an op      the longest of three: its operations at the rate of large products, its bytes at the rate of
                          the memory, and the start of a kernel; or the sum of these at the rates of its kind, where
                          the cluster has measured them. Operations are counted by torch.utils.flop_counter where that
                          has a formula. Views take nothing but their start.
    in a layout           the part of that which the busiest rank does: by the labels of the rule that are cut
    seconds of a boxing   those of its plan (boxings/plan.py), on the cluster's links
    bytes of a tensor     the largest part that a rank holds

All that a planner needs to know of a device is here: another model of costs is another `OpCosts`.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import flop_registry

from globaltensor.algorithms.offer import largest_part
from globaltensor.boxings.plan import boxing_cost, plan, plan_bytes
from globaltensor.dispatch.choose import split_ways, work_share
from globaltensor.layouts.layout import Layout, Shape, layout, replicated
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import Sbp, broadcast, split
from globaltensor.op_table.line import always_decomposed
from globaltensor.op_table.variants import line_of
from globaltensor.planner.graph import Ref
from globaltensor.planner.op_kinds import FREE, kind_of
from globaltensor.rules.call import Call
from globaltensor.rules.language import Rule, Signature, expected_rule, fits, label_sizes, signatures
from globaltensor.runtime.machine import Machine
from globaltensor.runtime.torch_internals import tree_map_only
from globaltensor.simulator.cluster import Cluster, Link


class TensorSize(NamedTuple):
    """What is known of a tensor that an op takes."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Option(NamedTuple):
    """One way to run an op, or for a leaf to lie: layouts of the operands and of the outputs (None of an output that is
    no tensor), the seconds of the busiest rank; the signature of each axis, empty where no rule gave it."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]
    seconds: float = 0.0
    signature: tuple[Signature, ...] = ()


class OpCosts:
    """What ops, boxings and tensors cost on a cluster, for ops whose ranks are those of a placement."""

    def __init__(self, on: Cluster, where: placement) -> None:
        self.on, self.where = on, where
        self._boxings: dict[tuple[Layout, Layout, Shape, int], float] = {}
        self._received: dict[tuple[Layout, Layout, Shape, int, int], dict[int, int]] = {}

    @cached_property
    def machine(self) -> Machine:
        """The cluster as boxings see it; costs are asked of two replicas where it has but one device, too."""
        return replace(self.on, hosts=0).machine(max(self.where.flat) + 1)

    @cached_property
    def transport_rates(self) -> Machine:
        """The rates by which the library plans boxings there."""
        return replace(self.on, hosts=0).transport_rates(max(self.where.flat) + 1)

    def boxing(self, src: Layout, dst: Layout, shape: Shape, nbytes: int) -> float:
        """Seconds from one layout to another."""
        if src is dst:
            return 0.0
        key = src, dst, shape, nbytes
        if key not in self._boxings:
            self._boxings[key] = sum(boxing_cost(src, dst, shape, nbytes, self.machine))
        return self._boxings[key]

    def boxing_parts(self, src: Layout, dst: Layout, shape: Shape, nbytes: int) -> tuple[float, float]:
        """Seconds until its steps have started, and those of its bytes."""
        return (0.0, 0.0) if src is dst else boxing_cost(src, dst, shape, nbytes, self.machine)

    def boxing_bytes(self, src: Layout, dst: Layout, shape: Shape, itemsize: int) -> int:
        """What the rank receives that receives most."""
        return max(self.received(src, dst, shape, itemsize, prod(shape) * itemsize).values(), default=0)

    def received(self, src: Layout, dst: Layout, shape: Shape, itemsize: int, together: int) -> dict[int, int]:
        """What each rank receives. `together`: bytes of all tensors that move with this one, which it is planned
        for."""
        if src is dst:
            return {}
        key = src, dst, shape, itemsize, together
        if key not in self._received:                # equal layers ask the same
            self._received[key] = plan_bytes(plan(src, dst, shape, together, self.transport_rates), shape, itemsize)
        return self._received[key]

    def op(self, node: dict[str, Any], operands: list[TensorSize], share: float = 1.0) -> float:
        """Seconds of an op with operands of these shapes, of which the busiest rank does a share."""
        moved = sum(prod(s) * d.itemsize for s, d in zip(node["shapes"], node["dtypes"]) if s is not None)
        moved += sum(one.nbytes for one in operands)
        return self.op_seconds(node["op"], self.operations(node, operands) * share, moved * share)

    def operations(self, node: dict[str, Any], operands: list[TensorSize]) -> float:
        """Of an op with operands of these shapes, where torch knows how to count them; else 0."""
        func = node["op"]
        count = flop_registry.get(_ALIKE.get(func.overloadpacket, func.overloadpacket))
        if count is None or self.is_free(func):
            return 0.0
        args, kwargs = call_of(node, operands).full_arguments()
        outputs = [None if s is None else torch.empty(s, dtype=torch.float32, device="meta") for s in node["shapes"]]
        return float(count(*args, **kwargs, out_val=outputs[0] if len(outputs) == 1 else tuple(outputs)))

    def is_free(self, func: Any) -> bool:
        """Does an op start no kernel?"""
        return bool(func.is_view) or func in FREE

    def op_seconds(self, func: Any, operations: float, nbytes: float) -> float:
        """Of a rank that does so many operations on so many bytes, the results included."""
        return float(self.on.op_seconds(np.array(kind_of(func)), np.array(operations), np.array(nbytes)))

    def link(self) -> Link:
        """The slowest link between the ranks."""
        per_host = self.on.devices_per_host
        return self.on.local if len({rank // per_host for rank in self.where.flat}) == 1 else self.on.remote

    def part(self, of: Layout, shape: Shape, itemsize: int) -> int:
        """Bytes of the largest part; a pending sum is as large as the whole."""
        return largest_part(of, shape) * itemsize

    def options(self, node: dict[str, Any], operands: list[TensorSize]) -> list[Option]:
        """All ways to run an op with operands of these shapes: every signature of its rule on every axis, where each
        rank has a part. An op without a rule runs on whole operands; so does one whose ranks pass on what depends on
        values, such as tokens to experts."""
        home = replicated(self.where)
        whole = Option((home,) * len(operands), tuple(None if s is None else home for s in node["shapes"]),
                       self.op(node, operands))
        line = line_of(node["op"])
        if line is None or line.family is always_decomposed or not operands:
            return [whole]
        rule = expected_rule(line.rule(call_of(node, operands)))
        options = [self._option(node, operands, rule, nd) for nd in self._choices(rule, operands)]
        return options or [whole]

    def _choices(self, rule: Rule, operands: list[TensorSize]) -> Iterator[tuple[Signature, ...]]:
        sizes = label_sizes(rule, [one.shape for one in operands])
        for nd in product(signatures(rule), repeat=self.where.ndim):
            ways = split_ways(nd, self.where.shape)
            if fits(rule, nd, self.where.shape, sizes) and all(sizes.get(x, n) >= n for x, n in ways.items()):
                yield nd

    def _option(self, node: dict[str, Any], operands: list[TensorSize], rule: Rule, nd: tuple[Signature, ...]
                ) -> Option:
        share = work_share(nd, self.where.shape, label_sizes(rule, [one.shape for one in operands]))
        inputs = tuple(layout(self.where, tuple(sig.inputs[q] for sig in nd)) for q in range(len(operands)))
        results = [k for k, s in enumerate(node["shapes"]) if s is not None or len(node["shapes"]) == len(rule.outputs)]
        outputs: list[Layout | None] = [None] * len(node["shapes"])
        for k, q in zip(results, range(len(rule.outputs))):
            outputs[k] = layout(self.where, tuple(sig.outputs[q] for sig in nd))
        return Option(inputs, tuple(outputs), self.op(node, operands, share), nd)

    def storages(self, shape: Shape, cut: bool = True) -> list[Layout]:
        """How a leaf may lie: on each axis broadcast or, if it may be cut, split along a dim, where each rank has a
        part."""
        each: list[Sbp] = [broadcast, *[split(d) for d in range(len(shape)) if cut]]
        layouts = [layout(self.where, nd) for nd in product(each, repeat=self.where.ndim)]
        return [one for one in layouts if all(
            max(n, 1) >= prod(w for s, w in zip(one.sbp, self.where.shape) if s.is_split and s.dim == d)
            for d, n in enumerate(shape))]           # of no elements: whole


_ALIKE = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:        # torch counts only that of GPUs
          torch.ops.aten._scaled_dot_product_flash_attention,
          torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
          torch.ops.aten._scaled_dot_product_flash_attention_backward}


def call_of(node: dict[str, Any], operands: list[TensorSize]) -> Call:
    """The call of a node, with meta tensors in the places of its operands."""
    rest = iter(operands)
    args = tree_map_only(Ref, lambda _: torch.empty(*(one := next(rest))[:1], dtype=one.dtype, device="meta"),
                         node["args"], is_leaf=lambda value: isinstance(value, Ref))
    return Call(node["op"], (), args)
