"""Random numbers that depend on a key and on an element's global index, and on nothing else.

A generator with a state hands out numbers in the order in which they are asked for; cut the tensor differently, and
every element gets another number. A *counter-based* generator has no state: it is a hash. Element `i` (row-major, in
the global shape) of a random op with key `k` is a function f(k, i), which each rank evaluates for its own elements:

    block i // 4          philox(counter = (block low, block high, stream, 0), key)  ->  4 words of 32 bits
    element i             word i % 4 of its block; normals are made in pairs, both of the same block

The hash is Philox4x32-10: ten rounds of two 32 x 32 -> 64 bit products whose high halves are mixed with the key. It
passes BigCrush; torch's CUDA generator and TensorFlow use it too. Source: Salmon, Moraes, Dror, Shaw, "Parallel Random
Numbers: As Easy as 1, 2, 3", SC'11. `stream` numbers the words of an element that needs more than 32 bits.

**Bitwise the same for every cut, instruction set and device.** Hashing integers is exact; the log, cos and even sqrt
of torch are not (MKL's, on CPU, give other last bits with AVX2 than with AVX512). So floats here go only through what
IEEE 754 defines to the last bit: + - * /, conversions, comparisons, bits. Each is one torch op, so that no compiler
contracts two of them; `_log`, `_sqrt` and `_cos_sin` are built of these. Known limits: float32 normals end at |z| =
6.66, float64 ones at 8.57; a compiler that fuses these ops anew (inductor on a GPU) may still contract.

A region is a tuple of (start, stop), one per dim of the global shape. Work is done in pieces that fit the cache: memory
beyond the result is a few MB (on a GPU, some 200 MB), whatever the global shape.

**This file is the reference.** csrc/philox does the same where it was built, on CPU 20 times as fast, and on devices
where it passed a self-test (device_kernels.py): every op here hands its checked parameters to the native function, and
to its own `make` where there is none.
"""
from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL, c_char_p, c_double, c_int, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from globaltensor.errors import GlobalTensorError
from globaltensor.layouts.layout import Shape
from globaltensor.layouts.regions import Region
from globaltensor.runtime import lineage
from globaltensor.runtime.device_kernels import kernel_verdict, kernels_that_pass
from globaltensor.runtime.native import core_lib
from globaltensor.runtime.torch_internals import compiling, num_dispatch_modes, without_fake_mode

Device = torch.device | str
_MASK = 0xFFFFFFFF
# Blocks worked on at a time. CPU: the scratch fits an L2 cache of 1 MB, and no op has more than the 2**15 elements
# from which torch uses threads, since a hundred barriers a piece cost up to 100 times the work where cores are shared.
_PIECE = {"cpu": 2**13}
_PIECE_ELSEWHERE = 2**20  # on a GPU the launches, not the cache, set the size
# dtype -> the dtype it is computed in, bits of its significand, random bits that go into a logarithm or an angle
_FLOATS = {torch.float64: (torch.float64, 53, 53), torch.float32: (torch.float32, 24, 32),
           torch.float16: (torch.float32, 11, 32), torch.bfloat16: (torch.float32, 8, 32)}
# dtype -> integer of its size, where the exponent begins, the bits of sqrt(1/2), the constant of `_sqrt`
_BITS = {torch.float32: (torch.int32, 23, 0x3F3504F3, 0x5F375A86),
         torch.float64: (torch.int64, 52, 0x3FE6A09E667F3BCD, 0x5FE6EB50C7B537A9)}
# as csrc/kernels/region.h counts them; integers modulo 2**n are the same with a sign and without
_CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3, torch.int8: 4, torch.int16: 5,
          torch.int32: 6, torch.int64: 7, torch.uint8: 8, torch.bool: 9, torch.complex64: 10, torch.uint16: 5,
          torch.uint32: 6, torch.uint64: 7}


# ------------------------------------------------------------------ the native twin
def _bind(library: CDLL | None) -> dict[str, Any]:
    """law -> its function of csrc/philox/fill.h; empty without the native code, or where it is too old to have it."""
    functions = {}
    laws: dict[str, list[Any]] = {"words": [c_uint64], "uniform": 3 * [c_double], "normal": 2 * [c_double],
                                  "exponential": 2 * [c_double], "integers": 3 * [c_uint64], "bernoulli": [c_uint64]}
    for law, parameters in laws.items():
        if function := getattr(library, f"gt_fill_{law}", None):
            function.argtypes, function.restype = [c_void_p, c_int, c_uint64, c_int, c_char_p, *parameters], c_int
            functions[law] = function
    return functions


_laws = _bind(core_lib)
_in_twin = False


@contextmanager
def twin() -> Iterator[None]:
    """The torch ops below instead of native code, as where that is not built."""
    global _in_twin
    before, _in_twin = _in_twin, True
    try:
        yield
    finally:
        _in_twin = before


def _filled_natively(out: Tensor, key: int, shape: Shape, region: Region, law: str, *parameters: float) -> bool:
    """Did native code fill the region? Not while a mode traces: it would see a tensor that nobody fills."""
    on_cpu = out.device.type == "cpu"
    if _in_twin or (on_cpu and law not in _laws) or num_dispatch_modes() or compiling():
        return False
    if not on_cpu and law not in kernels_that_pass(out.device):
        return False
    numbers = struct.pack(f"{3 * len(shape)}q", *shape, *[edge for edges in region for edge in edges])
    code = _CODES.get(out.dtype, -1)
    if on_cpu:
        return not _laws[law](out.data_ptr(), code, key, len(shape), numbers, *parameters)
    verdict = kernel_verdict(out.device)
    return verdict is not None and verdict.library.fill(verdict.device.index, law, out, code, key, numbers, parameters)


# ------------------------------------------------------------------ words
def philox(counter: Tensor, key: int) -> Tensor:
    """Philox4x32-10 in place: `counter` [4, n], int64 that hold 32-bit words, becomes [4, n] random 32-bit words.

    `key` is 64 bits, the low word first. A product of two 32-bit words fills an int64 to the sign; what is above 32
    bits in c1 and c3 does no harm until c0 and c2 are made of them, so that only these two are masked in each round.
    """
    c0, c1, c2, c3 = counter
    product0, product2 = torch.empty_like(c0), torch.empty_like(c2)
    key0, key1 = key & _MASK, key >> 32 & _MASK
    for _ in range(10):
        torch.mul(c0, 0xD2511F53, out=product0)
        torch.mul(c2, 0xCD9E8D57, out=product2)
        torch.bitwise_right_shift(product2, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(key0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(product0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(key1).bitwise_and_(_MASK)
        c1, product2, c3, product0 = product2, c1, product0, c3  # ten swaps: all end where they began
        key0, key1 = key0 + 0x9E3779B9 & _MASK, key1 + 0xBB67AE85 & _MASK
    return counter.bitwise_and_(_MASK)


def _generate(key: int, shape: Shape, region: Region, dtype: torch.dtype, device: Device,
              streams: Sequence[int], make: Callable[[Tensor], Tensor], law: tuple[Any, ...]) -> Tensor:
    """The region of `make(words [streams, 4, n]) -> values [4, n]`, a column per block; natively of (law, *parameters).

    The region consists of runs of `length` elements that are contiguous in the global tensor: trailing whole dims and
    the dim before them merge into one. A piece is some runs, or a part of one; it generates the blocks that cover each
    run (1 + (length + 2) // 4 at most) and takes from them the words that it needs.
    """
    assert len(region) == len(shape) and all(0 <= a <= b <= n for n, (a, b) in zip(shape, region)), (shape, region)
    out = torch.empty([b - a for a, b in region], dtype=dtype, device=device)
    if not out.numel() or out.is_meta or _filled_natively(out, key, shape, region, *law):
        return out
    length, base, stride, whole, outer = 1, 0, 1, True, []  # outer: (size, stride), the innermost first
    for n, (a, b) in zip(reversed(shape), reversed(region)):
        if whole:
            length *= b - a
        elif b - a > 1:
            outer.append((b - a, stride))
        base, stride, whole = base + a * stride, stride * n, whole and b - a == n
    runs = out.view(-1, length)
    same_phase = all(stride % 4 == 0 for _, stride in outer)  # all rows start at the same word of a block
    piece = _PIECE.get(out.device.type, _PIECE_ELSEWHERE)
    columns = min(length, 4 * piece)
    rows = max(1, 4 * piece // (columns + 3))
    for row in range(0, len(runs), rows):
        index = torch.arange(row, min(row + rows, len(runs)), device=device)[:, None]
        first = torch.full_like(index, base)
        for size, stride in outer:
            first += index % size * stride
            index.div_(size, rounding_mode="floor")
        for column in range(0, length, columns):
            target = runs[row : row + rows, column : column + columns]  # [r, w]
            start, width = first + column, target.shape[1]  # [r, 1]
            phase = (base + column) % 4 if same_phase else 3
            blocks = (start >> 2) + torch.arange((phase + width + 3) // 4, device=device)  # [r, blocks of a row]
            words = torch.empty(len(streams), 4, blocks.numel(), dtype=torch.int64, device=device)
            for stream, counter in zip(streams, words):
                torch.bitwise_and(blocks.view(-1), _MASK, out=counter[0])
                torch.bitwise_right_shift(blocks.view(-1), 32, out=counter[1])
                counter[2], counter[3] = stream, 0
                philox(counter, key)
            values = make(words).view(4, *blocks.shape).permute(1, 2, 0).reshape(len(target), -1)  # [r, 4 blocks]
            if same_phase:
                target.copy_(values[:, phase : phase + width])
            else:
                target.copy_(values.gather(1, (start & 3) + torch.arange(width, device=device)))
    return out


def random_words(key: int, shape: Shape, region: Region, device: Device, stream: int = 0) -> Tensor:
    """32 random bits for each element of the region, as int64 in [0, 2**32). `key` 64 bits, `stream` 32 bits."""
    return _generate(key, shape, region, torch.int64, device, (stream,), lambda words: words[0], ("words", stream))


def _top(words: Tensor, bits: int) -> Tensor:
    """The first `bits` (at most 53) of each element's words [1 or 2, 4, n], which it overwrites: [4, n]."""
    if bits <= 32:
        return words[0].bitwise_right_shift_(32 - bits)
    return words[0].bitwise_left_shift_(bits - 32).bitwise_or_(words[1].bitwise_right_shift_(64 - bits))


# ------------------------------------------------------------------ arithmetic, exact to the bit
def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Horner's rule; the coefficient of the highest power first."""
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result.mul_(x).add_(coefficient)
    return result


def _log(x: Tensor) -> Tensor:
    """log of normal numbers > 0, within 2 ulp.

    x = 2**e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); with s = f / (2 + f), log(1 + f) = 2 atanh(s) = 2s + s**3 (2/3
    + 2/5 s**2 + ...). As in fdlibm's e_log.c it is summed as f - (f**2/2 - s (f**2/2 + R)), whose first term is exact.
    """
    integer, shift, sqrt_half, _ = _BITS[x.dtype]
    bits = x.view(integer)
    exponent = (bits - sqrt_half).bitwise_right_shift_(shift)
    f = (bits - (exponent << shift)).view(x.dtype).sub_(1)
    s, half_square = f / (f + 2), (f * f).mul_(0.5)
    z = s * s
    powers = 4 if x.dtype is torch.float32 else 10
    tail = _polynomial(z, [2 / (2 * k + 1) for k in range(powers, 0, -1)]).mul_(z)
    return f.sub_(half_square.sub_(s.mul_(tail.add_(half_square)))).add_(exponent.to(x.dtype).mul_(math.log(2)))


def _sqrt(x: Tensor) -> Tensor:
    """Square root of numbers that are 0 or normal, within 3 ulp: x / sqrt(x) by Newton's iteration for 1 / sqrt(x)."""
    integer, _, _, magic = _BITS[x.dtype]
    inverse = (x.view(integer) >> 1).neg_().add_(magic).view(x.dtype)  # right to 4%: halves the exponent, negated
    half = x * -0.5
    for _ in range(3 if x.dtype is torch.float32 else 4):
        inverse.mul_((half * inverse).mul_(inverse).add_(1.5))
    return inverse.mul_(x)


def _cos_sin(turn: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A uniformly distributed point on the unit circle from `bits` random bits.

    One bit chooses the sign of x, one whether x and y change places; the rest is an angle in (-pi/4, pi/4), where few
    terms of Taylor's series are enough.
    """
    rest = 1 << bits - 2
    angle = (turn & rest - 1).mul_(2).add_(1 - rest).to(dtype).mul_(math.pi / 4 / rest)
    z = angle * angle
    terms = 5 if dtype is torch.float32 else 9
    cos = _polynomial(z, [(-1) ** k / math.factorial(2 * k) for k in range(terms, -1, -1)])
    sin = _polynomial(z, [(-1) ** k / math.factorial(2 * k + 1) for k in range(terms, -1, -1)]).mul_(angle)
    cos.mul_((turn >> bits - 2).bitwise_and_(1).mul_(-2).add_(1))
    swap = (turn >> bits - 1).bool()
    return torch.where(swap, sin, cos), torch.where(swap, cos, sin)


# ------------------------------------------------------------------ distributions
def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise GlobalTensorError(what)


def _float(what: str, dtype: torch.dtype) -> tuple[torch.dtype, int, int]:
    if dtype not in _FLOATS:
        raise GlobalTensorError(f"{what} is made for dtypes {', '.join(map(str, _FLOATS))}, got {dtype}")
    return _FLOATS[dtype]


def pairs(shape: Shape, region: Region, dtype: torch.dtype) -> tuple[Shape, Region, torch.dtype]:
    """Two real numbers for each complex one: element i is made of numbers 2 i and 2 i + 1."""
    return (*shape, 2), (*region, (0, 2)), dtype.to_real()


@lru_cache
def _bounds(dtype: torch.dtype, low: float, high: float) -> tuple[float, float, float]:
    """Both rounded to `dtype`, and its number below `high`."""
    bounds = torch.tensor([low, high], dtype=dtype, device="cpu")
    return *bounds.tolist(), torch.nextafter(bounds[1], bounds[0]).item()


def uniform(key: int, shape: Shape, region: Region, dtype: torch.dtype, device: Device,
            low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform in [low, high), both first rounded to `dtype`: low + (high - low) n / 2**b, with n of as many bits b as
    the significand has. Never `high` (unless low == high). Error: low > high, or `dtype` cannot hold high - low.
    Complex: both parts of a number."""
    if dtype.is_complex:
        return torch.view_as_complex(uniform(key, *pairs(shape, region, dtype), device, low, high))
    arithmetic, bits, _ = _float("uniform", dtype)
    start, end, below = _bounds(dtype, float(low), float(high))
    _demand(start <= end and end - start <= torch.finfo(dtype).max, f"uniform of dtype {dtype} needs low <= high "
            f"and a high - low that it holds, got [{low}, {high})")
    return _generate(key, shape, region, dtype, device, range(bits // 33 + 1), lambda words: _top(words, bits)
                     .to(arithmetic).mul_(2.0**-bits).mul_(end - start).add_(start).clamp_max_(below),
                     ("uniform", start, end - start, below))


def normal(key: int, shape: Shape, region: Region, dtype: torch.dtype, device: Device,
           mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Normal, by Box and Muller (1958): sqrt(-2 log u) (cos a, sin a), u in (0, 1] and a from words 0, 2 and 1, 3 of
    a block. float64 takes 53 bits for each, the others 32 and float32 arithmetic. Error: std < 0.
    Complex: half the variance in each part of a number, and a mean that is real."""
    if dtype.is_complex:
        parts = normal(key, *pairs(shape, region, dtype), device, 0.0, std * math.sqrt(0.5))
        return torch.view_as_complex(parts).add_(mean)
    arithmetic, _, bits = _float("normal", dtype)
    _demand(std >= 0, f"normal needs std >= 0, got {std}")

    def make(words: Tensor) -> Tensor:
        random = _top(words, bits)
        radius = _sqrt(_log((random[:2] + 1).to(arithmetic).mul_(2.0**-bits)).mul_(-2))
        cos, sin = _cos_sin(random[2:], bits, arithmetic)
        return torch.cat([cos.mul_(radius), sin.mul_(radius)]).mul_(std).add_(mean)

    return _generate(key, shape, region, dtype, device, range(bits // 33 + 1), make, ("normal", mean, std))


def exponential(key: int, shape: Shape, region: Region, dtype: torch.dtype, device: Device,
                lambd: float = 1.0) -> Tensor:
    """Exponential with rate lambd: -log(u) / lambd, and never 0: where u rounds to 1, half the step from 1 to the
    number below stands for -log u. All 0 where lambd is too large for a float. Error: lambd <= 0."""
    arithmetic, _, bits = _float("exponential", dtype)
    _demand(lambd > 0, f"exponential needs lambd > 0, got {lambd}")
    least = torch.finfo(arithmetic).eps / 4
    smallest = _bounds(dtype, 1.0, 0.0)[2] if lambd <= torch.finfo(arithmetic).max else 0.0
    return _generate(key, shape, region, dtype, device, range(bits // 33 + 1), lambda words: _log(
                     _top(words, bits).add_(1).to(arithmetic).mul_(2.0**-bits)).neg_().clamp_min_(least)
                     .mul_(1 / lambd).clamp_min_(smallest), ("exponential", 1 / lambd, smallest))


def integers(key: int, shape: Shape, region: Region, dtype: torch.dtype, device: Device, low: int, high: int) -> Tensor:
    """Integers in [low, high), in any dtype that holds them all exactly; else an error, as if low >= high.

    low + floor(span * r), r in [0, 1) of 64 random bits, or of 96 where span > 2**32: no value is more likely than
    another by more than a part in 2**32. Digit by digit, the last first: carry = floor((digit * span + carry) / 2**32).
    After Lemire, "Fast Random Integer Generation in an Interval", 2019, without his rejection.
    """
    if dtype.is_floating_point or dtype.is_complex:
        most = 2 ** _float("integers", dtype)[1]
        least = -most
    else:
        least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    _demand(least <= low < high <= most + 1, f"integers of dtype {dtype} need {least} <= low < high <= {most + 1}, "
                                             f"got [{low}, {high})")
    span = high - low
    span_high, span_low, low = span >> 32, span & _MASK, (low + 2**63) % 2**64 - 2**63  # uint64's wrap

    def make(words: Tensor) -> Tensor:
        carry = torch.zeros_like(words[0])
        for digit in reversed(words.unbind()):
            part = (digit * span_low).add_(carry & _MASK).bitwise_right_shift_(32).bitwise_and_(_MASK)
            carry = carry.bitwise_right_shift_(32).bitwise_and_(_MASK).add_(part).add_(digit.mul_(span_high))
        return carry.add_(low)

    return _generate(key, shape, region, dtype, device, range(2 if span <= 2**32 else 3), make,
                     ("integers", span_high, span_low, low))


def bernoulli(key: int, shape: Shape, region: Region, dtype: torch.dtype, device: Device,
              p: float | Tensor = 0.5) -> Tensor:
    """1 with probability p (to 2**-32), else 0; p in [0, 1] is a number, or a tensor of the region's shape."""
    if isinstance(p, Tensor):
        words = random_words(key, shape, region, device)
        assert p.shape == words.shape, (p.shape, words.shape)
        _demand(bool(((p >= 0) & (p <= 1)).all()), "bernoulli needs all p in [0, 1]")
        return (words < p.detach().double() * 2.0**32).to(dtype)
    _demand(0 <= p <= 1, f"bernoulli needs p in [0, 1], got {p}")
    threshold = math.ceil(p * 2**32)
    return _generate(key, shape, region, dtype, device, (0,), lambda words: words[0] < threshold,
                     ("bernoulli", threshold))


def permutation(key: int, n: int, device: Device) -> Tensor:
    """A random permutation of range(n), int64: the order of n keys of 64 bits. Not cut: a rank takes its part of it."""
    high, low = (random_words(key, (n,), ((0, n),), device, stream) for stream in (0, 1))
    return high.bitwise_left_shift_(32).bitwise_or_(low).argsort(stable=True)


# ------------------------------------------------------------------ the key of an op
def draw_key(generator: torch.Generator | None = None) -> int:
    """The next key, from `generator` or torch's default one for the CPU: what seeds, saves or restores that (seeds,
    `get_rng_state`, `fork_rng`, recomputation in a checkpoint) does so for all that is made of keys."""
    device = "cpu" if generator is None else generator.device
    with without_fake_mode():
        key = int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))
    lineage.note_draw(key, torch.initial_seed() if generator is None else generator.initial_seed())
    return key
