"""The library of CUDA kernels as Python sees it: its calls, how it is built.

    library = Library(build(folder), "cuda")         # or Library(build_threads(folder), "cpu"): threads for a GPU
    library.reduce([move(regions, corners, sources, targets, op="sum")])
    library.fill("normal", key, shape, box, out, mean, std)

What lies where goes to the kernel as addresses and strides of torch tensors, which must live until the stream is done.
"""
from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from globaltensor.boxings.copy_plan import CopyMove, ShardPlace, Strides
from globaltensor.boxings.kernel_program import OPS
from globaltensor.boxings.process_boxing import BarrierGroup
from globaltensor.runtime.kernel_library import NEEDS_ROOM, REDUCED

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "csrc").rglob("*.cu"))
GXX = ["g++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fno-strict-aliasing",
       "-ffp-contract=off", "-I", ROOT / "csrc"]
NVCC = ["nvcc", "-std=c++17", "-O3", "--fmad=false", "-Xcompiler",
        "-fPIC,-Wall,-Wextra,-Wno-unknown-pragmas,-fvisibility=hidden"]

BAD_DTYPE, MISALIGNED = -1, -3                       # enum gt_cuda_status


class Corner(ctypes.Structure):
    _fields_ = [("shard", ctypes.c_int64), ("start", Strides)]


class Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("ndim", "sources", "targets", "part", "parts", "first")]
    _fields_ += [("size", Strides)]


def shard(t: torch.Tensor) -> ShardPlace:
    return ShardPlace(t.data_ptr(), Strides(*t.stride()))


def move(regions: Sequence[Region] | bytes, corners: Sequence[Corner] | bytes, sources: Sequence[ShardPlace],
         targets: Sequence[ShardPlace], source: torch.dtype, target: torch.dtype, op: str | int = "sum") -> CopyMove:
    """One tensor's boxing. Regions and corners may also be packed, as boxings/kernel_program.py has them."""
    def packed(what: Sequence | bytes, of: type) -> ctypes.Array:
        return (ctypes.create_string_buffer(what, max(len(what), 1)) if isinstance(what, bytes) else
                (of * max(len(what), 1))(*what))

    held = packed(regions, Region), packed(corners, Corner), packed(sources, ShardPlace), packed(targets, ShardPlace)
    count = len(regions) // ctypes.sizeof(Region) if isinstance(regions, bytes) else len(regions)
    at = [ctypes.addressof(x) for x in held]
    made = CopyMove(at[0], count, *at[1:], REDUCED.index(source), REDUCED.index(target), OPS.get(op, op))
    made.held = held                                 # lives as long as the move does
    return made


class Library:
    """The kernels and the device they work on."""

    def __init__(self, path: Path, device: str = "cuda") -> None:
        self.lib, self.device = ctypes.CDLL(str(path)), torch.device(device)
        self.number = self.device.index or 0
        if self.on_gpu:
            self.lib.gt_cuda_message.restype = ctypes.c_char_p
            self.check(self.lib.gt_cuda_load(self.number))

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream if self.on_gpu else None)

    def check(self, status: int) -> None:
        if status:
            raise RuntimeError(self.lib.gt_cuda_message(status).decode() if self.on_gpu else f"status {status}")

    def reduce(self, moves: Sequence[CopyMove], give_room: bool = True) -> int:
        """gt_cuda_reduce, with room for the table where it asks for it; its status."""
        table, count, none = (CopyMove * len(moves))(*moves), ctypes.c_int64(len(moves)), ctypes.c_size_t(0)
        status = self.lib.gt_cuda_reduce(self.number, table, count, None, none, self.stream)
        if status == NEEDS_ROOM and give_room:
            size = ctypes.c_size_t()
            self.check(self.lib.gt_cuda_room(table, count, ctypes.byref(size)))
            room = torch.empty(size.value // 8, dtype=torch.int64, device=self.device)    # reused in stream order
            status = self.lib.gt_cuda_reduce(self.number, table, count, ctypes.c_void_p(room.data_ptr()), size,
                                             self.stream)
        return status

    def box(self, group: BarrierGroup, blocks: int, moves: Sequence[CopyMove]) -> int:
        """gt_cuda_reduce_in_sync of a table that needs no room; its status."""
        table, no_room = (CopyMove * len(moves))(*moves), ctypes.c_size_t(0)
        return self.lib.gt_cuda_reduce_in_sync(self.number, ctypes.byref(group), blocks, table,
                                               ctypes.c_int64(len(moves)), None, no_room, self.stream)

    def fill(self, law: str, key: int, shape: Sequence[int], box: Sequence[tuple[int, int]], out: torch.Tensor,
             *parameters: float | int) -> None:
        """Random numbers of the box into `out`, contiguous, by gt_cuda_fill_<law>, with parameters as in fill.h."""
        numbers = [*shape, *itertools.chain(*box)]
        self.check(getattr(self.lib, f"gt_cuda_fill_{law}")(
            self.number, self.stream, ctypes.c_void_p(out.data_ptr()), REDUCED.index(out.dtype), ctypes.c_uint64(key),
            len(shape), (ctypes.c_int64 * max(len(numbers), 1))(*numbers),
            *[ctypes.c_double(p) if isinstance(p, float) else ctypes.c_uint64(p) for p in parameters]))


def command(*words: object) -> str:
    """What a command says, which must succeed."""
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def build(folder: Path) -> Path:
    """The library for the GPU that is here."""
    major, minor = torch.cuda.get_device_capability()
    command(*NVCC, "-shared", f"-arch=sm_{major}{minor}", "-o", folder / "gpu.so", *SOURCES)
    return folder / "gpu.so"


def build_threads(folder: Path) -> Path:
    """The same as threads of this process. Launches are small, so that what is larger is divided."""
    command(*GXX, "-DGT_JOB_ELEMENTS=5000", "-DGT_FILL_ROWS=16", "-fPIC", "-shared",
            ROOT / "tests/native/cuda_threads.cpp", "-o", folder / "threads.so", "-lpthread")
    return folder / "threads.so"
