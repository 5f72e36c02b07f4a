"""What a decomposition did, noted, so that the native dispatcher can do it again without Python.

A trace is a list of steps that fill registers: `ops` on registers and constants, and `boxings` of several at once. The
operands of the call are the first registers. It holds for every call of the same key whose floats are the same.
"""
from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from globaltensor.boxings import native
from globaltensor.layouts.layout import Layout
from globaltensor.rules.call import Call


class Trace:
    """Stands between a decomposition and `run`. `steps` is None once something was done that cannot be noted."""

    def __init__(self, run: Any, call: Call) -> None:
        self.steps: list[tuple] | None = []
        self._run = run
        self._places: dict[int, int] = {}
        self._kept: list[Any] = []                   # so that an id stays its tensor's
        self._note(call.tensors)

    @staticmethod
    def fits(call: Call) -> bool:
        """May what a decomposition does for this call be noted? Not what keys ignore, nor what is checked each time."""
        copied = any(getattr(getattr(t, "spec", None), "copied", False) for t in call.tensors)
        return not copied and not any(isinstance(value, complex) or isinstance(value, (list, tuple))
                                      and any(isinstance(v, float) for v in value) for value in call.values.values())

    def __call__(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        result = self._run(func, *args, **kwargs)
        values = [self._argument(value) for value in Call(func, args, kwargs).values.values()]
        self._note(result if isinstance(result, (list, tuple)) else [result])
        if self.steps is not None:
            self.steps.append((func._schema.name, func._schema.overload_name, values))
        return result

    def redistribute(self, tensors: list[Any], dsts: list[Layout], op: str) -> list[Any]:
        moved = self._run.redistribute(tensors, dsts, op)
        moves = [(self._place(t), native.find_boxing(t.spec, dst), new)
                 for t, dst, new in zip(tensors, dsts, moved) if new is not t]
        self._note([new for _, _, new in moves])
        if any(boxing is None for _, boxing, _ in moves):
            self.steps = None
        elif moves and self.steps is not None:
            self.steps.append((op, [(place, boxing) for place, boxing, _ in moves]))
        return moved

    def __getattr__(self, name: str) -> Any:         # making tensors of what only Python saw
        self.steps = None
        return getattr(self._run, name)

    def results(self, result: Any) -> list[list[int]]:
        """Per return, the registers that it is, -1 for None; `result` as the decomposition gave it."""
        returns = [result] if isinstance(result, (torch.Tensor, list)) else list(result)
        return [[-1 if t is None else self._place(t) for t in (r if isinstance(r, list) else [r])] for r in returns]

    def _note(self, tensors: list[Any]) -> None:
        for t in tensors:                            # a result may be an operand, written to: the register counts on
            self._places[id(t)] = len(self._kept)
            self._kept.append(t)

    def _place(self, t: Any) -> int:
        if id(t) not in self._places:
            self.steps = None
        return self._places.get(id(t), -1)

    def _argument(self, value: Any) -> tuple[str, Any]:
        if isinstance(value, torch.Tensor):
            return "place", self._place(value)
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return "places", [self._place(v) for v in value]
        return "value", value
