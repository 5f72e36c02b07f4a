"""List this user's jobs on this host, with all of their ranks.

    globaltensor ps
    job   rank     process   state   memory   for      program
    1     0 of 2   4711      runs    512 MB   0:01:05  train.py --steps 100
    1     1 of 2   4712      stopped 498 MB   0:01:05  train.py --steps 100

`globaltensor stacks` shows which line of the program each rank has reached.
"""
from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from globaltensor.cli import fork_server, worker
from globaltensor.cli.problem import Problem
from globaltensor.runtime.host_processes import RankProcess, host_id, process_state, rank_processes
from globaltensor.runtime.text_table import aligned, terminal_columns
from globaltensor.runtime.units import bytes_text

NO_JOB = "no job of this user runs on this host"



def command(chosen: argparse.Namespace) -> int:
    """Print them."""
    running = jobs()
    if chosen.json:
        print(json.dumps([{"ranks": ranks[0].ranks, "here": [_facts_of(each) for each in ranks]} for ranks in running],
                         indent=2))
        return 0
    rows = [("job", "rank", "process", "state", "memory", "for", "program")]
    for number, ranks in enumerate(running, 1):
        for each in ranks:
            of = _facts_of(each)
            rows.append((str(number), f"{each.rank} of {each.ranks}", str(of["process"]), of["state"],
                         bytes_text(of["bytes"]), str(timedelta(seconds=int(of["seconds"]))), of["program"]))
    print("\n".join(aligned(rows, gap="   ", columns=terminal_columns())) if running else NO_JOB)
    return 0


def _facts_of(each: RankProcess) -> dict[str, Any]:
    pid = each.process.pid
    return {"rank": each.rank, "process": pid, "state": process_state(each.process), "bytes": _resident(pid),
            "seconds": _age(each.process.began), "program": program(pid)}


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
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return "has ended"
    for script in (worker.__file__, fork_server.__file__):
        own = os.path.join(*Path(script).parts[-3:])  # also of a copy of the package that is installed elsewhere
        if (at := next((i for i, word in enumerate(words) if word.endswith(own)), None)) is not None:
            words = words[at + 1:]
    return " ".join([os.path.relpath(word) if os.path.isabs(word) else word for word in words])


def _status_line(pid: int, name: str) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")


def _parent(pid: int) -> int:
    return int(_status_line(pid, "PPid") or 0)


def _resident(pid: int) -> int:
    return int((_status_line(pid, "VmRSS") or "0").split()[0]) * 1024            # kB of Linux are 1024 bytes


def _age(began: int) -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
