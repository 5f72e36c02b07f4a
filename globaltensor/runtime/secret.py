"""The secret that the processes of a job share, with which they sign what they tell each other (codec.py).

`globaltensor run` on one host draws one for each job. Under another launcher on one host it is in a file of this user.
Hosts that have nothing in common are handed it by GLOBALTENSOR_SECRET, or sign with the empty key, which is said once.
"""
from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from globaltensor.errors import TransportError, warn
from globaltensor.runtime.codec import SECRET


def draw_secret() -> None:
    """A secret for a job of which all processes inherit this environment."""
    os.environ.setdefault(SECRET, secrets.token_hex(32))


def share_secret(one_host: bool, first: bool) -> None:
    """Before this process tells others anything: the secret from this user's file, where no launcher handed it over.

    `first`: the rank that warns where there is none. Raises TransportError for a file that others can read.
    """
    if os.environ.get(SECRET):
        return
    why = "its ranks may be on several hosts"
    if one_host:
        try:
            os.environ[SECRET] = _own_file(Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"))
            return
        except (OSError, RuntimeError) as error:     # RuntimeError: no home
            if isinstance(error, TransportError):
                raise
            why = f"no file for it can be written: {error}"
    if first:
        warn("what the ranks of this job tell each other is not signed"
             f"\n  why:   {why}\n  try:   {SECRET}=... with the same random text on all hosts, or a network that "
             "nobody else can write to")


def _own_file(state: Path) -> str:
    path = state / "globaltensor" / "secret"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = path.with_name(f"secret.{secrets.token_hex(8)}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):              # all ranks do this at the same time: the first one's stays
            os.link(new, path)
        new.unlink()
    about = path.stat()
    # Windows has neither, and keeps home folders to their users
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077):
        raise TransportError(f"others can read or replace {path}", "the ranks of your jobs know each other by it",
                             f"rm {path}: the next job writes it again, for you alone")
    return path.read_text()
