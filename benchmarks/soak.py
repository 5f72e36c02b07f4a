"""Does training survive? examples/train_gpt.py on 4 ranks under random faults, against the same run undisturbed.

At random moments, of a seed, one of

    KILL SEGV   a rank dies of that signal
    STOP        a rank is stopped, and never goes on
    preemption  the launcher gets SIGTERM, as from a scheduler: ranks save and end, and the job is started again
    full        the disk of the checkpoints is full, until a save has failed of it
    slow        that disk stops for some seconds: whoever writes waits

each in turn, and at moments that are drawn: while ranks save, while they start (and load), or train. For the last third
of the time the ranks are on two hosts (network namespaces, which take root), and

    cut         the link between them is gone, for up to 20 seconds: longer than ranks wait for a silent host, or less

The launcher starts the ranks again by itself (--max-restarts). Every step's loss, also of those that were done again,
must have the bits of the undisturbed run; with --min-ranks, where jobs go on with fewer ranks, be within 1e-5 of it.
Nothing may be left behind: no process, hence no port and no memory that ranks share, and no temporary file.
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
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks import disks, hosts
from benchmarks.processes import left_behind
from benchmarks.timing import show
from globaltensor.cli.ps import jobs
from globaltensor.runtime.preemption import REQUEUE

RANKS = 4
KINDS = ("KILL", "SEGV", "STOP", "preemption", "full", "slow", "cut")
MOMENTS = ("saving", "starting", "training")
CLOSE = 1e-5                                         # relative, of losses on fewer ranks
PORT = 29400                                         # of the first host
DISK = 64                                            # MB
_CRASHES = ("KILL", "SEGV", "STOP")
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
STEPS_PER_MINUTE, STEPS_PER_MINUTE_OF_HOSTS = 500, 200
OFTEN, OFTEN_ENOUGH = 3, 10                          # faults of each kind, in so many minutes
LONGEST_CUT = 20.0                                   # seconds
SMALL = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "16", "--batch", "8", "--dropout", "0.1",
         "--sample", "0"]


def main(json: bool = False, quick: bool = False, minutes: float | None = None, seed: int = 0,
         min_ranks: int | None = None) -> None:
    minutes = minutes or (0.3 if quick else 2.0)
    no_disk, no_hosts = disks.lacking(), hosts.lacking()
    for what, why in (("no full and no slow disk", no_disk), ("no link is cut", no_hosts)):
        if why:
            print(f"soak: {what}: {why}", file=sys.stderr)
    rng = random.Random(seed)
    rows, wrong = [], []
    with tempfile.TemporaryDirectory(prefix="soak-") as name, ExitStack() as stack:
        disk = None if no_disk else disks.Disk(Path(name), DISK)
        if disk is not None:
            stack.callback(disk.close)
        kinds = [kind for kind in KINDS[:-1] if disk is not None or kind not in ("full", "slow")]
        share = 1.0 if no_hosts else 2 / 3
        rows.append(_soaked("one host", Path(name, "one"), disk, kinds, [], rng, share * minutes, min_ranks, wrong))
        if not no_hosts and not min_ranks:           # a host that is cut off has not failed
            with hosts.cable() as two:
                rows.append(_soaked("two hosts", Path(name, "two"), None, ["cut"], two, rng, minutes / 3, None, wrong))
    show(f"soak: seed {seed}, {RANKS} ranks{f', at least {min_ranks}' if min_ranks else ''}", rows, json)
    if minutes >= OFTEN_ENOUGH:
        wrong += [f"{row['on']}: less than {OFTEN} x {kind}" for row in rows for kind in KINDS
                  if row[kind] is not None and row[kind] < OFTEN]
    if wrong:
        sys.exit("; ".join(wrong))


def _soaked(what: str, folder: Path, disk: disks.Disk | None, kinds: list[str], on: list[hosts.Host],
            rng: random.Random, minutes: float, min_ranks: int | None, wrong: list[str]) -> dict[str, Any]:
    """Train undisturbed, and then disturbed for so many minutes; what went wrong is added to `wrong`."""
    steps = int((STEPS_PER_MINUTE_OF_HOSTS if on else STEPS_PER_MINUTE) * minutes)
    began = time.monotonic()
    with Job(folder / "undisturbed", folder / "undisturbed" / "checkpoint", steps, min_ranks, on) as job:
        _finish(job)
    undisturbed = time.monotonic() - began
    soak = Soak(folder / "disturbed", disk, kinds, steps, rng, minutes, min_ranks, on)
    soak.run()
    left = left_behind(folder)
    expected, done = _losses(folder / "undisturbed"), _losses(folder / "disturbed")
    different = [step for step in range(1, steps + 1) if not _agree(expected.get(step, []), done.get(step, []),
                                                                    CLOSE if min_ranks else 0.0)]
    wrong += [f"{what}: steps with other losses: {different[:5]}"] * bool(different)
    wrong += [f"{what}: left behind: {left[:5]}"] * bool(left)
    return {"on": what, "faults": sum(soak.faults.values()),
            **{kind: soak.faults[kind] if kind in kinds else None for kind in KINDS},
            **{f"while {moment}": soak.moments[moment] for moment in MOMENTS}, "steps": steps,
            "different": len(different), "seconds": round(soak.seconds, 1), "undisturbed": round(undisturbed, 1),
            "left behind": len(left)}


def _agree(expected: list[float], done: list[float], tolerance: float) -> bool:
    """Was the step done, once or more often, with the loss of the undisturbed run?"""
    return len(expected) == 1 and len(done) > 0 and all(abs(x - expected[0]) <= tolerance * abs(expected[0])
                                                        for x in done)


class Soak:
    """The disturbed run, and what happened to it."""

    def __init__(self, folder: Path, disk: disks.Disk | None, kinds: list[str], steps: int, rng: random.Random,
                 minutes: float, min_ranks: int | None, on: list[hosts.Host]) -> None:
        self.folder, self.disk, self.steps, self.rng, self.minutes = folder, disk, steps, rng, minutes
        self.checkpoint = disk.path / "checkpoint" if disk is not None else folder / "checkpoint"
        self.kinds, self.min_ranks, self.hosts = kinds, min_ranks, on
        self.turn: list[str] = []
        self.faults: Counter[str] = Counter()
        self.moments: Counter[str] = Counter()
        self.seconds = 0.0

    def run(self) -> None:
        """Until the example has done all its steps; disturbed for so many minutes."""
        began = time.monotonic()
        with ExitStack() as jobs_of_it:
            self._disturbed(jobs_of_it.enter_context(self._started()), jobs_of_it, began)
        self.seconds = time.monotonic() - began

    def _disturbed(self, job: Job, jobs_of_it: ExitStack, began: float) -> None:
        while job.poll() is None and time.monotonic() - began < 60 * self.minutes:
            self._pause(job, self.rng.choice(MOMENTS))
            moment = self._moment()
            if job.poll() is None and (kind := self._disturb(job)):
                self.faults[kind] += 1
                self.moments[moment] += 1
                if kind == "preemption":
                    code = job.wait(120)
                    # 128 + SIGTERM, or by that signal itself: it was asked before ranks, or before it could listen
                    if code not in (0, REQUEUE, 128 + signal.SIGTERM, signal.SIGTERM):
                        raise SystemExit(f"the launcher ended with {code}: {self._errors()[-2000:]}")
                    job = jobs_of_it.enter_context(self._started())
        _finish(job)

    def _started(self) -> Job:
        return Job(self.folder, self.checkpoint, self.steps, self.min_ranks, self.hosts)

    def _pause(self, job: Job, until: str) -> None:
        """Until a moment of that kind, as far as one can tell: ranks start soon after the fault before."""
        with suppress(subprocess.TimeoutExpired):
            job.wait(self.rng.uniform(0, 4) if until == "starting" else self.rng.uniform(2, 8))
        limit = time.monotonic() + 30
        while until == "saving" and self._moment() != until and job.poll() is None and time.monotonic() < limit:
            time.sleep(0.002)

    def _moment(self) -> str:
        """What the ranks are doing."""
        if any(self.checkpoint.glob("step-*.tmp-*/lease")):
            return "saving"
        try:
            last = _json.loads((self.folder / "log").read_text().splitlines()[-1])
        except (OSError, IndexError, ValueError):    # nothing yet, or half a line
            return "starting"
        if self.hosts:                               # whose processes have numbers of their own
            return "training" if time.time() - (self.folder / "log").stat().st_mtime < 1 else "starting"
        return "training" if _parent(last["pid"]) else "starting"

    def _disturb(self, job: Job) -> str:
        """One fault, of the kinds in turn, each turn in another order."""
        self.turn = self.turn or self.rng.sample(self.kinds, len(self.kinds))
        kind = self.turn[-1]
        victims = job.ranks()
        if kind == "preemption" or self.min_ranks and kind in _CRASHES and 0 < len(victims) <= self.min_ranks:
            job.terminate()                          # a job that may lose no more ranks is started again with all
            kind = "preemption"
        elif kind == "full":
            self._fill(job)
        elif kind == "slow":
            assert self.disk is not None
            self.disk.stop()
            try:
                time.sleep(self.rng.uniform(0.5, 4))
            finally:
                self.disk.go_on()
        elif kind == "cut":
            hosts.cut(self.hosts[0])                 # nothing has to be mended in hosts that are removed
            time.sleep(self.rng.uniform(1, LONGEST_CUT))
            hosts.mend(self.hosts[0])
        elif not victims:                            # between two starts
            return ""
        else:
            try:
                os.kill(self.rng.choice(victims), getattr(signal, f"SIG{kind}"))
            except ProcessLookupError:
                return ""
        self.turn = [other for other in self.turn if other != kind]
        return kind

    def _fill(self, job: Job) -> None:
        assert self.disk is not None
        before, limit = self._errors().count("No space left"), time.monotonic() + 20
        self.disk.fill()
        try:
            while job.poll() is None and time.monotonic() < limit and self._errors().count("No space left") == before:
                time.sleep(0.1)
        finally:
            self.disk.empty()                        # ranks that are asked to end save first

    def _errors(self) -> str:
        return (self.folder / "errors").read_text()


class Job:
    """The launchers of the example, one, or one on each host; each host numbers its processes by itself."""

    def __init__(self, folder: Path, checkpoint: Path, steps: int, min_ranks: int | None, on: list[hosts.Host]) -> None:
        (folder / "temporary").mkdir(parents=True, exist_ok=True)
        run = [sys.executable, "-m", "globaltensor.cli", "run", "--max-restarts", "1000"]
        own = [str(EXAMPLE), *SMALL, "--steps", str(steps), "--checkpoint", str(checkpoint), "--every", "20", "--log",
               str(folder / "log")]
        if min_ranks:
            run += ["--min-ranks", str(min_ranks)]
            own += ["--tp", "1"]                     # so that any number of ranks will do
        env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "temporary"),
                            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}     # torch keeps that
        lines = [([*run, "-n", str(RANKS), *own], env)]
        if on:
            lines = [(["ip", "netns", "exec", host.name, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc",
                       *run, "-n", str(RANKS // len(on)), "--nnodes", str(len(on)), "--node-rank", str(k),
                       "--rdzv-endpoint", f"{on[0].address}:{PORT}", "--local-addr", host.address, *own],
                      env | {"GLOO_SOCKET_IFNAME": host.end, "GLOBALTENSOR_SECRET": "of a soak"})
                     for k, host in enumerate(on)]
        with open(folder / "errors", "ab") as errors:
            self.launchers = [subprocess.Popen(line, stdout=errors, stderr=errors, env=of) for line, of in lines]

    def poll(self) -> int | None:
        """The exit code, when all have ended."""
        codes = [launcher.poll() for launcher in self.launchers]
        return None if None in codes else max(map(abs, codes))

    def wait(self, timeout: float | None = None) -> int:
        for launcher in self.launchers:
            launcher.wait(timeout)
        return self.poll() or 0

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        """End what has not ended: the soak was asked to, or has failed."""
        for launcher in self.launchers:
            if launcher.poll() is None:
                if len(self.launchers) == 1:
                    launcher.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        launcher.wait(60)            # ranks save, and have some time for it
                # where a host numbers its own processes, all of them have ended before its first one has
                first = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
                for pid in first if len(self.launchers) > 1 and first else [launcher.pid]:
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                launcher.wait()

    def terminate(self) -> None:
        for launcher in self.launchers:
            launcher.terminate()

    def ranks(self) -> list[int]:
        """The processes of the ranks that a launcher on this host has started."""
        return [each.process.pid for ranks in jobs() for each in ranks
                if _parent(each.process.pid) == self.launchers[0].pid]


def _finish(job: Job) -> None:
    if (code := job.wait()) != 0:
        sys.exit(f"the example ended with {code}")


def _losses(folder: Path) -> dict[int, list[float]]:
    """By step; several where it was done again and came out otherwise."""
    losses: dict[int, list[float]] = {}
    for line in (folder / "log").read_text().splitlines():
        each = _json.loads(line)
        values = losses.setdefault(each["step"], [])
        if (value := float.fromhex(each["loss"])) not in values:
            values.append(value)
    return losses


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
