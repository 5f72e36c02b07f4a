"""Compiling the CUDA sources of csrc/ with nvcc: at install by setup.py, or at first use (cuda_kernels.py).

It imports nothing of the package, so that setup.py can load it by its path.
"""
from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

# fmad: a product and a sum contracted into one would end in other bits than on a CPU.
FLAGS = ("-O3", "-std=c++17", "--fmad=false", "-shared", "--threads=0", "-Xcompiler", "-fPIC,-fvisibility=hidden")
INSTALLED = ("-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]")
FOLDERS = ("common", "kernels", "philox")            # of csrc/


def find_nvcc() -> str | None:
    """The compiler: of CUDA_HOME, in PATH, or where CUDA is usually installed."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    named = [shutil.which("nvcc", path=f"{home}/bin") for home in homes]
    return next(filter(None, [*named, shutil.which("nvcc"), shutil.which("nvcc", path="/usr/local/cuda/bin")]), None)


def kernel_sources(csrc: Path) -> list[Path]:
    """What the kernels are made of."""
    return sorted(path for folder in FOLDERS for path in (csrc / folder).glob("*") if path.suffix in (".cu", ".h"))


def sources_hash(csrc: Path) -> str:
    """A hash of the sources and of how they are compiled, by which a library is known to be made of them."""
    return _hash_of(kernel_sources(csrc), repr(FLAGS))


def native_hash(csrc: Path) -> str:
    """A hash of the sources of the native code, which setup.py notes beside what it has made of them."""
    return _hash_of(sorted(path for kind in ("h", "cpp") for path in csrc.glob(f"*/*.{kind}")))


def _hash_of(files: Sequence[Path], how: str = "") -> str:
    text = hashlib.sha256(how.encode())
    for path in files:
        text.update(path.name.encode() + path.read_bytes())
    return text.hexdigest()[:16]


def compile_kernels(nvcc: str, csrc: Path, gpus: Sequence[str], target: Path) -> None:
    """Make the library, whole or not at all, and beside it `target.sources`, the hash of its sources. `gpus` are nvcc's
    options that say for which. Raises subprocess.CalledProcessError, with what nvcc says in its stderr."""
    part = target.with_suffix(f".{os.getpid()}.so")
    units = [str(path) for path in kernel_sources(csrc) if path.suffix == ".cu"]
    try:
        subprocess.run([nvcc, *FLAGS, *gpus, "-o", str(part), *units], check=True, capture_output=True, text=True)
        target.with_suffix(".sources").write_text(sources_hash(csrc))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
