"""The world: which ranks there are, which of them this process drives, and the device of each.

A *rank* is one participant with one device; a *process* drives one rank (torchrun and `globaltensor run`) or all of
them (the single process of a notebook or a test). The world comes to life with the first placement, or by `init()`
(start.py).
"""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from globaltensor.errors import PlacementError, counted
from globaltensor.layouts import placement as placements
from globaltensor.layouts.placement import placement
from globaltensor.runtime.accelerators import GLOO, accelerator, accelerator_count
from globaltensor.runtime.launchers import local_rank
from globaltensor.runtime.machine import Machine
from globaltensor.tracebacks import api_boundary


@dataclass
class World:
    """Who takes part: `size` ranks, of which this process drives `local_ranks`, in the order of their numbers."""

    size: int
    local_ranks: tuple[int, ...]
    machine: Machine
    transport: str
    control: dist.ProcessGroup | None = None         # takes tensors on the CPU; None is the default group
    timeout: timedelta = timedelta(seconds=1800)     # after which a rank that waits for another raises
    engine: str = GLOO                               # of torch.distributed, for tensors on accelerators
    host_peers: frozenset[int] = frozenset()         # ranks of this host whose memory this process can reach
    device_of: dict[tuple[str, int], torch.device] = field(default_factory=dict)

    @property
    def staged(self) -> bool:
        """Tensors on an accelerator are sent by way of the CPU."""
        return self.engine == GLOO

    @property
    def single_process(self) -> bool:
        """One process drives all ranks."""
        return len(self.local_ranks) == self.size

    @property
    def rank(self) -> int:
        """The first rank that this process drives."""
        return self.local_ranks[0]

    @property
    def used_devices(self) -> set[torch.device]:
        """The accelerators on which this process has kept shards. It may have none, on a host that has some."""
        return {device for device in self.device_of.values() if device.type not in ("cpu", "meta")}

    def device(self, type: str, rank: int) -> torch.device:
        """The device on which this process keeps the shards of `rank`."""
        device = self.device_of.get((type, rank))
        if device is None:
            device = self.device_of[type, rank] = _device(self, type, rank)
        return device


_world: World | None = None
_start_world: Callable[[], World]                    # set by start.py: starting needs exchanges, which need a world


def world() -> World:
    """The world, started if it was not."""
    return _world if _world is not None else _start_world()


def started() -> World | None:
    """The world, or None before it was started."""
    return _world


def begin(new: World) -> None:
    """From here on this is the world."""
    global _world
    _world = new


def start_with(start: Callable[[], World]) -> None:
    """How the world starts where nothing has started it."""
    global _start_world
    _start_world = start


def local_ranks_of(where: placement) -> tuple[int, ...]:
    """The ranks of a placement that this process drives, in the order of their numbers. Of one that is described only,
    the first stands for all."""
    if where.hypothetical:
        return where.flat[:1]
    return tuple(r for r in world().local_ranks if r in where.coords)


@api_boundary
def rank() -> int:
    """The first rank that this process drives, so that `if gt.rank() == 0: print(...)` prints once.

    Not collective, once the world has started; before, it starts it.
    """
    return world().rank


@api_boundary
def world_size() -> int:
    """How many ranks there are. Not collective, once the world has started; before, it starts it."""
    return world().size


def shared_gpu() -> bool:
    """Opt-in: several ranks on one GPU, for trying things out; bytes then go through the host."""
    return os.environ.get("GLOBALTENSOR_SHARE_GPU", "") not in ("", "0")


def _device(of: World, type: str, rank: int) -> torch.device:
    if type in ("cpu", "meta"):
        return torch.device(type)
    count = torch.get_device_module(type).device_count()
    index = rank if of.single_process else local_rank(rank)
    if index >= count and not shared_gpu():
        raise PlacementError(f"rank {rank} has no {type} device of its own", f"this host has {count}",
                             "fewer ranks, or GLOBALTENSOR_SHARE_GPU=1 to put several on one")
    return torch.device(type, index % count)


def device_here(type: str) -> torch.device:
    """The device that tensors name of which this process has no part: as those of which it has one. torch groups by
    device what it clips and steps, and all ranks shall form the same groups."""
    if type in ("cpu", "meta") or world().single_process:
        return torch.device(type)
    return torch.device(type, local_rank(world().rank) % max(accelerator_count(), 1))


def has_devices(type: str) -> bool:
    """Has this host devices of that type?"""
    try:
        return type in ("cpu", "meta") or torch.get_device_module(type).is_available()
    except (RuntimeError, AttributeError):           # a type that this torch does not know or was not built for
        return False


def _check_placement(created: placement) -> None:
    """Every new placement: are its ranks in the world, is its device type here?"""
    if created.type not in ("cpu", "meta"):
        if not has_devices(created.type):
            usable = accelerator() or "cpu"
            raise PlacementError(f"this host has no device of type {created.type!r}",
                                 "torch sees the CPU only" if usable == "cpu" else f"torch sees {usable} devices",
                                 f'gt.placement("{usable}", {list(created.flat)})')
    size, lowest, highest = world_size(), min(created.flat), max(created.flat)
    if lowest < 0:
        raise PlacementError(f"rank {lowest} is none", f"the ranks are 0 to {size - 1}", "other ranks, from 0 on")
    if highest >= size:
        why, fix = f"its ranks are 0 to {size - 1}", f"globaltensor run -n {highest + 1} ..."
        if not (dist.is_available() and dist.is_initialized()):
            fix = f"GLOBALTENSOR_RANKS={highest + 1}, or gt.init({highest + 1}) before anything else"
        elif size == 1 and "WORLD_SIZE" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
            why, fix = f"{why}: WORLD_SIZE=1 is set, perhaps left over", f"{fix}, or: unset RANK WORLD_SIZE"
        raise PlacementError(f"rank {highest} is outside the world of {counted(size, 'rank')}", why,
                             f"other ranks, or start more: {fix}")


placements._on_create.append(_check_placement)
placements._world_size = world_size
