"""Where the launchers of a job meet, for torch's elastic agent: a store on the endpoint's own address.

torch's default, c10d, keeps a pickle in a store that listens on all interfaces, so whoever reaches the port can run
code in the launcher. Here the store listens on the endpoint's address, for one host on the loopback, and launchers read
nothing from it but signed messages (runtime/codec.py).
"""
from __future__ import annotations

import errno
import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from globaltensor.runtime.codec import decode_message, encode_message

NAME = "globaltensor"                                # of this rendezvous, for torch.distributed.launcher
_PERIOD = 0.05                                       # seconds between looks: Ctrl-C ends a wait within it


def register_rendezvous() -> None:
    """Make this rendezvous known to torch's launcher, once per process."""
    rendezvous_handler_registry.register(NAME, Rendezvous)


class Rendezvous(RendezvousHandler):
    """The hosts of a job, ranked by `rank` where each names its own, else by their names.

    The endpoint is HOST:PORT; the first launcher that can listen there keeps the store.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        host, _, port = params.endpoint.rpartition(":")
        self.host, self.port, self.hosts, self.run_id = host.strip("[]"), int(port), params.max_nodes, params.run_id
        self.rank: int | None = params.config.get("rank")
        self.name = params.local_addr or socket.gethostname()
        self.timeout = timedelta(seconds=float(params.config.get("timeout", 600)))
        self.store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other launchers. TimeoutError where they do not come, ValueError where there are too many."""
        limit = time.monotonic() + self.timeout.total_seconds()
        if self.store is None:
            self.store = self._open(limit)
        store = PrefixStore(self.run_id, self.store)
        rank = self._own_rank(store, limit)
        return RendezvousInfo(store, rank, self.hosts, RendezvousStoreInfo(self.host, self.store.port))

    def _open(self, limit: float) -> TCPStore:
        listening = self._listen()
        if listening is not None:
            port = listening.getsockname()[1]
            return TCPStore(self.host, port, is_master=True, timeout=self.timeout, wait_for_workers=False,
                            master_listen_fd=listening.detach())
        while True:
            try:
                socket.create_connection((self.host, self.port), 5).close()
                break
            except OSError as error:
                if time.monotonic() > limit:
                    place = f"{self.host}:{self.port}"
                    raise TimeoutError(f"nobody listens at {place}: {error.strerror or error}") from None
                time.sleep(_PERIOD)
        return TCPStore(self.host, self.port, is_master=False, timeout=self.timeout, wait_for_workers=False)

    def _listen(self) -> socket.socket | None:
        """A socket at the endpoint; None where that is the address of another host, or another launcher has it."""
        if self.rank not in (None, 0):
            return None
        family, *_, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            try:
                listening.bind(address)
            except OSError as error:
                # The first host by its rank may stand behind an address that is not its own, as in Kubernetes.
                if error.errno != errno.EADDRNOTAVAIL or self.rank != 0:
                    raise
                listening.bind(("", self.port))
            listening.listen(2048)
        except OSError as error:
            listening.close()
            if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE) and self.rank is None:
                return None
            raise
        return listening

    def _own_rank(self, store: Any, limit: float) -> int:
        if self.rank is not None:
            return self.rank
        own = store.add("arrivals", 1) - 1
        if own >= self.hosts:
            raise ValueError(f"{self.hosts} hosts have met already under the id {self.run_id!r}")
        store.set(f"host {own}", encode_message(self.name, f"host {own}"))
        keys = [f"host {i}" for i in range(self.hosts)]
        while not store.check(keys):
            if time.monotonic() > limit:
                came = sum(store.check([key]) for key in keys)
                raise TimeoutError(f"{came} of {self.hosts} hosts came")
            time.sleep(_PERIOD)
        names = [decode_message(store.get(key), key) for key in keys]
        return sorted(range(self.hosts), key=lambda i: (names[i], i)).index(own)

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return self.run_id

    @property
    def use_agent_store(self) -> bool:
        return True                                  # ranks meet in this store too: no second port, no race for it

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass                                         # the hosts of a job are as many as were asked for, to its end

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
