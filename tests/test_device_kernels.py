"""The package's own path to the kernels of csrc/, without a GPU: the kernels run as threads, the device stands in.

tests/test_cuda.py tests the kernels; this, what uses them: boxings between devices, random numbers, and the self-test,
which must find every mistake that is planted in a kernel. The checks are those of programs/device_kernels.py.
"""
from __future__ import annotations

import re
import shutil

import pytest
from harness import PROGRAMS, PYTHON, environment, good

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


def test_every_fault_of_the_self_test_is_planted() -> None:
    names = re.findall(r"GT_BAD_\w+", (PROGRAM.parents[2] / "csrc/common/device.h").read_text())
    assert set(names) == FAULTS.keys() | MORE_FAULTS.keys()
