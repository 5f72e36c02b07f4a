"""What torch DTensor 2.13 gets wrong, right here: mean losses, conv1d, empty shards, placements that look alike."""
from __future__ import annotations

import pytest
import torch
from shards import place
from torch.nn import functional as F

import globaltensor as gt

B, P, S = gt.sbp.broadcast, gt.sbp.partial_sum, gt.sbp.split
RANKS = [ranks for ranks in ([0, 1], [0, 1, 2], [0, 1, 2, 3]) if len(ranks) <= gt.world_size()]

LOSSES = {
    "mse": F.mse_loss, "smooth_l1": F.smooth_l1_loss, "huber": F.huber_loss, "l1": F.l1_loss,
    "soft_margin": lambda x, y, reduction: F.soft_margin_loss(x, y.sign(), reduction=reduction),
    "bce": lambda x, y, reduction: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction),
    "bce_with_logits": lambda x, y, reduction: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=reduction),
    "kl_div": lambda x, y, reduction: F.kl_div(x, y, reduction=reduction, log_target=True),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(8, 3), (5, 3), (2, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_divide_by_the_global_number_of_elements(loss, shape, reduction):
    torch.manual_seed(0)
    x, y = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    a = x.clone().requires_grad_()
    expected = LOSSES[loss](a, y, reduction=reduction)
    expected.sum().backward()
    for ranks in RANKS:
        where = gt.placement("cpu", ranks)
        for sbp in (S(0), S(1), B):
            gx = gt.from_full(x, where, sbp).requires_grad_()
            got = LOSSES[loss](gx, gt.from_full(y, where, sbp), reduction=reduction)
            got.sum().backward()
            torch.testing.assert_close(got.full_tensor(), expected)
            torch.testing.assert_close(gx.grad.full_tensor(), a.grad)


@pytest.mark.parametrize("n", [4, 3, 1])
def test_conv1d(n):
    torch.manual_seed(0)
    x, w, b = torch.randn(n, 4, 9).double(), torch.randn(6, 4, 3).double(), torch.randn(6).double()
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    expected = F.conv1d(*leaves, padding=1)
    expected.square().sum().backward()
    where = gt.placement("cpu", [0, 1])
    for sbps in ((S(0), B, B), (B, S(0), S(0)), (S(1), S(1), B), (S(2), B, B)):
        ours = [gt.from_full(t, where, s).requires_grad_() for t, s in zip((x, w, b), sbps)]
        got = F.conv1d(*ours, padding=1)
        got.square().sum().backward()
        torch.testing.assert_close(got.full_tensor(), expected)
        for t, leaf in zip(ours, leaves):
            torch.testing.assert_close(t.grad.full_tensor(), leaf.grad)


@pytest.mark.parametrize("op", ["max", "min", "amax", "amin", "argmax", "argmin", "sum", "mean", "std", "norm"])
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_reductions_with_empty_shards(op, n):
    torch.manual_seed(0)
    x = -torch.rand(n, dtype=torch.float64) - 1
    expected = getattr(x, op)()
    for ranks in RANKS:
        got = getattr(gt.from_full(x, gt.placement("cpu", ranks), S(0)), op)()
        torch.testing.assert_close(got.full_tensor(), expected, equal_nan=True)


def test_placements_that_look_alike_are_not_the_same():
    a = gt.placement("cpu", [0, 1])
    assert a == gt.placement("cpu", (0, 1)) == gt.placement("cpu", torch.tensor([0, 1]))
    others = [gt.placement("cpu", [1, 0]), gt.placement("cpu", [[0, 1]]), gt.placement("cpu", [[0], [1]]),
              gt.placement("cpu", [0]), gt.placement("cpu", [0, 1], axis_names=["dp"]), gt.placement("meta", [0, 1])]
    assert len({a, *others}) == len(others) + 1
    x = torch.arange(4.0)
    permuted = gt.from_full(x, others[0], S(0))
    assert all(permuted.shards[r].tolist() == part for r, part in ((1, [0, 1]), (0, [2, 3])) if r in permuted.shards)
    with pytest.raises(gt.GlobalTensorError, match="to_global"):
        gt.from_full(x, a, S(0)) + permuted
    moved = gt.from_full(x, a, S(0)).to_global(others[0])
    assert all(torch.equal(moved.shards[r], permuted.shards[r]) for r in moved.shards)


def test_a_foreach_call_over_several_placements_is_one_call_per_rank():
    """Elements on placements that overlap: lists of scalars, a tensor of them, and what all share, go along."""
    here, other = gt.placement("cpu", [0, 1]), place([1, 2, 3])
    plain = [torch.arange(12.).reshape(4, 3), torch.arange(15.).reshape(5, 3) + 1, torch.ones(3, 3)]
    mine = [gt.from_full(t, p, s) for t, p, s in zip(plain, (here, other, here), (S(0), S(1), B))]
    half = gt.from_full(torch.tensor(0.5), here, B)
    for op in (lambda x: torch._foreach_mul(x, 2.5), lambda x: torch._foreach_mul(x, [1., 2., 3.]),
               lambda x: torch._foreach_add(x, x, alpha=2),
               lambda x: torch._foreach_addcmul(x, x, x, torch.tensor([1., 2., 3.]))):
        for got, want in zip(op(mine), op(plain)):
            assert torch.equal(got.full_tensor(), want)
    for shared in (half, half.to_global(sbp=P)):     # a pending one is summed, once for each placement
        torch._foreach_mul_(mine, shared)
        torch._foreach_mul_(plain, 0.5)
        for got, want in zip(mine, plain):
            assert torch.equal(got.full_tensor(), want)


def test_a_foreach_call_writes_and_reads_as_any_op():
    x = gt.from_full(torch.arange(12.).reshape(2, 6), gt.placement.all("cpu"), S(1))
    plain = torch.ones(2, 6)                         # every process has it: it takes the whole value
    torch._foreach_add_([plain], [x])
    assert torch.equal(plain, torch.arange(12.).reshape(2, 6) + 1)
    flat = x.view(12)                                # needs a boxing
    torch._foreach_add_([flat], 1.0)
    x.add_(1)
    got, = torch._foreach_add([flat], 1.0)
    assert torch.equal(got.full_tensor(), torch.arange(12.) + 3)
