"""Slices, `F.pad`, `cat`, `roll` and the like along a split dim: the dim stays split, and rows at the seams move.

The bytes are counted here row by row, with no arithmetic of the library.
"""
from __future__ import annotations

import itertools
import os
from collections import Counter

import pytest
import torch
from harness import PROGRAMS as FOLDER, RUN, environment, good
from shards import place, sizes
from torch.nn import functional as F

import globaltensor as gt

SEED = int(os.environ.get("SHIFTS_SEED") or 20_261_128)
print(f"tests/test_shifts.py: SHIFTS_SEED={SEED}")
S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum



def beside(x, rows):
    """Rows that are whole on every rank, to stand beside x."""
    made = torch.full((rows, *x.shape[1:]), 7.0, dtype=x.dtype)
    return gt.from_full(made, x.placement, B) if isinstance(x, gt.GlobalTensor) else made


# what is done to x of [rows, 6]; the row of x that row i of the result is, None for none
PROGRAMS = {
    "first": (lambda x: x[:-1], lambda i, n: i),
    "last": (lambda x: x[1:], lambda i, n: i + 1),
    "inner": (lambda x: x[2:-1], lambda i, n: i + 2),
    "every other": (lambda x: x[::2], lambda i, n: 2 * i),
    "every other, from 1": (lambda x: x[1::2], lambda i, n: 2 * i + 1),
    "pad before": (lambda x: F.pad(x, (0, 0, 1, 0)), lambda i, n: i - 1 if i else None),
    "pad, other value": (lambda x: F.pad(x, (1, 0, 2, 1), value=2.5), lambda i, n: i - 2 if 2 <= i < n + 2 else None),
    "cut and pad": (lambda x: F.pad(x, (0, 0, -1, 2)), lambda i, n: i + 1 if i < n - 1 else None),
    "roll": (lambda x: torch.roll(x, 1, 0), lambda i, n: (i - 1) % n),
    "roll back": (lambda x: x.roll((-2, 1), (0, 1)), lambda i, n: (i + 2) % n),
    "cat": (lambda x: torch.cat([beside(x, 1), x]), lambda i, n: i - 1 if i else None),
    "cat behind": (lambda x: torch.cat([x, beside(x, 2)], 0), lambda i, n: i if i < n else None),
}
# more of them at once, whose rows are not counted
OTHERS = {
    "slice of a slice": lambda x: x[1:][:-1],
    "differences": lambda x: x[1:] - x[:-1],
    "diff": lambda x: x.diff(dim=0),
    "cat of slices": lambda x: torch.cat([x[:-1], 2 * x[1:]], -2),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:-2] * 3, 0, 1, -1),
    "slices of a result": lambda x: (x * 2)[1:, 1:],
    "slice of what is turned": lambda x: x.t()[:, 1:].t(),
    "circular pad": lambda x: F.pad(x.t()[None], (1, 1), mode="circular")[0].t(),
    "halves turned": lambda x: torch.cat([-x[3:], x[:3]]),
}


def run(f, x, where, sbp):
    """f on a plain and on a global x, forward and backward; what came out, and the bytes of both."""
    plain = x.clone().requires_grad_()
    y = f(plain)
    grad = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(SEED))
    y.backward(grad)
    spread = gt.from_full(x, where, sbp).requires_grad_()
    with gt.record() as there:
        got = f(spread)
        value = got + 0                              # a view moves when it is read
    assert got.stride() == y.stride() and got.dtype == y.dtype
    given = gt.from_full(grad, where, got.sbp)
    with gt.record() as back:
        got.backward(given)
        assert (spread.grad + 0).sbp == spread.sbp   # it is reduced when it is read
    torch.testing.assert_close(value.detach().full_tensor(), y.detach(), rtol=0, atol=0)
    torch.testing.assert_close(spread.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)
    return got, sum(m.bytes for m in there), sum(m.bytes for m in back)


def owners(rows, ranks):
    """Who holds each row."""
    return [r for r, n in enumerate(sizes(rows, ranks)) for _ in range(n)]


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rows", [40, 37, 31], ids="rows={}".format)
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_at_the_seams(name, rows, ranks):
    f, source = PROGRAMS[name]
    where = place(range(ranks))
    got, there, back = run(f, rand(rows, 6), where, S(0))
    assert got.sbp == (S(0),)
    own, made = owners(rows, ranks), owners(len(got), ranks)
    crossing = [(made[i], own[j]) for i in range(len(got)) if (j := source(i, rows)) is not None and made[i] != own[j]]
    if got.shape == (len(got), 6) and "value" not in name:
        assert (there, back) == tuple(6 * 8 * max(Counter(pair[k] for pair in crossing).values(), default=0)
                                      for k in (0, 1))


@pytest.mark.sample(3)
@pytest.mark.parametrize("grid", [[0, 1, 2], [2, 0, 3, 1], [[0, 1], [2, 3]], [[3, 1], [0, 2]]], ids=str)
@pytest.mark.parametrize("name", [*PROGRAMS, *OTHERS])
def test_values(name, grid):
    f = OTHERS.get(name) or PROGRAMS[name][0]
    where = place(grid)
    for sbp in itertools.product([S(0), S(1), B], repeat=where.ndim):
        for rows in (11, 8, 5):
            run(f, rand(rows, 6), where, sbp)


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "value" not in name])
def test_dtypes(name, dtype):
    x = (rand(16, 6) * 10).to(dtype)
    got = PROGRAMS[name][0](gt.from_full(x, place([0, 1, 2]), S(0)))
    assert torch.equal(got.full_tensor(), PROGRAMS[name][0](x))
    assert got.sbp == (S(0),)


def test_order_in_memory_is_kept():
    x = rand(2, 3, 256, 50).to(memory_format=torch.channels_last)
    row = rand(2, 3, 1, 50).to(memory_format=torch.channels_last)        # plain, and so whole
    for f in (lambda x: F.pad(x, (0, 0, 1, 1)), lambda x: torch.cat([x, row], 2), lambda x: x[:, :, 1:].clone(),
              lambda x: torch.slice_scatter(x, x[:, :, 2:], 2, 1, -1)):
        got, want = f(gt.from_full(x, place([0, 1]), S(2)).to(memory_format=torch.channels_last)), f(x)
        assert got.sbp == (S(2),) and got.stride() == want.stride()
        assert torch.equal(got.full_tensor(), want)
        assert all(shard.is_contiguous(memory_format=torch.channels_last) == want.is_contiguous(
            memory_format=torch.channels_last) for shard in got.shards.values())


def test_a_pending_sum():
    where = place([[0, 1], [2, 3]])
    parts = rand(12, 6)
    x = gt.from_full(parts, where, (S(0), P))
    for f in (lambda x: x[1:], lambda x: F.pad(x, (0, 0, 2, 1), value=1.0), lambda x: x.roll(1, 0),
              lambda x: torch.cat([x, x[:2]])):
        torch.testing.assert_close(f(x).full_tensor(), f(parts))


def test_writes_through_slices():
    x, where = rand(16, 6), place([0, 1, 2, 3])
    plain, spread = x.clone(), gt.from_full(x, where, S(0))
    views = [t[1:][:-1] for t in (plain, spread)]
    assert views[1].sbp == (S(0),)
    for t, view in zip((plain, spread), views):
        view.mul_(2)
        t.add_(1)
        view[3:] += 5
    assert torch.equal(spread.full_tensor(), plain)
    assert torch.equal(views[1].full_tensor(), views[0])


def test_short_slices_are_cut_along_another_dim():
    x = gt.from_full(rand(16, 8), place([0, 1, 2, 3]), S(0))
    for short in (x[:8], x[:3], x[5:6]):
        assert S(0) not in short.sbp


def test_next_tokens():
    """Logits and labels of a sequence that is split, shifted against each other, as in the loss of a causal model."""
    where, tokens = place([0, 1, 2, 3]), torch.randint(0, 50, (2, 64), generator=torch.Generator().manual_seed(SEED))
    logits = rand(2, 64, 50)

    def loss(logits, tokens):
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:])

    plain = logits.clone().requires_grad_()
    loss(plain, tokens).backward()
    spread = gt.from_full(logits, where, S(1)).requires_grad_()
    with gt.record() as moves:
        loss(spread, gt.from_full(tokens, where, S(1))).backward()
        assert spread.grad.sbp == (S(1),)
    torch.testing.assert_close(spread.grad.full_tensor(), plain.grad)
    assert sum(m.bytes for m in moves) < 0.02 * logits.numel() * 8


@pytest.mark.processes
@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_in_real_processes_as_on_one_device(native):
    good([*RUN, "-n", "3", FOLDER / "shifts.py"], environment(GLOBALTENSOR_NATIVE=native), timeout=180)
