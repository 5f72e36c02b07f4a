"""The native boxing kernel against its Python twin, bit by bit, and the programs that it runs against the plans.

The kernel is plain C symbols: of the built extension, or of a library compiled here. Direct steps are run as every way
of sharing the work runs them: one process for all ranks, and one per rank, with sums made in parts and without. The
examples drawn are those of the seed printed at the top of the run (set NATIVE_BOXING_SEED for others).
"""
from __future__ import annotations

import ctypes
import itertools
import os
import pathlib
import random
import shutil
import subprocess
from itertools import pairwise

import pytest
import torch
from hypothesis import given, seed, settings, strategies
from shards import place

import globaltensor as gt
from globaltensor.boxings import kernel_program, torch_program
from globaltensor.boxings.plan import bytes_received, plan
from globaltensor.layouts.layout import layout, spec
from globaltensor.layouts.regions import slices, volume
from globaltensor.layouts.sbp import broadcast, partial_max, partial_min, partial_sum, split
from globaltensor.runtime.machine import gloo, one_process

SEED = int(os.environ.get("NATIVE_BOXING_SEED") or 20_251_121)
print(f"tests/test_native_boxing.py: NATIVE_BOXING_SEED={SEED}")
ROOT = pathlib.Path(__file__).parent.parent
STATES = [broadcast, partial_sum, split(0), split(1)]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64,
          torch.complex128]                          # as enum gt_dtype
OPS = ["sum", "max", "min"]


class Corner(ctypes.Structure):
    _fields_ = [("shard", ctypes.c_int64), ("start", ctypes.c_int64 * 8)]


class Region(ctypes.Structure):
    _fields_ = [*[(name, ctypes.c_int32) for name in ("ndim", "sources", "targets", "part", "parts", "first")],
                ("size", ctypes.c_int64 * 8)]


class Shard(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 8)]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    code = [file for file in (ROOT / "csrc/kernels").iterdir() if file.suffix in (".cpp", ".h")]
    built = [so for so in (ROOT / "globaltensor").glob("_core*.so")
             if so.stat().st_mtime > max(file.stat().st_mtime for file in code)]
    if not built:                                    # or it is older than its source
        if not shutil.which("g++"):
            pytest.skip("neither the extension nor g++ is there")
        built = [tmp_path_factory.mktemp("kernel") / "kernel.so"]
        subprocess.run(["g++", "-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-o", built[0],
                        *[file for file in code if file.suffix == ".cpp"]], check=True, timeout=280)
    library = ctypes.CDLL(str(built[0]))
    library.gt_reduce.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p,
                                  ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    yield library
    library.gt_use_vectors(3)


def table(shards):
    made = (Shard * max(len(shards), 1))()
    for entry, t in zip(made, shards):
        entry.data, entry.stride[:t.ndim] = t.data_ptr(), t.stride()
    return made


def reduce(kernel, regions, count, corners, op, sources, targets):
    """gt_reduce; `regions` and `corners` are packed bytes."""
    failed = kernel.gt_reduce(regions, count, corners, op, table(sources), DTYPES.index(sources[0].dtype),
                              table(targets), DTYPES.index(targets[0].dtype))
    assert failed == 0


def same(a, b, op="sum"):
    """Equal to the bit, but that a NaN is a NaN, and a zero of a maximum has either sign (torch's depends on where)."""
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.is_floating_point():
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        a, b = (t.masked_fill(t.isnan() if op == "sum" else t.isnan() | (t == 0), 0).contiguous() for t in (a, b))
        a, b = a.view(torch.uint8) if a.ndim else a, b.view(torch.uint8) if b.ndim else b
    return torch.equal(a, b)


# ------------------------------------------------------------------ the kernel by itself
def values(shape, dtype, r):
    g = torch.Generator().manual_seed(r.getrandbits(32))
    if dtype == torch.bool:
        return torch.rand(shape, generator=g) < 0.5
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=g)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, shape, generator=g, dtype=torch.int64).to(dtype)
    made = (torch.randn(shape, generator=g) * 10.0 ** r.choice([0, 0, 3, -6, -39])).to(dtype)
    if made.numel() and r.random() < 0.3:
        at = torch.randint(made.numel(), (made.numel() // 9 + 1,), generator=g)
        made.view(-1)[at] = r.choice([float("nan"), float("inf"), -float("inf"), -0.0])
    return made


def strided(shape, dtype, r):
    """A tensor of any strides that has room for `shape`, and where in it that box begins."""
    order = list(range(len(shape)))
    if r.random() < 0.5:
        r.shuffle(order)
    room = [shape[d] + r.choice([0, 0, 1, 3]) for d in order]
    t = values(room, dtype, r).permute([order.index(d) for d in range(len(shape))])
    if r.random() < 0.1:                             # read the same elements again and again
        d = r.randrange(len(shape)) if shape else 0
        if shape and t.shape[d]:
            t = t.narrow(d, 0, 1).expand([t.shape[i] if i == d else -1 for i in range(t.ndim)])
    return t, [r.randint(0, t.shape[d] - n) for d, n in enumerate(shape)]


def oracle(terms, op, dtype):
    """What plain torch makes of them: 16-bit floats in float32, rounded once."""
    wide = torch.float32 if terms[0].dtype in (torch.float16, torch.bfloat16) else terms[0].dtype
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op](total, term.to(wide))
    return total.to(dtype)


@pytest.mark.parametrize("level", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2)), 3])
@seed(SEED)
@settings(max_examples=300, deadline=None, database=None)
@given(strategies.integers(0, 2**32))
def test_any_region(kernel, level, number):
    if kernel.gt_use_vectors(level) != level:
        pytest.skip("this processor has no such vectors")
    r = random.Random(number)
    ndim = r.choice([0, 1, 1, 2, 2, 3, 4, 8])
    longest = [1, 3000, 150, 30, 9, 3, 3, 3, 3][ndim]
    shape = [r.choice([1, 2, 3, 5, 16, 64, longest, r.randint(0, longest)]) for _ in range(ndim)]
    while volume([(0, n) for n in shape]) > (60_000 if ndim < 4 else 3000):
        shape[r.randrange(ndim)] = r.choice([1, 2])
    source = r.choice(DTYPES)
    target = r.choice(FLOATS) if source in FLOATS and r.random() < 0.5 else source
    op = "sum" if source.is_complex else r.choice(OPS)
    n, m, parts = r.choice([0, 1, 1, 1, 2, 2, 3, 4, 5, 20]), r.choice([1, 1, 2, 3]), r.choice([1, 1, 1, 2, 3, 7])

    def cut(t, start):
        return t[tuple(slice(a, a + k) for a, k in zip(start, shape))]

    sources, targets = [strided(shape, source, r) for _ in range(n)], []
    while len(targets) < m:
        t, start = strided(shape, target, r)
        if 0 not in t.stride() or 0 in t.shape:      # elements of a target are their own
            targets.append((t, start))
    if n and source == target and r.random() < 0.2 and 0 not in sources[-1][0].stride():
        targets[0] = sources[-1]                     # in place
    want = oracle([cut(*s) for s in sources], op, target).clone() if n else torch.zeros(shape, dtype=target)
    before = [t.clone() for t, _ in targets]
    corners = (Corner * (n + m))()
    for i, (_, start) in enumerate(sources + targets):
        corners[i].shard, corners[i].start[:ndim] = i - n if i >= n else i, start
    for part in r.sample(range(parts), parts):
        region = Region(ndim, n, m, part, parts, 0)
        region.size[:ndim] = shape
        reduce(kernel, ctypes.byref(region), 1, corners, OPS.index(op),
               [t for t, _ in sources] or [torch.empty(0, dtype=source)], [t for t, _ in targets])
    for (t, start), old in zip(targets, before):
        assert same(cut(t, start), want, op)
        cut(old, start).copy_(cut(t, start))
        assert same(t, old), "elements outside the region have changed"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_runs_that_pass_by_the_caches(kernel, dtype, n):
    size = 9_000_001
    for sources, targets in (((0, 0, 0), (0, 0)), ((1, 2, 3), (0, 5)), ((0, 16, 32), (3, 3))):
        terms = [torch.randn(size + 40).to(dtype)[offset:offset + size] for offset in sources[:n]]
        results = [torch.full((size + 40,), 7, dtype=dtype) for _ in targets]
        corners = (Corner * (n + 2))()
        for i in range(n + 2):
            corners[i].shard, corners[i].start[0] = (i - n, targets[i - n]) if i >= n else (i, 0)
        region = Region(1, n, 2, 0, 1, 0)
        region.size[0] = size
        reduce(kernel, ctypes.byref(region), 1, corners, 0, terms, results)
        for result, offset in zip(results, targets):
            assert torch.equal(result[offset:offset + size], oracle(terms, "sum", dtype))
            assert (result[:offset] == 7).all() and (result[offset + size:] == 7).all()


def test_what_a_dtype_cannot_do_is_refused(kernel):
    t = torch.zeros(4)
    region, corners = Region(1, 2, 1, 0, 1, 0), (Corner * 3)()
    region.size[0] = 4
    integer, raw = DTYPES.index(torch.int32), len(DTYPES) + 2
    for op, source, target in ((1, 10, 10), (0, integer, 0), (0, 0, integer), (0, raw, raw), (3, 0, 0), (0, 0, 99)):
        assert kernel.gt_reduce(ctypes.byref(region), 1, corners, op, table([t, t]), source, table([t]), target) == -1
    region.sources = 1
    assert kernel.gt_reduce(ctypes.byref(region), 1, corners, 0, table([t]), raw, table([t]), raw) == 0


def test_half_precision_to_the_last_bit(kernel):
    """Every 16-bit pattern, and float32 numbers around every rounding boundary, subnormal ones too."""
    patterns = torch.arange(-2**15, 2**15, dtype=torch.int32).to(torch.int16)
    for level, dtype in itertools.product(range(4), [torch.float16, torch.bfloat16]):
        kernel.gt_use_vectors(level)
        halves = patterns.view(dtype)
        wide = halves.float()
        steps = (-1, 0, 1, 4095, 4096, 4097, 32767, 32768, 32769)
        near = torch.cat([(wide.view(torch.int32) + step).view(torch.float32) for step in steps])
        for source, target in ((halves, torch.float32), (halves, torch.float64), (near, dtype), (near.double(), dtype)):
            made, corners = torch.empty(source.shape, dtype=target), (Corner * 2)()
            region = Region(1, 1, 1, 0, 1, 0)
            region.size[0] = source.numel()
            reduce(kernel, ctypes.byref(region), 1, corners, 0, [source], [made])
            assert same(made, source.to(target))
    kernel.gt_use_vectors(3)


# ------------------------------------------------------------------ programs
def shards_of(where, shape, dtype, r):
    """Random shards, equal where the layout says that they are copies."""
    whole, made = {}, {}
    for rank, at in where.placement.coords.items():
        key = tuple(i for i, s in zip(at, where.sbp) if s.is_partial)
        if key not in whole:
            whole[key] = values(shape, dtype, r)
        region = where.region(shape, rank)
        made[rank] = whole[key][slices(region, tuple((0, n) for n in shape))].clone()
    return made


def twin(src, dst, shape, dtype, shards):
    """One direct step as the Python version does it, in this process that drives all ranks."""
    of = spec(src, shape, None, dtype)
    return torch_program.build_shards(torch_program.compile_step(src, dst, shape), shards, of, dst, {})


def native(kernel, src, dst, shape, dtype, shards, lone, shared):
    """The same by programs, one after the other: of one process, or of one for each rank."""
    ranks = sorted({*src.placement.flat, *dst.placement.flat})
    index = {rank: i for i, rank in enumerate(ranks)}
    empty = torch.empty(0, dtype=dtype)
    sources = [shards.get(rank, empty) for rank in ranks]
    made = {rank: values(dst.local_shape(shape, rank), dtype, random.Random(rank)) for rank in dst.placement.flat}
    targets = [made.get(rank, empty) for rank in ranks]
    ties = {}
    for mine in [tuple(ranks)] if lone else [(rank,) for rank in ranks]:
        p = kernel_program.compile_program(src, dst, shape, dtype.itemsize, mine, index, shared)
        assert len(p.regions) == p.region_count * ctypes.sizeof(Region)
        reduce(kernel, p.regions, p.region_count, p.corners, p.op, sources, targets)
        ties |= {(mine[0], ranks[i]): tie for i, tie in zip(p.partners, p.ties)}
        assert list(p.partners) == sorted(p.partners) and (not lone or not p.partners)
    for (a, b), tie in ties.items():
        assert tie == (ties[b, a] >> 1 & 5) | (ties[b, a] << 1 & 10), "what ties a to b is what ties b to a"
    return made


def check(kernel, src, dst, shape, dtype, r):
    shards = shards_of(src, shape, dtype, r)
    for a, b in pairwise(kernel_program.direct_steps(src, dst)):
        op = "max" if any(s.op in ("max", "min") for s in a.sbp) else "sum"
        want = twin(a, b, shape, dtype, shards)
        for lone, shared in ((True, False), (False, False), (False, True)):
            made = native(kernel, a, b, shape, dtype, shards, lone, shared)
            assert made.keys() == want.keys()
            for rank in want:
                assert same(made[rank], want[rank], op), f"{a} -> {b}, {shape} {dtype}, {lone=} {shared=}, {rank=}"
        shards = want


@pytest.fixture
def all_sums_shared(monkeypatch):
    monkeypatch.setattr(kernel_program, "SHARED_FROM", 0)
    kernel_program.region_jobs.cache_clear()
    yield
    kernel_program.region_jobs.cache_clear()


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(6, 4), (5, 3), (1, 7), (0, 3)], ids=str)
@pytest.mark.parametrize("ranks", [[0, 1], [2, 0, 1], [0, 1, 2, 3], [[0, 1], [2, 3]]], ids=str)
def test_every_pair_on_one_placement(kernel, all_sums_shared, ranks, shape):
    if not gt.init().single_process:
        pytest.skip("the twin is run in one process")
    r, where = random.Random(SEED), place(ranks)
    sbps = list(itertools.product([*STATES, partial_max, partial_min], repeat=where.ndim))
    for k, (a, b) in enumerate(itertools.product(sbps, repeat=2)):
        check(kernel, layout(where, a), layout(where, b), shape, DTYPES[k % 10], r)


@pytest.mark.parametrize("ranks", [[2, 0, 1], [[0, 1], [2, 3]], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]], ids=str)
def test_sums_large_enough_that_every_part_has_some(kernel, all_sums_shared, ranks):
    if not gt.init().single_process:
        pytest.skip("the twin is run in one process")
    r, where = random.Random(SEED), place(ranks)
    sbps = list(itertools.product(STATES, repeat=where.ndim))
    pairs = list(itertools.product([sbp for sbp in sbps if partial_sum in sbp], sbps))
    for src, dst in r.choices(pairs, k=12 * where.ndim**2):
        check(kernel, layout(where, src), layout(where, dst), r.choice([(70, 67), (2051, 3)]), torch.bfloat16, r)


@pytest.mark.parametrize("ranks", [([0, 1], [1, 2]), ([0, 1, 2], [[3, 4], [1, 0]]), ([[0, 1], [2, 3]], [3, 1, 0, 2]),
                                   ([[0, 1, 2], [3, 4, 5]], [0])], ids=str)
def test_between_placements(kernel, all_sums_shared, ranks):
    if not gt.init().single_process:
        pytest.skip("the twin is run in one process")
    r, (one, other) = random.Random(SEED), (place(some) for some in ranks)
    for a, b in itertools.product(itertools.product([*STATES, partial_max], repeat=one.ndim),
                                  itertools.product([*STATES, partial_max], repeat=other.ndim)):
        check(kernel, layout(one, a), layout(other, b), r.choice([(6, 4), (5, 3), (2, 9, 2)]), r.choice(FLOATS), r)


def test_tensors_without_dims_and_with_eight(kernel, all_sums_shared):
    if not gt.init().single_process:
        pytest.skip("the twin is run in one process")
    r, where = random.Random(SEED), place([[0, 1], [2, 3]])
    eight = [partial_sum, split(2), split(7)]
    for shape, states in (((), [broadcast, partial_sum]), ((2, 1, 3, 2, 1, 2, 3, 2), eight)):
        for a, b in itertools.product(itertools.product(states, repeat=2), repeat=2):
            check(kernel, layout(where, a), layout(where, b), shape, torch.bfloat16, r)


@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2, 3], [[0, 1], [2, 3]], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]],
                         ids=str)
def test_no_direct_step_moves_more_than_the_plan(ranks):
    shape, itemsize = (64, 64), 4096                 # large, and even, so that plans count no remainders
    where = place(ranks)
    sbps = [layout(where, sbp) for sbp in itertools.product(STATES, repeat=where.ndim)]
    for src, dst in itertools.permutations(sbps, 2):
        moved = sum(volume(job.region) / job.parts * sum(rank != job.rank for rank in job.sources + job.targets)
                    for job in kernel_program.region_jobs(src, dst, shape, itemsize, True)) * itemsize
        for machine in (one_process, gloo):
            steps = plan(src, dst, shape, 64 * 64 * itemsize, machine).layouts
            assert moved <= sum(bytes_received(steps, shape, itemsize).values()), f"{src} -> {dst}"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer, regions", [("address,undefined", 4000), ("thread", 400)])
def test_no_byte_outside_nothing_undefined_and_no_byte_written_by_two_ranks(sanitizer, regions, tmp_path):
    """A program of its own under the sanitizers."""
    binary = tmp_path / "kernel_values"
    subprocess.run(["g++", "-O1", "-g", "-std=c++17", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all",
                    "-ffp-contract=off", "-pthread", "-o", binary, ROOT / "tests/native/kernel_values.cpp",
                    *(ROOT / "csrc/kernels").glob("*.cpp")], check=True, timeout=290)
    subprocess.run([binary, str(SEED), str(regions)], check=True, timeout=600,
                   env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"})
