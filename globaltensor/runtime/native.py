"""The native code, where it was built: loaded here and nowhere else.

    core_lib     boxing kernel, shared memory, Philox: plain C functions, called by ctypes
    torch_ext    dispatch and what else needs torch: a Python module

Both are None where the package was installed without a compiler, or GLOBALTENSOR_NATIVE=0 turns them off. Everything
then works, slower, on the Python twins that the native code is tested against.

The module is `_torch*.so`, which was built here for the torch that is installed; or, from a wheel, one of several
such as `_torch_2_13*.so`, each for all releases of a minor version of torch. Of the supported versions one had a patch
release: the 9,739 headers of torch 2.12.0 and 2.12.1 are the same but for the version. A later one is compared before
it is supported (docs/releasing.md).
"""
from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import re
import shutil
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch  # its libraries must be there before ours

from globaltensor.errors import BETWEEN, OURS, warn
from globaltensor.layouts.recent import limit
from globaltensor.runtime.kernel_build import native_hash

WANTED = os.environ.get("GLOBALTENSOR_NATIVE", "1") != "0"           # `check_own_variables` refuses what is neither
_trouble = ""


def _load_core_lib() -> ctypes.CDLL | None:
    global _trouble
    here = Path(__file__).parent.parent
    for suffix in EXTENSION_SUFFIXES if WANTED else ():
        if (file := here / f"_core{suffix}").exists():
            try:
                return ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)    # torch_ext finds its functions
            except OSError as error:                 # for another machine
                _trouble = str(error)
    return None


def _load_torch_ext() -> Any:
    global _trouble
    if core_lib is None:
        return None
    files = [file for suffix in EXTENSION_SUFFIXES for name in ("_torch", "_torch_[0-9]*")
             for file in sorted(Path(__file__).parent.parent.glob(name + suffix))]
    mine = [file for file in files if _is_for_this_torch(file)]
    if not mine:
        if files:
            versions = ", ".join(map(_built_for, files))
            _trouble = f"it was built for torch {versions}, and this is torch {torch.__version__}"
        return None
    try:
        return _extension_in(mine[0])
    except ImportError as error:                     # for another build of torch, or another machine
        _trouble = str(error)
        return None


def _extension_in(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("globaltensor._torch", file)
    assert spec is not None and spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    sys.modules["globaltensor._torch"] = extension
    extension.set_library_paths([OURS, *BETWEEN])
    limit.tell(extension.limit_caches)
    return extension


def _is_for_this_torch(file: Path) -> bool:
    of_minor = re.match(r"_torch_(\d+)_(\d+)\.", file.name)           # of a wheel
    version = f"{of_minor[1]}.{of_minor[2]}" if of_minor else _built_for(file)
    return re.match(rf"{re.escape(version)}(?!\d)", torch.__version__) is not None


def _built_for(file: Path) -> str:
    """The version of torch. For another one it might load, register its ops, and then read torch's objects wrongly."""
    with open(file, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as content:
        mark = re.search(rb"built for torch ([\w.]+)\0", content)          # module.cpp
        return mark[1].decode() if mark else "an unknown version"


core_lib = _load_core_lib()
torch_ext: Any = _load_torch_ext()                   # None where it is not built: its functions have no stubs


def _warn_of_other_sources() -> None:
    """Of a checkout that has other sources than when its native code was built: Python may call what is not there."""
    package = Path(__file__).resolve().parents[1]
    noted, csrc = package / "_torch.sources", package.parent / "csrc"
    if torch_ext is None or not noted.exists():
        return
    changed = max((file.stat().st_mtime for file in csrc.glob("*/*")), default=0.0)
    if changed > noted.stat().st_mtime and noted.read_text() != native_hash(csrc):
        warn("the native code of globaltensor was built from other sources than those that are there now"
             f"\n  why:   {csrc} has changed since"
             f"\n  try:   {how_to_build()}")


def how_to_build() -> str:
    """What to do where the native code is missing, or was built for another torch."""
    checkout = Path(__file__).resolve().parents[2]
    what = f"-e {checkout}" if (checkout / "setup.py").exists() else "FOLDER, a checkout of globaltensor"
    return f"{'' if shutil.which('g++') else 'install g++, then '}{sys.executable} -m pip install {what}"


def why_slow() -> str:
    """Why the native code is not used; empty where it is."""
    if torch_ext is not None:
        return ""
    return _trouble or ("it was not built: no compiler while it was installed"
                        if os.environ.get("GLOBALTENSOR_NATIVE", "1") != "0" else "turned off by GLOBALTENSOR_NATIVE=0")


def say_if_slow() -> None:
    """Warn, once, at the user's line, where the native code is wanted but not there."""
    global WANTED
    if WANTED and torch_ext is None:
        WANTED = False
        warn("globaltensor runs without its native code, so every op takes several times as long"
             f"\n  why:   {why_slow()}"
             f"\n  try:   {how_to_build()}, or GLOBALTENSOR_NATIVE=0 to do without it")


_warn_of_other_sources()
