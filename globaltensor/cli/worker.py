"""One rank of `globaltensor run`: runs the program as Python would, and fails in fewer words.

All ranks run one program, so most mistakes happen in each of them. The rank that fails first on its host shows the
traceback; the others leave a note for the launcher. Run as a script, and free of imports beyond the standard library:
the program must be the first to import torch, so that the environment variables it sets count.
"""
from __future__ import annotations

import ctypes
import faulthandler
import io
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType

FOLDER = "GLOBALTENSOR_RUN_FOLDER"                   # names a folder that the launcher and its ranks share


def main(argv: list[str]) -> None:
    """Run `program arguments...` or `-m module arguments...`."""
    end_with_launcher()
    faulthandler.enable()                            # a segmentation fault shows the line of the program
    # by its path: to import it would import torch
    runpy.run_path(str(Path(__file__).parents[1] / "runtime" / "stacks.py"))["arm_stacks"]()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):     # whole lines: ranks' lines do not mix
            stream.reconfigure(line_buffering=True, write_through=False)
    sys.excepthook = show_failure
    module = argv[0] == "-m"
    sys.argv = argv[1:] if module else argv
    sys.path[0] = os.getcwd() if module else str(Path(argv[0]).resolve().parent)
    try:
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
        _note("", 0)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            _note(f"exit code {ended.code}" if ended.code else "", ended.code or 0)
            raise
        _tell(str(ended.code), f"{ended.code}\n")    # sys.exit("why")
        raise SystemExit(1) from None
    except Exception as error:                       # not left to sys.excepthook: torch has wrapped that by now
        show_failure(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def show_failure(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """In place of Python's own sys.excepthook: the traceback from the program's first line on, once per host."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while at is not None and at.tb_frame.f_code.co_filename in ours:
        at = at.tb_next
    line = traceback.format_exception_only(kind, error)[0].splitlines()[0]
    if (library := sys.modules.get("globaltensor.runtime.liveness")) is not None:
        library.tell_failure(int(os.environ["RANK"]), error)
    _tell(line.removeprefix("globaltensor.errors."), "".join(traceback.format_exception(kind, error, at)))


def _tell(line: str, text: str) -> None:
    """Leave `line` for the launcher, and show `text` unless another rank of this host was first."""
    _note(line)
    try:
        os.close(os.open(os.path.join(os.environ[FOLDER], "first"), os.O_CREAT | os.O_EXCL))
    except OSError:
        return
    sys.stdout.flush()
    who = f"rank {os.environ['RANK']}:\n" if sys.stderr is sys.__stderr__ else ""       # else torch says who
    print(who + text, end="", file=sys.stderr, flush=True)


def _note(line: str, code: int = 1) -> None:
    """How this rank ended: the launcher knows the exit code only, and of a rank that ended well not even when."""
    note = Path(os.environ[FOLDER], f"{os.environ['RANK']}.json")
    note.with_suffix(".new").write_text(json.dumps({"error": line, "code": code}))
    note.with_suffix(".new").rename(note)            # a rank may be ended at any moment; half a note is none


def end_with_launcher() -> None:
    """A launcher that is killed cannot end its ranks, so Linux does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)   # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main(sys.argv[1:])
