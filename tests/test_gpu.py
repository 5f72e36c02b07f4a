"""The library on GPUs, where there are any: boxings, training, streams, graphs, and torch's own operator database.

Everywhere else tests/test_device.py and tests/test_device_kernels.py stand for it. Where the host has fewer GPUs than
ranks, these share them.
"""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import PROGRAMS, PYTHON, ROOT, RUN, environment, good

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SHARED = {"GLOBALTENSOR_SHARE_GPU": "1"}
TRAIN = [ROOT / "examples/train_gpt.py", "--device", "cuda", "--verify", "--steps", "4", "--sample", "5"]


def passed(command: list, timeout: float = 300) -> list[str]:
    return good(command, environment(**SHARED), timeout).splitlines()


def checks(program: str, name: str = "CHECKS") -> list[str]:
    """The names in a list of the program's, which cannot be imported here."""
    text = (PROGRAMS / program).read_text().partition(f"\n{name}")[2].partition("= [")[2].partition("]\n")[0]
    return [word.strip().removeprefix("device.") for word in text.split(",")]


@pytest.mark.parametrize("program, words, name", [
    ("device.py", ["cuda"], "CHECKS"), ("device_kernels.py", ["cuda"], "CHECKS"),
    ("device_kernels.py", ["cuda", "all"], "AGAIN"), ("gpu.py", [], "CHECKS")])
def test_all_checks_pass(program: str, words: list[str], name: str) -> None:
    assert passed([PYTHON, PROGRAMS / program, *words]) == checks(program, name)


@pytest.mark.processes
def test_processes_box_on_the_kernels() -> None:
    assert passed([*RUN, "-n", "2", PROGRAMS / "process_kernels.py", "cuda"]) == ["right"] * 2


@pytest.mark.parametrize("words", [[], ["--amp", "--zero", "3", "--sp", "--accumulate", "2"],
                                   ["--pp", "2", "--zero", "1", "--recompute"]], ids=" ".join)
def test_a_gpt_trains_as_plain_torch_does(words: list[str]) -> None:
    assert "The largest relative difference" in passed([PYTHON, *TRAIN, *words])[-1]


@pytest.mark.processes
def test_a_gpt_trains_in_two_processes() -> None:
    assert "The largest relative difference" in passed([*RUN, "-n", "2", *TRAIN, "--tp", "1"])[-1]


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize("program", ["engine.py", "overlap.py", "write_behind.py all", "write_behind.py ends"])
def test_nccl_moves_while_gpus_compute(program: str, tmp_path: Path) -> None:
    name, *which = program.split()
    words = {"engine.py": ["cuda"], "overlap.py": [tmp_path, "cuda"]}.get(name, [*which, "cuda"])
    good([*RUN, "-n", "2", PROGRAMS / name, *words], environment(GLOBALTENSOR_GPU_KERNELS="0"), 300)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_operator_database() -> None:
    command = [PYTHON, "-W", "ignore", PROGRAMS / "op_database.py", "--device", "cuda", "--samples", "1"]
    result = json.loads(good(command, environment(**SHARED), 3600))
    wrong = [row for row in result["failures"] if row["is"] == "wrong"]
    assert not wrong, "\n".join(map(str, wrong[:40]))
