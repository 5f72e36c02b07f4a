"""How the ranks of a job find each other: each says in a store that it has come, and looks whether the others still
can.

torch's own start waits inside C++ for ranks that may have died before they ever spoke. Here nothing is waited for
there: ranks meet first, in a store that answers at once, and only then does torch connect them.

    a rank that ends by itself        says so, in the store, and to the ranks of its host by a name of its process
    a rank that was seen in /proc and is gone
    a rank that is stopped            after some seconds
    a rank that no launcher started, though it started all others of this host long ago
    a rank that came, and whose process has ended (where launchers set no variables, so that /proc does not tell)
    a rank that nobody has seen       may still be on its way: it is waited for, and named when time is over

torchrun keeps the store when it starts ranks again, and with it all that ended ranks have said, their addresses too;
and of several hosts each counts its own restarts, so there is no number that tells starts apart. So nothing is
believed because it is there. Every rank writes a *challenge*, a random number. Its parent in the tree (store_tree.py)
answers with that number and with the name of this start, which rank 0 draws. An answer to one's own challenge was
written after it: by a rank that lives. All else is said under that name. Whoever notices that a rank is gone answers
the challenges of all with that, in a place of its own, where no parent that is just about to answer writes over it.
"""
from __future__ import annotations

import atexit
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from globaltensor.errors import GlobalTensorError, TransportError, first_sentence, warn
from globaltensor.runtime.codec import decode_message
from globaltensor.runtime.deadlock import rank_names
from globaltensor.runtime.host_processes import (
    ENDED,
    ProcessId,
    is_of_a_rank,
    job_name,
    mark_ended,
    own_process,
    process_state,
)
from globaltensor.runtime.launchers import recognize_launcher
from globaltensor.runtime.liveness import Loss, name_start, of_this_start
from globaltensor.runtime.rank_number import (
    challenge_key,
    end_error,
    end_of_meeting,
    is_of_twins,
    loss_key,
    meeting_place,
    note_end,
    take_rank,
)
from globaltensor.runtime.start_watch import HostPeers
from globaltensor.runtime.store_tree import (
    LAST_LOOK,
    children_of,
    gather_in_store,
    looks,
    parent_of,
    read_message,
    write_message,
)
from globaltensor.runtime.tcp_store import connect_store, port_error

_PERIOD = 0.02
_SCANS = 0.5                                         # seconds between looks at the processes of this host
_TOGETHER = 2.0                                      # seconds within which a launcher has started all ranks of a host
_AFTER = 4                                           # so many ranks after itself each rank looks after
_PATIENCE = timedelta(seconds=2)                     # for which a rank that ends waits for the store
_NAMELESS = 30.0                                     # seconds: in some clusters a host's name comes with the host
_ANSWERING = timedelta(seconds=60)                   # where many ranks start on few cores, who keeps the store is late
_SILENT = 30.0                                       # seconds for which a rank waits without a word
_LEFT_OVER = ("globaltensor run -n N program.py, or torchrun; where RANK and WORLD_SIZE are left over: "
              "unset RANK WORLD_SIZE")


class _StartedAnew(Exception):
    """Rank 0 was started again: this meeting has another name."""


def open_store(timeout: timedelta) -> dist.Store:
    """The store of this job, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises TransportError where the rank that keeps it has ended, or does not come in time, and where that place is none
    or somebody else's.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise TransportError(f"the ranks could not find each other: {' and '.join(missing)} not set",
                             "RANK and WORLD_SIZE are", "globaltensor run -n N program.py, or torchrun")
    others = _Others(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, timeout.total_seconds())
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    while True:
        try:
            if others.keeps:
                socket.getaddrinfo(host, port)       # torch would ask for its own address until time is over
            else:
                socket.create_connection((host, port), 5).close()
            break
        except (socket.gaierror, UnicodeError) as error:
            if others.seconds() > _NAMELESS:
                _end_meeting()                       # nobody can be told there that this rank ends
                raise TransportError(f"the ranks cannot meet at {host}", f"MASTER_ADDR has no address here: {error}",
                                     f"MASTER_ADDR=HOST, where HOST is that of rank 0, or {_LEFT_OVER}") from None
            others.raise_if_gone()
        except OSError:
            others.raise_if_gone()
        time.sleep(_PERIOD)
    store = _connect_within(host, port, min(timeout, _ANSWERING), others)
    store.set_timeout(timeout)
    return store


def _connect_within(host: str, port: int, patience: timedelta, others: _Others) -> dist.TCPStore:
    """The store that is kept there."""
    store = _store_within(host, port, patience, others, others.keeps)
    if others.keeps and "address already in use" in str(store).lower():
        twin = _store_within(host, port, timedelta(seconds=1), others, False)
        with suppress(RuntimeError):                 # of another job, or no store
            if isinstance(twin, dist.TCPStore):
                twin.wait([challenge_key(0)], _PATIENCE)
                decode_message(twin.get(challenge_key(0)), challenge_key(0))
                return twin                          # this process came twice: both are told there
    if isinstance(store, dist.TCPStore):
        return store
    _end_meeting()                                   # who listens there would not hear that this rank ends
    if others.keeps and store is not None:
        atexit.register(_stay)                       # who saw this rank sees that it ends
        raise port_error(port, str(store))
    raise TransportError(f"what listens at {host}:{port} is not rank 0 of this job",
                         "it does not answer" if store is None else first_sentence(store),
                         f"another MASTER_PORT, the same for all ranks, or {_LEFT_OVER}") from None


def _store_within(host: str, port: int, patience: timedelta, others: _Others,
                  keeps: bool) -> dist.TCPStore | Exception | None:
    """The store there, or what torch says; None where nothing answers. In a thread, as torch waits for ever where
    something else listens and is silent."""
    ended: queue.SimpleQueue[dist.TCPStore | Exception] = queue.SimpleQueue()

    def connect() -> None:
        try:
            ended.put(connect_store(host, port, patience, is_master=keeps, shared=True))
        except (OSError, ValueError, RuntimeError) as error:
            ended.put(error)

    threading.Thread(target=connect, daemon=True, name="globaltensor store").start()
    limit = time.monotonic() + patience.total_seconds() + _PATIENCE.total_seconds()
    while time.monotonic() < limit:
        with suppress(queue.Empty):
            return ended.get(timeout=_SCANS)
        others.raise_if_gone()
    return None


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> tuple[dist.Store, dict[int, ProcessId]]:
    """Wait for all ranks to come to this store; what they say from now on is in the store that is returned, beside the
    processes of all. Raises TransportError where a rank has ended, or does not come in time."""
    others = _Others(rank, size, store, timeout.total_seconds())
    with in_touch():
        others.come()
        while True:
            with suppress(_StartedAnew):
                name = others.name_of_start()
                fresh = of_this_start(store, name)
                processes = gather_in_store(fresh, "globaltensor process", own_process(), rank, size, others.look)
                break
    name_start(name)
    _end_meeting()
    if rank == 0:
        note_end(store)
    return fresh, dict(enumerate(processes))


@contextmanager
def in_touch() -> Iterator[None]:
    """Around each talk with the store while ranks start: it ends where the rank that keeps the store does, by an error
    of its own, and what torch then says does not tell."""
    try:
        yield
    except GlobalTensorError:
        raise
    except RuntimeError as error:
        raise TransportError(f"rank {os.environ.get('RANK', '?')} lost touch with the others while they started",
                             f"{first_sentence(error)}: a rank has ended",
                             "look at the first error of the other ranks") from None


def _answer_key(rank: int) -> str:
    return f"globaltensor answer {rank}"


def _ended_before(ranks: set[int]) -> Loss:
    return Loss(min(ranks), f"{rank_names(sorted(ranks))} ended before all ranks had met")


def _tell_of_loss(store: dist.Store, rank: int, size: int, loss: Loss) -> None:
    """Answer whatever challenges there are, also those of ranks that have ended since."""
    for other in range(size):
        if other != rank and (challenge := read_message(store, challenge_key(other))) is not None:
            write_message(store, loss_key(other), (challenge[0], tuple(loss)))


def _stay(store: dist.Store | None = None) -> None:
    """The store ends when nobody holds it any more."""
    time.sleep(_PATIENCE.total_seconds())


class _Others:
    """The ranks that this one waits for when it starts, in a store (None: until there is one)."""

    def __init__(self, rank: int, size: int, store: dist.Store | None, patience: float) -> None:
        self.rank, self.size, self.store = rank, size, store
        self.host_peers = HostPeers(rank, size)
        self.launched = "TORCHELASTIC_RUN_ID" in os.environ
        self.keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.began, self.scanned, self.patience, self.warned = time.monotonic(), 0.0, patience, False
        self.seen: set[int] = set()
        self.missing: set[int] = set()
        self.came: dict[int, ProcessId] = {}         # of those that this rank looks after
        self.challenge, self.name = secrets.token_hex(8), f"{secrets.token_hex(8)} of {size}" if rank == 0 else ""
        self.texts: dict[str, bytes] = {}            # by key, what this rank has read there and done what follows

    def come(self) -> None:
        assert self.store is not None
        try:
            take_rank(self.rank, self.challenge, self.store)
        except TransportError:
            _end_meeting()                           # that rank has not ended
            raise

    def name_of_start(self) -> str:
        """Of the one that this rank's parent belongs to."""
        for _ in looks(self.raise_if_gone):
            with suppress(_StartedAnew):             # this rank had no name before
                self.hear()
            if self.name:
                break
        return self.name

    def look(self) -> None:
        """While this rank waits: answer its children, and raise where a rank will not come."""
        assert self.store is not None
        for child in children_of(self.rank, self.size):
            if (challenge := self.news(challenge_key(child))) is not None:
                write_message(self.store, _answer_key(child), (challenge[0], self.name))
        self.hear()
        self.raise_if_gone()

    def news(self, key: str) -> Any:
        """What is written there; None where nothing is, or what was there at the last look."""
        assert self.store is not None
        if not self.store.check([key]) or (text := self.store.get(key)) == self.texts.get(key):
            return None
        self.texts[key] = text
        return decode_message(text, key)

    def hear(self) -> None:
        """What the others have answered: that a rank is gone, or the name of this start."""
        assert self.store is not None
        challenge, loss = self.news(loss_key(self.rank)) or (None, None)
        if loss is not None and challenge == self.challenge:         # else of an earlier start
            if (loss := Loss(*loss)).rank == self.rank and is_of_twins(loss):
                note_end(self.store, loss)           # which has told nobody else
            raise self._gone(loss)
        challenge, name = self.news(_answer_key(self.rank)) or (None, "")
        if challenge == self.challenge and name != self.name:
            self._check_size(int(name.rpartition(" ")[2]))
            self.name = name
            self.texts.clear()                       # the children have to be told
            raise _StartedAnew

    def _check_size(self, size: int) -> None:
        """As many ranks as rank 0 was started with, or these would wait for each other in vain."""
        if size != self.size:
            loss = Loss(self.rank, f"rank {self.rank} was started as one of {self.size} ranks, rank 0 as one of {size}")
            assert self.store is not None
            _tell_of_loss(self.store, self.rank, max(size, self.size), loss)
            _end_meeting()
            raise TransportError(loss.how, f"they meet at {meeting_place()}, and each has a WORLD_SIZE of its own",
                                 f"the same WORLD_SIZE for all ranks of a job; another MASTER_PORT for another job; "
                                 f"{_LEFT_OVER}")

    def raise_if_gone(self) -> None:
        """Raise for ranks that will not come, and for those that have not come when time is over."""
        time_now = time.monotonic()
        self._warn_of_wait()
        if time_now - self.scanned >= _SCANS:
            self.scanned = time_now
            here = self.host_peers.seen_here()
            gone = self._never_came(set(here), time_now) | self._came_and_ended()
            loss = _ended_before(gone) if gone else self.host_peers.long_stopped(here)
            # last: who has ended by then has noted it before
            if self.store is not None and (end := end_of_meeting(self.rank, self.store, bool(self.name))) is not None:
                raise self._gone(end)
            if loss is not None:
                if self.store is not None:
                    self.hear()                      # perhaps of the one with which it began
                    _tell_of_loss(self.store, self.rank, self.size, loss)
                raise self._gone(loss)
        if self.seconds() > self.patience:
            _end_meeting()                           # for all of them: none need say that it ends
            raise TransportError(f"{rank_names(self._awaited())} did not come within {self.patience:.0f} s",
                                 f"rank {self.rank} of {self.size} waited at {meeting_place()}", _LEFT_OVER)

    def seconds(self) -> float:
        """For how many this rank has waited."""
        return time.monotonic() - self.began

    def _warn_of_wait(self) -> None:
        """Say for whom this rank waits, after a while, as it may do so for long: rank 0, or who does not even find it,
        lest all say the same."""
        if not self.warned and self.seconds() > _SILENT and (self.store is None or self.rank == 0):
            self.warned = True
            awaited = self._awaited() if self.rank == 0 else [0]
            warn(f"rank {self.rank} of {self.size} waits at {meeting_place()} for {rank_names(awaited)}\n"
                 f"  why:   all ranks meet there, and have {self.patience:.0f} s for it\n  try:   {_LEFT_OVER}")

    def _gone(self, loss: Loss) -> TransportError:
        _end_meeting()                               # all who came know of that one: this rank need not tell of itself
        if self.keeps and self.store is not None:    # the others still look, on a busy host for longer
            time.sleep(4 * LAST_LOOK)
            atexit.register(_stay, self.store)
        return end_error(loss) or TransportError(
            loss.how, f"rank {self.rank} waited for it",
            "look at the first error of that rank; every rank runs the same program")

    def _awaited(self) -> list[int]:
        """Those that have said nothing; where all have, now or before, the one that has not answered."""
        ranks = sorted(set(range(self.size)) - {self.rank})
        silent = [r for r in ranks if self.store is None or not self.store.check([challenge_key(r)])]
        return silent or [parent_of(self.rank)] if self.rank and not self.name else silent or ranks

    def _came_and_ended(self) -> set[int]:
        """Of some ranks after this one on this host. Where torchrun keeps the store, they may be of an earlier start:
        there /proc tells."""
        if self.launched or self.store is None:
            return set()
        after = sorted(self.host_peers.ranks, key=lambda r: (r - self.rank) % self.size)[:_AFTER]
        for rank in after:
            if rank not in self.came and (challenge := read_message(self.store, challenge_key(rank))) is not None:
                self.came[rank] = challenge[1]
        return {rank for rank, process in self.came.items() if process.here and process_state(process) == ENDED}

    def _never_came(self, here: set[int], time_now: float) -> set[int]:
        """Ranks of this host that were seen, or must have been started, and are not there at two looks."""
        if not self.host_peers.visible:
            return set()
        late = self.launched and time_now - self.began > _TOGETHER
        expected = self.host_peers.ranks if late else self.seen
        self.seen |= here
        before, self.missing = self.missing, expected - here
        return self.missing & before


_over = False                                        # the meeting, well or not


def _end_meeting() -> None:
    global _over
    _over = True


def _last_words() -> None:
    """A rank that ends before the meeting, by an error or well, says so: what follows, the end of the interpreter, may
    take seconds on a busy host."""
    env = dict(os.environ)
    with suppress(OSError, ValueError, RuntimeError):            # nobody is there to be told
        recognize_launcher(env)
        rank, size, job = env.get("RANK", ""), env.get("WORLD_SIZE", ""), job_name(env)
        if not job or is_of_a_rank(os.getppid(), job):           # no rank, or a child that one has started
            return
        mark_ended()
        if _over or dist.is_initialized() or not env.get("MASTER_ADDR"):
            return
        host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        socket.create_connection((host, port), _PATIENCE.total_seconds()).close()
        store = connect_store(host, port, _PATIENCE)
        _tell_of_loss(store, int(rank), int(size), _ended_before({int(rank)}))


if dist.is_available():
    atexit.register(_last_words)
