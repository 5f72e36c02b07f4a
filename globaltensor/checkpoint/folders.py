"""The folder of a checkpoint: versions that appear atomically.

    directory/latest                            one line: the version to load, and the hash of its manifest
    directory/step-00000003/                    a version: manifest.json and rank-*.safetensors
    directory/step-00000004.tmp-1f3a.../        a version that is being written, or whose writer died

A version is written to a temporary folder, fsynced and renamed; then `latest` is replaced, which is a rename too. A
rename is atomic: a crash at any moment leaves the previous version or the new one intact.

In a store (remote.py) a version is written where it stays, step-00000004-1f3a..., and is one once it has a manifest.
"""
from __future__ import annotations

import errno
import os
import random
import re
import time
from contextlib import suppress
from pathlib import Path

from globaltensor.checkpoint.files import read_regular, remove, replace_file, sync, temporary_name, write_atomically
from globaltensor.checkpoint.lease import Lease, is_new, is_orphan, writer
from globaltensor.checkpoint.manifest import CheckpointError
from globaltensor.checkpoint.remote import Folder, RemotePath
from globaltensor.errors import warn

MANIFEST = "manifest.json"
LATEST = "latest"
PATIENCE = 1800.0                                    # seconds that a job waits until another one has saved
_VERSION = re.compile(r"step-(\d{8,})(-[0-9a-f]{16})?")
_LEFTOVER = re.compile(r"\.?(step-\d{8,}|latest)\.tmp-[0-9a-f]{16}")
_LINE = re.compile(r"(step-\d{8,}(?:-[0-9a-f]{16})?) ([0-9a-f]{64})\n")


def versions(directory: Folder) -> list[str]:
    """The complete versions, oldest first."""
    complete = [p.name for p in directory.iterdir() if _VERSION.fullmatch(p.name) and (p / MANIFEST).is_file()]
    return sorted(complete, key=_version_number)


def _version_number(name: str) -> int:
    return int(name.split("-")[1])


def start_version(directory: Folder) -> Lease:
    """Remove what failed saves left behind, choose the next version's name, and make a temporary folder for it, with a
    lease. Waits for another job that is writing into this folder.

    Raises CheckpointError where that takes more than `PATIENCE` seconds.
    """
    if isinstance(directory, Path):
        directory.mkdir(parents=True, exist_ok=True)
        sync(directory.parent)                       # else the folder itself could be gone after a crash
    limit, warned = time.monotonic() + PATIENCE, False
    while True:
        lease = None
        if not (other := _other_writer(directory)):
            taken = [_version_number(p.name) for p in directory.iterdir() if _VERSION.fullmatch(p.name)]
            name = f"step-{max(taken, default=0) + 1:08d}"
            folder = temporary_name(directory / name)
            lease = Lease(folder)
            try:
                other = _other_writer(directory, folder)
            except BaseException:
                lease.discard()
                raise
        if not other:
            assert lease is not None
            return lease
        if lease is not None:                        # two jobs that began at the same time: both step back
            lease.give_up()
            remove(lease.folder)
        if time.monotonic() > limit:
            raise CheckpointError(f"{directory} is being written by {other}, for more than {PATIENCE:.0f} s",
                                  "one save at a time goes into a folder", "another folder, or end that job")
        if not warned:
            warned = True
            warn(f"{other} saves into {directory}, too: its versions and those of this job count as one row")
        time.sleep(random.uniform(0.02, 0.2))


def _other_writer(directory: Folder, own: Folder | None = None) -> str:
    """Who else is writing a version into this folder; "" for nobody. What nobody writes any more is removed."""
    # the newest version has a lease until `latest` names it
    others = [writer(directory / name) for name in versions(directory)[-1:]]
    paths: list[Folder] = list(directory.iterdir())
    for path in paths:
        if _is_unfinished(path) and path != own:
            others.append(writer(path))
            if not others[-1] and (is_orphan(path) or not is_new(path)):
                remove(path)
    return next(filter(None, others), "")


def _is_unfinished(path: Folder) -> bool:
    if isinstance(path, RemotePath):
        return _VERSION.fullmatch(path.name) is not None and not (path / MANIFEST).is_file()
    return _LEFTOVER.fullmatch(path.name) is not None


def publish(lease: Lease, final: Folder, manifest: bytes, digest: str) -> None:
    """The version in the folder of the lease, whose other files are on the disk, becomes the latest one."""
    write_atomically(lease.folder / MANIFEST, manifest)
    # from here on the version can be named; `load(directory)` still takes the one before, until `latest` is replaced
    lease.stop()
    if isinstance(final, Path):
        lease.move(final)
        sync(final.parent)
    try:
        replace_file(final.parent / LATEST, f"{final.name} {digest}\n".encode())
    except Exception:                                # a file server may have done it, but not have said so
        if not _is_published(final):
            raise


def _is_published(final: Folder) -> bool:
    with suppress(Exception):                        # it cannot be read, either
        named = latest(final.parent)
        return named is not None and named[0] == final
    return False


def settle(lease: Lease) -> None:
    """What is left to do behind that. Nothing that fails here takes the version back: other ranks have seen it."""
    try:
        if isinstance(lease.folder, Path):
            sync(lease.folder.parent)
    finally:
        lease.end()                                  # only now: until then no other job writes `latest`


def take_back(lease: Lease, temporary: Folder) -> None:
    """What `latest` does not name is not a version any more, if it was one. Raises nothing; needs no room."""
    with suppress(Exception):
        if lease.folder != temporary:
            lease.move(temporary)
    with suppress(Exception):
        (lease.folder / MANIFEST).unlink(missing_ok=True)


def retire_old(directory: Folder, keep: int) -> list[Folder]:
    """All but the last `keep` versions are no longer versions. Their folders, which are left to `remove`."""
    retired: list[Folder] = []
    for folder in [directory / name for name in versions(directory)[:-keep]]:
        with suppress(FileNotFoundError):            # another job has deleted it meanwhile
            if isinstance(folder, RemotePath):
                (folder / MANIFEST).unlink()
                retired.append(folder)
            else:
                temporary = temporary_name(folder)
                os.rename(folder, temporary)
                retired.append(temporary)
    return retired


def latest(directory: Folder) -> tuple[Folder, str] | None:
    """The folder that `latest` names and the hash of its manifest; None where there is no such file."""
    try:
        line = read_regular(directory / LATEST).decode("latin-1")
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise CheckpointError(f"no checkpoint in {directory}", "it is a file, and a folder is loaded into a state",
                              f'gt.load("{directory}"), which gives what the file holds') from None
    except OSError as error:
        raise CheckpointError(f"{directory / LATEST} cannot be read", error.strerror or str(error),
                              f"name a version: load(state, '{directory}/step-...')") from None
    match = _LINE.fullmatch(line)
    if match is None:
        raise CheckpointError(f"{directory / LATEST} is damaged", f"it says {line!r:.80}, not a version and a hash",
                              f"name a version: load(state, '{directory}/step-...')")
    return directory / match[1], match[2]


def find_version(directory: Folder) -> tuple[Folder, bytes, str]:
    """The version to load, the bytes of its manifest, and their hash where `latest` names one, else "".

    `directory` may be a version itself. Raises CheckpointError where there is none.
    """
    version = (directory, "") if (directory / MANIFEST).is_file() else latest(directory)
    if version is None:
        why = "there is no such folder" if not directory.is_dir() else f"the folder has no file {LATEST!r}"
        raise CheckpointError(f"no checkpoint in {directory}", why, "the directory that was passed to save")
    folder, digest = version
    try:
        if folder != directory and folder.is_symlink():
            raise OSError(errno.ELOOP, f"{folder} is a link to a folder elsewhere")
        return folder, read_regular(folder / MANIFEST), digest
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read", error.strerror or str(error),
                              f"an older version: load(state, '{directory}/step-...')") from None
