"""Native dispatch and process groups under the sanitizers of addresses and of undefined behaviour.

The extension is built with them into a copy of the package, whose tests then run in a Python that has the sanitizers'
runtime loaded before torch, which was built without. What Python and torch keep for ever is not counted as leaked. The
thread sanitizer is not among them: it does not see the locks of an interpreter and a torch that were built without it,
and takes all that they guard for races. It runs on the transport (test_transport.py) and on the kernels
(test_native_boxing.py), which need neither.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from globaltensor.runtime.native import torch_ext

ROOT = Path(__file__).parent.parent
FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined"
FLAGS += " -fno-sanitize=vptr"                       # of torch's objects, whose types are in torch's libraries
# what is loaded before Python: the last, as the first looks for its exceptions
RUNTIME = ("libasan.so", "libubsan.so", "libstdc++.so.6")
TESTS = ["test_native_dispatch.py", "test_native_boxing.py", "test_native_random.py", "test_process_group.py",
         "test_strides.py", "test_siblings.py"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of this one, built with sanitizers."""
    if torch_ext is None or shutil.which("g++") is None:
        pytest.skip("the native code is not built here, or g++ is not installed")
    missing = [name for name in RUNTIME if not Path(library(name)).is_absolute()]
    if missing:
        pytest.skip(f"g++ has no {', '.join(missing)}")
    copy = tmp_path_factory.mktemp("sanitized")
    for folder in ("globaltensor", "tests", "csrc"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for file in ("pyproject.toml", "setup.py", "README.md", "build_backend.py"):
        shutil.copy(ROOT / file, copy)
    compiler = copy / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" {FLAGS}\n')       # last: they count more than those of setup.py
    compiler.chmod(0o755)
    done = subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=copy, capture_output=True,
                          text=True, env={**os.environ, "CXX": str(compiler), "CC": str(compiler)})
    assert done.returncode == 0 and len(list(copy.glob("globaltensor/_*.so"))) >= 2, done.stdout + done.stderr
    return copy


def library(name: str) -> str:
    """Its path, where g++ has it; else its name."""
    path = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    return path.strip()


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TESTS)
def test_no_byte_outside_and_nothing_undefined(name, checkout):
    environment = {**os.environ, "LD_PRELOAD": ":".join(map(library, RUNTIME)), "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": str(checkout), "PYTHONMALLOC": "malloc",
                   "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:abort_on_error=0:exitcode=99",
                   "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-s", "-q", "-x", "-m", "not long", "-p", "no:cacheprovider",
                           f"tests/{name}"], cwd=checkout, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-20000:]}"
    assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, done.stderr
