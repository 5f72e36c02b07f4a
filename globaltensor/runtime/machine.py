"""What moving and computing cost: the numbers behind every choice of boxing and signature.

A `Machine` is a handful of rates. They need not be exact, only in proportion: a plan is chosen by comparing sums of
`latency + bytes / bandwidth`. All ranks use the same machine, since all must choose the same plan.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from globaltensor.layouts.placement import placement
from globaltensor.layouts.recent import remembered


@dataclass(frozen=True)
class Machine:
    """Rates between ranks of one host and, where `hosts` says which host each rank is on, between hosts.

    latency, host_latency      seconds to start one exchange, within a host and between hosts
    bandwidth, host_bandwidth  bytes per second that one rank receives
    memory                     bytes per second that one rank copies in its own memory
    work                       elementary operations per second of one rank (a multiply-add, an element visited)
    """

    latency: float
    bandwidth: float
    memory: float = 2e10
    work: float = 5e10
    host_latency: float = 5e-5
    host_bandwidth: float = 1e9
    hosts: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, as `hosts` has an entry per rank and every price is looked up by machine."""
        return hash((self.latency, self.bandwidth, self.memory, self.work, self.host_latency, self.host_bandwidth,
                     self.hosts))

    def link(self, *where: placement) -> tuple[float, float]:
        """Latency and bandwidth of an exchange among the ranks of placements: the slowest link between them counts."""
        if self.hosts and _spans_hosts(self, where):
            return self.host_latency, self.host_bandwidth
        return self.latency, self.bandwidth

    def link_along(self, where: placement, axes: tuple[int, ...]) -> tuple[float, float]:
        """The same among ranks of a placement that differ on these axes only."""
        if self.hosts and _lead_to_other_hosts(self, where, axes):
            return self.host_latency, self.host_bandwidth
        return self.latency, self.bandwidth


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
nccl = Machine(latency=2e-5, bandwidth=1e11, memory=1e12, work=2e13, host_latency=3e-5, host_bandwidth=2e10)
TRANSPORTS = {"one process": one_process, "shared memory": shared_memory, "gloo": gloo, "nccl": nccl}
