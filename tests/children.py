"""Cases run in children forked from a warm process: a case that dies or hangs fails alone, and the run goes on.

A child runs one case after another and says what came of each; where one ends it, the next child goes on behind that.
"""
from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any


def outcomes(names: Iterable[str], run: Callable[[str], Any], timeout: int = 60) -> dict[str, Any]:
    """name -> what `run(name)` gave (as JSON holds it), or "died of SIGSEGV", or "hung for 60 s"."""
    waiting, said = list(names), {}
    while waiting:
        told, died = _child(waiting, run, timeout)
        said.update(zip(waiting, [*told, *died]))
        waiting = waiting[len(told) + len(died):]
    return said


def _child(names: list[str], run: Callable[[str], Any], timeout: int) -> tuple[list[Any], list[str]]:
    """What came of the cases that a child ran to their end, and of the one that ended it, if one did."""
    end, start = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            with open(start, "w") as pipe:
                for name in names:
                    signal.alarm(timeout)            # ends the process, wherever it hangs
                    print(json.dumps(run(name)), file=pipe, flush=True)
        finally:
            os._exit(1)                              # nothing of the parent's is ended twice
    os.close(start)
    with open(end) as pipe:
        told = [json.loads(line) for line in pipe]
    status = os.waitpid(child, 0)[1]
    if len(told) == len(names):
        return told, []
    by = signal.Signals(status & 0x7F) if status & 0x7F else None
    return told, [f"hung for {timeout} s" if by == signal.SIGALRM else f"died of {by.name if by else 'an exception'}"]
