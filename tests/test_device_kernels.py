"""The package's own path to the kernels of csrc/, without a GPU: the kernels run as threads, the device stands in.

tests/test_cuda.py tests the kernels; this, what uses them: boxings between devices, random numbers, and the self-test,
which must find every mistake that is planted in a kernel. The checks are those of programs/device_kernels.py.
"""
from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from harness import PROGRAMS, PYTHON, ROOT, RUN, environment, good
from stand_in import built_kernels

from globaltensor.cli import doctor
from globaltensor.runtime import cuda_kernels
from globaltensor.runtime.device_kernels import MissingKernels

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
PROGRAM = PROGRAMS / "device_kernels.py"
# What is planted -> the kernel that the self-test must name.
FAULTS = {"GT_BAD_COPY": "copies", "GT_BAD_INTEGERS": "integer sums", "GT_BAD_NORMAL": "normal"}
MORE_FAULTS = {"GT_BAD_TURN": "copies", "GT_BAD_END": "copies", "GT_BAD_FLOATS": "float sums",
               "GT_BAD_UPLOAD": "tables", "GT_BAD_WORDS": "words", "GT_BAD_UNIFORM": "uniform",
               "GT_BAD_EXPONENTIAL": "exponential",
               "GT_BAD_RANDOM_INTEGERS": "integers", "GT_BAD_BERNOULLI": "bernoulli"}


def passed(*arguments: str, **more: str) -> list[str]:
    return good([PYTHON, PROGRAM, *arguments], environment(**more), timeout=600).splitlines()


def checks(name: str) -> list[str]:
    """The names in a list of the program's, which cannot be imported here."""
    text = PROGRAM.read_text().partition(f"\n{name} = [")[2].partition("]")[0]
    return [word.strip().removeprefix("device.") for word in text.split(",")]


@pytest.mark.timeout(700)
def test_boxings_and_random_numbers_run_on_the_kernels() -> None:
    assert passed() == checks("CHECKS")


@pytest.mark.long
def test_the_checks_of_any_device_pass_on_kernels() -> None:
    assert passed("all") == checks("AGAIN")


@pytest.mark.parametrize("faults", [FAULTS, pytest.param(MORE_FAULTS, marks=pytest.mark.long)], ids=["some", "more"])
def test_a_planted_fault_is_found_and_named_and_its_kernel_is_not_used(faults: dict[str, str]) -> None:
    words = [f"{plant}={kernel}" for plant, kernel in faults.items()]
    assert passed(*words, STAND_IN_DEVICES="1", GLOBALTENSOR_SHARE_GPU="1") == words


@pytest.mark.processes
@pytest.mark.parametrize("fault", ["", *(pytest.param(fault, marks=pytest.mark.long) for fault in
                                         ("wrong=0", "wrong=1", "none=1", "closed=0", "closed=1"))])
def test_processes_of_a_host_box_on_the_kernels(fault: str) -> None:
    done = subprocess.run([*RUN, "-n", "2", PROGRAMS / "process_kernels.py", *filter(None, [fault])], timeout=300,
                          capture_output=True, text=True, env=environment())
    assert done.returncode == 0 and done.stdout.split() == ["right"] * 2, done.stdout + done.stderr
    why = {"wrong": "read wrong numbers", "closed": "not by kernels", "none": "not by kernels", "": ""}
    assert why[fault.partition("=")[0]] in done.stderr and ("not by kernels" in done.stderr) == bool(fault)


def test_every_fault_of_the_self_test_is_planted() -> None:
    names = re.findall(r"GT_BAD_\w+", (PROGRAM.parents[2] / "csrc/common/device.h").read_text())
    assert set(names) == FAULTS.keys() | MORE_FAULTS.keys()


# ------------------------------------------------------------------ how kernels get built on a user's machine
@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of two GPUs of one kind, nothing compiled yet, and the folder of its nvcc, which is not there."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    monkeypatch.setattr(cuda_kernels, "find_nvcc", lambda: str(nvcc) if nvcc.exists() else None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    nvcc = tmp_path / "nvcc"
    return nvcc


def compiler(nvcc: Path, does: str) -> None:
    nvcc.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit\necho $@ >>{nvcc}.calls\n{does}\n")
    nvcc.chmod(0o755)


def test_kernels_are_compiled_once_for_the_gpus_of_the_host(gpus: Path) -> None:
    compiler(gpus, f'while [ $1 != -o ]; do shift; done; cp {built_kernels()} $2')
    first, again = cuda_kernels.find_cuda_kernels(), cuda_kernels.find_cuda_kernels()
    assert first.path == again.path and first.path.parent == gpus.parent / "cache/globaltensor"
    call, = Path(f"{gpus}.calls").read_text().splitlines()
    assert "code=sm_90" in call and call.count("sm_90") == 1 and call.count(".cu") == 3 and "--fmad=false" in call


def test_what_cannot_be_compiled_says_why_and_what_to_type(gpus: Path) -> None:
    with pytest.raises(MissingKernels, match="no nvcc in PATH(.|\n)*toolkit of CUDA 13.0(.|\n)*GPU_KERNELS=0"):
        cuda_kernels.find_cuda_kernels()
    compiler(gpus, "echo 'x.cu(3): error: no such thing' >&2; exit 2")
    with pytest.raises(MissingKernels, match="nvcc cannot compile them: x.cu.3.: error: no such thing"):
        cuda_kernels.find_cuda_kernels()
    compiler(gpus, "while [ $1 != -o ]; do shift; done; echo rubbish >$2")
    with pytest.raises(MissingKernels, match="file too short|invalid ELF header"):
        cuda_kernels.find_cuda_kernels()
    (gpus.parent / "cache/globaltensor").chmod(0o777)
    with pytest.raises(MissingKernels, match="others can write to"):
        cuda_kernels.find_cuda_kernels()


def test_the_doctor_finds_nothing_wrong_here_but_what_is(capsys: pytest.CaptureFixture[str]) -> None:
    command = [PYTHON, "-m", "globaltensor.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(), cwd=ROOT)
    assert done.returncode == ("\nwrong " in f"\n{done.stdout}") and not done.stderr, done.stdout + done.stderr
    names = ("torch", "native code", "nvcc", "accelerators")
    assert all(re.search(rf"(?m)^\w+ +{name} ", done.stdout) for name in names), done.stdout
    assert doctor.command(argparse.Namespace(json=True)) == done.returncode
    assert json.loads(capsys.readouterr().out)["torch"]["state"].startswith(torch.__version__)
