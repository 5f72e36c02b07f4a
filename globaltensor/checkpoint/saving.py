"""Saving: every rank writes its pieces into a temporary folder, from which rank 0 makes a version.

Ranks report that they are done by files, not by messages: rank N writes `rank-N.done`, with its part of the manifest,
and rank 0 waits for all of them. So a thread can finish a save while the program goes on and uses the transport; a
synchronous save is the same, waited for until the version is complete. Old versions lose their names before that, and
their bytes after it: a file system takes a third as long to free them as to write new ones.
"""
from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from globaltensor.boxings.redistribute import redistribute
from globaltensor.checkpoint import folders
from globaltensor.checkpoint.collective import collective_try
from globaltensor.checkpoint.files import remove, write_atomically
from globaltensor.checkpoint.lease import Lease
from globaltensor.checkpoint.manifest import CheckpointError, Entry, Manifest, SavedPiece, dump_manifest, parse_manifest
from globaltensor.checkpoint.pieces import (
    PieceToWrite,
    assign_writers,
    check_dtype,
    local_parts,
    need_safetensors,
    write_hashed,
)
from globaltensor.checkpoint.remote import Folder, folder_at
from globaltensor.checkpoint.tree import FlatState, flatten
from globaltensor.errors import ErrorNote, act_for, counted, expect, in_short, warn, where
from globaltensor.layouts.regions import slices
from globaltensor.runtime.agreement import broadcast_object, checksum, gather_objects
from globaltensor.runtime.deadlock import patience, rank_names
from globaltensor.runtime.liveness import first_lost, lost_rank, stacks_of
from globaltensor.runtime.progress import progress
from globaltensor.runtime.world import world, world_size
from globaltensor.tensors.global_tensor import GlobalTensor

_log = logging.getLogger(__name__)

TIMEOUT = 1800.0                                     # seconds for which a rank waits for the others to write
_GRACE = 2.0
_CLEARS = 10.0                                       # seconds in which ranks are told that a save has failed
_LOOK = 0.25                                         # seconds between looks whether they live
_running: dict[Folder, Saving] = {}                  # the last save into each directory, which may still be in progress


def save_folder(state: Any, directory: str | os.PathLike[str], *, asynchronous: bool = False,
                keep: int | None = None) -> Saving:
    """Write a new version of `state` into `directory`; collective.

    state         nested dicts, lists and tuples of global and plain tensors, numbers, strings, None, and objects with
                  a state_dict (modules, optimizers, schedulers, samplers). Plain tensors and values must be the same on
                  all processes. A pending sum is reduced first; no other tensors are communicated
    directory     must be the same folder for all processes; each save makes a new version in it. Or a URL of a store
                  that fsspec knows, s3://bucket/run: each rank writes its file to its disk and uploads it
    asynchronous  copy the parts and return at once; a thread writes them. `wait()` on the result raises its errors
    keep          take their names from all but so many of the last versions, once the new one is complete; a thread
                  deletes them

    Each rank writes about as many bytes as the others, each piece once. A crash at any moment leaves the previous
    version or the new one intact. Raises CheckpointError for a state that cannot be saved and for processes that
    disagree, on every process and before anything is written; and where files cannot be written.
    """
    need_safetensors()
    path = folder_at(directory)
    expect(asynchronous, bool, "asynchronous says neither yes nor no", "asynchronous=True")
    _join_earlier(path)
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(f"keep={keep!r}", "the new version is always kept", "keep=2")
    flat = collective_try("saving a checkpoint", lambda: _checked_flat(state),
                          lambda flat: f"{_summary(flat)}, into {path}")
    _check_same_values(flat)
    tensors = _without_partials(flat.tensors)
    pieces = assign_writers(tensors, range(world_size()))
    lease = collective_try("making the folder of a checkpoint",
                           lambda: folders.start_version(path) if world().rank == 0 else None)
    try:
        temporary = path / broadcast_object(lease.folder.name if lease else "", 0, "naming a checkpoint")
        data = collective_try("copying what a checkpoint is to hold",
                              lambda: _data_to_write(tensors, pieces, asynchronous, temporary))
    except BaseException:
        if lease is not None:
            lease.give_up()
            with suppress(Exception):                # the error that is raised says more
                remove(lease.folder)
        raise
    _log.info("saving %s into %s%s", counted(len(tensors), "tensor"), path,
              " while the program goes on" if asynchronous else "")
    saving = _running[path] = Saving(flat, tensors, data, temporary, lease, keep)
    if not asynchronous:
        saving.wait_until_written()
    return saving


class Saving:
    """A save in progress. `path` is the version's folder."""

    def __init__(self, flat: FlatState, tensors: dict[str, torch.Tensor],
                 data: dict[int, dict[PieceToWrite, torch.Tensor]], temporary: Folder, lease: Lease | None,
                 keep: int | None) -> None:
        self.path = temporary.parent / temporary.name.partition(".")[0]
        self._temporary, self._lease, self._data, self._keep, self._at = temporary, lease, data, keep, where()
        first: dict[int, str] = {}                   # tied tensors share the pieces of the first name
        self._names = {name: first.setdefault(id(t), name) for name, t in tensors.items()}
        self._state, self._random = flat.state, torch.get_rng_state().numpy().tobytes().hex()
        self._entries = {name: (t.dtype, tuple(t.shape), isinstance(t, GlobalTensor)) for name, t in tensors.items()}
        self._error: CheckpointError | None = None
        self._reported = False
        self._ranks_written = 0                      # that rank 0 knows of
        self._rank, self._ranks = world().rank, world_size()
        self._written = threading.Event()            # or failed
        self._thread = threading.Thread(target=self._run, name=f"saving {self.path.name}")
        self._thread.start()                         # not a daemon: a program that ends waits for it

    def __repr__(self) -> str:
        return f"Saving({str(self.path)!r}, {'done' if self.done else 'in progress'})"

    @property
    def done(self) -> bool:
        """Has it ended, with or without an error? Does not wait."""
        return not self._thread.is_alive()

    def wait_until_written(self) -> Folder:
        """Wait until all ranks have written the checkpoint. Returns its folder; raises the error if there was one."""
        with progress("saving", self._ranks, "ranks") as advance:
            seen = 0
            while not self._written.wait(0.1):
                advance(self._ranks_written - seen)
                seen = self._ranks_written
        self._reported = True
        if self._error is not None:
            raise self._error
        return self.path

    def wait(self) -> Folder:
        """The same, and until old versions are deleted."""
        self._thread.join()
        return self.wait_until_written()

    def _run(self) -> None:
        act_for(self._at)
        try:
            self._write()
            old: list[Folder] = []
            if self._rank == 0:
                old = self._commit()
            else:
                self._await(self._published, "failed", 0, "to finish")
            _log.info("saved %s", self.path)
            self._written.set()
            for folder in old:
                remove(folder)
        except CheckpointError as error:             # raised by wait(): a thread has no caller
            self._fail(error, None)
        except BaseException as error:               # SystemExit, too, would end the thread as if all were well
            note = ErrorNote.of(error, "writing it")
            self._fail(CheckpointError(f"{self.path} could not be written: {type(error).__name__}: {error}",
                                       note.why, note.fix), error)
        finally:
            self._data = {}
            self._written.set()

    def _fail(self, error: CheckpointError, cause: BaseException | None) -> None:
        error.__cause__ = cause
        _log.info("not saved: %s", error.what)
        self._error = error
        if self._lease is not None:
            of_rank = f"rank {self._rank}: {type(cause).__name__}: {cause}"
            what = of_rank if cause else error.what.removeprefix(f"{self.path} was not written: ")
            self._mark("failed", f"{what}\n{error.why or ''}")
            self._lease.give_up()
            self._clear_up()
        else:
            self._mark(f"rank-{self._rank}.told", "")

    def _clear_up(self) -> None:
        """Delete what was written, as soon as each rank is told why, or is lost; until then some may still write. Where
        that takes too long, the next save does it."""
        others = [] if world().single_process else [rank for rank in range(self._ranks) if rank != self._rank]
        if others:
            self._written.set()                      # nobody waits here for that
        limit = time.monotonic() + _CLEARS
        with suppress(Exception):                    # a lost store, say: the error of the save says more
            while others and time.monotonic() < limit:
                others = [rank for rank in others if not (self._temporary / f"rank-{rank}.told").exists()
                          and lost_rank([rank]) is None]
                time.sleep(0.02)
            if not others:
                remove(self._temporary)

    def _write(self) -> None:
        """Write the file of each rank that this process drives, then its mark."""
        for rank in list(self._data):
            data = self._data.pop(rank)
            file = f"rank-{rank:05d}.safetensors"
            try:
                by_key = {piece.key: t for piece, t in data.items()}
                hashes = write_hashed(self._temporary / file, by_key) if data else {}
            except BaseException as error:
                self._mark(f"rank-{rank}.failed", f"rank {rank}: {type(error).__name__}: {in_short(str(error))}")
                raise
            written = [[piece.name, file, piece.key, piece.region, hashes[piece.key]] for piece in data]
            write_atomically(self._temporary / f"rank-{rank}.done", json.dumps(written).encode(), durable=False)

    def _mark(self, name: str, text: str) -> None:
        with suppress(Exception):                    # it only tells others sooner
            try:
                write_atomically(self._temporary / name, text.encode(), durable=False)
            except OSError:                          # of a full disk, on which there is still room for a name
                (self._temporary / name).write_bytes(b"")

    def _raise_if(self, name: str) -> None:
        if (self._temporary / name).exists():
            text = (self._temporary / name).read_bytes().decode() or "without a message"
            what, _, why = text.partition("\n")
            raise CheckpointError(f"{self.path} was not written: {what}",
                                  why or f"the file {name} is in {self._temporary}")

    def _published(self) -> bool:
        latest = folders.latest(self.path.parent)
        # or a later one: another job may have saved meanwhile
        return latest is not None and latest[0].name >= self.path.name and (
            latest[0] == self.path or (self.path / folders.MANIFEST).is_file())

    def _commit(self) -> list[Folder]:
        """Wait for all ranks, assemble the manifest, publish. Returns what is left of old versions, to be deleted."""
        pieces: dict[str, list[SavedPiece]] = {}
        for rank in range(self._ranks):
            mark = self._temporary / f"rank-{rank}.done"
            self._await(mark.exists, f"rank-{rank}.failed", rank, "to write")
            self._ranks_written += 1
            for name, file, key, region, hash_text in json.loads(mark.read_bytes()):
                pieces.setdefault(name, []).append(SavedPiece(file, key, tuple(map(tuple, region)), hash_text))
        entries = {name: Entry(name, *self._entries[name], tuple(pieces.get(first, ())))
                   for name, first in self._names.items()}
        data = dump_manifest(Manifest(entries, self._state, self._random))
        parse_manifest(data, str(self.path / folders.MANIFEST))      # never publish what could not be loaded
        for rank in range(self._ranks):
            (self._temporary / f"rank-{rank}.done").unlink()
        assert self._lease is not None               # rank 0 has it
        self._lease.stop()
        folders.publish(self._temporary, self.path, data, hashlib.sha256(data).hexdigest())
        return folders.retire_old(self.path.parent, self._keep) if self._keep is not None else []

    def _await(self, ready: Callable[[], bool], failure: str, rank: int, what: str) -> None:
        """Wait for that rank until it is `ready`. Raises the error that the file `failure` tells of, as soon as there
        is one, and where the rank is lost."""
        began = looked = time.monotonic()
        while not ready():
            self._raise_if(failure)
            time_now = time.monotonic()
            if time_now - looked > _LOOK:
                looked = time_now
                loss = lost_rank([rank])
                # it may have finished, and its program too, since it was not ready
                if loss is not None and not ready():
                    self._raise_if(failure)
                    raise CheckpointError(f"{self.path} was not written: {first_lost(loss).how}",
                                          f"rank {self._rank} waited for it {what}",
                                          "look at its own error, and at what its host says of it")
                if not (self._temporary.is_dir() or self.path.is_dir() or ready()):
                    raise CheckpointError(f"{self.path} was not written: its folder has been removed",
                                          "rank 0 gave it up, or somebody else deleted it",
                                          "look at the first error of rank 0")
            waited = time_now - began
            # rank 0 says which rank it waited for in vain: the others, who wait for rank 0, let it
            if waited > min(TIMEOUT, patience()) + (0 if self._rank == 0 else _GRACE):
                raise CheckpointError(f"{self.path} was not written: waited {waited:.0f} seconds for rank {rank} "
                                      f"{what}", stacks_of([rank]), "gt.init(timeout=...) where its disk may take "
                                      "longer")
            # adds 2% at most; a store is asked over a network, and may charge for it
            time.sleep(min(max(0.001, waited / 50), 0.05 if isinstance(self.path, Path) else 1.0))


def _join_earlier(path: Folder) -> None:
    """One save at a time into a directory; the error of one that nobody waited for becomes a warning."""
    earlier = _running.pop(path, None)
    if earlier is not None:
        earlier._thread.join()
        if earlier._error is not None and not earlier._reported:
            warn(f"an earlier save failed: {earlier._error.what}", RuntimeWarning)


def _checked_flat(state: Any) -> FlatState:
    flat = flatten(state)
    for name, t in flat.tensors.items():
        check_dtype(name, t)
    return flat


def _summary(flat: FlatState) -> str:
    """What must be the same on all processes, in one line."""
    rows = [f"{name}: " + (str(t.spec) if isinstance(t, GlobalTensor) else f"{list(t.shape)} {t.dtype}")
            for name, t in flat.tensors.items()]
    return f"{len(rows)} tensors, with checksum {zlib.crc32(chr(10).join(rows).encode()):08x}"


def _check_same_values(flat: FlatState) -> None:
    """Plain tensors and values are written once, so ranks with different ones would lose theirs: raise instead."""
    if world().single_process:
        return

    checksums = {name: checksum(t) for name, t in flat.tensors.items() if not isinstance(t, GlobalTensor)}
    checksums |= {f"the plain value {path}": zlib.crc32(json.dumps(value).encode())
                  for path, value in _plain_values(flat.state)}
    totals = gather_objects((zlib.crc32(repr(checksums).encode()),), "comparing the plain values of a checkpoint")
    if len(set(totals)) == 1:
        return
    replies = gather_objects((checksums,), "naming the plain values of a checkpoint that differ")
    alone = [f"{name} (on {rank_names(on)})" for name in sorted({name for (theirs,) in replies for name in theirs})
             if len(on := [r for r, (theirs,) in enumerate(replies) if name in theirs]) < len(replies)]
    if alone:
        raise CheckpointError(f"only some of the ranks have {', '.join(alone[:8])} in the state",
                              "a checkpoint has the same keys on all ranks: what is plain is written once",
                              "the same keys on every rank, not one for each rank; for what is of one rank alone, a "
                              "list of all ranks' values, under one key")
    names = [name for name in checksums if len({theirs[name] for (theirs,) in replies}) > 1]
    raise CheckpointError(f"the ranks differ in {', '.join(names[:8]) or 'the order of keys'} of the state",
                          "plain tensors and values are written once, so they must be the same",
                          "a list of all ranks' values, or a global tensor: x.to_global(placement, gt.sbp.split(0))")


def _plain_values(node: Any, path: str = "") -> list[tuple[str, Any]]:
    """The leaves of an encoded state."""
    if isinstance(node, dict) and "dict" in node:
        return [leaf for k, v in node["dict"].items() for leaf in _plain_values(v, f"{path}/{k}" if path else k)]
    return [(path, node)]


def _without_partials(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with pending sums reduced, all in one boxing."""
    pending = {id(t): t for t in tensors.values() if isinstance(t, GlobalTensor) and t.spec.layout.partial}
    if not pending:
        return tensors
    dsts = [t.spec.layout.without_partials for t in pending.values()]
    reduced = dict(zip(pending, redistribute(list(pending.values()), dsts, "save")))
    return {name: reduced.get(id(t), t) for name, t in tensors.items()}


def _check_folder_shared(temporary: Folder) -> None:
    if not temporary.is_dir():
        raise CheckpointError(f"{temporary} does not exist", "rank 0 made it: the processes do not share this folder",
                              "a directory on a file system, or a store, that all of them share")


def _data_to_write(tensors: dict[str, torch.Tensor], pieces: list[PieceToWrite],
                   copy: bool, temporary: Folder) -> dict[int, dict[PieceToWrite, torch.Tensor]]:
    """What each rank that this process drives has to write into this folder, contiguous and on the CPU; `copy` where
    it may change."""
    _check_folder_shared(temporary)
    data: dict[int, dict[PieceToWrite, torch.Tensor]] = {rank: {} for rank in world().local_ranks}
    parts_of = {name: {part.rank: part for part in local_parts(t)} for name, t in tensors.items()}
    for piece in pieces:
        if piece.rank in data:
            # A plain tensor has one part, whichever rank writes a piece of it.
            part = parts_of[piece.name].get(piece.rank) or next(iter(parts_of[piece.name].values()))
            view = part.data[slices(piece.region, part.region)].resolve_conj().resolve_neg()
            ready = view.cpu().contiguous()
            same_memory = ready.untyped_storage().data_ptr() == part.data.untyped_storage().data_ptr()
            data[piece.rank][piece] = ready.clone() if copy and same_memory else ready
    return data
