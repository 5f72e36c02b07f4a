"""The GPU's kernels, on a GPU where there is one and everywhere on threads that stand for it.

The same sources are built twice: by nvcc, and by g++ through `csrc/common/device.h`, where every CUDA thread is a
thread. So values and index arithmetic are tested by the same tests on both, against torch on the CPU, bit for bit; the
meetings of ranks by ThreadSanitizer, which must also find every mistake that is planted in them.
"""
from __future__ import annotations

import ctypes
import importlib
import itertools
import math
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from cuda_cases import SEED, Job, memory_of, reduced, same, sizes_at_random, strange
from cuda_library import (
    BAD_DTYPE,
    GXX,
    MISALIGNED,
    NVCC,
    ROOT,
    SOURCES,
    Corner,
    Library,
    Region,
    build,
    build_threads,
    command,
    move,
    shard,
)
from shards import cut, join, place, random_like

from globaltensor.boxings.copy_plan import CopyMove, ShardPlace, Strides
from globaltensor.boxings.kernel_program import compile_program
from globaltensor.boxings.process_boxing import BLOCKS, RANKS, BarrierGroup
from globaltensor.layouts.layout import layout
from globaltensor.layouts.sbp import broadcast, partial_max, partial_sum, split
from globaltensor.runtime import philox
from globaltensor.runtime.kernel_library import NEEDS_ROOM, REDUCED
from globaltensor.runtime.native import core_lib

print(f"tests/test_cuda.py: CUDA_SEED={SEED}")
FLOATS = REDUCED[:4]
PAIRS = [(a, b) for a in FLOATS for b in FLOATS] + [(d, d) for d in REDUCED[4:]]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture(scope="module", params=["threads", "gpu"])
def machine(request: pytest.FixtureRequest, folder: Path) -> Library:
    if request.param == "threads":
        if shutil.which("g++") is None:
            pytest.skip("no g++")
        return Library(build_threads(folder), "cpu")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    return Library(build(folder), "cuda")


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles_for_gpus_and_keeps_to_the_registers(source: Path, folder: Path) -> None:
    said = command(*NVCC, "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90", "-Xptxas", "-v",
                   "-c", source, "-o", folder / "one.o")
    assert "warning" not in said, said
    spills = [line for line in said.splitlines() if "spill" in line]
    assert all(line.split() == "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads".split()
               for line in spills), said
    assert source.name == "peers.cu" or spills


# ------------------------------------------------------------------ one process drives the ranks
@pytest.mark.sample(12)
@pytest.mark.parametrize("src, dst", PAIRS, ids=lambda d: str(d)[6:])
def test_any_region_is_what_torch_makes_of_it(machine: Library, src: torch.dtype, dst: torch.dtype) -> None:
    rng = random.Random(f"{SEED} {src} {dst}")
    for i in range(24):
        op = "sum" if src.is_complex else rng.choice(["sum", "max", "min"])
        job = Job(rng, machine.device, src, dst, op, sizes_at_random(rng), rng.choice([0, 1, 1, 2, 3, 4]),
                  rng.choice([1, 1, 2, 3]), plain=i % 2 == 0)
        assert machine.reduce([job.move()]) == 0
        job.check(i)


@pytest.mark.parametrize("dtype", REDUCED, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("sizes", [[1000], [7, 1000], [37, 70], [64, 64], [3, 65, 66], [9, 2, 40], [20011]], ids=str)
def test_contiguous_aligned_and_not(machine: Library, dtype: torch.dtype, sizes: list[int]) -> None:
    """Words of every width, with a head and a tail or without; and all ways to turn."""
    rng = random.Random(f"{SEED} {dtype} {sizes}")
    orders = list(itertools.permutations(range(len(sizes))))[:3]
    for sources, shift, order in itertools.product((1, 3), (0, 1, 2), orders):
        job = Job(rng, machine.device, dtype, dtype, "sum", sizes, 0, 1, plain=True)
        stride, step = [0] * len(sizes), 1
        for dim in reversed(order):
            stride[dim], step = step, step * sizes[dim]
        views, held = [], []
        for _ in range(sources):
            memory = memory_of(strange((step + 8,), dtype, rng, True))
            views.append(memory.as_strided(sizes, stride, shift))
            held.append(memory.to(machine.device, copy=True))
        job.tensors, job.made, job.count = [*views, *job.tensors], [*held, *job.made], sources
        job.starts = [[0] * len(sizes)] * (sources + 1)
        job.right = [reduced(views, "sum", dtype).reshape(-1)]
        assert machine.reduce([job.move()]) == 0
        job.check((sources, shift, order))


def test_many_tensors_at_once(machine: Library) -> None:
    """The gradients of a model, say: one call, with room for the table on the device."""
    rng = random.Random(SEED)
    jobs = [Job(rng, machine.device, *rng.choice(PAIRS[:16] + [(torch.int64, torch.int64)]), "sum",
                sizes_at_random(rng, 700), rng.choice([1, 2, 4]), 1, plain=rng.random() < 0.7) for _ in range(120)]
    moves = [job.move() for job in jobs]
    assert machine.reduce(moves, give_room=False) == NEEDS_ROOM
    for job in jobs:                                 # nothing has been done
        for made, tensor in zip(job.made, job.tensors):
            same(made, memory_of(tensor), "untouched")
    assert machine.reduce(moves) == 0
    for i, job in enumerate(jobs):
        job.check(i)
    assert machine.reduce([]) == 0


def test_what_cannot_be_done_is_said(machine: Library) -> None:
    rng = random.Random(SEED)

    def status(dtype: torch.dtype, sources: int, **changed: int) -> int:
        job = Job(rng, machine.device, dtype, dtype, "sum", [5], sources, 1, plain=True)
        asked = job.move()
        for name, value in changed.items():
            setattr(asked, name, value)
        return machine.reduce([asked])

    raw4 = len(REDUCED) + 2
    assert status(torch.float32, 1, target_dtype=REDUCED.index(torch.int32)) == BAD_DTYPE
    assert status(torch.float32, 1, source_dtype=raw4, target_dtype=raw4) == 0       # raw words are copied
    assert status(torch.float32, 2, source_dtype=raw4, target_dtype=raw4) == BAD_DTYPE
    assert status(torch.complex64, 2, op=1) == BAD_DTYPE
    odd = torch.zeros(20, dtype=torch.uint8, device=machine.device)
    table = [ShardPlace(odd.data_ptr() + 1, Strides(1))]
    region, corners = Region(1, 1, 1, 0, 1, 0, Strides(3)), [Corner(0), Corner(0)]
    assert machine.reduce([move([region], corners, table, table, torch.float32, torch.float32)]) == MISALIGNED


SBPS = [split(0), split(1), broadcast, partial_sum, partial_max]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_boxing_of_one_axis(machine: Library, ranks: int) -> None:
    """The programs that boxing compiles, as one process runs them that drives all ranks."""
    generator = torch.Generator().manual_seed(SEED)
    where = place(list(range(ranks)))
    for shape, dtype, src, dst in itertools.product([(6, 7), (1, 130), (33, 64)], [torch.float32, torch.int16],
                                                    SBPS, SBPS):
        if src.is_partial and dst.is_partial and src != dst:
            continue
        value = random_like(torch.empty(shape, dtype=dtype), generator)
        held = [t.to(machine.device) for t in cut(value, src, ranks, generator)]
        a, b = layout(where, (src,)), layout(where, (dst,))
        program = compile_program(a, b, shape, dtype.itemsize, range(ranks))
        made = [torch.full(b.local_shape(shape, r), 77.0, dtype=dtype, device=machine.device) for r in range(ranks)]
        assert machine.reduce([move(program.regions, program.corners, [shard(t) for t in held],
                                    [shard(t) for t in made], dtype, dtype, program.op)]) == 0
        expected = join([t.cpu() for t in held], src)
        found = join([t.cpu() for t in made], dst)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda m: f"{a} -> {b} {shape}: {m}")


@pytest.mark.skipif(core_lib is None, reason="the extension is not built")
@pytest.mark.parametrize("src, dst", PAIRS, ids=lambda d: str(d)[6:])
def test_the_kernel_of_the_cpu_makes_the_same(machine: Library, src: torch.dtype, dst: torch.dtype) -> None:
    rng = random.Random(f"{SEED} cpu {src} {dst}")
    for i in range(12):
        op = "sum" if src.is_complex else rng.choice(["sum", "max", "min"])
        job = Job(rng, machine.device, src, dst, op, sizes_at_random(rng), rng.choice([1, 2, 3]), 1, plain=i % 2 == 0)
        assert machine.reduce([job.move()]) == 0
        found, job.made = job.made, [memory_of(t) for t in job.tensors]
        asked = job.move()
        regions, corners, *tables = (ctypes.c_void_p(p) for p in (asked.regions, asked.corners, asked.sources,
                                                                  asked.targets))
        assert core_lib.gt_reduce(regions, ctypes.c_int64(asked.count), corners, asked.op, tables[0],
                                  asked.source_dtype, tables[1], asked.target_dtype) == 0
        same(found[-1], job.made[-1], (i, src, dst, op, job.sizes))


# ------------------------------------------------------------------ random numbers
def filled(machine: Library, law: str, key: int, shape: tuple, box: tuple, dtype: torch.dtype, parameters: list,
           shift: int = 0) -> torch.Tensor:
    """A box of random numbers, `shift` elements from where memory is aligned."""
    size = [b - a for a, b in box]
    memory = torch.empty(math.prod(size) + shift, dtype=dtype, device=machine.device)
    machine.fill(law, key, shape, box, memory[shift:], *parameters)
    return memory[shift:].view(size).cpu()


def laws() -> dict:
    """Name -> dtypes, the twin's arguments, and the same prepared as fill.h wants them."""
    def bounds(dtype: torch.dtype, low: float, high: float) -> list:
        ends = torch.tensor([low, high], dtype=dtype)
        return [ends[0].item(), ends[1].item() - ends[0].item(), torch.nextafter(ends[1], ends[0]).item()]

    def smallest(dtype: torch.dtype) -> float:
        return torch.nextafter(*torch.tensor([0, 1], dtype=dtype)).item()

    def whole(low: int, high: int) -> list:
        return [x % 2**64 for x in (high - low >> 32, high - low & 0xFFFFFFFF, low)]

    return {
        "uniform": (FLOATS, (-2.5, 1.7), lambda d: bounds(d, -2.5, 1.7)),
        "normal": (FLOATS, (0.3, 1.7), lambda d: [0.3, 1.7]),
        "exponential": (FLOATS, (0.7,), lambda d: [1 / 0.7, smallest(d)]),
        "integers": ([torch.int64, torch.int32, torch.int16, torch.int8, *FLOATS], (-3, 100), lambda d: whole(-3, 100)),
        "integers of 96 bits": ([torch.int64], (-2**63, 2**63 - 1), lambda d: whole(-2**63, 2**63 - 1)),
        "bernoulli": ([*REDUCED[:10], torch.complex64], (0.3,), lambda d: [math.ceil(0.3 * 2**32)]),
    }


BOXES = [((), ()), ((11,), ((3, 9),)), ((5000,), ((0, 5000),)), ((5003,), ((1, 5002),)),
         ((64, 48), ((0, 64), (16, 32))), ((33, 17), ((4, 30), (3, 5))),
         ((5, 7, 9, 3), ((1, 4), (2, 6), (0, 9), (1, 2))), ((4, 3), ((2, 2), (0, 3))),
         ((2**34 + 3,), ((2**34 - 5, 2**34 + 2),)), ((2**20, 2**20, 2**20), ((2**20 - 1, 2**20), (17, 19), (5, 600)))]


@pytest.mark.sample(3)
@pytest.mark.parametrize("law", laws())
def test_random_numbers_are_those_of_the_twin(machine: Library, law: str) -> None:
    dtypes, arguments, prepared = laws()[law]
    name = law.split()[0]
    for dtype, (shape, box), shift in itertools.product(dtypes, BOXES, (0, 1)):
        key = 0xFEDCBA9876543210 + shift
        found = filled(machine, name, key, shape, box, dtype, prepared(dtype), shift)
        expected = getattr(philox, name)(key, shape, box, dtype, "cpu", *arguments)
        same(found, expected, (law, dtype, shape, box))


def test_random_words_are_those_of_the_twin(machine: Library) -> None:
    for (shape, box), stream in itertools.product(BOXES, (0, 7, 2**32 - 1)):
        found = filled(machine, "words", 3, shape, box, torch.int64, [stream])
        same(found, philox.random_words(3, shape, box, "cpu", stream), (shape, box, stream))


# ------------------------------------------------------------------ the choice of paths, and the meetings
@needs_gxx
@pytest.mark.check
def test_jobs_take_the_widest_words(folder: Path) -> None:
    command(*GXX, ROOT / "tests/native/cuda_jobs.cpp", "-o", folder / "jobs", "-lpthread")
    command(folder / "jobs")


PLANTS = {0: "nothing", 1: "no entry barrier", 2: "no exit barrier", 3: "no barrier of the block before it posts",
          4: "relaxed store", 5: "relaxed load", 6: "no barrier between turned tiles"}


@pytest.fixture(scope="module")
def meeting(folder: Path) -> Path:
    command(*GXX, "-fsanitize=thread", "-DGT_PLANTS", "-DGT_THREADS=16", ROOT / "tests/native/cuda_barrier.cpp",
            "-o", folder / "meeting", "-lpthread")
    return folder / "meeting"


@pytest.mark.sample(6)
@needs_gxx
@pytest.mark.parametrize("plant", PLANTS, ids=PLANTS.values())
def test_ranks_meet_in_the_right_order(meeting: Path, plant: int) -> None:
    """ThreadSanitizer, or a wrong value, finds each of the planted mistakes, and nothing where there is none."""
    done = subprocess.run(["setarch", os.uname().machine, "-R", meeting, str(plant)] if shutil.which("setarch") else
                          [meeting, str(plant)], capture_output=True, text=True, timeout=240,
                          env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"})
    said = done.stdout + done.stderr
    if plant:
        assert done.returncode in (1, 66) and ("wrong" in said or "data race" in said), said
    else:
        assert done.returncode == 0, said


def test_the_benchmark_measures_passes_that_are_right(machine: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    place([0, 1, 2, 3])
    device = importlib.import_module("benchmarks.device")
    library = device.Library(Path(machine.lib._name), str(machine.device))
    device.check(library, device.passes(100_000, machine.device))


# ------------------------------------------------------------------ on a GPU only
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture
def gpu(machine: Library) -> Library:
    if machine.device.type != "cuda":
        pytest.skip("threads do not stand for streams")
    return machine


def sum_of(tensors: list[torch.Tensor], into: torch.Tensor, part: int, parts: int) -> CopyMove:
    """The sum of vectors, of which a part is made."""
    region = Region(1, len(tensors), 1, part, parts, 0, Strides(into.numel()))
    return move([region], [*[Corner(i) for i in range(len(tensors))], Corner(0)], [shard(t) for t in tensors],
                [shard(into)], into.dtype, into.dtype)


@needs_gpu
def test_ranks_on_streams_of_one_gpu_meet(gpu: Library) -> None:
    """The real kernel with its meetings: two ranks on two streams, in eager mode and replayed in graphs."""
    n, ranks, blocks = 100_003, 2, 8
    pads = [torch.zeros(RANKS * BLOCKS, dtype=torch.int32, device="cuda") for _ in range(ranks)]
    epochs = [torch.zeros(BLOCKS, dtype=torch.int32, device="cuda") for _ in range(ranks)]
    words = torch.zeros(2, dtype=torch.int32).pin_memory()
    inputs = [torch.randn(n, device="cuda") for _ in range(ranks)]
    result = torch.empty(n, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    moves = [sum_of(inputs, result, r, ranks) for r in range(ranks)]
    groups = [BarrierGroup((ctypes.c_void_p * RANKS)(*[p.data_ptr() for p in pads]), epochs[r].data_ptr(),
                           words.data_ptr(), words.data_ptr() + 4, r, ranks) for r in range(ranks)]
    torch.cuda.synchronize()
    watchdog = threading.Timer(30, lambda: words.fill_(1))                     # a hang becomes a failure
    watchdog.start()
    for _ in range(20):
        for r in range(ranks):
            with torch.cuda.stream(streams[r]):
                inputs[r].normal_()
                assert gpu.box(groups[r], blocks, [moves[r]]) == 0
        torch.cuda.synchronize()
        same(result, reduced([t.cpu() for t in inputs], "sum", torch.float32), "eager")
    graphs = [torch.cuda.CUDAGraph() for _ in range(ranks)]
    for r in range(ranks):
        with torch.cuda.graph(graphs[r], stream=streams[r]):
            assert gpu.box(groups[r], blocks, [moves[r]]) == 0
    for _ in range(20):
        for r in range(ranks):
            with torch.cuda.stream(streams[r]):
                inputs[r].normal_()
                graphs[r].replay()
        torch.cuda.synchronize()
        same(result, reduced([t.cpu() for t in inputs], "sum", torch.float32), "replayed")
    watchdog.cancel()
    assert words.tolist() == [0, 0]
    with torch.cuda.stream(streams[0]):              # alone: it waits until it is told to stop
        assert gpu.box(groups[0], blocks, [moves[0]]) == 0
        words[0] = 1
    torch.cuda.synchronize()
    assert words[1] == 1


OWNER = """
import ctypes, sys, torch
lib = ctypes.CDLL(sys.argv[1])
x = torch.arange(1 << 20, dtype=torch.float32, device="cuda")[1000:]
memory = (ctypes.c_uint8 * 80)()
torch.cuda.synchronize()
assert lib.gt_cuda_ipc_export(0, ctypes.c_void_p(x.data_ptr()), memory) == 0
print(bytes(memory).hex(), flush=True)
sys.stdin.readline()
torch.cuda.synchronize()
assert (x[:500] == 7).all()
"""


@needs_gpu
def test_memory_of_another_process(gpu: Library, folder: Path) -> None:
    """Read and written through CUDA IPC, at an offset of what was allocated; the split mode of boxing."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder / "gpu.so")], text=True, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
    assert owner.stdin and owner.stdout
    memory = ctypes.create_string_buffer(bytes.fromhex(owner.stdout.readline()), 80)
    data = ctypes.c_void_p()
    assert gpu.lib.gt_cuda_ipc_open(0, memory, ctypes.byref(data)) == 0
    here, sevens = torch.empty(1000, device="cuda"), torch.full((500,), 7.0, device="cuda")
    theirs = ShardPlace(data.value, Strides(1))
    for source, target, count in ((theirs, shard(here), 1000), (shard(sevens), theirs, 500)):
        region = Region(1, 1, 1, 0, 1, 0, Strides(count))
        gpu.check(gpu.reduce([move([region], [Corner(0)] * 2, [source], [target], torch.float32, torch.float32)]))
    assert torch.equal(here.cpu(), torch.arange(1000, 2000).float())
    torch.cuda.synchronize()
    gpu.check(gpu.lib.gt_cuda_ipc_close(0, memory, data))
    owner.communicate("go on\n", timeout=60)
    assert owner.returncode == 0
