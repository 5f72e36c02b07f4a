"""Do the other ranks live? What every wait for them asks.

Of a rank on this host the kernel tells (host_processes.py). One on another host counts in the job's store, its
*heart*, in a thread that does not need the interpreter's lock: so a C call that keeps the lock for long is not taken
for a death. A heart that stands still for `SILENCE` seconds is that of a rank whose process, host or network is gone.

A rank that is stopped (SIGSTOP, a debugger) for `PATIENCE` seconds counts as lost too, as nothing says that it goes on.
"""
from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from globaltensor.runtime.host_processes import ENDED, RUNS, STOPPED, ProcessId, process_state
from globaltensor.runtime.native import torch_ext

BEAT = 2.0                                           # seconds between two beats of a heart
SILENCE = 10.0
SILENCE_PYTHON = 90.0                                # without native code the heart is a Python thread
PATIENCE = 6.0
_LOOKS = 2.0                                         # seconds: looks that are further apart do not count


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
            beat = int(self.store.get(key)) if self.store.check([key]) else 0
        except RuntimeError:                         # the store is gone: its silence is not that of the rank
            return None
        last, since = self._beats.get(rank, (-1, time_now))
        if beat != last:
            self._beats[rank] = beat, time_now
            return None
        limit = SILENCE if torch_ext is not None else SILENCE_PYTHON
        if time_now - since < limit:
            return None
        return Loss(rank, f"rank {rank} has been silent for {limit:.0f} s: its process, host or network is gone")


def heart_key(rank: int) -> str:
    """Where in the job's store this rank counts its beats."""
    return f"globaltensor heart {rank}"


def start_heart(store: dist.Store, rank: int) -> None:
    """Let ranks on other hosts know that this one lives, until the process ends."""
    if torch_ext is not None:
        torch_ext.start_heart(store, heart_key(rank), BEAT)
        atexit.register(torch_ext.stop_heart)
        return
    ended = threading.Event()

    def beat() -> None:
        try:
            while not ended.wait(BEAT):
                store.add(heart_key(rank), 1)
        except RuntimeError:                         # the store is gone: the job is over, and each wait says so
            return

    thread = threading.Thread(target=beat, daemon=True, name="globaltensor heart")
    thread.start()
    atexit.register(thread.join, BEAT)               # the last that is registered is called first
    atexit.register(ended.set)


def own_connection(store: Any, patience: float = 10.0) -> Any:
    """The store below all prefixes, by a connection of its own where that is a matter of connections: an op that waits
    in one keeps all others in it waiting. Ops wait for `patience` seconds at most."""
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, dist.TCPStore):
        return inner
    return dist.TCPStore(inner.host, inner.port, is_master=False, wait_for_workers=False,
                         timeout=timedelta(seconds=patience))


_liveness: Liveness | None = None


def set_liveness(new: Liveness) -> None:
    """From here on, these are the processes of the job."""
    global _liveness
    _liveness = new


def lost_rank(ranks: Iterable[int]) -> Loss | None:
    """The first of these ranks that is lost; None in a lone process."""
    return None if _liveness is None else _liveness.lost(ranks)


def process_of(rank: int) -> ProcessId | None:
    """The process of a rank; None where it is not known."""
    return None if _liveness is None else _liveness.processes.get(rank)
