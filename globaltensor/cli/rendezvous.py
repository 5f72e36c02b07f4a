"""Where the launchers of a job meet, for torch's elastic agent: a store on the endpoint's own address.

torch's default, c10d, keeps a pickle in a store that listens on all interfaces, so whoever reaches the port can run
code in the launcher. Here the store listens on the endpoint's address, for one host on the loopback, and launchers read
nothing from it but signed messages (runtime/codec.py).

They meet in *rounds*: the first when the job starts, and another whenever ranks fail or a host comes back. The
launcher that keeps the store, the *keeper*, closes a round: the first when all hosts have come, a later one as well
once enough of them have and nobody else came for a while. It opens a store for the ranks of each round, so that
nothing of an earlier one is in it.
"""
from __future__ import annotations

import errno
import socket
import sys
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from globaltensor.cli.problem import Problem
from globaltensor.runtime.codec import decode_message, encode_message
from globaltensor.runtime.tcp_store import connect_store

LAST_CALL = 15.0                                     # seconds that a later round waits for hosts that may be lost
_PERIOD = 0.05                                       # seconds between looks: Ctrl-C ends a wait within it


class Rendezvous(RendezvousHandler):
    """The hosts of a job, ranked by `rank` where each names its own, else by their names.

    endpoint    HOST:PORT; the first launcher that can listen there keeps the store
    hosts       as many take part
    fewest      with as few the job goes on after a failure
    """

    def __init__(self, endpoint: str, run_id: str, hosts: int, fewest: int, rank: int | None = None, name: str = "",
                 timeout: float = 600) -> None:
        host, _, port = endpoint.rpartition(":")
        self.host, self.port, self.hosts, self.fewest = host.strip("[]"), int(port), hosts, fewest
        self.run_id, self.rank, self.name = run_id, rank, name or socket.gethostname()
        self.timeout = timedelta(seconds=timeout)
        self.store: Any = None
        self.keeper = False
        self.of_ranks: TCPStore | None = None        # keeps the store of the present round alive
        self.round = -1                              # the last one that this launcher took part in

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other launchers. TimeoutError where they do not come, ValueError where there are too many."""
        limit = time.monotonic() + self.timeout.total_seconds()
        if self.store is None:
            self.store = PrefixStore(self.run_id, self._open(limit))
        self.round = self.store.add("open round", 0)
        store: Any = PrefixStore(f"round {self.round}", self.store)
        own = store.add("arrivals", 1) - 1
        if own >= self.hosts:
            raise ValueError(f"{self.hosts} hosts have met already under the id {self.run_id!r}")
        store.set(f"host {own}", encode_message((self.rank, self.name), f"host {own}"))
        if self.keeper:
            self._close(store, limit)
        while not store.check(["closed"]):
            if time.monotonic() > limit:
                came = store.add("arrivals", 0)
                raise TimeoutError(f"{came} of {self.hosts} hosts came")
            time.sleep(_PERIOD)
        order, port = decode_message(store.get("closed"), f"round {self.round}")
        if own not in order:                         # it came just when the round was closed: there will be another
            return self.next_rendezvous()
        return RendezvousInfo(store, order.index(own), len(order), RendezvousStoreInfo(self.host, port))

    def _close(self, store: Any, limit: float) -> None:
        """Wait for the hosts of a round, decide on their order, and open a store for their ranks."""
        wanted = self.hosts if self.round == 0 else self.fewest
        last_call = time.monotonic() + (0 if self.round == 0 else LAST_CALL)
        while (came := self._came(store)) < wanted or came < self.hosts and time.monotonic() < last_call:
            if time.monotonic() > limit:
                raise TimeoutError(f"{came} of {wanted} hosts came")
            time.sleep(_PERIOD)
        own = [decode_message(store.get(f"host {i}"), f"host {i}") for i in range(came)]
        order = sorted(range(came), key=lambda i: (own[i][0] is None, own[i][0] or 0, own[i][1], i))
        listening = _listening(self.host, 0, self.rank == 0)
        self.of_ranks = connect_store(self.host, listening.getsockname()[1], self.timeout, is_master=True,
                                      listen_fd=listening.detach())
        self.store.add("open round", 1)
        store.set("closed", encode_message((order, self.of_ranks.port), f"round {self.round}"))

    def _came(self, store: Any) -> int:
        """How many hosts have said who they are, one after the other."""
        arrivals = min(store.add("arrivals", 0), self.hosts)
        return next((i for i in range(arrivals) if not store.check([f"host {i}"])), arrivals)

    def _open(self, limit: float) -> TCPStore:
        listening = self._listen()
        if listening is not None:
            self.keeper = True
            port = listening.getsockname()[1]
            if self.hosts == 1:
                self._check_own_address(port)
            return connect_store(self.host, port, self.timeout, is_master=True, listen_fd=listening.detach())
        warned = False
        while True:
            try:
                socket.create_connection((self.host, self.port), 5).close()
                break
            except OSError as error:
                if isinstance(error, socket.gaierror) and not warned:  # a pod's name may come later than this process
                    print(f"globaltensor: no address of {self.host!r} is known yet ({error.strerror}); if the name is "
                          "wrong, Ctrl-C ends this", file=sys.stderr, flush=True)
                    warned = True
                if time.monotonic() > limit:
                    place = f"{self.host}:{self.port}"
                    raise TimeoutError(f"nobody listens at {place}: {error.strerror or error}") from None
                time.sleep(_PERIOD)
        return connect_store(self.host, self.port, self.timeout)

    def _listen(self) -> socket.socket | None:
        """A socket at the endpoint; None where that is the address of another host, or another launcher has it."""
        if self.rank not in (None, 0):
            return None
        try:
            # The first host by its rank may stand behind an address that is not its own, as in Kubernetes.
            return _listening(self.host, self.port, self.rank == 0)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and self.hosts == 1:       # nobody else comes, who could listen there
                raise self._unreachable(error) from None
            if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE) and self.rank is None:
                return None
            raise

    def _check_own_address(self, port: int) -> None:
        """Raise Problem where this host does not reach itself: torch would try for as long as it waits for hosts."""
        try:
            socket.create_connection((self.host, port), 5).close()
        except OSError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: OSError) -> Problem:
        own = self.host == "127.0.0.1"
        return Problem(f"the ranks cannot meet at {self.host}\n  why: this host does not reach itself there "
                       f"({error.strerror or error})\n  try: " + (
                           "ip link set lo up; ip addr add 127.0.0.1/8 dev lo" if own else
                           "an --rdzv-endpoint of this host, or none"), 1)

    def get_backend(self) -> str:
        return "globaltensor"

    def get_run_id(self) -> str:
        return self.run_id

    @property
    def use_agent_store(self) -> bool:
        return True                                  # the keeper keeps the store of the ranks, too

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass                                         # the hosts of a job are as many as were asked for, to its end

    def num_nodes_waiting(self) -> int:
        """How many launchers have come to the next round: where any has, the others follow it there."""
        return 0 if self.store is None else int(PrefixStore(f"round {self.round + 1}", self.store).add("arrivals", 0))

    def shutdown(self) -> bool:
        return True


def _listening(host: str, port: int, anywhere: bool = False) -> socket.socket:
    """A socket that listens at an address of this host; if it is none, `anywhere` at that port or an OSError."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listening.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or not anywhere:
                raise
            listening.bind(("", port))
        listening.listen(2048)
    except OSError:
        listening.close()
        raise
    return listening
