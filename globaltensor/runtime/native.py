"""The native code, where it was built: loaded here and nowhere else.

    core_lib     boxing kernel, shared memory, Philox: plain C functions, called by ctypes
    torch_ext    dispatch and what else needs torch: a Python module

Both are None where the package was installed without a compiler, or GLOBALTENSOR_NATIVE=0 turns them off. Everything
then works, slower, on the Python twins that the native code is tested against.
"""
from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch  # noqa: F401  (its libraries must be there before ours)

from globaltensor.errors import where

WANTED = os.environ.get("GLOBALTENSOR_NATIVE", "1") != "0"
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
    try:
        extension = importlib.import_module("globaltensor._torch")
    except ImportError as error:                     # not built, or for another torch
        _trouble = str(error)
        return None
    extension.set_library_folder(f"{Path(__file__).parent.parent}{os.sep}")
    return extension


core_lib = _load_core_lib()
torch_ext: Any = _load_torch_ext()                   # None where it is not built: its functions have no stubs


def how_to_build() -> str:
    """What to do where the native code is missing, or was built for another torch."""
    checkout = Path(__file__).resolve().parents[2]
    what = f"-e {checkout}" if (checkout / "setup.py").exists() else "FOLDER, a checkout of globaltensor"
    return f"{'' if shutil.which('g++') else 'install g++, then '}{sys.executable} -m pip install {what}"


def say_if_slow() -> None:
    """Warn, once, at the user's line, where the native code is wanted but not there."""
    global WANTED
    if WANTED and torch_ext is None:
        WANTED = False
        file, _, line = where().rpartition(":")
        warnings.warn_explicit(
            "globaltensor runs without its native code, so every op takes several times as long"
            f"\n  why:   {_trouble or 'it was not built: no compiler while it was installed'}"
            f"\n  try:   {how_to_build()}, or GLOBALTENSOR_NATIVE=0 to do without it",
            UserWarning, file or "<unknown>", int(line) if line.isdigit() else 1)
