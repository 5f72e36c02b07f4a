"""Errors that end a thread of the program, and not its rank.

Python shows such an error and goes on. The other ranks, which wait for what the thread was to do, are told of it where
the rank ends, which it does without an error of its own.
"""
from __future__ import annotations

import threading

from globaltensor.errors import in_short, message_of, raised_at

_first = ""


def watch_threads() -> None:
    """From now on, remember the first of them."""
    hook = threading.excepthook

    def thread_leaving(args: threading.ExceptHookArgs) -> None:
        global _first
        error = args.exc_value
        if error is not None and not _first and not isinstance(error, SystemExit):
            line = (f"{type(error).__name__}: {message_of(error)}".splitlines() or [""])[0].removesuffix(": ")
            name = "" if args.thread is None else f" {args.thread.name}"
            _first = f"its thread{name} raised {in_short(line)}   at {raised_at(error)}"
        hook(args)

    threading.excepthook = thread_leaving


def error_of_thread() -> str:
    """The first of them, in a line; "" where there is none."""
    return _first
