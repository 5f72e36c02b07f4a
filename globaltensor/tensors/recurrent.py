"""Recurrent layers and cells of global tensors: a state that is whole is cut where the batch is.

The state that torch's modules begin with is plain zeros. Beside it a batch that is split would be gathered, as what is
computed is added in place to a product of the state; and so would every step that follows.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from globaltensor.layouts.global_like import is_global
from globaltensor.layouts.sbp import broadcast, split
from globaltensor.runtime.agreement import compare_plain
from globaltensor.runtime.torch_internals import OpOverload, call_kernel, is_of_a_trace
from globaltensor.tensors.redistribution import to_layout

aten = torch.ops.aten
_LAYERS = [aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input]
_CELLS = [aten.lstm_cell.default, aten.gru_cell.default, aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default]


def _with_state_like_input(func: OpOverload, of_layer: bool, x: Any, state: Any, *args: Any) -> Any:
    if is_global(x):
        batch = 0 if not of_layer or args[-1] else 1             # the last argument of a layer is `batch_first`
        cut = partial(_cut_as, func, x, batch, int(of_layer))
        state = [cut(t) for t in state] if isinstance(state, (list, tuple)) else cut(state)
    return call_kernel(func, "CompositeImplicitAutograd", (x, state, *args), {})


def _cut_as(func: OpOverload, x: Any, batch: int, at: int, state: Any) -> Any:
    """A state that is whole, cut along dim `at` as x is along its dim `batch`."""
    own = x.spec.layout
    sbp = tuple(split(at) if s.is_split and s.dim == batch else broadcast for s in own.sbp)
    if is_global(state) and (state.spec.layout is not own.replicated) or state.dim() <= at:
        return state
    if not is_global(state) and not is_of_a_trace(state):
        compare_plain(state, f"a plain operand of {func}", own.placement.flat)
    return to_layout(state, own.with_sbp(sbp))


KERNELS: dict[OpOverload, Callable[..., Any]] = {
    func: partial(_with_state_like_input, func, func in _LAYERS) for func in _LAYERS + _CELLS}
