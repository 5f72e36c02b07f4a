"""What torch.compile's graphs take and give at their edges, and what is asked of values inside: one graph, or an error.

Oracle: the same program in plain torch, forward and backward.
"""
from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import globaltensor as gt

SEED = 20_261_125
pytestmark = pytest.mark.usefixtures("seeded_compiler")
S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
TWO = gt.placement("cpu", [0, 1])
THREE = gt.placement("cpu", [2, 0, 1])
GRID = gt.placement("cpu", [[0, 1], [2, 3]])
X = torch.arange(24.0).reshape(4, 6).sin()


def compiled(f):
    torch.compiler.reset()
    return torch.compile(f, backend="aot_eager", fullgraph=True)


def leaves(values):
    return [t.full_tensor() if t.is_global else t for t in torch.utils._pytree.tree_leaves(values)]


def outcome(f, *operands):
    """What it gives, and the gradients of the operands."""
    given = f(*operands)
    sum(t.square().sum() for t in torch.utils._pytree.tree_leaves(given)).backward()
    return leaves([given, [t.grad for t in operands]])


def same_as_plain(f, operands, layouts, where):
    """One graph of f gives what f gives in plain torch."""
    want = outcome(f, *(t.clone().requires_grad_() for t in operands))
    got = outcome(compiled(f), *(gt.from_full(t, where, sbp).requires_grad_() for t, sbp in zip(operands, layouts)))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


VIEWS = {  # that must be boxed, of rows that are split
    "row": lambda x: x[0], "rows": lambda x: x[1:3], "view": lambda x: x.view(3, 8), "split": lambda x: x.split(3, 0),
    "expand": lambda x: x[:1].expand(5, 6), "diagonal": lambda x: x.diagonal(), "ravel": lambda x: x.ravel(),
    "view of a view": lambda x: x.view(8, 3)[1:4].t(), "row of a result": lambda x: (x * 2)[0],
    "with its base": lambda x: (x * 2, (x * 2)[1:3]),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("where", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_graph_may_return_a_view_that_is_boxed(view, where):
    same_as_plain(VIEWS[view], [X], [S(0)], where)


@pytest.mark.parametrize("view", VIEWS)
def test_a_graph_may_take_a_view_that_is_boxed(view):
    def program(x, w):
        return tuple(f(t, w) for t in torch.utils._pytree.tree_leaves(VIEWS[view](x)))

    def step(t, w):
        return (t.sum(-1) * w).sin()

    f, w = step, torch.tensor(2.0)
    want = outcome(program, X.clone().requires_grad_(), w.clone().requires_grad_())
    f = compiled(step)
    got = outcome(program, gt.from_full(X, TWO, S(0)).requires_grad_(), gt.from_full(w, TWO, B).requires_grad_())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_graph_that_took_a_view_reads_the_next_one_anew():
    x, f = gt.from_full(X, TWO, S(0)), compiled(lambda row: row * 2)
    row = x[1]
    for n in range(3):
        torch.testing.assert_close(f(row).full_tensor(), (X[1] + n) * 2)
        x.add_(1)


ASSIGNED = {
    "y[1] += 1": lambda y: y.__setitem__(1, y[1].add_(1)), "y[1:3] = y[0]": lambda y: y.__setitem__(slice(1, 3), y[0]),
    "y[2:] = y.mean(0)": lambda y: y.__setitem__(slice(2, None), y.mean(0)),
    "a diagonal": lambda y: y.diagonal().copy_(y[3, 1].expand(4)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", [S(0), S(1), P], ids=str)
@pytest.mark.parametrize("write", ASSIGNED)
def test_a_graph_may_write_to_a_part_of_what_it_computes(write, layout):
    def program(x):
        y = x * 2
        ASSIGNED[write](y)
        return y.sin()

    same_as_plain(program, [X], [layout], TWO)


WRITES = {"the view": lambda x, row: row.add_(1), "its base": lambda x, row: x.mul_(2) + row,
          "a view of the view": lambda x, row: row[:2].zero_()}


@pytest.mark.parametrize("write", WRITES)
def test_a_graph_that_takes_a_view_and_writes_to_what_it_takes_is_an_error(write):
    x = gt.from_full(X, TWO, S(0))
    with pytest.raises(Exception, match=r"is a boxed view\n.*\n.*\n.*view\.clone\(\)"):
        compiled(WRITES[write])(x, x[1])
    torch.testing.assert_close(x.full_tensor(), X)


def step_of_optimizer(p):
    p.grad = torch.ones_like(p)
    torch.compile(torch.optim.SGD([p], lr=0.5).step, backend="aot_eager")()


WRITERS = {
    "in place": lambda x: compiled(lambda x: x.sub_(0.5).sum())(x),
    "of an alias": lambda x: compiled(lambda x: x.sub_(0.5).sum())(x.detach()),
    "no_grad": lambda x: compiled(torch.no_grad()(lambda x: x.sub_(0.5).sum()))(x),
    "inductor": lambda x: torch.compile(lambda x: x.sub_(0.5).sum(), fullgraph=True)(x),
    "optimizer": lambda x: step_of_optimizer(nn.Parameter(x)),
}


@pytest.mark.parametrize("writer", [pytest.param(name, marks=[pytest.mark.long] * (name == "inductor"))
                                    for name in WRITERS])
def test_views_that_were_read_see_what_a_graph_writes(writer):
    """Of the memory, whichever way they are boxed."""
    x = gt.from_full(X, TWO, S(0))
    views = [x[1], x.view(3, 8), x.detach()[1]]
    before = [v.full_tensor() for v in views]
    WRITERS[writer](x)
    torch.testing.assert_close([v.full_tensor() for v in views], [v - 0.5 for v in before])


@pytest.mark.parametrize("where", [GRID, gt.placement("cpu", [[3, 0, 1], [2, 5, 4]])], ids=["2x2", "2x3"])
def test_boxings_on_a_grid(where):
    """A dim that one axis splits, and then the other one as well: B, S(0) -> S(0), S(0) moves data."""
    dst = [*itertools.product([B, P, S(0), S(1)], repeat=2)]
    for src in ((B, S(0)), (P, S(1))):
        x = gt.from_full(X, where, src)
        given = compiled(lambda x: [x.to_global(sbp=to) for to in dst])(x)
        for y, sbp in zip(given, dst, strict=True):
            assert y.sbp == sbp and torch.equal(y.full_tensor(), X), (src, sbp)


Q = torch.randn(2, 4, 7, 8, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
ONE = Q[:1, :1]                                      # sample and head: nothing but the sequence can be split
ASKS = {  # what looks at values in eager -> its operands and their layouts
    "average of split rows": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), [Q], [S(2)]),
    "average of split columns": (lambda x: F.avg_pool1d(x, 2), [Q[0]], [S(2)]),
    "local response norm": (lambda x: F.local_response_norm(x, 3), [Q[0]], [S(1)]),
    "attention in turns": (F.scaled_dot_product_attention, [ONE, ONE.flip(2), ONE.cos()], [S(2)] * 3),
    "causal attention in turns": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                                  [ONE, ONE.flip(2), ONE.cos()], [S(2)] * 3),
}


@pytest.mark.parametrize("name", ASKS)
def test_nothing_is_asked_of_values_in_a_graph(name):
    f, operands, layouts = ASKS[name]
    same_as_plain(f, operands, layouts, TWO)


def test_attention_in_turns_keeps_what_is_no_number():
    def program(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    k = ONE.clone()
    k[0, 0, 2] = torch.nan
    want = program(ONE, k, ONE)
    got = compiled(program)(*(gt.from_full(t, TWO, S(2)) for t in (ONE, k, ONE)))
    torch.testing.assert_close(got.full_tensor(), want, equal_nan=True)


ITEMS = {  # numbers of global tensors, which fullgraph=True has in the graph
    "times": lambda x: x * x.sum().item(), "of one element": lambda x: x * float(x[0, 1]),
    "divided": lambda x: 1 - x.square().sum().item() / (x + 2) + x.amax().item(),
    "written": lambda x: (x + 1).mul_(x.amax().item()), "clamped": lambda x: x.clamp(max=x.mean().item()),
    "computed": lambda x: (x * (x.square().sum().item() ** 0.5 + 1)).softmax(-1),
    "two": lambda x: (x @ x.T) * x[0, 0].item() * x[2, 1].item(), "compared": lambda x: x * (x > x.mean().item()),
    "an int": lambda x: x * x.argmax().item(), "filled": lambda x: x.masked_fill(x > 0.5, x.amin().item()),
    "plain": lambda x: x * torch.full((6,), x.amax().item()), "of a list": lambda x: torch._foreach_mul(
        [x, x + 1], x.amax().item()),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("sbp", [B, S(0), P], ids=str)
@pytest.mark.parametrize("name", ITEMS)
def test_a_graph_has_one_number_for_all_ranks(name, sbp):
    same_as_plain(ITEMS[name], [X], [sbp], TWO)


@pytest.mark.parametrize("sbp", [B, S(0), P], ids=str)
def test_a_graph_returns_numbers_and_takes_those_that_are_0_and_infinite(sbp):
    """Terms of a pending sum that are multiplied by one of these make no sum."""
    f = compiled(lambda x: (x * x.amax().item(), x.sum().item(), x.argmax().item(), x.isnan().any().item()))
    for number in (2.0, 0.0, torch.inf):
        x = torch.full((4, 6), -1.0)
        x[1, 2] = number
        got, *numbers = f(gt.from_full(x, TWO, sbp))
        assert (numbers[0], numbers[1:]) == (x.sum().item(), [8, False])
        torch.testing.assert_close(got.full_tensor(), x * number)


@pytest.mark.parametrize("layouts", [(S(0), B), (B, S(1)), (S(1), S(0))], ids=str)
def test_a_region_that_is_compiled_once_is_a_part_of_the_graph(layouts):
    @torch.compiler.nested_compile_region
    def region(x, w):
        return (x @ w).tanh() + x

    same_as_plain(lambda x, w: region(region(x, w), w), [X, X.T @ X], layouts, TWO)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("lazy", [torch._neg_view, lambda t: torch._neg_view(t * 1j).imag], ids=["negated", "a part"])
def test_a_gradient_that_is_lazily_negated(lazy, backend):
    """Inductor reads it as it lies in memory, and a boxing wants it as it is."""
    sbp = S(1) if backend == "aot_eager" else S(0)

    def program(x):
        return x.sin().to_global(sbp=sbp) if x.is_global else x.sin()

    torch.compiler.reset()
    want, x = X.clone().requires_grad_(), gt.from_full(X, TWO, S(0)).requires_grad_()
    program(want).backward(lazy(X.cos()))
    torch.compile(program, backend=backend, fullgraph=True)(x).backward(lazy(gt.from_full(X.cos(), TWO, sbp)))
    torch.testing.assert_close(x.grad.full_tensor(), want.grad)


VIEW_WRITES = {  # through views that must be boxed, of rows or columns that are split
    "flat": lambda y: y.view(-1).mul_(2), "steps": lambda y: y.view(-1)[::2].fill_(5),
    "diagonal": lambda y: y.diagonal().add_(1), "not straight": lambda y: y.view(3, 8).t().add_(1),
    "values of another": lambda y: y.view(-1)[3:9].copy_(y.detach().cos()[1]), "row": lambda y: y[0].mul_(2),
    "view of a view": lambda y: y[0][1:3].fill_(2), "turned": lambda y: y.t()[1].mul_(3),
    "a dim more": lambda y: y.unsqueeze(1)[2].add_(1), "not elementwise": lambda y: y.view(-1).cumsum_(0),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("sbp", [S(0), S(1)], ids=str)
@pytest.mark.parametrize("name", VIEW_WRITES)
def test_a_graph_writes_through_boxed_views(name, sbp):
    def program(x):
        y = x.sin()
        VIEW_WRITES[name](y)
        return y

    same_as_plain(program, [X], [sbp], THREE)
    x, want = gt.from_full(X, THREE, sbp), X.clone()
    compiled(VIEW_WRITES[name])(x)
    VIEW_WRITES[name](want)
    torch.testing.assert_close(x.full_tensor(), want)


SHARED = {"turned": lambda y: y.t(), "rows": lambda y: y[:2], "alias": lambda y: y.detach()}


@pytest.mark.parametrize("view", SHARED)
def test_a_graph_that_takes_two_tensors_of_one_memory_and_writes_to_one_is_an_error(view):
    def across(x):
        y = x + 1
        v = SHARED[view](y)
        torch._dynamo.graph_break()
        v.zero_()
        return y + 1

    y = gt.from_full(X, TWO, B)
    for run in (lambda: compiled(lambda v, y: v.zero_() + y.sum())(SHARED[view](y), y),
                lambda: torch.compile(across, backend="aot_eager")(y)):
        with pytest.raises(Exception, match=r"shares memory with another one\n.*\n.*\n.*y\.clone\(\)"):
            run()
    torch.testing.assert_close(y.full_tensor(), X)


def test_a_graph_may_write_to_parts_of_one_memory_that_lie_apart():
    y = gt.from_full(X, TWO, B)
    compiled(lambda a, b: a.add_(b))(y[:2], y[2:])
    torch.testing.assert_close(y.full_tensor(), torch.cat([X[:2] + X[2:], X[2:]]))
    y, want = gt.from_full(X, TWO, B), X.clone()
    for t in (y, want):                              # columns, which alternate in memory
        compiled(lambda a, b: a.add_(b))(t[:, ::2][:, :1], t[:, 1::2][:, :1])
    torch.testing.assert_close(y.full_tensor(), want)


def test_a_deep_copy_ends_the_graph():
    torch.compiler.reset()
    got = torch.compile(lambda x: copy.deepcopy(x) * 3, backend="aot_eager")(gt.from_full(X, TWO, S(0)))
    torch.testing.assert_close(got.full_tensor(), X * 3)


ACTIVATION_WRITES = {
    "used afterwards": (lambda y, b: y.add_(b), lambda y, got: y.relu()),
    "used, with other results": (lambda y, b: (y.add_(b).sum(), y + 1), lambda y, got: (y * 3, *got)),
    "given back": (lambda y, b: y.add_(b).relu_(), lambda y, got: (y, got)),
    "a part of it": (lambda y, b: y[1:].add_(b), lambda y, got: y * 3),
    "not used afterwards": (lambda y, b: y.add_(b).sin(), lambda y, got: got),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("sbp", [S(0), S(1), B, P], ids=str)
@pytest.mark.parametrize("write", ACTIVATION_WRITES)
def test_a_graph_writes_to_an_activation(write, sbp):
    function, after = ACTIVATION_WRITES[write]

    def program(f, x, b):
        y = x * 2
        return after(y, f(y, b))

    torch.compiler.reset()
    f, b = torch.compile(function, backend="aot_eager"), torch.linspace(-0.5, 1.0, 6)
    want = outcome(lambda *own: program(function, *own), X.clone().requires_grad_(), b.clone().requires_grad_())
    got = outcome(lambda *own: program(f, *own), gt.from_full(X, TWO, sbp).requires_grad_(),
                  gt.from_full(b, TWO, B).requires_grad_())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


class Counts(nn.Module):
    """Writes to a buffer and to a parameter, and returns them."""

    def __init__(self, x):
        super().__init__()
        self.register_buffer("seen", x.clone())
        self.weight = nn.Parameter(x.clone())

    def forward(self, x, y):
        with torch.no_grad():
            return self.seen.add_(x), self.weight.mul_(2), y

GIVEN_BACK = {
    "add_": lambda x, y: x.add_(y), "copy_": lambda x, y: x.copy_(y), "out=": lambda x, y: torch.mul(x, y, out=x),
    "index_put_": lambda x, y: x.index_put_((torch.tensor([1, 0]),), y[:2]), "relu_": lambda x, y: F.relu(x, True),
    "many writes": lambda x, y: x.add_(y).mul_(2).sub_(y), "twice": lambda x, y: (x.add_(y), x),
    "by a view": lambda x, y: (x[:, 0].add_(1), x)[1], "beside others": lambda x, y: (x * 2, x.add_(1), y + x),
    "in a dict": lambda x, y: {"a": [x.add_(1)], "b": y}, "two, turned": lambda x, y: (y.sub_(1), x.add_(1)),
    "another is written to": lambda x, y: (x, y.add_(1)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("sbp, asks", [(S(0), False), (P, True)], ids=["split", "pending, with gradients"])
@pytest.mark.parametrize("write", GIVEN_BACK)
def test_an_argument_that_a_graph_writes_to_and_returns_is_that_argument(write, sbp, asks):
    if asks and write == "out=":
        pytest.skip("torch has no gradients for out=")

    def program(f, *leaves_):
        x, y = (t * 1 for t in leaves_)
        given = torch.utils._pytree.tree_leaves(f(x, y))
        same = [(t is x, t is y) for t in given]
        if asks:
            sum(t.square().sum() for t in given).backward()
        with torch.no_grad():
            given[0].add_(3)
        return same, leaves([x, y, given, [t.grad for t in leaves_ if t.grad is not None]])

    operands = [X, X + 1]
    want = program(GIVEN_BACK[write], *(t.clone().requires_grad_(asks) for t in operands))
    got = program(compiled(GIVEN_BACK[write]), *(gt.from_full(t, TWO, sbp).requires_grad_(asks) for t in operands))
    assert got[0] == want[0]
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sbp", [S(0), B], ids=str)
def test_a_buffer_and_a_parameter_that_a_graph_writes_to_and_returns_are_those_of_the_module(sbp):
    module, x, y = gt.to_global(Counts(X), TWO, sbp), gt.from_full(X + 1, TWO, sbp), gt.ones(2, placement=TWO, sbp=B)
    seen, weight, same = compiled(module)(x, y)
    assert seen is module.seen and weight is module.weight and same is y
    torch.testing.assert_close(leaves([seen.add_(1), module.weight.detach()]), [X + X + 1 + 1, X * 2])


@pytest.mark.parametrize("after", [lambda y, got: got, lambda y, got: y * got], ids=["not used", "used"])
def test_a_write_to_an_activation_that_a_graph_has_saved_is_an_error_as_in_plain_torch(after):
    for x, b in [(X.clone(), X + 1), [gt.from_full(t, TWO, S(0)) for t in (X, X + 1)]]:
        torch.compiler.reset()
        f = torch.compile(lambda y, b: y.mul_(b).sin(), backend="aot_eager")
        y = x.requires_grad_() * 2
        given = after(y, f(y, b.requires_grad_())).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            given.backward()


def test_what_torch_guesses_of_gradients_is_ours_in_graphs_of_global_tensors_only():
    config = torch._functorch.config
    for x, ours in [(X, False), (gt.from_full(X, TWO, S(0)), True), (X, False)]:
        torch.compiler.reset()
        torch.compile(lambda y: y * 2, backend="aot_eager")(x)
        assert config.disable_guess_zero_tangent_for_mutated_input_subclass == ours


STRIDED = {
    "strided": lambda x: x.as_strided((2, 3), (6, 1)) * 2, "with an offset": lambda x: x.as_strided((2,), (7,), 2) * 2,
    "copy": lambda x: torch.as_strided_copy(x, (3, 2), (1, 6)),
}


@pytest.mark.parametrize("sbp", [S(0), S(1)], ids=str)
@pytest.mark.parametrize("name", STRIDED)
def test_a_graph_speaks_of_the_memory_of_what_it_takes(name, sbp):
    same_as_plain(STRIDED[name], [X], [sbp], TWO)


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "grad of grad": lambda f: torch.func.grad(lambda x: torch.func.grad(lambda y: f(y).sum())(x).square().sum()),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](f(x))[0],
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": torch.func.jacrev, "vmap": lambda f: torch.func.vmap(f, in_dims=1)}


def written(index, value):
    def f(x):
        y = x * 2
        y[index] = value(y)
        return y.square()
    return f


SLICED = {
    "rows": lambda x: x[1:].square(), "row": lambda x: x[2].sin(), "chunk": lambda x: x.chunk(3, 0)[1].exp(),
    "flip": lambda x: x.flip(0)[1:].square(), "ravel": lambda x: x.reshape(-1)[1:].square(),
    "write": written(0, lambda y: 1.0), "write to rows": written(slice(1, None), lambda y: y[1:] * 3),
    "rows over others": written(slice(1, 3), lambda y: y[0:2].clone())}


@pytest.mark.sample(6)
@pytest.mark.parametrize("where", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("sliced", SLICED)
def test_slices_and_writes_through_views_in_a_transform_of_torch_func(sliced, transform, where):
    f = TRANSFORMS[transform](SLICED[sliced])
    got = leaves(compiled(f)(gt.from_full(X, where, S(0))))
    torch.testing.assert_close(got, leaves(f(X)), rtol=1e-5, atol=1e-6)
