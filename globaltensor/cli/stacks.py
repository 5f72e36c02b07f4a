"""Show where in its program each rank of this user's jobs on this host is: its stack, innermost call first.

A rank writes its stack when it is asked, also where it loops for ever, or holds the interpreter's lock in a C call. The
program is not disturbed. A rank that is stopped cannot answer.
"""
from __future__ import annotations

import argparse

from globaltensor.cli.ps import jobs, program
from globaltensor.runtime.host_processes import STOPPED, process_state
from globaltensor.runtime.stacks import stack_of


def options(of: argparse.ArgumentParser) -> None:
    """The command line of `globaltensor stacks`: nothing."""


def command(chosen: argparse.Namespace) -> int:
    """Print them."""
    running = jobs()
    for number, ranks in enumerate(running, 1):
        for each in ranks:
            pid = each.process.pid
            print(f"job {number}, rank {each.rank} of {each.ranks}, process {pid}: {program(pid)}")
            stopped = process_state(each.process) == STOPPED
            print(stack_of(pid) or ("  is stopped: kill -CONT lets it go on" if stopped else
                                    "  has not started a world of globaltensor yet"))
    if not running:
        print("no job of this user runs on this host")
    return 0
