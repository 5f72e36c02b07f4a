"""Deadlocks between ranks, found within seconds and reported as an error.

Where ranks run different programs (`if gt.rank() == 0: print(x.item())`), one waits for bytes that nobody sends. Each
process notes what its main thread waits for; a thread of its own looks every `PERIOD` seconds. It publishes a wait that
lasts in the launcher's key-value store, and once all ranks have published one, the waits together decide:

    rank 0   waits for ranks 1, 2 with tag 7        an exchange is *met* where all its peers wait in it too,
    rank 1   waits for ranks 0, 2 with tag 7        with the same tag
    rank 2   waits for rank 3     with tag 9
    rank 3   waits for ranks 0, 1, 2 with tag 5     none is met: nothing can ever move again

A transfer that is merely slow is met, and a rank that computes publishes nothing, so neither is taken for a deadlock.
The wait itself happens inside torch and cannot be interrupted. So the last rank shows the DisagreementError and ends,
which closes its connections: the others' waits fail, and they raise the same error at their own lines.
"""
from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from globaltensor.errors import DisagreementError, TransportError, where
from globaltensor.runtime.codec import decode_message, encode_message

PERIOD = 1.0


class Wait(NamedTuple):
    """What one rank waits for. `serial` counts its waits, so that a new one is told from an old one."""

    serial: int
    what: str
    peers: tuple[int, ...]
    tag: int
    where: str = ""


_serial = 0
_current: tuple[Wait, int] | None = None             # the wait in progress and its thread
_watch: Watch | None = None


@contextmanager
def waiting(what: str, peers: tuple[int, ...], tag: int) -> Iterator[None]:
    """Note that this rank waits for `peers`, who must do the same with the same `tag`."""
    enter(what, peers, tag)
    try:
        yield
    finally:
        leave()


def enter(what: str, peers: Sequence[int], tag: int) -> None:
    """The wait begins."""
    global _serial, _current
    _serial += 1
    _current = Wait(_serial, what, tuple(peers), tag), threading.get_ident()


def leave() -> None:
    """The wait is over."""
    global _current
    _current = None
    if _watch is not None and _watch.published is not None:
        _watch.withdraw()


def raise_if_deadlocked() -> None:
    """Raise where this wait is part of a deadlock: called from waits that can be interrupted."""
    if _watch is not None and _watch.rows and (error := detected()) is not None:
        raise error


def deadlocked(waits: Mapping[int, Wait | None]) -> bool:
    """Can none of these ranks ever go on? `waits` has an entry per rank of the world, None where it does not wait."""
    return all(waits.values()) and not any(
        all(other is not None and other.tag == wait.tag and rank in other.peers
            for other in map(waits.__getitem__, wait.peers))
        for rank, wait in waits.items() if wait is not None)


def watch(store: Any, rank: int, size: int) -> None:
    """Start looking out for deadlocks, in a thread that ends with the process."""
    global _watch
    _watch = Watch(store, rank, size)
    thread = threading.Thread(target=_watch.run, daemon=True, name="globaltensor deadlock")
    thread.start()
    atexit.register(_watch.end, thread)


def detected() -> DisagreementError | None:
    """The deadlock that this rank was freed from, if a wait failed because of one."""
    return _watch.verdict() if _watch is not None else None


class Watch:
    """The thread that looks for deadlocks. `published` is what the others can read that this rank waits for."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.published: Wait | None = None
        self.lock = threading.Lock()
        self.busy = 0                                # a rank that did not wait when last looked
        self.rows = ""                               # the deadlock, once this rank has seen it
        self.ended = threading.Event()

    def end(self, thread: threading.Thread) -> None:
        """Stop the thread while the interpreter is alive: one that returns to it from C++ later aborts the process."""
        self.ended.set()
        thread.join(5)                               # a store that does not answer is not waited for

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                self.look()
        except RuntimeError:                         # the store is gone, and with it the rank that kept it
            return

    def look(self) -> None:
        """Follow one wait until it is over, or part of a deadlock."""
        self.ended.wait(PERIOD)
        current = _current
        self.ended.wait(PERIOD)
        if current is None or self.ended.is_set() or not self.publish(current):
            return
        # Ranks are read one after the other, while they may go on: only what is read twice alike was true at one time.
        before = None
        while _current is current:
            waits = self.waits()
            if waits is not None and waits == before and deadlocked(waits):
                self.end_process(current, waits)
            before = waits
            if self.ended.wait(PERIOD):
                return

    def publish(self, current: tuple[Wait, int]) -> bool:
        """Let the others know of this wait, once; False where it is over meanwhile."""
        wait, thread = current
        with self.lock:
            if _current is current:
                self.published = wait._replace(where=where(sys._current_frames().get(thread)))
                self.store.set(_store_key(self.rank), encode_message(tuple(self.published), self.rank))
        if _current is not current:
            self.withdraw()
        return _current is current

    def withdraw(self) -> None:
        """This rank goes on. Called by the thread that waited, so that nobody is misled by what was published."""
        with self.lock:
            if self.published is not None:
                self.published = None
                with suppress(RuntimeError):
                    self.store.set(_store_key(self.rank), encode_message(None, self.rank))

    def read(self, key: str, sender: int | str) -> Any:
        """What was published there; None where nothing was, or not by a rank of this job."""
        if not self.store.check([key]):
            return None
        try:
            return decode_message(self.store.get(key), sender)
        except TransportError:
            return None

    def waits(self) -> dict[int, Wait] | None:
        """What all ranks wait for, or None where one does not wait: that one is asked first next time."""
        waits = {}
        for rank in sorted(range(self.size), key=lambda r: r != self.busy):
            wait = self.read(_store_key(rank), rank)
            if wait is None:
                self.busy = rank
                return None
            waits[rank] = Wait(*wait)
        return waits

    def end_process(self, current: tuple[Wait, int], waits: dict[int, Wait]) -> None:
        """End this process if it is the last rank, or if the end of that one does not free it."""
        self.rows = _rows(waits)
        self.store.set(_DEADLOCK, encode_message(self.rows, _DEADLOCK))
        freed_by = time.monotonic() + (0 if self.rank == self.size - 1 else 5 * PERIOD)
        while _current is current and time.monotonic() < freed_by:
            time.sleep(PERIOD / 10)
        if _current is current:
            error = _error(self.rows, waits[self.rank].where)
            sys.excepthook(type(error), error, None)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)                              # the main thread is inside torch: no exception reaches it

    def verdict(self) -> DisagreementError | None:
        with suppress(RuntimeError):
            self.rows = self.rows or self.read(_DEADLOCK, _DEADLOCK) or ""
        if self.rows and self.rank == 0:
            time.sleep(3 * PERIOD)                   # its process may hold the store, which the others still ask
        return _error(self.rows, "") if self.rows else None


_DEADLOCK = "globaltensor deadlock"


def _store_key(rank: int) -> str:
    return f"globaltensor wait {rank}"


def _rows(waits: Mapping[int, Wait]) -> str:
    return "".join(f"\n    rank {rank} waits for {rank_names(wait.peers)} in {wait.what}   at {wait.where}"
                   for rank, wait in sorted(waits.items()))


def _error(rows: str, at: str) -> DisagreementError:
    return DisagreementError("deadlock: every rank waits for another" + rows, "every rank runs the same program",
                             "no global op under a condition that differs between ranks, such as gt.rank() == 0", at)


def rank_names(ranks: Sequence[int]) -> str:
    """rank 1, or ranks 1, 2."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
