"""torch.compile of programs on global tensors: one graph, the values and the boxings of eager.

Oracle: the same program without torch.compile, on global tensors and on plain ones.
"""
from __future__ import annotations

import copy
import os
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from harness import PROGRAMS, ROOT, RUN, environment, good
from torch import nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental import symbolic_shapes
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import globaltensor as gt
from globaltensor.errors import OutOfRangeError
from globaltensor.layouts.symbols import expected, expected_of, known_sizes
from globaltensor.runtime import compiler_skips, torch_internals
from globaltensor.tensors import flatten

sys.path.insert(0, os.fspath(ROOT / "examples"))
from gpt import GPT

SEED = 31
pytestmark = pytest.mark.usefixtures("seeded_compiler")
S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
TWO = gt.placement("cpu", [0, 1])
THREE = gt.placement("cpu", [2, 0, 1])


class Counted:
    """A backend that counts the graphs and the ops in them."""

    def __init__(self, backend="aot_eager"):
        self.backend, self.graphs = backend, 0

    def __call__(self, module, inputs, **options):
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.backend)(module, inputs, **options)


def compiled(f, backend="aot_eager", **options):
    counter = Counted(backend)
    return torch.compile(f, backend=counter, fullgraph=True, **options), counter


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return self.down(self.dropout(F.gelu(self.up(x)))).square().mean()


LAYOUTS = {"data": ({}, S(0)), "tensor": ({"up.weight": S(0), "up.bias": S(0), "down.weight": S(1)}, B)}


def step(model, f, *args):
    """Loss, gradients, and what was moved for them."""
    gt.manual_seed(SEED)
    with gt.record() as moves:
        loss = f(*args)
        loss.backward()
        grads = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    return [loss.full_tensor(), *grads], [(m.op, str(m.src), str(m.dst), m.bytes) for m in moves if m.bytes]


def same_as_eager(model, args, backend="aot_eager"):
    want, moved = step(model, model, *args)
    f, counter = compiled(model, backend)
    for _ in range(2):
        got, moved_too = step(model, f, *args)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert sum(nbytes for *_, nbytes in moved_too) <= sum(nbytes for *_, nbytes in moved)
        assert len(moved_too) <= len(moved)
    assert counter.graphs == 1
    return got


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_one_graph_and_equals_eager(layout):
    rows, sbp = LAYOUTS[layout]
    model = Mlp().to_global(TWO, lambda name, _: rows.get(name, B))
    x = torch.randn(5, 6)
    same_as_eager(model, [gt.from_full(x, TWO, sbp)])
    plain = copy.deepcopy(model).eval()
    for module in plain.modules():
        for name, p in [*module._parameters.items()]:
            module._parameters[name] = nn.Parameter(p.full_tensor().detach())
    got = step(model.eval(), compiled(model)[0], gt.from_full(x, TWO, sbp))[0]
    loss = plain(x)
    loss.backward()
    for a, b in zip(got, [loss, *(p.grad for p in plain.parameters())], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_another_layout_is_another_graph_and_the_first_is_used_again():
    f, counter = compiled(lambda x: (x * 2).sum(0))
    for sbp, graphs in ((S(0), 1), (B, 2), (P, 3), (S(0), 3), (B, 3)):
        x = gt.from_full(torch.arange(15.0).reshape(5, 3), THREE, sbp)
        torch.testing.assert_close(f(x).full_tensor(), (x * 2).sum(0).full_tensor())
        assert counter.graphs == graphs, sbp


LONG = pytest.mark.long


@pytest.mark.parametrize("options, first", [({}, 1), pytest.param({"dynamic": True}, 0, marks=LONG)])
def test_sizes_that_divide_evenly_share_a_graph_and_others_have_one_each(options, first):
    f, counter = compiled(lambda x: x.softmax(0).sum(1), **options)
    for rows, graphs in ((6, 1), (8, 1 + first), (20, 1 + first), (7, 2 + first), (10, 2 + first), (8, 2 + first)):
        x = gt.from_full(torch.randn(rows, 3), TWO, S(0))
        torch.testing.assert_close(f(x).full_tensor(), x.softmax(0).sum(1).full_tensor())
        assert counter.graphs == graphs, rows


@pytest.mark.parametrize("layout", ["data", pytest.param("tensor", marks=LONG)])
def test_steps_of_twenty_sizes_are_two_graphs(layout):
    """The first size has its own; the second makes one for all that divide evenly, and as split as they are."""
    rows, sbp = LAYOUTS[layout]
    model = Mlp().to_global(TWO, lambda name, _: rows.get(name, B))
    f, counter = compiled(model)
    for n in range(4, 44, 2) if layout == "data" else range(4, 24):
        x = gt.from_full(torch.randn(n, 6), TWO, sbp)
        (want, moved), (got, moved_too) = step(model, model, x), step(model, f, x)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert sum(nbytes for *_, nbytes in moved_too) <= sum(nbytes for *_, nbytes in moved)
    assert counter.graphs == 2


@pytest.mark.parametrize("newest", [False, True], ids=["torch 2.11", "torch 2.13"])
def test_numbers_of_symbols_with_any_torch(newest, monkeypatch):
    """Of torch 2.11, no `guarding_hint_or_throw` tells them, but `size_hint`."""
    env = symbolic_shapes.ShapeEnv()
    n = env.create_symintnode(env.create_symbol(7, ConstantSource("n")), hint=7)
    only_values_tell, twice = env.create_unbacked_symint(), 2 * n
    if not newest:
        for name in ("has_guarding_hint", "guarding_hint_or_throw"):
            monkeypatch.delattr(symbolic_shapes, name, raising=False)
        env = SimpleNamespace(size_hint={n.node.expr: 7}.get)
    assert expected((3, n, twice)) == (3, 7, 14) and expected_of(n.node.expr, env) == 7
    assert known_sizes((3, n))[1] is n
    with pytest.raises(symbolic_shapes.GuardOnDataDependentSymNode):     # ends the graph
        known_sizes((3, only_values_tell))


@pytest.mark.parametrize("newest", [False, True], ids=["torch 2.11", "torch 2.13"])
def test_that_torch_compiles_is_seen_with_any_torch(newest, monkeypatch):
    """Before torch 2.13, its own `is_compiling` says so only of what dynamo traces, not where a backend goes on."""
    if not newest:
        monkeypatch.setattr(torch.compiler, "_compile_session_context", nullcontext, raising=False)
    seen = []

    def backend(graph, inputs):
        seen.append(torch_internals.compiling() if newest else torch_internals.compiling_before_2_13())
        return graph

    def program(x):
        return x + 1, torch_internals.compiling_before_2_13()        # dynamo takes it for True

    assert not torch_internals.compiling() and not torch_internals.compiling_before_2_13()
    assert torch.compile(program, backend=backend, fullgraph=True)(torch.ones(2))[1] and seen == [True]
    assert not torch_internals.compiling() and not torch_internals.compiling_before_2_13()


def test_what_the_package_keeps_of_a_program_may_be_gone(monkeypatch):
    """A `weakref.proxy` raises at every question, and may stand in what a program registered with the package."""
    monkeypatch.setattr(flatten, "kept", [weakref.proxy(nn.Identity())], raising=False)
    assert flatten._register_while_tracing in {*compiler_skips.package_functions()}


@LONG
def test_a_dim_that_is_marked_dynamic_needs_one_graph():
    """Shapes that are computed of it, and a view."""
    f, counter = compiled(lambda x: x.view(x.shape[0], 2, 3).transpose(1, 2).reshape(-1, 2).square().mean())
    for n in (4, 6, 2 * 17):
        x = gt.from_full(torch.randn(n, 6), TWO, S(0))
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(f(x).full_tensor(), x.full_tensor().square().mean())
    assert counter.graphs == 1


SAVE_SIZES = {                                       # of the zeros that their gradients are scattered into
    "max": lambda y: y.max(1)[0], "sort": lambda y: y.sort(0)[0], "topk": lambda y: y.topk(2, 1)[0],
    "kthvalue": lambda y: y.kthvalue(2, 1)[0], "mode": lambda y: y.mode(1)[0], "median": lambda y: y.median(1)[0],
    "cummax": lambda y: y.cummax(1)[0], "cumprod": lambda y: y.cumprod(1), "unfold": lambda y: y.unfold(1, 2, 2),
    "scatter_add": lambda y: torch.zeros_like(y).scatter_add(1, y.argsort(1), y)}


@pytest.mark.parametrize("name", [name if name == "max" else pytest.param(name, marks=LONG) for name in SAVE_SIZES])
def test_gradients_that_need_sizes_need_no_graph_for_each_size(name):
    """Numbers for symbols in a backward graph would leave the forward one, which is for symbols, without a match."""
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    weight = gt.from_full(plain.detach(), TWO, B).requires_grad_()
    f, counter = compiled(lambda x, w: SAVE_SIZES[name](x @ w))
    for n in (6, 8, 10, 12):
        x = torch.randn(n, 6, dtype=torch.float64)
        out, right = f(gt.from_full(x, TWO, S(0)), weight), SAVE_SIZES[name](x @ plain)
        torch.testing.assert_close(out.full_tensor(), right)
        out.sum().backward()
        right.sum().backward()
        torch.testing.assert_close(weight.grad.full_tensor(), plain.grad)
    assert counter.graphs <= 2


@LONG
def test_what_knows_no_symbols_has_a_graph_for_each_size():
    f, counter = compiled(lambda x: x.sort(1).values.var(0) + x[0])
    for nth, n in enumerate((4, 6, 8), 1):
        x = gt.from_full(torch.randn(n, 3), TWO, S(0))
        torch.testing.assert_close(f(x).full_tensor(), (x.sort(1).values.var(0) + x[0]).full_tensor())
        assert counter.graphs == nth


def test_where_a_graph_ends_the_program_is_right(recwarn):
    def program(x):
        y = x * 2
        if y.sum().item() > 0:
            y = y + 1
        return y * torch.multinomial(weights, 3, replacement=True)

    weights, x = gt.from_full(torch.ones(4), TWO, B), gt.from_full(torch.ones(3), TWO, S(0))
    gt.manual_seed(SEED)
    want = program(x)
    gt.manual_seed(SEED)
    torch.testing.assert_close(torch.compile(program, backend="aot_eager")(x).full_tensor(), want.full_tensor())
    assert not recwarn


def test_boxings_writes_and_views_inside():
    def program(x, y):
        z = x.to_global(sbp=B) + y
        z[1] += 1.0
        y.mul_(2)
        return z.to_global(sbp=S(1)), x.full_tensor().sum(), z[0].clone()

    x, y = gt.from_full(torch.randn(5, 4), THREE, S(0)), gt.from_full(torch.randn(5, 4), THREE, S(1))
    kept = y.clone()
    want = [t.clone() if t.is_global else t for t in program(x, y)]
    f, counter = compiled(program)
    got = f(x, kept)
    for a, b in zip([*got, kept], [*want, y], strict=True):
        assert a.is_global == b.is_global and (not a.is_global or a.sbp == b.sbp)
        torch.testing.assert_close(*(t.full_tensor() if t.is_global else t for t in (a, b)))
    assert counter.graphs == 1


def test_gradients_that_are_plain():
    """Zeros, which autograd makes for an output that was not used, and what a program hands in."""
    def program(x, w):
        logits = x @ w
        return logits, logits.square().mean()

    f, counter = compiled(program)
    for use in (lambda logits, loss: loss.backward(), lambda logits, loss: logits.backward(plain)):
        x, w, plain = torch.randn(5, 4), torch.randn(4, 6), torch.randn(5, 6)
        places = [gt.from_full(x, TWO, S(0)).requires_grad_(), gt.from_full(w, TWO, B).requires_grad_()]
        use(*f(*places))
        alone = [x.requires_grad_(), w.requires_grad_()]
        use(*program(*alone))
        for a, b in zip(places, alone, strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad)
    assert counter.graphs == 1


class Recomputed(nn.Module):
    """Two layers, columns and rows, that run again in backward."""

    def __init__(self):
        super().__init__()
        layer = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.Dropout(0.3))
        self.layers = nn.ModuleList([layer, copy.deepcopy(layer)])

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(x, torch.arange(len(x)) % 6)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_recomputation_keeps_what_was_moved_and_drawn(backend):
    rows = {"1.weight": S(0), "1.bias": S(0), "3.weight": S(1)}
    model = Recomputed().to_global(TWO, lambda name, _: rows.get(name.split(".", 2)[2], B))
    same_as_eager(model, [gt.from_full(torch.randn(5, 6), TWO, B)], backend)


def test_what_moves_in_a_graph_has_the_line_of_what_is_compiled():
    f, _ = compiled(lambda x: x.pow(2))              # this line
    x = gt.from_full(torch.ones(4, 2), TWO, P)
    with gt.record() as moves:
        f(x)
    assert len(moves) == 1 and moves[0].where.startswith("tests/test_compile.py:"), moves
    line = int(moves[0].where.rpartition(":")[2])
    assert "# this line" in (ROOT / "tests/test_compile.py").read_text().splitlines()[line - 1]
    with pytest.raises(gt.BoxingError, match=r"where: tests/test_compile\.py"), gt.boxing("forbid"):
        f(x)


def test_explain_tells_of_what_is_compiled():
    def program(x):
        return (x @ x.T).relu().sum()

    x = gt.from_full(torch.randn(4, 3), TWO, S(1))
    f, _ = compiled(program)
    f(x)
    told = gt.explain(f, x)
    assert told.rows == gt.explain(program, x).rows and told.bytes
    torch.testing.assert_close(told.result.full_tensor(), program(x).full_tensor())


def test_errors_of_the_values_are_raised_in_graphs_too():
    table = gt.from_full(torch.randn(7, 2), TWO, S(0))
    f, _ = compiled(lambda i: F.embedding(i, table))
    assert f(gt.from_full(torch.tensor([6, 0]), TWO, B)).shape == (2, 2)
    with pytest.raises(OutOfRangeError, match="index 7"):
        f(gt.from_full(torch.tensor([7, 0]), TWO, B))


class Trained(nn.Module):
    """The example GPT with its loss."""

    def __init__(self, **options):
        super().__init__()
        self.gpt = GPT(vocab=32, context=8, hidden=16, layers=2, heads=4, **options)

    def forward(self, ids, labels):
        return F.cross_entropy(self.gpt(ids).flatten(0, 1), labels.flatten())


def gpt_of(kind, shape=(3, 8), **options):
    """The model, global, and a batch."""
    model = Trained(**options)
    if kind == "tensor":
        model = gt.parallelize(model, gt.placement("cpu", [0, 1], ("tp",)), gt.Plan.of(model))
    else:
        model = model.to_global(TWO, B)
    where = next(model.parameters()).placement
    sbp = {"data": S(0), "tensor": B, "sequence": S(1)}[kind]
    return model, [gt.from_full(torch.randint(32, shape), where, sbp) for _ in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", ["data", "tensor", "sequence"])
def test_the_example_gpt(kind, backend):
    same_as_eager(*gpt_of(kind, dropout=0.1, tied=kind == "data"), backend)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", ["data", "tensor"])
def test_the_example_gpt_of_many_batches_and_lengths(kind, backend):
    model, _ = gpt_of(kind, dropout=0.1, tied=kind == "data")
    f, counter = compiled(model, backend)
    where, sbp = next(model.parameters()).placement, S(0) if kind == "data" else B
    for shape in ((6, 5), (8, 7), (10, 3), (4, 6), (20, 8), (12, 4), (2 * 9, 2)):
        args = [gt.from_full(torch.randint(32, shape), where, sbp) for _ in range(2)]
        torch.testing.assert_close(step(model, f, *args)[0], step(model, model, *args)[0], rtol=1e-5, atol=1e-6)
    assert counter.graphs == 2


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_processes_make_their_graphs_at_the_same_calls(backend):
    """Of even sizes and uneven ones, of parts that grow on one rank only, and of one row."""
    said = good([*RUN, "-n", "2", PROGRAMS / "compiled_sizes.py", backend], timeout=900).split()
    assert said == ["1,2,3,3,3,3,4,4,5"] * 2


@pytest.mark.long
def test_two_processes_that_share_a_cache(tmp_path):
    """Their graphs differ where their parts do: what one leaves on disk is not for the other."""
    more = environment(TORCHINDUCTOR_CACHE_DIR=os.fspath(tmp_path))
    for _ in range(2):                               # cold, then warm
        assert good([*RUN, "-n", "2", PROGRAMS / "compiled.py"], more, timeout=900).count("equal") == 2


@pytest.mark.parametrize("name, f", {
    "product": lambda x, s: x * s, "power": lambda x, s: (x ** s).sum(), "clamp": lambda x, s: x.clamp(-s, s),
    "alpha": lambda x, s: torch.add(x, x, alpha=s), "full": lambda x, s: torch.full_like(x, s)}.items())
def test_a_float_that_changes_from_call_to_call(name, f):
    """torch has a symbol for it from the second value on."""
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    t = torch.arange(1.0, 5.0)
    x = gt.from_full(t, gt.placement("cpu", [0, 1], ("dp",)), gt.sbp.split(0))
    for s in (0.5, 0.7, 0.9):
        torch.testing.assert_close(compiled(x, s).full_tensor(), f(t, s))
