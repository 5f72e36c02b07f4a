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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from globaltensor.checkpoint import folders
from globaltensor.checkpoint.collective import collective_try
from globaltensor.checkpoint.files import remove_or_age, write_atomically
from globaltensor.checkpoint.lease import Lease
from globaltensor.checkpoint.manifest import CheckpointError, Entry, Manifest, SavedPiece, dump_manifest, parse_manifest
from globaltensor.checkpoint.marks import Marks
from globaltensor.checkpoint.pieces import PieceToWrite, assign_writers, need_safetensors, write_hashed
from globaltensor.checkpoint.remote import Folder, folder_at
from globaltensor.checkpoint.state_to_save import (
    check_same_values,
    checked_flat,
    data_to_write,
    state_in_a_line,
    with_sums_reduced,
)
from globaltensor.checkpoint.tree import FlatState
from globaltensor.errors import ErrorNote, act_for, counted, expect, in_short, message_of, warn, where
from globaltensor.runtime.agreement import broadcast_object
from globaltensor.runtime.deadlock import patience
from globaltensor.runtime.liveness import first_lost, lost_rank, stacks_of
from globaltensor.runtime.progress import progress
from globaltensor.runtime.world import world, world_size
from globaltensor.tensors.global_tensor import GlobalTensor

_log = logging.getLogger(__name__)

TIMEOUT = 1800.0                                     # seconds for which a rank waits for the others to write
_GRACE = 2.0
_CLEARS = 10.0                                       # seconds in which ranks are told that a save has failed
_LOOK = 0.25                                         # seconds between looks whether they live
_AWAY = 5.0                                          # seconds for which the folder may not be readable
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
    flat = collective_try("saving a checkpoint", lambda: checked_flat(state),
                          lambda flat: f"{state_in_a_line(flat)}, into {path}")
    check_same_values(flat)
    tensors = with_sums_reduced(flat.tensors)
    pieces = assign_writers(tensors, range(world_size()))
    held: list[Lease] = []
    try:
        collective_try("making the folder of a checkpoint",
                       lambda: held.append(folders.start_version(path)) if world().rank == 0 else None)
        lease = held[0] if held else None
        temporary = path / broadcast_object(lease.folder.name if lease else "", 0, "naming a checkpoint")
        data = collective_try("copying what a checkpoint is to hold",
                              lambda: data_to_write(tensors, pieces, asynchronous, temporary))
    except BaseException:
        for lease in held:
            lease.discard()
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
        self._marks = Marks(temporary, self.path)
        first: dict[int, str] = {}                   # tied tensors share the pieces of the first name
        self._names = {name: first.setdefault(id(t), name) for name, t in tensors.items()}
        self._state, self._random = flat.state, torch.get_rng_state().numpy().tobytes().hex()
        self._entries = {name: (t.dtype, tuple(t.shape), isinstance(t, GlobalTensor)) for name, t in tensors.items()}
        self._error: CheckpointError | None = None
        self._reported = False
        self._troubles: list[str] = []               # of a version that is saved, which nobody was told of yet
        self._ranks_written = 0                      # that rank 0 knows of
        self._rank, self._ranks = world().rank, world_size()
        self._written = threading.Event()            # or failed
        self._thread = threading.Thread(target=self._run, name=f"saving {self.path.name}")
        try:
            self._thread.start()                     # not a daemon: a program that ends waits for it
        except RuntimeError as error:                # no more threads
            for rank in data:
                self._marks.leave(f"rank-{rank}.failed", f"rank {rank}: {error}")
            self._fail(error)

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
        self._warn()
        return self.path

    def wait(self) -> Folder:
        """The same, and until old versions are deleted."""
        self.wait_until_written()
        self._join()
        self._warn()
        return self.path

    def join_and_warn(self) -> None:
        """Before the next save: wait until it has ended. An error that nobody was told of becomes a warning."""
        self._join()
        self._warn()
        if self._error is not None and not self._reported:
            warn(f"an earlier save failed: {self._error.what}", RuntimeWarning)

    def _join(self) -> None:
        if self._thread.ident is not None:           # it has begun
            self._thread.join()

    def _warn(self) -> None:
        while self._troubles:
            warn(self._troubles.pop(0), RuntimeWarning)

    def _run(self) -> None:
        act_for(self._at)
        try:
            try:
                self._write()
                if self._rank == 0:
                    self._commit()
                else:
                    self._await(self._published, "failed", 0, "to finish")
            except BaseException as error:           # SystemExit, too, would end the thread as if all were well
                self._fail(error)
                return
            old = self._settle() if self._lease is not None else []
            _log.info("saved %s", self.path)
            self._written.set()
            for folder in old:
                if (kept := remove_or_age(folder)) is not None:
                    self._note_trouble(f"{folder} could not be deleted", kept)
        finally:
            self._data = {}
            self._written.set()

    def _settle(self) -> list[Folder]:
        """What is left to do of a version that is saved; what is left of old ones, to be deleted."""
        assert self._lease is not None
        try:
            folders.settle(self._lease)
            return folders.retire_old(self.path.parent, self._keep) if self._keep is not None else []
        except Exception as error:                   # the other ranks have seen that it is saved, and go on
            self._note_trouble("not all was done that comes behind that", error)
            return []

    def _note_trouble(self, what: str, error: BaseException) -> None:
        """Of a version that is saved. A thread has no caller: the next call of the program warns."""
        self._troubles.append(f"{self.path} is saved, but {what}: {type(error).__name__}: {error}")
        _log.info("%s", self._troubles[-1])

    def _fail(self, error: BaseException) -> None:
        """Keep what `wait` will raise, tell the other ranks, and delete what was written."""
        if isinstance(error, CheckpointError):
            self._error = error
            note = f"{error.what.removeprefix(f'{self.path} was not written: ')}\n{error.why}"
        else:
            note = f"rank {self._rank}: {type(error).__name__}: {error}\n"
            advice = ErrorNote.of(error, "writing it")
            self._error = CheckpointError(f"{self.path} could not be written: {type(error).__name__}: {error}",
                                          advice.why, advice.fix)
            self._error.__cause__ = error
        _log.info("not saved: %s", self._error.what)
        if self._lease is not None:
            folders.take_back(self._lease, self._temporary)
            self._marks.leave("failed", note)
            self._lease.give_up()
            self._clear_up(self._lease)
        else:
            self._marks.leave(f"rank-{self._rank}.told", "told")
        self._written.set()

    def _clear_up(self, lease: Lease) -> None:
        """Delete what was written, as soon as each rank is told why, or is lost; until then some may still write. Where
        that takes too long, the next save does it."""
        others = [] if world().single_process else [rank for rank in range(self._ranks) if rank != self._rank]
        if others:
            self._written.set()                      # nobody waits here for that
        limit = time.monotonic() + _CLEARS
        while others and time.monotonic() < limit:
            with suppress(Exception):                # it may be read again soon; the error of the save says more
                others = [rank for rank in others if not self._marks.is_there(f"rank-{rank}.told")
                          and lost_rank([rank]) is None]
            time.sleep(0.02)
        if others:
            lease.give_up()                          # what ranks wrote meanwhile makes it no new one
        else:
            lease.discard()

    def _write(self) -> None:
        """Write the file of each rank that this process drives, then its mark."""
        for rank in list(self._data):
            try:
                data = self._data.pop(rank)
                file = f"rank-{rank:05d}.safetensors"
                by_key = {piece.key: t for piece, t in data.items()}
                hashes = write_hashed(self._temporary / file, by_key) if data else {}
                written = [[piece.name, file, piece.key, piece.region, hashes[piece.key]] for piece in data]
                write_atomically(self._temporary / f"rank-{rank}.done", json.dumps(written).encode(), durable=False)
            except BaseException as error:
                self._marks.leave(f"rank-{rank}.failed",
                                  f"rank {rank}: {type(error).__name__}: {in_short(message_of(error))}")
                raise

    def _published(self) -> bool:
        latest = folders.latest(self.path.parent)
        # or a later one: another job may have saved meanwhile
        return latest is not None and latest[0].name >= self.path.name and (
            latest[0] == self.path or (self.path / folders.MANIFEST).is_file())

    def _commit(self) -> None:
        """Wait for all ranks, assemble the manifest, publish."""
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
        folders.publish(self._lease, self.path, data, hashlib.sha256(data).hexdigest())
        self._marks.note_saved()

    def _await(self, ready: Callable[[], bool], failure: str, rank: int, what: str) -> None:
        """Wait for that rank until it is `ready`. Raises the error that the file `failure` tells of, as soon as there
        is one, and where the rank is lost."""
        began = looked = seen = time.monotonic()
        while True:
            now = time.monotonic()
            closely = now - looked > _LOOK
            looked = now if closely else looked
            ready_now = self._look(ready, failure, rank, what, closely)
            if ready_now is True:
                return
            if ready_now is False:
                seen = now
            elif now - seen > _AWAY:                 # a file server may be away for a moment
                raise ready_now
            waited = now - began
            # rank 0 says which rank it waited for in vain: the others, who wait for rank 0, let it
            if waited > min(TIMEOUT, patience()) + (0 if self._rank == 0 else _GRACE):
                raise CheckpointError(f"{self.path} was not written: waited {waited:.0f} seconds for rank {rank} "
                                      f"{what}", stacks_of([rank]), "gt.init(timeout=...) where its disk may take "
                                      "longer")
            # adds 2% at most; a store is asked over a network, and may charge for it
            time.sleep(min(max(0.001, waited / 50), 0.05 if isinstance(self.path, Path) else 1.0))

    def _look(self, ready: Callable[[], bool], failure: str, rank: int, what: str, closely: bool) -> bool | Exception:
        """Is it ready? An exception where that cannot be seen. Raises CheckpointError where it will never be."""
        unseen: Exception | None = None
        try:
            if ready():
                return True
        except Exception as error:
            unseen = error
            if self._rank != 0 and closely and self._marks.is_noted_saved():
                return True
        try:
            self._raise_if(failure, closely)         # also then: rank 0 may have found the same
            gone = closely and not (self._temporary.is_dir() or self.path.is_dir())
        except CheckpointError:
            raise
        except Exception as error:
            unseen = unseen or error
        if unseen is not None or not closely:
            return unseen or False
        loss = lost_rank([rank])
        if loss is None and not gone or ready():     # it may have finished, and its program too, since it was not ready
            return False
        self._raise_if(failure)
        if loss is not None:
            raise CheckpointError(f"{self.path} was not written: {first_lost(loss).how}",
                                  f"rank {self._rank} waited for it {what}",
                                  "look at its own error, and at what its host says of it")
        raise CheckpointError(f"{self.path} was not written: its folder has been removed",
                              "rank 0 gave it up, or somebody else deleted it", "look at the first error of rank 0")

    def _raise_if(self, failure: str, closely: bool = True) -> None:
        text = self._marks.find(failure, closely)
        if text is not None:
            what, _, why = text.partition("\n")
            error = CheckpointError(f"{self.path} was not written: {what}",
                                    why or f"the file {failure} is in {self._temporary}")
            error.follows = True
            raise error


def _join_earlier(path: Folder) -> None:
    """One save at a time into a directory; the error of one that nobody waited for becomes a warning."""
    earlier = _running.pop(path, None)
    if earlier is not None:
        earlier.join_and_warn()
