"""Where another process of this host is in its Python program: its stack, written by the process itself when it is
asked.

A process that is `armed` writes the stack of its main thread into a file in memory whenever it gets a certain signal,
from inside the signal handler: also while an endless loop or a C call keeps the interpreter's lock. Who asks reads the
file by way of /proc, so that nothing lies on a disk. Free of imports of ours and of torch's: `globaltensor run` arms
its ranks before their program begins.
"""
from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

_NAME = "globaltensor-stack"
_HEAD = "(most recent call first):"                  # as Python writes it
_PATIENCE = 6.0                                      # seconds that a process may take, unless it is stopped


def _signal() -> int:
    return signal.SIGRTMIN + 9                       # of real time: few programs use them


def arm_stacks() -> None:
    """From now on this process can be asked, where the system has what it takes."""
    if not hasattr(os, "memfd_create") or _file_of(os.getpid()) is not None:
        return
    faulthandler.register(_signal(), os.memfd_create(_NAME), all_threads=False)


def stack_of(pid: int) -> str:
    """The stack of the main thread of a process, innermost call first, a line each; "" where it is not armed, is
    stopped, or is not a process of this user."""
    with suppress(OSError):
        file = _file_of(pid)
        if file is None or not _answers(pid):
            return ""
        before = file.stat().st_size
        # Its main thread. Where others ask, too, the kernel gives what is for the process to any thread, and one of
        # torch's threads has no stack to tell.
        # Asked twice: a stack has no end mark, but the next one begins only when it is written.
        for _ in range(2):
            if ctypes.CDLL(None).tgkill(pid, pid, _signal()):
                return ""                            # it has ended meanwhile
        limit, parts = time.monotonic() + _PATIENCE, [""]
        while len(parts) < 3 and time.monotonic() < limit:
            time.sleep(0.02)
            with open(file, "rb") as text:
                text.seek(before)
                parts = text.read().decode(errors="replace").split(_HEAD)
        # of the program: not of what `globaltensor run` starts it by
        return "\n".join(re.findall(r'(?m)^  File (?!".*globaltensor/cli/worker\.py").+$', "".join(parts[1:2])))
    return ""


def _file_of(pid: int) -> Path | None:
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):                  # closed meanwhile
                if os.readlink(entry).startswith(f"/memfd:{_NAME}"):
                    return entry
    return None


def _answers(pid: int) -> bool:
    """Not if it is stopped. And the signal would end a program that this one became by exec: that may have the file,
    but has no handler."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"(?m)^SigCgt:\s*([0-9a-f]+)", status)
    stopped = re.search(r"(?m)^State:\s*[Tt]", status)
    return caught is not None and stopped is None and bool(int(caught[1], 16) >> _signal() - 1 & 1)
