"""The measured limit of a host: `ceiling.c`, compiled where it is used, and its shared memory as tensors.

It also is how the workers of a benchmark meet without help of what they measure.
"""
from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from ctypes import CDLL, c_char, c_double, c_int, c_size_t, c_void_p
from pathlib import Path

import torch

OPS = {"P -> B": 0, "S -> B": 1, "P -> S": 2, "S -> S": 3, "P -> new B": 4}
SPINS = 20_000                                       # some 100 us before a core is given away


def compiled(folder: str) -> str:
    """The path of the library, made by gcc in `folder`."""
    if shutil.which("gcc") is None:
        raise SystemExit("the measured limit is plain C: it needs gcc")
    path = f"{folder}/ceiling.so"
    subprocess.run(["gcc", "-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-o", path,
                    str(Path(__file__).with_name("ceiling.c"))], check=True)
    return path


def bound(path: str) -> CDLL:
    """The library with the types of its functions."""
    library = CDLL(path)
    for name, result, *arguments in [
            ("bytes", c_size_t, c_int, c_size_t), ("open", None, c_void_p, c_int, c_int, c_size_t, c_int),
            ("source", c_void_p, c_int), ("result", c_void_p, c_int), ("meet", None), ("slowest", c_double, c_double),
            ("run", c_double, c_int, c_size_t, c_int, c_int, c_int), ("pingpong", c_double)]:
        function = getattr(library, f"ceiling_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class Ceiling:
    """One rank's side. `memory` is a file of `ceiling_bytes`; no shard is larger than `largest` bytes."""

    def __init__(self, library: str, memory: str, rank: int, ranks: int, largest: int, cores: int) -> None:
        self.library, self.rank = bound(library), rank
        with open(memory, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        base = ctypes.addressof(c_char.from_buffer(self.memory))
        self.library.ceiling_open(base, rank, ranks, largest, SPINS if ranks <= cores else 60)
        self.meet, self.slowest, self.pingpong = (getattr(self.library, f"ceiling_{name}")
                                                  for name in ("meet", "slowest", "pingpong"))

    def source(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Where this rank's shard has to be."""
        return self._tensor(self.library.ceiling_source(self.rank), shape, dtype)

    def result(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Where the new shard will be; of "P -> B" it is where the old one was."""
        return self._tensor(self.library.ceiling_result(self.rank), shape, dtype)

    def _tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return torch.frombuffer((c_char * size).from_address(address), dtype=dtype).view(shape)

    def run(self, boxing: str, nbytes: int, itemsize: int, times: int, fresh: bool = False) -> float:
        """Do it so many times; seconds. `nbytes` and `fresh` as in `ceiling.c`."""
        return self.library.ceiling_run(OPS[boxing], nbytes, itemsize, times, fresh)
