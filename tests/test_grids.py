"""Products on grids of ranks: the right values in panels, the published bytes, and no more memory than panels take."""
from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import replace
from itertools import cycle, product
from math import prod

import pytest
import torch
import torch.nn.functional as F
from harness import PYTHON, ROOT, environment, run
from torch import nn

import globaltensor as gt
from globaltensor.algorithms import summa
from globaltensor.boxings.traffic import elements_received as bytes_of
from globaltensor.errors import SbpError
from globaltensor.layouts.layout import layout, spec
from globaltensor.runtime.world import world

sys.path.insert(0, os.fspath(ROOT / "examples"))
from gpt import GPT

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
SEED = 11
GRIDS = {(2, 2): (S(0), S(2)), (3, 2): (S(0), S(2)), (2, 2, 2): (S(0), S(0), S(2))}


def grid(*shape, names=None):
    if prod(shape) > gt.world_size():
        pytest.skip(f"{prod(shape)} ranks; run by test_on_27_ranks")
    return gt.placement("cpu", torch.arange(prod(shape)).view(shape).tolist(), names)


def of_weight(shape):
    """A weight [n, k] whose k is cut along rows and n along columns; it is whole along what comes before."""
    return (B,) * (len(shape) - 2) + (S(1), S(0))


@pytest.fixture(params=["gathered", "in panels"])
def panels(request, monkeypatch):
    if request.param == "in panels":
        monkeypatch.setattr(summa, "PANEL", 1)
        # so many exchanges would not be chosen, unless a test before has made the decision
        monkeypatch.setattr(world(), "machine", replace(world().machine, latency=0.0))
    return request.param


SIZES = [(4, 3, 6, 8), (5, 2, 7, 3), (16, 1, 2, 12), (2, 3, 12, 2)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("shape", GRIDS, ids=str)
@pytest.mark.parametrize("b, t, k, n", SIZES)
@pytest.mark.parametrize("how", ["linear", "linear without bias", "matmul", "two dims"])
def test_a_layer_forward_and_backward(shape, b, t, k, n, how, panels):
    generator = torch.Generator().manual_seed(SEED)
    x, w, bias, up = (torch.randn(*s, dtype=torch.float64, generator=generator)
                      for s in ((b, t, k), (n, k), (n,), (b, t, n)))
    if how == "two dims":
        x, up = x.flatten(0, 1), up.flatten(0, 1)
    where, lies, last = grid(*shape), GRIDS[shape], x.dim() - 1
    lies = tuple(S(last) if s == S(2) else s for s in lies)
    plain = [x, w, bias]
    ours = [gt.from_full(x, where, lies), gt.from_full(w, where, of_weight(shape)),
            gt.from_full(bias, where, (B,) * (len(shape) - 1) + (S(0),))]
    results = []
    for tensors, grad in ((plain, up), (ours, gt.from_full(up, where, lies))):
        for t_ in tensors:
            t_.requires_grad_()
        x, w, bias = tensors
        y = x @ w.t() + bias if how == "matmul" else F.linear(x, w, None if "without" in how else bias)
        results.append([y, *torch.autograd.grad(y, [x, w], grad)])
    for told, expected in zip(results[1], results[0]):
        torch.testing.assert_close(told.full_tensor(), expected)
    if "linear" in how:
        assert results[1][0].sbp == lies and results[1][1].sbp == lies
        assert results[1][2].sbp == (P,) * (len(shape) - 2) + (S(1), S(0))


@pytest.mark.parametrize("axes, which", [(1, "all"), (2, "all"), (3, "grids"),
                                         pytest.param(3, "all", marks=pytest.mark.long)])
def test_a_bias_counts_once_however_all_lies(axes, which):
    """All layouts of input and weight along so many axes, with the bias in another layout each time: one of them may
    cut a batch, another the sum, so that on some axes of a grid what comes out is pending."""
    generator = torch.Generator().manual_seed(SEED)
    plain = [torch.randint(-3, 4, s, generator=generator).double().requires_grad_() for s in ((2, 4, 8), (4, 8), (4,))]
    expected = F.linear(*plain)
    grads = torch.autograd.grad(expected.sum(), plain)
    where, pending = grid(*(2,) * axes), 0
    of_biases = cycle(product((B, S(0), P), repeat=axes))
    for lies in product((B, S(0), S(1), S(2)), repeat=axes):
        next(of_biases)                              # else every layout of the weight would meet one of the bias
        for of in product((B, S(0), S(1)), repeat=axes):
            lie = next(of_biases)
            specs = [spec(layout(where, sbp), tuple(t.shape), None, t.dtype) for sbp, t in zip((lies, of), plain)]
            on_grid = summa.grid_product(("ABk", "nk", "ABn"), *specs)
            if which == "grids" and on_grid is None:
                continue
            ours = [gt.from_full(t.detach(), where, sbp).requires_grad_() for t, sbp in zip(plain, (lies, of, lie))]
            own = F.linear(*ours)
            assert torch.equal(own.full_tensor(), expected), (lies, of, lie)
            pending += on_grid is not None and P in on_grid.out.sbp and own.sbp == on_grid.out.sbp
            if on_grid is not None:
                for ours_grad, grad in zip(torch.autograd.grad(own.sum(), ours), grads):
                    assert torch.equal(ours_grad.full_tensor(), grad), (lies, of, lie)
    assert axes < 3 or pending


def received(shape, lies, of, n, backward=True):
    """Bytes of a layer of n x n matrices, in parts of one matrix; the second time, when all is decided."""
    where = grid(*shape)
    x = gt.from_full(torch.randn(n, 1, n), where, lies).requires_grad_()
    w = gt.from_full(torch.randn(n, n), where, of).requires_grad_()
    up = gt.from_full(torch.randn(n, 1, n), where, lies)
    assert x.grad is None                            # read, so that what other tests left waiting is reduced now
    with gt.record() as moves:
        y = F.linear(x, w)
        assert y.sbp == lies
        y.backward(up)
        assert x.grad.sbp == lies and w.grad.sbp == of
    return sum(m.bytes for m in moves), n * n * 4


@pytest.mark.parametrize("q", [2, 3])
def test_2d_moves_what_summa_does(q):
    got, matrix = received((q, q), (S(0), S(2)), (S(1), S(0)), 36)
    assert got == 6 * (q - 1) * matrix // q**2


def test_panels_move_the_same_bytes():
    """Rank by rank, over all panels. (A record is of the rank that receives most, not always the same.)"""
    where, n = grid(2, 2), 32
    a, b = spec(layout(where, (S(0), S(1))), (n, n), None, torch.float32), spec(
        layout(where, (S(1), S(0))), (n, n), None, torch.float32)
    form = summa.grid_product(("mk", "nk", "mn"), a, b)
    for labels, of in (("mk", a), ("nk", b)):
        once = bytes_of(of.layout, form.held(labels, (0, n)), (n, n))
        in_panels = Counter()
        for ends in ((0, 16), (16, 32)):
            in_panels.update(bytes_of(of.layout, form.held(labels, ends), (n, n)))
        assert once == dict(in_panels) and set(once.values()) == {n * n // 4}


@pytest.mark.parametrize("d, q", [(2, 2), (2, 3), (3, 2)])
def test_2_5d_moves_no_more_than_published(d, q):
    """3 (q-1)(d+1)/(d q^2) + 2 (d-1)/(d q^2) is what it takes where C rests in all three products. With d > 2, or d = 2
    and q = 3, another one rests in some of them, and less is moved."""
    got, matrix = received((d, q, q), (S(0), S(0), S(2)), (B, S(1), S(0)), 36)
    published = (3 * (q - 1) * (d + 1) + 2 * (d - 1)) * matrix // (d * q**2)
    assert got == published if (d, q) == (2, 2) else got < published


@pytest.mark.parametrize("rest, sizes", [("A", (64, 64, 8)), ("B", (8, 64, 64)), ("C", (64, 8, 64))])
def test_the_largest_matrix_rests(rest, sizes):
    """m x k times k x n on 2 x 2 ranks: the bytes of the two that pass, a rank's part of each at most twice."""
    (m, k, n), where = sizes, grid(2, 2)
    a = gt.from_full(torch.randn(m, 1, k), where, (S(0), S(2)))
    b = gt.from_full(torch.randn(n, k), where, (S(1), S(0)))
    with gt.record() as moves:
        F.linear(a, b)
    parts = {"A": m * k, "B": k * n, "C": m * n}
    assert sum(m_.bytes for m_ in moves) <= 4 * 2 * sum(n for name, n in parts.items() if name != rest) // 4


def test_no_rank_holds_the_gathered_form(monkeypatch):
    """On q x q ranks, what a rank holds of A and B while they pass is 1/q of a line of each."""
    q, n, where = 2, 72, grid(2, 2)
    monkeypatch.setattr(summa, "PANEL", 1)
    held = []
    contract = summa.custom_ops.contract
    monkeypatch.setattr(summa.custom_ops, "contract",
                        lambda text, a, b: held.append(a.nbytes + b.nbytes) or contract(text, a, b))
    x = gt.from_full(torch.randn(n, 1, n), where, (S(0), S(2)))
    w = gt.from_full(torch.randn(n, n), where, (S(1), S(0)))
    with gt.record() as moves:
        summa_y = F.linear(x, w)
    line = 2 * n * n * 4 // q                        # a row of blocks of A and a column of blocks of B
    assert len(held) == q * len(x.shards) and set(held) == {line // q}
    assert [m.bytes for m in moves] == [line // q] * q
    monkeypatch.undo()
    torch.testing.assert_close(summa_y.full_tensor(), F.linear(x.full_tensor(), w.full_tensor()))


# ------------------------------------------------------------------------------------------------- ready-made plans

PLANS = {"2D": ((2, 2), ("row", "column"), ("row", "column"), {"row": S(0)}),
         "no square": ((2, 3), ("row", "column"), ("row", "column"), {"row": S(0)}),
         "2.5D": ((2, 2, 2), ("depth", "row", "column"), ("row", "column"), {"depth": S(0), "row": S(0)}),
         "3D": ((2, 2, 2), ("j", "i", "l"), ("j", "i", "l"), {"i": S(0), "j": S(1)}),
         "no cube": ((1, 3, 2), ("j", "i", "l"), ("j", "i", "l"), {"i": S(0), "l": S(0)})}


@pytest.mark.parametrize("name", PLANS)
def test_a_gpt_trains_as_on_one_device(name):
    shape, names, axes, rows = PLANS[name]
    models = []
    for _ in range(2):
        torch.manual_seed(SEED)
        models.append(GPT(32, 8, 2, 24, 6))
    where = grid(*shape, names=names)
    plan = gt.Plan.of(models[0], axes)
    assert gt.Plan.parse(str(plan)).items() == plan.items() or str(gt.Plan.parse(str(plan))) == str(plan)
    gt.parallelize(models[0], where, gt.Plan.parse(str(plan)))
    ids = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(SEED))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    batches = (gt.from_full(x, where, rows), gt.from_full(y, where, rows)), (x, y)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for _ in range(3):
        losses = []
        for model, (inputs, targets), optimizer in zip(models, batches, optimizers):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for (key, p), q in zip(models[0].named_parameters(), models[1].parameters()):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-3, atol=1e-4, msg=lambda m: f"{key}: {m}")


class Pair(nn.Module):
    """Two layers of n x n matrices, called as the plans call the first and the second of a pair."""

    def __init__(self, n):
        super().__init__()
        self.norm = nn.LayerNorm(n, elementwise_affine=False)
        self.up, self.down = nn.Linear(n, n, bias=False), nn.Linear(n, n, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("q", [2, 3])
def test_3d_moves_exactly_what_is_published(q):
    """6 (q-1)/q^3 of a matrix for every layer, forward and backward."""
    n, axes = {2: 32, 3: 27}[q], ("j", "i", "l")
    where, model = grid(q, q, q, names=axes), Pair(n)
    gt.parallelize(model, where, gt.Plan.of(model, axes))
    parameters = list(model.parameters())
    for p, split_along in zip(parameters, ((S(0), S(0), S(1)), (S(1), S(1), S(0)))):
        assert p.sbp == split_along and p.shards[0].numel() == n * n // q**3
    x = gt.from_full(torch.randn(q * q, n // q**2, n), where, (S(1), S(0), S(2))).requires_grad_()
    for _ in range(2):
        with gt.record() as moves:
            y = model(x)
            assert y.sbp == x.sbp
            y.backward(x.detach())
        assert all(p.grad.sbp == p.sbp for p in parameters)
    big = [m.bytes for m in moves if m.bytes > 4 * n]            # the norm's statistics are less
    assert sum(big) == 2 * 6 * (q - 1) * (n * n * 4) // q**3 and len(big) == 12


def test_a_plan_along_four_axes():
    with pytest.raises(SbpError, match="along 4 axes"):
        gt.Plan.of(Pair(4), ("a", "b", "c", "d"))


@pytest.mark.long
@pytest.mark.processes
def test_on_27_ranks():
    """What needs more ranks than the other tests have."""
    if not gt.init().single_process:
        pytest.skip("for one process")
    code, out, err = run([PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "3", "--rootdir", ROOT,
                          __file__, "--deselect", f"{__file__}::test_on_27_ranks"],
                         environment(GLOBALTENSOR_RANKS="27"))
    assert code == 0 and "skipped" not in out, out + err
