"""One rank of `globaltensor run`: runs the program as Python would, and fails in fewer words.

All ranks run one program, so most mistakes happen in each of them. The rank that fails first on its host shows the
traceback; the others leave a note for the launcher. Run as a script, and free of imports beyond the standard library:
the program must be the first to import torch, so that the environment variables it sets count.
"""
from __future__ import annotations

import builtins
import ctypes
import faulthandler
import io
import json
import os
import pkgutil
import runpy
import signal
import sys
import time
import traceback
from contextlib import suppress
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TextIO

FOLDER = "GLOBALTENSOR_RUN_FOLDER"                   # names a folder that the launcher and its ranks share
_LONGEST = 500                                       # letters of a line for the launcher
_MOMENT = 1.0                                        # seconds


def main(argv: list[str]) -> None:
    """Run `program arguments...` or `-m module arguments...`."""
    last = LastWords(Path(os.environ[FOLDER]), int(os.environ["RANK"]))
    end_with_launcher()
    faulthandler.enable()                            # a segmentation fault shows the line of the program
    # by its path: to import it would import torch
    runpy.run_path(str(Path(__file__).parents[1] / "runtime" / "stacks.py"))["arm_stacks"]()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):     # whole lines: ranks' lines do not mix
            stream.reconfigure(line_buffering=True, write_through=False)
    sys.excepthook = last.show_failure
    module = argv[0] == "-m"
    sys.argv = argv[1:] if module else argv
    if not sys.flags.safe_path:                      # else nothing of this file stands before PYTHONPATH
        sys.path[0] = os.getcwd() if module else str(Path(argv[0]).resolve().parent)
    try:
        _run_program(sys.argv[0], module)
        last.note(_error_of_a_thread(), 0)
    except SystemExit as ended:
        last.tell_others(ended)
        if ended.code is None or isinstance(ended.code, int):
            last.note(f"exit code {ended.code}" if ended.code else _error_of_a_thread(), (ended.code or 0) & 0xFF)
            raise
        last.say(str(ended.code), f"{ended.code}\n")     # sys.exit("why")
        raise SystemExit(1) from None
    except Exception as error:
        last.show_by_hook(error)
        raise SystemExit(1) from None
    except KeyboardInterrupt as error:
        last.note_interrupt(error)
        raise SystemExit(128 + signal.SIGINT) from None


def _run_program(name: str, module: bool) -> None:
    """As Python itself does, in a module that lives until the interpreter ends. What runpy.run_path runs is garbage by
    then, and a file in it that was left open may be closed before the text that waits is written."""
    sys.modules["__main__"] = program = ModuleType("__main__")
    vars(program).update(__annotations__={}, __builtins__=builtins)
    run_module = runpy._run_module_as_main  # type: ignore[attr-defined]  # what `python -m` calls
    if module:
        run_module(name)
    elif pkgutil.get_importer(name) is not None:     # a folder or an archive
        sys.path[:0 if sys.flags.safe_path else 1] = [os.path.join(os.getcwd(), name)]
        run_module("__main__", False)
    else:
        name = os.path.join(os.getcwd(), name)       # programs look for what lies beside them, in any folder
        with io.open_code(name) as file:
            code = pkgutil.read_code(file)           # of a .pyc; else None
        loader = SourcelessFileLoader if code else SourceFileLoader
        vars(program).update(__file__=name, __cached__=None, __loader__=loader("__main__", name))
        if code is None:
            with io.open_code(name) as file:         # else what is imported `from __future__` here would count there
                code = compile(file.read(), name, "exec", dont_inherit=True)
        exec(code, vars(program))


class LastWords:
    """What a rank says when it ends. By then its program may have changed the environment, closed the streams, or run
    for longer than what lies in a folder for temporary files is kept: none of that makes a job fail, or hides why."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank        # shared with the launcher and the other ranks of this host
        self.process = os.getpid()                   # what it forks runs in here too, and is no rank
        self.errors: TextIO | None = None            # sys.stderr, while a hook may have put another in its place

    def show_by_hook(self, error: Exception) -> None:
        """As Python would: by sys.excepthook, ours, or what the program has set in its place, which may call ours."""
        kind, at = type(error), _from_program(error.__traceback__)
        self.note(_line_of(error), follows=_follows(error))
        self.tell_others(error)
        self.errors = sys.stderr                     # torch has wrapped ours by now, to write the rank before each line
        try:
            sys.excepthook(kind, error, at)
        except SystemExit as ended:
            self.note(_line_of(error), ended.code if isinstance(ended.code, int) else 1)
            raise
        except Exception as of_hook:                 # it is None, or has a mistake of its own
            of_hook.__traceback__ = _from_program(of_hook.__traceback__)
            shown = "".join(traceback.format_exception(of_hook, chain=False))
            self.show_failure(kind, error, at, f"Error in sys.excepthook:\n{shown}\nOriginal exception was:\n")

    def show_failure(self, kind: type[BaseException], error: BaseException, at: TracebackType | None,
                     before: str = "") -> None:
        """In place of Python's own sys.excepthook: the traceback from the program's first line on, once per host."""
        self.tell_others(error)
        text = before + "".join(traceback.format_exception(kind, error, _from_program(at)))
        self.say(_line_of(error), text, _follows(error))

    def note_interrupt(self, error: KeyboardInterrupt) -> None:
        """Ctrl-C, or SIGINT to this rank alone, which the launcher knows. It shows no traceback: all would have one."""
        self.tell_others(error)
        errors = sys.modules.get("globaltensor.errors")
        place = "" if errors is None else f"   at {errors.raised_at(error)}"
        self.note(f"KeyboardInterrupt{place}", 128 + signal.SIGINT)

    def say(self, line: str, text: str, follows: bool = False) -> None:
        """Leave `line` for the launcher, and show `text` unless another rank of this host was first. One that follows
        from another rank's error lets that one be first, for a moment: it may be on another host."""
        self.note(line, follows=follows)
        until = time.monotonic() + (_MOMENT if follows else 0)
        while time.monotonic() < until and not (self.folder / "first").exists():
            time.sleep(0.01)
        try:
            if os.getpid() == self.process:
                os.close(os.open(self.folder / "first", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        except OSError:                              # who was first cannot be known, so each shows its own
            pass
        with suppress(Exception):                    # closed, or of the program's own making
            sys.stdout.flush()
        for stream in filter(None, (self.errors or sys.stderr, sys.__stderr__)):
            who = f"rank {self.rank}:\n" if stream is sys.__stderr__ else ""        # else torch says who
            try:
                stream.write(who + text)
                stream.flush()
                return
            except Exception:                        # closed, too; Python would try again at its end, and exit with 120
                sys.stderr = None

    def note(self, line: str, code: int = 1, follows: bool = False) -> None:
        """How this rank ended: the launcher knows the exit code only, and of a rank that ended well not even when."""
        if os.getpid() != self.process:
            return
        if len(line) > _LONGEST:
            line = f"{line[:_LONGEST]}... ({len(line) - _LONGEST} more characters)"
        new = self.folder / f"{self.rank}.new"       # a rank may be ended at any moment; half a note is none
        with suppress(OSError):                      # the folder is gone, or the disk is full
            new.write_text(json.dumps({"error": line, "code": code, **({"follows": True} if follows else {})}))
            new.rename(new.with_suffix(".json"))

    def tell_others(self, error: BaseException) -> None:
        """That wait for this rank, at once: threads that it has started may keep its process."""
        if (library := sys.modules.get("globaltensor.runtime.liveness")) is not None:
            library.tell_failure(self.rank, error)


def _from_program(at: TracebackType | None) -> TracebackType | None:
    """A traceback from the program's first line on."""
    while at is not None and at.tb_frame.f_code.co_filename in {__file__, runpy.__file__, "<frozen runpy>"}:
        at = at.tb_next
    return at


def _error_of_a_thread() -> str:
    """What the others may have missed, of a rank that ends well."""
    library = sys.modules.get("globaltensor.runtime.thread_errors")
    return "" if library is None else library.error_of_thread()


def _follows(error: BaseException) -> bool:
    """Does it say what another rank has raised? Only errors of this library know."""
    return getattr(error, "follows", None) is True


def _line_of(error: BaseException) -> str:
    """What it is, in a line: a SyntaxError begins with the place, and a message may have many lines."""
    lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    return next(line for line in lines if not line.startswith(" ")).removeprefix("globaltensor.errors.")


def end_with_launcher() -> None:
    """A launcher that is killed cannot end what it started, so Linux does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)   # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main(sys.argv[1:])
