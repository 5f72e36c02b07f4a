"""The error that has ended communication between ranks, which all later ones name.

A program may catch it and go on, but whoever gave up may have been read from at that moment, so nobody can tell who has
what: nothing moves between these ranks any more. Only texts are kept, as an error holds all frames of its traceback.
"""
from __future__ import annotations

from typing import TypeVar

from globaltensor.errors import GlobalTensorError, TransportError, in_brief

E = TypeVar("E", bound=GlobalTensorError)

_first = ""                                          # the error, and where it came
_ENDS = "_globaltensor_ends"                         # set on it


def mark_as_end(error: E) -> E:
    """The same error; it ends communication, unless an earlier one has."""
    global _first
    _first = _first or f"{in_brief(error)}; it came at {error.where}"
    setattr(error, _ENDS, True)
    return error


def is_end(error: BaseException) -> bool:
    """Is it marked so?"""
    return hasattr(error, _ENDS)


def error_after_end(what: str) -> TransportError | None:
    """What to raise in place of `what`, where an error has ended communication before."""
    return TransportError(
        f"{what}, after an error that has ended communication between these ranks",
        f"that error, which the program has caught, was {_first}",
        "let it end the program, and mend what it names; globaltensor run --max-restarts 3 starts the ranks again"
    ) if _first else None
