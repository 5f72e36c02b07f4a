"""A device that torch does not know from before: what any accelerator is for this library, in the memory of the host.

    load()              the device "privateuseone", of as many as STAND_IN_DEVICES says (4)
    load("npu")         the same under a name of its own, as backends have them
    load("cuda")        no stand-in: the GPUs of this host
    kernels_for_tests("npu")     the kernels of csrc/ for it: the GPU's, run as threads
    plant("GT_BAD_COPY")     a mistake in one of them, of enum gt_plant; plant("GT_NO_PLANT") takes it away

`native/stand_in.cpp` says what it is. One process can load it once, and autograd counts devices when it starts: before
anything else runs backward.
"""
from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import struct
import subprocess
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cuda_library import GXX, SOURCES
from torch.utils import cpp_extension

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "tests/native/stand_in.cpp"
THREADS = ROOT / "tests/native/cuda_threads.cpp"
_FLAGS = ["-std=c++20", "-O1", "-Wall",
          f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
_LIBRARIES = [f"-L{cpp_extension.TORCH_LIB_PATH}", "-ltorch_cpu", "-lc10"]


def _compiled(name: str, sources: list[Path], flags: list[Any], libraries: list[str]) -> Path:
    """The library of the last source, compiled where it was not, for these sources and this torch."""
    content = b"".join(source.read_bytes() for source in sources)
    key = hashlib.sha256(content + f"{torch.__version__} {flags} {libraries}".encode()).hexdigest()[:16]
    path = ROOT / "build" / f"{name}_{key}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*flags, "-fPIC", "-shared", sources[-1], *libraries, "-o", part], capture_output=True,
                              text=True)
        assert done.returncode == 0, done.stderr
        part.rename(path)
    return path


def built() -> Path:
    """The library of the device."""
    includes = [word for folder in cpp_extension.include_paths() for word in ("-isystem", folder)]
    return _compiled("stand_in", [SOURCE], ["g++", *_FLAGS, *includes], _LIBRARIES)


def built_kernels() -> Path:
    """The library of its kernels. A block has few threads, as each is one of the operating system."""
    headers = sorted((ROOT / "csrc").rglob("*.h"))
    return _compiled("threads", [*headers, *SOURCES, THREADS], [*GXX, "-DGT_PLANTS", "-DGT_THREADS=2"], ["-lpthread"])


def load(name: str = "privateuseone") -> str:
    """Make it a device of this process; its name."""
    global _library
    if name == "cuda":
        torch.backends.cudnn.allow_tf32 = False      # the oracle is the CPU
        return name
    torch.ops.load_library(built())
    _library = ctypes.CDLL(str(built()))
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, _module(name))
    return name


_library: Any = None


def waits(stream: torch.Stream, of: torch.Stream) -> int:
    """How often one stream was told to wait for another."""
    return int(_library.stand_in_waits(ctypes.c_int64(stream.stream_id), ctypes.c_int64(of.stream_id)))


@contextmanager
def memory_lent() -> Iterator[None]:
    """Inside, kernels that get addresses may use the memory of the devices."""
    _library.stand_in_lend(1)
    try:
        yield
    finally:
        _library.stand_in_lend(-1)


def kernels_for_tests(type: str) -> Any:
    """The kernels of csrc/ for devices of this type, with a list `calls` of what is called."""
    if type != "cuda":
        return _thread_kernels(type)
    from globaltensor.runtime import cuda_kernels

    class SeenKernels(cuda_kernels.KernelLibrary):
        calls: list[str] = []

        def call(self, function: str, *args: Any) -> int:
            self.calls.append(function)
            return super().call(function, *args)

    cuda_kernels.KernelLibrary = SeenKernels  # type: ignore[misc]
    return cuda_kernels.find_cuda_kernels()


def _thread_kernels(type: str) -> Any:
    """The kernels as threads."""
    from globaltensor.runtime.kernel_library import KernelLibrary  # after the device

    opened: list[mmap.mmap] = []

    class ThreadKernels(KernelLibrary):
        calls: list[str] = []

        def call(self, function: str, *args: Any) -> int:
            self.calls.append(function)
            with memory_lent():
                return super().call(function, *args)

        def stream(self, index: int) -> None:
            return None

        def host_words(self, count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32)

        # What CUDA IPC is between GPUs: files of memory, which other processes map.
        def export_memory(self, t: torch.Tensor) -> bytes:
            offset, size = ctypes.c_size_t(), ctypes.c_size_t()
            _library.stand_in_file.argtypes = [ctypes.c_void_p] * 3
            file = _library.stand_in_file(t.data_ptr(), ctypes.byref(offset), ctypes.byref(size))
            assert file >= 0
            return struct.pack("=qqqq", os.getpid(), file, offset.value, size.value).ljust(80, b"\0")

        def open_memory(self, index: int, handle: bytes) -> int:
            pid, file, offset, size = struct.unpack("=qqqq", handle[:32])
            with open(f"/proc/{pid}/fd/{file}", "r+b") as shared:
                opened.append(mmap.mmap(shared.fileno(), size))
            return ctypes.addressof(ctypes.c_char.from_buffer(opened[-1])) + offset

    return ThreadKernels(built_kernels(), type)


def plant(fault: str) -> None:
    """Plant a mistake in the kernels."""
    faults = re.search(r"enum gt_plant {(.*?)}", (ROOT / "csrc/common/device.h").read_text(), re.S)
    names = re.findall(r"(?m)\bGT_\w+", re.sub("//.*", "", faults[1]))
    ctypes.CDLL(str(built_kernels())).gt_plant_fault(names.index(fault))


def _module(name: str) -> types.ModuleType:
    """What torch and this library ask a backend's module for."""
    count = int(os.environ.get("STAND_IN_DEVICES", 4))
    module: Any = types.ModuleType(f"torch.{name}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: count
    module.current_device = torch.accelerator.current_device_index
    module.device = lambda device: torch.accelerator.device_index(torch.device(device).index)
    module.set_device = torch.accelerator.set_device_index
    module.synchronize = lambda device=None: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.default_generators = tuple(torch.Generator(torch.device(name, i)) for i in range(count))
    module.manual_seed_all = lambda seed: [g.manual_seed(seed) for g in module.default_generators] and None
    module.get_rng_state = lambda device=0: module.default_generators[torch.device(device).index or 0].get_state()
    module.set_rng_state = lambda state, device=0: module.default_generators[
        torch.device(device).index or 0].set_state(state)
    return module
