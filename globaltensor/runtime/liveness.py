"""Do the other ranks live? What every wait for them asks.

Of a rank on this host the kernel tells (host_processes.py). One on another host counts in the job's store, its
*heart*, in a thread that does not need the interpreter's lock: so a C call that keeps the lock for long is not taken
for a death. A heart that stands still for `SILENCE` seconds is that of a rank whose process, host or network is gone.
Beats are signed, so that nobody else keeps a dead rank alive, and an old one is none; native code has some in advance.

A rank that is stopped (SIGSTOP, a debugger) for `PATIENCE` seconds counts as lost too, as nothing says that it goes on.

Where a rank is lost, others raise and end, and are lost to those who wait for them. So a rank that is about to raise
notes in the store whom it lost, unless another one has: the first to be lost is named by all.
"""
from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import count, islice
from typing import Any, NamedTuple

import torch.distributed as dist

from globaltensor.errors import TransportError
from globaltensor.runtime.codec import decode_message, encode_message
from globaltensor.runtime.host_processes import ENDED, RUNS, STOPPED, ProcessId, process_state
from globaltensor.runtime.native import torch_ext

BEAT = 2.0                                           # seconds between two beats of a heart
SILENCE = 10.0
SILENCE_PYTHON = 90.0                                # without native code the heart is a Python thread
PATIENCE = 6.0
_WRITING = 0.5                                      # seconds for which a rank that notes a loss is waited for
_ENDING = 0.5                                        # seconds from the end of a rank's connections to that of the rank
# of this start of the job: torchrun keeps the store when it starts ranks again
_LOST = f"globaltensor lost {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
_LOOKS = 2.0                                         # seconds: looks that are further apart do not count


_AHEAD = 900                                         # beats that are signed in advance

_next_beats: Iterator[bytes] = iter(())


class Loss(NamedTuple):
    """A rank that will not answer, and what became of it."""

    rank: int
    how: str


class Liveness:
    """The processes of all ranks of the job, by rank. Any thread may ask."""

    def __init__(self, processes: Mapping[int, ProcessId], store: dist.Store | None) -> None:
        self.processes = dict(processes)
        self.store = store
        self.lock = threading.Lock()
        self._stopped: dict[int, tuple[float, float]] = {}           # rank -> since when, and when last seen so
        self._beats: dict[int, tuple[int, float]] = {}               # rank -> the last beat, and when it was new

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
            if self.store.add(f"{_LOST} by", 1) == 1:
                self.store.set(_LOST, encode_message(tuple(loss), _LOST))  # type: ignore[arg-type]  # bytes do as well
                return loss
            until = time.monotonic() + _WRITING
            while not self.store.check([_LOST]) and time.monotonic() < until:
                time.sleep(0.005)
            if self.store.check([_LOST]):
                return Loss(*decode_message(self.store.get(_LOST), _LOST))
        return loss

    def ends(self, rank: int) -> None:
        """This rank is about to close its connections, well or by an error of its own."""
        if self.store is not None:
            with suppress(RuntimeError):
                self.store.set(_end_key(rank), encode_message(True, rank))  # type: ignore[arg-type]

    def ending(self, ranks: Iterable[int]) -> Loss | None:
        """The first of these ranks that has said so."""
        if self.store is not None:
            with suppress(RuntimeError, TransportError):
                for rank in ranks:
                    if self.store.check([_end_key(rank)]) and decode_message(self.store.get(_end_key(rank)), rank):
                        return Loss(rank, f"rank {rank} has ended")
        return None

    def _lost_here(self, rank: int, time_now: float) -> Loss | None:
        process = self.processes[rank]
        state = process_state(process)
        if state == ENDED:
            return Loss(rank, f"rank {rank} was killed, crashed or ended early (process {process.pid})")
        if state == RUNS:
            self._stopped.pop(rank, None)
            return None
        since, seen = self._stopped.get(rank, (time_now, time_now))
        if time_now - seen > _LOOKS:                 # this process may have been stopped itself meanwhile
            since = time_now
        self._stopped[rank] = since, time_now
        if time_now - since < PATIENCE:
            return None
        assert state == STOPPED
        return Loss(rank, f"rank {rank} is stopped (by SIGSTOP, or a debugger): kill -CONT {process.pid} lets it go on")

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
        atexit.register(torch_ext.stop_heart)
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
    atexit.register(thread.join, BEAT)               # the last that is registered is called first
    atexit.register(ended.set)


def feed_heart() -> None:
    """Sign the beats of the next half hour, where some of the last are gone: now and then, as long as Python runs."""
    if torch_ext is not None and (left := torch_ext.beats_left()) < _AHEAD // 2:
        torch_ext.feed_heart(list(islice(_next_beats, _AHEAD - left)))


def own_connection(store: Any, patience: float = 10.0) -> Any:
    """The store below all prefixes but for that of this start, by a connection of its own where that is a matter of
    connections: an op that waits in one keeps all others in it waiting. Ops wait for `patience` seconds at most."""
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if isinstance(inner, dist.TCPStore):
        inner = dist.TCPStore(inner.host, inner.port, is_master=False, wait_for_workers=False,
                              timeout=timedelta(seconds=patience))
    return of_this_start(inner)


def of_this_start(store: dist.Store) -> dist.Store:
    """What ranks say that were started together: torchrun keeps the store when it starts ranks again, and with it the
    addresses of those that have ended. Of several hosts each counts its own restarts, so there the number says nothing;
    `globaltensor run` opens a store for each start."""
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if one_host else 0}", store)


_liveness: Liveness | None = None


def set_liveness(new: Liveness) -> None:
    """From here on, these are the processes of the job."""
    global _liveness
    _liveness = new


def lost_rank(ranks: Iterable[int]) -> Loss | None:
    """The first of these ranks that is lost; None in a lone process."""
    return None if _liveness is None else _liveness.lost(ranks)


def first_lost(loss: Loss) -> Loss:
    """Before an error that names a rank that is lost: the one with which it began, for all ranks the same."""
    return loss if _liveness is None else _liveness.first_lost(loss)


def lost_connection(ranks: Sequence[int], how: str) -> Loss | None:
    """A connection to one of these ranks has closed: the one with which it began, where that can be known. A process
    that ends closes its connections first, so this may take a moment."""
    if _liveness is None:
        return None
    until = time.monotonic() + _ENDING
    while (loss := _liveness.ending(ranks) or _liveness.lost(ranks)) is None and time.monotonic() < until:
        time.sleep(0.01)
    if loss is None and len(ranks) == 1:
        loss = Loss(ranks[0], f"rank {ranks[0]} has closed its connection ({how})")
    return None if loss is None else first_lost(loss)


@cache
def tell_end(rank: int) -> None:
    """Once, before this rank closes its connections: those that wait for it learn whose they were."""
    if _liveness is not None:
        _liveness.ends(rank)


def process_of(rank: int) -> ProcessId | None:
    """The process of a rank; None where it is not known."""
    return None if _liveness is None else _liveness.processes.get(rank)
