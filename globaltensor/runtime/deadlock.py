"""The watch over waits: deadlocks, ranks that are lost, and ranks that keep others waiting, reported as an error.

Where ranks run different programs (`if gt.rank() == 0: print(x.item())`), one waits for bytes that nobody sends. Each
process notes what its main thread waits for; a thread of its own looks every `PERIOD` seconds. It publishes a wait that
lasts in the launcher's key-value store, and once all ranks have published one, the waits together decide:

    rank 0   waits for ranks 1, 2 with tag 7        an exchange is *met* where all its peers wait in it too,
    rank 1   waits for ranks 0, 2 with tag 7        with the same tag
    rank 2   waits for rank 3     with tag 9
    rank 3   waits for ranks 0, 1, 2 with tag 5     none is met: nothing can ever move again

A transfer that is merely slow is met, and a rank that computes publishes nothing, so neither is taken for a deadlock.

The same thread asks whether the ranks that are waited for live (liveness.py). Of one that lives and keeps others
waiting for `SHOW_STACK` seconds the stack is shown, once; after the timeout of `gt.init` the wait ends, with that
stack in the error.

A wait inside torch does not raise what another thread knows. Native code ends it, and it raises then; without native
code this process closes its connections for that. Where neither helps, the process shows the error and ends, which
closes its connections too: of a deadlock the last rank, whose end frees the others.
"""
from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from globaltensor.errors import DisagreementError, GlobalTensorError, TransportError, where
from globaltensor.runtime import lineage
from globaltensor.runtime.codec import decode_message, encode_message
from globaltensor.runtime.ended import error_after_end, mark_as_end
from globaltensor.runtime.gloo import close_connections, gloo_error
from globaltensor.runtime.liveness import (
    Loss,
    advice_after,
    end_of,
    ended_after_a_failure,
    ended_ranks,
    feed_heart,
    first_lost,
    known_loss,
    lost_rank,
    stacks_of,
)
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.process_end import at_end
from globaltensor.runtime.world import world

PERIOD = 0.5
SHOW_STACK = 120.0                                   # seconds
DEAF = 10.0                                          # seconds until a wait that does not raise ends with the process


class Wait(NamedTuple):
    """What one rank waits for. `serial` counts its waits, so that a new one is told from an old one."""

    serial: int
    what: str
    peers: tuple[int, ...]
    tag: int
    where: str = ""


class Current:
    """The wait in progress, in the thread that waits."""

    def __init__(self, wait: Wait) -> None:
        self.wait, self.thread, self.began = wait, threading.get_ident(), time.monotonic()
        self.works: Sequence[Any] = ()               # of torch, whose end it waits for

    def place(self) -> str:
        """The program's line."""
        return where(sys._current_frames().get(self.thread))

    def abort(self) -> None:
        """End the wait in torch: it then returns or raises, and what `detected` tells is raised."""
        if torch_ext is None and self.works:
            close_connections(self.wait.peers)
        for work in self.works if torch_ext is not None else ():
            with suppress(RuntimeError):             # a collective: only sends and receives can be ended
                torch_ext.abort_work(work)


_serial = 0
_current: Current | None = None
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
    _current = Current(Wait(_serial, what, tuple(peers), tag))


def waits_for(works: Sequence[Any]) -> None:
    """The wait in progress ends when these works of torch do."""
    if _current is not None:
        _current.works = works


def leave() -> None:
    """The wait is over."""
    global _current
    _current = None
    if _watch is not None and _watch.published is not None:
        _watch.withdraw()


def raise_if_in_vain() -> None:
    """Raise where this wait can never end: called from waits that can be interrupted."""
    if _watch is not None and (_watch.rows or _watch.lost is not None) and (error := detected()) is not None:
        if _current is not None and world().host_peers:      # native code of another rank may ask, if it saw it first
            torch_ext.report(f"{_current.wait.what}   at {where()}")
        raise error_after_end("a wait for other ranks") or mark_as_end(error)


def deadlocked(waits: Mapping[int, Wait | None]) -> bool:
    """Can none of these ranks ever go on? `waits` has an entry per rank of the world, None where it does not wait."""
    return all(waits.values()) and not any(
        all(other is not None and other.tag == wait.tag and rank in other.peers
            for other in map(waits.__getitem__, wait.peers))
        for rank, wait in waits.items() if wait is not None)


def watch(store: Any, rank: int, size: int, timeout: float = math.inf) -> None:
    """Start looking out for waits in vain, in a thread that ends with the process; `timeout` seconds are too long for
    any."""
    global _watch
    _watch = Watch(store, rank, size, timeout)
    thread = threading.Thread(target=_watch.run, daemon=True, name="globaltensor watch")
    thread.start()
    at_end(_watch.end, thread)


def detected() -> GlobalTensorError | None:
    """Why the wait that this rank was freed from could not end, if the watch knows."""
    return _watch.verdict() if _watch is not None else None


def keep_store() -> None:
    """Before an error that may end this process: let the others ask the store, if this process holds it."""
    if _watch is not None:
        _watch.keep_store(PERIOD)


def patience() -> float:
    """After so many seconds, a wait for a rank that lives ends too."""
    return math.inf if _watch is None else _watch.timeout


class Watch:
    """The thread that looks after waits. `published` is what the others can read that this rank waits for."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float = math.inf) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.published: Wait | None = None
        self.lock = threading.Lock()
        self.busy = 0                                # a rank that did not wait when last looked
        self.rows = ""                               # the deadlock, once this rank has seen it
        self.lost: TransportError | None = None      # why the wait ends otherwise
        self.shown: set[int] = set()                 # the waits, by serial, whose culprits' stacks were shown
        self.ended = threading.Event()

    def end(self, thread: threading.Thread) -> None:
        """Stop the thread while the interpreter is alive: one that returns to it from C++ later aborts the process."""
        self.ended.set()
        thread.join(5)                               # a store that does not answer is not waited for

    def run(self) -> None:
        while not self.ended.is_set():
            feed_heart()
            known_loss()                             # remembered: the store may end before this rank asks for it
            self.look()

    def look(self) -> None:
        """Follow one wait until it is over, or cannot end."""
        self.ended.wait(PERIOD)
        current = _current
        self.ended.wait(PERIOD)
        if current is None or self.ended.is_set() or _current is not current:
            return
        # Ranks are read one after the other, while they may go on: only what is read twice alike was true at one time.
        before = None
        while _current is current:
            feed_heart()
            known_loss()
            self.check_peers(current)
            with suppress(RuntimeError):             # the store is gone, and with it the rank that kept it
                if self.published is None and not self.publish(current):
                    return
                waits = self.waits()
                if waits is not None and waits == before and deadlocked(waits):
                    self.end_deadlock(current, waits)
                before = waits
            if self.ended.wait(PERIOD):
                return

    def check_peers(self, current: Current) -> None:
        """End the wait for a rank that is lost, or for too long; show where those are that keep it waiting for long."""
        wait, waited = current.wait, time.monotonic() - current.began
        parted = ended_ranks(wait.peers)             # which have sent all that they had for others
        loss = lost_rank(set(wait.peers) - set(parted)) or ended_after_a_failure(wait.peers)
        fix = "look at its own error, and at what its host says of it"
        # threads may go on where the main threads of all ranks are over
        if loss is None and parted and set(parted) >= set(self.keeping(wait)) \
                and (current.thread == threading.main_thread().ident or lost_rank(parted)):
            loss = end_of(parted[0])
            fix = "this call on every rank, not under `if gt.rank() == 0`"
        if loss is not None:
            loss = first_lost(loss)
            whom = "it" if loss.rank in wait.peers else rank_names(wait.peers)
            self.give_up(current, f"{loss.how}, while rank {self.rank} waited for {whom} in {wait.what}",
                         "no rank can go on without it", advice_after(loss.how, fix))
        elif waited > self.timeout:
            keeping = self.keeping(wait)
            what, why = (f"rank {self.rank} waited {waited:.0f} s for {rank_names(keeping)} in {wait.what}",
                         stacks_of(keeping))
            first = first_lost(Loss(keeping[0], f"{what}; {why}"))   # else of one that gave up before
            self.give_up(current, what, why if first.rank in (keeping[0], self.rank) else first.how,
                         "gt.init(timeout=...) where a rank may take longer")
        elif (error := gloo_error()) and waited > 6 * PERIOD:     # by now it would have been found to be a deadlock
            self.give_up(current, f"rank {self.rank} was sent more than it asked for in {wait.what}", error,
                         "look at the first error of the other ranks; every rank runs the same program")
        elif waited > SHOW_STACK and wait.serial not in self.shown:
            self.shown.add(wait.serial)
            with suppress(RuntimeError):             # the store is gone: nobody knows who has shown it
                if self.store.add(f"globaltensor shown {self.culprits(wait)}", 1) == 1:      # once, whoever waits
                    print(f"globaltensor: rank {self.rank} has waited {waited:.0f} s for {self.culprits(wait)} in "
                          f"{wait.what}   at {current.place()}\n{stacks_of(self.keeping(wait))}",
                          file=sys.stderr, flush=True)

    def keeping(self, wait: Wait) -> list[int]:
        """The ranks that are waited for and do not wait themselves; where all do, of those that they wait for, and so
        on. All that are waited for, where none is found or nobody knows."""
        peers, seen = list(wait.peers), {self.rank}
        with suppress(RuntimeError):
            while peers:
                waits = {peer: self.read(_store_key(peer), peer) for peer in peers}
                if busy := [peer for peer, other in waits.items() if other is None]:
                    return busy
                seen |= waits.keys()
                peers = sorted({peer for other in waits.values() for peer in Wait(*other).peers} - seen)
        return list(wait.peers)

    def culprits(self, wait: Wait) -> str:
        return rank_names(self.keeping(wait))

    def give_up(self, current: Current, what: str, why: str, fix: str) -> None:
        """End the wait with an error, or the process where that does not work."""
        if self.verdict() is None:                   # else a rank is lost because it has seen a deadlock, and ended
            self.lost = TransportError(what, why, fix, at=current.place())
        limit = time.monotonic() + DEAF
        while _current is current and time.monotonic() < limit and not self.ended.is_set():
            current.abort()
            self.ended.wait(PERIOD / 10)
        if _current is current and not self.ended.is_set():
            error = self.verdict()
            assert error is not None
            end_process(error)

    def publish(self, current: Current) -> bool:
        """Let the others know of this wait, once; False where it is over meanwhile."""
        with self.lock:
            if _current is current:
                self.published = current.wait._replace(where=current.place())
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

    def end_deadlock(self, current: Current, waits: dict[int, Wait]) -> None:
        """End this wait, or this process if it is the last rank, or if the end of that one does not free it."""
        self.rows = _rows(waits, self.apart(waits))
        self.store.set(_DEADLOCK, encode_message(self.rows, _DEADLOCK))
        freed_by = time.monotonic() + (PERIOD if self.rank == self.size - 1 else 5 * PERIOD)
        while _current is current and time.monotonic() < freed_by:
            current.abort()
            time.sleep(PERIOD / 10)
        if _current is current:
            end_process(_error(self.rows, waits[self.rank].where))

    def apart(self, waits: Mapping[int, Wait]) -> dict[int, str]:
        """By rank, in what its program differs from the others'. All of them look at the same waits, and so ask."""
        own, until = lineage.difference(self.rank, sorted(waits), PERIOD), time.monotonic() + 2 * PERIOD
        self.store.set(_apart_key(self.rank), encode_message(own, self.rank))
        known = {self.rank: own}
        while len(known) < len(waits) and time.monotonic() < until:
            time.sleep(PERIOD / 50)
            known |= {r: text for r in waits if (text := self.read(_apart_key(r), r)) is not None}
        return known

    def verdict(self) -> GlobalTensorError | None:
        if self.lost is not None:
            return self.lost
        with suppress(RuntimeError):
            self.rows = self.rows or self.read(_DEADLOCK, _DEADLOCK) or ""
        if self.rows:
            self.await_readers()
        return _error(self.rows, "") if self.rows else None

    def await_readers(self) -> None:
        """Tell that this rank has read what all wait for; rank 0, which may hold the store, waits for all to have read
        it, but not for long."""
        with suppress(RuntimeError):
            self.store.set(_reader_key(self.rank), b"read")
            waiting, until = set(range(1, self.size)) if self.rank == 0 else set(), time.monotonic() + 3 * PERIOD
            while waiting and time.monotonic() < until:
                waiting = {rank for rank in waiting if not self.store.check([_reader_key(rank)])}
                time.sleep(0.02)

    def keep_store(self, seconds: float) -> None:
        """Before an error: rank 0 may hold the store, which the others still ask."""
        if self.rank == 0:
            time.sleep(seconds)


def end_process(error: GlobalTensorError) -> None:
    """Show an error and end: the main thread is inside torch, and no exception reaches it."""
    sys.excepthook(type(error), error, None)
    for stream in filter(None, (sys.stdout, sys.stderr)):        # a program without a terminal may have closed them
        stream.flush()
    os._exit(1)


SAME_PROGRAM = ("no global op under a condition that differs between ranks, such as gt.rank() == 0, or after an error "
                "that one rank alone has caught")
_DEADLOCK = "globaltensor deadlock"


def _store_key(rank: int) -> str:
    return f"globaltensor wait {rank}"


def _reader_key(rank: int) -> str:
    return f"{_DEADLOCK} read by {rank}"


def _apart_key(rank: int) -> str:
    return f"globaltensor apart {rank}"


def _rows(waits: Mapping[int, Wait], apart: Mapping[int, str]) -> str:
    return "".join(f"\n    rank {rank} waits for {rank_names(wait.peers)} in {wait.what}   at {wait.where}"
                   f"{apart.get(rank, '')}" for rank, wait in sorted(waits.items()))


def _error(rows: str, at: str) -> DisagreementError:
    why, fix = lineage.advice_of_apart(rows) or ("", SAME_PROGRAM)
    return DisagreementError("deadlock: every rank waits for another" + rows,
                             f"{why}: every rank runs the same program".removeprefix(": "), fix, at)


def rank_names(ranks: Sequence[int]) -> str:
    """rank 1, or ranks 1, 2."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
