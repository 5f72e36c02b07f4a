"""How the ranks of a job find each other: each says in a store that it has come, and looks whether the others still
can.

torch's own start waits inside C++ for ranks that may have died before they ever spoke. Here nothing is waited for
there: ranks meet first, in a store that answers at once, and only then does torch connect them.

    a rank that came and ended        is known by its process
    a rank that was seen in /proc and is gone
    a rank that no launcher started, though it started all others of this host long ago
    a rank that nobody has seen       may still be on its way: it is waited for, and named when time is over
"""
from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from globaltensor.errors import GlobalTensorError, TransportError, first_sentence
from globaltensor.runtime.codec import decode_message, encode_message
from globaltensor.runtime.deadlock import rank_names
from globaltensor.runtime.host_processes import ProcessId, host_id, job_name, own_process, rank_processes
from globaltensor.runtime.liveness import Liveness, Loss, of_this_start

_PERIOD = 0.02
_SCANS = 0.5                                         # seconds between looks at the processes of this host
_TOGETHER = 2.0                                      # seconds within which a launcher has started all ranks of a host


def meet(timeout: timedelta) -> dist.Store:
    """The store of this job, once all ranks have come to it; by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises TransportError where a rank has ended, or does not come in time.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise TransportError(f"the ranks could not find each other: {' and '.join(missing)} not set",
                             "RANK and WORLD_SIZE are", "globaltensor run -n N program.py, or torchrun")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    others = _Others(rank, size)
    limit = time.monotonic() + timeout.total_seconds()
    store = _open_store(rank, timeout, limit, others)
    with in_touch():
        _tell_process(store, rank)
        if store.add("globaltensor arrivals", 1) == size:
            store.set("globaltensor all", "here")
        while not store.check(["globaltensor all"]):
            others.raise_if_gone(limit, store)
            time.sleep(_PERIOD)
    return store


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


def exchange_processes(store: dist.Store, rank: int, size: int) -> dict[int, ProcessId]:
    """The processes of all ranks; waits for theirs. For a job whose ranks have met, here or elsewhere."""
    _tell_process(store, rank)
    return _read_processes(store, range(size))


def _tell_process(store: dist.Store, rank: int) -> None:
    store.set(_process_key(rank), encode_message(own_process(), rank))  # type: ignore[arg-type]  # bytes do as well


def _read_processes(store: dist.Store, ranks: Iterable[int]) -> dict[int, ProcessId]:
    return {rank: decode_message(store.get(_process_key(rank)), rank) for rank in ranks}


def _process_key(rank: int) -> str:
    return f"globaltensor process {rank}"


def _open_store(rank: int, timeout: timedelta, limit: float, others: _Others) -> dist.Store:
    """torch's launchers keep the store themselves; else rank 0 does."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    while not others.keeps:
        try:
            socket.create_connection((host, port), 5).close()
            break
        except OSError:
            others.raise_if_gone(limit, None)
            time.sleep(_PERIOD)
    try:
        return of_this_start(dist.TCPStore(host, port, is_master=others.keeps, timeout=timeout, wait_for_workers=False,
                                           multi_tenant=True))
    except (ValueError, RuntimeError) as error:
        raise TransportError("the ranks could not find each other", first_sentence(error),
                             "globaltensor run -n N program.py, or torchrun") from None


class _Others:
    """The ranks that this one waits for when it starts."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.job = job_name(dict(os.environ))
        per_host = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        first = rank - rank % per_host
        self.here = set(range(first, first + per_host)) - {rank}
        self.launched = "TORCHELASTIC_RUN_ID" in os.environ
        self.keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.began, self.scanned = time.monotonic(), 0.0
        self.seen: set[int] = set()
        self.missing: set[int] = set()

    def raise_if_gone(self, limit: float, store: dist.Store | None) -> None:
        """Raise for ranks that will not come, and for those that have not come when time is over."""
        time_now = time.monotonic()
        if time_now - self.scanned >= _SCANS:
            self.scanned = time_now
            gone = self._came_and_ended(store) | self._never_came(time_now)
            if gone:
                raise self._ended(gone, store)
        if time_now > limit:
            missing = sorted(set(range(self.size)) - self._came(store).keys() - {self.rank})
            raise TransportError(f"{rank_names(missing)} did not come within {limit - self.began:.0f} s",
                                 f"rank {self.rank} of {self.size} waited at {os.environ['MASTER_ADDR']}:"
                                 f"{os.environ['MASTER_PORT']}", "globaltensor run -n N program.py, or torchrun")

    def _ended(self, gone: set[int], store: dist.Store | None) -> TransportError:
        """Of the ranks that are gone some may have raised this themselves: the first to see one gone notes which."""
        loss = Loss(min(gone), f"{rank_names(sorted(gone))} ended before all ranks had met")
        loss = Liveness({}, store).first_lost(loss)
        if self.keeps:                               # the others still ask
            time.sleep(3 * _SCANS)
        return TransportError(loss.how, f"rank {self.rank} waited for it",
                              "look at the first error of that rank; every rank runs the same program")

    def _came(self, store: dist.Store | None) -> dict[int, ProcessId]:
        ranks = [r for r in range(self.size) if store is not None and store.check([_process_key(r)])]
        return {} if store is None else _read_processes(store, ranks)

    def _came_and_ended(self, store: dist.Store | None) -> set[int]:
        came = self._came(store)
        loss = Liveness(came, None).lost(came)
        return set() if loss is None else {loss.rank}

    def _never_came(self, time_now: float) -> set[int]:
        """Ranks of this host that were seen, or must have been started, and are not there at two looks."""
        if not host_id():
            return set()
        present = {each.rank for each in rank_processes(self.job)}
        expected = self.here if self.launched and time_now - self.began > _TOGETHER else self.seen
        self.seen |= present & self.here
        before, self.missing = self.missing, expected - present
        return self.missing & before
