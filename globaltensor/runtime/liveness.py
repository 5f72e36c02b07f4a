"""Do the other ranks live? What every wait for them asks.

Of a rank on this host the kernel tells (host_processes.py). One on another host counts in the job's store, its
*heart*, in a thread that does not need the interpreter's lock: so a C call that keeps the lock for long is not taken
for a death. A heart that stands still for `SILENCE` seconds is that of a rank whose process, host or network is gone.
Beats are signed, so that nobody else keeps a dead rank alive, and an old one is none; native code has some in advance.

A rank that is stopped (SIGSTOP, a debugger) for `PATIENCE` seconds counts as lost too, as nothing says that it goes on.

Where a rank fails, others raise and end, and are lost to those who wait for them. So a rank that is about to raise
notes in the store which rank failed and how (itself by an error of the program, another that is lost or that it has
waited for too long), unless there is such a note: the first is told by all. Every rank reads it now and then, and knows
it when the store has ended with the rank that kept it, which gives them time to.
"""
from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count, islice
from typing import Any, NamedTuple

import torch.distributed as dist

from globaltensor.errors import TransportError, in_short, message_of, raised_at
from globaltensor.runtime.codec import decode_message, encode_message
from globaltensor.runtime.host_processes import ENDED, RUNS, STOPPED, ProcessId, process_state, times_it_paused
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.process_end import at_end, is_good_exit
from globaltensor.runtime.stacks import stack_of
from globaltensor.runtime.store_tree import read_message, write_message
from globaltensor.runtime.tcp_store import NamelessStore, connect_store
from globaltensor.runtime.thread_errors import error_of_thread

BEAT = 2.0                                           # seconds between two beats of a heart
SILENCE = 10.0
SILENCE_PYTHON = 90.0                                # without native code the heart is a Python thread
PATIENCE = 6.0
_WRITING = 0.5                                      # seconds for which a rank that notes a loss is waited for
_ENDING = 0.5                                        # seconds from the end of a rank's connections to that of the rank
_CONNECTING = 60.0                                   # seconds for which a connection to the store is tried
_LOST = "globaltensor lost"
_ENDED = f"{_LOST}: ended"                           # there once a rank has
_READING = 2.0                                       # seconds within which every rank looks for such a note
_AFTER = 4                                           # while ranks start, each looks after so many
_LOOKS = 2.0                                         # seconds: looks that are further apart do not count
_STOPPED_FOR = " was stopped for "                   # by which such a loss is known
_OF_THREAD = ", after its thread"
_AHEAD = 900                                         # beats that are signed in advance

_next_beats: Iterator[bytes] = iter(())


class Loss(NamedTuple):
    """A rank that will not answer, and what became of it."""

    rank: int
    how: str


def stopped_rank(rank: int, pid: int) -> Loss:
    """What is said of a rank that is stopped, by the others, and once it goes on by itself."""
    return Loss(rank, f"rank {rank}{_STOPPED_FOR}{PATIENCE:.0f} s or more (by SIGSTOP, or a debugger), so the others "
                f"gave up: kill -CONT {pid} lets it end")


def advice_after(how: str, fix: str = "look at the first error of the other ranks") -> str:
    """What to do about a loss: `fix`, but no rank has an error of its own where one was stopped, or lost a thread."""
    if _OF_THREAD in how:
        return "mend that error: it ended its thread alone, and the rank went on without it"
    return "start the job again, and stop all ranks or none" if _STOPPED_FOR in how else fix


class Liveness:
    """The processes of all ranks of the job, by rank. Any thread may ask."""

    def __init__(self, processes: Mapping[int, ProcessId], store: dist.Store | None, own: int = -1) -> None:
        self.processes = dict(processes)
        self.store, self.own = store, own            # rank
        self.lock = threading.Lock()
        self._stopped: dict[int, tuple[float, float, bytes]] = {}    # rank -> since when, when last seen so, its pauses
        self._beats: dict[int, tuple[int, float]] = {}               # rank -> the last beat, and when it was new
        self.heard_of: Loss | None = None            # once it was read
        self._said_end, self.process = False, os.getpid()

    def lost(self, ranks: Iterable[int]) -> Loss | None:
        """The first of these ranks that is lost."""
        with self.lock:
            time_now = time.monotonic()
            losses = (self._lost_here(rank, time_now) if self.processes[rank].here else self._silent(rank, time_now)
                      for rank in ranks if rank in self.processes)
            return next((loss for loss in losses if loss is not None), None)

    def first_lost(self, loss: Loss) -> Loss:
        """The rank that was lost first, where that is known; of all that ask, the first makes it this one."""
        if self.store is None:
            return loss
        with suppress(RuntimeError, TransportError):  # the store is gone, or somebody else writes to it
            if self.first_loss() is None and self.store.add(f"{_LOST} by", 1) == 1:
                write_message(self.store, _LOST, tuple(loss))
            until = time.monotonic() + _WRITING
            while (first := self.first_loss()) is None and time.monotonic() < until:
                time.sleep(0.005)
            return first or loss
        return loss

    def first_loss(self) -> Loss | None:
        """The rank of which that was noted; once it was read, also where the store is gone."""
        if self.heard_of is None and self.store is not None:
            with suppress(RuntimeError):             # it is gone, or somebody else has written there
                note = read_message(self.store, _LOST)
                if note is not None:
                    self.heard_of = Loss(*note)
                    write_message(self.store, _read_key(self.own), True)
        return self.heard_of

    def await_readers(self) -> None:
        """Until every other rank has read that, or has ended, but not for long."""
        waiting, until = set(self.processes) - {self.own}, time.monotonic() + _READING
        with suppress(RuntimeError):
            while self.store is not None and waiting and time.monotonic() < until:
                time.sleep(0.02)
                waiting -= {rank for rank in waiting if self.ending([rank]) or self.lost([rank])
                            or self.store.check([_read_key(rank)])}

    def ends(self, rank: int) -> None:
        """The program of this rank has ended, well or by an error of its own."""
        if self.store is not None and not self._said_end:        # torch warns where the store has ended meanwhile
            self._said_end = True
            with suppress(RuntimeError):
                write_message(self.store, _end_key(rank), error_of_thread() or True)
                self.store.set(_ENDED, "some")

    def ending(self, ranks: Iterable[int]) -> Loss | None:
        """The first of these ranks that has said so."""
        ended = self.ended(ranks)
        return self.end_of(ended[0]) if ended else None

    def end_of(self, rank: int) -> Loss:
        """How a rank has ended that has said so."""
        note = None
        with suppress(RuntimeError, TransportError):
            note = read_message(self.store, _end_key(rank)) if self.store is not None else None
        return Loss(rank, f"rank {rank} has ended" + (f", after {note}" if isinstance(note, str) else ""))

    def ended(self, ranks: Iterable[int]) -> list[int]:
        """Those of these ranks that have said so."""
        if self.store is not None:
            with suppress(RuntimeError, TransportError):
                if self.store.check([_ENDED]):       # one question, where most often none has
                    return [rank for rank in ranks if read_message(self.store, _end_key(rank))]
        return []

    def _lost_here(self, rank: int, time_now: float) -> Loss | None:
        process = self.processes[rank]
        state = process_state(process)
        if state == ENDED:
            return Loss(rank, f"rank {rank} was killed, crashed or ended early (process {process.pid})")
        if state == RUNS:
            self._stopped.pop(rank, None)
            return None
        pauses = times_it_paused(process)
        since, seen, before = self._stopped.get(rank, (time_now, time_now, pauses))
        if time_now - seen > _LOOKS or pauses != before:    # this process may have been stopped itself meanwhile,
            since = time_now                         # or that one has run, while nobody waited for it
        self._stopped[rank] = since, time_now, pauses
        if time_now - since < PATIENCE:
            return None
        assert state == STOPPED
        return stopped_rank(rank, process.pid)

    def _silent(self, rank: int, time_now: float) -> Loss | None:
        if self.store is None or not self.processes[rank].host:
            return None
        key = heart_key(rank)
        try:
            beat = decode_message(self.store.get(key), key) if self.store.check([key]) else 0
        except TransportError:                       # not of that rank
            beat = -1
        except RuntimeError:                         # the store is gone: its silence is not that of the rank
            return None
        last, since = self._beats.get(rank, (-1, time_now))
        if rank not in self._beats or beat > last:
            self._beats[rank] = beat, time_now
            return None
        limit = SILENCE if torch_ext is not None else SILENCE_PYTHON
        if time_now - since < limit:
            return None
        return Loss(rank, f"rank {rank} has been silent for {limit:.0f} s: its process, host or network is gone")


def _read_key(rank: int) -> str:
    return f"{_LOST}: read {rank}"


def _end_key(rank: int) -> str:
    return f"{_LOST}: end {rank}"


def heart_key(rank: int) -> str:
    """Where in the job's store this rank counts its beats."""
    return f"globaltensor heart {rank}"


def start_heart(store: dist.Store, rank: int) -> None:
    """Let ranks on other hosts know that this one lives, until the process ends."""
    global _next_beats
    key = heart_key(rank)
    # a rank that is started again in the same store goes on with larger numbers
    _next_beats = (encode_message(n, key) for n in count(int(time.time()) * 1000))
    if torch_ext is not None:
        torch_ext.start_heart(store, key, BEAT)
        at_end(torch_ext.stop_heart)
        feed_heart()
        return
    ended = threading.Event()

    def beat() -> None:
        try:
            while not ended.wait(BEAT):
                store.set(key, next(_next_beats))    # type: ignore[arg-type]  # bytes do as well
        except RuntimeError:                         # the store is gone: the job is over, and each wait says so
            return

    thread = threading.Thread(target=beat, daemon=True, name="globaltensor heart")
    thread.start()
    at_end(thread.join, BEAT)                        # the last that is registered is called first
    at_end(ended.set)


def feed_heart() -> None:
    """Sign the beats of the next half hour, where some of the last are gone: now and then, as long as Python runs."""
    if torch_ext is not None and (left := torch_ext.beats_left()) < _AHEAD // 2:
        torch_ext.feed_heart(list(islice(_next_beats, _AHEAD - left)))


def own_connection(store: Any, patience: float = 10.0) -> Any:
    """What ranks say that were started together, by a connection of its own: an op that waits in one keeps all others
    in it waiting. Ops wait for `patience` seconds at most."""
    return of_this_start(connected_to(store, patience))


def connected_to(store: Any, patience: float = 10.0) -> Any:
    """The store below all prefixes, by a connection of its own where that is a matter of connections."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        # where many ranks start on few cores, who keeps the store is late to answer
        own = connect_store(store.host, store.port, timedelta(seconds=max(patience, _CONNECTING)))
        own.set_timeout(timedelta(seconds=patience))
        return own
    return store


_start_name = ""


def name_start(name: str) -> None:
    """What `arrival.meet` has found out: how the ranks that were started together call that."""
    global _start_name
    _start_name = name


def of_this_start(store: dist.Store, name: str = "") -> dist.Store:
    """What ranks say that were started together (arrival.py tells why); `name`: of another start than this one."""
    return NamelessStore(f"globaltensor start {name or _start_name}", store)


_liveness: Liveness | None = None


def set_liveness(new: Liveness) -> None:
    """From here on, these are the processes of the job."""
    global _liveness
    _liveness = new


def lost_rank(ranks: Iterable[int]) -> Loss | None:
    """The first of these ranks that is lost; None in a lone process."""
    return None if _liveness is None else _liveness.lost(ranks)


def known_loss() -> Loss | None:
    """The rank that failed first, where that was noted."""
    return None if _liveness is None else _liveness.first_loss()


def has_heard_of_a_loss() -> bool:
    """Does this rank know of one that failed, maybe itself? It asks nobody."""
    return _liveness is not None and _liveness.heard_of is not None


def ended_after_a_failure(ranks: Iterable[int]) -> Loss | None:
    """The first of these ranks that ends, where one has failed: no error of it will tell them, if they wait for it."""
    return None if _liveness is None or known_loss() is None else _liveness.ending(ranks)


def ended_ranks(ranks: Iterable[int]) -> list[int]:
    """Those of these ranks whose programs have ended, and have said so."""
    return [] if _liveness is None else _liveness.ended(ranks)


def end_of(rank: int) -> Loss:
    """How a rank has ended that has said so."""
    return Loss(rank, f"rank {rank} has ended") if _liveness is None else _liveness.end_of(rank)


def first_lost(loss: Loss) -> Loss:
    """Before an error that names a rank that is lost: the one with which it began, for all ranks the same."""
    return loss if _liveness is None else _liveness.first_lost(loss)


def job_store() -> dist.Store | None:
    """What all ranks can write to, where there is such a store. Any thread may."""
    return _liveness.store if _liveness is not None and _liveness.process == os.getpid() else None


def tell_failure(rank: int, error: BaseException) -> None:
    """Before this rank ends by an error that nobody has caught: the others are told which, unless a rank had failed
    before. One of ranks that are lost tells of them, and is not a cause. Nor is an exit that tells of no error."""
    if _liveness is None or _liveness.process != os.getpid() or is_good_exit(error):     # a fork shares the connection
        return
    kind, text = type(error).__name__, message_of(error)
    how = f"ended by sys.exit({text})" if isinstance(error, SystemExit) else f"raised {kind}: {text}"
    if torch_ext is not None:
        torch_ext.leave_transport(how.partition(":")[0])
    if not isinstance(error, TransportError):
        first_line = in_short(how.splitlines()[0].removesuffix(": "))
        _liveness.first_lost(Loss(rank, f"rank {rank} {first_line}   at {raised_at(error)}"))


def keep_store_for_readers(store: dist.Store) -> None:
    """The last that the rank does that keeps the store, which ends when nobody holds it any more: where a rank has
    failed, the others read of it meanwhile."""
    if _liveness is not None and known_loss() is not None:
        _liveness.await_readers()


def raise_if_one_is_lost(rank: int, size: int, patience: float) -> Callable[[], None]:
    """While ranks start: to be called again and again. Each looks after some, and all look for what others have noted.

    Raises TransportError where a rank is lost, or `patience` seconds are over.
    """
    after, limit = [(rank + k) % size for k in range(1, min(size, _AFTER + 1))], time.monotonic() + patience

    def look() -> None:
        loss = lost_rank(after)
        if (loss := known_loss() if loss is None else first_lost(loss)) is not None:
            if rank == 0:                            # the others still look
                time.sleep(_WRITING)
            raise TransportError(loss.how, f"rank {rank} waited for it while they started",
                                 "look at its own error, and at what its host says of it")
        if time.monotonic() > limit:
            raise TransportError(f"ranks did not start within {patience:.0f} s", f"rank {rank} waited for them",
                                 "gt.init(timeout=...) where they may take longer")

    return look


def lost_connection(ranks: Sequence[int], how: str) -> Loss | None:
    """A connection to one of these ranks has closed: the one with which it began, where that can be known. A process
    that ends closes its connections first, so this may take a moment."""
    if _liveness is None:
        return None
    until = time.monotonic() + _ENDING
    while (loss := known_loss() or _liveness.ending(ranks) or _liveness.lost(ranks)) is None \
            and time.monotonic() < until:
        time.sleep(0.01)
    if loss is None and len(ranks) == 1:
        loss = Loss(ranks[0], f"rank {ranks[0]} has closed its connection ({how})")
    return None if loss is None else first_lost(loss)


def tell_end(rank: int) -> None:
    """Before this rank closes its connections: those that wait for it learn whose they were."""
    if _liveness is not None:
        if torch_ext is not None and error_of_thread() and _liveness.heard_of is None:
            torch_ext.leave_transport(f"has ended, after {error_of_thread()}")
        _liveness.ends(rank)


def process_of(rank: int) -> ProcessId | None:
    """The process of a rank; None where it is not known."""
    return None if _liveness is None else _liveness.processes.get(rank)


def stacks_of(ranks: Sequence[int]) -> str:
    """Where these ranks, which live, are, as far as this host can tell."""
    rows = []
    for rank in ranks:
        process = process_of(rank)
        stack = stack_of(process.pid) if process is not None and process.here else ""
        in_torch = "distributed_c10d.py" in stack.partition("\n")[0]
        what = ", in a call of torch.distributed that others of its group have to make" if in_torch else ""
        rows.append(f"rank {rank} lives{what}, and is here:\n{stack}" if stack else
                    f"rank {rank} lives; `globaltensor stacks` on its host shows where it is")
    return "\n".join(rows)
