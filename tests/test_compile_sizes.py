"""torch.compile where sizes change, of functions that write, use a size or view what is split, and have a gradient.

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


GRID = gt.placement("cpu", [[0, 1], [2, 3]])
SPLITS = {"rows": (TWO, S(0)), "middle": (TWO, S(1)), "columns": (TWO, S(2)), "grid": (GRID, [S(0), S(2)]),
          "twice": (GRID, [S(2), S(2)])}


def written(write):
    """A program that writes to its operand's double, and gives that."""
    def program(x, v):
        own = x * 2
        write(own, v)
        return own
    return program


# n is len(x): a size that changes. Of 3 dims [n, 6, 24]; v is as large as x.
VIEWS = {
    "heads": lambda x, v: x.view(len(x), 6, 3, 2, 4).permute(2, 0, 3, 1, 4),
    "flat heads": lambda x, v: x.view(len(x) * 6, 3, 8).permute(1, 0, 2),
    "reshape": lambda x, v: x.transpose(1, 2).reshape(len(x), 6, 4, 6),
    "melted": lambda x, v: x.permute(2, 0, 1).reshape(len(x) * 6, 24),
    "unflatten": lambda x, v: x.flatten().unflatten(0, (len(x), 12, 12)),
    "expand": lambda x, v: x.sum(0, keepdim=True).expand(len(v), 6, 24).reshape(len(v) * 6, 24),
    "permute": lambda x, v: x.permute(2, 1, 0)[:, :, :len(x) // 2],
    "half": lambda x, v: x[:len(x) // 2], "rest": lambda x, v: x[len(v) // 2:], "inner": lambda x, v: x[1:len(x) - 1],
    "last": lambda x, v: x[len(v) - 1], "column": lambda x, v: x[:, :, len(v) - 1],
    "columns": lambda x, v: x[:, :, len(v) - 1:], "steps": lambda x, v: x[:, :, ::len(v) - 2],
    "narrow": lambda x, v: x.narrow(2, len(v), 4), "parts": lambda x, v: x.split([len(v), 24 - len(v)], 2)[1],
    "windows": lambda x, v: x.unfold(2, len(v) - 2, 2), "diagonal": lambda x, v: x.diagonal(len(v) - 4, 1, 2),
    "strides": lambda x, v: x.as_strided((len(x), 6), (144, 24)),
    "view of a view": lambda x, v: x.view(len(x), 6, 3, 8)[:, :, 1].transpose(1, 2).reshape(len(x), -1),
    "attention": lambda x, v: torch.nn.functional.scaled_dot_product_attention(
        *x.view(len(x), 6, 3, 2, 4).permute(2, 0, 3, 1, 4)),
    "write to a view": written(lambda y, v: y.view(len(y), 6, 3, 8)[:, :, 1].mul_(2)),
    "write to rows": written(lambda y, v: y[len(v) // 2:].mul_(2)),
    "write to a row": written(lambda y, v: y[len(v) - 1].add_(1.0)),
    "write to a column": written(lambda y, v: y[:, :, len(v)].copy_(v[:, :, 0])),
}


def viewed(place, view, compiled, dynamic, mark):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    f = torch.compile(VIEWS[view], backend=counter, dynamic=dynamic, fullgraph=True) if compiled else VIEWS[view]
    outcome = []
    for rows in (4, 6, 5):
        x, v = (place(torch.arange(rows * 144.0).view(rows, 6, 24).mul(k).sin()) for k in (1, 2))
        x.requires_grad_()
        for t in (x, v) if mark else ():
            mark(t, 0)
        given = f(x, v)
        given.square().sum().backward()
        outcome += [given.detach(), x.grad]
    return [t.full_tensor() if t.is_global else t for t in outcome], counter.frame_count


@pytest.mark.sample(16)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("way", ("automatic", "perhaps"))
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_with_sizes_that_change_has_a_graph_for_each_at_most(view, way, split):
    dynamic, mark, _ = WAYS[way]
    want, _ = viewed(torch.clone, view, False, dynamic, mark)
    got, graphs = viewed(lambda t: gt.from_full(t, *SPLITS[split]), view, True, dynamic, mark)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert graphs <= 3
