"""Is every fault noticed by all ranks, rightly named, and in time? Each of a table of faults, many times.

Jobs of 4 ranks in which one dies, stops, loops, goes another way or is attacked (the programs are those of the tests,
hence only a checkout has this). As many jobs run at once as there are cores, so each has half of what it would have;
where ranks do little else than wait, four times as many. For each row

    noticed   in how many runs every rank that has to be told was told
    named     in how many of the runs the right rank was named to all of them, with the line of the program
    median s, max s    from the fault until the last of them was told, or, under a launcher, until all had ended
    limit s   what it may take at most
    left      what the jobs left behind: processes, and temporary files
"""
from __future__ import annotations

import json as _json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.processes import left_behind
from benchmarks.timing import cores, show
from globaltensor.runtime.preemption import REQUEUE

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))                       # of a checkout: only that has them
import forks  # noqa: E402
from harness import PROGRAMS, PYTHON, RUN, Started, by_hand, end_all, environment, results  # noqa: E402
from test_apart import check  # noqa: E402

RANKS = 4
VICTIM = 1
PATIENCE = 60.0                                      # seconds after which a rank that was told nothing never is
APART = 1800.0                                       # for all ways to disagree, each of which may take 30 seconds
KERNEL, STOP, START, FAR, LOOP, WAYS, ALL_ENDED, SAVING = 2.0, 10.0, 5.0, 16.0, 20.0, 5.0, 10.0, 25.0    # limits
LOOPS_FOR = 10                                       # seconds that ranks wait for one that lives, where one loops
DEATHS = ("KILL", "SEGV", "exit 0", "sys.exit", "raise", "MemoryError")


class Outcome(NamedTuple):
    """Of one run: seconds until each of those who must be told was, and what is wrong with what they were told."""

    seconds: list[float]
    misnamed: str = ""


class Row(NamedTuple):
    """A fault, how one run of it goes, given a folder, and within how many seconds all must be told; how many runs of
    it a core has at a time."""

    what: str
    limit: float
    run: Callable[[Path], Outcome]
    a_core: int = 1


def main(json: bool = False, quick: bool = False, runs: int | None = None, rows: str = "") -> None:
    runs = runs or (1 if quick else 20)
    chosen = [row for row in table() if (not quick or row.what in QUICK) and re.search(rows, row.what)]
    if not chosen:
        sys.exit(f"no fault has {rows!r} in its name; there are: {', '.join(row.what for row in table())}")
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)     # under nohup jobs would go on, as they should
    done = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"         # torch keeps that
        server = forks.start_forking(Path(folder, "forks"))
        for row in chosen:
            done.append(summary(row, runs, Path(folder)))
            assert server.poll() is None, f"the process that forks has ended with {server.returncode} in {row.what!r}"
            print(f"{'' if done[-1]['passed'] else 'FAILED '}{row.what}", file=sys.stderr, flush=True)
        server.stdin.close()
        server.wait()
    show(f"faults: {runs} runs each, {RANKS} ranks, {cores()} jobs at a time", done, json)
    if failed := [row["what"] for row in done if not row["passed"]]:
        sys.exit(f"not noticed, misnamed, late or left behind: {', '.join(failed)}")


def summary(row: Row, runs: int, folder: Path) -> dict[str, Any]:
    """Of so many runs of a row; what went wrong is shown at once."""
    def one(k: int) -> tuple[Outcome, list[str]]:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            Path(own, "temporary").mkdir()
            outcome = row.run(Path(own))
            return outcome, left_behind(Path(own))

    with ThreadPoolExecutor(cores() * row.a_core) as pool:
        try:
            outcomes, left = zip(*pool.map(one, range(runs)))
        except BaseException:
            end_all()                                # who is asked to end does not wait for what they would tell
            raise
    worst = [max(outcome.seconds) for outcome in outcomes]
    for wrong in (text for outcome, texts in zip(outcomes, left) for text in (outcome.misnamed, *texts) if text):
        print(f"{row.what}: {wrong}", file=sys.stderr, flush=True)
    noticed = sum(seconds < PATIENCE for seconds in worst)
    named = sum(not outcome.misnamed for outcome in outcomes)
    return {"what": row.what, "runs": runs, "noticed": noticed, "named": named, "median s": statistics.median(worst),
            "max s": max(worst), "limit s": row.limit, "left": sum(map(len, left)),
            "passed": noticed == named == runs and max(worst) <= row.limit and not any(left)}


def table() -> Iterator[Row]:
    """All faults."""
    for native, by in (("1", "shared memory"), ("0", "gloo")):
        for place in ("boxing", "large boxing", "pipeline", "data", "saving", "loading"):
            for fault in DEATHS:
                yield Row(f"{fault}, {place}, {by}", KERNEL, ranks_told(place, fault, native))
        for place in ("boxing", "data", "saving", "loading"):
            yield Row(f"STOP, {place}, {by}", STOP, ranks_told(place, "STOP", native), 4)
        for place in ("boxing", "saving", "loading"):
            yield Row(f"endless loop, {place}, {by}, timeout={LOOPS_FOR}", LOOP,
                      ranks_told(place, "loop", native, LOOPS_FOR, words=f"rank {VICTIM} lives, and is here"), 2)
        for fault in ("KILL", "exit 0", "raise"):
            yield Row(f"{fault}, before ranks have met, {by}", START, ranks_told("start", fault, native))
        yield Row(f"STOP, before ranks have met, {by}", STOP, ranks_told("start", "STOP", native))
        yield Row(f"ranks disagree in {COUNTED}, {by}", WAYS, ranks_apart(native))
    for place, fault, limit in (*((place, "KILL", KERNEL) for place in ("boxing", "pipeline", "loading")),
                                ("saving", "KILL", FAR), ("loading", "STOP", FAR)):       # nobody reads a socket there
        yield Row(f"{fault}, {place}, a host each", limit, ranks_told(
            place, fault, "1", HOSTS="1", LOCAL_WORLD_SIZE="1", GLOBALTENSOR_SECRET="x", GLOO_SOCKET_IFNAME="lo"))
    for (place, fault), (code, words) in BLAMED.items():
        yield Row(f"{fault}, {place}, launcher", ALL_ENDED, launcher_told(place, fault, code, words))
    for name, number in (("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129), ("SIGKILL", -9)):
        yield Row(f"{name} to the launcher", ALL_ENDED, launcher_ended(name, number))
    yield Row("SIGTERM, 9 s of saving", SAVING, preempted)
    for fault in ("KILL", "SEGV", "raise"):
        yield Row(f"{fault}, and started again", SAVING, started_again(fault))
    for what, nodes in PROOFS.items():
        yield Row(f"test: {what}", 120, proven(*nodes))


COUNTED = "48 ways"
# under the launcher: its exit code, and what its last lines say
BLAMED = {
    ("boxing", "KILL"): (137, "rank 1 was killed by SIGKILL"),
    ("boxing", "SEGV"): (139, "rank 1 was killed by SIGSEGV"),
    ("boxing", "raise"): (1, "rank 1 failed: ValueError: bad luck"),
    ("boxing", "MemoryError"): (1, "rank 1 failed: MemoryError"),
    ("boxing", "exit 3"): (3, "rank 1 exited with code 3"),
    ("boxing", "sys.exit"): (1, "rank 1 ended without an error, while others waited"),
    ("pipeline", "SEGV"): (139, "rank 1 was killed by SIGSEGV"),
    ("data", "raise"): (1, "rank 1 failed: ValueError: bad luck"),
    ("saving", "KILL"): (137, "rank 1 was killed by SIGKILL"),
    ("loading", "KILL"): (137, "rank 1 was killed by SIGKILL"),
    ("start", "KILL"): (137, "rank 1 was killed by SIGKILL"),
    ("start", "sys.exit"): (1, "rank 1 ended"),
    ("end", "SEGV"): (139, "rank 1 was killed by SIGSEGV"),
}
# faults that a test makes and checks, a run of which is one of these
PROOFS = {
    "another user at every port of a job": ["test_control_plane.py::test_another_user_at_every_port_of_a_job"],
    "a stranger who joins as a rank": ["test_control_plane.py::test_a_stranger_who_joins_as_a_rank_is_refused"],
    "two jobs save into one folder": ["test_lease.py::test_two_jobs_save_into_one_folder[6]"],
    "ranks save into folders of their own": ["test_lease.py::test_a_folder_per_rank_is_an_error_on_all"],
    "kill -9 of those who save": ["test_checkpoint.py::test_whoever_is_killed_leaves_a_whole_checkpoint"],
    "asynchronous saves, killed": [
        "test_lease.py::test_an_asynchronous_save_whose_rank_is_killed_leaves_the_version_before"],
    "damaged checkpoints": ["test_checkpoint.py", "-k", "bit or missing or believed or links or latest"],
    "handshakes with the wrong uid, version or memory": ["test_transport.py", "-k", "test_meeting"],
    "a rank stopped for 4 s, in turns, is waited for": ["test_processes.py::test_who_is_slow_is_waited_for"],
}
QUICK = ("KILL, boxing, shared memory", "raise, saving, gloo", "sys.exit, boxing, launcher")


# ---------------------------------------------------------------------------------------------------------- one run


def ranks_told(place: str, fault: str, native: str, *timeout: float, words: str = "",
               **env: str) -> Callable[[Path], Outcome]:
    """A job without a launcher: what ranks are told by each other."""
    def run(folder: Path) -> Outcome:
        started = by_hand([PROGRAMS / "faults.py", place, fault, folder, *timeout], RANKS, GLOBALTENSOR_NATIVE=native,
                          TMPDIR=str(folder / "temporary"), **env)
        others = [rank for rank in range(RANKS) if rank != VICTIM]
        ended, limit = dict.fromkeys(others, 0.0), time.time() + PATIENCE
        while not all(ended.values()) and time.time() < limit:
            for rank in others:
                if not ended[rank] and started[rank].process.poll() is not None:
                    ended[rank] = time.time()
            time.sleep(0.005)
        texts = [killed(one) for one in started]
        if (missing := not_struck(folder, texts)) is not None:
            return missing
        told, when = results(folder), float((folder / "when").read_text())
        outcome = Outcome([])
        for rank in others:                          # the watch may have to end a process: then its end tells
            note = told.get(rank, {"told": texts[rank], "after": ended[rank] - when if ended[rank] else PATIENCE})
            outcome.seconds.append(PATIENCE if note["told"] in ("", "nothing") else note["after"])
            if not all(word in note["told"] for word in (f"rank {VICTIM}", "faults.py:", words)):
                outcome = outcome._replace(misnamed=f"rank {rank} was told {note['told']!r}")
        return outcome

    return run


def not_struck(folder: Path, texts: list[str]) -> Outcome | None:
    """Of a job to which nothing happened: something else is wrong."""
    return None if (folder / "when").exists() else Outcome([PATIENCE], f"the fault did not come: {texts}")


def killed(one: Started) -> str:
    """End it, if it lives; what it said of errors."""
    if one.process.poll() is None:
        os.killpg(one.process.pid, signal.SIGKILL)
    return one.process.communicate()[1]


def launcher_told(place: str, fault: str, code: int, words: str) -> Callable[[Path], Outcome]:
    """A job of `globaltensor run`: what it says when all have ended, and its exit code."""
    def run(folder: Path) -> Outcome:
        job = Started([*RUN, "-n", RANKS, PROGRAMS / "faults.py", place, fault, folder],
                      environment(TMPDIR=str(folder / "temporary")))
        ended, _, errors = finish(job)
        if (missing := not_struck(folder, [errors])) is not None:
            return missing
        seconds = time.time() - float((folder / "when").read_text())
        wrong = ended != code or f"globaltensor: {words}" not in errors
        return Outcome([seconds], f"ended with {ended}: {errors}" if wrong else "")

    return run


def finish(job: Started, patience: float = PATIENCE) -> tuple[int, str, str]:
    """As `Started.end`; one that hangs is killed, which its exit code tells."""
    try:
        return job.end(patience)
    except AssertionError as error:
        return -signal.SIGKILL, "", str(error)


def launcher_ended(name: str, code: int) -> Callable[[Path], Outcome]:
    """The launcher gets a signal: its ranks end with it."""
    def run(folder: Path) -> Outcome:
        # one that is killed cannot clear its folder
        own = {} if name == "SIGKILL" else {"TMPDIR": str(folder / "temporary")}
        job = Started([*RUN, "-n", RANKS, PROGRAMS / "fails.py", "waits"], environment(FAULTS=str(folder), **own))
        for _ in range(RANKS):
            job.process.stdout.readline()
        began = time.time()
        job.process.send_signal(getattr(signal, name))
        job.process.wait(PATIENCE)
        while left_behind(folder) and time.time() - began < PATIENCE:
            time.sleep(0.01)
        seconds = time.time() - began
        job.process.communicate()
        return Outcome([seconds], f"ended with {job.process.returncode}" if job.process.returncode != code else "")

    return run


def trained(folder: Path, *fault: object, run: list[object], env: dict[str, str]) -> tuple[int, str, float]:
    """Ten steps that a fault may disturb: exit code, errors, seconds since the fault, or since the start without."""
    began = time.time()
    job = Started([*run, PROGRAMS / "lifecycle.py", folder, 10, *fault],
                  environment(TMPDIR=str(folder / "temporary"), **env))
    code, _, errors = finish(job)
    if (mark := folder / "struck").exists():         # a file that is made just before the fault, once
        began = max(began, mark.stat().st_mtime)
    return code, errors, time.time() - began


def losses(folder: Path) -> list[str]:
    """Of each step, in the order in which they were done for the first time."""
    return list(dict.fromkeys(line for line in (folder / "said").read_text().splitlines() if '"loss"' in line))


def preempted(folder: Path) -> Outcome:
    """The launcher is asked to end; ranks take 9 seconds to save, and the job goes on later as if nothing had been. It
    is a rank that asks, its parent: no fork, whose parent is the process that forks."""
    launcher = [*RUN, "-n", RANKS]
    code, errors, seconds = trained(folder, "launcher TERM", 1, 5, run=launcher,
                                    env={"SAVES_FOR": "9", forks.SOCKET: ""})
    again, more, _ = trained(folder, run=launcher, env={})
    right = (code, again) == (REQUEUE, 0) and losses(folder) == undisturbed()
    return Outcome([seconds], "" if right else f"ended with {code}, {again}: {errors}{more}")


def started_again(fault: str) -> Callable[[Path], Outcome]:
    """A rank crashes, and the launcher starts all of them again, which go on bit by bit."""
    def run(folder: Path) -> Outcome:
        code, errors, seconds = trained(folder, fault, 1, 6, run=[*RUN, "-n", RANKS, "--max-restarts", 1], env={})
        right = code == 0 and "rank 1" in errors and losses(folder) == undisturbed()
        return Outcome([seconds], "" if right else f"ended with {code}: {errors}")

    return run


@cache
def undisturbed() -> list[str]:
    """Of a run in one process to which nothing happens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "temporary").mkdir()
        code, errors, _ = trained(folder, run=[PYTHON], env={"GLOBALTENSOR_RANKS": str(RANKS)})
        assert code == 0, errors
        return losses(folder)


def ranks_apart(native: str) -> Callable[[Path], Outcome]:
    """Ranks that do not do the same, in every way there is a program for."""
    def run(folder: Path) -> Outcome:
        job = Started([PYTHON, PROGRAMS / "apart.py", RANKS], environment(
            PYTHONPATH=f"{TESTS.parent}:{TESTS}", TMPDIR=str(folder / "temporary"), GLOBALTENSOR_NATIVE=native))
        code, out, errors = finish(job, APART)
        if code:
            return Outcome([PATIENCE], f"ended with {code}: {out}{errors}")
        outcome = Outcome([])
        for way, ranks in _json.loads(out.splitlines()[-1]).items():
            try:
                check(way, ranks)
            except AssertionError as error:
                outcome = outcome._replace(misnamed=str(error))
            if "a rank " not in way:                 # else nobody has to be told
                outcome.seconds.extend(PATIENCE if code is None else seconds for code, seconds, _ in ranks)
        return outcome

    return run


def proven(*nodes: str) -> Callable[[Path], Outcome]:
    """Tests that make a fault themselves."""
    def run(folder: Path) -> Outcome:
        began = time.time()
        tests = Started([PYTHON, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--basetemp", folder / "pytest",
                         *nodes], environment(TMPDIR=str(folder / "temporary")), cwd=TESTS)
        code, out, errors = finish(tests)
        return Outcome([time.time() - began], f"{out[-3000:]}{errors}" if code else "")

    return run
