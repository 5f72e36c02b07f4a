"""What a rank does when it ends. Never in a process that it has forked, which has none of its threads, and shares its
connections and its memory with it.

    the program's last line, or its error
    `before_threads`     Python waits for the threads that the program has started, which may take for ever
    `at_end`             what tidies up
"""
from __future__ import annotations

import atexit
import importlib
import os
import threading
from collections.abc import Callable
from typing import Any

REQUEUE = 99                                         # the exit code of a job that is to be started again


def at_end(function: Callable[..., Any], *args: Any) -> None:
    """Call it when this process ends; what is registered last is called first."""
    atexit.register(_call_in, os.getpid(), function, args)


def before_threads(function: Callable[..., Any], *args: Any) -> None:
    """Call it when the main thread is over, before its threads are waited for; what is registered last is called
    first. Not where that is so already."""
    importlib.import_module("concurrent.futures.thread")     # registers its own wait, for the threads of pools
    try:
        threading._register_atexit(_call_in, os.getpid(), function, args)  # type: ignore[attr-defined]
    except RuntimeError:                             # the main thread is over: another one goes on
        at_end(function, *args)


def is_good_exit(error: BaseException) -> bool:
    """Is that sys.exit() of a program that has done what it should?"""
    if not isinstance(error, SystemExit):
        return False
    code = error.code                                # any object, which may be a tensor: Python prints it, and fails
    return code is None or isinstance(code, int) and code in (0, REQUEUE)


def _call_in(process: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if os.getpid() == process:
        function(*args)
