"""A device that torch does not know from before: what any accelerator is for this library, in the memory of the host.

    load()              the device "privateuseone", of as many as STAND_IN_DEVICES says (4)
    load("npu")         the same under a name of its own, as backends have them

`native/stand_in.cpp` says what it is. One process can load it once, and autograd counts devices when it starts: before
anything else runs backward.
"""
from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "tests/native/stand_in.cpp"
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-shared", "-Wall",
          f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
_LIBRARIES = [f"-L{cpp_extension.TORCH_LIB_PATH}", "-ltorch_cpu", "-lc10"]


def built() -> Path:
    """The library, compiled where it was not, for this torch."""
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {_FLAGS} {_LIBRARIES}".encode()).hexdigest()[:16]
    path = ROOT / "build" / f"stand_in_{key}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        includes = [word for folder in cpp_extension.include_paths() for word in ("-isystem", folder)]
        done = subprocess.run(["g++", *_FLAGS, *includes, SOURCE, *_LIBRARIES, "-o", part], capture_output=True,
                              text=True)
        assert done.returncode == 0, done.stderr
        part.rename(path)
    return path


def load(name: str = "privateuseone") -> str:
    """Make it a device of this process; its name."""
    global _library
    torch.ops.load_library(built())
    _library = ctypes.CDLL(str(built()))
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, _module(name))
    return name


_library: Any = None


@contextmanager
def memory_lent() -> Iterator[None]:
    """Inside, kernels that get addresses may use the memory of the devices."""
    _library.stand_in_lend(1)
    try:
        yield
    finally:
        _library.stand_in_lend(-1)


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
