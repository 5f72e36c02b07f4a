"""Boxings of a compiled graph that meet are done as one, alike on all ranks, and never where one leads to another.

Oracle: the same program without torch.compile. The pass is run on the graphs of AOTAutograd, by itself; the long test
has inductor run it, in two processes.
"""
from __future__ import annotations

import random

import pytest
import torch
from harness import PROGRAMS, RUN, good
from torch._dynamo.backends.common import aot_autograd
from torch.torch_version import TorchVersion

import globaltensor as gt
from globaltensor.boxings import graph_merging
from globaltensor.runtime import graph_effects
from globaltensor.runtime.graph_effects import add_inductor_pass, is_effect

SEED = 41
pytestmark = pytest.mark.usefixtures("seeded_compiler")
S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
TWO, THREE = gt.placement("cpu", [0, 1]), gt.placement("cpu", [2, 0, 1])


def compiled(f):
    """And, per graph, how many boxings it had and has."""
    counts = []

    def merge(module, inputs):
        before = sum(map(is_effect, module.graph.nodes))
        graph_merging.merge_boxings(module.graph)
        module.recompile()
        counts.append((before, sum(map(is_effect, module.graph.nodes))))
        return aot_boxed(module)

    return torch.compile(f, backend=aot_autograd(fw_compiler=merge, bw_compiler=merge), fullgraph=True), counts


def aot_boxed(module):
    def run(args):
        return module(*args)

    run._boxed_call = True
    return run


def step(f, args):
    """Values and gradients; the tensors that moved, and the bytes."""
    with gt.record() as moves:
        loss = f(*args)
        loss.backward()
        during = [m for m in moves if m.op not in ("gradient", "full_tensor")]
        values = [loss.full_tensor(), *(a.grad.full_tensor() for a in args)]
    for a in args:
        a.grad = None
    return values, len(during), sum(m.tensors for m in during if m.bytes), sum(m.bytes for m in during)


def tensors(where, *sbps):
    return [gt.from_full(torch.randn(6, 6), where, sbp).requires_grad_() for sbp in sbps]


def attention(x, a, b, c):
    h = x * 2
    q, k, v = ((h @ w).to_global(sbp=B).relu() for w in (a, b, c))
    return (torch.softmax(q @ k.T, -1) @ v).square().sum()


@pytest.mark.parametrize("where", [TWO, THREE])
def test_boxings_that_meet_are_one(where):
    args = tensors(where, B, S(1), S(1), S(1))
    want, calls, moved, nbytes = step(attention, args)
    f, counts = compiled(attention)
    for _ in range(2):
        got, calls_too, moved_too, nbytes_too = step(f, args)
        torch.testing.assert_close(got, want)
        assert (moved_too, nbytes_too) == (moved, nbytes) and calls_too < calls
    assert counts[0] == (3, 1) and len(counts) == 2


def test_those_with_the_memory_of_many_are_not(monkeypatch):
    args = tensors(TWO, B, S(1), S(1), S(1))
    monkeypatch.setattr(graph_merging, "ROOM", 2 * 6 * 6 * 4)
    f, counts = compiled(attention)
    torch.testing.assert_close(step(f, args)[0], step(attention, args)[0])
    assert counts[0] == (3, 2)


def through_a_plain_tensor(x, y):
    scale = x.to_global(sbp=B).full_tensor().sum()
    return ((y * scale).to_global(sbp=B)).square().sum()


def through_a_write(x, y):
    whole = x.to_global(sbp=B)
    twice = y * 2
    twice.add_(whole.sum())
    return (twice.to_global(sbp=B) * whole).sum()


def through_a_view(x, y):
    twice = y * 2
    column = twice[:, :3]
    column.mul_(x.to_global(sbp=B)[:, :3])
    return twice.to_global(sbp=B).square().sum()


def one_after_another(x, y):
    return ((x.to_global(sbp=B) * y).to_global(sbp=S(1)).relu().to_global(sbp=B)).sum()


@pytest.mark.parametrize("program", [through_a_plain_tensor, through_a_write, through_a_view, one_after_another])
def test_what_leads_to_another_is_not_merged_with_it(program):
    args = tensors(TWO, S(0), S(0))
    f, counts = compiled(program)
    torch.testing.assert_close(step(f, args)[0], step(program, args)[0])
    assert counts[0][0] == counts[0][1]


def random_program(seed):
    """Ops, boxings and writes in any order, of three tensors."""
    order = random.Random(seed)
    steps = [(order.randrange(6), order.randrange(3), order.randrange(3), order.choice([S(0), S(1), B]))
             for _ in range(14)]

    def program(*args):
        values = [a * 1 for a in args]
        for kind, at, other, sbp in steps:
            match kind:
                case 0 | 1:
                    values[at] = values[at].to_global(sbp=sbp)
                case 2:
                    values[at] = values[at] @ values[other] * 0.3
                case 3:
                    values[at] = torch.tanh(values[at] + values[other])
                case 4:
                    values[at] = values[at].clone().mul_(values[other])
                case 5:
                    values[at] = torch.softmax(values[at].T, 0)
        return sum(v.square().sum() for v in values)

    return program


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 60))])
def test_random_programs(seed):
    program = random_program(seed)
    args = tensors(THREE if seed % 2 else TWO, S(0), S(1), P)
    want, calls, moved, nbytes = step(program, args)
    f, counts = compiled(program)
    got, calls_too, _, nbytes_too = step(f, args)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert calls_too <= calls and nbytes_too <= nbytes, (seed, counts)


@pytest.mark.parametrize("version", ["2.12", "2.13"])
def test_passes_of_the_program_stay(version, monkeypatch):
    """torch 2.13 takes several; before, ours does the program's, too."""
    config, done = __import__("torch._inductor.config", fromlist=["config"]), []
    monkeypatch.setattr(graph_effects, "TORCH", TorchVersion(version))
    with config.patch(post_grad_custom_pre_pass=done.append):
        for _ in range(2):
            add_inductor_pass(graph_merging.merge_boxings, graph_merging.__file__)
        now = config.post_grad_custom_pre_pass
        passes = now if version == "2.13" else [now]
        assert graph_merging.merge_boxings in passes[-1].changes and bool(passes[-1].uuid()) is (version == "2.13")
    graph = torch.fx.symbolic_trace(lambda x: x).graph
    for one in passes:
        one(graph)
    assert done == [graph]


@pytest.mark.long
def test_inductor_merges_them_on_all_ranks():
    """Fourteen boxings of a step, forward and backward, as four."""
    said = good([*RUN, "-n", "2", PROGRAMS / "compiled_merging.py"], timeout=900)
    assert said.count("equal: 14 -> 4") == 2, said
