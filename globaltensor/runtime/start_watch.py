"""The watch over the start: ranks of this host that are stopped, or end, while others wait for them.

Ranks that start wait in loops of Python (arrival.py, store_tree.py), which look at the others and raise. They also wait
inside torch: in its store, whose keeper may be stopped, and while gloo connects. There nothing is raised, so a thread
looks as well. Where a rank is lost and no loop has looked for `DEAF` seconds, it shows the error and ends the process.
"""
from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from globaltensor.errors import TransportError, where
from globaltensor.runtime.deadlock import DEAF, end_process
from globaltensor.runtime.host_processes import (
    ENDED,
    STOPPED,
    ProcessId,
    host_id,
    job_name,
    process_state,
    rank_processes,
)
from globaltensor.runtime.launchers import ranks_per_host
from globaltensor.runtime.liveness import Liveness, Loss, known_loss
from globaltensor.runtime.store_tree import last_look

_PERIOD = 0.5
_QUIET = 2.0                                         # seconds without a look after which the thread begins to look
_LAST = 3.0                                          # seconds by which rank 0 ends later than others


class HostPeers:
    """The ranks of this host, as far as this one has to wait for them."""

    def __init__(self, rank: int, size: int) -> None:
        per_host = ranks_per_host(size)
        first = rank - rank % per_host
        self.rank, self.ranks = rank, set(range(first, first + per_host)) - {rank}
        self.job = job_name(dict(os.environ))
        self._seen: dict[int, ProcessId] = {}
        self._alive, self._met = Liveness({}, None), False

    @property
    def visible(self) -> bool:
        """Does the kernel tell of them?"""
        return bool(self.ranks and self.job and host_id())

    def seen_here(self) -> dict[int, ProcessId]:
        """The processes of those that are there. A rank is older than the children that it forked."""
        oldest = {rank: process for rank, process in self._seen.items() if process_state(process) != ENDED}
        missing = self.ranks - oldest.keys()         # while none is, no other process need be looked at
        for each in rank_processes(self.job) if self.visible and missing else ():
            if each.rank in missing and (each.rank not in oldest or each.process.began < oldest[each.rank].began):
                oldest[each.rank] = each.process
        self._seen = oldest
        return oldest

    def long_stopped(self, here: Mapping[int, ProcessId]) -> Loss | None:
        """The first of them that has been stopped for long; to be asked again and again."""
        still = {rank: process for rank, process in here.items() if process_state(process) == STOPPED}
        self._alive.processes.update(still)
        return self._alive.lost(still)

    def know(self, processes: Mapping[int, ProcessId]) -> None:
        """All have met: from now on none may end."""
        self._alive.processes.update({rank: processes[rank] for rank in self.ranks if processes[rank].here})
        self._met = True

    def lost(self) -> Loss | None:
        """The first that is stopped, or has ended after all had met, or has noted why it fails: also of other hosts."""
        if not self._met:
            return self.long_stopped(self.seen_here())
        return self._alive.lost(self._alive.processes) or known_loss()


@contextmanager
def watch_start(rank: int, size: int) -> Iterator[HostPeers]:
    """Inside, ranks start: none of them may be waited for in vain, also where nothing is raised."""
    host_peers, over, caller = HostPeers(rank, size), threading.Event(), threading.get_ident()

    def watch() -> None:
        well, first = time.monotonic(), None
        while not over.wait(_PERIOD):
            time_now = time.monotonic()
            if time_now - last_look() < _QUIET or (loss := host_peers.lost()) is None:
                well, first = time_now, None
                continue
            first = first or loss                    # others may end because of it
            patience = DEAF if rank else DEAF + _LAST    # the others are told by what it may keep, the store
            if time_now - well > patience and not over.is_set():
                end_process(TransportError(first.how, f"rank {rank} waited for it while they started",
                                           "look at its own error, and at what its host says of it",
                                           where(sys._current_frames().get(caller))))

    thread = threading.Thread(target=watch, daemon=True, name="globaltensor start")
    thread.start()
    try:
        yield host_peers
    finally:
        over.set()
        thread.join()
