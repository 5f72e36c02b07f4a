"""What a compiled program may ask of layouts, with fullgraph=True: placements and sbps, factories, and rows of plans.

Oracle: the same program without torch.compile.
"""
from __future__ import annotations

import copy
import os
import sys

import pytest
import torch
from harness import PYTHON, ROOT, environment, good
from torch import nn
from torch.nn import functional as F

import globaltensor as gt
from globaltensor import dtensor
from globaltensor.dtensor import (
    ColwiseParallel,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_module,
    init_device_mesh,
    parallelize_module,
)
from globaltensor.runtime.torch_internals import TORCH

sys.path.insert(0, os.fspath(ROOT / "examples"))
from gpt import GPT

SEED = 47
pytestmark = pytest.mark.usefixtures("seeded_compiler")
S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
TP = gt.placement("cpu", [0, 1], ("tp",))
MESH = init_device_mesh("cpu", (2,))
OTHERS = gt.placement("cpu", [3, 2], ("tp",))
LONG = pytest.mark.long
ONE_GRAPH = TORCH >= "2.12"                          # torch 2.11 takes no placements in a graph, which ends there


def boxings(x):
    y = x * 2                                        # its sbp and placement are known while the graph is traced alone
    a = y.to_global(y.placement, y.sbp) + y.to_global(OTHERS, S(1)).to_global(TP, "S(0)")
    b = y.to_global(sbp=dict(zip(y.placement.names, y.sbp))) + y.to_global(sbp=S(y.sbp[0].dim + 1))
    c = y.to_global(sbp=tuple(s.dual for s in y.sbp), grad_sbp=B)
    if y.sbp != x.sbp or y.placement != TP or not y.sbp[0].is_split or "tp" not in y.placement.names:
        raise AssertionError(y)
    return a + b + c * y.placement.shape[0] * y.placement.ndim, c.sbp


def factories(x):
    first = gt.ones(1, placement=TP, sbp=B)          # before anything that is global was touched
    n = x.shape[1]
    where, lie = x.placement, x.sbp
    made = gt.ones(4, n, placement=where, sbp=lie) + gt.full((4, n), 2.0, placement=TP, sbp={"tp": B})
    made = made + gt.arange(n, placement=where, sbp=B) + gt.eye(n, placement=TP, sbp=S(1))
    made = made + gt.zeros_like(x, sbp=B) + gt.from_full(torch.ones(4, n), where, lie)
    return first * x + made + gt.tensor([1.0, 2, 3, 4], placement=TP, sbp=S(0)), lie


def random_factories(x):
    drawn = gt.rand(4, 4, placement=TP, sbp=S(0)) + gt.randn((4, 4), placement=TP, sbp=P)
    drawn = drawn + gt.normal(1.0, 2.0, (4, 4), placement=TP, sbp=S(1)) + gt.randint(2, 9, (4,), placement=TP, sbp=B)
    return x + drawn + gt.rand_like(x, sbp=S(1)), x.sbp


def rows_by_number(x):
    """Messages between the nodes of a graph: which rows move depends on values."""
    ends = gt.tensor([[3, 1, 3, 0], [2, 2, -1, 1]], placement=x.placement, sbp=B)
    picked = x[ends[1]] + x.index_select(0, ends[0])
    return x.index_add(0, ends[0], picked) + x.index_put((ends[1],), picked, accumulate=True), x.sbp


def names_of_torch(x):
    """What programs in torch's style make and move inside."""
    made = dtensor.distribute_tensor(torch.ones(4, 4), MESH, [Shard(0)])
    made = made.redistribute(placements=[Shard(1)]) + dtensor.distribute_tensor(torch.ones(4), MESH, [Replicate()])
    made = made * dtensor.full((4, 4), 2.0, device_mesh=made.device_mesh, placements=made.placements)
    made = made + dtensor.ones(4, 4, device_mesh=MESH, placements=[Shard(0)]).redistribute(MESH, [Replicate()])
    return made.to_global(TP, S(0)) * x, x.sbp


FIRST_THING = """
import torch
import globaltensor as gt

TP = gt.placement("cpu", [0, 1], ("tp",))

@torch.compile(backend="aot_eager", fullgraph=True)
def program(t):
    return gt.full((2,), 3.0, placement=TP, sbp="B") + t

print(program(torch.zeros(2)).full_tensor().tolist())
"""


@pytest.mark.skipif(not ONE_GRAPH, reason="torch 2.11 takes no placements in a graph")
def test_a_factory_is_the_first_global_thing_that_a_program_touches():
    """Dynamo was not imported when the placement was made, and knows of no global tensor when it comes to the call."""
    assert good([PYTHON, "-c", FIRST_THING], environment(GLOBALTENSOR_RANKS="2")).strip() == "[3.0, 3.0]"


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", [boxings, factories, random_factories, rows_by_number, names_of_torch])
def test_layouts_are_read_and_made_in_one_graph(program, recwarn):
    f = torch.compile(program, backend="aot_eager", fullgraph=ONE_GRAPH)
    x, y = (gt.from_full(torch.arange(16.0).reshape(4, 4), TP, S(0)).requires_grad_() for _ in range(2))
    gt.manual_seed(SEED)
    want, sbp = program(y)
    want.sum().backward()
    for _ in range(2):
        x.grad = None
        gt.manual_seed(SEED)
        got, same = f(x)
        assert (got.sbp, got.placement, same) == (want.sbp, want.placement, sbp)
        torch.testing.assert_close(got.full_tensor(), want.full_tensor())
        got.sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), y.grad.full_tensor())
    assert not [w for w in recwarn if "Dynamo" in str(w.message)], [str(w.message) for w in recwarn]


class Attention(nn.Module):
    """nanoGPT's, whose q, k and v are one matrix."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return (x + self.mlp(x)).square().mean()


class Trained(nn.Module):

    def __init__(self):
        super().__init__()
        self.gpt = GPT(vocab=32, context=8, hidden=16, layers=1, heads=4)

    def forward(self, ids):
        return F.cross_entropy(self.gpt(ids).flatten(0, 1), ids.flatten())


def by_styles(model):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"norm": SequenceParallel(), "attention.c_proj": RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False), "mlp.0": ColwiseParallel(
        use_local_output=False), "mlp.2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)})
    return distribute_module(model, mesh), mesh, B


GRID = gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
SP = gt.placement("cpu", [0, 1], ("sp",))
PLANS = {
    "sequence": lambda m: (gt.parallelize(m, TP, gt.Plan.of(m, "tp", sequence="tp")), TP, B),
    "dp x sequence": lambda m: (gt.parallelize(m, GRID, gt.Plan.of(m, "tp", sequence="tp")), GRID, {"dp": S(0)}),
    "context": lambda m: (gt.parallelize(m, SP, gt.Plan.of(m, "", sequence="sp")), SP, S(1)),
    "2D": lambda m: (gt.parallelize(m, GRID, gt.Plan.of(m, ("dp", "tp"))), GRID, {"dp": S(0)}),
    "styles": by_styles,
}
CASES = [pytest.param(Block, "sequence"), pytest.param(Block, "styles"), pytest.param(Trained, "sequence", marks=LONG),
         pytest.param(Trained, "dp x sequence", marks=LONG), pytest.param(Trained, "context", marks=LONG),
         pytest.param(Trained, "2D", marks=LONG), pytest.param(Block, "2D", marks=LONG), pytest.param(Block, "context")]


def steps(model, f, x):
    """Losses and parameters of two steps, and what moved."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with gt.record() as moves:
        for _ in range(2):
            loss = f(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().full_tensor())
    return losses, [p.detach().full_tensor() for p in model.parameters()], sum(move.bytes for move in moves)


@pytest.mark.parametrize("model, plan", CASES)
def test_plans_whose_rows_lay_activations_out_are_one_graph(model, plan):
    plain = model()
    x = torch.randint(32, (4, 8)) if model is Trained else torch.randn(4, 8, 16)
    results = []
    for compiled in (False, True):
        laid_out, where, sbp = PLANS[plan](copy.deepcopy(plain))
        f = torch.compile(laid_out, backend="aot_eager", fullgraph=ONE_GRAPH) if compiled else laid_out
        results.append(steps(laid_out, f, gt.from_full(x, where, sbp)))
    (losses, parameters, moved), (losses_too, parameters_too, moved_too) = results
    torch.testing.assert_close(losses_too, losses)
    torch.testing.assert_close(parameters_too, parameters, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses, steps_of_plain(plain, x), rtol=1e-4, atol=1e-5)
    assert 0 < moved_too <= moved


def test_errors_name_the_program():
    """A compiled model that is called with a tensor on another placement; one that has no memory yet."""
    model = gt.parallelize(nn.Linear(4, 4), TP)
    f = torch.compile(model, backend="eager", fullgraph=True)
    f(gt.ones(2, 4, placement=TP, sbp=B))
    with pytest.raises(RuntimeError, match=r"x is on placement(.|\n)*\n +try:   x.to_global\(gt.placem") as raised:
        f(gt.ones(2, 4, placement=OTHERS, sbp=B))
    assert "test_compile_layouts.py" in str(raised.value)
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    f = torch.compile(gt.parallelize(model, TP), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"weight is on the meta device(.|\n)*gt.materialize\(model\)"):
        f(gt.ones(2, 4, placement=TP, sbp=B))


def steps_of_plain(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        losses.append(model(x))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses]
