"""Counter-based randomness against its oracles: the published vectors, one uncut tensor, and the distribution.

Every statistical test has a fixed key, so that it passes or fails for good; its bounds hold for all but about one key
in 10**4. The examples hypothesis draws are those of the seed printed at the top of the run (set KERNELS_SEED for it).
"""
from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch
from hypothesis import given, seed, settings, strategies
from scipy import stats

from globaltensor.errors import GlobalTensorError
from globaltensor.runtime import philox

SEED = int(os.environ.get("KERNELS_SEED") or 20_261_121)
print(f"tests/test_philox.py: KERNELS_SEED={SEED}")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
KEY = 0x0123456789ABCDEF
Shape, Region = tuple[int, ...], tuple[tuple[int, int], ...]
Sample = Callable[[int, Shape, Region], torch.Tensor]


def words(key: int, shape: Shape, region: Region) -> torch.Tensor:
    return philox.random_words(key, shape, region, "cpu")


def sampler(function: Callable[..., torch.Tensor], dtype: torch.dtype, *args: float) -> Sample:
    return lambda key, shape, region: function(key, shape, region, dtype, "cpu", *args)


SAMPLERS: dict[str, Sample] = {"words": words, "permuted words": lambda *a: philox.random_words(*a, "cpu", stream=7)}
for name, dtype in {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}.items():
    SAMPLERS[f"uniform {name}"] = sampler(philox.uniform, dtype, -2.5, 1.7)
    SAMPLERS[f"normal {name}"] = sampler(philox.normal, dtype, 0.3, 1.7)
    SAMPLERS[f"exponential {name}"] = sampler(philox.exponential, dtype, 0.7)
SAMPLERS |= {
    "integers": sampler(philox.integers, torch.int32, -3, 1000),
    "integers 96 bits": sampler(philox.integers, torch.int64, -(2**63), 2**63 - 1),
    "bernoulli": sampler(philox.bernoulli, torch.bool, 0.3),
    "bernoulli tensor": lambda key, shape, region: philox.bernoulli(
        key, shape, region, F32, "cpu", whole(sampler(philox.uniform, F64), 5, shape)[slices(region)]),
}
every_sampler = pytest.mark.parametrize("sample", SAMPLERS.values(), ids=SAMPLERS)


def whole(sample: Sample, key: int, shape: Shape) -> torch.Tensor:
    return sample(key, shape, tuple((0, n) for n in shape))


def slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(*edges) for edges in region)


def draw(function: Callable[..., torch.Tensor], n: int, dtype: torch.dtype, *args: float,
         key: int = KEY) -> torch.Tensor:
    return whole(sampler(function, dtype, *args), key, (n,))


def expect_equal(found: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    """Bit for bit, NaN and the sign of 0 included."""
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (found, expected))
    if not torch.equal(a, b):
        at = (a != b).nonzero()[:, 0].div(found.element_size(), rounding_mode="floor").unique().tolist()
        pytest.fail(f"{what}: {len(at)} of {found.numel()} differ, first at {at[0]}: "
                    f"{found.reshape(-1)[at[0]].item()!r} for {expected.reshape(-1)[at[0]].item()!r}")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a shared machine make this file ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with philox.twin():                             # this file is about the twin
        yield
    torch.set_num_threads(before)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "_PIECE", {"cpu": 3})


# ------------------------------------------------------------------ the hash
@pytest.mark.parametrize("counter, key, expected", [  # Random123's kat_vectors, "philox4x32 10"
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
])
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    def parse(text: str) -> list[int]:
        return [int(word, 16) for word in text.split()]

    low, high = parse(key)
    for n in (1, 5, 100):  # vectorised and not
        found = philox.philox(torch.tensor(parse(counter))[:, None].repeat(1, n), high << 32 | low)
        expect_equal(found, torch.tensor(parse(expected))[:, None].repeat(1, n), n)


def philox_of_integers(counter: list[int], key: int) -> list[int]:
    """The paper's definition, in Python's integers."""
    c0, c1, c2, c3 = counter
    key0, key1 = key % 2**32, key >> 32
    for _ in range(10):
        product0, product2 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (product2 >> 32) ^ c1 ^ key0, product2 % 2**32, (product0 >> 32) ^ c3 ^ key1, product0 % 2**32
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


@pytest.mark.parametrize("stream", [0, 1, 2**32 - 1])
@pytest.mark.parametrize("shape, region", [
    ((), ()), ((1,), ((0, 1),)), ((11,), ((3, 9),)), ((2**40, 3), ((2**40 - 2, 2**40), (1, 3))),
    ((2**20, 2**20, 2**20), ((2**20 - 1, 2**20), (17, 19), (2**20 - 2, 2**20))), ((5, 7), ((1, 4), (2, 3))),
    ((2**34 + 3,), ((2**34 - 5, 2**34 + 2),)),  # the block counter's low word wraps within the run
])
def test_words_are_the_documented_function_of_the_index(shape: Shape, region: Region, stream: int) -> None:
    expected = []
    for position in numpy.ndindex(*(b - a for a, b in region)):
        index = 0
        for n, at, (start, _) in zip(shape, position, region):
            index = index * n + start + at
        expected.append(philox_of_integers([index // 4 % 2**32, index // 4 >> 32, stream, 0], KEY)[index % 4])
    found = philox.random_words(KEY, shape, region, "cpu", stream)
    expect_equal(found, torch.tensor(expected).view(found.shape))


# ------------------------------------------------------------------ cuts
@pytest.mark.sample(4)
@every_sampler
@pytest.mark.parametrize("n", [1, 3, 8, 17, 31, 33, 64, 129])
def test_every_cut_of_a_vector(sample: Sample, n: int) -> None:
    expected = whole(sample, KEY, (n,))
    for cut in range(n + 1):
        expect_equal(torch.cat([sample(KEY, (n,), ((0, cut),)), sample(KEY, (n,), ((cut, n),))]), expected, cut)


@every_sampler
def test_many_cuts_of_a_long_vector(sample: Sample) -> None:
    """Longer than a piece: 2**15 elements and some; cut next to multiples of every vector width and of the piece."""
    n, edge = 2**16 + 37, 2**15
    assert edge == 4 * philox._PIECE["cpu"]
    expected = whole(sample, KEY, (n,))
    for cut in (1, 8, 13, 33, 4097, edge - 4, edge - 1, edge, edge + 1):
        expect_equal(torch.cat([sample(KEY, (n,), ((0, cut),)), sample(KEY, (n,), ((cut, n),))]), expected, cut)
    for width in (1, 7, 8, 9, 16, 31, 64, 100):
        for start in range(0, 700, 97):
            expect_equal(sample(KEY, (n,), ((start, start + width),)), expected[start : start + width], (start, width))


@pytest.mark.sample(3)
@every_sampler
@pytest.mark.parametrize("shape", [(5, 7), (6, 8), (3, 1, 5), (2, 3, 4, 5), (1, 1), (4, 4, 4), (33, 17)])
def test_splits_over_every_dim(sample: Sample, shape: Shape) -> None:
    expected = whole(sample, KEY, shape)
    for dim, n in enumerate(shape):
        for parts in (2, 3, n, n + 2):  # the last leaves empty shards
            edges = [min(n, i * -(-n // parts)) for i in range(parts + 1)]
            regions = [tuple(edge if d == dim else (0, size) for d, size in enumerate(shape))
                     for edge in zip(edges, edges[1:])]
            expect_equal(torch.cat([sample(KEY, shape, region) for region in regions], dim), expected, (dim, parts))


@strategies.composite
def shapes_and_regions(make: Callable) -> tuple[Shape, Region]:
    shape = tuple(make(strategies.lists(strategies.integers(0, 9), max_size=4)))
    return shape, tuple(tuple(sorted(make(strategies.integers(0, n)) for _ in range(2))) for n in shape)


@seed(SEED)
@settings(max_examples=400, deadline=None, database=None)
@given(shapes_and_regions(), strategies.integers(0, 2**64 - 1), strategies.sampled_from(sorted(SAMPLERS)),
       strategies.integers(1, 20))
def test_any_region(shape_and_region: tuple[Shape, Region], key: int, name: str, piece: int) -> None:
    shape, region = shape_and_region
    expected = whole(SAMPLERS[name], key, shape)[slices(region)]
    before, philox._PIECE = philox._PIECE, {"cpu": piece}
    try:
        expect_equal(SAMPLERS[name](key, shape, region), expected, f"KERNELS_SEED={SEED}")
    finally:
        philox._PIECE = before


@every_sampler
def test_the_piece_does_not_matter(sample: Sample, small_pieces: None) -> None:
    for shape, region in (((100,), ((1, 99),)), ((9, 40), ((0, 9), (3, 38))), ((50, 3), ((7, 50), (1, 2)))):
        small = sample(KEY, shape, region)
        philox._PIECE["cpu"] = 2**14
        expect_equal(small, sample(KEY, shape, region))
        philox._PIECE["cpu"] = 3


def digest_of_all() -> str:
    samples = [whole(sample, KEY, (131, 33)) for sample in SAMPLERS.values()]
    return hashlib.sha256(b"".join(x.view(-1).view(torch.uint8).numpy().tobytes() for x in samples)).hexdigest()


def test_instruction_sets_and_threads_do_not_matter() -> None:
    """torch's own log, exp and sqrt fail this: MKL's AVX2 and AVX512 versions round differently."""
    command = [sys.executable, "-c", "import sys; sys.path[:0] = ['.', 'tests']; import test_philox as t; "
                                     "print(t.digest_of_all())"]
    children = [subprocess.Popen(command, env=os.environ | extra, stdout=subprocess.PIPE, text=True) for extra in (
        {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "OMP_NUM_THREADS": "3"},
        {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "1"})]
    assert [child.communicate(timeout=60)[0].split()[-1] for child in children] == [digest_of_all()] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("shape, region", [((1000, 37), ((0, 1000), (3, 20))), ((300001,), ((1, 300001),))])
def test_the_device_does_not_matter(shape: Shape, region: Region) -> None:
    for dtype in (F16, BF16, F32, F64):
        for function in (philox.uniform, philox.normal, philox.exponential):
            expect_equal(function(KEY, shape, region, dtype, "cuda").cpu(), function(KEY, shape, region, dtype, "cpu"),
                         (function, dtype))
    expect_equal(philox.integers(KEY, shape, region, torch.int64, "cuda", -5, 2**50).cpu(),
                 philox.integers(KEY, shape, region, torch.int64, "cpu", -5, 2**50))
    expect_equal(philox.permutation(KEY, 10**5, "cuda").cpu(), philox.permutation(KEY, 10**5, "cpu"))


def test_a_small_box_of_a_huge_tensor_is_quick_and_a_meta_tensor_free() -> None:
    region = ((2**30 - 1, 2**30), (5, 7), (0, 2**20))
    assert philox.normal(KEY, (2**30, 8, 2**20), region, F32, "cpu").shape == (1, 2, 2**20)
    assert philox.normal(KEY, (2**20, 2**31), ((0, 2**20), (0, 2**30)), F32, "meta").shape == (2**20, 2**30)


# ------------------------------------------------------------------ arithmetic
@pytest.mark.parametrize("dtype, step", [(F32, 2.0**-23), (F64, 2.0**-52)])
def test_log_sqrt_and_circle_are_accurate(dtype: torch.dtype, step: float) -> None:
    u = draw(philox.uniform, 200_000, F64)
    x = torch.cat([u, u * 1e-3, u * 1e-8, 1 - u * 1e-4, torch.tensor([1.0, 0.5, 2.0**-53, 2.0**-32])])[u[0] > 2:]
    x = x[x > 2.0**-60].to(dtype)
    wide = x.numpy().astype(numpy.longdouble)

    def error(found: torch.Tensor, expected: numpy.ndarray) -> float:
        scale = numpy.maximum(abs(expected), numpy.finfo(numpy.float64).tiny)
        return float((abs(found.numpy().astype(numpy.longdouble) - expected) / scale).max() / step)

    assert error(philox._log(x), numpy.log(wide)) < 2
    assert error(philox._sqrt(x), numpy.sqrt(wide)) < 2
    assert philox._sqrt(torch.tensor([0.0, -0.0], dtype=dtype)).abs().tolist() == [0, 0]
    assert philox._log(torch.ones(1, dtype=dtype)).item() == 0
    bits = 32 if dtype is F32 else 53
    turn = words(KEY, (100_000,), ((0, 100_000),)) << bits - 32
    cos, sin = philox._cos_sin(turn, bits, dtype)
    angle = ((turn & (1 << bits - 2) - 1).double() - 2.0 ** (bits - 3) + 0.5) * 2.0 ** (2 - bits) * math.pi / 2
    sign, swap = 1 - 2 * (turn >> bits - 2 & 1), (turn >> bits - 1).bool()
    expected = sign * angle.cos(), angle.sin()
    assert (torch.where(swap, sin, cos).double() - expected[0]).abs().max() < step
    assert (torch.where(swap, cos, sin).double() - expected[1]).abs().max() < step


EXTREME = torch.tensor([0, 1, 2**7, 2**8 - 1, 2**29, 2**31, 2**32 - 1])  # 2**29: the angle 0


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_extreme_words_give_numbers_in_range(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash replaced by its extremes, which no test would live to see otherwise."""
    chance = torch.Generator().manual_seed(0)
    monkeypatch.setattr(philox, "philox", lambda counter, key: counter.copy_(
        EXTREME[torch.randint(len(EXTREME), counter.shape, generator=chance)]))
    for low, high in ((0, 1), (-2.5, 1.7), (1, 1.01), (0.1, 0.3), (-1e-3, 0), (1000, 1001), (3, 3), (-30000, 30000)):
        x = draw(philox.uniform, 9000, dtype, low, high)
        low_, high_ = torch.tensor([low, high], dtype=dtype)
        assert (x >= low_).all() and ((x < high_).all() if low_ < high_ else (x == low_).all()), (low, high)
    assert draw(philox.uniform, 9000, dtype).min() == 0
    z = draw(philox.normal, 9000, dtype)
    assert z.isfinite().all() and (8.5 < z.abs().max() < 8.6 if dtype is F64 else 6.6 < z.abs().max() < 6.7)
    e = draw(philox.exponential, 9000, dtype, 2.0)
    assert e.isfinite().all() and e.min() == (2.0**-55 if dtype is F64 else max(2.0**-26, 2.0**-24 * (dtype is F16)))
    assert e.max() == torch.tensor((53 if dtype is F64 else 32) * math.log(2) / 2, dtype=dtype)
    assert (draw(philox.exponential, 9000, dtype, 1e30) > 0).all()
    for p in (0.0, 2.0**-33, 2.0**-32, 1.0):
        x, shaped = draw(philox.bernoulli, 9000, dtype, p), torch.full((9000,), p, dtype=F64)
        assert (x == p).all() if p in (0, 1) else 0.1 < x.float().mean() < 0.2  # a word of 0, one in seven
        shaped = philox.bernoulli(KEY, (9000,), ((0, 9000),), dtype, "cpu", shaped)
        assert (shaped == p).all() if p in (0, 1) else 0.1 < shaped.float().mean() < 0.2
    for low, high in ((0, 1), (-5, 2), (-128, 128)):
        i = draw(philox.integers, 9000, dtype, low, high)
        assert i.min() == low and i.max() == high - 1


@pytest.mark.parametrize("call", [
    lambda: draw(philox.uniform, 3, torch.int64), lambda: draw(philox.uniform, 3, F32, 2.0, 1.0),
    lambda: draw(philox.uniform, 3, F64, -1e308, 1e308), lambda: draw(philox.uniform, 3, F32, 0.0, math.nan),
    lambda: draw(philox.normal, 3, torch.int64), lambda: draw(philox.normal, 3, F32, 0.0, -1.0),
    lambda: draw(philox.exponential, 3, F32, 0.0), lambda: draw(philox.bernoulli, 3, F32, 1.5),
    lambda: philox.bernoulli(1, (2,), ((0, 2),), F32, "cpu", torch.tensor([0.5, math.nan])),
    lambda: draw(philox.integers, 3, torch.int64, 3, 3), lambda: draw(philox.integers, 3, torch.uint8, -1, 3),
    lambda: draw(philox.integers, 3, torch.uint8, 0, 257), lambda: draw(philox.integers, 3, F16, 0, 70000),
    lambda: draw(philox.integers, 3, torch.complex64, 0, 3),
])
def test_impossible_arguments_raise(call: Callable[[], object]) -> None:
    with pytest.raises(GlobalTensorError):
        call()


# ------------------------------------------------------------------ distributions
N = 400_000
LIKELY = 1e-4  # a p value below this fails


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("function, args, law", [
    (philox.uniform, (-2.0, 3.0), stats.uniform(-2, 5)), (philox.normal, (1.0, 2.0), stats.norm(1, 2)),
    (philox.exponential, (0.5,), stats.expon(scale=2)),
], ids=["uniform", "normal", "exponential"])
def test_kolmogorov_smirnov_and_moments(function: Callable[..., torch.Tensor], args: tuple[float, ...],
                                        law: stats.rv_continuous, dtype: torch.dtype) -> None:
    for key in (0, 1, KEY, 2**64 - 1):
        x = draw(function, N, dtype, *args, key=key).double()
        assert stats.kstest(x[: N // 4].numpy(), law.cdf).pvalue > LIKELY, key
        z = (x - law.mean()) / law.std()
        skew, excess = (float(m) for m in law.stats("sk"))
        sixth, eighth = (law.expect(lambda t, k=k: ((t - law.mean()) / law.std()) ** k) for k in (6, 8))
        for k, expected, variance in ((1, 0, 1), (2, 1, excess + 2), (3, skew, sixth - skew**2),
                                      (4, excess + 3, eighth - (excess + 3) ** 2)):
            assert abs((z**k).mean() - expected) < 4.5 * math.sqrt(variance / N), (key, k)


@pytest.mark.parametrize("dtype, values", [(F16, 2**11), (BF16, 2**8)])
def test_halves_take_all_their_values_equally(dtype: torch.dtype, values: int) -> None:
    x = draw(philox.uniform, N, dtype).double() * values
    assert (x == x.floor()).all()
    assert stats.chisquare(torch.bincount(x.long(), minlength=values)).pvalue > LIKELY
    z = draw(philox.normal, N, dtype).double()
    assert abs(z.mean()) < 4.5 / math.sqrt(N) and abs(z.var() - 1) < 4.5 * math.sqrt(2 / N)


def test_float64_fills_its_mantissa() -> None:
    x = draw(philox.uniform, 1000, F64) * 2.0**53
    assert (x == x.floor()).all() and {int(v) % 2 for v in x.tolist()} == {0, 1}
    assert len(set(draw(philox.normal, N, F64).tolist())) == N


@pytest.mark.parametrize("low, high, dtype", [
    (0, 2, torch.bool), (-3, 7, torch.int64), (0, 1000, torch.int32), (-128, 128, torch.int8), (0, 256, torch.uint8),
    (-5, 6, F32), (0, 2**16, torch.int32), (-(2**63), 2**63, torch.int64), (0, 2**64, torch.uint64),
    (-(2**61), 2**62, torch.int64), (-7, 2**33, torch.int64), (2**62, 2**63, torch.int64), (0, 3 * 2**62, torch.uint64),
])
def test_integers_are_uniform(low: int, high: int, dtype: torch.dtype) -> None:
    values = draw(philox.integers, N, dtype, low, high).numpy().astype(object)
    offsets = [int(v) - low for v in values]
    assert 0 <= min(offsets) and max(offsets) < high - low
    bins = min(high - low, 1000)
    edges = [-(-(high - low) * i // bins) for i in range(bins + 1)]
    counts = numpy.bincount([v * bins // (high - low) for v in offsets], minlength=bins)
    assert stats.chisquare(counts, N * numpy.diff(edges).astype(float) / (high - low)).pvalue > LIKELY
    if high - low >= 1000:  # the low digits too: of 3 * 2**62 values, 64 bits would give every third twice as often
        counts = numpy.bincount([v % 24 for v in offsets], minlength=24)
        share = [(high - low + 23 - digit) // 24 / (high - low) for digit in range(24)]
        assert stats.chisquare(counts, N * numpy.array(share) / sum(share)).pvalue > LIKELY


@pytest.mark.parametrize("span", [1, 3, 1000, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 3 * 2**62 + 12345, 2**64])
def test_integers_are_the_documented_function_of_the_words(span: int) -> None:
    n, low, streams = 300, -(2**63), 2 if span <= 2**32 else 3
    digits = [philox.random_words(KEY, (n,), ((0, n),), "cpu", stream).tolist() for stream in range(streams)]
    fractions = [sum(digit << 32 * (streams - 1 - i) for i, digit in enumerate(row)) for row in zip(*digits)]
    found = draw(philox.integers, n, torch.int64, low, low + span)
    assert found.tolist() == [low + (span * fraction >> 32 * streams) for fraction in fractions]


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.5, 0.9])
def test_bernoulli(p: float) -> None:
    x = draw(philox.bernoulli, N, torch.bool, p)
    assert abs(x.double().mean() - p) < 4.5 * math.sqrt(p * (1 - p) / N)
    for dtype in (torch.bool, F32, BF16, torch.int64):
        expect_equal(philox.bernoulli(KEY, (N,), ((0, N),), dtype, "cpu", torch.full((N,), p, dtype=F64)), x.to(dtype))


def test_permutation() -> None:
    for n in (0, 1, 2, 7, 1000):
        assert sorted(philox.permutation(KEY, n, "cpu").tolist()) == list(range(n))
    counts: dict[tuple[int, ...], int] = {}
    for key in range(2400):
        order = tuple(philox.permutation(key, 4, "cpu").tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24 and stats.chisquare(list(counts.values())).pvalue > LIKELY
    order = philox.permutation(KEY, 10**5, "cpu").double()
    assert abs(correlation(order, torch.arange(10**5).double())) < 4.5 / math.sqrt(10**5)


# ------------------------------------------------------------------ independence
def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()


def neighbours(function: Callable[..., torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    n = 100_000
    x = draw(function, 2 * n, F32)
    yield "the shards of two ranks", x[:n], x[n:]
    for lag in (1, 2, 3, 4, 8):
        yield f"elements {lag} apart", x[:n], x[lag : n + lag]
    for key in (1, 1 << 32, 1 << 63):
        yield f"keys that differ by {key:#x}", x[:n], draw(function, n, F32, key=KEY ^ key)
    yield "a key and the next", x[:n], draw(function, n, F32, key=KEY + 1)


@pytest.mark.parametrize("function", [philox.uniform, philox.normal])
def test_nothing_is_correlated(function: Callable[..., torch.Tensor]) -> None:
    for what, a, b in neighbours(function):
        mean = a.mean()
        for power in (1, 2):  # of squares too: the pairs of Box and Muller share a radius
            found = correlation((a - mean) ** power, (b - mean) ** power)
            assert abs(found) < 4.5 / math.sqrt(len(a)), (what, power, found)


def test_streams_bits_and_keys_are_independent() -> None:
    n = 20_000
    rows = [philox.random_words(key, (n,), ((0, n),), "cpu", stream) for key in (0, 1, 2, 3) for stream in (0, 1)]
    bits = torch.stack([row >> b & 1 for row in rows for b in range(32)]).float()  # [8 * 32, n]
    matrix = torch.corrcoef(bits).fill_diagonal_(0)
    assert matrix.abs().max() < 5.5 / math.sqrt(n)  # 32,640 pairs
    assert (bits.mean(1) - 0.5).abs().max() < 4.5 * 0.5 / math.sqrt(n)
    assert len(set(torch.cat(rows).tolist())) > 0.999 * len(rows) * n
