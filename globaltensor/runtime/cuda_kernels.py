"""Where the kernels for GPUs come from: what was compiled at install, else nvcc at first use, whose result is kept.

    globaltensor/_cuda.so                            made by setup.py, where nvcc and a torch with CUDA were
    ~/.cache/globaltensor/kernels-HASH.so            made here, for the GPUs of this host, by one process of them

The hash is that of sources, compiler and GPUs, so that neither is ever taken for the other. Without nvcc there are no
kernels: torch ops do their work, and a warning says so, once.
"""
from __future__ import annotations

import hashlib
import logging
import os
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from globaltensor.runtime.device_kernels import MissingKernels
from globaltensor.runtime.kernel_build import compile_kernels, find_nvcc, sources_hash
from globaltensor.runtime.kernel_library import KernelLibrary

_UNIX = find_spec("fcntl") is not None
if _UNIX:
    import fcntl

PACKAGE = Path(__file__).resolve().parent.parent
_NONE = "globaltensor has no kernels for the GPUs of this host: torch ops move and draw instead, slower"
_log = logging.getLogger("globaltensor")


def find_cuda_kernels() -> KernelLibrary:
    """The library for the GPUs of this host, compiled where it was not. Raises MissingKernels."""
    csrc = sources_folder()
    installed = PACKAGE / "_cuda.so"
    stamp = installed.with_suffix(".sources")
    try:
        if installed.exists() and stamp.exists() and stamp.read_text() == sources_hash(csrc):
            return KernelLibrary(installed, "cuda")
        return KernelLibrary(_compiled_for(csrc, gpu_options()), "cuda")
    except OSError as error:                         # of the loader, or of the disk
        raise MissingKernels(_NONE, str(error), _how_to_do_without()) from error


def sources_folder() -> Path:
    """csrc/ of the checkout, or what an installed package carries of it."""
    checkout = PACKAGE.parent / "csrc"
    return checkout if checkout.is_dir() else PACKAGE / "bundled" / "csrc"


def gpu_options() -> tuple[str, ...]:
    """nvcc's options for the GPUs of this host."""
    kinds = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
    return tuple(f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}" for major, minor in kinds)


def cache_folder() -> Path:
    """Where libraries are kept: a folder that nobody but this user can write to. Raises MissingKernels."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "globaltensor"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise MissingKernels(_NONE, f"others can write to {folder}, so no code is loaded from it",
                             f"chmod 700 {folder}, or XDG_CACHE_HOME=FOLDER, a folder of your own")
    return folder


def _compiled_for(csrc: Path, gpus: tuple[str, ...]) -> Path:
    if not _UNIX:
        raise MissingKernels(_NONE, f"they are compiled on Linux only, and this is {sys.platform}",
                             f"Linux, or {_how_to_do_without()}")
    nvcc = find_nvcc()
    if nvcc is None:
        raise MissingKernels(_NONE, "there is no nvcc in PATH, CUDA_HOME or /usr/local/cuda to compile them with",
                             f"install the toolkit of CUDA {torch.version.cuda}, or {_how_to_do_without()}")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    key = hashlib.sha256(f"{sources_hash(csrc)} {version} {gpus}".encode()).hexdigest()[:16]
    target = cache_folder() / f"kernels-{key}.so"
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)             # one process compiles, the others of the host wait for it
        if not target.exists():
            _log.warning("globaltensor compiles its kernels for the GPUs of this host: some 30 seconds, once, with %s",
                         nvcc)
            try:
                compile_kernels(nvcc, csrc, gpus, target)
            except subprocess.CalledProcessError as error:
                lines = [line for line in error.stderr.splitlines() if "error" in line]
                why = lines[0] if lines else f"exit code {error.returncode}"
                raise MissingKernels(_NONE, f"{nvcc} cannot compile them: {why}",
                                     f"CUDA_HOME=FOLDER of another CUDA, or {_how_to_do_without()}") from error
    return target


def _how_to_do_without() -> str:
    return "GLOBALTENSOR_GPU_KERNELS=0 to do without them"
