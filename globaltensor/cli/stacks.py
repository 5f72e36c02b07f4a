"""Show the stack of each rank of this user's jobs on this host, innermost call first.

A rank answers even if it is in an endless loop, or in a C call that holds the interpreter's lock. The program is not
disturbed. A rank that is stopped (SIGSTOP) cannot answer.
"""
from __future__ import annotations

import argparse
import json

from globaltensor.cli.ps import NO_JOB, jobs, program
from globaltensor.runtime.host_processes import STOPPED, RankProcess, process_state
from globaltensor.runtime.stacks import stack_of


def command(chosen: argparse.Namespace) -> int:
    """Print them."""
    running = jobs()
    if chosen.json:
        print(json.dumps([[{"rank": each.rank, "process": each.process.pid, "program": program(each.process.pid),
                            "stack": _stack_lines(each)} for each in ranks] for ranks in running], indent=2))
        return 0
    for number, ranks in enumerate(running, 1):
        for each in ranks:
            pid = each.process.pid
            print(f"job {number}, rank {each.rank} of {each.ranks}, process {pid}: {program(pid)}")
            print("\n".join(_stack_lines(each)))
    if not running:
        print(NO_JOB)
    return 0


def _stack_lines(of: RankProcess) -> list[str]:
    stopped = process_state(of.process) == STOPPED
    return stack_of(of.process.pid).splitlines() or ["  is stopped: kill -CONT lets it go on" if stopped else
                                                     "  has not started a world of globaltensor yet"]
