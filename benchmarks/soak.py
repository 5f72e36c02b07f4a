"""Does training survive? examples/train_gpt.py on 4 ranks under random faults, against the same run undisturbed.

At random moments, of a seed, one of

    KILL SEGV   a rank dies of that signal
    STOP        a rank is stopped, and never goes on
    preemption  the launcher gets SIGTERM, as from a scheduler: ranks save and end, and the job is started again

each in turn, also while ranks start, save and load. The launcher starts the ranks again by itself (--max-restarts).
Every step's loss, also of those that were done again, must have the bits of the undisturbed run, and nothing may be
left behind: no process and no temporary file.
"""
from __future__ import annotations

import json as _json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.timing import show
from globaltensor.cli.ps import jobs
from globaltensor.runtime.preemption import REQUEUE

RANKS = 4
KINDS = ("KILL", "SEGV", "STOP", "preemption")
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
STEPS_PER_MINUTE = 500
SMALL = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "16", "--batch", "8", "--dropout", "0.1",
         "--sample", "0"]


def main(json: bool = False, quick: bool = False, minutes: float | None = None, seed: int = 0) -> None:
    minutes = minutes or (0.3 if quick else 2.0)
    steps = int(STEPS_PER_MINUTE * minutes)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        began = time.monotonic()
        _finish(_start(folder / "undisturbed", steps))
        undisturbed = time.monotonic() - began
        soak = Soak(folder / "disturbed", steps, random.Random(seed), minutes)
        soak.run()
        left = _leavings(folder)
        expected, done = _losses(folder / "undisturbed"), _losses(folder / "disturbed")
    wrong = [step for step in range(1, steps + 1) if expected.get(step) != done.get(step)]
    rows: list[dict[str, Any]] = [{
        "faults": sum(soak.faults.values()), **{kind: soak.faults[kind] for kind in KINDS}, "steps": steps,
        "different": len(wrong), "seconds": round(soak.seconds, 1), "undisturbed": round(undisturbed, 1),
        "left behind": len(left)}]
    show(f"soak: seed {seed}, {RANKS} ranks", rows, json)
    if wrong or left:
        sys.exit(f"steps with other losses: {wrong[:5]}; left behind: {left[:5]}")


class Soak:
    """The disturbed run, and what happened to it."""

    def __init__(self, folder: Path, steps: int, rng: random.Random, minutes: float) -> None:
        self.folder, self.steps, self.rng, self.minutes = folder, steps, rng, minutes
        self.faults: Counter[str] = Counter()
        self.seconds = 0.0

    def run(self) -> None:
        """Until the example has done all its steps; disturbed for so many minutes."""
        began = time.monotonic()
        job = _start(self.folder, self.steps)
        while job.poll() is None and time.monotonic() - began < 60 * self.minutes:
            self._pause(job, self.rng.uniform(1, 12))
            if job.poll() is None and self._disturb(job) == "preemption":
                code = job.wait(120)
                if code not in (0, REQUEUE, 128 + signal.SIGTERM):       # it was asked before it could listen
                    raise SystemExit(f"the launcher ended with {code}: {self._errors()}")
                job = _start(self.folder, self.steps)
        _finish(job)
        self.seconds = time.monotonic() - began

    def _pause(self, job: subprocess.Popen[bytes], seconds: float) -> None:
        try:
            job.wait(seconds)
        except subprocess.TimeoutExpired:
            pass

    def _disturb(self, job: subprocess.Popen[bytes]) -> str:
        """One fault, of the kinds in turn, each turn in another order."""
        if not sum(self.faults.values()) % len(KINDS):
            self.turn = self.rng.sample(KINDS, len(KINDS))
        kind = self.turn[sum(self.faults.values()) % len(KINDS)]
        if kind == "preemption":
            job.terminate()
        else:
            victims = [each.process.pid for ranks in jobs() for each in ranks if _parent(each.process.pid) == job.pid]
            if not victims:                          # between two starts
                return ""
            try:
                os.kill(self.rng.choice(victims), getattr(signal, f"SIG{kind}"))
            except ProcessLookupError:
                return ""
        self.faults[kind] += 1
        return kind

    def _errors(self) -> str:
        return (self.folder / "errors").read_text()[-2000:]


def _start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    (folder / "temporary").mkdir(parents=True, exist_ok=True)
    run = [sys.executable, "-m", "globaltensor.cli", "run", "-n", str(RANKS), "--max-restarts", "1000"]
    own = ["--steps", str(steps), "--checkpoint", str(folder / "checkpoint"), "--every", "20", "--log",
           str(folder / "log")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "temporary"),
                        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}     # torch keeps that
    with open(folder / "errors", "ab") as errors:
        return subprocess.Popen([*run, str(EXAMPLE), *SMALL, *own], stdout=errors, stderr=errors, env=env)


def _finish(job: subprocess.Popen[bytes]) -> None:
    if job.wait() != 0:
        sys.exit(f"the example ended with {job.returncode}")


def _losses(folder: Path) -> dict[int, str]:
    """By step; "different" where it was done twice and came out otherwise."""
    losses: dict[int, str] = {}
    for line in (folder / "log").read_text().splitlines():
        each = _json.loads(line)
        same = losses.setdefault(each["step"], each["loss"]) == each["loss"]
        losses[each["step"]] = each["loss"] if same else "different"
    return losses


def _leavings(folder: Path) -> list[str]:
    """What the jobs left: ranks that name the folder in their command line, and temporary files."""
    left = [str(path) for path in folder.glob("*/temporary/*")]
    for each in (each for ranks in jobs() for each in ranks):
        with suppress(OSError):                      # it has ended meanwhile
            if str(folder) in Path(f"/proc/{each.process.pid}/cmdline").read_text():
                left.append(f"process {each.process.pid}")
    return left


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
