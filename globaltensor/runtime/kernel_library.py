"""The kernels of csrc/ for accelerators, as one library: boxing programs and random numbers, on a device.

    library = KernelLibrary(path, "cuda")
    library.load(0)                                  before anything else on device 0
    library.reduce(0, moves)                         boxing programs; boxings/copy_plan.py makes them
    library.fill(0, "normal", out, code, key, numbers, (0.0, 1.0))

One interface, two implementations: nvcc makes GPU code of the sources, and g++ makes ordinary threads of the same
(csrc/common/device.h), on which the tests run all that calls this file. A call enqueues on the current stream of its
device and returns. Whether a kernel is right is not decided here but by a self-test (device_kernels.py).
"""
from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_int, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch

from globaltensor.errors import GlobalTensorError

# In the order of enum gt_dtype: the dtypes that kernels reduce. Others are moved as words of their size.
REDUCED = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32,
           torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128)
NEEDS_ROOM = -2                                      # of enum gt_cuda_status
IPC_BYTES = 80                                       # of gt_cuda_ipc
LAWS: dict[str, list[Any]] = {                       # the parameters of gt_cuda_fill_<law>, after those of all
    "words": [c_uint64], "uniform": 3 * [c_double], "normal": 2 * [c_double], "exponential": 2 * [c_double],
    "integers": 3 * [c_uint64], "bernoulli": [c_uint64]}


def dtype_code(dtype: torch.dtype) -> int:
    """The dtype as kernels count them (enum gt_dtype)."""
    return REDUCED.index(dtype) if dtype in REDUCED else len(REDUCED) + dtype.itemsize.bit_length() - 1


class KernelLibrary:
    """The kernels that one library has for the devices of a type."""

    def __init__(self, path: Path, type: str) -> None:
        self.path, self.type = path, type
        self._lib = ctypes.CDLL(str(path))
        self._lib.gt_cuda_message.restype = c_char_p
        self._lib.gt_cuda_reduce.argtypes = [c_int, c_void_p, c_int64, c_void_p, c_size_t, c_void_p]
        self._lib.gt_cuda_room.argtypes = [c_void_p, c_int64, c_void_p]
        self._lib.gt_cuda_reduce_in_sync.argtypes = [c_int, c_void_p, c_int, c_void_p, c_int64, c_void_p, c_size_t,
                                                     c_void_p]
        for function in ("gt_cuda_ipc_export", "gt_cuda_ipc_open"):
            if hasattr(self._lib, function):         # not of threads
                getattr(self._lib, function).argtypes = [c_int, c_void_p, c_void_p]
        for law, parameters in LAWS.items():
            function = getattr(self._lib, f"gt_cuda_fill_{law}")
            function.argtypes = [c_int, c_void_p, c_void_p, c_int, c_uint64, c_int, c_char_p, *parameters]

    def call(self, function: str, *args: Any) -> int:
        """Call a function of the library; its status. Every use of a device goes through here."""
        return getattr(self._lib, function)(*args)

    def blocks(self, index: int) -> int:
        """How many blocks of a kernel with barriers run at the same time on a device."""
        count = c_int()
        self.check(self.call("gt_cuda_blocks", index, ctypes.byref(count)), "asking for blocks")
        return count.value

    def export_memory(self, t: torch.Tensor) -> bytes:
        """The memory of a tensor, for another process of this host (gt_cuda_ipc)."""
        handle = ctypes.create_string_buffer(IPC_BYTES)
        self.check(self.call("gt_cuda_ipc_export", t.device.index, t.data_ptr(), handle), "sharing memory")
        return handle.raw

    def open_memory(self, index: int, handle: bytes) -> int:
        """The address here of memory that another process exported; it stays open for as long as this process lives."""
        data = c_void_p()
        status = self.call("gt_cuda_ipc_open", index, handle, ctypes.byref(data))
        self.check(status, "opening memory of another process")
        return data.value or 0

    def host_words(self, count: int) -> torch.Tensor:
        """Zeroed words in the memory of the host, which kernels can read and write."""
        return torch.zeros(count, dtype=torch.int32, device="cpu").pin_memory()

    def reduce_in_sync(self, index: int, group: ctypes.Structure, blocks: int, moves: ctypes.Array[Any]) -> None:
        """Do the moves between two barriers of the ranks of a group (gt_cuda_group), which all do so."""
        room = self.room(moves)
        table = torch.empty(room // 8, dtype=torch.int64, device=torch.device(self.type, index))
        self.check(self.call("gt_cuda_reduce_in_sync", index, ctypes.byref(group), blocks, moves, len(moves),
                             table.data_ptr() if room else None, room, self.stream(index)), "boxing between processes")

    def check(self, status: int, what: str) -> None:
        """Raise GlobalTensorError where a status says that a call could not be done."""
        if status:
            meaning = self._lib.gt_cuda_message(status).decode()
            raise GlobalTensorError(f"{what} on {self.type} devices failed: {meaning}",
                                    f"status {status} of {self.path}",
                                    "GLOBALTENSOR_GPU_KERNELS=0 to do without these kernels")

    def load(self, index: int) -> None:
        """Load all kernels on a device, so that no launch has to later."""
        self.check(self.call("gt_cuda_load", index), "loading kernels")

    def reaches(self, index: int, peer: int) -> bool:
        """Can kernels on one device read and write the memory of the other? From then on they can."""
        return self.call("gt_cuda_reach", index, peer) == 0

    def stream(self, index: int) -> int | None:
        """The handle of the device's current stream."""
        return torch.get_device_module(self.type).current_stream(index).cuda_stream

    def room(self, moves: ctypes.Array[Any]) -> int:
        """The bytes that the table of these moves needs on the device; 0 where it travels with the launch."""
        size = c_size_t()
        self.check(self.call("gt_cuda_room", moves, len(moves), ctypes.byref(size)), "planning a boxing")
        return size.value

    def reduce(self, index: int, moves: ctypes.Array[Any]) -> None:
        """Do the moves (gt_cuda_move), none of which depends on another."""
        stream = self.stream(index)
        status = self.call("gt_cuda_reduce", index, moves, len(moves), None, 0, stream)
        if status == NEEDS_ROOM:
            device = torch.device(self.type, index)
            table = torch.empty(self.room(moves) // 8, dtype=torch.int64, device=device)  # reused in stream order
            status = self.call("gt_cuda_reduce", index, moves, len(moves), table.data_ptr(), table.nbytes, stream)
        self.check(status, "boxing")

    def fill(self, index: int, law: str, out: torch.Tensor, code: int, key: int, numbers: bytes,
             parameters: tuple[float, ...]) -> bool:
        """Fill a contiguous tensor of the dtype of this code with random numbers, as gt_cuda_fill_<law> says; False
        where the kernel does not know the dtype, or the slice has too many dims."""
        status = self.call(f"gt_cuda_fill_{law}", index, self.stream(index), out.data_ptr(), code, key,
                           len(numbers) // 24, numbers, *parameters)
        if status > 0:
            self.check(status, "making random numbers")
        return status == 0
