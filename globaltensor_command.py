"""The command `globaltensor`. It stands beside the package, which imports torch: its version and its help come at once.

A command is a module of `globaltensor/cli/`, which is imported when it is chosen; until then its docstring is read.
"""
from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

COMMANDS = ("run", "ps", "stacks", "info", "doctor", "bench", "simulate", "report", "play", "memory", "plan", "calibrate", "recipe")


def package() -> Path:
    """Where the package is, which is not imported to find out."""
    found = importlib.util.find_spec("globaltensor")
    assert found is not None and found.origin is not None        # the two are installed together
    return Path(found.origin).parent


def docstring(name: str) -> str:
    """That of a file of `globaltensor/cli/`."""
    return ast.get_docstring(ast.parse((package() / "cli" / f"{name}.py").read_text()), clean=False) or name


def version() -> str:
    """globaltensor.__version__"""
    return re.findall(r'(?m)^__version__ = "(.+)"', (package() / "__init__.py").read_text())[0]


def parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """All commands, and the options of the chosen one, whose `command` does it and returns an exit code."""
    top = argparse.ArgumentParser(prog="globaltensor", formatter_class=argparse.RawDescriptionHelpFormatter,
                                  description=docstring("__init__"))
    top.add_argument("--version", action="version", version=f"globaltensor {version()}")
    commands = top.add_subparsers(metavar="command", required=True)
    for name in COMMANDS:
        doc = docstring(name)
        one = commands.add_parser(name, help=doc.splitlines()[0], description=doc,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == chosen:
            module = importlib.import_module(f"globaltensor.cli.{name}")
            module.options(one)
            one.set_defaults(command=module.command)
    return top


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line `args` (default: the process's own); the exit code."""
    arguments = sys.argv[1:] if args is None else args
    if not arguments:                                # as git does: the commands, not an error about a missing one
        parser().print_help()
        return 0
    chosen = parser(arguments[0]).parse_args(arguments)
    problem = importlib.import_module("globaltensor.cli.problem").Problem
    try:
        return chosen.command(chosen)
    except problem as error:
        print(f"globaltensor: {error}", file=sys.stderr)
        return error.code
    except BrokenPipeError:                          # `globaltensor info | head`
        sys.stderr.close()
        return 1
