"""The GPU's kernels, on a GPU where there is one and everywhere on threads that stand for it.

The same sources are built twice: by nvcc, and by g++ through `csrc/device.h`, where every CUDA thread is a thread. So
values and index arithmetic are tested by the same tests on both, against torch on the CPU, bit for bit; the meetings of
ranks by ThreadSanitizer, which must also find every mistake that is planted in them.
"""
from __future__ import annotations

import ctypes
import itertools
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_library import (BAD_DTYPE, BLOCKS, DIMS, DTYPES, GXX, MISALIGNED, NEEDS_ROOM, NVCC, RANKS, ROOT, SOURCES, Corner,
                          Group, Library, Move, Numbers, Region, Shard, build, build_threads, command, move, shard)
from shards import cut, join, place, some

from globaltensor import kernels
from globaltensor.boxing.program import compile_program
from globaltensor.layout import layout
from globaltensor.native import core
from globaltensor.sbp import broadcast, partial_max, partial_sum, split

SEED = int(os.environ.get("CUDA_SEED") or 20_261_121)
print(f"tests/test_cuda.py: CUDA_SEED={SEED}")
FLOATS = DTYPES[:4]
PAIRS = [(a, b) for a in FLOATS for b in FLOATS] + [(d, d) for d in DTYPES[4:]]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")



@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture(scope="module", params=["threads", "gpu"])
def machine(request: pytest.FixtureRequest, folder: Path) -> Library:
    if request.param == "threads":
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
def strange(shape: tuple[int, ...], dtype: torch.dtype, rng: random.Random, plain: bool = False) -> torch.Tensor:
    """Values of all kinds, specials of floats too, in memory of any order, offset and gaps."""
    ndim = len(shape)
    order = list(range(ndim))
    gap, offset = 1, 0
    if not plain:
        rng.shuffle(order)
        gap, offset = rng.choice([1, 1, 1, 2]), rng.choice([0, 0, 1, 3])
    stride, step = [0] * ndim, gap
    for dim in reversed(order):
        stride[dim], step = step, step * (shape[dim] + (0 if plain or step > 10_000 else rng.choice([0, 0, 0, 1, 3])))
    memory = torch.empty(offset + max(step, 1), dtype=dtype)
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    if dtype.is_floating_point or dtype.is_complex:
        real = memory.view(dtype.to_real()) if dtype.is_complex else memory
        real.copy_(torch.randn(real.shape, generator=generator, dtype=torch.float64) * 10 ** rng.choice([-6, 0, 0, 3]))
        kinds = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 6e-8, 65519.0, 65520.0, 3e38, 1.0, -1.0])
        at = torch.randint(len(real), (len(real) // 8,), generator=generator)
        real[at] = kinds[torch.randint(len(kinds), at.shape, generator=generator)].to(real.dtype)
    else:
        memory.copy_(torch.randint(-2**62, 2**62, memory.shape, generator=generator).to(dtype)
                     if dtype != torch.bool else torch.rand(memory.shape, generator=generator) < 0.4)
    return memory.as_strided(shape, stride, offset)


def memory_of(t: torch.Tensor) -> torch.Tensor:
    """All of the storage of a tensor, the gaps too."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())


def reduced(terms: list[torch.Tensor], op: str, dtype: torch.dtype) -> torch.Tensor:
    """What a region is, by torch: the reduction in order, 16-bit floats in float32, rounded once."""
    if len(terms) == 1 and terms[0].dtype == dtype:
        return terms[0].clone()
    if dtype.is_complex:                             # torch multiplies by alpha = 1, which makes NaN of infinity
        return torch.view_as_complex(reduced([torch.view_as_real(t) for t in terms], op, dtype.to_real()).contiguous())
    narrow = dtype in (torch.float16, torch.bfloat16)
    wide = [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in terms]
    total = wide[0]
    for t in wide[1:]:
        if op == "sum":
            total = total | t if t.dtype == torch.bool else total + t
        else:
            total = torch.where((total > t if op == "max" else total < t) | (total != total), total, t)
    return total.float().to(dtype) if narrow else total.to(dtype)


def same(found: torch.Tensor, right: torch.Tensor, what: object) -> None:
    """Bit for bit; a NaN is a NaN."""
    found = found.cpu()
    if found.dtype.is_complex:
        found, right = torch.view_as_real(found), torch.view_as_real(right)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.dtype.itemsize]
    wrong = (found.view(bits) != right.view(bits)) & ~((found != found) & (right != right))
    assert not wrong.any(), f"{what} CUDA_SEED={SEED}: {int(wrong.sum())} of {wrong.numel()} differ, first at " \
        f"{wrong.nonzero()[0].tolist()}: {found[wrong][0]} for {right[wrong][0]}"


class Job:
    """A boxing of one tensor at random: shards, regions, and what torch makes of them."""

    def __init__(self, rng: random.Random, device: torch.device, src: torch.dtype, dst: torch.dtype, op: str,
                 sizes: list[int], sources: int, targets: int, plain: bool = False) -> None:
        self.src, self.dst, self.op, self.device = src, dst, op, device
        grown = [[*sizes] for _ in range(sources + targets)]
        for shape in [] if plain else grown:
            for dim in range(len(sizes)):
                more = rng.choice([0, 0, 2, 16])
                if math.prod(n + 1 for n in shape) * (more + 1) < 50_000:
                    shape[dim] += more
        self.starts = [[rng.randint(0, big - n) for big, n in zip(shape, sizes)] for shape in grown]
        tensors = [strange(tuple(shape), dtype, rng, plain)
                   for shape, dtype in zip(grown, [src] * sources + [dst] * targets)]
        if targets and sources and src == dst and rng.random() < 0.2:          # in place: the same elements
            tensors[sources], self.starts[sources] = tensors[0], self.starts[0]
        self.tensors, self.count, self.sizes = tensors, sources, sizes
        self.parts = rng.choice([1, 1, 1, 2, 3])
        views = [t[tuple(slice(a, a + n) for a, n in zip(start, sizes))] for t, start in zip(tensors, self.starts)]
        storage = {id(t): memory_of(t).clone() for t in tensors}
        value = reduced(views[:sources], op, dst) if sources else torch.zeros(sizes, dtype=dst)
        self.right = []
        for t, start in list(zip(tensors, self.starts))[sources:]:
            held = storage[id(t)].as_strided(t.shape, t.stride(), t.storage_offset())
            held[tuple(slice(a, a + n) for a, n in zip(start, sizes))] = value
            self.right.append(storage[id(t)])
        moved = {id(t): memory_of(t).to(device, copy=True) for t in tensors}
        self.made = [moved[id(t)] for t in tensors]

    def move(self) -> Move:
        held = [Shard(m.data_ptr() + t.storage_offset() * t.itemsize, Numbers(*t.stride()))
                for t, m in zip(self.tensors, self.made)]
        corners = [Corner(i if i < self.count else i - self.count, Numbers(*start)) for i, start in enumerate(self.starts)]
        regions = [Region(len(self.sizes), self.count, len(self.tensors) - self.count, part, self.parts, 0,
                          Numbers(*self.sizes)) for part in range(self.parts)]
        return move(regions, corners, held[:self.count], held[self.count:], self.src, self.dst, self.op)

    def check(self, what: object) -> None:
        for made, right in zip(self.made[self.count:], self.right):
            same(made, right, (what, self.src, self.dst, self.op, self.sizes, self.count, self.parts,
                               [t.stride() for t in self.tensors], self.starts))


def sizes_at_random(rng: random.Random, most: int = 3000) -> list[int]:
    while True:
        sizes = [rng.choice([0, 1, 1, 2, 3, 4, 5, 8, 13, 16, 17, 32, 33, 64, 65, 100, 257])
                 for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 8]))]
        if math.prod(max(n, 1) for n in sizes) <= most and (0 not in sizes or rng.random() < 0.1):
            return sizes


@pytest.mark.parametrize("src, dst", PAIRS, ids=lambda d: str(d)[6:])
def test_any_region_is_what_torch_makes_of_it(machine: Library, src: torch.dtype, dst: torch.dtype) -> None:
    rng = random.Random(f"{SEED} {src} {dst}")
    for i in range(24):
        op = "sum" if src.is_complex else rng.choice(["sum", "max", "min"])
        job = Job(rng, machine.device, src, dst, op, sizes_at_random(rng), rng.choice([0, 1, 1, 2, 3, 4]),
                  rng.choice([1, 1, 2, 3]), plain=i % 2 == 0)
        assert machine.reduce([job.move()]) == 0
        job.check(i)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("sizes", [[1000], [7, 1000], [37, 70], [64, 64], [3, 65, 66], [9, 2, 40], [20011]], ids=str)
def test_contiguous_aligned_and_not(machine: Library, dtype: torch.dtype, sizes: list[int]) -> None:
    """Words of every width, with a head and a tail or without; and all ways to turn."""
    rng = random.Random(f"{SEED} {dtype} {sizes}")
    for sources, shift, order in itertools.product((1, 3), (0, 1, 2), list(itertools.permutations(range(len(sizes))))[:3]):
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
        asked = Job(rng, machine.device, dtype, dtype, "sum", [5], sources, 1, plain=True).move()
        for name, value in changed.items():
            setattr(asked, name, value)
        return machine.reduce([asked])

    raw4 = len(DTYPES) + 2
    assert status(torch.float32, 1, target_dtype=DTYPES.index(torch.int32)) == BAD_DTYPE
    assert status(torch.float32, 1, source_dtype=raw4, target_dtype=raw4) == 0       # raw words are copied
    assert status(torch.float32, 2, source_dtype=raw4, target_dtype=raw4) == BAD_DTYPE
    assert status(torch.complex64, 2, op=1) == BAD_DTYPE
    odd = torch.zeros(20, dtype=torch.uint8, device=machine.device)
    table = [Shard(odd.data_ptr() + 1, Numbers(1))]
    region, corners = Region(1, 1, 1, 0, 1, 0, Numbers(3)), [Corner(0), Corner(0)]
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
        value = some(torch.empty(shape, dtype=dtype), generator)
        held = [t.to(machine.device) for t in cut(value, src, ranks, generator)]
        a, b = layout(where, (src,)), layout(where, (dst,))
        program = compile_program(a, b, shape, dtype.itemsize, range(ranks))
        made = [torch.full(b.local_shape(shape, r), 77.0, dtype=dtype, device=machine.device) for r in range(ranks)]
        assert machine.reduce([move(program.regions, program.corners, [shard(t) for t in held],
                                    [shard(t) for t in made], dtype, dtype, program.op)]) == 0
        expected = join([t.cpu() for t in held], src)
        found = join([t.cpu() for t in made], dst)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda m: f"{a} -> {b} {shape}: {m}")


@pytest.mark.skipif(core is None, reason="the extension is not built")
@pytest.mark.parametrize("src, dst", PAIRS, ids=lambda d: str(d)[6:])
def test_the_kernel_of_the_cpu_makes_the_same(machine: Library, src: torch.dtype, dst: torch.dtype) -> None:
    rng = random.Random(f"{SEED} cpu {src} {dst}")
    for i in range(12):
        op = "sum" if src.is_complex else rng.choice(["sum", "max", "min"])
        job = Job(rng, machine.device, src, dst, op, sizes_at_random(rng), rng.choice([1, 2, 3]), 1, plain=i % 2 == 0)
        assert machine.reduce([job.move()]) == 0
        found, job.made = job.made, [memory_of(t) for t in job.tensors]
        asked = job.move()
        assert core.gt_reduce(ctypes.c_void_p(asked.regions), ctypes.c_int64(asked.count), ctypes.c_void_p(asked.corners),
                              asked.op, ctypes.c_void_p(asked.sources), asked.source_dtype,
                              ctypes.c_void_p(asked.targets), asked.target_dtype) == 0
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
        "bernoulli": ([*DTYPES[:10], torch.complex64], (0.3,), lambda d: [math.ceil(0.3 * 2**32)]),
    }


BOXES = [((), ()), ((11,), ((3, 9),)), ((5000,), ((0, 5000),)), ((5003,), ((1, 5002),)), ((64, 48), ((0, 64), (16, 32))),
         ((33, 17), ((4, 30), (3, 5))), ((5, 7, 9, 3), ((1, 4), (2, 6), (0, 9), (1, 2))), ((4, 3), ((2, 2), (0, 3))),
         ((2**34 + 3,), ((2**34 - 5, 2**34 + 2),)), ((2**20, 2**20, 2**20), ((2**20 - 1, 2**20), (17, 19), (5, 600)))]


@pytest.mark.parametrize("law", laws())
def test_random_numbers_are_those_of_the_twin(machine: Library, law: str) -> None:
    dtypes, arguments, prepared = laws()[law]
    name = law.split()[0]
    for dtype, (shape, box), shift in itertools.product(dtypes, BOXES, (0, 1)):
        key = 0xFEDCBA9876543210 + shift
        found = filled(machine, name, key, shape, box, dtype, prepared(dtype), shift)
        expected = getattr(kernels, name)(key, shape, box, dtype, "cpu", *arguments)
        same(found, expected, (law, dtype, shape, box))


def test_random_words_are_those_of_the_twin(machine: Library) -> None:
    for (shape, box), stream in itertools.product(BOXES, (0, 7, 2**32 - 1)):
        found = filled(machine, "words", 3, shape, box, torch.int64, [stream])
        same(found, kernels.random_words(3, shape, box, "cpu", stream), (shape, box, stream))


# ------------------------------------------------------------------ the choice of paths, and the meetings
def test_jobs_take_the_widest_words(folder: Path) -> None:
    command(*GXX, ROOT / "tests/native/cuda_jobs.cpp", "-o", folder / "jobs", "-lpthread")
    command(folder / "jobs")


PLANTS = {0: "nothing", 1: "no entry barrier", 2: "no exit barrier", 3: "no barrier of the block before it posts",
          4: "relaxed store", 5: "relaxed load", 6: "no barrier between turned tiles"}


@pytest.fixture(scope="module")
def meeting(folder: Path) -> Path:
    command(*GXX, "-fsanitize=thread", "-DGT_PLANTS", "-DGT_THREADS=16", ROOT / "tests/native/cuda_meeting.cpp",
            "-o", folder / "meeting", "-lpthread")
    return folder / "meeting"


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


# ------------------------------------------------------------------ on a GPU only
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture
def gpu(machine: Library) -> Library:
    if machine.device.type != "cuda":
        pytest.skip("threads do not stand for streams")
    return machine


def sum_of(tensors: list[torch.Tensor], into: torch.Tensor, part: int, parts: int) -> Move:
    """The sum of vectors, of which a part is made."""
    region = Region(1, len(tensors), 1, part, parts, 0, Numbers(into.numel()))
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
    groups = [Group((ctypes.c_void_p * RANKS)(*[p.data_ptr() for p in pads]), epochs[r].data_ptr(), words.data_ptr(),
                    words.data_ptr() + 4, r, ranks) for r in range(ranks)]
    torch.cuda.synchronize()

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
    theirs = Shard(data.value, Numbers(1))
    for source, target, count in ((theirs, shard(here), 1000), (shard(sevens), theirs, 500)):
        region = Region(1, 1, 1, 0, 1, 0, Numbers(count))
        gpu.check(gpu.reduce([move([region], [Corner(0), Corner(0)], [source], [target], torch.float32, torch.float32)]))
    assert torch.equal(here.cpu(), torch.arange(1000, 2000).float())
    torch.cuda.synchronize()
    gpu.check(gpu.lib.gt_cuda_ipc_close(0, memory, data))
    owner.communicate("go on\n", timeout=60)
    assert owner.returncode == 0
