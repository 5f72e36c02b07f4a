"""The trace of a decomposition: what it did, so that the native dispatcher can do it again without Python.

A trace is a list of steps that fill registers: ops on registers and constants, and boxings of several registers. The
operands of the call are the first registers. It is valid for every call with the same key and the same floats.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from globaltensor.algorithms.run import Run
from globaltensor.boxings import native
from globaltensor.boxings.rows import RowExchange
from globaltensor.layouts.global_like import GlobalLike, is_global
from globaltensor.layouts.layout import Layout, Shape, Shards, Spec
from globaltensor.layouts.regions import Range
from globaltensor.rules.call import Call
from globaltensor.rules.language import NUMBER
from globaltensor.runtime.torch_internals import OpOverload


class Trace(Run):
    """Stands between a decomposition and its `run`, and notes the steps; `steps` is None once one cannot be noted."""

    def __init__(self, run: Run, call: Call) -> None:
        self.steps: list[tuple[Any, ...]] | None = []
        self._run = run
        self._registers: dict[int, int] = {}         # id of a tensor -> its register
        self._kept: list[Any] = []                   # all of them alive, so that no id is used again
        self._note(call.tensors)

    @staticmethod
    def fits(call: Call) -> bool:
        """Can a trace stand for this call? Not where the key leaves a value out: complex numbers, numbers in the place
        of a tensor, floats in lists."""
        return NUMBER not in call.ndims and not any(
            isinstance(value, complex) or isinstance(value, (list, tuple)) and any(isinstance(v, float) for v in value)
            for value in call.values.values())

    def __call__(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        result = self._run(func, *args, **kwargs)
        call = Call(func, args, kwargs)
        values = [self._argument(value) for value in call.values.values()]
        self._note(result if isinstance(result, (list, tuple)) else [result])
        if self.steps is not None:
            plain = not any(is_global(t) for t in call.tensors)
            self.steps.append((func._schema.name, func._schema.overload_name, values, plain))
        return result

    def redistribute(self, tensors: Sequence[GlobalLike], dsts: Sequence[Layout], op: str, keep: bool = False
                     ) -> list[GlobalLike]:
        moved = self._run.redistribute(tensors, dsts, op, keep)
        moves = [(self._register(t), native.find_boxing(t.spec, dst), new)
                 for t, dst, new in zip(tensors, dsts, moved) if new is not t]
        self._note([new for _, _, new in moves])
        if any(boxing is None for _, boxing, _ in moves):
            self.steps = None
        elif moves and self.steps is not None:
            self.steps.append((op, [(register, boxing, keep) for register, boxing, _ in moves]))
        return moved

    def results(self, result: Any) -> list[list[int]]:
        """Per return of the op, its registers, -1 for None; a whole number is itself, as the key tells what it is.
        `result` as the decomposition returned it."""
        returns = [result] if isinstance(result, (torch.Tensor, list)) else list(result)
        return [[-1 if t is None else t if type(t) is int else self._register(t)
                 for t in (r if isinstance(r, list) else [r])] for r in returns]

    def _note(self, tensors: Sequence[Any]) -> None:
        """A register for each. (A result may be an operand that was written to: its latest register counts.)"""
        for t in tensors:
            self._registers[id(t)] = len(self._kept)
            self._kept.append(t)

    def _register(self, t: Any) -> int:
        if id(t) not in self._registers:             # made by torch or by hand: the native dispatcher cannot know it
            self.steps = None
        return self._registers.get(id(t), -1)

    def _argument(self, value: Any) -> tuple[str, Any]:
        if isinstance(value, torch.Tensor):
            return "place", self._register(value)
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return "places", [self._register(v) for v in value]
        return "value", value

    # ----------------------------------------------------------------- steps on shards, which only Python can do

    def _untraced(self) -> Run:
        self.steps = None
        return self._run

    def plain(self, call: Call) -> Any:
        return self._untraced().plain(call)

    def gather_regions(self, tensors: Sequence[GlobalLike], dsts: Sequence[Layout], op: str) -> list[Shards]:
        return self._untraced().gather_regions(tensors, dsts, op)

    def scatter_add_regions(self, parts: Shards, held: Layout, of: Spec, op: str) -> GlobalLike:
        return self._untraced().scatter_add_regions(parts, held, of, op)

    def row_exchange(self, axes: tuple[int, ...], held: Mapping[int, Range], wanted: Mapping[int, torch.Tensor],
                     row: Mapping[int, Shape], op: str, src: Layout, dst: Layout) -> RowExchange:
        return self._untraced().row_exchange(axes, held, wanted, row, op, src, dst)

    def wrap(self, own: Spec, shards: Shards) -> GlobalLike:
        return self._untraced().wrap(own, shards)
