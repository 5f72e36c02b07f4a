"""What moving and computing cost: the numbers behind every choice of boxing and signature.

A `Machine` is a handful of rates. They need not be exact, only in proportion: a plan is chosen by comparing sums of
`latency + bytes / bandwidth`. All ranks use the same machine, since all must choose the same plan.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import log2, prod

from globaltensor.layouts.placement import placement
from globaltensor.layouts.recent import remembered


@dataclass(frozen=True)
class Machine:
    """Rates between ranks of one host and, where `hosts` says which host each rank is on, between hosts.

    latency, host_latency      seconds to start one exchange, within a host and between hosts
    bandwidth, host_bandwidth  bytes per second that one rank receives
    memory                     bytes per second that one rank copies in its own memory
    work                       elementary operations per second of one rank (a multiply-add, an element visited)
    in_rounds                  what n ranks exchange takes log2(n) rounds, a latency each: the least where a rank has
                               one partner at a time (doi:10.1177/1094342005051521). Without it a rank reads from
                               all others at once, as from shared memory
    """

    latency: float
    bandwidth: float
    memory: float = 2e10
    work: float = 5e10
    host_latency: float = 5e-5
    host_bandwidth: float = 1e9
    hosts: tuple[int, ...] = ()
    in_rounds: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, as `hosts` has an entry per rank and every price is looked up by machine."""
        return hash((self.latency, self.bandwidth, self.memory, self.work, self.host_latency, self.host_bandwidth,
                     self.hosts, self.in_rounds))

    def link(self, *where: placement) -> tuple[float, float]:
        """Latency and bandwidth of an exchange among the ranks of placements: the slowest link between them counts."""
        # from one placement to another, each rank has its partner
        ranks = prod(where[0].shape) if len(set(where)) == 1 else 1
        return self._link_of(ranks, bool(self.hosts) and _spans_hosts(self, where))

    def link_along(self, where: placement, axes: tuple[int, ...]) -> tuple[float, float]:
        """The same among ranks of a placement that differ on these axes only."""
        ranks = prod(where.shape[axis] for axis in axes)
        return self._link_of(ranks, bool(self.hosts) and _lead_to_other_hosts(self, where, axes))

    def _link_of(self, ranks: int, across: bool) -> tuple[float, float]:
        """The same among so many ranks, of one host or of several."""
        latency, bandwidth = (self.host_latency, self.host_bandwidth) if across else (self.latency, self.bandwidth)
        return latency * max(log2(ranks), 1) if self.in_rounds else latency, bandwidth


@lru_cache(1_000)
def _spans_hosts(machine: Machine, where: tuple[placement, ...]) -> bool:
    return len({machine.hosts[rank] for of in where for rank in of.flat}) > 1


@remembered
def _lead_to_other_hosts(machine: Machine, where: placement, axes: tuple[int, ...]) -> bool:
    first: dict[tuple[int, ...], int] = {}           # coordinates on the other axes -> host
    return any(machine.hosts[rank] != first.setdefault(tuple(-1 if axis in axes else i for axis, i in enumerate(at)),
                                                       machine.hosts[rank]) for rank, at in where.coords.items())


one_process = Machine(latency=1e-5, bandwidth=1e10)      # ranks that share a process copy through memory
shared_memory = Machine(latency=3e-6, bandwidth=2e10)   # processes of one host, as measured with two ranks
gloo = Machine(latency=1e-4, bandwidth=2e9)              # sockets on loopback, as measured with torch's gloo
nccl = Machine(latency=2e-5, bandwidth=1e11, memory=1e12, work=2e13, host_latency=3e-5, host_bandwidth=2e10,
               in_rounds=True)
TRANSPORTS = {"one process": one_process, "shared memory": shared_memory, "gloo": gloo, "nccl": nccl}
