"""Ranks that wait for each other in vain, found out within seconds.

Where ranks run different programs (`if gt.rank() == 0: print(x.item())`), one waits for bytes that nobody sends. Each
process notes what its main thread waits for; a thread of its own looks every `PERIOD` seconds. A wait that lasts is
told to the others through the launcher's key-value store, and once all of them wait, what they say decides:

    rank 0   waits for ranks 1, 2 with tag 7        an exchange is *met* where all its peers wait in it too,
    rank 1   waits for ranks 0, 2 with tag 7        with the same tag
    rank 2   waits for rank 3     with tag 9
    rank 3   waits for ranks 0, 1, 2 with tag 5     none is met: nothing can ever move again

A transfer that is merely slow is met, and a rank that computes says nothing, so neither is taken for a deadlock. The
waiting itself is inside torch and cannot be called off. So the last rank shows the DisagreementError and ends, which
closes its connections: the others' waits fail, and they raise the same error where they stand.
"""
from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from globaltensor.errors import DisagreementError, where

PERIOD = 1.0


class Wait(NamedTuple):
    """What one rank waits for. `serial` counts its waits, so that a new one is told from an old one."""

    serial: int
    what: str
    peers: tuple[int, ...]
    tag: int
    where: str = ""


_waits = 0
_now: tuple[Wait, int] | None = None                 # the wait in progress and its thread
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
    global _waits, _now
    _waits += 1
    _now = Wait(_waits, what, tuple(peers), tag), threading.get_ident()


def leave() -> None:
    """The wait is over."""
    global _now
    _now = None
    if _watch is not None and _watch.told is not None:
        _watch.take_back()


def raise_if_deadlocked() -> None:
    """Raise where this wait was found to be in vain: for waits that can be called off."""
    if _watch is not None and _watch.rows:
        raise detected()


def deadlocked(said: Mapping[int, Wait | None]) -> bool:
    """Can none of these ranks ever go on? `said` has an entry per rank of the world, None where it does not wait."""
    return all(said.values()) and not any(
        all(said[peer].tag == wait.tag and rank in said[peer].peers for peer in wait.peers)
        for rank, wait in said.items())


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
    """The thread that looks. `told` is what the others have been told that this rank waits for."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.told: Wait | None = None
        self.lock = threading.Lock()
        self.busy = 0                                # a rank that did not wait when last looked
        self.rows = ""                               # the deadlock, once this rank has seen it
        self.ended = threading.Event()

    def end(self, thread: threading.Thread) -> None:
        """Before the interpreter goes: a thread that comes back from C++ into one that has gone ends the process."""
        self.ended.set()
        thread.join(5)                               # a store that does not answer is not waited for

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                self.look()
        except RuntimeError:                         # the store is gone, and with it whoever could be waited for
            return

    def look(self) -> None:
        """Follow one wait until it is over, or found to be in vain."""
        self.ended.wait(PERIOD)
        now = _now
        self.ended.wait(PERIOD)
        if now is None or self.ended.is_set() or not self.tell(now):
            return
        before = None
        while _now is now:
            said = self.others()
            if said is not None and said == before and deadlocked(said):
                self.give_up(now, said)
            before = said
            if self.ended.wait(PERIOD):
                return

    def tell(self, now: tuple[Wait, int]) -> bool:
        """Tell the others, once; False where the wait is over meanwhile."""
        wait, thread = now
        with self.lock:
            if _now is now:
                self.told = wait._replace(where=where(sys._current_frames().get(thread)))
                self.store.set(_key(self.rank), json.dumps(self.told))
        if _now is not now:
            self.take_back()
        return _now is now

    def take_back(self) -> None:
        """This rank goes on. Called by the thread that waited, so that nobody is misled by what it said."""
        with self.lock:
            if self.told is not None:
                self.told = None
                with suppress(RuntimeError):
                    self.store.set(_key(self.rank), "null")

    def others(self) -> dict[int, Wait] | None:
        """What all ranks wait for, or None where one does not wait: that one is asked first next time."""
        said = {}
        for rank in sorted(range(self.size), key=lambda r: r != self.busy):
            wait = json.loads(self.store.get(_key(rank))) if self.store.check([_key(rank)]) else None
            if wait is None:
                self.busy = rank
                return None
            said[rank] = Wait(wait[0], wait[1], tuple(wait[2]), *wait[3:])
        return said

    def give_up(self, now: tuple[Wait, int], said: dict[int, Wait]) -> None:
        """End the process, if it is the last rank's or is not freed by that one's end."""
        self.rows = _rows(said)
        self.store.set(_FOUND, self.rows)
        freed_by = time.monotonic() + (0 if self.rank == self.size - 1 else 5 * PERIOD)
        while _now is now and time.monotonic() < freed_by:
            time.sleep(PERIOD / 10)
        if _now is now:
            error = _error(self.rows, said[self.rank].where)
            sys.excepthook(type(error), error, None)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def verdict(self) -> DisagreementError | None:
        with suppress(RuntimeError):
            if not self.rows and self.store.check([_FOUND]):
                self.rows = self.store.get(_FOUND).decode()
        if self.rows and self.rank == 0:
            time.sleep(3 * PERIOD)                   # its process may hold the store, which the others still ask
        return _error(self.rows, "") if self.rows else None


_FOUND = "globaltensor deadlock"


def _key(rank: int) -> str:
    return f"globaltensor wait {rank}"


def _rows(said: Mapping[int, Wait]) -> str:
    return "".join(f"\n    rank {rank} waits for {rank_names(wait.peers)} in {wait.what}   at {wait.where}"
                   for rank, wait in sorted(said.items()))


def _error(rows: str, at: str) -> DisagreementError:
    return DisagreementError("the ranks wait for each other in vain" + rows, "every rank runs the same program",
                             "no global op under a condition that differs between ranks, such as gt.rank() == 0", at)


def rank_names(ranks: Sequence[int]) -> str:
    """rank 1, or ranks 1, 2."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
