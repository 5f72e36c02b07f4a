"""How much this process may have of its host, and what to type where that is too little."""
from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

from globaltensor.errors import TransportError

if sys.platform != "win32":
    import resource

_FILES = "ulimit -n 65536 before the job starts; docker run --ulimit nofile=65536; LimitNOFILE=65536 of a service"
_SPARE = 24                                          # files that a rank opens, however many others there are
_TO_STORE = 3                                        # connections that each rank has to the store


def why_unmapped(text: str) -> tuple[str, str]:
    """Why this process has no room for memory that ranks share, of which the system says `text`, and what to type."""
    if os.strerror(errno.EMFILE) in text:
        return "this process may open too few files (ulimit -n)", _FILES
    if os.strerror(errno.EFBIG) in text:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return (f"a file may have {most >> 10:,} KiB here (ulimit -f), and the memory that ranks share is one",
                "ulimit -f unlimited, in a shell that may raise it; or GLOBALTENSOR_NATIVE=0, which shares no memory")
    limit = _address_space()
    if limit is None:
        return "this host gives no such memory", "fewer ranks on it, or GLOBALTENSOR_NATIVE=0, which shares no memory"
    return (f"the address space of this process is limited to {limit >> 10:,} KiB (ulimit -v, SLURM's VSizeFactor, "
            "Grid Engine's h_vmem), and each rank maps what all ranks of its host share",
            "ulimit -v unlimited, or a larger limit; or GLOBALTENSOR_NATIVE=0, which shares no memory")


def _address_space() -> int | None:
    """The bytes that this process may map; None where nothing limits them."""
    if sys.platform == "win32":
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def allow_files(count: int) -> None:
    """Let this process have so many files open, if the system allows it: at first it may have few, mostly 1,024."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < soft < count:
        more = max(count, 2 * soft)
        with suppress(OSError, ValueError):          # macOS says that there is no limit, and has one
            resource.setrlimit(resource.RLIMIT_NOFILE, (more if hard < 0 else min(more, hard), hard))


def why_no_file() -> tuple[str, str] | None:
    """Where a launcher may open too few files: why, and what to type. torch would say it in other words, or crash."""
    if sys.platform == "win32" or not os.path.isdir("/dev/fd"):
        return None
    with suppress(OSError):                          # there is no room to look
        allow_files(count := len(os.listdir("/dev/fd")) + _SPARE)
        if not 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < count:
            return None
    return f"it may open too few files: {resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} (ulimit -n)", _FILES


def check_files(more: int, why: str) -> None:
    """Let this process open so many files more than it has, which are for `why`.

    Raises TransportError where the system allows fewer: torch would wait for ever, or say that another rank has ended.
    """
    if sys.platform == "win32" or not os.path.isdir("/dev/fd"):
        return
    allow_files(count := len(os.listdir("/dev/fd")) + more)
    if 0 <= (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < count:
        raise TransportError(f"a rank may open too few files: {limit:,}, and it needs {count:,}", why, _FILES)


def files_of_a_rank(ranks: int, here: int, keeps_store: bool) -> int:
    """How many files a rank opens while it starts, one of so many, of which so many are `here`, on its host."""
    return _SPARE + ranks + here + (_TO_STORE * ranks if keeps_store else 0)
