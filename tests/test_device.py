"""Any device that torch knows: the same programs on one that it does not know from before.

`stand_in.py` makes it, of torch's key PrivateUse1: several devices whose memory nobody but their kernels may touch. The
checks are those of programs/device.py, in a process of their own, as a process can have such a device but once.
"""
from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

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


@pytest.mark.processes
@pytest.mark.parametrize("kernels", [[], pytest.param(["kernels"], marks=pytest.mark.long)], ids=["engine", "kernels"])
def test_processes_whose_devices_have_an_engine(kernels: list[str]) -> None:
    """As GPUs have NCCL. The kernels are those of csrc/, between processes."""
    program = PROGRAMS / "engine.py"
    listed = program.read_text().partition("\nCHECKS = [")[2].partition("]")[0].split(", ")
    names = checks("OF_TWO_PROCESSES") + listed[1:]
    assert sorted(passed([*RUN, "-n", "2", program, "npu", *kernels])) == sorted(names * 2)


@pytest.mark.long
@pytest.mark.processes
def test_stages_of_several_devices_send_to_each_other_by_their_engine() -> None:
    assert passed([*RUN, "-n", "4", PROGRAMS / "engine.py", "npu"]) == ["stages_of_two_ranks"] * 4


@pytest.mark.processes
@pytest.mark.parametrize(("program", "ranks"), [
    ("overlap.py", 2), pytest.param("write_behind.py all", 2, marks=pytest.mark.long),
    pytest.param("write_behind.py ends", 2, marks=pytest.mark.long),
    pytest.param("write_behind.py grid", 4, marks=pytest.mark.long)])
def test_an_engine_moves_while_devices_compute(program: str, ranks: int, tmp_path: Path) -> None:
    """What the CPUs of several hosts do: gradients during backward, gathers ahead and behind."""
    name, *which = program.split()
    passed([*RUN, "-n", str(ranks), PROGRAMS / name, *(which or [tmp_path]), "npu"])
    if not which:
        for path in sorted(tmp_path.glob("*.json")):
            seen = json.loads(path.read_text())
            assert seen["plain"][0] == 0 and min(seen["plain"][1:3]) >= 3 and seen["micro-batches"] == [0] * 4, seen
        assert len(list(tmp_path.iterdir())) == ranks


@pytest.mark.processes
def test_ranks_without_a_device_of_their_own_run_on_the_cpu_and_end_well() -> None:
    """On a host with fewer devices than ranks; here messages go through torch, which are looked after at the end."""
    done = subprocess.run([*RUN, "-n", "2", PROGRAMS / "engine.py", "npu", "cpu"], capture_output=True, text=True,
                          timeout=100, env=environment(STAND_IN_DEVICES="1", GLOBALTENSOR_NATIVE="0"))
    assert done.returncode == 0 and done.stdout.split() == ["on_the_cpu"] * 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "no npu device" not in done.stderr, done.stderr
