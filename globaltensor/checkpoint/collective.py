"""All processes succeed, or all raise: an error on one process, a damaged file or a full disk, is raised on all."""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from globaltensor.checkpoint.manifest import CheckpointError
from globaltensor.errors import ErrorNote, GlobalTensorError
from globaltensor.runtime.agreement import gather_objects

T = TypeVar("T")


def collective_try(what: str, do: Callable[[], T], token: Callable[[T], object] = lambda _: None) -> T:
    """`do()` on every process, and one small all-gather. Where it raises on any, this raises on all.

    `token` of the results must be the same on all processes: what they have to agree on.
    """
    error: GlobalTensorError | None = None
    try:
        result = do()
    except GlobalTensorError as caught:
        error = caught
    except Exception as caught:                      # whatever it is: the others wait for this process to take part
        error = CheckpointError(*ErrorNote.of(caught, what)[1:])
        error.__cause__ = caught
    own_note = tuple(ErrorNote.of(error, what)) if error else None
    replies = gather_objects((own_note, None if error else token(result)), what)
    if error is not None:
        raise error
    for rank, (other_note, _) in enumerate(replies):
        if other_note is not None:
            note = ErrorNote(*other_note)
            raise CheckpointError(f"failed on rank {rank}: {note.what}", note.why, note.fix)
    tokens = [token for _, token in replies]
    if any(other != tokens[0] for other in tokens):
        rows = "".join(f"\n    rank {rank}: {token}" for rank, token in enumerate(tokens))
        raise CheckpointError(f"the ranks disagree in {what}:{rows}",
                              "every process runs the same program and sees the same folder",
                              "save what differs from rank to rank under different names")
    return result
