"""Ranks that wait for each other in vain, found out within seconds.

Where ranks run different programs (`if gt.rank() == 0: print(x.item())`), one waits for bytes that nobody sends. Each
process notes what its main thread waits for; a thread of its own looks every `PERIOD` seconds. A wait that lasts is
told to the others through the launcher's key-value store, and once all of them wait, what they say decides:

    rank 0   waits for ranks 1, 2 with tag 7        an exchange is *met* where all its peers wait in it too,
    rank 1   waits for ranks 0, 2 with tag 7        with the same tag
    rank 2   waits for rank 3     with tag 9
    rank 3   waits for ranks 0, 1, 2 with tag 5     none is met: nothing can ever move again

A transfer that is merely slow is met, and a rank that computes says nothing, so neither is taken for a deadlock. The
waiting itself is inside torch and cannot be called off: the process shows the DisagreementError and ends.
"""
from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from globaltensor.errors import DisagreementError, where

PERIOD = 2.0


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
    global _waits, _now
    _waits += 1
    _now = Wait(_waits, what, peers, tag), threading.get_ident()
    try:
        yield
    finally:
        _now = None
        if _watch is not None and _watch.told is not None:
            _watch.take_back()


def deadlocked(said: Mapping[int, Wait | None]) -> bool:
    """Can none of these ranks ever go on? `said` has an entry per rank of the world, None where it does not wait."""
    return all(said.values()) and not any(
        all(said[peer].tag == wait.tag and rank in said[peer].peers for peer in wait.peers)
        for rank, wait in said.items())


def watch(store: Any, rank: int, size: int) -> None:
    """Start looking out for deadlocks, in a thread that ends with the process."""
    global _watch
    _watch = Watch(store, rank, size)
    threading.Thread(target=_watch.run, daemon=True, name="globaltensor deadlock").start()


class Watch:
    """The thread that looks. `told` is what the others have been told that this rank waits for."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.told: Wait | None = None
        self.lock = threading.Lock()
        self.blamed = 0                              # the rank that did not wait when last looked

    def run(self) -> None:
        seen, before = 0, None
        try:
            while True:
                time.sleep(PERIOD)
                now = _now
                if now is None or now[0].serial != seen:
                    seen, before = now[0].serial if now else 0, None
                elif self.tell(now):
                    said = self.others()
                    if said is not None and (said == before and deadlocked(said) or self.store.check([_FOUND])):
                        self.give_up(said)
                    before = said
        except RuntimeError:                         # the store is gone, and with it whoever could be waited for
            return

    def tell(self, now: tuple[Wait, int]) -> bool:
        """Tell the others, once; False where the wait is over meanwhile."""
        wait, thread = now
        with self.lock:
            if self.told is None and _now is now:
                self.told = wait._replace(where=where(sys._current_frames().get(thread)))
                self.store.set(_key(self.rank), json.dumps(self.told))
        if _now is not now:
            self.take_back()
            return False
        return True

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
        for rank in sorted(range(self.size), key=lambda r: r != self.blamed):
            found = json.loads(self.store.get(_key(rank))) if self.store.check([_key(rank)]) else None
            if found is None:
                self.blamed = rank
                return None
            said[rank] = Wait(found[0], found[1], tuple(found[2]), *found[3:])
        return said

    def give_up(self, said: dict[int, Wait]) -> None:
        """Show the error as an uncaught one is shown, leave the others the time to see it too, end the process."""
        self.store.set(_FOUND, "")
        found = error(said, said[self.rank].where)
        sys.excepthook(type(found), found, None)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(1.5 * PERIOD)
        os._exit(1)


_FOUND = "globaltensor deadlock"


def _key(rank: int) -> str:
    return f"globaltensor wait {rank}"


def error(said: Mapping[int, Wait], at: str) -> DisagreementError:
    """What all ranks wait for, side by side."""
    rows = "".join(f"\n    rank {rank} waits for {_names(wait.peers)} in {wait.what}   at {wait.where}"
                   for rank, wait in sorted(said.items()))
    return DisagreementError("the ranks wait for each other in vain" + rows, "every rank runs the same program",
                             "no global op under a condition that differs between ranks, such as gt.rank() == 0", at)


def _names(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
