"""Indices and classes that do not exist: an error, as in plain torch, however the dim that they name is laid out.

A rank handles the indices that fall into its part. So nobody's kernel looks for one that no part has, and somebody else
must.
"""
from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import globaltensor as gt
from globaltensor.errors import OutOfRangeError

B, S = gt.sbp.broadcast, gt.sbp.split
ONES = torch.ones(2, 4)
INDICES = {"too large": [1, 9], "negative": [1, -1], "too small": [1, -9]}
# (weight [6, 4], index [2]) -> result
PROGRAMS = {
    "embedding": lambda w, i: F.embedding(i, w),
    "embedding_bag": lambda w, i: F.embedding_bag(i.view(1, -1), w),
    "gather": lambda w, i: w.gather(0, i.view(-1, 1)),
    "take_along_dim": lambda w, i: torch.take_along_dim(w, i.view(-1, 1), 0),
    "take": lambda w, i: w.take(i * 4),
    "index_select": lambda w, i: w.index_select(0, i),
    "an index": lambda w, i: w[i],
    "two indices": lambda w, i: w[i, i],
    "scatter": lambda w, i: w.scatter(0, i.view(-1, 1), 1.),
    "scatter_add": lambda w, i: w.scatter_add(0, i.view(-1, 1).expand(2, 4), ONES),
    "scatter_reduce": lambda w, i: w.scatter_reduce(0, i.view(-1, 1).expand(2, 4), ONES, "amax"),
    "index_add": lambda w, i: w.index_add(0, i, ONES),
    "index_copy": lambda w, i: w.index_copy(0, i, ONES),
    "index_fill": lambda w, i: w.index_fill(0, i, 1.),
    "index_put": lambda w, i: w.index_put((i,), ONES),
    "index_put that adds": lambda w, i: w.index_put((i,), ONES, accumulate=True),
    "an assignment": lambda w, i: w.clone().__setitem__(i, 1.),
    "cross_entropy": lambda w, i: F.cross_entropy(w.t()[:2], i),
    "cross_entropy, smoothed": lambda w, i: F.cross_entropy(w.t()[:2], i, label_smoothing=0.1),
    "cross_entropy of images": lambda w, i: F.cross_entropy(w.view(2, 6, 2), i.view(2, 1).expand(2, 2)),
    "nll_loss": lambda w, i: F.nll_loss(F.log_softmax(w.t()[:2], 1), i),
    "multi_margin_loss": lambda w, i: F.multi_margin_loss(w.t()[:2], i),
    "one_hot": lambda w, i: F.one_hot(i, 6),
    "one_hot, classes counted": lambda w, i: F.one_hot(i),
    "one_hot of labels below 0": lambda w, i: F.one_hot(i - 10),
    "one_hot of no labels": lambda w, i: F.one_hot(i[:0]),
    "one_hot of no classes": lambda w, i: F.one_hot(i, 0),
    "one_hot of neither": lambda w, i: F.one_hot(i[:0], 0),
    "bincount": lambda w, i: torch.bincount(i),
    "a number": lambda w, i: w[int(i[1])],
}


def outcome(program, *operands):
    """The result; or that it was an error."""
    try:
        result = program(*operands)
    except (IndexError, RuntimeError):
        return "an error"
    return result.full_tensor() if isinstance(result, gt.GlobalTensor) else result


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("index", INDICES)
def test_what_plain_torch_refuses_is_refused_in_every_layout(index, name):
    where, program = gt.placement("cpu", [0, 1, 2]), PROGRAMS[name]
    w, i = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor(INDICES[index])
    want = outcome(program, w, i)
    for w_sbp, i_sbp in itertools.product((S(0), S(1), B), (None, B, S(0))):
        got = outcome(program, gt.from_full(w, where, w_sbp), i if i_sbp is None else gt.from_full(i, where, i_sbp))
        same = got == want if isinstance(want, str) or want is None else isinstance(got, torch.Tensor) and torch.equal(
            got, want)
        assert same, f"weight {w_sbp}, index {i_sbp}: {got}, plain: {want}"


def test_the_error_is_ours_and_names_the_index():
    w = gt.from_full(torch.randn(6, 4), gt.placement("cpu", [0, 1]), S(0))
    with pytest.raises(OutOfRangeError, match="index 9 is out of bounds for a dim of size 6") as caught:
        F.embedding(torch.tensor([0, 9]), w)
    assert caught.value.where.startswith("tests/test_index_range.py:") and "the largest 5" in caught.value.why


def test_an_ignored_class_is_none_that_is_missing():
    x, target = torch.randn(4, 6), torch.tensor([1, -100, 5, 0])
    got = F.cross_entropy(gt.from_full(x, gt.placement("cpu", [0, 1, 2]), S(1)), target)
    torch.testing.assert_close(got.full_tensor(), F.cross_entropy(x, target))
