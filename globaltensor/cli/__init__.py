"""The command `globaltensor`: run a program on several ranks, show the environment, run benchmarks, plan ahead.

    globaltensor run -n 4 train.py --steps 100     the program on 4 ranks of this host
    globaltensor info                              versions, devices, transports, the world
    globaltensor bench dispatch                    one of the benchmarks
    globaltensor simulate --schedule zb-h1 ...     a pipeline schedule, on any cluster, without running it
    globaltensor memory --params 7.5e9 --zero 2    the memory of a rank
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import globaltensor
from globaltensor.cli import bench, info, memory, run, simulate
from globaltensor.cli.problem import Problem


def parser() -> argparse.ArgumentParser:
    """All commands and their options; each one's `command` does it and returns an exit code."""
    top = argparse.ArgumentParser(prog="globaltensor", formatter_class=argparse.RawDescriptionHelpFormatter,
                                  description=__doc__)
    top.add_argument("--version", action="version", version=f"globaltensor {globaltensor.__version__}")
    commands = top.add_subparsers(metavar="command", required=True)
    for module in (run, info, bench, simulate, memory):
        name = module.__name__.rpartition(".")[2]
        doc = module.__doc__ or name                 # python -OO leaves docstrings out
        one = commands.add_parser(name, help=doc.splitlines()[0], description=doc,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
        module.options(one)
        one.set_defaults(command=module.command)
    return top


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line `args` (default: the process's own); the exit code."""
    arguments = sys.argv[1:] if args is None else args
    if not arguments:                                # as git does: the commands, not an error about a missing one
        parser().print_help()
        return 0
    chosen = parser().parse_args(arguments)
    try:
        return chosen.command(chosen)
    except Problem as problem:
        print(f"globaltensor: {problem}", file=sys.stderr)
        return problem.code
    except BrokenPipeError:                          # `globaltensor info | head`
        sys.stderr.close()
        return 1
