"""A cluster by description: what its devices and links can do. None of it has to exist here.

    dgx-a100, dgx-h100      known by name
    mine.json               your own: a JSON object with the names of `Cluster`'s fields, `local` and `remote` being
                            {"latency": seconds, "bandwidth": bytes per second}, and `kernels` a list of
                            {"kind": "product", "start": seconds, "operation": seconds, "byte": seconds}

groups.py has clusters of several kinds of hosts.

Of the known ones `efficiency` is the only number that is not on a data sheet: the share of `flops` that large matrix
products reach. With 0.68 for dgx-a100 the ten rows of arXiv:2104.04473, table 1, are reproduced within 8% of the times
measured on up to 3,072 devices. That of dgx-h100 is an assumption: use it to compare plans, not machines. What small
models spend besides (`kernel_launch` and what follows it) is none of them: `globaltensor calibrate` finds it, and the
rates that programs reach, from steps that were measured.
"""
from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from globaltensor.errors import PlacementError
from globaltensor.layouts import placement as placements
from globaltensor.runtime.machine import TRANSPORTS, Machine


class ClusterError(PlacementError):
    """A cluster that is not known, or whose description is wrong."""


@dataclasses.dataclass(frozen=True)
class Link:
    """What one device receives over it: seconds of latency, and bytes per second. What n GPUs exchange takes log2(n)
    latencies (`Machine.in_rounds`)."""

    latency: float
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class KernelRate:
    """Seconds of an op of a kind: so many until it has started, and for each operation, and for each byte that it reads
    or writes."""

    kind: str
    start: float
    operation: float
    byte: float

    def slower(self, times: float) -> KernelRate:
        """One that takes so many times longer."""
        return KernelRate(self.kind, *(rate * times for rate in (self.start, self.operation, self.byte)))


KERNEL_KINDS = ("product", "contraction", "batched", "convolution", "attention", "curve", "pointwise", "normalization",
                "batch_norm", "reduction", "index", "view", "accumulation", "gather", "full", "selective",
                "optimizer")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Identical hosts, each of `devices_per_host` devices; `local` links within a host, `remote` between hosts.

    flops    operations per second of a device in 16 bits, by its data sheet
    memory   bytes of a device; `memory_bandwidth` in bytes per second
    hosts    how many there are (0: as many as needed)

    kernel_launch          seconds that a host takes to start a kernel: devices that compute for less wait for it
    micro_batch_overhead   seconds that a rank spends on each micro-batch besides
    step_overhead          seconds that a step takes besides
    cores                  of a host, which its devices share, where these are processes on a CPU: more that are busy
                           at once than there are cores take turns (0: each device computes by itself)
    transport              by whose rates the library plans boxings when it runs there, as it knows no others then:
                           one of `TRANSPORTS`; so the bytes are those that it moves
    kernels                what ops of each kind take, where that was measured; else an op takes the longest of its
                           operations, its bytes and `kernel_launch`, and a view nothing. What the host does
                           besides is a "gather", for a tensor that ZeRO gathers, and "full" or "selective", for each op
                           of forward in a block that recomputes so
    """

    name: str
    devices_per_host: int
    flops: float
    efficiency: float
    memory: float
    memory_bandwidth: float
    local: Link
    remote: Link
    hosts: int = 0
    kernel_launch: float = 0.0
    micro_batch_overhead: float = 0.0
    step_overhead: float = 0.0
    kernels: tuple[KernelRate, ...] = ()
    transport: str = "nccl"
    cores: int = 0

    def turns(self, busy: float) -> float:
        """How many times longer everything takes where so many devices are busy at once."""
        return max(min(busy, self.devices_per_host) / self.cores, 1.0) if self.cores else 1.0

    def slowed(self, times: float) -> Cluster:
        """The cluster as a device sees it for which everything takes so many times longer."""
        if times == 1:
            return self
        local, remote = (Link(one.latency * times, one.bandwidth / times) for one in (self.local, self.remote))
        kernels = tuple(one.slower(times) for one in self.kernels)
        return dataclasses.replace(
            self, flops=self.flops / times, memory_bandwidth=self.memory_bandwidth / times, local=local, remote=remote,
            kernel_launch=self.kernel_launch * times, micro_batch_overhead=self.micro_batch_overhead * times,
            step_overhead=self.step_overhead * times, kernels=kernels, cores=0)

    @cached_property
    def rates_of_kinds(self) -> np.ndarray:
        """Start, operation and byte of each of `KERNEL_KINDS`; those that were not measured are as pointwise ops, and
        contractions as products."""
        known = {one.kind: (one.start, one.operation, one.byte) for one in self.kernels}
        like = {"contraction": "product"}
        return np.array([known.get(kind, known.get(like.get(kind, "pointwise"), (0.0, 0.0, 0.0)))
                         for kind in KERNEL_KINDS])

    def op_seconds(self, kinds: np.ndarray, operations: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Of ops of these kinds (places in `KERNEL_KINDS`), which do so many operations on so many bytes."""
        if self.kernels:
            start, operation, byte = self.rates_of_kinds[kinds].T
            return start + operation * operations + byte * nbytes
        longest = np.maximum(operations / (self.flops * self.efficiency), nbytes / self.memory_bandwidth)
        return np.where(kinds == KERNEL_KINDS.index("view"), 0.0, np.maximum(longest, self.kernel_launch))

    def machine(self, devices: int) -> Machine:
        """The rates by which boxings are planned, for the first `devices` of the cluster."""
        if self.hosts and devices > self.hosts * self.devices_per_host:
            raise ClusterError(f"{devices} devices of {self.name}",
                               f"it has {self.hosts} hosts with {self.devices_per_host} each",
                               f"--devices {self.hosts * self.devices_per_host}, or a smaller dp, tp or pp")
        return Machine(self.local.latency, self.local.bandwidth, self.memory_bandwidth, self.flops * self.efficiency,
                       self.remote.latency, self.remote.bandwidth,
                       tuple(device // self.devices_per_host for device in range(devices)),
                       TRANSPORTS[self.transport].in_rounds)

    def transport_rates(self, devices: int) -> Machine:
        """The rates by which the library itself plans boxings when it runs there."""
        return dataclasses.replace(TRANSPORTS[self.transport], hosts=self.machine(devices).hosts)


# By data sheet NVLink has 300 and 450 GB/s a direction, one HCA per GPU 25 and 50 GB/s; here about 80% to 90% of that.
KNOWN = {one.name: one for one in (
    Cluster("dgx-a100", 8, 312e12, 0.68, 80e9, 2.0e12, Link(1e-5, 2.4e11), Link(1.5e-5, 2.2e10)),
    Cluster("dgx-h100", 8, 989e12, 0.55, 80e9, 3.35e12, Link(1e-5, 3.6e11), Link(1.5e-5, 4.4e10)),
)}


def cluster(name: str) -> Cluster:
    """A known cluster by its name, or the one that a JSON file describes."""
    if name in KNOWN:
        return KNOWN[name]
    if not os.path.exists(name):
        near = difflib.get_close_matches(name.lower(), KNOWN, 2, 0.3)
        raise ClusterError(f"there is no cluster {name!r}",
                           f"the known ones are {', '.join(KNOWN)}, and there is no such file",
                           " or ".join(near) or "one of these, or a JSON file of your own")
    try:
        described = json.loads(Path(name).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ClusterError(f"the cluster {name} could not be read", str(error), "a file with one JSON object") from None
    return cluster_from_json(described, name)


def as_json(of: Cluster) -> str:
    """The text of a file that describes it: a starting point for your own."""
    return json.dumps(dataclasses.asdict(of), indent=2)


def cluster_from_json(described: Any, source: str) -> Cluster:
    fields = {field.name: field for field in dataclasses.fields(Cluster)}
    required = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name != "name"]
    if not isinstance(described, dict):
        raise ClusterError(f"{source} describes no cluster", "it is not a JSON object", ", ".join(required))
    if "groups" in described:
        raise ClusterError(f"{source} lists groups of hosts", "what is asked for here is one kind of host",
                           "one of the groups, in a file of its own")
    for name in described:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1, 0.4)
            raise ClusterError(f"{source}: a cluster has no {name!r}", f"it has {', '.join(fields)}", *near)
    values: dict[str, Any] = {"name": Path(source).stem}
    for name, value in described.items():
        if name in ("local", "remote"):
            rates = value if isinstance(value, dict) else {}
            values[name] = Link(*(checked_number(rates.get(rate), f"{name}.{rate}", source)
                                  for rate in ("latency", "bandwidth")))
        elif name == "name":
            values[name] = str(value)
        elif name == "transport":
            values[name] = _transport_of(value, source)
        elif name == "kernels":
            values[name] = _kernels_of(value, source)
        elif name in ("devices_per_host", "hosts", "cores"):
            values[name] = int(checked_number(value, name, source, least=name == "devices_per_host"))
        else:
            values[name] = checked_number(value, name, source)
    missing = [name for name in required if name not in values]
    if missing:
        raise ClusterError(f"{source} lacks {missing[0]!r}", f"a cluster has {', '.join(required)}",
                           f'"{missing[0]}": ...')
    return Cluster(**values)


def _transport_of(value: Any, source: str) -> str:
    if not isinstance(value, str) or value not in TRANSPORTS:
        raise ClusterError(f"{source}: transport is {value!r}", f"it is one of {', '.join(TRANSPORTS)}",
                           '"transport": "nccl"')
    return value


def _kernels_of(value: Any, source: str) -> tuple[KernelRate, ...]:
    rates = ("start", "operation", "byte")
    for one in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(one, dict) or one.get("kind") not in KERNEL_KINDS or one.keys() - {"kind", *rates}:
            raise ClusterError(f"{source}: a kernel is {one!r:.80}", f"its kind is one of {', '.join(KERNEL_KINDS)}",
                               '{"kind": "product", "start": 1e-5, "operation": 1e-11, "byte": 0}')
    return tuple(KernelRate(one["kind"], *(checked_number(one.get(rate), f"kernels.{one['kind']}.{rate}", source)
                                           for rate in rates)) for one in value)


def checked_number(value: Any, name: str, source: str, least: float = 0) -> float:
    example = f'"{name}": {_EXAMPLES.get(name.rpartition(".")[2], "1e12")}'
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        raise ClusterError(f"{source}: {name} is {value!r}", f"it is a number, {least:g} or more", example)
    if value == 0 and name.rpartition(".")[2] in ("bandwidth", "flops", "efficiency", "memory_bandwidth"):
        raise ClusterError(f"{source}: {name} is 0", "then no transfer and no action ever ends", example)
    if name == "efficiency" and value > 1:
        raise ClusterError(f"{source}: efficiency is {value!r}", "it is the share of flops that large products reach, "
                           "at most 1", example)
    return value


_EXAMPLES = {"devices_per_host": "8", "hosts": "1", "cores": "8", "efficiency": "0.5", "latency": "1e-5",
             "kernel_launch": "1e-5", "micro_batch_overhead": "1e-3", "step_overhead": "1e-3", "start": "1e-5",
             "operation": "1e-11", "byte": "1e-12"}


@contextmanager
def hypothetical_placements() -> Iterator[None]:
    """Inside, placements may name ranks and devices that this world does not have: those of a described cluster. What
    is run on them is run for their first rank, and no other."""
    checks, outer = placements._on_create, placements._hypothetical
    kept = checks[:]
    checks.clear()
    placements._hypothetical = True
    try:
        yield
    finally:
        checks[:], placements._hypothetical = kept, outer
