"""Programs whose rows, samples or matrices do not know of each other: split along them, they move next to nothing.

Each is compared with plain torch, forward and backward, on two and three ranks, with batches that the ranks divide and
one that they do not. `ANSWERS` is what may move: checks of arguments read a truth, solvers whether they have succeeded.
"""
from __future__ import annotations

import itertools
import os
import subprocess

import pytest
import torch
from harness import PYTHON
from torch import distributions as d, linalg
from torch.nn import functional as F

import globaltensor as gt

B, S = gt.sbp.broadcast, gt.sbp.split
ANSWERS = 30


def definite(x):
    """A batch of matrices [n, 3, 3] from rows [n, 9]."""
    a = x.reshape(-1, 3, 3)
    return a @ a.mT + torch.eye(3, dtype=x.dtype)


def right(x):
    return x.reshape(-1, 3, 3)[..., :2]


def of_lu(x):
    factors, pivots = linalg.lu_factor(definite(x))
    return torch.lu_unpack(factors, pivots)[1], linalg.lu_solve(factors, pivots, right(x))


PROGRAMS = {
    "normal": lambda x: d.Normal(x, x.exp()).log_prob(x),
    "bernoulli": lambda x: d.Bernoulli(logits=x).log_prob((x > 0).double()),
    "gamma": lambda x: d.Gamma(x.exp(), x.exp()).log_prob(x.exp()),
    "wishart": lambda x: d.Wishart(x[:, 0].exp() + 4, definite(x)).log_prob(definite(x)),
    "multi_margin": lambda x: F.multi_margin_loss(x, labels(x)),
    "multi_margin sum": lambda x: F.multi_margin_loss(x, labels(x), reduction="sum"),
    "multilabel_margin": lambda x: F.multilabel_margin_loss(x, labels(x).unsqueeze(1).expand(x.shape).contiguous()),
    "bilinear": lambda x: F.bilinear(x, x, x.new_ones(2, 9, 9)),
    "affine_grid": lambda x: F.affine_grid(x[:, :6].reshape(-1, 2, 3), [x.shape[0], 1, 3, 2], align_corners=False),
    "fractional_max_pool": lambda x: F.fractional_max_pool2d(
        x.reshape(-1, 1, 3, 3), 2, output_size=2, _random_samples=x.detach().reshape(-1, 1, 9)[..., :2].sigmoid()),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "mvlgamma": lambda x: torch.mvlgamma(x.exp() + 3, 2),
    "xlogy": lambda x: torch.xlogy(2.0, x.exp()) + torch.xlogy(x, 2.0),
    "eig": lambda x: linalg.eig(definite(x))[0].abs(),
    "lu": of_lu,
    "solve": lambda x: linalg.solve(definite(x), right(x)),
    "slogdet": lambda x: linalg.slogdet(definite(x))[1],
    "pinv": lambda x: linalg.pinv(definite(x)),
    "cholesky_solve": lambda x: torch.cholesky_solve(right(x), linalg.cholesky(definite(x))),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(linalg.cholesky(definite(x))),
    "triangular_solve": lambda x: torch.ops.aten.triangular_solve(right(x), definite(x))[0],
    "householder_product": lambda x: linalg.householder_product(right(x), x[:, :2].sigmoid()),
}


def labels(x):
    """A class for each row."""
    return x.detach()[:, :3].argmax(1)


def step(program, x):
    """What a program gives, and the gradient of all of it together."""
    results = program(x)
    results = list(results) if isinstance(results, tuple) else [results]
    sum((r * r).sum() for r in results).backward()
    return [*results, x.grad]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.detach().full_tensor(), b.detach(), equal_nan=True)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("rows, ranks", [(6, 2), (6, 3), (7, 3)])
def test_programs(name, rows, ranks):
    value = torch.randn(rows, 9, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    want = step(PROGRAMS[name], value.clone().requires_grad_())
    x = gt.from_full(value, gt.placement("cpu", list(range(ranks))), S(0)).requires_grad_()
    with gt.record() as moves:
        got = step(PROGRAMS[name], x)
    sums = 16 * ranks * (got[0].dim() == 0)          # a loss of one number is reduced where it is squared
    assert sum(move.bytes for move in moves) <= (ANSWERS + sums) * ranks, [(m.op, m.bytes) for m in moves if m.bytes]
    same(got, want)


def test_answers():
    """What a number tells of all elements: one truth of each rank moves."""
    value = torch.randint(0, 5, (7, 40), generator=torch.Generator().manual_seed(0))
    x = gt.from_full(value, gt.placement("cpu", [0, 1]), S(0))
    with gt.record() as moves:
        assert torch.equal(x, x.clone()) and not torch.equal(x, x + 1) and not torch.equal(x, x[:3])
        assert torch.allclose(x.double(), x.double()) and not torch.allclose(x.double(), x + 0.1 * x.double())
        for number, invert in itertools.product((3, 9), (True, False)):
            assert bool(torch.isin(number, x, invert=invert)) == bool(torch.isin(number, value, invert=invert))
        assert bool(torch._is_all_true(x >= 0)) and not torch._is_any_true(x > 9)
    assert sum(move.bytes for move in moves) <= 12
    for function in (torch.gcd, torch.lcm, torch.bitwise_left_shift, lambda a, b: a << b, lambda a, b: 9 >> b):
        with gt.record() as moves:
            got = function(x, x)
        same([got], [function(value, value)])
        assert not sum(move.bytes for move in moves)


# ----------------------------------------------------------------------------------------------------------- CTC loss


def ctc(log_probs, targets, lengths, reduction, zero_infinity, module):
    """The loss and its gradient."""
    log_probs = log_probs.requires_grad_()
    options = {"reduction": reduction, "zero_infinity": zero_infinity}
    loss = torch.nn.CTCLoss(**options) if module else lambda *operands: F.ctc_loss(*operands, **options)
    value = loss(log_probs, targets, *lengths)
    (value * torch.arange(1.0, value.numel() + 1, dtype=torch.float64).reshape(value.shape)).sum().backward()
    return [value, log_probs.grad]


CASES = list(itertools.product((6, 5, 2), (True, False), ("plain", "numbers", "split"), ("none", "mean", "sum"),
                               (False, True)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ctc_loss(ranks):
    """Both forms of targets, all forms of lengths, with a sample that is too short for its target."""
    where, generator = gt.placement("cpu", list(range(ranks))), torch.Generator().manual_seed(0)
    for n, apart, form, reduction, zero in CASES:
        log_probs = torch.randn(7, n, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
        sizes = torch.randint(4, 8, (n,), generator=generator), torch.randint(1, 4, (n,), generator=generator)
        sizes[0][-1], sizes[1][-1] = 1, 3
        shape = (n, 4) if apart else (int(sizes[1].sum()),)
        targets = torch.randint(1, 5, shape, generator=generator)
        lengths = [tuple(t.tolist()) for t in sizes] if form == "numbers" else sizes
        rest = reduction, zero, n % 2 == 0
        want = ctc(log_probs.clone(), targets, lengths, *rest)
        if form == "split":
            lengths = [gt.from_full(t, where, S(0)) for t in sizes]
        x, y = gt.from_full(log_probs, where, S(1)), gt.from_full(targets, where, S(0) if apart else B)
        with gt.record() as moves:
            got = ctc(x, y, lengths, *rest)
        same(got, want)
        few = 8 * n * ranks * (form == "split" and not apart) * 3       # the lengths, which tell where targets begin
        if n >= ranks:
            moved = sum(move.bytes for move in moves)
            assert moved <= few, (n, apart, form, reduction, [(m.op, m.bytes) for m in moves if m.bytes])
            assert x.grad.sbp == (S(1),)


def test_ctc_loss_by_python_dispatch():
    """The same where dispatch runs in Python."""
    code = ("import sys; sys.path.insert(0, 'tests'); import test_independent_rows as t; t.test_ctc_loss(2); "
            "t.test_answers()")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run([PYTHON, "-c", code], cwd=root, env={**os.environ, "GLOBALTENSOR_NATIVE": "0"},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
