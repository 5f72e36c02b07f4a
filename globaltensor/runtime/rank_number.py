"""One process for each rank: where two were started as one, both learn of it.

One of the two would run, and the other wait for as long as that takes. So each takes its rank, in one step that the
store does whole, by writing its challenge (arrival.py) where nobody has. That holds for a store that rank 0 keeps,
which has known one start. One that torchrun keeps has known others, and torchrun hands out each rank once.

Who comes later tells the earlier process, where that hears of losses. One that waits for others hears it, answers, and
all raise. One that does not answer may have been killed, and this be its next try, as with Kubernetes: it takes the
rank. Once all have met, who comes is told so, and the job goes on without it.
"""
from __future__ import annotations

import os
import socket
import time

import torch.distributed as dist

from globaltensor.errors import TransportError
from globaltensor.runtime.codec import decode_message, encode_message
from globaltensor.runtime.host_processes import ENDED, ProcessId, own_process, process_state
from globaltensor.runtime.liveness import Loss
from globaltensor.runtime.store_tree import looks, read_message, write_message

_ANSWERING = 3.0                                     # seconds for which the earlier process is waited for
_OVER = "globaltensor meeting"                       # how it ended: True where all have met, else the loss
_SAME_RANK, _LATE = " was started twice", " came when all ranks had met"            # by which these losses are known


def challenge_key(rank: int) -> str:
    """Where a rank writes that it has come."""
    return f"globaltensor challenge {rank}"


def loss_key(rank: int) -> str:
    """Where others tell it, beside its challenge, of a rank that will not come."""
    return f"globaltensor loss {rank}"


def meeting_place() -> str:
    """Where the ranks meet."""
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


def is_kept_by_a_rank() -> bool:
    """Is the store that of one start, and no launcher's?"""
    return not dist.is_initialized() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def take_rank(rank: int, challenge: str, store: dist.Store) -> None:
    """Write the challenge of this process, with what it is. Raises TransportError where another one is this rank."""
    key, before = challenge_key(rank), b""
    own = encode_message((challenge, own_process(), socket.gethostname()), key)
    if not is_kept_by_a_rank():
        store.set(key, own)                          # type: ignore[arg-type]  # bytes do as well
        return
    # bytes do as well; it answers with what is there then
    while (now := store.compare_set(key, before, own)) != own:           # type: ignore[arg-type]
        before = now
        _raise_if_it_lives(rank, store, *decode_message(now, key))


def _raise_if_it_lives(rank: int, store: dist.Store, challenge: str, process: ProcessId, host: str) -> None:
    """The process that came as this rank before."""
    loss = Loss(rank, f"rank {rank}{_SAME_RANK}: as process {process.pid} on {host}, and as process {os.getpid()} on "
                f"{socket.gethostname()}")
    write_message(store, loss_key(rank), (challenge, tuple(loss)))
    until = time.monotonic() + _ANSWERING
    for _ in looks(lambda: None):
        if (note := read_message(store, _OVER)) is not None:     # first: who has answered may have ended
            raise _error_of(loss if note is True else Loss(*note))
        if process.here and process_state(process) == ENDED:
            return
        if time.monotonic() > until:
            if not process.here:
                return
            note_end(store, loss)


def note_end(store: dist.Store, loss: Loss | None = None) -> None:
    """The meeting is over: because of this loss, or all have met."""
    if is_kept_by_a_rank():
        write_message(store, _OVER, True if loss is None else tuple(loss))


def end_of_meeting(rank: int, store: dist.Store, named: bool) -> Loss | None:
    """While a rank waits for the others: why that is in vain. `named`: its parent has answered it."""
    note = read_message(store, _OVER) if is_kept_by_a_rank() else None
    if note is True:
        return None if named else Loss(rank, f"rank {rank}{_LATE}")
    return None if note is None else Loss(*note)


def is_of_twins(loss: Loss) -> bool:
    """Is it because two processes are one rank?"""
    return _SAME_RANK in loss.how


def end_error(loss: Loss) -> TransportError | None:
    """What the ranks raise that hear of such an end; None of another loss."""
    return _error_of(loss) if is_of_twins(loss) or _LATE in loss.how else None


def _error_of(loss: Loss) -> TransportError:
    return TransportError(loss.how, f"each process is one rank of a job, of which all meet at {meeting_place()}",
                          "RANK=0, RANK=1, ... for one process each, as globaltensor run -n N program.py sets them; "
                          "another MASTER_PORT for another job; where a rank has failed, all of them again")
