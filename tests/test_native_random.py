"""Native Philox against its Python twin, bit for bit: laws x dtypes x regions x instruction sets.

The twin's own truth (published vectors, distributions, that a cut does not matter) is test_philox.py's. So the twin
makes each tensor here once and whole, and what native code makes of a region must be that part of it. Where the package
has no native library, g++ makes one of csrc/philox for these tests. The examples hypothesis draws are those of
KERNELS_SEED, as there.
"""
from __future__ import annotations

import ctypes
import itertools
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, seed, settings, strategies
from torch.utils._python_dispatch import TorchDispatchMode

from globaltensor.errors import GlobalTensorError
from globaltensor.runtime import philox

SEED = int(os.environ.get("KERNELS_SEED") or 20_261_121)
SOURCE = pathlib.Path(__file__).parent.parent / "csrc" / "philox" / "philox.cpp"
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FLOATS = (F32, F64, F16, BF16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
KEY = 0xF123456789ABCDEF
Shape, Region = tuple[int, ...], tuple[tuple[int, int], ...]
Sample = Callable[[int, Shape, Region], torch.Tensor]


def law(function: Callable[..., torch.Tensor], dtype: torch.dtype, *parameters: float) -> Sample:
    return lambda key, shape, region: function(key, shape, region, dtype, "cpu", *parameters)


SAMPLES: dict[str, Sample] = {f"words {stream}": lambda key, shape, region, stream=stream: philox.random_words(
    key, shape, region, "cpu", stream) for stream in (0, 2**32 - 1)}
for dtype in FLOATS:
    SAMPLES |= {f"{function.__name__} {dtype} {parameters}": law(function, dtype, *parameters)
                for function, parameters in (
        (philox.uniform, ()), (philox.uniform, (-2.5, 1.7)), (philox.uniform, (3.0, 3.0)),
        (philox.uniform, (-30000.0, 30000.0)), (philox.uniform, (0.0, 1e-6)), (philox.uniform, (1.0, 1.01)),
        (philox.normal, ()), (philox.normal, (0.3, 1.7)), (philox.normal, (5.0, 0.0)),
        (philox.normal, (-0.0, 1e-6)), (philox.normal, (1e4, 1e5)),            # subnormals and infinities of float16
        (philox.exponential, ()), (philox.exponential, (0.7,)), (philox.exponential, (1e30,)),
        (philox.exponential, (1e-38,)))}
for dtype in (*FLOATS, *INTEGERS, torch.bool):
    SAMPLES[f"integers {dtype}"] = law(philox.integers, dtype, 0, 2 if dtype is torch.bool else 100)
for dtype in (*FLOATS, torch.int8, torch.int16):
    SAMPLES[f"integers < 0 {dtype}"] = law(philox.integers, dtype, -128, 77)
for low, high in ((-7, 2**32 - 7), (-7, 2**32 - 6), (-(2**63), 2**63), (2**40, 2**62), (0, 2**32 - 1), (-1, 0)):
    SAMPLES[f"integers [{low}, {high})"] = law(philox.integers, torch.int64, low, high)
SAMPLES |= {"integers up to the top": law(philox.integers, torch.uint64, 5, 2**64),
            "integers of all float64s": law(philox.integers, F64, -(2**53), 2**53)}
for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128):
    SAMPLES[f"bernoulli {dtype}"] = law(philox.bernoulli, dtype, 0.3)
SAMPLES |= {f"bernoulli {p}": law(philox.bernoulli, torch.bool, p) for p in (0.0, 2.0**-33, 1 - 2.0**-33, 1.0)}
SAMPLES["bernoulli each"] = lambda key, shape, region: philox.bernoulli(
    key, shape, region, F32, "cpu", law(philox.uniform, F64)(5, shape, region))
every_sample = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)


def whole(sample: Sample, key: int, shape: Shape) -> torch.Tensor:
    return sample(key, shape, tuple((0, n) for n in shape))


def slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(*edges) for edges in region)


def expect_equal(found: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    """Bit for bit, NaN and the sign of 0 included."""
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (found, expected))
    if not torch.equal(a, b):
        at = (a != b).nonzero()[:, 0].div(found.element_size(), rounding_mode="floor").unique().tolist()
        pytest.fail(f"{what}: {len(at)} of {found.numel()} differ, first at {at[0]}: "
                    f"{found.reshape(-1)[at[0]].item()!r} for {expected.reshape(-1)[at[0]].item()!r}")


def expect_twin(sample: Sample, key: int, shape: Shape, regions: list[Region] | None = None, what: object = "") -> None:
    """Native code fills the regions as the twin fills the whole; or each region, where the whole is too large."""
    with philox.twin():
        expected = None if regions is None or any(n > 2**20 for n in shape) else whole(sample, key, shape)
    for region in regions or [tuple((0, n) for n in shape)]:
        with philox.twin():
            part = sample(key, shape, region) if expected is None else expected[slices(region)]
        expect_equal(sample(key, shape, region), part, (what, shape, region))


# ------------------------------------------------------------------ the library
def build(folder: pathlib.Path, *options: str) -> ctypes.CDLL:
    if not (SOURCE.exists() and shutil.which("g++")):
        pytest.skip("no native library, and no sources or g++ to make one of")
    target = folder / "random.so"
    subprocess.run(["g++", "-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-shared",
                    *options, str(SOURCE), "-o", str(target)], check=True, timeout=300)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return philox.core_lib if philox._bind(philox.core_lib) else build(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module", autouse=True)
def native(library: ctypes.CDLL) -> Iterator[None]:
    """Native code on, whatever GLOBALTENSOR_NATIVE says; and one thread, as in test_philox.py."""
    threads, before = torch.get_num_threads(), philox._laws
    torch.set_num_threads(1)
    philox._laws = philox._bind(library)
    yield
    philox._laws = before
    torch.set_num_threads(threads)


@pytest.fixture(params=[0, 1, 2], ids=["plain", "AVX2", "AVX-512"])
def level(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Iterator[None]:
    if library.gt_fill_vectors(request.param) != request.param:
        pytest.skip("not on this processor")
    yield
    library.gt_fill_vectors(9)


def test_native_code_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "philox", None)                  # the twin would fall over it
    for name, sample in SAMPLES.items():
        if "complex128" not in name:
            assert whole(sample, KEY, (3, 5)).shape == (3, 5)
        else:
            with pytest.raises(TypeError):
                whole(sample, KEY, (3, 5))


# ------------------------------------------------------------------ regions
def regions_of(shape: Shape) -> list[Region]:
    return list(itertools.product(*([(a, b) for a in range(n + 1) for b in range(a, n + 1)] for n in shape)))


@every_sample
def test_every_box_of_small_shapes(sample: Sample) -> None:
    for shape in ((), (1,), (9,), (3, 5), (4, 4), (2, 3, 3), (2, 1, 1, 2)):
        expect_twin(sample, KEY, shape, regions_of(shape))


@every_sample
def test_every_instruction_set(sample: Sample, level: None) -> None:
    """Of many blocks, since what is vectorised comes in groups of 16."""
    regions = [((0, 131), (0, 33)), ((3, 130), (0, 33)), ((0, 131), (2, 31)), ((5, 6), (7, 8))]
    expect_twin(sample, KEY, (131, 33), regions)


@every_sample
def test_runs_longer_than_a_chunk(sample: Sample) -> None:
    """A chunk is 256 blocks: starts and ends next to its edges, and many runs, some of which share a block."""
    edges = (0, 1, 3, 1019, 1020, 1021, 1023, 1024, 1025, 1028, 2**16 - 1, 2**16 + 37)
    expect_twin(sample, KEY, (2**16 + 37,), [((a, b),) for a, b in itertools.combinations(edges, 2) if b - a != 1024])
    for shape, region in (((1500, 2), ((1, 1500), (1, 2))), ((600, 3), ((0, 600), (1, 3))),
                          ((300, 7), ((2, 300), (1, 6))),
                       ((9, 4, 5, 3), ((0, 9), (1, 3), (2, 5), (0, 2))),
                       ((40, 1, 1, 50), ((1, 40), (0, 1), (0, 1), (1, 49)))):
        expect_twin(sample, KEY, shape, [region])


@every_sample
def test_counters_beyond_32_bits(sample: Sample) -> None:
    for shape, region in (((2**34 + 40,), ((2**34 - 21, 2**34 + 31),)),        # the low word wraps within the run
                       ((2**40, 3), ((2**40 - 9, 2**40), (1, 3))),
                       ((2**21, 2**21, 2**20), ((2**21 - 2, 2**21), (17, 19), (2**20 - 3, 2**20)))):
        expect_twin(sample, KEY, shape, [region])


@strategies.composite
def shapes_and_regions(make: Callable) -> tuple[Shape, Region]:
    shape = tuple(make(strategies.lists(strategies.integers(0, 40), max_size=3)))
    return shape, tuple(tuple(sorted(make(strategies.integers(0, n)) for _ in range(2))) for n in shape)


@seed(SEED)
@settings(max_examples=500, deadline=None, database=None)
@given(shapes_and_regions(), strategies.integers(-(2**63), 2**64 - 1), strategies.sampled_from(sorted(SAMPLES)))
def test_any_region(shape_and_region: tuple[Shape, Region], key: int, name: str) -> None:
    expect_twin(SAMPLES[name], key, shape_and_region[0], [shape_and_region[1]], f"{name}, KERNELS_SEED={SEED}")


def test_64_dims_and_more_than_the_native_code_takes() -> None:
    normal = law(philox.normal, F32)
    expect_twin(normal, KEY, 30 * (1,) + (3, 4) + 32 * (1,), [30 * ((0, 1),) + ((1, 3), (1, 4)) + 32 * ((0, 1),)])
    numbers = (3 * 65 * ctypes.c_int64)(*65 * [1], *65 * [0, 1])
    assert philox._laws["normal"](None, 0, 1, 65, bytes(numbers), 0.0, 1.0) == -1


# ------------------------------------------------------------------ rare words, other processors
EXTREME = torch.tensor([0, 1, 2**7, 2**8 - 1, 2**29, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1])


@pytest.fixture(scope="module", params=[(), ("-DGT_X86=0",)], ids=["this processor", "others"])
def rare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A library that puts an extreme in place of most words of the hash."""
    folder = tmp_path_factory.mktemp("rare")
    values = ", ".join(f"{value}u" for value in EXTREME.tolist())
    (folder / "rare.h").write_text(f"""#include <stdint.h>
        static inline uint32_t rare(uint32_t word) {{
          static const uint32_t of[] = {{{values}}};
          return word % 10 < 9 ? of[word % 10] : word;
        }}""")
    return build(folder, *request.param, "-include", str(folder / "rare.h"), "-DGT_WORD=rare")


def test_extreme_words(rare: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logarithms of 1, radii of 0, angles of 0, values next to their bounds: once in 2**25 elements or less."""
    original = philox.philox

    def changed(counter: torch.Tensor, key: int) -> torch.Tensor:
        words = original(counter, key)
        return words.copy_(torch.where(words % 10 < 9, EXTREME[(words % 10).clamp(max=8)], words))

    monkeypatch.setattr(philox, "philox", changed)
    monkeypatch.setattr(philox, "_laws", philox._bind(rare))
    for wanted in {rare.gt_fill_vectors(level) for level in (0, 1, 2)}:
        rare.gt_fill_vectors(wanted)
        for name, sample in SAMPLES.items():
            expect_twin(sample, KEY, (20_000,), what=(name, wanted))


# ------------------------------------------------------------------ when the twin runs
class Count(TorchDispatchMode):
    """A mode that sees ops, as tracers and fake tensors do."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += 1
        return func(*args, **kwargs or {})


def test_what_traces_sees_the_twin() -> None:
    normal = law(philox.normal, F32)
    with Count() as seen:
        found = whole(normal, KEY, (3, 5))
    assert seen.ops > 100
    expect_equal(found, whole(normal, KEY, (3, 5)))
    with torch._subclasses.FakeTensorMode():
        assert whole(normal, KEY, (3, 5)).shape == (3, 5)


def test_a_library_without_these_functions_leaves_the_twin() -> None:
    assert philox._bind(None) == {} == philox._bind(types.SimpleNamespace(gt_other=None))


def test_the_environment_turns_native_code_off() -> None:
    command = [sys.executable, "-c", "from globaltensor.runtime import philox; assert philox._laws == {}"]
    subprocess.run(command, check=True, timeout=120, env=os.environ | {"GLOBALTENSOR_NATIVE": "0"})


@pytest.mark.parametrize("native", [True, False])
def test_parameters_are_checked_before(native: bool) -> None:
    for call in (law(philox.normal, F32, 0.0, -1.0), law(philox.normal, torch.int64),
                 law(philox.bernoulli, F32, 1.5), law(philox.uniform, F32, 2.0, 1.0),
                 law(philox.integers, torch.uint8, 0, 257)):
        with pytest.raises(GlobalTensorError):
            if native:
                whole(call, KEY, (3,))
            else:
                with philox.twin():
                    whole(call, KEY, (3,))


# ------------------------------------------------------------------ cost
def seconds(call: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def test_fills_are_quick() -> None:
    """Bounds far above what they take (6 us; 1 to 4 ns an element), for machines that are busy."""
    normal = law(philox.normal, F32)
    assert seconds(lambda: whole(normal, KEY, (4, 4)), 200) < 100e-6
    native = seconds(lambda: whole(normal, KEY, (10**6,)), 5)
    with philox.twin():
        assert native < seconds(lambda: whole(normal, KEY, (10**6,)), 3) / 2
