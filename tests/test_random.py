"""Random ops against their oracle: what one rank that holds the whole tensor gets, to the last bit, for every layout;
and against the distributions that torch promises.

Each value is made once from a seed on one rank and once from the same seed on each layout. The seed is printed at the
top of the run (set RANDOM_SEED for it). Statistical bounds hold for all but about one seed in 10**6.
"""
from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys

import numpy
import pytest
import torch
from scipy import stats
from torch import nn
from torch.distributions import Multinomial, MultivariateNormal
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import globaltensor as gt
from globaltensor.algorithms.random_ops import _exp
from globaltensor.layouts.sbp import broadcast, partial_max, partial_sum, split
from globaltensor.runtime import philox

SEED = int(os.environ.get("RANDOM_SEED") or 20_261_121)
print(f"tests/test_random.py: RANDOM_SEED={SEED}")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ONE = gt.placement("cpu", [0])
LINE = [gt.placement("cpu", ranks) for ranks in ([1, 0], [0, 1, 2], [3, 1, 0, 2])]
SQUARE = [gt.placement("cpu", ranks) for ranks in ([[0, 1], [2, 3]], [[3, 1], [0, 2]])]


def layouts(ndim):
    """Every sbp on every placement above."""
    states = [*map(split, range(ndim)), broadcast, partial_sum]
    return [(p, sbp) for places, axes in ((LINE, 1), (SQUARE, 2)) for p in places
            for sbp in itertools.product(states, repeat=axes)]


def some(ndim, count):
    """A sample of them, drawn from the seed."""
    return random.Random(SEED).sample(layouts(ndim), count)


def empty(shape, place, sbp, dtype):
    return gt.empty(shape, placement=place, sbp=sbp, dtype=dtype)


def whole(value):
    return value.full_tensor() if value.is_global else value


def check(make, ndim, where=None):
    """`make(placement, sbp)` has the same bits wherever it lies, and leaves torch's generator in the same state."""
    torch.manual_seed(SEED)
    expected, state = whole(make(ONE, broadcast)), torch.get_rng_state()
    for place, sbp in where or layouts(ndim):
        torch.manual_seed(SEED)
        found = whole(make(place, sbp))
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert torch.equal(found, expected), f"RANDOM_SEED={SEED}: {place} {sbp}"
        assert torch.equal(torch.get_rng_state(), state), f"{place} {sbp}: another number of keys was drawn"


# ------------------------------------------------------------------------------------------- the same everywhere

FILLS = {
    "uniform_": lambda x: x.uniform_(-2, 3),
    "normal_": lambda x: x.normal_(1, 2),
    "exponential_": lambda x: x.exponential_(1.5),
    "log_normal_": lambda x: x.log_normal_(0.1, 0.5),
    "cauchy_": lambda x: x.cauchy_(1, 2),
    "geometric_": lambda x: x.geometric_(0.2),
    "random_": lambda x: x.random_(),
    "random_ to": lambda x: x.random_(100),
    "random_ from": lambda x: x.random_(-5, 100),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ plain p": lambda x: x.bernoulli_(torch.linspace(0, 1, x.shape[-1])),
    "bernoulli_ global p": lambda x: x.bernoulli_(torch.rand_like(x)),
}
MAKERS = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "rand_like, a dtype": lambda x: torch.rand_like(x, dtype=F64),
    "randint_like": lambda x: torch.randint_like(x, 3, 10),
    "randint_like of a tensor": lambda x: torch.randint_like(x, gt.tensor(9, placement=x.placement, sbp=broadcast)),
    "bernoulli": lambda x: torch.bernoulli(x.uniform_()),
    "bernoulli p": lambda x: torch.bernoulli(x, 0.2),
    "bernoulli out": lambda x: torch.bernoulli(x.uniform_(), out=torch.empty_like(x)),
    "normal of mean and std": lambda x: torch.normal(x.normal_(), torch.rand_like(x)),
    "normal of mean": lambda x: torch.normal(x.normal_(), 2.0),
    "normal of std": lambda x: torch.normal(3.0, x.uniform_()),
    "normal, broadcast": lambda x: torch.normal(x.normal_(), torch.ones(x.shape[-1], dtype=x.dtype)),
    "normal, plain mean": lambda x: torch.normal(torch.ones(x.shape[-1], dtype=x.dtype), x.uniform_()),
    "native_dropout": lambda x: torch.native_dropout(x.fill_(1), 0.3, True)[0],
    "its mask": lambda x: torch.native_dropout(x, 0.3, None)[1],
    "rrelu": lambda x: F.rrelu(x.normal_(), training=True),
    "rrelu_": lambda x: F.rrelu(x.normal_(), training=True, inplace=True),
    "dropout": lambda x: F.dropout(x.normal_(), 0.3),
    "dropout_": lambda x: F.dropout(x.normal_(), 0.3, inplace=True),
    "dropout of all": lambda x: F.dropout(x.normal_(), 1.0),
    "alpha_dropout": lambda x: F.alpha_dropout(x.normal_(), 0.3, training=True),
    "dropout1d": lambda x: F.dropout1d(x.normal_(), 0.5),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.normal_(), 0.5, training=True),
    "multinomial": lambda x: torch.multinomial(x.uniform_(0.1, 1), 2),
    "poisson": lambda x: torch.poisson(x.uniform_(0, 9)),
    "a view": lambda x: x.t().uniform_(),
    "two keys": lambda x: torch.stack([x.normal_(), torch.rand_like(x)]),
}
PROGRAMS = {**FILLS, **MAKERS}
every_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


@pytest.mark.sample(4)
@every_program
def test_every_layout(program):
    check(lambda place, sbp: program(empty((7, 5), place, sbp, F32)), 2)


@pytest.mark.parametrize("sample", [
    lambda x: Multinomial(3, x.uniform_(0.1, 1)).sample((2,)),
    lambda x: MultivariateNormal(x.zero_(), torch.eye(5)).sample((3,)),
], ids=["multinomial", "multivariate normal"])
def test_samples_of_distributions(sample):
    check(lambda place, sbp: sample(empty((7, 5), place, sbp, F32)), 2)


@pytest.mark.sample(3)
@every_program
@pytest.mark.parametrize("dtype", [F64, BF16, F16], ids=str)
def test_every_dtype(program, dtype):
    check(lambda place, sbp: program(empty((4, 3), place, sbp, dtype)), 2, some(2, 8))


@every_program
def test_empty_shards(program):
    check(lambda place, sbp: program(empty((3, 2), place, sbp, F32)), 2, [
        (LINE[2], (split(0),)), (LINE[2], (split(1),)), (SQUARE[1], (split(0), split(0))),
        (SQUARE[1], (split(1), split(0))), (SQUARE[1], (partial_sum, split(1)))])


@every_program
def test_each_op_draws_a_key(program):
    torch.manual_seed(SEED)
    first, second = (whole(program(empty((9, 8), LINE[1], split(0), F32))) for _ in range(2))
    assert not torch.equal(first, second) or program is MAKERS["dropout of all"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.int64, torch.complex64], ids=str)
def test_other_dtypes(dtype):
    names = ["uniform_", "normal_", "rand_like", "randn_like"] if dtype.is_complex else ["random_", "bernoulli_"]
    for name in names:
        check(lambda place, sbp: PROGRAMS[name](empty((7, 5), place, sbp, dtype)), 2, some(2, 10))


@pytest.mark.parametrize("shape", [(), (9,), (2, 0, 3), (3, 2, 5, 2)], ids=str)
def test_every_number_of_dims(shape):
    for program in (FILLS["normal_"], torch.rand_like, FILLS["bernoulli_ global p"] if shape else torch.randn_like):
        check(lambda place, sbp: program(empty(shape, place, sbp, F32)), len(shape), some(len(shape), 3))


FACTORIES = {
    "rand": lambda **at: gt.rand(7, 5, **at),
    "randn": lambda **at: gt.randn((7, 5), dtype=F64, **at),
    "randn half": lambda **at: gt.randn(7, 5, dtype=BF16, **at),
    "normal": lambda **at: gt.normal(1.0, 2.0, (7, 5), **at),
    "randint": lambda **at: gt.randint(-3, 100, (7, 5), **at),
    "randperm": lambda **at: gt.randperm(35, **at),
    "bernoulli": lambda **at: gt.bernoulli(gt.rand(7, 5, **at)),
}


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_factories(factory):
    ndim = 1 if factory is FACTORIES["randperm"] else 2
    check(lambda place, sbp: factory(placement=place, sbp=sbp), ndim)


def test_the_numbers_of_a_factory_depend_on_what_its_page_says():
    """One number of the generator a call; row-major places, not shapes; the dtype only rounds."""
    at = {"placement": LINE[1], "sbp": split(0)}

    def made(factory, *args, **more):
        torch.manual_seed(SEED)
        return whole(factory(*args, **more, **at))

    for factory in (gt.rand, gt.randn, lambda *size, **more: gt.randint(100, size, **more)):
        torch.testing.assert_close(made(factory, 6, 4).flatten(), made(factory, 24), rtol=0, atol=0)
    for factory in (gt.rand, gt.randn):
        for dtype in (F32, F16, BF16):
            rounding = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(made(factory, 9, dtype=F64), made(factory, 9, dtype=dtype).double(),
                                       rtol=rounding, atol=rounding)
    assert torch.equal(made(lambda **more: gt.randint(100, (9,), dtype=F32, **more)).long(),
                       made(lambda **more: gt.randint(100, (9,), **more)))
    torch.testing.assert_close(made(gt.normal, 1.0, 2.0, (9,)), made(gt.randn, 9) * 2 + 1)
    states = []
    for size in (1, 1000):
        made(gt.rand, size)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert not torch.equal(made(gt.rand, 9), torch.rand(9, generator=torch.Generator().manual_seed(SEED)))


INITS = {
    "uniform_": nn.init.uniform_, "normal_": nn.init.normal_, "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_, "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_, "trunc_normal_": nn.init.trunc_normal_,
    "trunc_normal_, a tail": lambda x: nn.init.trunc_normal_(x, 0, 1, 1.5, 2.0), "orthogonal_": nn.init.orthogonal_,
    "eye_": nn.init.eye_, "constant_": lambda x: nn.init.constant_(x, 3.0), "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_, "sparse_": lambda x: nn.init.sparse_(x, 0.4),
}


@pytest.mark.parametrize("init", INITS.values(), ids=INITS)
def test_init(init):
    def make(place, sbp):
        weight = nn.Parameter(empty((7, 5), place, sbp, F32))
        init(weight)
        return weight.detach()

    check(make, 2, some(2, 24))


def test_modules():
    """A module that initialises itself on plain tensors, then on global ones."""
    def make(place, sbp):
        layer = gt.to_global(nn.Linear(5, 7), place, {"weight": sbp, "bias": broadcast})
        layer.reset_parameters()
        return torch.cat([layer.weight.detach().flatten(), layer.bias.detach()])

    check(make, 2, some(2, 6))


def test_values_are_those_of_the_kernels():
    """Nothing stands between an element and its function of key and index."""
    region = ((0, 7), (0, 5))
    torch.manual_seed(SEED)
    first, second = philox.draw_key(), philox.draw_key()
    torch.manual_seed(SEED)
    x = empty((7, 5), LINE[1], split(0), F64).uniform_(-2, 3)
    assert torch.equal(whole(x), philox.uniform(first, (7, 5), region, F64, "cpu", -2, 3))
    assert torch.equal(whole(torch.randn_like(x)), philox.normal(second, (7, 5), region, F64, "cpu"))


# --------------------------------------------------------------------------------------------- dropout in networks


def test_dropout_backward():
    """The gradient goes where the value went; fused (as on GPUs) or not; a pending sum stays pending."""
    def plain(x):
        return F.dropout(x, 0.3)

    def fused(x):
        return torch.native_dropout(x, 0.3, True)[0]

    for drop in (plain, fused):
        def make(place, sbp, drop=drop):
            x = empty((7, 5), place, sbp, F64).normal_().requires_grad_()
            y = drop(x)
            assert y.sbp == x.sbp
            y.square().sum().backward()
            grad, y = x.grad.full_tensor(), y.detach().full_tensor()
            assert torch.equal(grad != 0, y != 0) and torch.allclose(grad, 2 * y / 0.7)
            return torch.stack([y, grad])

        check(make, 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_recomputed(reentrant):
    def make(place, sbp, again):
        x = empty((8, 6), place, sbp, F64).normal_().requires_grad_()

        def block(t):
            return F.dropout(F.dropout(t, 0.5).exp(), 0.2)

        y = checkpoint(block, x, use_reentrant=reentrant) if again else block(x)
        after = torch.get_rng_state()
        (y * y).sum().backward()
        assert torch.equal(torch.get_rng_state(), after)
        return torch.stack([y.detach(), x.grad])

    for place, sbp in some(2, 10):
        torch.manual_seed(SEED)
        kept = whole(make(place, sbp, False))
        torch.manual_seed(SEED)
        assert torch.equal(whole(make(place, sbp, True)), kept)
    check(lambda place, sbp: make(place, sbp, True), 2, [at for at in some(2, 16) if partial_sum not in at[1]])


def close(make, where):
    """Values up to the rounding of reordered sums: the same elements are dropped."""
    torch.manual_seed(SEED)
    expected = [whole(t) for t in make(ONE, broadcast)]
    for place, sbp in where:
        torch.manual_seed(SEED)
        for found, right in zip(make(place, sbp), expected):
            torch.testing.assert_close(whole(found), right, rtol=1e-9, atol=1e-9, msg=f"{SEED} {place} {sbp}")


def test_attention_dropout():
    def make(place, sbp):
        q, k, v = (gt.randn(4, 3, 6, 4, placement=place, sbp=sbp, dtype=F64).requires_grad_() for _ in range(3))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        y.square().sum().backward()
        return y.detach(), q.grad, k.grad, v.grad

    close(make, some(4, 12))


def test_transformer_layer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True, dtype=F64)
    values = {name: t.detach().clone() for name, t in layer.state_dict().items()}

    def make(place, sbp):
        mine = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True, dtype=F64)
        mine.load_state_dict(values)
        torch.manual_seed(SEED)
        gt.to_global(mine, place, broadcast)
        x = gt.randn(4, 5, 8, placement=place, sbp=sbp, dtype=F64)
        y = mine(x)
        y.square().mean().backward()
        return y.detach(), *[p.grad for p in mine.parameters()]

    close(make, [(LINE[0], split(0)), (LINE[1], split(0)), (LINE[2], split(1)), (LINE[0], split(2)),
                 (LINE[1], partial_sum), (SQUARE[1], (split(0), split(1))), (SQUARE[0], (split(0), broadcast))])


# -------------------------------------------------------------------------------------------- the state of torch's


def test_two_ops_differ_and_seeds_reproduce():
    x = empty((64, 8), LINE[2], split(0), F32)
    torch.manual_seed(SEED)
    first, second = whole(torch.rand_like(x)), whole(torch.rand_like(x))
    assert (first == second).sum() < 3
    torch.manual_seed(SEED)
    assert torch.equal(whole(torch.rand_like(x)), first)
    state = torch.get_rng_state()
    assert torch.equal(whole(torch.rand_like(x)), second)
    torch.set_rng_state(state)
    assert torch.equal(whole(torch.rand_like(x)), second)
    torch.set_rng_state(state)
    with torch.random.fork_rng():
        F.dropout(x)
    assert torch.equal(whole(x.uniform_()), second)
    gt.manual_seed(SEED)
    assert torch.equal(whole(gt.rand(64, 8, placement=SQUARE[1], sbp=(split(1), broadcast))), first)


@pytest.mark.parametrize("draw", [
    lambda x, g: x.normal_(generator=g), lambda x, g: torch.bernoulli(x, 0.5, generator=g),
    lambda x, g: torch.normal(x.zero_(), 1.0, generator=g), lambda x, g: torch.multinomial(x.fill_(1), 2, generator=g),
    lambda x, g: torch.poisson(x.fill_(5), g), lambda x, g: torch.poisson(x.fill_(5), generator=g),
    lambda x, g: torch.ops.aten.randint_like.Tensor_generator(x, torch.tensor(99), generator=g),
    lambda x, g: torch.ops.aten.rand_like.generator(x, generator=g),
    lambda x, g: nn.init.xavier_normal_(x, generator=g)])
def test_a_generator_of_ones_own(draw):
    def make(place, sbp):
        mine = torch.Generator().manual_seed(SEED)
        first = whole(draw(empty((7, 5), place, sbp, F32), mine))
        assert not torch.equal(whole(draw(empty((7, 5), place, sbp, F32), mine)), first)
        return first

    before = torch.get_rng_state()
    expected = make(ONE, broadcast)
    for place, sbp in some(2, 6):
        assert torch.equal(make(place, sbp), expected)
    assert torch.equal(torch.get_rng_state(), before)


# ----------------------------------------------------------------------------------------------- what is written to


def test_shards_keep_their_memory_and_views():
    for place, sbp in layouts(2):
        x = empty((4, 4), place, sbp, F32).zero_()
        flat, memory = x.t(), {rank: t.data_ptr() for rank, t in x.shards.items()}
        version = x._version
        assert x.normal_() is x and x._version > version
        assert {rank: t.data_ptr() for rank, t in x.shards.items()} == memory
        assert torch.equal(whole(flat).t(), whole(x)) and whole(x).ne(0).all()


def test_a_pending_sum_has_its_value_on_the_first_rank():
    x = empty((4, 5), SQUARE[1], (partial_sum, split(0)), F32).uniform_(1, 2)
    assert [bool(x.shards[r].any()) for r in (3, 1, 0, 2)] == [True, True, False, False]
    x = empty((4, 5), LINE[0], partial_max, F32).uniform_(-2, -1)
    assert torch.equal(x.shards[0], x.shards[1]) and (whole(x) < -0.9).all()


def test_nothing_is_sent():
    x = empty((7, 5), LINE[1], split(0), F32)
    with gt.boxing("forbid"):
        F.dropout(torch.rand_like(x).normal_().bernoulli_(torch.full((5,), 0.5)), 0.1)
        torch.native_dropout(empty((7, 5), LINE[1], partial_sum, F32).normal_(), 0.5, True)


def test_mistakes():
    """torch's own errors, and no number drawn wrongly."""
    x = empty((4, 4), LINE[0], split(0), F32)
    wrong = {
        "normal expects std": lambda: x.normal_(0, -1), "std >= 0": lambda: torch.normal(x, x.fill_(-1)),
        "but found std -1\n": lambda: torch.normal(x, -1.0),
        "all elements of std": lambda: torch.normal(x, x.fill_(math.nan)),
        r"from=3\.?0? > to=2|from.*to": lambda: x.uniform_(3, 2), "p_in >= 0|p.*in": lambda: x.bernoulli_(1.5),
        "not implemented for 'Int'": lambda: empty((4,), LINE[0], split(0), torch.int32).normal_(),
        "0, 1": lambda: x.bernoulli_(torch.full((4,), 2.0))}
    for message, mistake in wrong.items():
        with pytest.raises((RuntimeError, NotImplementedError), match=message):
            mistake()
    with pytest.raises(RuntimeError, match="p_in"):  # by what a global tensor says, into a plain one
        torch.zeros(4, 4).bernoulli_(x.fill_(-1))


INFINITE = {
    "exponential": lambda x: x.exponential_(math.inf), "exponential of a rate beyond the dtype":
        lambda x: x.exponential_(1e60 if x.dtype == F32 else math.inf),
    "cauchy around inf": lambda x: x.cauchy_(math.inf, 1), "cauchy around -inf": lambda x: x.cauchy_(-math.inf, 1),
    "cauchy of infinite width": lambda x: x.cauchy_(0, math.inf).abs_(),
}


@pytest.mark.parametrize("name", INFINITE)
def test_infinite_parameters(name):
    for dtype in (F32, F64):
        made = INFINITE[name](empty((5,), LINE[0], split(0), dtype))
        assert torch.equal(whole(made), INFINITE[name](torch.empty(5, dtype=dtype)))


# ------------------------------------------------------------------------------------------------------ statistics

N = 2**16


def sample(program, dtype=F32):
    """What dispatch makes on four ranks, and each rank's part of it."""
    torch.manual_seed(SEED)
    x = program(empty((N,), LINE[2], split(0), dtype))
    return whole(x).double().numpy(), [x.shards[r].double().numpy() for r in (3, 1, 0, 2)]


CONTINUOUS = {
    "uniform_": (lambda x: x.uniform_(-2, 3), stats.uniform(-2, 5)),
    "normal_": (lambda x: x.normal_(1, 2), stats.norm(1, 2)),
    "exponential_": (lambda x: x.exponential_(1.5), stats.expon(scale=1 / 1.5)),
    "log_normal_": (lambda x: x.log_normal_(0.1, 0.5), stats.lognorm(0.5, scale=math.exp(0.1))),
    "cauchy_": (lambda x: x.cauchy_(1, 2), stats.cauchy(1, 2)),
    "rand_like": (torch.rand_like, stats.uniform()),
    "randn_like": (torch.randn_like, stats.norm()),
    "normal": (lambda x: torch.normal(x.fill_(3), torch.full((), 2.0)), stats.norm(3, 2)),
}
DISCRETE = {
    "bernoulli_": (lambda x: x.bernoulli_(0.3), stats.bernoulli(0.3)),
    "bernoulli": (lambda x: torch.bernoulli(x.fill_(0.9)), stats.bernoulli(0.9)),
    "geometric_": (lambda x: x.geometric_(0.2), stats.geom(0.2)),
    "randint_like": (lambda x: torch.randint_like(x, 3, 20), stats.randint(3, 20)),
    "random_": (lambda x: x.random_(-8, 9), stats.randint(-8, 9)),
    "poisson": (lambda x: torch.poisson(x.fill_(4.0)), stats.poisson(4.0)),
}


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_distributions(name, dtype):
    program, right = CONTINUOUS[name]
    values, parts = sample(program, dtype)
    assert min(stats.kstest(v, right.cdf).pvalue for v in (values, *parts)) > 1e-7, f"RANDOM_SEED={SEED}"
    if name != "cauchy_":
        assert abs(values.mean() - right.mean()) < 5 * right.std() / math.sqrt(N)
        assert abs(values.std() / right.std() - 1) < 0.05
    assert len(numpy.unique(values)) > 0.99 * N


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_distributions(name):
    program, right = DISCRETE[name]
    values, _ = sample(program)
    assert (values == values.round()).all()
    points = numpy.arange(right.ppf(1e-3), right.ppf(0.999) + 1)
    seen = numpy.array([(values == k).sum() for k in points])
    seen, expected = numpy.append(seen, N - seen.sum()), N * numpy.append(right.pmf(points), 0)
    expected[-1] = N - expected[:-1].sum()
    inside = expected > 5
    assert seen[~inside].sum() < 60
    assert stats.chisquare(seen[inside], expected[inside] * seen[inside].sum() / expected[inside].sum()
                           ).pvalue > 1e-7, f"RANDOM_SEED={SEED}"


def test_shards_and_ops_are_independent():
    """Between the shards of a tensor, consecutive ops, and ops of seeds that follow each other."""
    torch.manual_seed(SEED)
    x = empty((N,), LINE[2], split(0), F32)
    ops = [whole(x.normal_()).clone() for _ in range(4)]
    for k in range(4):
        torch.manual_seed(SEED + 1 + k)
        ops.append(whole(torch.randn_like(x)))
    rows = torch.cat([t.view(4, -1) for t in ops]).numpy()                 # every shard of every op
    off = numpy.corrcoef(rows) - numpy.eye(len(rows))
    assert abs(off).max() < 6 / math.sqrt(rows.shape[1]), f"RANDOM_SEED={SEED}"
    shifted = numpy.corrcoef(rows[:, 1:].ravel(), rows[:, :-1].ravel())[0, 1]
    assert abs(shifted) < 6 / math.sqrt(rows.size)


def test_dropout_rate():
    for p in (0.1, 0.5, 0.9):
        torch.manual_seed(SEED)
        y = whole(F.dropout(gt.ones(N, placement=LINE[2], sbp=split(0)), p))
        kept = (y != 0).double()
        assert abs(kept.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / N)
        assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - p)))
        runs = (kept[1:] - kept.mean()) @ (kept[:-1] - kept.mean()) / N / (p * (1 - p))
        assert abs(runs) < 5 / math.sqrt(N)


def test_exp():
    """log_normal's own exp, against NumPy in the next wider precision."""
    for dtype, wide, ends in ((F32, numpy.float64, (-110.0, 95.0)), (F64, numpy.longdouble, (-760.0, 720.0))):
        x = torch.linspace(*ends, 40_001, dtype=dtype)
        found, least = _exp(x).numpy(), torch.finfo(dtype).smallest_normal
        with numpy.errstate(over="ignore"):
            right = numpy.exp(x.numpy().astype(wide)).astype(found.dtype)
        normal = (right >= least) & numpy.isfinite(right)
        assert (abs(found[normal] - right[normal]) <= 2 * numpy.spacing(right[normal])).all()
        assert numpy.isinf(found[-1]) and found[0] == 0 and (found[right < least] <= least).all()


# -------------------------------------------------------------------------------------------------- real processes

PROGRAM = """
import torch, globaltensor as gt
from torch.nn import functional as F
gt.init(ranks=3)
torch.manual_seed(5)
for ranks in ([0, 1, 2], [2, 1], [1]):
    P = gt.placement("cpu", ranks)
    for sbp in (gt.sbp.split(0), gt.sbp.broadcast, gt.sbp.partial_sum):
        x = gt.randn(7, 5, placement=P, sbp=sbp)
        for y in (x, F.dropout(x), x.uniform_(), torch.poisson(x), torch.multinomial(x, 2), torch.randint_like(x, 99)):
            y = y.full_tensor().double()
            if gt.rank() == 0:
                print([v.hex() for v in y.flatten().tolist()])
"""


@pytest.mark.processes
def test_processes_get_what_one_process_gets(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    port = str(random.randrange(20_000, 60_000))
    of_ranks = [{"RANK": str(r), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} for r in range(3)]
    started = [subprocess.Popen([sys.executable, str(program)], text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, env={**clean, **more}) for more in ({}, *of_ranks)]
    said = [process.communicate(timeout=120) for process in started]
    assert all(process.returncode == 0 for process in started), said
    assert said[0][0] == said[1][0]
