"""Files that appear whole or not at all, and files that are read only where they are plain files.

What stands in the folder of a checkpoint may have been put there by somebody else: a FIFO in a file's place would make
the reader wait for ever, and a link could lead it to any file of this user.
"""
from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path


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


def read_regular(path: Path) -> bytes:
    """The bytes of a file. OSError where it is a link, or no plain file: nothing is waited for."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        return file.read()


def check_plain(path: Path, folder: Path | None = None) -> None:
    """Check that a path leads to a plain file, in `folder` if that is named. OSError where it does not."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a plain file")
    if folder is not None and path.resolve().parent != folder.resolve():
        raise OSError(errno.ELOOP, "a link to a file elsewhere")
