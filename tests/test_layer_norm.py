"""Layer norm and RMS norm of features that are split: equal to plain torch, and only statistics are sent."""
from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from shards import place

import globaltensor as gt
from globaltensor.dispatch.core import dispatch

aten = torch.ops.aten

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
SEED = 7


def layer_norm(x, shape, weight, bias):
    return F.layer_norm(x, shape, weight, bias)


def rms_norm(x, shape, weight, bias):
    return F.rms_norm(x, shape, weight)


LAYOUTS = [([0, 1], (S(2),)), ([0, 1, 2], (S(-1),)), ([[0, 1], [2, 3]], (S(0), S(2))), ([[0, 1], [2, 3]], (S(2), S(2))),
           ([[0, 1], [2, 3]], (S(1), S(2)))]


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
@pytest.mark.parametrize("ranks, sbp", LAYOUTS, ids=str)
@pytest.mark.parametrize("features, affine", list(itertools.product([1, 2], [True, False])))
def test_forward_and_backward(norm, ranks, sbp, features, affine):
    generator = torch.Generator().manual_seed(SEED)
    plain = [torch.randn(4, 3, 7, dtype=torch.float64, generator=generator)]
    plain += [torch.randn(plain[0].shape[-features:], dtype=torch.float64, generator=generator) for _ in "wb" if affine]
    upstream = torch.randn(4, 3, 7, dtype=torch.float64, generator=generator)
    where = place(ranks)
    ours = [gt.from_full(plain[0], where, sbp), *[gt.from_full(t, where, B) for t in plain[1:]]]
    results = []
    for tensors, grad in ((plain, upstream), (ours, gt.from_full(upstream, where, sbp))):
        for t in tensors:
            t.requires_grad_()
        for _ in range(3):                           # the native dispatcher learns with the second call
            out = norm(tensors[0], plain[0].shape[-features:], *(tensors[1:] if affine else (None, None)))
            asked = [t for t in tensors if norm is layer_norm or t is not tensors[-1] or not affine]
            grads = torch.autograd.grad(out, asked, grad)
        results.append([out, *grads])
    for expected, got in zip(*results):
        torch.testing.assert_close(got.full_tensor(), expected)
    if features == 1 and sbp[0] != S(2) and len(sbp) > 1:
        assert results[1][0].sbp == gt.from_full(plain[0], where, sbp).sbp


@pytest.mark.parametrize("norm", [layer_norm, rms_norm, lambda x, shape, weight, bias: dispatch(
    gt.GlobalTensor, aten._fused_rms_norm.default, (x, shape, weight, 1e-6), {})[0] if x.is_global
    else aten._fused_rms_norm(x, shape, weight, 1e-6)[0]], ids=["layer norm", "rms norm", "fused rms norm"])
def test_results_lie_in_memory_as_those_of_torch(norm):
    """Found by a random program: what elementwise ops make of a transposed operand lies as that does."""
    plain = torch.randn(4, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))
    x = gt.from_full(plain, place([[0, 1], [2, 3]]), (S(0), S(1)))
    for _ in range(3):
        expected, out = (norm(t.mT, [6], None, None) for t in (plain, x))
        torch.testing.assert_close(out.full_tensor(), expected)
        assert out.stride() == expected.stride()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("sbp", [S(0), S(1), S(2), B], ids=str)
def test_of_a_plain_gradient(sbp, affine):
    generator = torch.Generator().manual_seed(SEED)
    x, upstream = (torch.randn(4, 6, 5, generator=generator).double().requires_grad_() for _ in "xg")
    shape, weight = (6, 5), torch.rand(6, 5).double() if affine else None
    want = F.layer_norm(x, shape, weight)
    ours = gt.from_full(x.detach(), place([0, 1]), sbp).requires_grad_()
    got = F.layer_norm(ours, shape, weight)
    for create in (True, False):
        one, = torch.autograd.grad(got, ours, upstream, create_graph=create, retain_graph=True)
        torch.testing.assert_close(one.full_tensor(), torch.autograd.grad(want, x, upstream, retain_graph=True)[0])
    one, = torch.autograd.grad(torch.autograd.grad(got, ours, upstream, create_graph=True)[0], ours, upstream)
    two, = torch.autograd.grad(torch.autograd.grad(want, x, upstream, create_graph=True)[0], x, upstream)
    torch.testing.assert_close(one.full_tensor(), two)


def test_only_statistics_are_sent():
    where, rows = place([[0, 1], [2, 3]]), 64
    x = gt.from_full(torch.randn(2 * rows, 32), where, (S(0), S(1))).requires_grad_()
    weight = gt.from_full(torch.ones(32), where, (B, S(0))).requires_grad_()
    for _ in range(2):
        with gt.record() as moves:
            layer_norm(x, (32,), weight, None).backward(x.detach())
    # mean, variance; then two means in one move. An all-reduce on 2 ranks moves as many bytes as it has.
    assert [m.bytes for m in moves if m.bytes] == [rows * 4, rows * 4, 2 * rows * 4]


@pytest.mark.parametrize("weighted", [True, False])
def test_the_fused_rms_norm_of_gpus(weighted):
    """On CPUs torch makes F.rms_norm of other ops; here the fused ones are handed to dispatch as a GPU's would be."""
    where, generator = place([[0, 1, 2], [3, 4, 5]]), torch.Generator().manual_seed(SEED)
    x, weight, grad = (torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
                       for shape in ((5, 7), (7,), (5, 7)))
    expected = F.rms_norm(x, (7,), weight if weighted else None, 1e-6)
    grads = torch.autograd.grad(expected, [x, weight] if weighted else [x], grad)
    gx, gw, gg = (gt.from_full(t.detach(), where, (S(0), S(1)) if t.dim() == 2 else (B, S(0)))
                  for t in (x, weight, grad))
    gw = gw if weighted else None
    with gt.record() as moves:
        out, inverse = dispatch(gt.GlobalTensor, aten._fused_rms_norm.default, (gx, [7], gw, 1e-6), {})
        found = dispatch(gt.GlobalTensor, aten._fused_rms_norm_backward.default,
                         (gg, gx, [7], inverse, gw, [True, weighted]), {})
    torch.testing.assert_close(out.full_tensor(), expected)
    for got, told in zip(found, grads):
        torch.testing.assert_close(got.full_tensor(), told)
    assert len([m for m in moves if m.bytes]) == 2


_NORMS = {                                           # of x and parameters of its dtype, as in a model.to(bfloat16)
    "layer norm": lambda x, weight, bias: F.layer_norm(x, (8,), weight, bias),
    "layer norm, no bias": lambda x, weight, bias: F.layer_norm(x, (8,), weight),
    "layer norm, no weight": lambda x, weight, bias: F.layer_norm(x, (8,), None, bias),
    "layer norm, neither": lambda x, weight, bias: F.layer_norm(x, (8,)),
    "layer norm, wide": lambda x, weight, bias: F.layer_norm(x, (8,), weight.float(), bias.float()),
    "rms norm": lambda x, weight, bias: F.rms_norm(x, (8,), weight),
    "group norm": lambda x, weight, bias: F.group_norm(x, 2, weight, bias),
    "batch norm": lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, True),
    "batch norm, neither": lambda x, weight, bias: F.batch_norm(x, None, None, training=True),
    "batch norm, running": lambda x, weight, bias: F.batch_norm(
        x, bias.detach() * 0, weight.detach() * 0, weight, bias, True),
    "batch norm, eval": lambda x, weight, bias: F.batch_norm(x, bias.detach(), weight.detach().abs(), weight, bias),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", _NORMS)
def test_norms_of_models_of_sixteen_bits(norm, dtype):
    generator = torch.Generator().manual_seed(SEED)
    tensors = [torch.randn(*shape, generator=generator).to(dtype) for shape in ((4, 8, 8), (8,), (8,))]

    def values(tensors):
        leaves = [t.requires_grad_() for t in tensors]
        out = _NORMS[norm](*leaves)
        out.float().sin().sum().backward()
        return [out.detach(), *[t.grad for t in leaves if t.grad is not None]]

    expected = values([t.clone() for t in tensors])
    for x, parameter in (((S(0), B), (B, B)), ((S(0), S(2)), (B, S(0))), ((S(0), S(1)), (B, B)), ((B, B), (B, S(0)))):
        where = place([[0, 1], [2, 3]])
        got = values([gt.from_full(t, where, sbp) for t, sbp in zip(tensors, (x, parameter, parameter))])
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours.full_tensor(), theirs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_sixteen_bits_are_computed_in_float32(norm, dtype):
    where, generator = place([[0, 1], [2, 3]]), torch.Generator().manual_seed(SEED)
    x = torch.randn(8, 33, generator=generator).to(dtype)
    weight, bias = (torch.randn(33, generator=generator).to(dtype) for _ in range(2))
    got = norm(gt.from_full(x, where, (S(0), S(1))), (33,), *[gt.from_full(t, where, B) for t in (weight, bias)])
    assert got.dtype == dtype
    torch.testing.assert_close(got.full_tensor(), norm(x.float(), (33,), weight.float(), bias.float()).to(dtype))


@pytest.mark.parametrize("samples", [2, 3, 5])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_a_gradient_of_batch_norm_that_lies_otherwise_in_memory(samples, last, training):
    """Of one sample, which a rank may have, torch's kernel misreads a gradient whose channels come last."""
    generator = torch.Generator().manual_seed(SEED)
    x, weight, bias, upstream = (torch.randn(shape, dtype=torch.float64, generator=generator)
                                 for shape in ((samples, 4, 5, 5), 4, 4, (samples, 25, 4)))
    where, results = place([0, 1]), []
    for spread in (False, True):
        to = (lambda t, sbp: gt.from_full(t, where, sbp)) if spread else (lambda t, sbp: t)
        leaves = [to(t.clone(), sbp).requires_grad_() for t, sbp in ((x, S(0)), (weight, B), (bias, B))]
        operand = leaves[0].contiguous(memory_format=torch.channels_last) if last else leaves[0]
        running = [to(t.abs(), B) for t in (bias, weight)]
        out = F.batch_norm(operand, *running, *leaves[1:], training).flatten(2).transpose(1, 2)
        (out.square() * to(upstream, S(0))).sum().backward()
        results.append([t.grad.full_tensor() if spread else t.grad for t in leaves])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one)
