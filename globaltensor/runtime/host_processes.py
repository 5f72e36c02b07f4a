"""What the kernel of this host tells of processes: whether they live or are stopped, and which are ranks of a job.

A pid names a process only until it is used again, and only within its pid namespace. So a `ProcessId` also says on
which host and in which namespace, and when the process began. All of it is read from /proc, at once and without the
process's help: a rank that computes for a minute inside one C call is alive, and one that was killed is not, whatever
it promised.
"""
from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from globaltensor.runtime.codec import message

RUNS, STOPPED, ENDED = "runs", "stopped", "ended"
_ENDS = "globaltensor -"                             # the name of a process that does nothing any more but end
_PR_SET_NAME = 15
_OF_A_RANK = (b"RANK=", b"WORLD_SIZE=", b"MASTER_ADDR=", b"MASTER_PORT=", b"TORCHELASTIC_RUN_ID=",
              b"TORCHELASTIC_RESTART_COUNT=")


@message
class ProcessId(NamedTuple):
    """A process, for as long as computers run. `host` is empty where the system has no /proc."""

    host: str
    pid: int
    began: int                                       # in ticks of the clock since the host started

    @property
    def here(self) -> bool:
        """Can this process see that one?"""
        return self.host != "" and self.host == host_id()


class RankProcess(NamedTuple):
    """A process of this user that a launcher, or a person, started as a rank of a job."""

    process: ProcessId
    rank: int
    ranks: int
    job: str                                         # the same for all ranks of a job and no others


@cache
def host_id() -> str:
    """The same for processes that see each other in /proc, and no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_id(pid: int) -> ProcessId | None:
    """The process that has this pid now; None where there is none."""
    stat = _stat(pid)
    return None if stat is None else ProcessId(host_id(), pid, stat[1])


@cache
def _own(pid: int) -> ProcessId:
    return process_id(pid) or ProcessId("", pid, 0)


def own_process() -> ProcessId:
    """This process."""
    return _own(os.getpid())                         # a fork is another one


def process_state(process: ProcessId) -> str:
    """RUNS, STOPPED (by SIGSTOP, or a debugger) or ENDED, of a process of this host."""
    stat = _stat(process.pid)
    if stat is None or stat[1] != process.began or stat[0] in "ZX":
        return ENDED
    return STOPPED if stat[0] in "Tt" else RUNS


def times_it_paused(process: ProcessId) -> bytes:
    """How often the main thread has given up its core, as the kernel writes it: the same for as long as it is stopped,
    another once it has run in between."""
    lines = _kernel_text(f"/proc/{process.pid}/status").splitlines()
    return b"".join(line for line in lines if b"ctxt_switches" in line)


def _stat(pid: int) -> tuple[str, int] | None:
    """The kernel's letter for the state of a process, and when it began."""
    if not (text := _kernel_text(f"/proc/{pid}/stat")):
        return None
    name, _, rest = text.decode(errors="replace").partition("(")[2].rpartition(")")      # a name may hold anything
    fields = rest.split()
    return None if name == _ENDS else (fields[0], int(fields[19]))


def mark_ended() -> None:
    """From now on this process counts as ended on its host, where Linux can tell: called by its main thread, last."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, _ENDS.encode())


def rank_processes(job: str = "") -> Iterator[RankProcess]:
    """The ranks of this job, or of all jobs of this user, that run on this host; children that a rank forked, too."""
    for name in os.listdir("/proc") if host_id() else ():
        env = _environment_of(int(name)) if name.isdecimal() else {}
        its_job = job_name(env)
        if its_job and job in ("", its_job) and (process := process_id(int(name))) is not None:
            yield RankProcess(process, int(env["RANK"]), int(env["WORLD_SIZE"]), its_job)


def is_of_a_rank(pid: int, job: str) -> bool:
    """Was that process started as a rank of this job, or by one?"""
    return job_name(_environment_of(pid)) == job


def _kernel_text(path: str) -> bytes:
    """What the kernel writes there; nothing where it does not. Ranks that start read these files again and again."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def _environment_of(pid: int) -> dict[str, str]:
    """What `job_name` asks for of what a process was started with; nothing where that is not a rank's, it has ended, or
    is another user's."""
    text = _kernel_text(f"/proc/{pid}/environ")
    if b"MASTER_PORT=" not in text:
        return {}
    shown = (item.decode(errors="replace").partition("=") for item in text.split(b"\0") if item.startswith(_OF_A_RANK))
    return {name: value for name, _, value in shown}


def job_name(env: dict[str, str]) -> str:
    """The job to which a process with this environment belongs; "" where it is not a rank."""
    if not all(env.get(name, "").isdecimal() for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")):
        return ""
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return " ".join([env.get("MASTER_ADDR", ""), env["MASTER_PORT"], env.get("TORCHELASTIC_RUN_ID", ""), attempt])
