"""Looking on while a model runs under a plan on ranks without memory: where operands lie, and what is boxed when."""
from __future__ import annotations

from typing import Any

import torch

from globaltensor.boxings.redistribute import redistribute
from globaltensor.boxings.watch import BoxingRecord
from globaltensor.errors import where
from globaltensor.layouts.layout import Layout, replicated
from globaltensor.planner.graph import Ref
from globaltensor.planner.tracer import Tracer
from globaltensor.rules.call import Call
from globaltensor.runtime.torch_internals import OpOverload, tree_leaves, without_modes
from globaltensor.tensors.factories import empty
from globaltensor.tensors.global_tensor import GlobalTensor

_NO_VALUES = "Cannot copy out of meta tensor"        # torch's words


class CostTracer(Tracer):
    """Notes for each node in which layouts its operands lie, and for each boxing between which nodes it happens."""

    def __init__(self, where: Layout) -> None:
        super().__init__(where)
        self.moves: list[BoxingRecord] = []
        self.layouts: dict[int, list[Layout | None]] = {}                # of a node: of its outputs
        self.moved: list[tuple[BoxingRecord, int, bool]] = []            # before which node, and is it an operand of it
        self.whole: dict[str, str] = {}              # ops that are planned on whole operands, with a line
        self._noted = 0

    def input(self, t: torch.Tensor, rows: Layout) -> Any:
        """A stand-in of an input, whose rows dp splits."""
        own = rows if t.dim() else replicated(rows.placement)
        value: Any = empty(t.shape, placement=own.placement, sbp=own.sbp, dtype=t.dtype)
        self.name_value(value, Ref(self.add_node("input", [value], name=f"input{len(self._inputs)}"), 0))
        self._inputs[f"input{len(self._inputs)}"] = value
        return value.requires_grad_(t.requires_grad)

    def add_node(self, kind: str, outputs: list[Any], **more: Any) -> int:
        node = super().add_node(kind, outputs, **more)
        self.layouts[node] = [t.spec.layout if isinstance(t, GlobalTensor) else None for t in outputs]
        if kind == "op":
            self.note_moves(node)
        return node

    @property
    def leaves_given(self) -> list[Any]:
        """The stand-ins of inputs."""
        return list(self._inputs.values())

    def before_op(self, call: Call) -> None:
        self.note_moves(None)

    def call_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op whose values decide what moves is planned on whole operands, and named."""
        try:
            return super().call_op(func, args, kwargs)
        except NotImplementedError as error:
            if _NO_VALUES not in str(error):
                raise
        self.whole.setdefault(str(func), where())
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, GlobalTensor)]
        self._note_boxing(operands, [replicated(t.placement) for t in operands], str(func))
        return self.shapes_alone(func, args, kwargs)

    def _note_boxing(self, tensors: list[GlobalTensor], to: list[Layout], op: str) -> None:
        with without_modes(), torch.no_grad():
            redistribute(tensors, to, op)

    def take_output(self, t: GlobalTensor) -> int:
        """A pending sum that the model returns is reduced, as most losses reduce it."""
        self.note_moves(None)
        self._note_boxing([t], [t.spec.layout.without_partials], "the output of the model")
        node = super().take_output(t)
        self.note_moves(node)
        return node

    def note_moves(self, node: int | None) -> None:
        """Boxings since the last time belong to this node, or to the next one."""
        for move in self.moves[self._noted:]:
            self.moved.append((move, len(self.graph) if node is None else node, node is not None))
        self._noted = len(self.moves)

    def like(self, t: torch.Tensor) -> GlobalTensor:
        if not isinstance(t, GlobalTensor):
            return super().like(t)
        with without_modes():
            return empty(t.shape, placement=t.placement, sbp=t.spec.layout.dual.without_partials.sbp, dtype=t.dtype)
