"""Ops that name sizes (views, slices, their gradients) and ops on what they give, at lengths that were never seen: done
by a recipe for other sizes, they are what is decided anew, and what plain torch gives.
"""
from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch
from test_native_dispatch import arrivals, assert_same

import globaltensor as gt
from globaltensor.dispatch.core import dispatch
from globaltensor.runtime.native import torch_ext
from globaltensor.tensors.global_tensor import GlobalTensor

assert arrivals                                      # a fixture

pytestmark = pytest.mark.skipif(torch_ext is None, reason="the native code is not built")

S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
SEED = int(os.environ.get("SIBLINGS_SEED") or 20_261_125)
print(f"tests/test_view_siblings.py: SIBLINGS_SEED={SEED}")
LINE = gt.placement("cpu", [0, 1, 2])


def assert_alike(made, split, arrivals, lengths, new, where=LINE):
    """`made(n)` gives operands, the op of them, and layouts: it is what plain torch gives, forward and backward, and no
    length in `new` enters Python."""
    generator = torch.Generator().manual_seed(SEED % 2**31)
    for n in lengths:
        shapes, op = made(n)
        plain = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
        ours = [gt.from_full(t.detach(), where, split).requires_grad_() for t in plain]
        weights = torch.randn(op(*plain).shape, generator=generator, dtype=torch.float64)
        want = op(*plain)
        arrivals.clear()                             # of from_full
        got = op(*ours)
        forward = list(arrivals)
        weights = gt.from_full(weights, where, B if got.spec.layout.partial else got.sbp), weights
        torch.testing.assert_close(got.full_tensor(), want, msg=lambda m: f"{n} {SEED=}\n{m}")
        assert got.stride() == want.stride(), n
        arrivals.clear()
        (got * weights[0]).sum().backward()
        grads = [t.grad for t in ours]
        # a gradient with gaps is copied for a leaf, into memory that is decided anew
        came = [f for f in (*forward, *arrivals) if f is not torch.ops.aten.new_empty_strided.default]
        (want * weights[1]).sum().backward()
        for a, b in zip(grads, plain):
            torch.testing.assert_close(a.full_tensor(), b.grad, msg=lambda m: f"{n} {SEED=}\n{m}")
        assert n not in new or not came, f"{n}: {came}"


# per name: (n) -> shapes of operands, what is done with them; and lengths that enter Python
VIEWS = {
    "merged": lambda n: ([(n, 4, 6)], lambda x: x.view(n * 4, 6)),
    "merged, told by -1": lambda n: ([(n, 4, 6)], lambda x: x.view(-1, 6)),
    "merged within": lambda n: ([(3, n, 6)], lambda x: x.view(3, n * 6)),
    "apart": lambda n: ([(n * 4, 6)], lambda x: x.view(n, 4, 6)),
    "heads": lambda n: ([(n, 5, 6)], lambda x: x.view(n, 5, 3, 2).transpose(1, 2)),
    "heads and back": lambda n: ([(n, 5, 6)], lambda x: x.view(n, 5, 3, 2).transpose(1, 2).transpose(1, 2).reshape(
        n, 5, 6)),
    "with a dim of one": lambda n: ([(n, 1, 6)], lambda x: x.view(n, 6).view(n, 2, 1, 3)),
    "both ways": lambda n: ([(n, 6, 4)], lambda x: x.view(n, 2, 3, 4).view(n, 2, 12)),
    "shifted": lambda n: ([(4, n, 6)], lambda x: x[:, 1:] * x[:, :-1]),
    "all of it": lambda n: ([(4, n, 6)], lambda x: x[:, :n] + x[:, 0:]),
    "half": lambda n: ([(4, n, 6)], lambda x: x[:, : n // 2].sin()),
    "every second": lambda n: ([(4, n, 6)], lambda x: x[:, ::2].sin()),
    "slice of a slice": lambda n: ([(4, n, 6)], lambda x: x[:, 1:][:, :, 2:5].transpose(0, 1).exp()),
    "last one": lambda n: ([(4, n, 6)], lambda x: x[:, -1].sin()),
    "expanded": lambda n: ([(1, 6)], lambda x: x.expand(n, 6).sin()),
    "expanded, one more": lambda n: ([(4, 6)], lambda x: x.expand(n, -1, -1).sin()),
    "expanded beside": lambda n: ([(n, 1, 6)], lambda x: x.expand(n, 4, 6) * 2.0),
    "split": lambda n: ([(n, 5, 6)], lambda x: (lambda q, k, v: q * k + v)(*x.split(2, -1))),
    "chunks with gaps": lambda n: ([(n, 5, 6)], lambda x: x.chunk(3, -1)[1].view(n, 5, 2, 1).transpose(1, 2).sin()),
    "unbound": lambda n: ([(3, n, 6)], lambda x: (lambda q, k, v: q * k + v)(*x.unbind(0))),
    "joined": lambda n: ([(n, 5), (n, 5)], lambda x, y: torch.cat([x, y], 1)),
    "joined along it": lambda n: ([(4, n), (4, 3), (4, n)], lambda x, y, z: torch.cat([x, y, z], 1)),
    "stacked": lambda n: ([(n, 5), (n, 5)], lambda x, y: torch.stack([x, y], 1)),
    "scaled by its size": lambda n: ([(n, 5)], lambda x: x / n * n),
    "averaged": lambda n: ([(n, 5)], lambda x: x.mean(-1).view(n, 1).expand(n, 3).contiguous()),
}


@pytest.mark.parametrize("split", [B, S(0), S(1)], ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_new_lengths_are_those_of_plain_torch(name, split, arrivals):
    """Uneven ones too, and 0 and 1, in an order that mixes them."""
    if name == "joined along it" and split == S(1) or name == "averaged" and split == S(1):
        pytest.skip("these lengths are boxed")
    lengths = [6, 7, 9, 12, 1, 2, 5, 30, 31, 6, 3, 4, *range(2, 14)]
    assert_alike(VIEWS[name], split, arrivals, lengths, ())


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("split", [B, S(0)], ids=str)
def test_views_of_new_lengths_need_no_python(name, split, arrivals):
    if split == S(0) and name in ("expanded", "unbound"):
        pytest.skip("whose rows are boxed")
    if name == "chunks with gaps":
        pytest.skip("the gradients of the other chunks are plain zeros, of a length each")
    lengths = [12, 24, 18, 36, *range(42, 90, 6)]
    assert_alike(VIEWS[name], split, arrivals, lengths, lengths[4:])


aten, END = torch.ops.aten, 2**63 - 1
# of two sizes: the op, the shape of its operand or of several, and its arguments
NAMING = {
    "view": [lambda m, n: (aten.view.default, (m, n, 6), [m * n, 6]),
             lambda m, n: (aten.view.default, (m, n, 6), [m, -1]),
             lambda m, n: (aten.view.default, (m * n, 6), [m, n, 6]),
             lambda m, n: (aten.view.default, (m, n, 6), [-1, n, 2, 3]),
             lambda m, n: (aten.view.default, (m, 1, n), [m, n]),
             lambda m, n: (aten.view.default, (m, n), [1, m, n, 1]),
             lambda m, n: (aten.view.default, (m * 2, n * 3), [m, 2, 3 * n]),
             lambda m, n: (aten.view.default, (4, m, n), [2, 2 * m, n]),
             lambda m, n: (aten._unsafe_view.default, (m, n, 6), [m * n, 6])],
    "expand": [lambda m, n: (aten.expand.default, (m, 1, n), [m, 4, n]),
               lambda m, n: (aten.expand.default, (n,), [m, n]),
               lambda m, n: (aten.expand.default, (1, m), [n, -1])],
    "slice": [lambda m, n: (aten.slice.Tensor, (m, n), 0, 1, m - 1),
              lambda m, n: (aten.slice.Tensor, (m, n), 1, 0, n),
              lambda m, n: (aten.slice.Tensor, (m, n), 1, -3, END),
              lambda m, n: (aten.slice.Tensor, (m, n), 0, 0, 3),
              lambda m, n: (aten.slice.Tensor, (m, n), 0, 0, END, 2)],
    "split": [lambda m, n: (aten.split.Tensor, (m, 6), 2, 1),
              lambda m, n: (aten.split.Tensor, (m, n), 2, 1),
              lambda m, n: (aten.split.Tensor, (m, n), m, 0),
              lambda m, n: (aten.split_with_sizes.default, (m, n + 2), [2, n], 1),
              lambda m, n: (aten.unbind.int, (m, n), 0)],
    "gradients": [lambda m, n: (aten.slice_backward.default, (m, n), [m, n + 1], 1, 1, END, 1),
                  lambda m, n: (aten.slice_backward.default, (m, n), [m, 3 * n], 1, n, 2 * n, 1),
                  lambda m, n: (aten.select_backward.default, (m, n), [m, n, 4], 2, 1)],
    "cat": [lambda m, n: (aten.cat.default, [(m, n), (m, n)], 1),
            lambda m, n: (aten.cat.default, [(m, n), (3, n), (m + 1, n)], 0),
            lambda m, n: (aten.stack.default, [(m, n), (m, n)], 1)],
    "counts": [lambda m, n: (aten.mean.default, (m, n)), lambda m, n: (aten.div.Scalar, (m, n), m * n),
               lambda m, n: (aten.mul.Scalar, (m, n), m)]}


def laid_out(shape, how):
    """A tensor of two ranks: split, pending, or whole, with gaps in memory or its dims in another order."""
    x, where = torch.randint(9, shape).float(), gt.placement("cpu", [0, 1])
    if how == "gaps" and len(shape) > 1:
        return gt.from_full(torch.cat([x, x], -1), where, B)[..., :shape[-1]]
    if how == "turned":
        return gt.from_full(x.movedim(0, -1).contiguous(), where, B).movedim(-1, 0)
    return gt.from_full(x, where, {"S(0)": S(0), "S(1)": S(min(1, len(shape) - 1)), "P": P}.get(how, B))


@pytest.mark.parametrize("layout", ["B", "S(0)", "S(1)", "P", "gaps", "turned"])
@pytest.mark.parametrize("name", NAMING)
def test_sizes_that_a_call_names_are_decided_anew_alike(name, layout, arrivals):
    """The same specs and the same bits as what is decided anew, whatever the sizes; and most enter no Python."""
    chooser = random.Random(f"{SEED} {name} {layout}")
    for made in NAMING[name]:
        came = []
        for nth in range(24):
            m, n = (chooser.choice([2, 4, 6, 8, 10, 12, 14]) if nth > 8 else chooser.randint(1, 9) for _ in range(2))
            func, shapes, *rest = made(m, n)
            tensors = [laid_out(shape, layout) for shape in ([shapes] if isinstance(shapes, tuple) else shapes)]
            operands = tensors if isinstance(shapes, list) else tensors[0]
            what = f"{name} {func} {m}, {n}, {[t.spec for t in tensors]}, {rest}, {SEED=}"
            arrivals.clear()
            try:
                got = func(operands, *rest)
            except (RuntimeError, IndexError):
                with pytest.raises((RuntimeError, IndexError)):
                    dispatch(GlobalTensor, func, (operands, *rest), {})
                continue
            came.append(func in arrivals)
            assert_same(got, dispatch(GlobalTensor, func, (operands, *rest), {}), what)
        if layout in ("B", "gaps") and came[12:] and made is not NAMING["view"][7]:
            assert not all(came[12:]), f"{what}: all of them enter Python"


GROWTH = """
import ctypes, gc, sys, torch, torch.nn.functional as F
import globaltensor as gt
torch.set_num_threads(1)
torch.backends.mkldnn.enabled = False                # it keeps a kernel for each shape
gt.init(ranks=2)
where, S, B = gt.placement("cpu", [0, 1]), gt.sbp.split, gt.sbp.broadcast
leaf = lambda shape, sbp: gt.from_full(torch.randn(shape), where, sbp).requires_grad_()
heads, out, g, b = [leaf((4, 4), S(0)) for _ in range(3)], leaf((4, 4), S(1)), leaf((4,), B), leaf((4,), B)
leaves = [*heads, out, g, b]

def step(n):
    n = n * 7919 % 37 ** 3                           # large ones among small ones, so that no heap grows for that alone
    x = gt.from_full(torch.ones(n % 37 + 2, n // 37 % 37 + 3, n // 1369 * 4 + 4), where, B)[..., :4]
    rows, t, c = x.shape
    y = F.layer_norm(x, (c,), g, b)
    q, k, v = (F.linear(y, w).view(rows, t, 2, 2).transpose(1, 2) for w in heads)
    z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, t, c)
    z = (x + F.linear(z, out).to_global(sbp=B))[:, 1:]
    (z * g.view(1, 1, c).expand(rows, t - 1, c)).reshape(rows * (t - 1), c).square().mean().backward()
    for w in leaves:
        w.grad = None

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info

def most(lengths, every):
    used, blocks = [], []
    for n in lengths:
        step(n)
        if n % every == every - 1:
            gc.collect()
            info = libc.mallinfo2()
            used.append((info.uordblks + info.hblkhd) / 1e6)
            blocks.append(sys.getallocatedblocks())
    return max(used), max(blocks)

warm, more = map(int, sys.argv[1:])
most(range(warm), 1000)
before = most(range(warm, 2 * warm), 100)
after = most(range(2 * warm, 2 * warm + more), 100)
print(after[0] - before[0], after[1] - before[1])
"""


@pytest.mark.long
def test_fifty_thousand_lengths_of_a_block_leave_nothing_behind():
    """Forward and backward. What is in use is counted, natively and in Python: a heap in pieces has more pages."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", GROWTH, "3000", "50000"], capture_output=True,
                         text=True, check=True, timeout=1800, env={**os.environ, "OMP_NUM_THREADS": "1"})
    megabytes, blocks = map(float, ran.stdout.split())
    assert megabytes < 2 and blocks < 10_000, f"{megabytes} MB, {blocks} blocks of Python's"      # of some 60 bytes
