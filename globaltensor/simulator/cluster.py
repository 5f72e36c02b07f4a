"""A described cluster: what its devices and links can do. Nothing of it has to be here.

    dgx-a100, dgx-h100      known by name
    mine.json               one's own: a JSON object with the names of `Cluster`'s fields, `local` and `remote` being
                            {"latency": seconds, "bandwidth": bytes per second}

`efficiency` is the only number that is not on a data sheet: the share of `flops` that large matrix products reach when
nothing is waited for. With 0.66 for dgx-a100 the ten rows of arXiv:2104.04473, table 1, come out within 8% of what was
measured on up to 3,072 devices. That of dgx-h100 is an assumption: compare plans by it, not machines.
"""
from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from globaltensor.errors import PlacementError
from globaltensor.layouts.placement import placement
from globaltensor.runtime.machine import Machine


class ClusterError(PlacementError):
    """A cluster that is not known, or whose description is wrong."""


@dataclasses.dataclass(frozen=True)
class Link:
    """What one device receives over it: seconds to begin, and bytes per second."""

    latency: float
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts alike, each of `devices_per_host` devices; `local` links within a host, `remote` between hosts.

    flops    operations per second of a device in 16 bits, by its data sheet
    memory   bytes of a device; `memory_bandwidth` bytes per second
    hosts    how many there are (0: as many as are asked for)
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

    def machine(self, devices: int) -> Machine:
        """The rates that boxing plans are chosen by, for the first `devices` of the cluster."""
        if self.hosts and devices > self.hosts * self.devices_per_host:
            raise ClusterError(f"{devices} devices of {self.name}", f"it has {self.hosts} hosts with "
                               f"{self.devices_per_host} each", "a smaller dp, tp or pp")
        return Machine(self.local.latency, self.local.bandwidth, self.memory_bandwidth, self.flops * self.efficiency,
                       self.remote.latency, self.remote.bandwidth,
                       tuple(device // self.devices_per_host for device in range(devices)))


# NVLink and one HCA a GPU, in one direction: 300 and 450 GB/s in a host, 25 and 50 GB/s out of it.
KNOWN = {one.name: one for one in (
    Cluster("dgx-a100", 8, 312e12, 0.66, 80e9, 2.0e12, Link(1e-5, 2.4e11), Link(1.5e-5, 2.2e10)),
    Cluster("dgx-h100", 8, 989e12, 0.55, 80e9, 3.35e12, Link(1e-5, 3.6e11), Link(1.5e-5, 4.4e10)),
)}


def cluster(name: str) -> Cluster:
    """A known cluster by its name, or the one that a JSON file describes."""
    if name in KNOWN:
        return KNOWN[name]
    if not os.path.exists(name):
        near = difflib.get_close_matches(name.lower(), KNOWN, 2, 0.3)
        raise ClusterError(f"there is no cluster {name!r}", f"known are {', '.join(KNOWN)}, and there is no such file",
                           " or ".join(near) or "one of these, or a JSON file of your own")
    try:
        described = json.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise ClusterError(f"the cluster {name} could not be read", str(error), "a file with one JSON object") from None
    return _described(described, name)


def as_json(of: Cluster) -> str:
    """The text of a file that describes it: where to begin with one's own."""
    return json.dumps(dataclasses.asdict(of), indent=2)


def _described(found: Any, source: str) -> Cluster:
    fields = {field.name: field for field in dataclasses.fields(Cluster)}
    needed = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name != "name"]
    if not isinstance(found, dict):
        raise ClusterError(f"{source} describes no cluster", "it holds no JSON object", ", ".join(needed))
    for name in found:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1, 0.4)
            raise ClusterError(f"{source}: a cluster has no {name!r}", f"it has {', '.join(fields)}", *near)
    values: dict[str, Any] = {"name": Path(source).stem}
    for name, value in found.items():
        if name in ("local", "remote"):
            rates = value if isinstance(value, dict) else {}
            values[name] = Link(*(_positive(rates.get(rate), f"{name}.{rate}", source)
                                  for rate in ("latency", "bandwidth")))
        elif name == "name":
            values[name] = str(value)
        elif name in ("devices_per_host", "hosts"):
            values[name] = int(_positive(value, name, source, least=name == "devices_per_host"))
        else:
            values[name] = _positive(value, name, source)
    missing = [name for name in needed if name not in values]
    if missing:
        raise ClusterError(f"{source} does not say its {missing[0]}", f"a cluster has {', '.join(needed)}",
                           f'"{missing[0]}": ...')
    return Cluster(**values)


def _positive(value: Any, name: str, source: str, least: float = 0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        raise ClusterError(f"{source}: {name} is {value!r}", "it is a number"
                           + (f" from {least:g} on" if least else ", not negative"), f'"{name}": 1e12')
    if value == 0 and name.rpartition(".")[2] in ("bandwidth", "flops", "efficiency", "memory_bandwidth"):
        raise ClusterError(f"{source}: {name} is 0", "then nothing ever ends", f'"{name}": 1e12')
    return value


@contextmanager
def elsewhere() -> Iterator[None]:
    """Inside, placements are made of a cluster that is not here: nobody asks whether this world has their ranks."""
    asks = sys.modules[placement.__module__]._on_create
    kept = asks[:]
    asks.clear()
    try:
        yield
    finally:
        asks[:] = kept
