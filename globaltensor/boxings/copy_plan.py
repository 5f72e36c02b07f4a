"""A boxing program as the kernels of a device take it: tables that are made once, and addresses for each run."""
from __future__ import annotations

import ctypes
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


class CopyPlan:
    """A program of kernel_program.py for tensors of a dtype. `size` is that of the tables of shards."""

    def __init__(self, program: KernelProgram, dtype: torch.dtype, size: int) -> None:
        self._regions = ctypes.create_string_buffer(program.regions, max(len(program.regions), 1))
        self._corners = ctypes.create_string_buffer(program.corners, max(len(program.corners), 1))
        self._count, self._op, self._dtype, self._size = program.region_count, program.op, dtype_code(dtype), size

    def at(self, sources: Mapping[int, torch.Tensor], targets: Mapping[int, torch.Tensor]) -> CopyMove:
        """The move between these shards, by their places in the tables. They must live until it has been launched."""
        return self.at_addresses(*({place: (t.data_ptr(), t.stride()) for place, t in shards.items()}
                                   for shards in (sources, targets)))

    def at_addresses(self, sources: Mapping[int, tuple[int, Sequence[int]]],
                     targets: Mapping[int, tuple[int, Sequence[int]]]) -> CopyMove:
        """The same of shards that are given by their addresses and strides."""
        tables = [(ShardPlace * self._size)() for _ in range(2)]
        for table, shards in zip(tables, (sources, targets)):
            for place, (data, stride) in shards.items():
                table[place] = ShardPlace(data, Strides(*stride))
        address = ctypes.addressof
        move = CopyMove(address(self._regions), self._count, address(self._corners), address(tables[0]),
                        address(tables[1]), self._dtype, self._dtype, self._op)
        move.held = (self, tables)                   # as long as the move lives
        return move


def move_array(moves: Sequence[CopyMove]) -> ctypes.Array[Any]:
    """The moves in a row, as a library takes them; valid as long as the moves are."""
    return (CopyMove * len(moves))(*moves)
