"""torch.compile where sizes change, of functions that write to what they take, use a size, and have a gradient.

Oracle: the same program in plain torch, not compiled, and how many graphs plain torch makes of it.
"""
from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import globaltensor as gt

SEED = 20_261_129
pytestmark = pytest.mark.usefixtures("seeded_compiler")
S, B = gt.sbp.split, gt.sbp.broadcast
TWO = gt.placement("cpu", [0, 1])
LAYOUTS = {"broadcast": B, "rows": S(0), "columns": S(1)}
WAYS = {                                             # in which sizes become symbols, and how many graphs that takes
    "automatic": (None, None, 2), "dynamic": (True, None, 1), "marked": (None, torch._dynamo.mark_dynamic, 1),
    "perhaps": (None, torch._dynamo.maybe_mark_dynamic, 1)}
WRITES = {
    "argument": lambda x, v, buffer: v.mul_(0.5), "buffer": lambda x, v, buffer: buffer.add_(x.detach().sum(0)),
    "both": lambda x, v, buffer: (v.copy_(x.detach() * 0.9), buffer.add_(1.0)), "none": lambda x, v, buffer: None}
USES = {
    "division": lambda x, v: x / v.shape[0], "view": lambda x, v: x.view(*x.shape) * 2 + v,
    "arange": lambda x, v: x * torch.ones_like(v).cumsum(0) * v.shape[0],
    "factory": lambda x, v: x + v.new_full((x.shape[0], 1), 2.0),
    "expand": lambda x, v: x + v.sum(0).expand(x.shape[0], 4), "flat": lambda x, v: x.reshape(-1).view(v.shape[0], -1)}
# decided by numbers, as docs/limits.md tells: each size has a graph of its own
NUMBERS = {("rows", "arange"), ("rows", "expand"), ("columns", "flat")}


def trained(place, way, writes, uses, compiled):
    """What three steps of growing batches give and write, their gradients, and how many graphs that took."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    dynamic, mark, _ = WAYS[way]
    buffer, outcome = place(torch.ones(4)), []

    def step(x, v):
        WRITES[writes](x, v, buffer)
        return USES[uses](x, v) + v.sum()

    f = torch.compile(step, backend=counter, dynamic=dynamic, fullgraph=True) if compiled else step
    for rows in (8, 12, 16):
        x = place(torch.arange(rows * 4.0).view(rows, 4).sin()).requires_grad_()
        v = place(torch.arange(rows * 4.0).view(rows, 4).cos())
        for t in (x, v) if mark else ():
            mark(t, 0)
        given = f(x, v)
        given.square().sum().backward()
        outcome += [t.detach().clone() for t in (given, v, buffer, x.grad)]
    return [t.full_tensor() if t.is_global else t for t in outcome], counter.frame_count


@pytest.mark.sample(8)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("uses", USES)
def test_a_function_that_writes_and_uses_a_size_has_one_graph_for_many(uses, writes, way, layout):
    if way == "marked" and (layout, uses) in NUMBERS:
        pytest.skip("torch raises, as each size has a graph")

    def spread(t):
        return gt.from_full(t.clone(), TWO, LAYOUTS[layout] if t.ndim == 2 else B)

    want, _ = trained(torch.clone, way, writes, uses, compiled=False)
    got, graphs = trained(spread, way, writes, uses, compiled=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert (layout, uses) in NUMBERS or graphs <= WAYS[way][2]
