"""Ops of mixed dtypes in graphs: of some, torch's fake kernels tell other dtypes than its kernels give.

Oracle: the op of plain tensors, not compiled: its values, and the dtypes of all that it gives. Afterwards the op runs
without a graph, of the same layouts and sizes: nothing that a trace was told may be left for it.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch

import globaltensor as gt

SEED = 20_261_130
pytestmark = pytest.mark.usefixtures("seeded_compiler")
aten = torch.ops.aten
TWO = gt.placement("cpu", [0, 1])
LAYOUTS = {"whole": gt.sbp.broadcast, "rows": gt.sbp.split(0), "columns": gt.sbp.split(1)}
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
IMAGES, ROWS = (4, 8, 2), (4, 8)
# dtypes and shapes of the operands, where one of 1 dim is a parameter: whole on every rank
OPS: dict[str, tuple[Any, Any]] = {
    "layer norm": (lambda x, w, b: aten.native_layer_norm(x, [8], w, b, 1e-5),
                   [(HALF, ROWS), (SINGLE, 8), (SINGLE, 8)]),
    "layer norm, 16 bits": (lambda x, w, b: aten.native_layer_norm(x, [8], w, b, 1e-5),
                            [(HALF, ROWS), (HALF, 8), (HALF, 8)]),
    "group norm": (lambda x, w, b: aten.native_group_norm(x, w, b, 4, 8, 2, 2, 1e-5),
                   [(HALF, IMAGES), (SINGLE, 8), (SINGLE, 8)]),
    "batch norm": (lambda x, w, b: aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5),
                   [(HALF, IMAGES), (SINGLE, 8), (SINGLE, 8)]),
    "softmax": (lambda x: aten._softmax(x, 1, False), [(HALF, ROWS)]),
    "softmax backward": (lambda g, y: aten._softmax_backward_data(g, y, 1, HALF), [(HALF, ROWS), (HALF, ROWS)]),
    "log softmax backward": (lambda g, y: aten._log_softmax_backward_data(g, y, 1, HALF), [(HALF, ROWS), (HALF, ROWS)]),
    "squares backward": (lambda g, x, t: aten.mse_loss_backward(g, x, t, 0),
                         [(DOUBLE, ROWS), (HALF, ROWS), (HALF, ROWS)]),
    "smooth loss backward": (lambda g, x, t: aten.smooth_l1_loss_backward(g, x, t, 0, 1.0),
                             [(HALF, ROWS), (HALF, ROWS), (DOUBLE, ROWS)]),
    "threshold backward": (lambda g, x: aten.threshold_backward(g, x, 0.1), [(HALF, ROWS), (DOUBLE, ROWS)]),
    "cumsum": (lambda x: aten.cumsum(x, 1, dtype=SINGLE), [(HALF, ROWS)]),
    "sum": (lambda x: aten.sum.dim_IntList(x, [1], dtype=SINGLE), [(HALF, ROWS)]),
    "variance and mean": (lambda x: aten.var_mean.correction(x, [1]), [(HALF, ROWS)]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPS)
def test_a_graph_and_what_comes_after_give_the_dtypes_of_kernels(name, layout):
    op, told = OPS[name]
    operands = [torch.arange(1.0, 1 + torch.Size([own] if isinstance(own, int) else own).numel()).sin().abs().view(own)
                .to(dtype) for dtype, own in told]
    spread = [gt.from_full(t, TWO, LAYOUTS[layout] if t.ndim > 1 else gt.sbp.broadcast) for t in operands]
    want = in_a_tuple(op(*operands))
    torch.compiler.reset()
    for run in (torch.compile(op, backend="aot_eager", fullgraph=True), op):
        given = in_a_tuple(run(*spread))
        for one in given:
            assert {part.dtype for part in one.shards.values()} == {one.dtype}
        wide = [own.to(one.dtype) for own, one in zip(want, given, strict=True)]
        assert [one.dtype for one in given] == [own.dtype for own in want]
        torch.testing.assert_close([one.full_tensor() for one in given], wide, rtol=2e-2, atol=2e-2)


def in_a_tuple(result):
    return result if isinstance(result, (tuple, list)) else (result,)
