"""A bar for work that takes long: on a terminal, where rich is installed, in one process of a job.

    with progress("saving", nbytes, "bytes") as advance:
        for piece in pieces:
            write(piece)
            advance(piece.nbytes)

It goes to stderr, appears after a second, and leaves nothing behind. Elsewhere `advance` does nothing, at once.
"""
from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

_AFTER = 1.0                                         # seconds: what is over sooner shows no bar
_EVERY = 0.1                                         # seconds between two pictures of it


@contextmanager
def progress(what: str, total: float | None, unit: str = "") -> Iterator[Callable[[float], None]]:
    """A function that is told how much more has been done, in `unit`: "bytes", or a noun to count.

    `total` is None where the end is not known. What is drawn is drawn by the calls; there is no thread.
    """
    if not is_shown():
        yield lambda more: None
        return
    bar = _Bar(what, total, unit)
    try:
        yield bar.advance
    finally:
        bar.close()


def is_shown() -> bool:
    """Does this process show bars?"""
    shows = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return shows and os.environ.get("RANK", "0") == "0" and _has_rich()


@functools.cache
def _has_rich() -> bool:
    return find_spec("rich") is not None


class _Bar:
    """One that appears when it is worth it."""

    def __init__(self, what: str, total: float | None, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.begun, self.drawn, self.completed = time.monotonic(), 0.0, 0.0
        self.shown: Any = None
        self.task: Any = None

    def advance(self, more: float) -> None:
        self.completed += more
        now = time.monotonic()
        if now - self.begun < _AFTER or now - self.drawn < _EVERY:
            return
        self.drawn = now
        if self.shown is None:
            self._appear()
        self.shown.update(self.task, completed=self.completed)
        self.shown.refresh()

    def _appear(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        count = DownloadColumn() if self.unit == "bytes" else MofNCompleteColumn()
        self.shown = Progress(TextColumn("{task.description}"), BarColumn(bar_width=None), count,
                              TextColumn("" if self.unit == "bytes" else self.unit), TimeRemainingColumn(),
                              console=Console(stderr=True), transient=True, auto_refresh=False)
        self.task = self.shown.add_task(self.what, total=self.total)
        self.shown.start()

    def close(self) -> None:
        if self.shown is not None:
            self.shown.stop()
