"""Counts of communication, from when someone first asks for them: what `gt.metrics` tells.

Boxings are counted where they are done, in native code or in boxings/seen.py; waits where ranks wait, in the transport
or in exchange.py. Until someone asks, all that is left of this is a look at a flag.
"""
from __future__ import annotations

from typing import NamedTuple

from globaltensor.runtime.native import torch_ext


class Counts(NamedTuple):
    """Of this process.

    boxings, bytes   how many boxings there were, and what the rank that receives most received in them, by their plans
    received         bytes of pipelines' messages that came here
    seconds          wall time in boxings and in receiving such messages
    waiting          how long this process waited for others, in these or elsewhere
    """

    boxings: int = 0
    bytes: int = 0
    received: int = 0
    seconds: float = 0.0
    waiting: float = 0.0

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.boxings - other.boxings, self.bytes - other.bytes, self.received - other.received,
                      self.seconds - other.seconds, self.waiting - other.waiting)


_counting = False
_in_python = Counts()                                # what native code did not count


def count() -> None:
    """From now on, count."""
    global _counting
    _counting = True
    if torch_ext is not None:
        torch_ext.count_boxings(True)


def counting() -> bool:
    return _counting


def add(boxings: int = 0, bytes: int = 0, received: int = 0, seconds: float = 0.0, waiting: float = 0.0) -> None:
    """Add to the counts of this process, where they are kept."""
    global _in_python
    if _counting:
        have = _in_python
        _in_python = Counts(have.boxings + boxings, have.bytes + bytes, have.received + received,
                            have.seconds + seconds, have.waiting + waiting)


def counts() -> Counts:
    """All that was counted since `count` was first called."""
    boxings, moved, seconds, waiting = torch_ext.boxing_counts() if torch_ext is not None else (0, 0, 0.0, 0.0)
    own = _in_python
    return Counts(own.boxings + boxings, own.bytes + moved, own.received, own.seconds + seconds, own.waiting + waiting)
