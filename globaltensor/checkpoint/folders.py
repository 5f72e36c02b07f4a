"""The folder of a checkpoint: versions that appear atomically.

    directory/latest                            one line: the version to load, and the hash of its manifest
    directory/step-00000003/                    a version: manifest.json and rank-*.safetensors
    directory/step-00000004.tmp-1f3a.../        a version that is being written, or whose writer died

A version is written to a temporary folder, fsynced and renamed; then `latest` is replaced, which is a rename too. A
rename is atomic: a crash at any moment leaves the previous version or the new one intact.
"""
from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from globaltensor.checkpoint.manifest import CheckpointError

MANIFEST = "manifest.json"
LATEST = "latest"
_VERSION = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"(step-\d{8,}|latest)\.tmp-[0-9a-f]{16}")
_LINE = re.compile(r"(step-\d{8,}) ([0-9a-f]{64})\n")


def versions(directory: Path) -> list[str]:
    """The complete versions, oldest first."""
    complete = [p.name for p in directory.iterdir() if _VERSION.fullmatch(p.name) and (p / MANIFEST).is_file()]
    return sorted(complete, key=_version_number)


def _version_number(name: str) -> int:
    return int(name.removeprefix("step-"))


def start_version(directory: Path) -> tuple[str, Path]:
    """Remove what failed saves left behind, choose the next version's name, and make a temporary folder for it."""
    directory.mkdir(parents=True, exist_ok=True)
    sync(directory.parent)                           # else the folder itself could be gone after a crash
    for path in list(directory.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    taken = [_version_number(p.name) for p in directory.iterdir() if _VERSION.fullmatch(p.name)]
    name = f"step-{max(taken, default=0) + 1:08d}"
    folder = temporary_name(directory / name)
    folder.mkdir()
    return name, folder


def temporary_name(path: Path) -> Path:
    """A name in the same folder that nobody else uses."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(8)}")


def write_atomically(path: Path, data: bytes, durable: bool = True) -> None:
    """A file of these bytes, on the disk when this returns; a reader sees all of it or no file.

    `durable` False: still atomic, but not fsynced; for what matters only while the writer is alive.
    """
    temporary = temporary_name(path)
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """fsync a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(folder: Path, final: Path, manifest: bytes, digest: str) -> None:
    """The version in `folder`, whose other files are on the disk, becomes the latest one."""
    write_atomically(folder / MANIFEST, manifest)
    # from here on the version can be named; `load(directory)` still takes the one before, until `latest` is replaced
    os.rename(folder, final)
    sync(final.parent)
    write_atomically(final.parent / LATEST, f"{final.name} {digest}\n".encode())


def delete_old(directory: Path, keep: int) -> None:
    """Delete all but the last `keep` versions; one that is partly deleted no longer has a version's name."""
    for name in versions(directory)[:-keep]:
        temporary = temporary_name(directory / name)
        os.rename(directory / name, temporary)
        shutil.rmtree(temporary)


def latest(directory: Path) -> tuple[Path, str] | None:
    """The folder that `latest` names and the hash of its manifest; None where there is no such file."""
    try:
        line = (directory / LATEST).read_bytes().decode("latin-1")
    except FileNotFoundError:
        return None
    match = _LINE.fullmatch(line)
    if match is None:
        raise CheckpointError(f"{directory / LATEST} is damaged", f"it says {line!r:.80}, not a version and a hash",
                              f"name a version: load(state, '{directory}/step-...')")
    return directory / match[1], match[2]


def find_version(directory: Path) -> tuple[Path, bytes, str]:
    """The version to load, the bytes of its manifest, and their hash where `latest` names one, else "".

    `directory` may be a version itself. Raises CheckpointError where there is none.
    """
    version = (directory, "") if (directory / MANIFEST).is_file() else latest(directory)
    if version is None:
        why = "there is no such folder" if not directory.is_dir() else f"the folder has no file {LATEST!r}"
        raise CheckpointError(f"no checkpoint in {directory}", why, "the directory that was passed to save")
    folder, digest = version
    try:
        return folder, (folder / MANIFEST).read_bytes(), digest
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read", error.strerror or str(error),
                              f"an older version: load(state, '{directory}/step-...')") from None
