"""Being told to end: `gt.preempted()`, which turns true on all ranks at the same step.

A scheduler that wants its machines back sends SIGTERM, or SIGUSR1 some time before. It may reach one rank earlier than
another, or one rank only. So ranks ask each other, but not at every step: how many steps there are between two
questions they decide together, by the time of the last ones, so that they ask about once a second.
"""
from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from globaltensor.runtime.agreement import gather_objects
from globaltensor.runtime.process_end import REQUEUE as REQUEUE
from globaltensor.tracebacks import api_boundary

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))  # Windows: one
_EVERY = 1.0                                         # seconds between two questions
_MOST = 1000                                         # steps between them


class Preemption:
    """What this rank has heard, and when it asks the others."""

    def __init__(self) -> None:
        self.heard = self.answer = self.listening = False
        self.steps = 1                               # between two questions
        self.left = 0                                # until the next one
        self.asked = time.monotonic()

    def listen(self) -> None:
        """The signals are noted from now on, and do not end the process; handlers that the program had run too."""
        self.listening = True
        for number in SIGNALS:
            signal.signal(number, self.noting(signal.getsignal(number)))

    def noting(self, before: Any) -> Any:
        def note(number: int, frame: FrameType | None) -> None:
            self.heard = True
            if callable(before):
                before(number, frame)
        return note

    def ask(self) -> None:
        """Ask all ranks, and plan the next question. All ranks plan alike, by the time of rank 0."""
        time_now = time.monotonic()
        replies = gather_objects((self.heard, time_now - self.asked), "asking whether the job is to end")
        self.answer, self.asked = any(heard for heard, _ in replies), time_now
        # steps may have been slow at first: what is planned grows slowly, and shrinks at once
        fitting = int(self.steps * _EVERY / max(replies[0][1], 1e-6))
        self.left = self.steps = max(1, min(fitting, 2 * self.steps, _MOST))


_preemption = Preemption()


@api_boundary
def preempted() -> bool:
    """Has this job been told to end, by SIGTERM or SIGUSR1 to any of its processes? Collective: every rank calls it
    once a step, and it turns true on all of them at the same call. Then save, and `sys.exit(gt.REQUEUE)`.

    From the first call on, which the main thread makes, these signals do not end the process.
    """
    own = _preemption
    if not own.listening:
        own.listen()
    own.left -= 1
    if own.left <= 0 and not own.answer:
        own.ask()
    return own.answer
