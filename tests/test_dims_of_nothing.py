"""Reductions, cumulative ops, softmax, norms and sorts along dims of size 0, of one rank and of several.

Variances of no more elements than their correction divide by nothing, too. Oracle: plain torch, values and gradients.
What it refuses is refused.
"""
from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

import globaltensor as gt

S, B = gt.sbp.split, gt.sbp.broadcast
ONE, SEVERAL = (gt.placement("cpu", [2]),), (gt.placement("cpu", [0, 1, 2]),)
GRID = gt.placement("cpu", [[0, 1], [2, 3]])
SHAPES = ((0,), (3, 0), (2, 0, 3), (0, 0))
NAMES = """sum mean prod amax amin max min argmax argmin var std logsumexp cumsum cumprod logcumsumexp cummax cummin
    softmax log_softmax median mode sort argsort any all nansum nanmean count_nonzero std_mean aminmax diff"""
OPS = {name: (lambda x, d, call=getattr(torch, name): call(x, dim=d)) for name in NAMES.split()}
OPS |= {f"norm {p}": (lambda x, d, p=p: torch.linalg.vector_norm(x, p, d)) for p in (0, 1, 2, 3, float("inf"))}
OPS |= {"two dims": lambda x, d: x.logsumexp(tuple({0, d})), "sums": lambda x, d: x.sum(tuple({0, d})),
        "all": lambda x, d: x.logsumexp(tuple(range(x.dim()))), "kept": lambda x, d: x.logsumexp(d, keepdim=True),
        "topk": lambda x, d: x.topk(0, d), "normalize": lambda x, d: F.normalize(x, dim=d),
        "layer_norm": lambda x, d: F.layer_norm(x, x.shape[-1:]), "of integers": lambda x, d: x.int().logsumexp(d),
        "mse_loss": lambda x, d: F.mse_loss(x, x), "complex": lambda x, d: (x + 0j).logsumexp(d)}


def layouts(dims):
    one = [S(d) for d in range(dims)]
    yield from ((on, sbp) for on, sbp in itertools.product((*ONE, *SEVERAL), [*one, B, gt.sbp.partial_sum]))
    yield from ((GRID, sbp) for sbp in itertools.product([*one, B], repeat=2))


def outcome(op, x, dim):
    """Values and the gradient, or that it raises."""
    x.requires_grad_()
    try:
        out = op(x, dim)
        out = [*out] if isinstance(out, tuple) else [out]
        if any(t.requires_grad for t in out):
            sum(t.abs().sum() for t in out if t.requires_grad).backward()
    except Exception as error:                       # of whichever type it is
        return error
    return [t.detach().full_tensor() if t.is_global else t.detach() for t in [*out, x.grad] if t is not None]


@pytest.mark.parametrize("name", OPS)
def test_along_dims_of_size_0(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for shape in SHAPES:
            for dim, (on, sbp) in itertools.product(range(len(shape)), layouts(len(shape))):
                theirs = outcome(OPS[name], torch.zeros(shape), dim)
                ours = outcome(OPS[name], gt.from_full(torch.zeros(shape), on, sbp), dim)
                what = f"{shape} dim {dim} {on} {sbp}: {ours} for {theirs}"
                assert isinstance(ours, Exception) == isinstance(theirs, Exception), what
                if not isinstance(theirs, Exception):
                    assert len(ours) == len(theirs), what
                    for a, b in zip(ours, theirs):
                        torch.testing.assert_close(a, b, equal_nan=True, msg=what)


@pytest.mark.parametrize("name", OPS)
def test_complex_numbers_along_dims_of_size_0(name):
    """Of which torch takes the extrema where there are none."""
    for shape, dtype in itertools.product(((0, 3), (3, 0), (2, 0, 3)), (torch.complex64, torch.complex128)):
        for dim, sbp in itertools.product(range(len(shape)), (S(0), S(len(shape) - 1), B, gt.sbp.partial_sum)):
            theirs = outcome(OPS[name], torch.zeros(shape, dtype=dtype), dim)
            ours = outcome(OPS[name], gt.from_full(torch.zeros(shape, dtype=dtype), SEVERAL[0], sbp), dim)
            what = f"{shape} {dtype} dim {dim} {sbp}: {ours} for {theirs}"
            assert isinstance(ours, Exception) == isinstance(theirs, Exception), what
            if not isinstance(theirs, Exception):
                assert [t.shape for t in ours] == [t.shape for t in theirs], what
                assert all(torch.equal(a, b) or a.isnan().all() and b.isnan().all() for a, b in zip(ours, theirs)), what


REAL = (torch.arange(20.0).view(5, 4), torch.zeros(5, 4), torch.zeros(5, 4) + torch.tensor([0, 0, 1, -1.0]))
VARIED = [*REAL, *(torch.complex(a, b) for a, b in itertools.product(REAL, repeat=2))]


@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_variances_of_no_more_elements_than_their_correction(name, dim):
    """Values, and what torch warns of them, at the line of the program."""
    op, count = getattr(torch, name), {None: 20, 0: 5, 1: 4}[dim]
    for x, correction, sbp in itertools.product(VARIED, (1, count, count + 3), ((S(0), S(0)), (S(1), B), (B, B))):
        found = []
        for t in (x, gt.from_full(x, GRID, sbp)):
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                out = op(t, dim, correction=correction)
            out = out if isinstance(out, tuple) else [out]
            told = {(str(one.message), one.filename) for one in heard}
            found.append([told, *(y.full_tensor() if y.is_global else y for y in out)])
        theirs, ours = found
        what = f"{x} correction={correction} {sbp}: {ours} for {theirs}"
        assert ours[0] == theirs[0], what
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, msg=what)
