"""The command `globaltensor`. It stands beside the package, which imports torch: its version and its help come at once.

A command is a module of `globaltensor/cli/`, which is imported when it has been chosen. The package is first imported
*without its face*: the public names, and torch with them, come when one is asked for. So a command that needs no torch
does not wait for it.
"""
from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any

# why output cannot be written: a full disk, a quota, a limit on files, a failing device, a reader that has ended
_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


class Faceless(ModuleType):
    """The package of which only rooms were imported. The first public name that is asked for imports the rest."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        object.__setattr__(self, "__class__", ModuleType)        # as importlib's own lazy modules do
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def import_without_face() -> None:
    """Let rooms of the package be imported before the package itself."""
    if "globaltensor" not in sys.modules:
        spec = importlib.util.find_spec("globaltensor")
        assert spec is not None                      # the two are installed together
        module = importlib.util.module_from_spec(spec)
        module.__class__ = Faceless
        sys.modules["globaltensor"] = module


def import_face() -> None:
    """Import the rest, which what computes needs: a world that starts when it is asked for, and what torch learns."""
    _ = importlib.import_module("globaltensor").__version__


def mend_what_is_inherited() -> None:
    """Undo what a service may start its programs with, for this process and those that it starts: exit codes are lost
    where SIGCHLD is ignored, and where a standard stream is closed the next file that is opened takes its place."""
    if hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while (lowest := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(lowest, True)
    os.close(lowest)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")


def say_ended_by_ctrl_c() -> None:
    """Let Ctrl-C end in a line: for `python -m globaltensor`, which imports the package, and torch, before `main`."""
    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("globaltensor: ended by SIGINT", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, at)

    sys.excepthook = hook


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line `args` (default: the process's own); the exit code."""
    mend_what_is_inherited()
    try:
        try:
            return _run_command(sys.argv[1:] if args is None else args)
        finally:
            sys.stdout.flush()                       # what cannot be written is seen here, not once Python ends
    except KeyboardInterrupt:
        print("globaltensor: ended by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_OUTPUT:
            raise
        _drop_output()
        if error.errno != errno.EPIPE:               # `globaltensor info | head`
            print(f"globaltensor: the output could not be written: {error.strerror}", file=sys.stderr)
        return 1


def _run_command(arguments: Sequence[str]) -> int:
    import_without_face()
    of_cli = importlib.import_module("globaltensor.cli.parser")
    if not arguments:                                # as git does: the commands, not an error about a missing one
        of_cli.parser("").print_help()
        return 0
    chosen = of_cli.parser(arguments[0]).parse_args(arguments)
    problem = importlib.import_module("globaltensor.cli.problem").Problem
    try:
        command = importlib.import_module(f"globaltensor.cli.{chosen.command}").command
        if "globaltensor.tensors" in sys.modules:
            import_face()
        code: int = command(chosen)
        return code
    except problem as error:
        lacks = error.code == 2 and not any(hint in str(error) for hint in ("try: ", "did you mean"))
        fix = f"\n  try: globaltensor {chosen.command} --help" if lacks else ""
        print(f"globaltensor: {error}{fix}", file=sys.stderr)
        failed: int = error.code
        return failed


def _drop_output() -> None:
    """Let Python not try again, when it ends, to write what could not be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
