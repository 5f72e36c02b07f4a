"""Calls at sizes that were never seen, which the native dispatcher does by a recipe for other sizes: the same specs and
the same bits as what is decided anew, for every line of the table whose rule knows no sizes; and little memory each.
"""
from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from rule_samples import SAMPLES
from test_native_dispatch import OPS, arrivals, assert_same, copied, operands
from test_rules import made, name_of

import globaltensor as gt
from globaltensor.dispatch.core import dispatch, find
from globaltensor.dispatch.decide import contest_of
from globaltensor.dispatch.recipe import Recipe
from globaltensor.dispatch.siblings import siblings_of
from globaltensor.layouts.recent import Recent
from globaltensor.op_table.table import TABLE
from globaltensor.rules.call import Call
from globaltensor.rules.families import is_regardless_of_size
from globaltensor.runtime.native import torch_ext
from globaltensor.tensors.global_tensor import GlobalTensor

assert arrivals                                      # a fixture

pytestmark = pytest.mark.skipif(torch_ext is None, reason="the native code is not built")

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
SEED = int(os.environ.get("SIBLINGS_SEED") or 20_261_123)
print(f"tests/test_siblings.py: SIBLINGS_SEED={SEED}")
REGARDLESS = [f for f in OPS if is_regardless_of_size(TABLE[f].family)]
LINE = gt.placement("cpu", [0, 1, 2])


def resized(t, dims, sizes, generator):
    """A tensor of the same layout and of values that were in `t`, at other sizes of its labels."""
    values = t.full_tensor().flatten()
    shape = [~d if d < 0 else sizes[d] for d in dims]
    at = torch.randint(len(values), shape, generator=generator)
    return gt.from_full(values[at], t.placement, t.sbp)


def siblings(func, args, kwargs):
    """What tells the siblings of a call; None where it has none."""
    decision = find(GlobalTensor, func, args, kwargs)
    call = Call(func, args, kwargs)
    return siblings_of(decision, call, lambda: contest_of(GlobalTensor, call)) if isinstance(decision, Recipe) else None


@pytest.mark.sample(3)
@pytest.mark.parametrize("func", REGARDLESS, ids=name_of)
def test_a_sibling_is_what_is_decided_anew(func, arrivals):
    generator = torch.Generator().manual_seed(SEED % 2**31)
    chooser = random.Random(f"{SEED} {name_of(func)}")
    for number, (args, kwargs) in enumerate(SAMPLES[name_of(func)][:3]):
        drawn = made(args, generator), made(kwargs, generator)
        for ranks in ([0, 1], [[2, 0], [1, 3]]):
            first = operands(*drawn, gt.placement("cpu", ranks), chooser)
            call = Call(func, *first)
            filled = all(isinstance(t, GlobalTensor) and t.numel() for t in call.tensors)
            known = siblings(func, *first) if filled else None
            if known is None:
                continue
            again = copied(first)
            func(*again[0], **again[1])              # decided already: the second time it is cached
            for _ in range(2):
                sizes = [chooser.choice([2, 3, 4, 5, 7, 8]) for _ in known.least]
                others = call.arguments_with([resized(t, dims, sizes, generator)
                                              for t, dims in zip(call.tensors, known.operands)])
                what = f"{name_of(func)}, sample {number}, {[t.spec for t in Call(func, *others).tensors]}, {SEED=}"
                mine, twins = copied(others), copied(others)
                try:
                    func(*copied(others[0]), **copied(others[1]))
                except (RuntimeError, IndexError, AssertionError):   # torch refuses this size: of a cross product, 4
                    whole = Call(func, *others)
                    args, kwargs = whole.arguments_with([t.full_tensor() for t in whole.tensors])
                    with pytest.raises((RuntimeError, IndexError, AssertionError)):
                        func(*args, **kwargs)
                    continue
                arrivals.clear()
                got = func(*mine[0], **mine[1])
                assert_same(got, dispatch(GlobalTensor, func, *twins), what)
                assert_same(mine, twins, f"{what}: operands")


def net(x, w1, b1, w2, g):
    y = F.gelu(F.linear(x, w1, b1))
    y = F.linear(y, w2) + x
    return (F.softmax(F.layer_norm(y, (8,), g), -1) * 2.0).sum(-1)


LAYOUTS = {"data": (S(0), B, B, B, B), "sequence": (S(1), B, B, B, B), "tensor": (B, S(0), S(0), S(1), B)}


@pytest.mark.parametrize("split", LAYOUTS)
def test_lengths_are_those_of_plain_torch(split):
    """Uneven, 0 and 1 too, forward and backward, in an order that mixes them."""
    generator = torch.Generator().manual_seed(SEED % 2**31)
    shapes = [(8, 8), (8,), (8, 8), (8,)]
    weights = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    lengths = [6, 7, 0, 1, 2, 5, 12, 3, 1, 0, 30, 31, 6, *range(2, 20)]
    for n in lengths:
        for shape in ((n, 5, 8), (4, n, 8)):
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            plain = [t.clone().requires_grad_() for t in (x, *weights)]
            ours = [gt.from_full(t, LINE, sbp).requires_grad_() for t, sbp in zip((x, *weights), LAYOUTS[split])]
            want, got = net(*plain), net(*ours)
            torch.testing.assert_close(got.full_tensor(), want, msg=lambda m: f"{shape} {SEED=}\n{m}")
            want.square().sum().backward()
            got.square().sum().backward()
            for a, b in zip(ours, plain):
                torch.testing.assert_close(a.grad.full_tensor(), b.grad, msg=lambda m: f"{shape} {SEED=}\n{m}")


def test_new_lengths_need_no_python(arrivals):
    weights = [gt.from_full(torch.randn(s), LINE, B) for s in ((8, 8), (8,), (8, 8), (8,))]
    with torch.no_grad():
        for n in (6, 7):
            net(gt.from_full(torch.randn(n, 5, 8), LINE, S(0)), *weights)
        arrivals.clear()
        for n in range(8, 40):
            x = gt.from_full(torch.randn(n, 5, 8), LINE, S(0))
            arrivals.clear()                         # of from_full
            net(x, *weights)
            assert not arrivals, f"{n}: {arrivals}"


TOKENS = {"embedding": ([B, B, B], lambda w, q, i: F.embedding(i, w)),
          "embedding, features cut": ([S(1), B, B], lambda w, q, i: F.embedding(i, w)),
          "embedding, tokens cut": ([B, B, S(0)], lambda w, q, i: F.embedding(i, w, 3)),
          "attention, batch cut": ([B, S(0), B], lambda w, q, i: F.scaled_dot_product_attention(q, q, q)),
          "causal attention, heads cut": ([B, S(1), B], lambda w, q, i: F.scaled_dot_product_attention(
              q, q, q, is_causal=True))}


@pytest.mark.parametrize("name", TOKENS)
def test_new_lengths_of_tokens_need_no_python_and_are_those_of_plain_torch(name, arrivals):
    """Batches and sequences of other lengths, odd ones too."""
    layouts, op = TOKENS[name]
    weight = torch.randn(50, 6, generator=torch.Generator().manual_seed(SEED % 2**31))
    with torch.no_grad():
        for n in (6, 7, *range(8, 24)):
            plain = weight, torch.randn(n, 4, n + 3, 8), torch.randint(50, (n, n + 5))
            ours = [gt.from_full(t, LINE, sbp) for t, sbp in zip(plain, layouts)]
            arrivals.clear()                         # of from_full
            got = op(*ours)
            assert n < 8 or not arrivals, f"{n}: {arrivals}"
            torch.testing.assert_close(got.full_tensor(), op(*plain), msg=lambda m: f"{name} {n} {SEED=}\n{m}")


def test_a_weight_whose_rows_are_cut_has_no_siblings():
    """Each rank looks up what it has: how many rows that are depends on the size."""
    for rows in (6, 7, 11, 12, 2):
        weight, ids = torch.randn(rows, 4), torch.randint(rows, (3, 5))
        got = F.embedding(gt.from_full(ids, LINE, B), gt.from_full(weight, LINE, S(0)))
        torch.testing.assert_close(got.full_tensor(), F.embedding(ids, weight))


def test_a_size_of_one_is_no_sibling():
    """It is repeated to fit, which no other size is."""
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for a, b in ((x, y), (x[:5], y[:5]), (x, y[:1]), (x[:1], y), (x[:1], y[:1]), (x[:0], y[:1])):
        got = gt.from_full(a, LINE, S(0)) + gt.from_full(b, LINE, B)
        torch.testing.assert_close(got.full_tensor(), a + b)


def test_an_index_that_is_not_there_is_refused(arrivals):
    """Of any length that has it, the row is taken without Python; of others, torch tells the global shape."""
    for n in (9, 7, 8, 30):
        plain = torch.randn(n, 4, 6)
        x = gt.from_full(plain, LINE, S(1))
        arrivals.clear()                             # of from_full
        first, last = x[5], x[-6]
        assert n == 9 or not arrivals, f"{n}: {arrivals}"
        torch.testing.assert_close(first.full_tensor(), plain[5])
        torch.testing.assert_close(last.full_tensor(), plain[-6])
    x = gt.from_full(torch.randn(5, 4, 6), LINE, S(1))
    for index in (5, -6):
        with pytest.raises(IndexError, match=r"size \[5, 4, 6\]"):
            x.select(0, index)


def test_sizes_that_do_not_fit_are_refused():
    x, w = gt.from_full(torch.randn(6, 4), LINE, S(0)), gt.from_full(torch.randn(4, 3), LINE, B)
    for _ in range(3):
        x @ w
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        gt.from_full(torch.randn(9, 5), LINE, S(0)) @ w


def test_operands_keep_their_order_in_memory():
    """Of a transposed operand what is elementwise is transposed, at any size."""
    for n in (6, 7, 9, 4):
        x = gt.from_full(torch.randn(n, 4), LINE, S(0))
        y = (x.t() + x.t()).neg()
        assert y.stride() == (1, 4)
        torch.testing.assert_close(y.full_tensor(), -2 * x.full_tensor().t())


def test_a_sum_that_may_wait_grows_with_no_size():
    """Whether a pending operand is reduced first depends on what comes out: decided anew where that is larger."""
    x = gt.from_full(torch.randn(6, 4), LINE, P)
    assert x.neg().sbp == (P,)
    for n in (7, 8):
        y = gt.from_full(torch.randn(n, 4), LINE, P)
        assert y.neg().sbp == (P,) and y.to(torch.float64).full_tensor().shape == (n, 4)


def test_what_was_not_used_of_late_is_forgotten():
    recent = Recent(16)
    for i in range(1000):
        recent[i] = i + 1
        assert recent.get(0) == 1                    # used all the time
        assert recent.get(max(i - 3, 0)) is not None
        assert len(recent) <= 32
    recent.forget(lambda key: key == 0)
    assert recent.get(0) is None


GROWTH = """
import gc, sys, torch, torch.nn.functional as F
import globaltensor as gt
torch.set_num_threads(1)
torch.backends.mkldnn.enabled = False                # it keeps a kernel for each shape
gt.init(ranks=2)
where, S, B = gt.placement("cpu", [0, 1]), gt.sbp.split, gt.sbp.broadcast
w, g = gt.from_full(torch.randn(2, 2), where, B), gt.from_full(torch.randn(2), where, B)

def step(n):
    n = n * 7919 % 37 ** 3                           # large ones among small ones, so that no heap grows for that alone
    x = gt.from_full(torch.zeros(n % 37 + 2, n // 37 % 37 + 2, n // 1369 + 2, 2), where, S(0))
    y = F.layer_norm(F.gelu(F.linear(x, w)) + x, (2,), g)
    return (F.softmax(y, -1) * 2.0).sum()

def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096

warm, more = map(int, sys.argv[1:])
for n in range(warm):
    step(n)
before = resident()
for n in range(warm, warm + more):
    step(n)
print((resident() - before) / 1e6)
"""


def growth(warm, more):
    """MB that so many new lengths leave behind, after others."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", GROWTH, str(warm), str(more)], capture_output=True,
                         text=True, check=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return float(ran.stdout)


@pytest.mark.long
def test_new_lengths_leave_little_behind():
    """In a heap that is cut into pieces, a kilobyte or two each, and less and less."""
    assert growth(4500, 1500) < 8


@pytest.mark.long
def test_fifty_thousand_lengths_leave_little_behind():
    assert growth(6000, 50_000) < 75                 # without bounds: a gigabyte and more


RELEASE = """
import gc, sys, torch
from weakref import ref
import globaltensor as gt
gt.init(ranks=64)

def use(k):
    where = gt.placement("cpu", [k % 20, 20 + k // 20 % 20, 40 + k // 400 % 20])
    x = gt.from_full(torch.ones(4, 2), where, gt.sbp.split(0))
    (x * 2 + 1).sum().full_tensor()
    return ref(x.spec.layout)

first = use(0)
for k in range(1, int(sys.argv[1])):
    use(k)
gc.collect()
print(first() is None)
"""


@pytest.mark.long
def test_placements_that_nobody_holds_are_released():
    """Once caches have forgotten them."""
    for uses, is_released in ((2, "False"), (6500, "True")):
        ran = subprocess.run([sys.executable, "-W", "ignore", "-c", RELEASE, str(uses)], capture_output=True, text=True)
        assert ran.stdout.strip() == is_released, ran.stderr
