"""Whose is a temporary folder? A lease in it says who writes it, so that nobody deletes what another job is writing.

    step-00000004.tmp-1f3a.../lease         {"host": "...", "pid": 4711, "began": 123456, "time": 1700000000.0}

A lease is live as long as its process is, where that can be seen; that of another host for as long as it is renewed.
There is no lock: nothing here needs that two hosts see at once what the other one did, only that they see it within
`STALE` seconds. A folder without a lease is of nobody, and is kept only as long as it is new.
"""
from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from globaltensor.checkpoint.files import make_folder, read_regular, remove_or_age, write_atomically
from globaltensor.checkpoint.remote import Folder, RemotePath
from globaltensor.runtime.host_processes import ENDED, ProcessId, own_process, process_state

LEASE = "lease"
STALE = 120.0                                        # seconds
RENEW = 10.0


class Lease:
    """This process writes into a folder, which is made with the lease in it, until `stop` or `give_up`."""

    def __init__(self, folder: Folder) -> None:
        self.folder, self.token, self.ended = folder, secrets.token_hex(8), threading.Event()
        _held.add(self.token)
        self.thread = threading.Thread(target=self.renew, daemon=True, name=f"lease of {folder.name}")
        try:
            make_folder(folder, LEASE, lease_text(self.token))
            self.thread.start()
        except BaseException:                        # no more threads, say
            self.discard()
            raise

    def renew(self) -> None:
        while not self.ended.wait(RENEW):
            with suppress(Exception):                # a full disk, a lost store: the save fails of it, and says so
                write_atomically(self.folder / LEASE, lease_text(self.token), durable=False)

    def stop(self) -> None:
        """Renew it no more: it counts for some time yet."""
        self.ended.set()
        if self.thread.ident is not None:            # it has begun
            self.thread.join()

    def move(self, to: Folder) -> None:
        """Rename the folder, which takes the lease with it."""
        self.stop()
        os.rename(str(self.folder), str(to))
        self.folder = to

    def end(self) -> None:
        """The folder is as it is to stay. Whether or not the file can be deleted, this process takes it for ended."""
        self.stop()
        _held.discard(self.token)
        (self.folder / LEASE).unlink(missing_ok=True)

    def give_up(self) -> None:
        """The folder may be deleted at once. Needs no room on the disk."""
        with suppress(Exception):                    # the folder may be gone, or its store: which is as good
            self.end()
        with suppress(Exception):
            if isinstance(self.folder, Path):
                os.utime(self.folder, (0, 0))

    def discard(self) -> None:
        """Delete the folder. Raises nothing: what cannot be deleted is left to the next save."""
        self.give_up()
        remove_or_age(self.folder)


_held: set[str] = set()                              # the tokens of leases of this process that have not ended


def lease_text(token: str) -> bytes:
    own = own_process()
    return json.dumps({"host": own.host, "pid": own.pid, "began": own.began, "name": socket.gethostname(),
                       "time": time.time(), "token": token}).encode()


def writer(path: Folder) -> str:
    """Who writes into this folder, in a few words; "" for nobody."""
    lease = _read_lease(path)
    return lease[0] if lease is not None and not lease[1] and lease[2] else ""


def is_orphan(path: Folder) -> bool:
    """Has who wrote into this folder ended, for certain? Then it may be deleted, be it new or not."""
    lease = _read_lease(path)
    return lease is not None and lease[1]


def _read_lease(path: Folder) -> tuple[str, bool, bool] | None:
    """Of the lease in this folder: whose it is, whether that has ended for certain, and whether the lease is one that
    counts if it has not; None where there is none. A save of this process may have ended without it, and its lease
    could not be deleted."""
    try:
        values = json.loads(read_regular(path / LEASE))
        process = ProcessId(str(values["host"]), int(values["pid"]), int(values["began"]))
        ended = process.here and process_state(process) == ENDED or (
            process == own_process() and values.get("token", "") not in {"", *_held})
        new = process.here or time.time() - float(values["time"]) < STALE
        return f"process {process.pid} on {values['name']}", ended, new
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_new(path: Folder) -> bool:
    """Has this folder or file changed within the last `STALE` seconds? False where it is gone."""
    if isinstance(path, RemotePath):
        return False                                 # its first object is a lease: without one it is being deleted
    try:
        return time.time() - path.lstat().st_mtime < STALE
    except FileNotFoundError:
        return False
