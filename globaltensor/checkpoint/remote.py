"""Folders that are URLs of fsspec's, such as s3://bucket/run, in the words of pathlib.

A store of objects has no renames and no fsync, and an object appears whole or not at all. So the folder of a version
has its name from the start, with a token that nobody else draws, and becomes a version when its manifest appears.
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from globaltensor.checkpoint.manifest import CheckpointError
from globaltensor.errors import expect_path


@dataclass(frozen=True)
class RemotePath:
    """A file or folder of a store: what of `pathlib.Path` checkpoints need."""

    store: Any                                       # a file system of fsspec's
    path: str

    def __str__(self) -> str:
        return str(self.store.unstrip_protocol(self.path))

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.store, f"{self.path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.store, self.path.rpartition("/")[0])

    def is_dir(self) -> bool:
        return bool(self.store.isdir(self.path))

    def is_file(self) -> bool:
        return bool(self.store.isfile(self.path))

    def exists(self) -> bool:
        return bool(self.store.exists(self.path))

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator[RemotePath]:
        self.store.invalidate_cache()                # other jobs write here, too
        with suppress(FileNotFoundError):
            for path in self.store.ls(self.path, detail=False):
                yield RemotePath(self.store, path.rstrip("/"))

    def read_bytes(self) -> bytes:
        return bytes(self.store.cat_file(self.path))

    def write_bytes(self, data: bytes) -> None:
        self.store.pipe_file(self.path, data)

    def upload(self, file: Path) -> None:
        self.store.put_file(str(file), self.path)

    def download(self, file: Path) -> None:
        self.store.get_file(self.path, str(file))

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self.store.rm_file(self.path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Delete a folder that another job may be deleting, too."""
        with suppress(FileNotFoundError):
            self.store.rm(self.path, recursive=True)


Folder: TypeAlias = Path | RemotePath


def folder_at(target: str | os.PathLike[str]) -> Folder:
    """The folder of that path or URL. Raises CheckpointError for a URL that fsspec cannot open."""
    expect_path(target, "a checkpoint in no folder", 'a path, or a URL: gt.save(state, "run"), gt.load(state, "run")')
    text = os.fspath(target)
    if "://" not in text:
        return Path(os.path.abspath(text))
    try:
        # fsspec comes with torch; it is imported only here, as it takes a while
        store, path = import_module("fsspec.core").url_to_fs(text, use_listings_cache=False)
    except (ValueError, ImportError) as error:       # a protocol that nobody knows, or whose package is missing
        raise CheckpointError(f"no checkpoints in {text}", str(error),
                              "a folder, or a URL of a store that fsspec knows: s3://bucket/run (pip install s3fs)"
                              ) from None
    return Path(path) if "file" in store.protocol else RemotePath(store, path.rstrip("/"))
