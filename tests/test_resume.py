"""A run that is ended by kill -9 goes on from its last checkpoint: the same bits, and on fewer ranks the same data."""
from __future__ import annotations

import json
import os
import random
import runpy
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from harness import PROGRAMS, RUN, Started, good
from shards import place

PROGRAM = PROGRAMS / "resume.py"
pytestmark = pytest.mark.processes


class Run:
    """A run on real processes, and what it says, line by line."""

    def __init__(self, ranks: int, folder: Path, steps: int) -> None:
        self.started = Started([*RUN, "-n", ranks, PROGRAM, folder, steps])
        self.said: list[dict] = []
        self.pids = [self.hear()["pid"] for _ in range(ranks)]
        self.start = self.said[0]["from"]

    def hear(self) -> dict:
        line = self.started.process.stdout.readline()
        assert line, f"the run ended: {self.started.end()}"
        self.said.append(json.loads(line))
        return self.said[-1]

    def kill(self, rng: random.Random) -> None:
        """End a rank, or all there is, at some moment after the first step."""
        for _ in range(rng.randint(1, 11)):
            self.hear()
        time.sleep(rng.uniform(0, 0.08))
        victims = rng.choice([self.pids[:1], self.pids[-1:], [*self.pids, self.started.process.pid]])
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        code, out, err = self.started.end()          # waits for all that hold the pipe: no rank is left
        assert code != 0, err
        self.said += [json.loads(line) for line in out.splitlines(keepends=True) if line.endswith("\n")]
        print(f"killed {len(victims)} of {len(self.pids) + 1} processes after {self.said[-1]}")


def steps(said: list[dict]) -> dict[int, dict]:
    """What was said of each step."""
    return {each["step"]: each for each in said if "step" in each}


def lone(folder: Path, ranks: list, count: int) -> list[dict]:
    """What a run in this process says, which drives all these ranks; with one thread, as each rank of its own has."""
    said: list[dict] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)                         # some of torch's kernels round otherwise with several
    try:
        with torch.random.fork_rng():
            runpy.run_path(str(PROGRAM))["train"](folder, place(ranks), count, said.append)
    finally:
        torch.set_num_threads(threads)
    return said


def killed(folder: Path, times: int, ranks: int, count: int, rng: random.Random, expected: dict[int, dict]) -> int:
    """A run is killed and taken up again `times` times, each bit as expected. The step from which the next goes on is
    after the last that is known to be saved."""
    saved = 0
    for _ in range(times):
        run = Run(ranks, folder, count)
        assert run.start in (saved, saved + 1), f"goes on after step {run.start}; {saved} was saved"
        run.kill(rng)
        shown = steps(run.said)
        assert list(shown) == list(range(run.start + 1, run.start + 1 + len(shown))) and shown
        assert shown == {number: expected[number] for number in shown}
        saved = max([run.start, *(each["saved"] for each in run.said if "saved" in each)])
    assert saved < count, "there is something left to do"
    return saved


def finished(ranks: int, folder: Path, count: int) -> list[dict]:
    """What a run to the end says."""
    return [json.loads(line) for line in good([*RUN, "-n", ranks, PROGRAM, folder, count], timeout=120).splitlines()]


def check_rest(last: list[dict], saved: int, uninterrupted: list[dict]) -> None:
    """The last run went on to the end as if nothing had happened."""
    expected = steps(uninterrupted)
    assert last[0]["from"] in (saved, saved + 1)
    assert steps(last) == {k: expected[k] for k in range(last[0]["from"] + 1, len(expected) + 1)}
    assert last[-1] == uninterrupted[-1] and "weights" in last[-1], "the weights, bit by bit"


def check_rest_on_others(last: list[dict], uninterrupted: list[dict]) -> None:
    """The last run, on other ranks, had the same data and rates; losses are the same but for rounding."""
    expected = steps(uninterrupted)
    found = steps(last)
    assert list(found) == list(range(last[0]["from"] + 1, len(expected) + 1)) and found
    for number, each in found.items():
        assert each["samples"] == expected[number]["samples"] and each["rate"] == expected[number]["rate"]
        loss, other = (float.fromhex(which["loss"]) for which in (each, expected[number]))
        assert abs(loss - other) <= 1e-5 * other, f"step {number}"


@pytest.mark.long
def test_killed_runs_go_on_bit_by_bit(tmp_path):
    seed, count = 37, 24
    print("seed", seed)
    uninterrupted = lone(tmp_path / "uninterrupted", [0, 1], count)
    saved = killed(tmp_path / "killed", 1, 2, count, random.Random(seed), steps(uninterrupted))
    shutil.copytree(tmp_path / "killed", tmp_path / "copy")
    check_rest(finished(2, tmp_path / "killed", count), saved, uninterrupted)
    check_rest_on_others(lone(tmp_path / "copy", [0], count), uninterrupted)


@pytest.mark.parametrize("ranks, others", [([0, 1], [0]), ([0, 1, 2, 3], [0, 1]), ([0, 1, 2], [[3, 1], [0, 5]])])
def test_a_run_goes_on_with_other_ranks(ranks, others, tmp_path):
    uninterrupted = lone(tmp_path / "uninterrupted", ranks, 12)
    lone(tmp_path / "stopped", ranks, 5)
    check_rest_on_others(lone(tmp_path / "stopped", others, 12), uninterrupted)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_runs_go_on_bit_by_bit_20_times(tmp_path):
    seed, count = 32, 160
    print("seed", seed)
    uninterrupted = finished(2, tmp_path / "uninterrupted", count)
    assert lone(tmp_path / "lone", [0, 1], count)[-1] == uninterrupted[-1], "the same, however it is run"
    saved = killed(tmp_path / "killed", 20, 2, count, random.Random(seed), steps(uninterrupted))
    check_rest(finished(2, tmp_path / "killed", count), saved, uninterrupted)


@pytest.mark.long
@pytest.mark.parametrize("ranks, fewer", [(2, 1), (4, 2)])
def test_a_killed_run_goes_on_with_fewer_ranks(ranks, fewer, tmp_path):
    seed, count = 33, 40
    print("seed", seed)
    uninterrupted = lone(tmp_path / "uninterrupted", list(range(ranks)), count)
    killed(tmp_path / "killed", 2, ranks, count, random.Random(seed), steps(uninterrupted))
    check_rest_on_others(finished(fewer, tmp_path / "killed", count), uninterrupted)
