"""The native dispatcher and its Python twin: the same specs and the same bits, for every line of the table.

An op that is called for the fifth time on operands of the same specs does not enter Python any more; what it gives is
compared with what `dispatch.core.dispatch` gives for equal operands.
"""
from __future__ import annotations

import os
import random

import pytest
import torch
from rule_samples import ELSEWHERE, SAMPLES, VALUELESS
from test_rules import made, name_of
from torch.utils._pytree import tree_flatten, tree_unflatten

import globaltensor as gt
from globaltensor.algorithms.run import is_traceable
from globaltensor.dispatch import core
from globaltensor.dispatch.core import dispatch
from globaltensor.op_table.table import TABLE
from globaltensor.rules.call import Call, arguments
from globaltensor.runtime import agreement, custom_ops
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.torch_internals import is_composite
from globaltensor.tensors.global_tensor import GlobalTensor

pytestmark = pytest.mark.skipif(torch_ext is None, reason="the native code is not built")

S, B = gt.sbp.split, gt.sbp.broadcast
SEED = int(os.environ.get("NATIVE_SEED") or 20_261_121)
print(f"tests/test_native_dispatch.py: NATIVE_SEED={SEED}")
OPS = [f for f in TABLE if name_of(f) in SAMPLES and name_of(f) not in ELSEWHERE | VALUELESS]
PYTHONS = {name_of(f) for f, line in TABLE.items() if line.local_impl is not None
           or line.decomposition is not None and not is_traceable(line.decomposition)}


@pytest.fixture
def arrivals(monkeypatch):
    """The ops that come to Python."""
    seen = []
    run = core._run_arrived

    def spy(cls, func, args, kwargs):
        seen.append(func)
        return run(cls, func, args, kwargs)

    monkeypatch.setattr(core, "_run_arrived", spy)
    return seen


def operands(args, kwargs, where, chooser):
    """The same arguments with global tensors, in layouts drawn at random."""
    def place(value):
        if isinstance(value, torch.Tensor):
            choices = [gt.sbp.broadcast, *[gt.sbp.split(d) for d in range(value.dim())]]
            if value.is_floating_point() and not value.isnan().any() and not value.isinf().any():
                choices.append(gt.sbp.partial_sum)
            return gt.from_full(value, where, [chooser.choice(choices) for _ in range(where.ndim)])
        if isinstance(value, (list, tuple)):
            return type(value)(place(v) for v in value)
        return {k: place(v) for k, v in value.items()} if isinstance(value, dict) else value
    return place(args), place(kwargs)


def copied(value):
    if isinstance(value, GlobalTensor):
        return GlobalTensor.wrap(value.spec, {r: t.clone() for r, t in value.shards.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(copied(v) for v in value)
    return {k: copied(v) for k, v in value.items()} if isinstance(value, dict) else value


def assert_same(mine, twins, what):
    mine, twins = tree_flatten(mine)[0], tree_flatten(twins)[0]
    assert len(mine) == len(twins), what
    for a, b in zip(mine, twins):
        assert type(a) is type(b), what
        if type(a) is GlobalTensor:
            assert a.spec is b.spec, f"{what}: {a.spec}, {b.spec}"
            assert a.shape == b.spec.shape and a.stride() == b.spec.stride, what
            for rank, shard in b.shards.items():
                torch.testing.assert_close(a.shards[rank], shard, rtol=0, atol=0, equal_nan=True,
                                           msg=lambda m: f"{what}\n{m}")
                assert a.shards[rank].stride() == shard.stride(), what


def writes(func):
    """Writing to a pending sum is Python's: it is another layout then."""
    return any(a.written for a in arguments(func))


@pytest.mark.parametrize("func", OPS, ids=name_of)
def test_native_dispatch_is_its_twin(func, arrivals):
    generator = torch.Generator().manual_seed(SEED % 2**31)
    chooser = random.Random(f"{SEED} {name_of(func)}")
    for number, (args, kwargs) in enumerate(SAMPLES[name_of(func)]):
        for ranks in ([0, 1], [[2, 0], [1, 3]]):
            given = operands(made(args, generator), made(kwargs, generator), gt.placement("cpu", ranks), chooser)
            if not Call(func, *given).tensors:
                continue
            sbps = [t.sbp for t in Call(func, *given).tensors]
            what = f"{name_of(func)}, sample {number}, {sbps}, NATIVE_SEED={SEED}"
            for _ in range(4):
                again = copied(given)
                func(*again[0], **again[1])
            arrivals.clear()
            mine, twins = copied(given), copied(given)
            got = func(*mine[0], **mine[1])
            if name_of(func) not in PYTHONS:
                came = [f for f in arrivals if f is func or name_of(f) not in PYTHONS and not writes(f)]
                assert not came, f"{what} came to Python: {came}"
            if is_composite(func):
                continue                             # torch decomposed it before it came here
            assert_same(got, dispatch(GlobalTensor, func, *twins), what)
            assert_same(mine, twins, f"{what}: operands")


def test_most_lines_need_no_python():
    assert len(PYTHONS & {name_of(f) for f in OPS}) < 0.15 * len(OPS)


def test_a_tape_holds_for_its_floats(arrivals):
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    where = gt.placement("cpu", [0, 1])
    gx, gy = gt.from_full(x, where, S(0)), gt.from_full(y, where, S(0))

    def loss(delta):
        arrivals.clear()
        found = torch.nn.functional.huber_loss(gx, gy, delta=delta).full_tensor()
        torch.testing.assert_close(found, torch.nn.functional.huber_loss(x, y, delta=delta))
        return torch.ops.aten.huber_loss.default in arrivals

    for _ in range(4):
        loss(0.5)
    assert [loss(delta) for delta in (0.5, 0.25, 0.5)] == [False, True, False]


def test_a_tape_divides_a_plain_gradient():
    """The gradient of a mean is divided before it meets what is global."""
    t, weight = torch.randn(6, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64)
    target = torch.ones(6, dtype=torch.float64)
    for n in range(5):
        x, plain = gt.from_full(t, gt.placement("cpu", [0, 1]), S(0)).requires_grad_(), t.clone().requires_grad_()
        got, = torch.autograd.grad(torch.nn.functional.soft_margin_loss(x, target), x, weight * n)
        want, = torch.autograd.grad(torch.nn.functional.soft_margin_loss(plain, target), plain, weight * n)
        torch.testing.assert_close(got.full_tensor(), want)


@pytest.mark.parametrize("func", [f for f in OPS if is_traceable(TABLE[f].decomposition)], ids=name_of)
def test_what_was_done_with_one_operand_twice_holds_for_two(func):
    """A trace of mse_loss(x, x) is none of mse_loss(x, x) alone: it is replayed for mse_loss(x, y)."""
    generator = torch.Generator().manual_seed(SEED % 2**31)
    chooser = random.Random(f"{SEED} {name_of(func)}")
    for args, kwargs in SAMPLES[name_of(func)]:
        given = operands(made(args, generator), made(kwargs, generator), gt.placement("cpu", [0, 1]), chooser)
        flat, tree = tree_flatten(given)
        at = {}
        for i, t in enumerate(flat):                 # of alike operands all take the place of the last
            if isinstance(t, GlobalTensor):
                at.setdefault(t.spec, []).append(i)
        alike = {i: flat[places[-1]] for places in at.values() for i in places}
        if len(alike) == len({id(t) for t in alike.values()}):
            continue
        torch_ext.clear_recipes()
        same = tree_unflatten([alike.get(i, value) for i, value in enumerate(flat)], tree)
        for _ in range(3):
            func(*same[0], **same[1])
        mine, twins = copied(given), copied(given)
        assert_same(func(*mine[0], **mine[1]), dispatch(GlobalTensor, func, *twins), f"{name_of(func)}, SEED={SEED}")


def test_foreach_and_fused_ops_need_no_python(arrivals):
    where = gt.placement("cpu", [0, 1])
    weights = [gt.randn(4, 5, placement=where, sbp=sbp) for sbp in (gt.sbp.split(0), gt.sbp.broadcast)]
    plain = [w.full_tensor() for w in weights]
    for _ in range(4):
        arrivals.clear()
        torch._foreach_mul_(weights, 1.5)
        sums = torch._foreach_add(weights, weights, alpha=2)
    assert not arrivals
    for w, s, p in zip(weights, sums, plain):
        torch.testing.assert_close(w.full_tensor(), p * 1.5**4)
        torch.testing.assert_close(s.full_tensor(), 3 * p * 1.5**4)
        assert s.spec is w.spec


def test_norms_of_many():
    weights = [gt.randn(4, 5, placement=gt.placement("cpu", [0, 1]), sbp=sbp) for sbp in (S(0), S(1), B)]
    for _ in range(4):
        norms = torch._foreach_norm(weights)
        for norm, w in zip(norms, weights):
            torch.testing.assert_close(norm.full_tensor(), w.full_tensor().norm())


@pytest.mark.parametrize("how", ["fused", "foreach"])
def test_an_optimizer_needs_no_python(how, arrivals):
    where = gt.placement("cpu", [0, 1])
    plain = [torch.randn(4, 5).requires_grad_() for _ in range(2)]
    weights = [gt.from_full(p.detach(), where, sbp).requires_grad_() for p, sbp in zip(plain, (S(0), B))]
    steps = [torch.optim.AdamW(some, lr=0.1, **{how: True}) for some in (plain, weights)]
    for _ in range(4):
        arrivals.clear()
        for some, optimizer in zip((plain, weights), steps):
            for p in some:
                p.grad = p.detach() * 0.5
            optimizer.step()
    assert not [f for f in arrivals if "foreach" in str(f) or "fused" in str(f)]
    for p, w in zip(plain, weights):
        torch.testing.assert_close(w.full_tensor(), p)


def test_a_mode_sees_every_op():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = gt.ones(4, placement=gt.placement("cpu", [0, 1]), sbp=gt.sbp.split(0))
    for _ in range(4):
        x + x
    with Look():
        assert (x + x).sbp == (gt.sbp.split(0),)
    assert torch.ops.aten.add.Tensor in seen


def test_other_subclasses_keep_their_ways():
    class Mine(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return torch.full((), 7.0)

    x = gt.ones(4, placement=gt.placement("cpu", [0, 1]), sbp=gt.sbp.split(0))
    for _ in range(4):
        x + x
    mine = torch.Tensor._make_wrapper_subclass(Mine, (4,))
    assert torch.add(mine, mine).item() == 7
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        assert (torch.empty(3) + torch.empty(3)).shape == (3,)


def test_uses_of_plain_operands_are_counted_as_in_python_and_dropped_at_the_same_use(monkeypatch):
    monkeypatch.setattr(agreement, "_MOST_KEYS", 7)
    chooser, counts = random.Random(SEED), []
    uses = [((1000, 1001 + chooser.randrange(2)), f"kind {int(chooser.expovariate(0.2))}") for _ in range(500)]
    for native in (torch_ext, None):
        monkeypatch.setattr(agreement, "torch_ext", native)
        counts.append([agreement._count_use(ranks, key) for ranks, key in uses])
    assert counts[0] == counts[1]
    assert counts[0].count(1) > len(set(uses)) and max(counts[0]) > 4        # some began anew, others went on
    assert all(len(known) <= 7 for known in agreement._uses.values())


def test_products_have_the_bits_of_the_twin():
    """Kernels of matrices round differently by which operand comes first, on some processors."""
    chooser, generator = random.Random(SEED), torch.Generator().manual_seed(SEED)
    for _ in range(200):
        stands = {label: "ab" if label == "i" else chooser.choice(["ac", "bc", "ab", "abc"]) for label in "ijklm"}
        size = {label: chooser.randrange(2, 6) for label in stands}
        left, right, out = ([label for label in stands if operand in stands[label]] for operand in "abc")
        for labels in (left, right, out):
            chooser.shuffle(labels)
        a, b = (torch.randn([size[label] for label in labels], generator=generator) for labels in (left, right))
        equation = f"{''.join(left)},{''.join(right)}->{''.join(out)}"
        got, want = custom_ops._contract(equation, a, b), torch.ops.globaltensor.contract(equation, a, b)
        assert torch.equal(got, want) and got.stride() == want.stride(), equation
        torch.testing.assert_close(got, torch.einsum(equation, a, b), rtol=1e-5, atol=1e-5)


def test_attention_of_gpus_is_done_natively(arrivals):
    """Of torch's ops for it some results are numbers; they are replayed too."""
    aten, rest = torch.ops.aten, (0.0, [True] * 3 + [False], True)
    q, k, v = (gt.from_full(torch.randn(2, 4, 8, 16), gt.placement("cpu", [0, 1]), S(1)) for _ in range(3))
    for _ in range(4):                               # decided, their steps too
        arrivals.clear()
        out, log, *more = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)
        assert more[2:4] == [8, 8]
        aten._scaled_dot_product_flash_attention_backward(q, q, k, v, out, log, *more[:4], 0.0, True, None, None)
        made = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, is_causal=True)
        aten._scaled_dot_product_efficient_attention_backward(q, q, k, v, None, *made, *rest)
    assert not arrivals, arrivals
