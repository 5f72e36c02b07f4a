"""A boxing program as the kernels of a device take it: tables that are made once, and addresses for each run."""
from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from globaltensor.boxings.kernel_program import DIMS, KernelProgram
from globaltensor.runtime.kernel_library import dtype_code

Strides = ctypes.c_int64 * DIMS


class ShardPlace(ctypes.Structure):
    """gt_shard: where a shard is, and its strides in elements."""

    _fields_ = [("data", ctypes.c_void_p), ("stride", Strides)]


class CopyMove(ctypes.Structure):
    """gt_cuda_move: one tensor's boxing."""

    _fields_ = [("regions", ctypes.c_void_p), ("count", ctypes.c_int64), ("corners", ctypes.c_void_p),
                ("sources", ctypes.c_void_p), ("targets", ctypes.c_void_p),
                ("source_dtype", ctypes.c_int32), ("target_dtype", ctypes.c_int32), ("op", ctypes.c_int32)]


_WORDS = ctypes.sizeof(ShardPlace) // 8
_move = struct.Struct("=5q3i4x")
assert _move.size == ctypes.sizeof(CopyMove)


class CopyPlan:
    """A program of kernel_program.py for tensors of a dtype. `size` is that of the tables of shards."""

    def __init__(self, program: KernelProgram, dtype: torch.dtype, size: int) -> None:
        texts = program.regions, program.corners
        self._held = [ctypes.create_string_buffer(text, max(len(text), 1)) for text in texts]
        self._regions, self._corners = map(ctypes.addressof, self._held)
        self._count, self._end = program.region_count, (*2 * [dtype_code(dtype)], program.op)
        self._places, self._size = struct.Struct(f"={2 * _WORDS * size}q"), size
        self._Tables = ctypes.c_char * self._places.size

    def at(self, sources: Mapping[int, torch.Tensor], targets: Mapping[int, torch.Tensor]) -> CopyMove:
        """The move between these shards, by their places in the tables. They must live until it has been launched."""
        return self.at_addresses(*({place: (t.data_ptr(), t.stride()) for place, t in shards.items()}
                                   for shards in (sources, targets)))

    def at_addresses(self, sources: Mapping[int, tuple[int, Sequence[int]]],
                     targets: Mapping[int, tuple[int, Sequence[int]]]) -> CopyMove:
        """The same of shards that are given by their addresses and strides."""
        words = [0] * (2 * _WORDS * self._size)      # both tables, packed: structures take several times as long
        for start, shards in ((0, sources), (self._size, targets)):
            for place, (data, stride) in shards.items():
                at = _WORDS * (start + place)
                words[at] = data
                words[at + 1:at + 1 + len(stride)] = stride
        tables = self._Tables.from_buffer_copy(self._places.pack(*words))
        first = ctypes.addressof(tables)
        move = CopyMove.from_buffer_copy(_move.pack(self._regions, self._count, self._corners, first,
                                                    first + self._places.size // 2, *self._end))
        move.held = (self, tables)                   # as long as the move lives
        return move


def move_array(moves: Sequence[CopyMove]) -> ctypes.Array[Any]:
    """The moves in a row, as a library takes them; valid as long as the moves are."""
    return (CopyMove * len(moves))(*moves)
