"""The folder of a checkpoint: versions that appear whole or not at all.

    directory/latest                            one line: the version to load, and the hash of its manifest
    directory/step-00000003/                    a version: manifest.json and rank-*.safetensors
    directory/step-00000004.tmp-1f3a.../        a version that is being written, or whose writer died

A version is written aside, brought to the disk (fsync), renamed to its name, and then `latest` is replaced, which is a
rename too. A rename happens or does not: whoever is killed at any moment leaves the old version or the new one.
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
_LEFT_OVER = re.compile(r"(step-\d{8,}|latest)\.tmp-[0-9a-f]{16}")
_LINE = re.compile(r"(step-\d{8,}) ([0-9a-f]{64})\n")


def versions(directory: Path) -> list[str]:
    """The complete versions, oldest first."""
    found = [p.name for p in directory.iterdir() if _VERSION.fullmatch(p.name) and (p / MANIFEST).is_file()]
    return sorted(found, key=_number)


def _number(name: str) -> int:
    return int(_VERSION.fullmatch(name)[1])


def start(directory: Path) -> tuple[str, Path]:
    """Clear what dead saves left, choose the next version's name, and make the folder in which it is written."""
    directory.mkdir(parents=True, exist_ok=True)
    sync(directory.parent)
    for path in list(directory.iterdir()):
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    taken = [_number(p.name) for p in directory.iterdir() if _VERSION.fullmatch(p.name)]
    name = f"step-{max(taken, default=0) + 1:08d}"
    folder = aside(directory / name)
    folder.mkdir()
    return name, folder


def aside(path: Path) -> Path:
    """A name beside this one that nobody else uses."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(8)}")


def write(path: Path, data: bytes, durable: bool = True) -> None:
    """A file of these bytes, on the disk when this returns; whoever reads sees all of it or no file.

    `durable` False: as whole, but not brought to the disk; for what matters only while the writer lives.
    """
    beside = aside(path)
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    os.replace(beside, path)
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(folder: Path, final: Path, manifest: bytes, digest: str) -> None:
    """The version in `folder`, whose other files are on the disk, becomes the latest one."""
    write(folder / MANIFEST, manifest)
    os.rename(folder, final)
    sync(final.parent)
    write(final.parent / LATEST, f"{final.name} {digest}\n".encode())


def forget(directory: Path, keep: int) -> None:
    """Delete all but the last `keep` versions; one that is half deleted no longer has a version's name."""
    for name in versions(directory)[:-keep]:
        gone = aside(directory / name)
        os.rename(directory / name, gone)
        shutil.rmtree(gone)


def latest(directory: Path) -> tuple[Path, str] | None:
    """The folder that `latest` names and the hash of its manifest; None where there is no such file."""
    try:
        line = (directory / LATEST).read_bytes().decode("latin-1")
    except FileNotFoundError:
        return None
    found = _LINE.fullmatch(line)
    if found is None:
        raise CheckpointError(f"{directory / LATEST} is damaged", f"it says {line!r:.80}, not a version and a hash",
                              f"a version itself: load(state, '{directory}/step-...')")
    return directory / found[1], found[2]


def find(directory: Path) -> tuple[Path, bytes, str]:
    """The version to load, the bytes of its manifest, and their hash where `latest` names one, else "".

    `directory` may be a version itself. Raises CheckpointError where there is none.
    """
    named = (directory, "") if (directory / MANIFEST).is_file() else latest(directory)
    if named is None:
        there = "there is no such folder" if not directory.is_dir() else f"the folder has no file {LATEST!r}"
        raise CheckpointError(f"no checkpoint in {directory}", there, "the directory that was given to save")
    folder, digest = named
    try:
        return folder, (folder / MANIFEST).read_bytes(), digest
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read", error.strerror or str(error),
                              f"an older version: load(state, '{directory}/step-...')") from None
