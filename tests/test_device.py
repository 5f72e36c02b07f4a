"""Any device that torch knows: the same programs on one that it does not know from before.

`stand_in.py` makes it, of torch's key PrivateUse1: several devices whose memory nobody but their kernels may touch. The
checks are those of programs/device.py, in a process of their own, as a process can have such a device but once.
"""
from __future__ import annotations

import shutil

import pytest
from harness import PROGRAMS, PYTHON, RUN, environment, good

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
PROGRAM = PROGRAMS / "device.py"


def passed(command: list, **more: str) -> list[str]:
    return good(command, environment(**more), timeout=600).split()


def checks(name: str) -> list[str]:
    """The names in a list of the program's, which cannot be imported here."""
    text = PROGRAM.read_text().partition(f"\n{name} = [")[2].partition("]")[0]
    return [word.strip() for word in text.split(",")]


@pytest.mark.timeout(700)
def test_a_program_on_a_device_of_any_kind() -> None:
    assert passed([PYTHON, PROGRAM, "privateuseone"]) == checks("CHECKS")


@pytest.mark.long
def test_a_backend_with_a_name_of_its_own_and_no_native_code() -> None:
    assert passed([PYTHON, PROGRAM, "npu"], GLOBALTENSOR_NATIVE="0") == checks("CHECKS")


@pytest.mark.long
@pytest.mark.parametrize("native", ["1", "0"])
def test_a_process_for_each_device(native: str) -> None:
    said = passed([*RUN, "-n", "2", PROGRAM, "npu"], GLOBALTENSOR_NATIVE=native)
    assert sorted(said) == sorted(checks("OF_TWO_PROCESSES") * 2)
