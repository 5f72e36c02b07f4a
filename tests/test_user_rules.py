"""Rules that users give: `gt.rule` and `gt.rules.check`, for ops that are ours here and nobody's elsewhere."""
from __future__ import annotations

import itertools

import pytest
import torch
from shards import gather, scatter, states

import globaltensor as gt

B, P, S = gt.sbp.broadcast, gt.sbp.partial_sum, gt.sbp.split
SEED = 20261122
print(f"tests/test_user_rules.py: seed {SEED}")
GENERATOR = torch.Generator().manual_seed(SEED)
_numbers = itertools.count()


def make(function, *, fake=None):
    """A custom op of a name that no test has used."""
    op = torch.library.custom_op(f"gt_test::op{next(_numbers)}", function, mutates_args=())
    if fake is not None:
        op.register_fake(fake)
    return op


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


def row_norms(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.norm(dim=1), (x > 0).sum(1)


def plus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Always of four rows: the kernel of a stranger, whose rule does not fit it."""
    return torch.cat([x.sum(1)] * 4)[:4]


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)


# function, fake kernel, operands, dims, algebra
OPS = {
    "pointwise": (twice, torch.empty_like, [(5, 3)], "b* -> b*", "a"),
    "pointwise without a fake kernel": (twice, None, [(5, 3)], "i j -> i j", "a"),
    "a product": (product, lambda x, y: x.new_empty(x.shape[0], y.shape[1]), [(5, 4), (4, 3)], "m k, k n -> m n",
                  "a*b"),
    "a product without a fake kernel": (product, None, [(5, 4), (4, 3)], "m k, k n -> m n", "a*b"),
    "two results": (row_norms, lambda x: (x.new_empty(x.shape[0]), x.new_empty(x.shape[0], dtype=torch.int64)),
                    [(5, 3)], "i j! -> i, i", "A;A"),
    "two results without a fake kernel": (row_norms, None, [(5, 3)], "i j! -> i, i", "A;A"),
}


@pytest.mark.parametrize("name", OPS)
def test_every_layout_gives_what_plain_torch_gives(name):
    function, fake, shapes, dims, algebra = OPS[name]
    op = make(function, fake=fake)
    gt.rule(op, dims, algebra)
    gt.rules.check(op, [tuple(draw(*shape) for shape in shapes)])
    where, generator = gt.placement("cpu", [2, 0, 1]), torch.Generator().manual_seed(SEED)
    full = [draw(*shape) for shape in shapes]
    want = function(*full)
    for nd in itertools.product(*[states(t.dim()) for t in full]):
        got = op(*[scatter(t, where, (s,), generator) for t, s in zip(full, nd)])
        for g, w in zip(*[r if isinstance(r, tuple) else (r,) for r in (got, want)]):
            assert g.shape == w.shape and g.dtype == w.dtype
            torch.testing.assert_close(gather(g), w, msg=lambda m, nd=nd: f"{name} of {nd}: {m}")


def test_a_rule_spares_the_boxing_before_and_after_the_first_call():
    op, where = make(twice, fake=torch.empty_like), gt.placement("cpu", [0, 1])
    x = gt.from_full(draw(4, 3), where, S(0))
    for expected, sbp in ((48, (B,)), (0, (S(0),))):
        for _ in range(3):                           # the third call is the native dispatcher's
            with gt.record() as moves:
                y = op(x)
            assert (sum(move.bytes for move in moves), y.sbp) == (expected, sbp)
        gt.rule(op, "i j -> i j", "a")
    gt.rule(op, "i j! -> i j!", "a")                 # a user may correct a rule
    assert op(gt.from_full(draw(4, 3), where, S(1))).sbp == (S(0),)


def test_gradients_are_those_of_plain_torch():
    op = make(product)
    op.register_autograd(lambda ctx, g: (g @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ g),
                         setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    gt.rule(op, "m k, k n -> m n", "a*b")
    full = [draw(5, 4).requires_grad_(), draw(4, 3).requires_grad_()]
    op(*full).square().sum().backward()
    where = gt.placement("cpu", [0, 1])
    own = [gt.from_full(t.detach(), where, s).requires_grad_() for t, s in zip(full, (S(1), S(0)))]
    y = op(*own)
    assert y.sbp == (P,)
    y.square().sum().backward()
    for x, t in zip(own, full):
        torch.testing.assert_close(x.grad.full_tensor(), t.grad)


@pytest.mark.parametrize("fake", [lambda x, y: torch.empty_like(x), None], ids=["a fake kernel", "none"])
def test_an_operand_that_is_repeated_is_not_cut_there(fake):
    op = make(plus, fake=fake)
    gt.rule(op, "i j, i j -> i j", "a+b")
    x, where = draw(5, 4), gt.placement("cpu", [0, 1, 2])
    for shape, x_sbp, y_sbp in itertools.product([(5, 1), (1, 4), (1, 1)], states(2), states(2)):
        y = draw(*shape)
        z = op(scatter(x, where, (x_sbp,), GENERATOR), scatter(y, where, (y_sbp,), GENERATOR))
        torch.testing.assert_close(gather(z), x + y)


def test_a_kernel_that_returns_something_else_than_its_rule_says_is_an_error():
    op = make(row_sums, fake=lambda x: x.new_empty(x.shape[0]))
    gt.rule(op, "i j -> i", "a")
    assert gather(op(gt.from_full(draw(4, 3), gt.placement("cpu", [0, 1]), S(1)))).shape == (4,)
    with pytest.raises(gt.RuleError, match=r"on rank 0 returned .* \[4\].*says of shape \[2\]") as caught:
        op(gt.from_full(draw(4, 3), gt.placement("cpu", [0, 1]), S(0)))
    assert caught.value.where.startswith("tests/test_user_rules.py:") and "gt.rules.check" in caught.value.fix


def test_check_finds_unsound_rules_and_names_what_is_missing():
    op, samples = make(row_norms), [(draw(6, 4),), (draw(5, 3),)]
    for dims, algebra in (("i j -> i, i", "A;A"), ("i j! -> i, i", "a;a")):
        gt.rule(op, dims, algebra)
        with pytest.raises(gt.RuleError, match="unsound"):
            gt.rules.check(op, samples)
    gt.rule(op, "i! j! -> i!, i!", "A;A")
    assert gt.rules.check(op, samples).missing == ("S(0) -> S(0), S(0)",)
    gt.rule(op, "i j! -> i, i", "A;A")
    verdict = gt.rules.check(op, samples)
    assert not verdict.missing and "S(0) -> S(0), S(0)" in verdict.sound and "3 ranks" not in str(verdict)


def test_names_and_packets_are_ops_too():
    op = make(twice)
    name = f"gt_test::op{next(_numbers) - 1}"
    gt.rule(name, "b* -> b*", "a")
    gt.rule(getattr(torch.ops.gt_test, name.split("::")[1]), "b* -> b*", "a")
    x = gt.from_full(draw(4, 3), gt.placement("cpu", [0, 1]), S(1))
    assert op(x).sbp == (S(1),)


def from_nowhere(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.new_zeros(n)


def of_sixteen(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 16)[:, 0]


def in_a_list(xs: list[torch.Tensor]) -> torch.Tensor:
    return xs[0].clone()


WRONG = {
    "not an op": (lambda: gt.rule(print, "i -> i"), "not an op"),
    "an unknown name": (lambda: gt.rule("gt_test::no_such", "i -> i"), "not an op: 'gt_test::no_such'"),
    "several overloads": (lambda: gt.rule(torch.ops.aten.add, "i, i -> i"), "overloads"),
    "an op of the table": (lambda: gt.rule(torch.ops.aten.mm.default, "m k, k n -> m n"), "has a line in the table"),
    "an op of others": (lambda: gt.rule(torch.ops.aten.einsum.default, "i -> i"), "needs no rule"),
    "a write": (lambda: gt.rule(torch.ops.aten.logit_.default, "i -> i"), "writes into its operands"),
    "a list": (lambda: gt.rule(make(in_a_list), "i -> i"), "takes a list"),
    "too few operands": (lambda: gt.rule(make(product), "i -> i"), "1 operands"),
    "too many results": (lambda: gt.rule(make(product), "i k, k j -> i j, i"), "2 results"),
    "a strange sum": (lambda: gt.rule(make(product), "i k, k j -> i j", "a*b", leaves="mean"), "leaves='mean'"),
    "nothing to check": (lambda: gt.rules.check(make(twice), [(draw(2),)]), "has no rule to check"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_told(name):
    mistake, what = WRONG[name]
    with pytest.raises(gt.RuleError, match=what) as caught:
        mistake()
    assert caught.value.where.startswith("tests/test_user_rules.py:")


@pytest.mark.parametrize("function, dims, rest, shape", [(from_nowhere, "i -> n!", (3,), (4,)),
                                                          (of_sixteen, "(b k) -> b", (), (32,))])
def test_shapes_that_the_rule_does_not_tell_ask_for_a_fake_kernel(function, dims, rest, shape):
    op = make(function)
    gt.rule(op, dims, "A")
    x = gt.from_full(draw(*shape), gt.placement("cpu", [0, 1]), B)
    with pytest.raises(gt.RuleError, match="no fake kernel") as caught:
        op(x, *rest)
    assert f'register_fake("{op._opoverload._schema.name}")' in caught.value.fix


@pytest.mark.parametrize("ruled", [False, True])
def test_an_op_that_is_defined_anew_is_the_new_one(ruled):
    """As by a cell of a notebook that is run again: torch keeps the op's place in memory."""
    where = gt.placement("cpu", [0, 1])
    x = draw(4, 3)
    name = f"gt_test::op{next(_numbers)}"
    for times, scale in ((64, 1), (1, 2), (1, 3), (2, 3)):
        op = torch.library.custom_op(name, lambda x, times=times, scale=scale: torch.cat([scale * x] * times),
                                     mutates_args=(), schema="(Tensor x) -> Tensor")
        op.register_fake(lambda x, times=times: x.new_empty(times * x.shape[0], *x.shape[1:]))
        if ruled and times == 1:
            gt.rule(op, "i j -> i j", "a")
        for rows in (4, 4, 8):                       # the same call, and one by a sibling
            own = draw(rows, 3)
            y = op(gt.from_full(own, where, S(0)))
            assert y.shape == op(own).shape
            torch.testing.assert_close(y.to_global(sbp=S(0)).full_tensor(), op(own), rtol=0, atol=0)
        assert op(gt.from_full(x, where, B)).sbp == (B,)
