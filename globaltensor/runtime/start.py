"""How the world starts: alone, or with the other processes of a launcher.

Under a launcher (launchers.py, or RANK and WORLD_SIZE are set) the world is torch.distributed's default group, which a
user may also have started already; ranks of one host then share memory where all of them can. Without one, a single
process drives all ranks.
"""
from __future__ import annotations

import logging
import multiprocessing.util
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from globaltensor.errors import TransportError, counted, expect, expect_amount, first_sentence
from globaltensor.runtime import arrival, deadlock, lineage, liveness, machine as machines, native
from globaltensor.runtime.accelerators import GLOO, accelerator, accelerator_count, engine_in, engine_of
from globaltensor.runtime.exchange import finish_all
from globaltensor.runtime.gloo import choose_interfaces, gloo_error, keep_for_ever, yield_cores
from globaltensor.runtime.host_processes import ProcessId
from globaltensor.runtime.launchers import (
    check_own_variables,
    check_variables,
    is_one_host,
    local_rank,
    ranks_per_host,
    recognize_launcher,
    take_seat,
)
from globaltensor.runtime.machine import Machine
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.process_end import at_end, before_threads
from globaltensor.runtime.process_limits import check_files, files_of_a_rank, why_unmapped
from globaltensor.runtime.secret import share_secret
from globaltensor.runtime.stacks import arm_stacks
from globaltensor.runtime.start_watch import watch_start
from globaltensor.runtime.store_tree import gather_in_store
from globaltensor.runtime.thread_errors import watch_threads
from globaltensor.runtime.torch_internals import default_store, process_groups
from globaltensor.runtime.world import World, begin, device_here, shared_gpu, start_with, started
from globaltensor.tracebacks import api_boundary

_log = logging.getLogger(__name__)

TIMEOUT = timedelta(seconds=1800)
# torch's own limits, and those of the shared memory, only act where the watch over waits (deadlock.py) does not.
_BACKSTOP = timedelta(seconds=60)


@api_boundary
def init(ranks: int | None = None, *, timeout: float | None = None, machine: Machine | None = None) -> World:
    """Start the world. Optional: the first placement does it.

    ranks     how many ranks a lone process drives (default: GLOBALTENSOR_RANKS, else the number of GPUs or other
              accelerators, else 8); under a launcher its number of processes, and a different one is an error
    timeout   seconds after which a rank that waits for another raises, though that one lives (default 1,800)
    machine   the rates to plan with (default: those of the transport)

    Collective under a launcher. Raises TransportError where the world was started with another number of ranks, or the
    processes of the launcher cannot find each other.
    """
    if timeout is not None:
        expect_amount(timeout, "a time-out that is not a number of seconds", "gt.init(timeout=1800)")
    if machine is not None:
        expect(machine, Machine, f"machine={machine!r}", "machine=globaltensor.runtime.machine.gloo")
    if (running := started()) is not None:
        if ranks not in (None, running.size):
            raise TransportError(f"the world has {running.size} ranks already, not {ranks}",
                                 "the first placement starts it", "gt.init(...) before anything else")
        return running
    if dist.is_available() and not dist.is_initialized():
        recognize_launcher()
    check_own_variables()
    if dist.is_available() and (dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= os.environ.keys()):
        new = _processes(timedelta(seconds=timeout) if timeout else TIMEOUT, machine)
        if ranks not in (None, new.size):
            raise TransportError(f"the launcher started {new.size} ranks, the program asks for {ranks}",
                                 fix=f"globaltensor run -n {ranks} ...")
    else:
        devices = accelerator_count() if ranks is None and "GLOBALTENSOR_RANKS" not in os.environ else 0
        text = os.environ.get("GLOBALTENSOR_RANKS", "") if ranks is None else str(ranks)
        if text and not (text.isdecimal() and int(text) > 0):
            raise TransportError(f"{text!r} is not a number of ranks", fix="GLOBALTENSOR_RANKS=4")
        size = int(text) if text else devices or 8
        new = World(size, tuple(range(size)), machine or machines.one_process, "memory of one process")
        begin(new)
    native.say_if_slow()
    drives = f"rank {new.rank}" if len(new.local_ranks) == 1 else "all ranks"
    _log.info("the world has %s, this process drives %s; transport: %s; %s native code", counted(new.size, "rank"),
              drives, new.transport, "without" if torch_ext is None else "with")
    return new


def _processes(timeout: timedelta, machine: Machine | None) -> World:
    """One rank per process, over torch.distributed: NCCL for GPUs, others for their devices, gloo for the rest."""
    check_variables()
    arm_stacks()
    running = dist.is_initialized()
    size, rank = ((dist.get_world_size(), dist.get_rank()) if running else
                  (int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])))
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    _log.info("rank %d of %d starts%s", rank, size, f" again, restart {again}" if again else "")
    if not running:
        check_files(files_of_a_rank(size, ranks_per_host(size), _keeps_store(rank)),
                      "each rank has a connection to each other one, and memory of each on its host")
    if not running or "cpu:" not in dist.get_backend_config():
        choose_interfaces(not running and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"))
    share_secret(is_one_host(size, _meeting_host(running)), rank == 0)
    with watch_start(rank, size) as host_peers:
        meeting = liveness.connected_to(default_store()) if running else arrival.open_store(timeout)
        store, processes = arrival.meet(meeting, rank, size, timeout)
        take_seat([processes[r].host for r in range(size)], rank)
        host_peers.know(processes)
        new = _world_of(store, processes, rank, size, timeout, machine)
        begin(new)
        if torch_ext is not None and (type := accelerator()) is not None:
            torch_ext.set_device_here(device_here(type).index)
        # begun before it is connected: connecting takes messages, which need to know the ranks
        if size > 1:
            _connect(new, timeout, machine)
    return new


def _keeps_store(rank: int) -> bool:
    """Does this rank keep the store of the job? Else torchrun does."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _meeting_host(running: bool) -> str:
    """Where the server of the job's store is; a store that has none, such as a file, counts as one of this host."""
    if not running:
        return os.environ.get("MASTER_ADDR", "")
    store: Any = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else "localhost"


def _world_of(store: dist.Store, processes: dict[int, ProcessId], rank: int, size: int, timeout: timedelta,
              machine: Machine | None) -> World:
    """The world of ranks that have met in this store."""
    if _keeps_store(rank):
        at_end(liveness.keep_store_for_readers, store)
    if not dist.is_initialized():
        _start_torch(store, rank, size, timeout)
    if torch_ext is not None:
        torch_ext.outlive_gloo()
    with arrival.in_touch():
        liveness.set_liveness(liveness.Liveness(processes, liveness.own_connection(default_store()), rank))
        _tell_others_of_end(rank)
        if any(not process.here for process in processes.values()):
            liveness.start_heart(liveness.own_connection(default_store()), rank)
    hosts = tuple(r // ranks_per_host(size) for r in range(size)) if ranks_per_host(size) < size else ()
    engine = engine_in(backends := dist.get_backend_config(), accelerator())
    base = machine or (machines.gloo if engine == GLOO else machines.nccl)
    if hosts and not base.hosts:
        base = replace(base, hosts=hosts)
    # what ranks agree on is small and lies on the CPU, from where no other engine sends
    control = None if "cpu:" in backends else dist.new_group(backend="gloo", timeout=timeout + _BACKSTOP)
    yield_cores()
    return World(size, (dist.get_rank(),), base, f"torch.distributed ({engine})", control,
                 timeout + _BACKSTOP, engine)


def _connect(new: World, timeout: timedelta, machine: Machine | None) -> None:
    """Agree on a random state, look out for deadlocks, share memory with the ranks of this host where all can."""
    with arrival.in_touch():
        deadlock.watch(store := liveness.own_connection(default_store()), new.rank, new.size, timeout.total_seconds())
    first = new.rank - new.rank % (per_host := ranks_per_host(new.size))
    here = range(first, min(first + per_host, new.size))
    address = None
    if torch_ext is not None:
        address = _open_transport(new.rank, new.rank - first, len(here), timeout)
    # All of them or none: a rank that cannot share memory would never come to the meetings of those that do.
    seat = address, per_host, local_rank(new.rank)
    state = torch.get_rng_state() if new.rank == 0 else None     # without this each process has one of its own
    with arrival.in_touch():
        rows = gather_in_store(store, "globaltensor seat", (seat, state), new.rank, new.size,
                               liveness.raise_if_one_is_lost(new.rank, new.size, timeout.total_seconds()))
    torch.set_rng_state(rows[0][1])
    seats = [seat for seat, _ in rows]
    _check_seats(seats)
    addresses = [address for address, _, _ in seats]
    lineage.keep(len({address is None for address in addresses}) == 1)       # not between native code and its twin
    if None in addresses or len(here) == 1:
        if address is not None:
            torch_ext.close_transport()
        return
    new.host_peers = frozenset(here)                 # before: errors name them
    torch_ext.connect_transport(addresses[first:first + len(here)])
    torch_ext.on_waiting(api_boundary(deadlock.enter), api_boundary(deadlock.leave),
                         api_boundary(deadlock.raise_if_in_vain))
    new.transport = f"shared memory, then {new.transport}" if len(here) < new.size else "shared memory"
    if machine is None and new.staged:
        new.machine = replace(machines.shared_memory, hosts=new.machine.hosts)
    torch_ext.install_allocator()
    at_end(torch_ext.close_transport)


def _open_transport(rank: int, number: int, ranks: int, timeout: timedelta) -> str:
    """The address of this rank, for the ranks of its host; where it cannot have one, the others are told why."""
    assert torch_ext is not None
    try:
        return torch_ext.open_transport(number, ranks, (timeout + _BACKSTOP).total_seconds())
    except RuntimeError as error:
        loss = liveness.Loss(rank, f"rank {rank} cannot share memory: {first_sentence(error)}")
        raise TransportError(liveness.first_lost(loss).how, *why_unmapped(str(error))) from None


def _check_seats(seats: Sequence[tuple[str | None, int, int]]) -> None:
    """Raise TransportError unless each host has as many ranks as others, and ranks of a host follow each other."""
    for rank, (_, per_host, number) in enumerate(seats):
        if per_host != seats[0][1] or number != rank % per_host:
            raise TransportError(f"rank {rank} is rank {number} of {per_host} on its host, rank 0 is rank "
                                 f"{seats[0][2]} of {seats[0][1]}",
                                 "every host runs as many ranks, and ranks of one host follow each other",
                                 "srun --ntasks-per-node=N --distribution=block, mpirun --map-by ppr:N:node, or "
                                 "LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them")


def _tell_others_of_end(rank: int) -> None:
    """Of this rank's program, well or by an exception, at once: they raise instead of waiting for it. That may live on,
    for as long as threads of the program do."""
    hook = sys.excepthook

    def leaving(kind: type, error: BaseException, trace: Any) -> None:
        liveness.tell_failure(rank, error)
        hook(kind, error, trace)

    sys.excepthook = leaving
    watch_threads()
    before_threads(liveness.tell_end, rank)
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, _tell_of_child, (rank,), exitpriority=0)


def _tell_of_child(rank: int) -> None:
    """The process of this rank, which multiprocessing has started, ends: that shows an error of it itself."""
    if (error := sys.exc_info()[1]) is not None:
        liveness.tell_failure(rank, error)
    finish_all()
    liveness.tell_end(rank)


def _start_torch(store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Let torch connect the ranks, which have met in this store."""
    type = None if shared_gpu() else accelerator()
    engine = GLOO if type is None else engine_of(type)
    with arrival.in_touch():
        dist.init_process_group(GLOO if engine == GLOO else f"cpu:gloo,{type}:{engine}", store=store, rank=rank,
                                world_size=size, timeout=timeout + _BACKSTOP)
    at_end(_end_torch)


def _end_torch() -> None:
    if dist.is_initialized():
        liveness.tell_end(dist.get_rank())
        if gloo_error():
            keep_for_ever(process_groups())
            return
        time.sleep(0.05)                             # lets gloo's threads end first: agreement.py says why
        dist.destroy_process_group()


start_with(init)
