"""Saving: every rank writes its pieces aside, the first one makes a version of them.

Ranks tell each other that they are done by files, not by messages: rank N leaves `rank-N.done`, with its part of the
manifest, and the first rank waits for all of them. So a save can be finished by a thread while the program goes on
and uses the transport, and saving in the foreground is the same, waited for.
"""
from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch

from globaltensor.boxings.redistribute import redistribute
from globaltensor.checkpoint import folders
from globaltensor.checkpoint.collective import together
from globaltensor.checkpoint.manifest import CheckpointError, Entry, Manifest, Piece, dump, parse
from globaltensor.checkpoint.pieces import Job, check_dtype, need_safetensors, parts, share_out, write
from globaltensor.checkpoint.tree import Flat, flatten
from globaltensor.errors import where
from globaltensor.layouts.regions import slices
from globaltensor.runtime.agreement import broadcast_object, checksum, gather_objects
from globaltensor.runtime.world import world, world_size
from globaltensor.tensors.global_tensor import GlobalTensor

PATIENCE = 1800.0                                    # seconds for which a rank waits for the others to have written
_running: dict[Path, Saving] = {}                    # the last save into each directory, where it may be under way


def save(state: Any, directory: str | os.PathLike[str], *, asynchronous: bool = False,
         keep: int | None = None) -> Saving:
    """Write a new version of `state` into `directory`; collective.

    state         nested dicts, lists and tuples of global and plain tensors, numbers, strings, None, and objects with
                  a state_dict (modules, optimizers, schedulers, samplers). Plain tensors and values must be the same on
                  all processes. A pending sum is reduced first, the one thing here that communicates tensors
    directory     must be the same folder for all processes; each save makes a version of its own in it
    asynchronous  copy the parts and return at once; a thread writes them. `wait()` on the result raises what goes wrong
    keep          delete all but that many of the last versions, once the new one is there

    Each rank writes about as many bytes as the others, each piece once. Killed at any moment, this leaves the version
    before or the new one. Raises CheckpointError, on every process or on none before anything is written, for a
    state that cannot be saved and processes that disagree; and where files cannot be written.
    """
    need_safetensors()
    path = Path(os.path.abspath(directory))
    _finish_earlier(path)
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(f"keep={keep!r}", "at least the new version is kept", "keep=2")
    flat = together("saving a checkpoint", lambda: _flat(state), _outline)
    _same_values(flat)
    settled = _settle(flat.tensors)
    jobs = share_out(settled, range(world_size()))
    began = together("making the folder of a checkpoint", lambda: _start(path))
    name, aside = broadcast_object(began, 0, "naming a checkpoint")
    together("finding the folder of a checkpoint", lambda: _see(aside))
    data = _data(settled, jobs, asynchronous)
    saving = _running[path] = Saving(flat, settled, data, aside, path / name, keep)
    if not asynchronous:
        saving.wait()
    return saving


class Saving:
    """A save under way. `path` is the version's folder."""

    def __init__(self, flat: Flat, settled: dict[str, torch.Tensor], data: dict[int, dict[Job, torch.Tensor]],
                 aside: Path, path: Path, keep: int | None) -> None:
        self.path, self._aside, self._data, self._keep, self._at = path, aside, data, keep, where()
        first: dict[int, str] = {}                   # tied tensors share the pieces of the first name
        self._names = {name: first.setdefault(id(t), name) for name, t in settled.items()}
        self._state = flat.state
        self._entries = {name: (t.dtype, tuple(t.shape), isinstance(t, GlobalTensor)) for name, t in settled.items()}
        self._error: Exception | None = None
        self._told = False
        self._rank, self._ranks = world().rank, world_size()
        self._thread = threading.Thread(target=self._run, name=f"saving {path.name}")
        self._thread.start()                         # not a daemon: a program that ends waits for it

    def __repr__(self) -> str:
        return f"Saving({str(self.path)!r}, {'done' if self.done else 'under way'})"

    @property
    def done(self) -> bool:
        """Has it ended, well or badly? Does not wait."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is there, written by all ranks. Returns its folder; raises what went wrong."""
        self._thread.join()
        self._told = True
        if self._error is not None:
            raise self._error
        return self.path

    def _run(self) -> None:
        try:
            self._write()
            if self._rank == 0:
                self._commit()
            else:
                self._await(lambda: self._published() or self._failed("failed"), "rank 0 to finish")
        except Exception as error:                   # told by wait(): a thread has nobody to raise to
            known = isinstance(error, CheckpointError)
            self._error = error if known else CheckpointError(
                f"{self.path} could not be written: {type(error).__name__}: {error}", at=self._at)
            self._error.__cause__ = None if known else error
            if self._rank == 0:
                self._mark("failed", self._error.what)
        self._data = {}

    def _write(self) -> None:
        """The file of each rank that this process drives, then its mark."""
        for rank in list(self._data):
            data = self._data.pop(rank)
            file = f"rank-{rank:05d}.safetensors"
            try:
                hashes = write(self._aside / file, {job.key: t for job, t in data.items()}) if data else {}
            except Exception as error:
                self._mark(f"rank-{rank}.failed", f"{type(error).__name__}: {error}")
                raise
            said = [[job.name, file, job.key, job.region, hashes[job.key]] for job in data]
            folders.write(self._aside / f"rank-{rank}.done", json.dumps(said).encode(), durable=False)

    def _mark(self, name: str, text: str) -> None:
        try:                                         # on a full disk an empty file says enough
            with open(self._aside / name, "w") as file:
                file.write(text)
        except OSError:
            pass

    def _failed(self, name: str) -> None:
        if (self._aside / name).exists():
            text = (self._aside / name).read_text() or "no more is known"
            raise CheckpointError(f"{self.path} was not written: {text}", f"{name} was left in {self._aside}",
                                  at=self._at)

    def _published(self) -> bool:
        found = folders.latest(self.path.parent)
        return found is not None and found[0] == self.path

    def _commit(self) -> None:
        """Wait for all, put the manifest together, publish."""
        pieces: dict[str, list[Piece]] = {}
        for rank in range(self._ranks):
            mark = self._aside / f"rank-{rank}.done"
            self._await(lambda mark=mark, rank=rank: mark.exists() or self._failed(f"rank-{rank}.failed"),
                        f"rank {rank} to write")
            for name, file, key, cut, sha in json.loads(mark.read_bytes()):
                pieces.setdefault(name, []).append(Piece(file, key, tuple(map(tuple, cut)), sha))
        entries = {name: Entry(name, *self._entries[name], tuple(pieces.get(first, ())))
                   for name, first in self._names.items()}
        data = dump(Manifest(entries, self._state))
        parse(data, str(self.path / folders.MANIFEST))       # what could not be loaded is not published
        for rank in range(self._ranks):
            (self._aside / f"rank-{rank}.done").unlink()
        folders.publish(self._aside, self.path, data, hashlib.sha256(data).hexdigest())
        if self._keep is not None:
            folders.forget(self.path.parent, self._keep)

    def _await(self, ready: Any, what: str) -> None:
        began = time.monotonic()
        while not ready():
            waited = time.monotonic() - began
            if waited > PATIENCE:
                raise CheckpointError(f"{self.path} was not written: waited {PATIENCE:.0f} seconds for {what}",
                                      "a rank died, or its disk is slow or full", "look at the other ranks' errors",
                                      at=self._at)
            time.sleep(min(max(0.001, waited / 50), 0.05))       # late by 2% at most


def _finish_earlier(path: Path) -> None:
    """One save at a time into a directory; one that failed and was not waited for is not forgotten."""
    earlier = _running.pop(path, None)
    if earlier is not None:
        earlier._thread.join()
        if earlier._error is not None and not earlier._told:
            warnings.warn(f"an earlier save failed: {earlier._error.what}", RuntimeWarning, stacklevel=3)


def _flat(state: Any) -> Flat:
    flat = flatten(state)
    for name, t in flat.tensors.items():
        check_dtype(name, t)
    return flat


def _outline(flat: Flat) -> str:
    """What all processes must have in common, in words that are short where it is long."""
    rows = [f"{name}: {getattr(t, 'spec', None) or f'{list(t.shape)} {t.dtype}'}" for name, t in flat.tensors.items()]
    return f"{len(rows)} tensors, of outline {zlib.crc32(chr(10).join(rows).encode()):08x}"


def _same_values(flat: Flat) -> None:
    """Plain tensors and values are written once, so a rank that has others must be told, not forgotten."""
    if world().single_process:
        return

    def values() -> dict[str, int]:
        found = {name: checksum(t) for name, t in flat.tensors.items() if not isinstance(t, GlobalTensor)}
        return found | {f"the plain value {path}": zlib.crc32(json.dumps(value).encode())
                        for path, value in _plain(flat.state)}

    mine = values()
    said = gather_objects((zlib.crc32(repr(mine).encode()),), "comparing the plain values of a checkpoint")
    if len(set(said)) == 1:
        return
    said = gather_objects((mine,), "naming the plain values of a checkpoint that differ")
    names = [name for name in mine if len({found.get(name) for (found,) in said}) > 1] or ["their names"]
    raise CheckpointError(f"{', '.join(names[:8])} of the state are not the same on all ranks",
                          "plain tensors and values are written once, so they must be",
                          "a list of all ranks' values, or a global tensor: x.to_global(placement, gt.sbp.split(0))")


def _plain(node: Any, path: str = "") -> list[tuple[str, Any]]:
    """The leaves of an encoded state."""
    if isinstance(node, dict) and "dict" in node:
        return [leaf for k, v in node["dict"].items() for leaf in _plain(v, f"{path}/{k}" if path else k)]
    return [(path, node)]


def _settle(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same without pending sums: reduced together, in one boxing."""
    pending = {id(t): t for t in tensors.values() if isinstance(t, GlobalTensor) and t.spec.layout.partial}
    if not pending:
        return tensors
    dsts = [t.spec.layout.without_partials for t in pending.values()]
    ready = dict(zip(pending, redistribute(list(pending.values()), dsts, "save")))
    return {name: ready.get(id(t), t) for name, t in tensors.items()}


def _start(path: Path) -> tuple[str, Path] | None:
    return folders.start(path) if world().rank == 0 else None


def _see(aside: Path) -> None:
    if not aside.is_dir():
        raise CheckpointError(f"{aside} is not there", "rank 0 made it: the processes do not share this folder",
                              "a directory on a file system that all hosts share")


def _data(tensors: dict[str, torch.Tensor], jobs: list[Job], copy: bool) -> dict[int, dict[Job, torch.Tensor]]:
    """What each rank that this process drives has to write, contiguous and on the CPU; copied where it may change."""
    here = world()
    data: dict[int, dict[Job, torch.Tensor]] = {rank: {} for rank in here.local_ranks}
    held = {name: {p.rank: p for p in parts(t)} for name, t in tensors.items()}
    for job in jobs:
        if job.rank in data:
            part = held[job.name].get(job.rank) or next(iter(held[job.name].values()))
            piece = part.data[slices(job.region, part.region)].resolve_conj().resolve_neg()
            own = piece.cpu().contiguous()
            same = own.untyped_storage().data_ptr() == part.data.untyped_storage().data_ptr()
            data[job.rank][job] = own.clone() if copy and same else own
    return data
