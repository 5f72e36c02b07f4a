"""Elements that several indices name together, of a tensor that is split along the dims that are named: a rank takes
those that it holds, and what travels is they, forward and backward, as in `h[torch.arange(b), last]`.
"""
from __future__ import annotations

import pytest
import torch
from test_row_writes import GRID, LAYOUTS, THREE, B, P, S, i
from torch.nn import functional as F

import globaltensor as gt
from globaltensor.errors import OutOfRangeError

# indices of x [7, 5, 3]; `g` makes them global or leaves them plain
PICKS = {
    "two dims": lambda g: (g(i(6, 0, 2, 5)), g(i(0, 1, 2, 1))),
    "some twice, some negative": lambda g: (g(i(6, -1, 2, 0, 0)), g(i(0, 0, -3, 1, 1))),
    "one of them plain": lambda g: (torch.arange(7), g(i(0, 4, 2, 1, -1, 3, 3))),
    "indices that broadcast": lambda g: (g(i(6, 0)[:, None]), g(i(0, 1, 4))),
    "a number for all": lambda g: (g(torch.arange(7)), torch.tensor(3)),
    "dims that are apart": lambda g: (g(i(6, 0, 2)), slice(None), g(i(0, 1, 2))),
    "the last dims": lambda g: (slice(None), g(i(4, -1, 2)), g(i(0, 1, 2))),
    "all dims": lambda g: (g(i(6, 0, 2)), g(i(4, -1, 2)), g(i(0, 1, -3))),
    "of two dims": lambda g: (g(i(6, 0, 2, 3).view(2, 2)), g(i(4, -1, 2, 2).view(2, 2))),
    "a mask of two dims": lambda g: (g(torch.arange(35).view(7, 5) % 3 == 0),),
    "none": lambda g: (g(torch.empty(0, dtype=torch.int64)), g(torch.empty(0, dtype=torch.int64))),
}
INDICES = {"plain": lambda where: lambda t: t,
           "whole": lambda where: lambda t: gt.from_full(t, where, B),
           "split": lambda where: lambda t: gt.from_full(t, where, S(0))}


@pytest.mark.parametrize("how", INDICES)
@pytest.mark.parametrize("name", PICKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_elements_that_are_picked(dtype, name, how):
    x = torch.randint(-4, 4, (7, 5, 3), generator=torch.Generator().manual_seed(1)).to(dtype)
    want = x[PICKS[name](lambda t: t)]
    for where, sbp in LAYOUTS:
        if dtype == torch.bool and P in (sbp if isinstance(sbp, tuple) else (sbp,)):
            continue                                 # bools have no sums
        got = gt.from_full(x, where, B).to_global(sbp=sbp)[PICKS[name](INDICES[how](where))]
        assert torch.equal(got.full_tensor(), want) and got.stride() == want.stride(), sbp


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 5), (5, 1), (1, 1), (2, 1), (4, 3)], ids=str)
def test_a_part_without_elements_beside_one_with_some(shape):
    """A dim of size 1 that is split leaves a rank nothing, where its part of the other dim has several."""
    n, m = shape
    x, rows, columns = torch.arange(4. * n * m).view(n, m, 4), torch.arange(7) % n, torch.arange(7) % m - m
    for index in ((rows, columns), (rows, columns, 1), (rows, slice(None), columns * 0), (rows, columns, None)):
        for where, sbp in LAYOUTS:
            spread = gt.from_full(x, where, B).to_global(sbp=sbp).detach().requires_grad_()
            plain = x.clone().requires_grad_()
            assert torch.equal(spread[index].full_tensor(), plain[index]), sbp
            for one in (spread, plain):
                one[index].square().sum().backward()
            torch.testing.assert_close(spread.grad.full_tensor(), plain.grad)


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", INDICES)
@pytest.mark.parametrize("name", PICKS)
def test_their_gradients(name, how):
    def run(spread, index):
        x = spread(torch.linspace(0, 1, 105).view(7, 5, 3)).requires_grad_()
        picked = (x * 2)[index]
        grad, = torch.autograd.grad((picked ** 3).sum(), x, create_graph=True)
        again, = torch.autograd.grad((grad ** 2).sum(), x)
        return [t.full_tensor() if isinstance(t, gt.GlobalTensor) else t for t in (grad, again)]

    want = run(torch.clone, PICKS[name](lambda t: t))
    for where, sbp in LAYOUTS:
        got = run(lambda t, on=where, sbp=sbp: gt.from_full(t, on, B).to_global(sbp=sbp).detach(),
                  PICKS[name](INDICES[how](where)))
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)


USES = {"picked": lambda x, at: x[at], "added": lambda x, at: x.index_put(at, torch.ones(4), accumulate=True)}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("at", [(i(0, 9, 1, 1), i(0, 0, 0, 0)), (i(0, 1, 1, 1), i(0, 0, -6, 0))], ids=["row", "column"])
def test_an_index_that_names_nothing_is_an_error(at, use):
    program = USES[use]
    with pytest.raises(IndexError):
        program(torch.zeros(7, 5), at)
    for where, sbp in LAYOUTS[:2] + LAYOUTS[5:8]:
        with pytest.raises((IndexError, OutOfRangeError), match="out of bounds"):
            program(gt.zeros(7, 5, placement=where, sbp=sbp), at)


def test_inf_and_nan_beside_what_is_picked_stay_there():
    x = torch.tensor([[torch.nan, 1.0], [2.0, torch.inf], [3.0, 4.0]])
    at = (i(0, 1, 2), i(1, 0, 1))
    for where, sbp in ((THREE, S(0)), (THREE, S(1)), (GRID, (S(0), S(1)))):
        assert torch.equal(gt.from_full(x, where, sbp)[at].full_tensor(), x[at])


BATCH, LENGTH, WIDTH = 32, 256, 512
ROWS = BATCH * WIDTH * 4


@pytest.mark.parametrize("rows", ["plain", "split"])
def test_what_moves_is_what_is_picked(rows):
    """The last token of each sequence, as CLIP and models for classification take it: not all of the tokens."""
    where = gt.placement("cpu", [0, 1])
    h = gt.ones(BATCH, LENGTH, WIDTH, placement=where, sbp=S(0)).requires_grad_()
    last = gt.full((BATCH,), 5, placement=where, sbp=S(0))
    each = INDICES[rows](where)(torch.arange(BATCH))
    with gt.record() as moves:
        (h * 2)[each, last].square().sum().backward()
        assert h.grad.sbp == h.sbp
    assert sum(m.bytes for m in moves) <= 2 * ROWS + 8 * BATCH * 8, [(m.op, m.bytes) for m in moves]


@pytest.mark.parametrize("rows", ["plain", "split"])
def test_the_gradient_comes_back_to_where_the_tokens_are(rows):
    """Of a head and a loss whose labels are split, which leave the gradient split by features."""
    where, width = gt.placement("cpu", [0, 1]), 128
    h = gt.randn(BATCH, LENGTH, width, placement=where, sbp=S(0)).requires_grad_()
    head = gt.randn(16, width, placement=where, sbp=B).requires_grad_()
    labels = gt.zeros(BATCH, placement=where, sbp=S(0), dtype=torch.int64)
    last, each = gt.full((BATCH,), 5, placement=where, sbp=S(0)), INDICES[rows](where)(torch.arange(BATCH))
    with gt.record() as moves:
        F.cross_entropy(F.linear(F.layer_norm(h, (width,))[each, last], head), labels).backward()
        assert h.grad.sbp == h.sbp
    assert sum(m.bytes for m in moves) <= 4 * BATCH * width * 4, [(m.op, m.bytes) for m in moves]
