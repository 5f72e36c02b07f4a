"""Products of a compiled graph that a boxing moves are made where other processes of the host read them.

Oracle: the same program without torch.compile. The pass is run on the graphs of AOTAutograd, as if other ranks were in
processes of their own; the last test has inductor run it, where they are.
"""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from harness import PROGRAMS, RUN, good
from torch._dynamo.backends.common import aot_autograd

import globaltensor as gt
from globaltensor.boxings import graph_products
from globaltensor.runtime import custom_ops
from globaltensor.runtime.native import torch_ext

pytestmark = [pytest.mark.skipif(torch_ext is None, reason="made by native code"),
              pytest.mark.usefixtures("seeded_compiler")]
SEED = 43
S, B = gt.sbp.split, gt.sbp.broadcast
TWO = gt.placement("cpu", [0, 1])
ROWS, COLUMNS = S(0), S(1)


def boxed_product(x, w, *_):
    return (x @ w).to_global(sbp=B).square()


def with_bias(x, w, bias, *_):
    return torch.addmm(bias, x, w).to_global(sbp=B).square()


def of_batches(x, w, *_):
    return torch.einsum("bij,bjk->bik", torch.stack([x, x]), torch.stack([w, w])).to_global(sbp=B).square()


def of_three_dims(x, w, *_):
    return torch.nn.functional.linear(x.view(2, 3, 6), w.T).to_global(sbp=B).square()


def summed(x, w, _, y, v):
    return (x @ w + y @ v + x @ v).to_global(sbp=B).square()


def summed_in_three_dims(x, w, _, y, v):
    a, b = (torch.nn.functional.linear(t.view(2, 3, 6), m.T) for t, m in ((x, w), (y, v)))
    return (a + b).to_global(sbp=B).square()


def wanted_elsewhere_too(x, w, *_):
    product = x @ w
    return product.to_global(sbp=B).square() + (product * 2).to_global(sbp=B)


def with_a_part_wanted_elsewhere(x, w, _, y, v):
    part = x @ w
    return (part + y @ v).to_global(sbp=B).square() + part.relu().sum()


def weighted(x, w, _, y, v):
    return torch.add(x @ w, y @ v, alpha=2).to_global(sbp=B).square()


def of_two_shapes(x, w, _, y, v):
    return (x @ w + y.sum(0, keepdim=True) @ v).to_global(sbp=B).square()


def of_no_product(x, w, *_):
    return (x + w).to_global(sbp=B).square()


def mixed(x, w, bias, y, v):
    return (torch.addmm(bias, x, w) + y @ v).to_global(sbp=B).square()


def of_two_dtypes(x, w, _, y, v):
    return (x @ w + y.double() @ v.double()).to_global(sbp=B).square()


def of_products_of_two_shapes(x, w, _, y, v):
    narrow, wide = (x @ w).view(3, 12), torch.cat([y, y], 1)[:3] @ torch.cat([v, v]).repeat(1, 2)
    return (narrow + wide).to_global(sbp=B).square()


@pytest.mark.sample(3)
@pytest.mark.parametrize("program, products", [
    (boxed_product, [1]), (with_bias, [1]), (of_batches, [1]), (of_three_dims, [1]), (summed, [3]),
    (summed_in_three_dims, [2]), (wanted_elsewhere_too, [1]), (with_a_part_wanted_elsewhere, [1]), (weighted, []),
    (of_two_shapes, []), (of_two_dtypes, []), (of_products_of_two_shapes, []), (of_no_product, []), (mixed, [])])
def test_products_that_a_boxing_moves(program, products, monkeypatch):
    check(program, products, monkeypatch)


def test_products_whose_sizes_are_symbols(monkeypatch):
    check(summed, [3], monkeypatch, dynamic=True)


def check(program, products, monkeypatch, **options):
    """`products`: of how many products the sum is that an op of ours makes, in forward, on each rank."""
    monkeypatch.setattr(graph_products, "world", lambda: SimpleNamespace(single_process=False))
    args = [gt.from_full(torch.randn(size), TWO, sbp).requires_grad_() for size, sbp in (
        ((6, 6), COLUMNS), ((6, 6), ROWS), (6, B), ((6, 6), COLUMNS), ((6, 6), ROWS))]
    counts = []

    def make(module, inputs):
        graph_products.make_products_for_peers(module.graph)
        module.graph.lint()
        module.recompile()
        counts.append([len(node.args[0]) for node in module.graph.nodes
                       if node.target is custom_ops.products_for_peers])

        def run(args):
            return module(*args)

        run._boxed_call = True
        return run

    f = torch.compile(program, backend=aot_autograd(fw_compiler=make, bw_compiler=make), fullgraph=True, **options)
    for call in (f, program):
        call(*args).sum().backward()
        values = [a.grad.full_tensor() for a in args if a.grad is not None]
        for a in args:
            a.grad = None
        if call is f:
            got = values
    torch.testing.assert_close(got, values)
    assert counts[0] == products * 2, counts            # one a rank


def test_the_op_adds_up_what_it_is_given():
    a, b, c, d = (torch.randn(3, 5), torch.randn(5, 4), torch.randn(3, 2), torch.randn(2, 4))
    op, bias = custom_ops.products_for_peers, torch.randn(4)
    torch.testing.assert_close(op([a, c], [b, d], bias), a @ b + c @ d + bias)
    torch.testing.assert_close(op([a, c], [b, d], bias), custom_ops._products_for_peers([a, c], [b, d], bias))
    torch.testing.assert_close(op([a[None], c[None]], [b[None], d[None]]), (a @ b + c @ d)[None])


@pytest.mark.long
def test_inductor_makes_them_where_other_processes_read():
    assert good([*RUN, "-n", "2", PROGRAMS / "compiled_products.py"], timeout=900).count("2 forward, 4 backward") == 2
