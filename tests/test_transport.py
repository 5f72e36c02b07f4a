"""The shared-memory transport, tested natively: threads and processes, sanitizers, kills, stops, deadlocks, forks.

The programs are in `native/`. Each is built as a user's would be, and with what finds errors that values do not show:
the address and undefined-behaviour sanitizers, and for ranks that are threads the thread sanitizer.
"""
from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from harness import PROGRAMS, PYTHON, RUN, good

ROOT = Path(__file__).parent.parent
NATIVE = ROOT / "tests" / "native"
FLAGS = {
    "plain": ["-O2"],
    "asan": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-O1", "-fsanitize=thread", "-Wno-tsan"],  # it knows no fences; here they only order wake-ups
}
SEED = int(os.environ.get("GLOBALTENSOR_TEST_SEED", "1"))

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """build("transport_values", "tsan"): the program, compiled once."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:          # what one process of `make test` has compiled serves the others
        folder = folder.parent

    def compile(output: Path, flavour: str, *arguments: object) -> Path:
        command = ["g++", "-std=c++17", "-g", "-ffp-contract=off", *FLAGS[flavour],
                   *map(str, arguments), "-o", str(output)]
        with open(f"{output}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if output.exists():
                return output
            done = subprocess.run(command, capture_output=True, text=True)
        if flavour != "plain" and "cannot find" in done.stderr:
            pytest.skip(f"g++ has no library for {FLAGS[flavour][1]}")
        assert done.returncode == 0, done.stderr
        return output

    @cache
    def library(flavour: str) -> list[Path]:
        sources = [*sorted((ROOT / "csrc" / "transport").glob("*.cpp")), NATIVE / "transport_kernel.cpp"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda s: compile(folder / f"transport-{flavour}-{s.stem}.o", flavour, "-c", s),
                                 sources))

    @cache
    def program(name: str, flavour: str = "plain") -> Path:
        output = folder / f"transport-{flavour}-{name}"
        return compile(output, flavour, NATIVE / f"{name}.cpp", *library(flavour), "-pthread")

    return program


def run(program: Path, *arguments: object, limit: float = 60) -> str:
    """Run a test program; whatever it starts must be gone with it, and it must leave no file behind."""
    with subprocess.Popen([program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          start_new_session=True, env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            for pid in session(process.pid):
                os.kill(pid, 9)
            raise
    assert process.returncode == 0, output
    assert not session(process.pid), f"{session(process.pid)} were left behind\n{output}"
    assert not [name for name in os.listdir("/dev/shm") if "globaltensor" in name]
    return output


def session(leader: int) -> list[int]:
    """The processes of a session, by /proc."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                members.append(int(entry.name))
    return members


@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_values(build, kind, ranks):
    run(build("transport_values"), kind, ranks, SEED, 150)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_threads_have_no_data_race(build, ranks):
    run(build("transport_values", "tsan"), "threads", ranks, SEED, 80)


@pytest.mark.long
@pytest.mark.parametrize("kind, ranks", [("threads", 3), ("processes", 4)])
def test_no_undefined_behaviour(build, kind, ranks):
    run(build("transport_values", "asan"), kind, ranks, SEED, 80)


@pytest.mark.long
@pytest.mark.parametrize("flavour, kind", [("plain", "threads"), ("plain", "processes"), ("asan", "processes"),
                                           ("tsan", "threads")])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_values_for_long(build, flavour, kind, ranks):
    for seed in range(SEED, SEED + 5):
        run(build("transport_values", flavour), kind, ranks, seed, 2000, limit=250)


MISHAPS = ["agreement", "site", "order", "crossed", "finished", "raised", "early", "ring", "late", "interrupted",
           "reports", "forked", "ahead"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", MISHAPS)
def test_mishap(build, case):
    run(build("transport_failures"), case)


@pytest.mark.parametrize("case", [*MISHAPS, "kill", "stop"])
@pytest.mark.long
def test_mishap_without_undefined_behaviour(build, case):
    run(build("transport_failures", "asan"), case, SEED, 5, limit=120)


@pytest.mark.parametrize("times", [8, pytest.param(50, marks=pytest.mark.long)])
def test_a_killed_rank_is_noticed_by_all(build, times):
    run(build("transport_failures"), "kill", SEED, times, limit=120)


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.long)])
def test_a_stopped_rank_is_noticed_by_all(build, times):
    run(build("transport_failures"), "stop", SEED, times, limit=250)


@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_messages(build, kind, ranks):
    run(build("transport_messages"), "values", kind, ranks, SEED, 150)


@pytest.mark.long
@pytest.mark.parametrize("flavour, kind, ranks", [
    ("tsan", "threads", 2), ("tsan", "threads", 4), ("asan", "threads", 3), ("asan", "processes", 4)])
def test_messages_under_a_sanitizer(build, flavour, kind, ranks):
    run(build("transport_messages", flavour), "values", kind, ranks, SEED, 100)


@pytest.mark.long
@pytest.mark.parametrize("flavour, kind", [("plain", "threads"), ("plain", "processes"), ("asan", "processes"),
                                           ("tsan", "threads")])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_messages_for_long(build, flavour, kind, ranks):
    for seed in range(SEED, SEED + 3):
        run(build("transport_messages", flavour), "values", kind, ranks, seed, 500, limit=250)


LETTER_MISHAPS = ["wrong", "refused", "room", "early", "interrupted", "ring", "chain"]


@pytest.mark.parametrize("case", LETTER_MISHAPS)
def test_letter_mishap(build, case):
    run(build("transport_messages"), case)


@pytest.mark.parametrize("flavour, kind", [("asan", "processes"), ("tsan", "threads")])
@pytest.mark.parametrize("case", LETTER_MISHAPS)
@pytest.mark.long
def test_letter_mishap_under_a_sanitizer(build, flavour, kind, case):
    run(build("transport_messages", flavour), case, kind)


@pytest.mark.parametrize("flavour, times", [("plain", 8), pytest.param("plain", 80, marks=pytest.mark.long),
                                            pytest.param("asan", 20, marks=pytest.mark.long)])
def test_a_killed_rank_is_noticed_by_all_that_wait_for_messages(build, flavour, times):
    run(build("transport_messages", flavour), "killed", "processes", 4, SEED, times, limit=120)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ["absent", "late", "wrong", "strangers", "again", "outlives", "shared", "many"])
def test_meeting(build, case):
    run(build("transport_handshake"), case)


@pytest.mark.parametrize("times", [30000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_boxings_take_no_memory(build, times):
    run(build("transport_handshake"), "steady", times, limit=250)


def listening() -> set[str]:
    """The sockets at which ranks of any program on this machine are to meet."""
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@globaltensor-" in line}


def test_nothing_listens_after_the_meeting(build):
    before = listening()
    run(build("transport_values"), "processes", 3, SEED, 1)
    new = listening() - before
    for _ in range(100):                                  # those of other programs go, too, if later
        if not new & listening():
            return
        time.sleep(0.1)
    raise AssertionError(new & listening())


@pytest.mark.parametrize("case", ["mixed", "threads", "reuse", "held", "forks",
                                  pytest.param("give_back", marks=pytest.mark.long)])
def test_arena(build, case):
    run(build("transport_arena"), case, SEED)


@pytest.mark.parametrize("flavour, case", [
    ("tsan", "threads"), *(pytest.param("asan", case, marks=pytest.mark.long) for case in ("mixed", "held", "forks"))])
def test_arena_under_a_sanitizer(build, flavour, case):
    run(build("transport_arena", flavour), case, SEED)


@pytest.mark.long
@pytest.mark.usefixtures("real_processes")           # others would not inherit the cores
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="takes two cores")
def test_a_rank_that_waits_leaves_its_core_to_others():
    """Two ranks on two cores linger before they sleep, but not where other programs want these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        others = [subprocess.Popen([PYTHON, "-c", "while True: pass"]) for _ in range(2)]
        try:
            out = good([*RUN, "-n", 2, PROGRAMS / "long_waits.py", 10])
        finally:
            for other in others:
                other.kill()
                other.wait()
    finally:
        os.sched_setaffinity(0, before)
    waited, taken = map(float, re.findall(r"[\d.]+", out))
    assert waited > 0.5 and taken < waited / 10, out
