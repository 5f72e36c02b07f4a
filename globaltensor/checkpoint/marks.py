"""How the ranks of a save tell each other how far they are: by small files in its folder, `rank-2.done` or `failed`.

What may have failed is the disk itself. One that is full has room for a name at most, and one that the system has made
read-only has not: then the store of the job has what the file was to say.
"""
from __future__ import annotations

from contextlib import suppress

from globaltensor.checkpoint.files import write_atomically
from globaltensor.checkpoint.remote import Folder
from globaltensor.errors import TransportError
from globaltensor.runtime.liveness import job_store
from globaltensor.runtime.store_tree import read_message, write_message


class Marks:
    """Of one save, whose folder has one of these names, the first of which nobody else uses."""

    def __init__(self, *folders: Folder) -> None:
        self.folders = list(dict.fromkeys(folders))

    def leave(self, name: str, text: str) -> None:
        """Tell the other ranks. Raises nothing: it is done where a save has failed, whose error says more."""
        for folder in self.folders:
            with suppress(Exception):
                write_atomically(folder / name, text.encode(), durable=False)
                return
        _leave_note(self._key(name), text)
        for folder in self.folders:                  # of a full disk, on which there is still room for a name
            with suppress(Exception):
                (folder / name).write_bytes(b"")
                return

    def find(self, name: str, closely: bool = True) -> str | None:
        """What was told by that name; None where nothing was, where one looks `closely` also in the store. Raises
        OSError where the folder cannot be read."""
        for folder in self.folders:
            with suppress(FileNotFoundError):
                text = (folder / name).read_bytes().decode()
                return text or _read_note(self._key(name)) or "without a message"
        return _read_note(self._key(name)) if closely else None

    def is_there(self, name: str) -> bool:
        """Was something told by that name? Raises OSError where that cannot be seen."""
        return _read_note(self._key(name)) is not None or any((folder / name).exists() for folder in self.folders)

    def note_saved(self) -> None:
        """Tell ranks that cannot read the folder, in the store."""
        _leave_note(self._key("saved"), "saved")

    def is_noted_saved(self) -> bool:
        return _read_note(self._key("saved")) is not None

    def _key(self, name: str) -> str:
        return f"globaltensor save {self.folders[0].name}: {name}"


def _leave_note(key: str, text: str) -> None:
    if (store := job_store()) is not None:
        with suppress(RuntimeError):                 # it has ended with the rank that kept it
            write_message(store, key, text)


def _read_note(key: str) -> str | None:
    note = None
    if (store := job_store()) is not None:
        with suppress(RuntimeError, TransportError):
            note = read_message(store, key)
    return note if isinstance(note, str) else None
