"""Whose is a temporary folder? A lease in it says who writes it, so that nobody deletes what another job is writing.

    step-00000004.tmp-1f3a.../lease         {"host": "...", "pid": 4711, "began": 123456, "time": 1700000000.0}

A lease is live as long as its process is, where that can be seen; that of another host for as long as it is renewed.
There is no lock: nothing here needs that two hosts see at once what the other one did, only that they see it within
`STALE` seconds. A folder without a lease is of nobody, and is kept only as long as it is new.
"""
from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from globaltensor.checkpoint.files import make_folder, read_regular, write_atomically
from globaltensor.checkpoint.remote import Folder, RemotePath
from globaltensor.runtime.host_processes import ENDED, ProcessId, own_process, process_state

LEASE = "lease"
STALE = 120.0                                        # seconds
RENEW = 10.0


class Lease:
    """This process writes into a folder, which is made with the lease in it, until `stop` or `give_up`."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        make_folder(folder, LEASE, lease_text())
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.renew, daemon=True, name=f"lease of {folder.name}")
        self.thread.start()

    def renew(self) -> None:
        while not self.ended.wait(RENEW):
            with suppress(Exception):                # a full disk, a lost store: the save fails of it, and says so
                write_atomically(self.folder / LEASE, lease_text(), durable=False)

    def stop(self) -> None:
        """The folder is about to be renamed; the lease in it counts for some time yet."""
        self.ended.set()
        self.thread.join()

    def give_up(self) -> None:
        """The folder may be deleted at once. Needs no room on the disk."""
        self.stop()
        with suppress(Exception):                    # the folder may be gone, or its store: which is as good
            (self.folder / LEASE).unlink(missing_ok=True)
            if isinstance(self.folder, Path):
                os.utime(self.folder, (0, 0))


def lease_text() -> bytes:
    own = own_process()
    return json.dumps({"host": own.host, "pid": own.pid, "began": own.began, "name": socket.gethostname(),
                       "time": time.time()}).encode()


def writer(path: Folder) -> str:
    """Who writes into this folder, in a few words; "" for nobody."""
    if (lease := _read_lease(path)) is None:
        return ""
    process, age, name = lease
    live = process_state(process) != ENDED if process.here else age < STALE
    return f"process {process.pid} on {name}" if live else ""


def is_orphan(path: Folder) -> bool:
    """Has the process that wrote into this folder ended, for certain? Then it may be deleted, be it new or not."""
    lease = _read_lease(path)
    return lease is not None and lease[0].here and process_state(lease[0]) == ENDED


def _read_lease(path: Folder) -> tuple[ProcessId, float, str] | None:
    """Of the lease in this folder its process, its age and the name of the host; None where there is none."""
    try:
        values = json.loads(read_regular(path / LEASE))
        process = ProcessId(str(values["host"]), int(values["pid"]), int(values["began"]))
        return process, time.time() - float(values["time"]), str(values["name"])
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
