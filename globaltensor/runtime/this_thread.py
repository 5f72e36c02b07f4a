"""What tells the threads of a program apart."""
from __future__ import annotations

from threading import current_thread, local


class _ThisThread(local):
    """`token` is an object of this thread's own, as another thread may have its number later. Threads that Python did
    not start have None: those of autograd work for all others."""

    def __init__(self) -> None:
        self.token = None if type(current_thread()).__name__ == "_DummyThread" else object()


this_thread = _ThisThread()
