"""Show the jobs of this user on this host, and each of their ranks.

    globaltensor ps
    job   rank     process   state   memory   for      program
    1     0 of 2   4711      runs    512 MB   0:01:05  train.py --steps 100
    1     1 of 2   4712      stopped 498 MB   0:01:05  train.py --steps 100

`globaltensor stacks` shows where in the program they are.
"""
from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

from globaltensor.cli import worker
from globaltensor.cli.problem import Problem
from globaltensor.runtime.host_processes import RankProcess, host_id, process_state, rank_processes
from globaltensor.runtime.text_table import aligned


def options(of: argparse.ArgumentParser) -> None:
    """The command line of `globaltensor ps`: nothing."""


def command(chosen: argparse.Namespace) -> int:
    """Print them."""
    rows = [("job", "rank", "process", "state", "memory", "for", "program")]
    for number, ranks in enumerate(jobs(), 1):
        for each in ranks:
            pid = each.process.pid
            rows.append((str(number), f"{each.rank} of {each.ranks}", str(pid), process_state(each.process),
                         _resident(pid), _age(each.process.began), program(pid)))
    print("\n".join(aligned(rows, gap="   ")) if len(rows) > 1 else "no job of this user runs on this host")
    return 0


def jobs() -> list[list[RankProcess]]:
    """The ranks of each job, in their order, without processes that they forked."""
    if not host_id():
        raise Problem("this system has no /proc, where running processes are listed", 1)
    everyone = list(rank_processes())
    pids = {(each.job, each.rank, each.process.pid) for each in everyone}
    by_job = defaultdict(list)
    for each in everyone:
        if (each.job, each.rank, _parent(each.process.pid)) not in pids:
            by_job[each.job].append(each)
    return [sorted(ranks, key=lambda each: each.rank) for _, ranks in sorted(by_job.items())]


def program(pid: int) -> str:
    """What the process runs: the program and its arguments."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return "has ended"
    if worker.__file__ in words:
        words = words[words.index(worker.__file__) + 1:]
    return " ".join([os.path.relpath(word) if os.path.isabs(word) else word for word in words])


def _status_line(pid: int, name: str) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")


def _parent(pid: int) -> int:
    return int(_status_line(pid, "PPid") or 0)


def _resident(pid: int) -> str:
    return f"{int((_status_line(pid, 'VmRSS') or '0').split()[0]) / 1000:,.0f} MB"


def _age(began: int) -> str:
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
    return str(timedelta(seconds=int(seconds)))
