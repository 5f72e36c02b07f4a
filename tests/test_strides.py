"""Results lie in memory in the order of torch, so that the same views of them are views, and others are refused."""
from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import globaltensor as gt

LINE, GRID = gt.placement("cpu", [0, 1, 2]), gt.placement("cpu", [[0, 1], [2, 3]])


@pytest.mark.parametrize("sbp", ["B", "S(0)", "S(1)"])
def test_one_hot(sbp):
    """Of indices in the order of columns, as nonzero gives them, too."""
    index = torch.arange(12).reshape(3, 4).nonzero()
    x = gt.arange(12, placement=LINE, sbp="B").reshape(3, 4).nonzero().to_global(sbp=sbp)
    assert index.stride() == x.stride() == (1, 11)
    for classes in (-1, 5):
        assert F.one_hot(x, classes).stride() == F.one_hot(index, classes).stride()
        assert torch.equal(F.one_hot(x, classes).full_tensor(), F.one_hot(index, classes))


EINSUMS = {                                          # equation -> shapes
    "ik,kj->ij": ((2, 3), (3, 4)), "ik,kj->ji": ((2, 3), (3, 4)), "bik,bkj->ijb": ((5, 2, 3), (5, 3, 4)),
    "bik,bkj->jib": ((5, 2, 3), (5, 3, 4)), "bqhd,bkhd->bhqk": ((2, 5, 3, 4), (2, 6, 3, 4)),
    "bhqk,bkhd->bqhd": ((2, 3, 5, 6), (2, 6, 3, 4)), "ij,ab->ijab": ((2, 3), (4, 5)), "ij,ab->jaib": ((2, 3), (4, 5)),
    "bi,bj->bij": ((2, 3), (2, 5)), "ij,ij->ji": ((2, 3), (2, 3)), "ij,j->i": ((2, 3), (3,)), "i,i->": ((3,), (3,)),
    "ij,ji->i": ((3, 4), (4, 3)),
}


def like(t, where, sbp):
    """A global tensor of the same values and strides."""
    return gt.from_full(t.mT, where, "B").mT.to_global(sbp=sbp) if t.dim() > 1 and t.stride(-1) > 1 else gt.from_full(
        t, where, sbp)


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum(equation):
    torch.manual_seed(3)
    left, right = (torch.randn(shape) for shape in EINSUMS[equation])
    turned = [(t, t.mT.contiguous().mT) if t.dim() > 1 else (t,) for t in (left, right)]
    for (a, b), sbp in itertools.product(itertools.product(*turned), ["B", ("S(0)", "B"), ("B", "S(0)")]):
        wanted = torch.einsum(equation, a, b)
        result = torch.einsum(equation, like(a, GRID, sbp), like(b, GRID, "B"))
        assert result.stride() == wanted.stride(), (a.stride(), b.stride(), sbp)
        torch.testing.assert_close(result.full_tensor(), wanted)


@pytest.mark.parametrize("where", [LINE, GRID])
def test_a_plain_tensor_is_resized_as_a_global_one(where):
    plain = torch.zeros(2)
    assert plain.resize_as_(gt.zeros(3, 4, placement=where, sbp="B")) is plain and plain.shape == (3, 4)
    with pytest.raises(RuntimeError, match="require grad"):
        torch.zeros(2, requires_grad=True).resize_as_(gt.zeros(3, 4, placement=where, sbp="B"))
