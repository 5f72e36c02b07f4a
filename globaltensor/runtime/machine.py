"""What moving and computing cost: the numbers behind every choice of boxing and signature.

A `Machine` is a handful of rates. They need not be exact, only in proportion: a plan is chosen by comparing sums of
`latency + bytes / bandwidth`. All ranks use the same machine, since all must choose the same plan.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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

    def link(self, ranks: Sequence[int]) -> tuple[float, float]:
        """Latency and bandwidth of an exchange among `ranks`: the slowest link between them counts."""
        if self.hosts and len({self.hosts[r] for r in ranks}) > 1:
            return self.host_latency, self.host_bandwidth
        return self.latency, self.bandwidth


one_process = Machine(latency=1e-5, bandwidth=1e10)      # ranks that share a process copy through memory
shared_memory = Machine(latency=3e-6, bandwidth=2e10)   # processes of one host, as measured with two ranks
gloo = Machine(latency=1e-4, bandwidth=2e9)              # sockets on loopback, as measured with torch's gloo
nccl = Machine(latency=2e-5, bandwidth=1e11, memory=1e12, work=2e13, host_latency=3e-5, host_bandwidth=2e10)
