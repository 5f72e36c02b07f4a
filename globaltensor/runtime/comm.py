"""Moving bytes between ranks, and knowing who they are.

A *rank* is one participant with one device; a *process* drives one rank (torchrun and `globaltensor run`) or all of
them (the lone process of a notebook or a test). Ranks of one process reach each other's memory directly; between
processes one primitive moves everything, `exchange`: each process hands a flat buffer to some others and gets one
from some others. Nothing here knows what an sbp is.

The world comes to life with the first placement, or by `init()`. Under a launcher (RANK and WORLD_SIZE are set) it
is torch.distributed's default group, which a user may also have started already.
"""
from __future__ import annotations

import atexit
import os
import pickle
import re
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from globaltensor.errors import DisagreementError, PlacementError, TransportError, where
from globaltensor.layouts import placement as placements
from globaltensor.layouts.placement import placement
from globaltensor.runtime import deadlock, native
from globaltensor.runtime import machine as machines
from globaltensor.runtime.machine import Machine
from globaltensor.runtime.native import face

TIMEOUT = timedelta(seconds=300)


@dataclass
class World:
    """Who takes part: `size` ranks, of which this process drives `driven`, in the order of their numbers."""

    size: int
    driven: tuple[int, ...]
    machine: Machine
    transport: str
    control: dist.ProcessGroup | None = None         # takes tensors on the CPU; None is the default group
    staged: bool = False                             # tensors on a GPU travel by way of the CPU
    neighbours: frozenset[int] = frozenset()         # ranks of this host whose memory this process can reach
    device_of: dict[tuple[str, int], torch.device] = field(default_factory=dict)

    @property
    def lone(self) -> bool:
        """One process drives all ranks."""
        return len(self.driven) == self.size

    @property
    def rank(self) -> int:
        """The first rank that this process drives."""
        return self.driven[0]

    def device(self, type: str, rank: int) -> torch.device:
        """The device on which this process keeps the shards of `rank`."""
        found = self.device_of.get((type, rank))
        if found is None:
            found = self.device_of[type, rank] = _device(self, type, rank)
        return found


_world: World | None = None


def world() -> World:
    """The world, started if it was not."""
    return _world if _world is not None else init()


def rank() -> int:
    """The first rank that this process drives, so that `if gt.rank() == 0: print(...)` prints once."""
    return world().rank


def world_size() -> int:
    """How many ranks there are."""
    return world().size


def init(ranks: int | None = None, *, timeout: float | None = None, machine: Machine | None = None) -> World:
    """Start the world. Optional: the first placement does it.

    ranks     how many ranks a lone process drives (default: GLOBALTENSOR_RANKS, else the GPUs there are, else 8);
              under a launcher the launcher says, and a different number is an error
    timeout   seconds after which a rank that waits for another raises (default 300)
    machine   the rates to plan with (default: by transport)

    Raises TransportError where the world was started differently before, or the launcher's settings are no use.
    """
    global _world
    if _world is not None:
        if ranks not in (None, _world.size):
            raise TransportError(f"the world has {_world.size} ranks already, not {ranks}",
                                 "the first placement starts it", "gt.init(...) before anything else")
        return _world
    if dist.is_available() and (dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= os.environ.keys()):
        _world = _processes(patience := timedelta(seconds=timeout) if timeout else TIMEOUT, machine)
        if _world.size > 1:
            _meet(_world, patience, machine)
        if ranks not in (None, _world.size):
            raise TransportError(f"the launcher started {_world.size} ranks, the program asks for {ranks}",
                                 fix=f"globaltensor run -n {ranks} ...")
    else:
        gpus = torch.cuda.device_count() if ranks is None and "GLOBALTENSOR_RANKS" not in os.environ else 0
        text = os.environ.get("GLOBALTENSOR_RANKS", "") if ranks is None else str(ranks)
        if text and not (text.isdecimal() and int(text) > 0):
            raise TransportError(f"{text!r} is not a number of ranks", fix="GLOBALTENSOR_RANKS=4")
        size = int(text) if text else gpus or 8
        _world = World(size, tuple(range(size)), machine or machines.one_process, "memory of one process")
    native.say_if_slow()
    return _world


def _processes(timeout: timedelta, machine: Machine | None) -> World:
    """One rank per process, over torch.distributed: NCCL for GPUs, gloo for the rest."""
    if not dist.is_initialized():
        _start_torch(timeout)
    size = dist.get_world_size()
    hosts = tuple(r // _local(size) for r in range(size)) if _local(size) < size else ()
    nccl = "nccl" in (backends := dist.get_backend_config())     # such as "cpu:gloo,cuda:nccl"
    base = machine or (machines.nccl if nccl else machines.gloo)
    if hosts and not base.hosts:
        base = Machine(**{**base.__dict__, "hosts": hosts})
    control = None if "cpu:" in backends else dist.new_group(backend="gloo", timeout=timeout)
    return World(size, (dist.get_rank(),), base, f"torch.distributed ({'nccl' if nccl else 'gloo'})", control, not nccl)


def _local(size: int) -> int:                        # ranks per host
    return int(os.environ.get("LOCAL_WORLD_SIZE", size))


def _meet(found: World, timeout: timedelta, machine: Machine | None) -> None:
    """Agree on a random state, look out for deadlocks, share memory with the ranks of this host where all can."""
    torch.set_rng_state(broadcast_object(torch.get_rng_state(), 0, "starting"))      # else each has one by chance
    deadlock.watch(dist.distributed_c10d._get_default_store(), found.rank, found.size)
    first = found.rank - found.rank % (local := _local(found.size))
    here = range(first, min(first + local, found.size))
    address = face.open(found.rank - first, len(here), timeout.total_seconds()) if face is not None else None
    said = _tell(address, "starting")
    if None in said or len(here) == 1:
        if address is not None:
            face.close()
        return
    face.connect(said[first:first + len(here)])
    face.on_waiting(deadlock.enter, deadlock.leave, deadlock.check)
    found.neighbours = frozenset(here)
    found.transport = f"shared memory, then {found.transport}" if len(here) < found.size else "shared memory"
    if machine is None and "nccl" not in found.transport:
        found.machine = Machine(**{**machines.shared_memory.__dict__, "hosts": found.machine.hosts})
    face.serve_memory()
    atexit.register(face.close)
    hook = sys.excepthook

    def leaving(kind: type, error: BaseException, trace: Any) -> None:
        face.leave(f"raised {kind.__name__}")
        hook(kind, error, trace)

    sys.excepthook = leaving


def _start_torch(timeout: timedelta) -> None:
    gpus = torch.cuda.is_available() and not _shared_gpu()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=timeout)
    except (ValueError, RuntimeError) as error:
        raise TransportError("the ranks could not find each other", _reason(error),
                             "globaltensor run -n N program.py, or torchrun") from None
    atexit.register(_end_torch)


def _end_torch() -> None:
    if dist.is_initialized():
        time.sleep(0.05)                             # for the threads of the program's own collectives: see _from_all
        dist.destroy_process_group()


def _shared_gpu() -> bool:
    """Opt-in: several ranks on one GPU, for trying things out; bytes then go through the host."""
    return os.environ.get("GLOBALTENSOR_SHARE_GPU", "") not in ("", "0")


def _device(of: World, type: str, rank: int) -> torch.device:
    if type in ("cpu", "meta"):
        return torch.device(type)
    count = torch.get_device_module(type).device_count()
    index = rank if of.lone else int(os.environ.get("LOCAL_RANK", rank))
    if index >= count and not _shared_gpu():
        raise PlacementError(f"rank {rank} has no {type} device of its own", f"there are {count} on this host",
                             "fewer ranks, or GLOBALTENSOR_SHARE_GPU=1 to put several on one")
    return torch.device(type, index % count)


def _check(created: placement) -> None:
    """Every new placement: are its ranks in the world, is its device type here?"""
    if created.type not in ("cpu", "meta"):
        try:
            there = torch.get_device_module(created.type).is_available()
        except (RuntimeError, AttributeError):
            there = False
        if not there:
            raise PlacementError(f"no device of type {created.type!r} is there", "torch sees none on this host",
                                 f'gt.placement("cpu", {list(created.flat)})')
    size = world_size()
    for r in created.flat:
        if not 0 <= r < size:
            fix = f"GLOBALTENSOR_RANKS={r + 1}" if world().lone else f"globaltensor run -n {r + 1} ..."
            raise PlacementError(f"rank {r} is outside the world of {size} ranks", f"its ranks are 0 to {size - 1}",
                                 f"other ranks, or start more: {fix}")


placements._on_create.append(_check)
placements._world_size = world_size


def exchange(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], what: str = "a boxing",
             tag: int = 0) -> None:
    """Send each flat buffer to its rank and fill each incoming one from its rank; every message between two ranks
    is matched by order. Collective among those who take part, free for the others. One round.

    `what` it is for goes into errors. `tag` must be the same on both sides, or no message is taken for another.
    Raises TransportError where a peer died or did not come in time.
    """
    staged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    if world().staged:
        outgoing = {r: t.cpu() for r, t in outgoing.items()}
        staged = {r: (t, torch.empty_like(t, device="cpu")) for r, t in incoming.items() if t.device.type != "cpu"}
    moves = [(dist.irecv, staged[r][1] if r in staged else t, r) for r, t in incoming.items()]
    moves += [(dist.isend, t, r) for r, t in outgoing.items()]
    if not moves:
        return
    group = world().control if moves[0][1].device.type == "cpu" else None
    ops = [dist.P2POp(move, t, r, group, tag) for move, t, r in moves]
    with _together(what, tuple(sorted({*outgoing, *incoming})), tag) as lost:
        for op, work in zip(ops, dist.batch_isend_irecv(ops)):
            lost[:] = [op.peer]
            work.wait()
    for target, source in staged.values():
        target.copy_(source)


def post(buffer: torch.Tensor, peer: int, receive: bool = False) -> dist.Work:
    """Begin to send a flat buffer on the CPU to a rank, or to fill it from there, and wait for nothing. Messages of two
    ranks are matched by order. The buffer must be left alone until `wait` says so."""
    move = dist.irecv if receive else dist.isend
    return move(buffer, peer, group=world().control, tag=_POST)


def wait(works: Mapping[int, dist.Work], what: str, peers: tuple[int, ...]) -> None:
    """Until what was posted has arrived. `works` by rank; `peers` are all that take part in the same `what`.

    Raises TransportError where a peer died or did not come in time.
    """
    with _together(what, peers, zlib.crc32(what.encode()) | 8) as lost:
        for peer, work in works.items():
            lost[:] = [peer]
            work.wait()


_apart = False


@contextmanager
def apart() -> Iterator[None]:
    """Inside, the processes do different things: what an op has to say it says to nobody."""
    global _apart
    before, _apart = _apart, True
    try:
        yield
    finally:
        _apart = before


@contextmanager
def _together(what: str, peers: tuple[int, ...], tag: int) -> Iterator[list[int]]:
    """Around whatever waits for other processes: who waits for whom is known, and what goes wrong is told.

    The list is the peers that are to blame where it goes wrong; whoever knows better changes it.
    """
    lost = list(peers)
    try:
        with deadlock.waiting(what, peers, tag):
            yield lost
    except RuntimeError as error:
        raise deadlock.found() or TransportError(
            f"rank {rank()} lost touch with {deadlock.names(lost)} in {what}",
            f"{_reason(error)}: a rank ended, or runs another program",
            "look at the first error of the other ranks") from None


def _reason(error: Exception) -> str:
    """The first sentence of what torch says, without the place in its source."""
    return re.sub(r"^\[\S+\.(cc|cpp|h):\d+\] ", "", str(error).splitlines()[0]).split(". ")[0]


def _everyone() -> tuple[int, ...]:
    return tuple(r for r in range(world().size) if r != rank())


_AGREE, _TELL, _BROADCAST, _POST = 1, 2, 3, 4       # tags of what is not an exchange


def agree(what: str) -> None:
    """Check that all processes say the same `what` here, with one small all-gather; nothing in a lone process.

    Raises DisagreementError on every rank, which shows who says what.
    """
    if world().lone or _apart:
        return
    mine = torch.tensor([zlib.crc32(what.encode()), len(what)], device="cpu")
    said = _from_all(mine, [2] * world().size, what, _AGREE)
    if all(torch.equal(mine, other) for other in said):
        return
    texts = _tell(f"{what}   at {where()}", what)
    rows = "".join(f"\n    rank {r}: {text}" for r, text in enumerate(texts))
    raise DisagreementError("the ranks disagree about what to create" + rows, "every rank runs the same program",
                            "create the same tensors in the same order everywhere, the same seed before random ones")


def _tell(value: object, what: str) -> list[Any]:
    """Every process's `value`, in the order of ranks."""
    mine = as_bytes(value)
    sizes = _from_all(torch.tensor([len(mine)], device="cpu"), [1] * world().size, what, _TELL)
    return [from_bytes(t) for t in _from_all(mine, [int(n) for n in sizes], what, _TELL)]


def _from_all(mine: torch.Tensor, sizes: Sequence[int], what: str, tag: int) -> list[torch.Tensor]:
    """What every process says, in the order of ranks, each straight from the one that says it.

    Not by gloo's collectives: their threads may still hold what they moved when the interpreter ends, and a thread
    that wants something of an interpreter that has gone ends the process by abort.
    """
    said = [mine if r == rank() else mine.new_empty(n) for r, n in enumerate(sizes)]
    exchange(dict.fromkeys(_everyone(), mine), {r: said[r] for r in _everyone()}, what, tag)
    return said


def as_bytes(value: object) -> torch.Tensor:
    """An object as a flat tensor of bytes; `from_bytes` makes it again."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def from_bytes(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def agree_on(t: torch.Tensor, what: str) -> None:
    """Check that all processes hold the same tensor `t`."""
    if not world().lone:
        agree(f"{what}: {list(t.shape)}, {t.dtype}, of values with checksum {checksum(t):08x}")


def checksum(t: torch.Tensor) -> int:
    """A number that tells tensors of different values apart; reads them at about a gigabyte a second."""
    flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
    found = 0
    for part in flat.split(1 << 26):
        found = zlib.crc32(part.cpu().numpy(), found)
    return found


def checking() -> bool:
    """GLOBALTENSOR_CHECK=1: verify that a plain tensor that meets a global one is the same everywhere, at a price."""
    return os.environ.get("GLOBALTENSOR_CHECK", "") not in ("", "0")


def broadcast_object(value: object, source: int, what: str = "telling a result") -> object:
    """The object that rank `source` has, on every process; collective over the whole world."""
    if world().lone or _apart:
        return value
    if rank() == source:
        data = as_bytes(value)
        for t in (torch.tensor([len(data)], device="cpu"), data):
            exchange(dict.fromkeys(_everyone(), t), {}, what, _BROADCAST)
        return value
    exchange({}, {source: (size := torch.empty(1, dtype=torch.int64, device="cpu"))}, what, _BROADCAST)
    exchange({}, {source: (data := torch.empty(int(size), dtype=torch.uint8, device="cpu"))}, what, _BROADCAST)
    return from_bytes(data)


def gather_objects(value: tuple, what: str) -> list[tuple]:
    """Every process's `value`, in the order of ranks.

    Raises DisagreementError on every rank where not all of them do `what`.
    """
    if world().lone:
        return [value]
    if _apart:
        raise DisagreementError(f"{what} where not all processes are", "the others run other stages of a pipeline",
                                "make it outside of the stages, or in a way that asks nobody: a factory, an op")
    agree(what)
    return _tell(value, what)
