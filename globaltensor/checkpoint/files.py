"""Files that appear whole or not at all, and files that are read only where they are plain files.

What stands in the folder of a checkpoint may have been put there by somebody else: a FIFO in a file's place would make
the reader wait for ever, and a link could lead it to any file of this user.
"""
from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import overload

from globaltensor.checkpoint.remote import Folder, RemotePath


@overload
def temporary_name(path: Path) -> Path: ...


@overload
def temporary_name(path: RemotePath) -> RemotePath: ...


def temporary_name(path: Folder) -> Folder:
    """A name in the same folder that nobody else uses; in a store it is the last one, as nothing can be renamed."""
    token = secrets.token_hex(8)
    if isinstance(path, RemotePath):
        return path.parent / f"{path.name}-{token}"
    return path.with_name(f"{path.name}.tmp-{token}")


@contextmanager
def removed_on_error(file: Path) -> Iterator[None]:
    """Inside, this file is written: half of it would fill a disk that is full."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            file.unlink()
        raise


def write_atomically(path: Folder, data: bytes, durable: bool = True) -> None:
    """A file of these bytes, on the disk when this returns; a reader sees all of it or no file.

    `durable` False: still atomic, but not fsynced; for what matters only while the writer is alive.
    """
    replace_file(path, data, durable)
    if durable and isinstance(path, Path):
        sync(path.parent)


def replace_file(path: Folder, data: bytes, durable: bool = True) -> None:
    """The same, but for the name: a crash of the host may bring back what had it before, until its folder is synced."""
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return
    temporary = temporary_name(path)
    with removed_on_error(temporary):
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)


def make_folder(folder: Folder, name: str, data: bytes) -> None:
    """A new folder, which appears with a file of these bytes in it; not durable."""
    if isinstance(folder, RemotePath):
        write_atomically(folder / name, data)
        return
    hidden = folder.with_name(f".{folder.name}")
    hidden.mkdir()
    try:
        write_atomically(hidden / name, data, durable=False)
        os.rename(hidden, folder)
    except BaseException:
        remove_or_age(hidden)
        raise


def sync(path: Path) -> None:
    """fsync a file, or the names in a folder."""
    closed = sys.platform == "win32"                # it opens no folders, and flushes only what it may write
    if closed and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if closed else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Folder) -> None:
    """Delete a folder or file that another job may be deleting, too."""
    if isinstance(path, RemotePath):
        path.remove()
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    while path.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def remove_or_age(path: Folder) -> Exception | None:
    """Delete what is of no use any more. What cannot be deleted is old from now on, so that the next save does it; why
    it cannot."""
    try:
        remove(path)
    except Exception as error:
        with suppress(Exception):
            if isinstance(path, Path):
                os.utime(path, (0, 0))
        return error
    return None


def read_regular(path: Folder) -> bytes:
    """The bytes of a file. OSError where it is a link, or no plain file: nothing is waited for."""
    if isinstance(path, RemotePath):
        return path.read_bytes()
    if not hasattr(os, "O_NOFOLLOW") and path.is_symlink():          # Windows
        raise OSError(errno.ELOOP, "a link")
    flags = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_NONBLOCK", "O_NOFOLLOW", "O_BINARY"))
    handle = os.open(path, flags)
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
