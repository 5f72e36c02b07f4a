"""How fast are boxings within a host, beside the measured limit, gloo, MPI and torch DTensor?

One process per rank. Every way of doing a boxing (`ways.py`) lives in the same processes, is verified, and measured in
turns, batch by batch; the slowest rank's time counts. Microseconds: median and the quiet tenth (p10) of the batches.
`size` is that of the largest shard that a rank has before or after; GB/s are that size by the median. The ping-pong is
how long a cache line takes from one core to another just before: where it changes, so does all that is small.

Nobody writes to the sources meanwhile, so the caches of the readers may keep them; `fresh` has them written anew before
each boxing, as a program does, and takes the time of that off. On a busy machine: chrt -r 1 globaltensor bench boxing
"""
from __future__ import annotations

import gc
import os
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

import globaltensor as gt
from benchmarks.ceiling import Ceiling, bound, compiled
from benchmarks.processes import Workers, find_mpirun
from benchmarks.timing import cores, show
from benchmarks.ways import BOXINGS, WAYS, Case, Way

SIZES = [1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20]
DTYPES = ["float32", "bfloat16"]
TIMES = ["dtype", "boxing", "size", "ping-pong ns", *WAYS]
SHARES = ["dtype", "boxing", "size", "GB/s", "% of ceiling", "% of new result", "direct/gloo", "direct/MPI",
          "python/gloo", "python/DTensor"]


def main(json: bool = False, quick: bool = False, ranks: int = 2, fresh: bool = False) -> None:
    if ranks < 2 or SIZES[0] % (64 * ranks):
        raise SystemExit(f"boxing: --ranks is 2, 4, 8 or 16, not {ranks}")
    sizes, batches, seconds = (SIZES[:1], 2, 5e-4) if quick else (SIZES, 15, 4e-3)
    mpirun, mpi = find_mpirun()
    with tempfile.TemporaryDirectory() as folder, open(os.memfd_create("ceiling"), "wb") as memory:
        library = compiled(folder)
        memory.truncate(bound(library).ceiling_bytes(ranks, max(sizes)))
        settings = {"library": library, "memory": f"/proc/{os.getpid()}/fd/{memory.fileno()}", "sizes": sizes,
                    "batches": batches, "seconds": seconds, "fresh": fresh, "without": [] if mpirun else ["MPI"]}
        with Workers("benchmarks.boxing:measure", ranks, settings, mpirun=mpirun) as workers:
            rows = workers.hear(1)[0]
    title = f"boxing: {ranks} ranks{', fresh sources' if fresh else ''}, microseconds: median (p10)"
    rows = [{**row, **summary(row), **({} if json else for_people(row))} for row in rows]
    show(title, rows, json, [TIMES, SHARES], MPI=mpi)


def measure(settings: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """A worker: rank 0 tells all rows."""
    gt.init()
    rank, ranks = gt.rank(), gt.world_size()
    limit = Ceiling(settings["library"], settings["memory"], rank, ranks, max(settings["sizes"]), cores())
    names = [name for name in WAYS if name not in settings["without"]]
    rows = []
    for dtype in DTYPES:
        for boxing in BOXINGS:
            for nbytes in settings["sizes"]:
                case = Case(boxing, nbytes, getattr(torch, dtype), rank, ranks)
                found = one(case, limit, names, settings["batches"], settings["seconds"], settings["fresh"])
                rows.append({"dtype": dtype, "boxing": boxing, "bytes": nbytes, **found})
    if rank == 0:
        yield rows


def one(case: Case, limit: Ceiling, names: list[str], batches: int, seconds: float,
        fresh: bool) -> dict[str, Any]:
    """A case in all ways: name -> [median, p10] of microseconds."""
    ways = {name: way for name in names if (way := WAYS[name](case, limit)) is not None}
    for name, way in ways.items():
        verify(case, name, way, limit)
    times = {name: count(way, limit, seconds) for name, way in ways.items()}
    limit.meet()
    pingpong = limit.slowest(limit.pingpong())
    found: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    for _ in range(batches):
        for name, way in ways.items():
            limit.meet()
            found[name].append(limit.slowest(way.seconds(times[name], fresh)) / times[name] * 1e6)
    gc.enable()
    return {"ping-pong ns": pingpong, "us": {name: [statistics.median(us), sorted(us)[len(us) // 10]]
                                         for name, us in found.items()}}


def verify(case: Case, name: str, way: Way, limit: Ceiling) -> None:
    """Raise, on every rank, where one gets a wrong result. Leaves zeros, which sums in place do not change."""
    base = torch.arange(way.source.numel()) % 7
    limit.meet()
    way.source.copy_((base + case.rank).view(case.source))
    limit.meet()
    made = way.part(way.run())
    if case.boxing.startswith("P"):
        base = base * case.ranks + sum(range(case.ranks))
    if case.boxing == "P -> S":
        base = base.chunk(case.ranks)[case.rank]
    elif case.boxing != "P -> B":
        base = base.chunk(case.ranks)[case.rank] if case.boxing == "S -> S" else base
        base = torch.cat([base + r for r in range(case.ranks)])
    wrong = made.dtype != case.dtype or not torch.equal(made.reshape(-1), base.to(case.dtype))
    if limit.slowest(float(wrong)):
        raise SystemExit(f"{name} gets {case} wrong" if wrong else 1)
    way.source.zero_()


def count(way: Way, limit: Ceiling, seconds: float) -> int:
    """How many make a batch of about so many seconds, the same on every rank."""
    took, times = 0.0, 1
    for times in (1, 3, 30):
        limit.meet()
        took = limit.slowest(way.seconds(times))
        if took > seconds / 2:
            break
    return max(1, min(5000, int(seconds / took * times)))


def summary(row: dict[str, Any]) -> dict[str, float]:
    """Speed, shares and ratios, of medians."""
    us = {name: median for name, (median, _) in row["us"].items()}
    us.setdefault("direct", us["python"])            # without the native code
    found = {"GB/s": row["bytes"] / us["direct"] / 1e3}
    found |= {f"% of {limit}": us[limit] / us["direct"] * 100 for limit in ("ceiling", "new result") if limit in us}
    return found | {f"{one}/{other}": us[one] / us[other] for one in ("direct", "python")
                    for other in ("gloo", "MPI", "DTensor") if other in us}


def for_people(row: dict[str, Any]) -> dict[str, Any]:
    """The cells of a row that JSON has as numbers."""
    size = row["bytes"]
    return {"size": f"{size >> 10} KB" if size < 1 << 20 else f"{size >> 20} MB",
            **{name: f"{number(median)} ({number(p10)})" for name, (median, p10) in row["us"].items()}}


def number(x: float) -> str:
    """With three digits, or all before the point."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


if __name__ == "__main__":
    main()
