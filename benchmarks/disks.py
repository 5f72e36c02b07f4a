"""A disk that can be filled and stopped: a small ext4 in a file, which nobody else sees.

It is mounted for this process and its children only, so that nothing of it is left when they end. That takes root,
mkfs.ext4 and a loop device.
"""
from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

TOOLS = ("mkfs.ext4", "mount", "umount", "fsfreeze")
_NEW_MOUNTS = 0x00020000                             # CLONE_NEWNS


def lacking() -> str:
    """Why there can be no such disk; "" where there can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or not os.path.exists("/dev/loop-control"):
        return "mounting takes root and loop devices"
    return f"not installed: {', '.join(missing)}" if missing else ""


class Disk:
    """Mounted at `path`, until `close`."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.path, image = folder / "disk", folder / "image"
        self.path.mkdir()
        with open(image, "wb") as file:
            file.truncate(megabytes << 20)
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS) != 0:
            raise OSError(ctypes.get_errno(), "no namespace of mounts")
        _run("mount", "--make-rprivate", "/")
        _run("mkfs.ext4", "-q", "-F", "-m", "0", image)          # root, too, sees it full
        _run("mount", "-o", "loop", image, self.path)

    def fill(self) -> None:
        """Until `empty`, nothing can be written."""
        with open(self.path / "filler", "wb", buffering=0) as file:
            for size in (1 << 20, 4096):
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    def empty(self) -> None:
        (self.path / "filler").unlink()

    def stop(self) -> None:
        """Until `go_on`, everybody who writes waits."""
        _run("fsfreeze", "-f", self.path)

    def go_on(self) -> None:
        _run("fsfreeze", "-u", self.path)

    def close(self) -> None:
        """Not before all who use it have ended."""
        _run("umount", self.path)


def _run(*command: str | Path) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise OSError(errno.EIO, f"{' '.join(map(str, command))}: {ended.stderr.strip()}")
