"""How a training is doing, as plain numbers for TensorBoard, W&B, MLflow or a line of text: `gt.metrics(...)`.

    gt.metrics()                                     begins to count
    for step, batch in enumerate(loader, 1):
        train(batch)
        if step % 10 == 0:
            now = gt.metrics(tokens=10 * tokens_per_step)        of the 10 steps since the last call
            if gt.rank() == 0:
                writer.add_scalars("training", now, step)

Each call tells of the time since the one before, in this process. Until the first one nothing is counted, so whoever
never asks pays nothing.
"""
from __future__ import annotations

import math
import sys
import time
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch

from globaltensor.errors import ArgumentError
from globaltensor.runtime import counters
from globaltensor.runtime.agreement import gather_objects
from globaltensor.runtime.counters import Counts
from globaltensor.runtime.world import world
from globaltensor.tracebacks import api_boundary

_UNIX = find_spec("resource") is not None
if _UNIX:
    import resource

_OF_RANKS = ("communication_seconds", "waiting_seconds", "peak_memory_bytes", "peak_device_memory_bytes")

_last: tuple[float, Counts] | None = None            # when it was called, and what was counted by then


@api_boundary
def metrics(tokens: float | None = None, flops: float | None = None, peak_flops: float | None = None, *,
            every_rank: bool = False) -> dict[str, float]:
    """Numbers of this process since the last call, by name. Collective with `every_rank` only.

    tokens       how many tokens, samples or the like all ranks together trained on since then
    flops        how many floating-point operations of the model that took, all ranks together; of a transformer about
                 6 * parameters * tokens
    peak_flops   how many per second all devices together can do (default: what a matrix product in float32 reaches on
                 this process's device, measured once, times the devices)
    every_rank   with what each rank says of itself, as `waiting_seconds/rank_1`; every process makes the call then

    seconds                   since the last call
    tokens_per_second         where `tokens` is given
    mfu                       flops per second as a share of the peak, where `flops` is given
    boxings                   how many there were
    communication_bytes       what the rank that receives most received in them, by their plans, as `gt.record` counts;
                              and the bytes of messages of pipelines that came to this process
    communication_seconds     wall time in these
    waiting_seconds           how long this process waited for other ranks, in these or elsewhere
    peak_memory_bytes         the most memory of the host that this process has had since it began
    peak_device_memory_bytes  of accelerators that it drives, since it began or torch's counters were reset

    The first call begins to count, and tells of memory only.
    """
    global _last
    for name, value in (("tokens", tokens), ("flops", flops), ("peak_flops", peak_flops)):
        _check_number(name, value, least=sys.float_info.min if name == "peak_flops" else 0)
    if peak_flops is not None and flops is None:
        raise ArgumentError(f"peak_flops={peak_flops!r} without flops", "a share of the peak is told of flops",
                            "gt.metrics(flops=6 * parameters * tokens, peak_flops=8 * 312e12)")
    now, counts = time.perf_counter(), counters.counts()
    numbers: dict[str, float] = {}
    if _last is not None:
        numbers = _since(now - _last[0], counts - _last[1], tokens, flops, peak_flops)
    else:
        counters.count()
    _last = now, counts
    numbers |= _memory_in_use()
    if every_rank:
        own = {name: numbers[name] for name in _OF_RANKS if name in numbers}
        for rank, its in enumerate(gather_objects(own, "the metrics of every rank")):
            numbers |= {f"{name}/rank_{rank}": value for name, value in its.items()}
    return numbers


def _check_number(name: str, value: float | None, least: float) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < least:
        raise ArgumentError(f"{name}={value!r}", "it is a number, " + ("0 or more" if least == 0 else "more than 0"),
                            f"gt.metrics({name}={'16 * 1024' if name == 'tokens' else '1e12'})")


def _since(seconds: float, counted: Counts, tokens: float | None, flops: float | None,
           peak_flops: float | None) -> dict[str, float]:
    """The numbers of an interval."""
    numbers: dict[str, float] = {"seconds": seconds}
    if tokens is not None:
        numbers["tokens_per_second"] = tokens / seconds
    if flops is not None:
        numbers["mfu"] = flops / seconds / (peak_flops or _measured_flops(frozenset(world().used_devices)))
    return numbers | {"boxings": counted.boxings, "communication_bytes": counted.bytes + counted.received,
                      "communication_seconds": counted.seconds, "waiting_seconds": counted.waiting}


def _memory_in_use() -> dict[str, float]:
    numbers: dict[str, float] = {"peak_memory_bytes": _peak_memory_in_use()}
    if devices := world().used_devices:
        numbers["peak_device_memory_bytes"] = sum(map(torch.accelerator.max_memory_allocated, devices))
    return numbers


def _peak_memory_in_use() -> float:
    """Not a number where the system does not tell."""
    status = Path("/proc/self/status")
    if status.exists():                              # getrusage tells that of the process that started this one, too
        line, = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    if not _UNIX:
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


_LOOKED_FOR = 0.1                                    # seconds in which the fastest product is looked for


@lru_cache(1)
def _measured_flops(devices: frozenset[torch.device]) -> float:
    """What products of matrices reach per second on the devices of all processes together, were they all as these of
    this process. Without devices, on the CPUs."""
    here = world()
    device, size = (min(devices, key=str), 4096) if devices else (torch.device("cpu"), 512)
    best, runs, until = math.inf, 0, time.perf_counter() + _LOOKED_FOR
    with torch.no_grad():
        a = torch.ones(size, size, dtype=torch.float32, device=device)
        while runs < 4 or time.perf_counter() < until:           # others may use the device meanwhile
            runs, began = runs + 1, time.perf_counter()
            torch.mm(a, a)
            if devices:
                torch.accelerator.synchronize(device)
            best = min(best, time.perf_counter() - began)
    processes = here.size // len(here.local_ranks)
    return 2 * size ** 3 / best * processes * max(len(devices), 1)
