"""How fast are checkpoints saved and loaded, beside what the disk itself does?

Matrices of 384 MB in all, split over 4 ranks, a process each. All ranks at once, the ways in turns:

    disk           each rank writes its bytes to a plain file of its own and brings it to the disk (fsync), or reads
                   that file into memory it has: what the disk and its file system do, and no more
    one file       the same by one process for all bytes, while the other ranks wait
    globaltensor   gt.save, which also hashes every byte and keeps the one before until the new one is whole, and then
                   deletes it after it has returned (not counted; the other ways write over their files). It writes past
                   the page cache, the other ways through it. gt.load, which reads every byte twice, to check it before
                   anything is changed, and then to copy it
    ... training   gt.load of a model and its Adam, as many bytes in all: two thirds are new to the optimizer, and are
                   read once
    torch DCP      torch.distributed.checkpoint of the same global tensors, which checks nothing

Loading from the cache: the kernel still holds all pages of the files, so this is a rate of memory, not of a disk. From
the disk: the kernel was told to drop the pages just before (a disk of a virtual machine may have a cache of its own).
"4 -> 2": what 4 ranks saved, loaded by 2. First save: the first of each process, into an empty folder, once. The
slowest rank counts, in the median round.
"""
from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import globaltensor as gt
from benchmarks.processes import Workers
from benchmarks.timing import show
from globaltensor.checkpoint.saving import Saving

RANKS, FEWER, MATRICES = 4, 2, 24
WAYS = ("disk", "one file", "globaltensor", "globaltensor, training", "torch DCP")


def main(json: bool = False, quick: bool = False) -> None:
    megabytes, rounds = (6, 1) if quick else (384, 7)
    laps: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="globaltensor-") as folder, ExitStack() as stack:
        all_workers = []
        for ranks in (RANKS, FEWER):                 # the second find what the first have saved
            workers = stack.enter_context(Workers("benchmarks.checkpoint:worker", ranks,
                                                  {"folder": folder, "megabytes": megabytes}))
            _note(laps, workers)
            all_workers.append(workers)
        for _ in range(rounds):
            for workers in all_workers:
                workers.tell()
                _note(laps, workers)
    seconds = {name: statistics.median(found) for name, found in laps.items()}
    rows = [_row(what, way, seconds, megabytes << 20) for what in dict.fromkeys(name.split(": ")[0] for name in laps)
            for way in WAYS if f"{what}: {way}" in seconds]
    show(f"checkpoint: {megabytes} MB, {RANKS} ranks", rows, json)


def _note(laps: dict[str, list[float]], workers: Workers) -> None:
    told = workers.hear()
    for name in told[0]:
        laps.setdefault(name, []).append(max(one[name] for one in told))


def _row(what: str, way: str, seconds: dict[str, float], nbytes: int) -> dict[str, Any]:
    own = seconds[f"{what}: {way}"]
    return {"what": what, "way": way, "GB/s": nbytes / own / 1e9, "of disk": seconds[f"{what}: disk"] / own,
            "of one file": seconds[f"{what}: one file"] / own, "of torch DCP": seconds[f"{what}: torch DCP"] / own}


# -------------------------------------------------------------------------------------------------------- a worker


def worker(settings: dict[str, Any]) -> Iterator[Any]:
    """The seconds of the first saves, when all is written and verified, then at every turn those of each deed."""
    folder, ranks = Path(settings["folder"]), gt.world_size()
    state, into = _tensors(settings["megabytes"], gt.rand), _tensors(settings["megabytes"], gt.zeros)
    whole = torch.zeros(settings["megabytes"] << 20 if gt.rank() == 0 else 0, dtype=torch.uint8)
    buffer = torch.zeros(settings["megabytes"] << 20 >> ranks.bit_length() - 1, dtype=torch.uint8)
    writes = {"disk": lambda: _write(folder / f"plain-{gt.rank()}", buffer),
              "one file": lambda: _write(folder / f"one-{gt.rank()}", whole),
              "globaltensor": lambda: gt.save(state, folder / "ours", keep=1),
              "torch DCP": lambda: dcp.save(state, checkpoint_id=folder / "torch")}
    reads = {"disk": lambda: _read(folder, buffer),
             "one file": lambda: _read_into(folder / f"one-{gt.rank()}", whole),
             "globaltensor": lambda: gt.load(into, folder / "ours"),
             "globaltensor, training": lambda: gt.load(training, folder / "training"),
             "torch DCP": lambda: dcp.load(into, checkpoint_id=folder / "torch")}
    title = "" if ranks == RANKS else f", {RANKS} -> {ranks}"
    training = _training(settings["megabytes"])
    if ranks == RANKS:
        gt.save(training, folder / "training")
    first = {f"first save: {way}": _timed(do) for way, do in writes.items()} if ranks == RANKS else {}
    dist.barrier()
    for way, do in reads.items():
        _verify(way, do, state, into)
    yield first
    for _ in sys.stdin:
        took = {f"save: {way}": _timed(do) for way, do in writes.items()} if ranks == RANKS else {}
        took |= {f"load{title}, from the cache: {way}": _timed(do, do) for way, do in reads.items()}
        took |= {f"load{title}, from the disk: {way}": _timed(do, lambda: _drop(folder)) for way, do in reads.items()}
        yield took


def _tensors(megabytes: int, make: Callable) -> dict[str, torch.Tensor]:
    """Matrices, split along their rows, whose values do not depend on the number of ranks."""
    gt.manual_seed(7)
    rows = (megabytes << 20) // (MATRICES * 1024 * 4)
    return {f"matrix {i}": make(rows, 1024, placement=gt.placement.all("cpu"), sbp=gt.sbp.split(0))
            for i in range(MATRICES)}


def _training(megabytes: int) -> dict[str, Any]:
    """A model of a third of these matrices, and Adam, whose state after a step is like the other two thirds."""
    model = torch.nn.ParameterList([*_tensors(megabytes, gt.rand).values()][:MATRICES // 3])
    optimizer = torch.optim.Adam(model)
    for p in model:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def _verify(way: str, do: Callable, state: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
    """End where what is loaded is not what was saved; leaves zeros."""
    do()
    for name, t in into.items() if way in ("globaltensor", "torch DCP") else ():
        shard = t.shards[gt.rank()]
        if not torch.equal(shard, state[name].shards[gt.rank()]):
            raise SystemExit(f"{way} does not load {name!r} as it was saved")
        shard.zero_()


def _timed(do: Callable, before: Callable = lambda: None) -> float:
    """Seconds, from when all ranks are ready to when this one is."""
    before()
    dist.barrier()
    began = time.perf_counter()
    result = do()
    took = time.perf_counter() - began
    if isinstance(result, Saving):
        result.wait()
    dist.barrier()
    return took


def _write(path: Path, data: torch.Tensor) -> None:
    with open(path, "wb") as file:
        file.write(data.numpy())
        file.flush()
        os.fsync(file.fileno())


def _read(folder: Path, into: torch.Tensor) -> None:
    """This rank's share of the plain files."""
    count = RANKS // gt.world_size()
    for k, part in enumerate(into.chunk(count)):
        _read_into(folder / f"plain-{gt.rank() * count + k}", part)


def _read_into(path: Path, into: torch.Tensor) -> None:
    with open(path, "rb", buffering=0) as file:
        view, done = memoryview(into.numpy()), 0
        while done < len(view):
            done += file.readinto(view[done:]) or sys.exit("a plain file is too short")


def _drop(folder: Path) -> None:
    """Ask the kernel to drop the pages of all files, which are on the disk already."""
    for path in folder.rglob("*") if gt.rank() == 0 else ():
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


if __name__ == "__main__":
    main()
