"""Moving flat buffers between processes: one primitive, `exchange`, in which all sides meet.

Each process hands a flat buffer to some others and gets one from some others; who waits for whom is noted for the
deadlock watch, and a peer that ended is named. Ranks of one process reach each other's memory and need none of this.
"""
from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from globaltensor.errors import GlobalTensorError, TransportError, first_sentence
from globaltensor.runtime import counters, deadlock
from globaltensor.runtime.ended import error_after_end, is_end, mark_as_end
from globaltensor.runtime.gloo import broken_connections
from globaltensor.runtime.liveness import advice_after, has_heard_of_a_loss, known_loss, lost_connection
from globaltensor.runtime.process_end import at_end, before_threads
from globaltensor.runtime.world import rank, world

AGREE, GATHER, BROADCAST, _POST = 1, 2, 3, 4          # tags; boxings have larger ones


def exchange(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], what: str = "a boxing",
             tag: int = 0) -> None:
    """Send each flat buffer to its rank and fill each incoming one from its rank; messages between two ranks are
    matched by order. Collective among the ranks that take part, free for the others. One round.

    `what` it is for goes into errors. `tag` must be the same on both sides, so that no message is taken for another.
    Raises TransportError where a peer died or did not take part in time.
    """
    begin_exchange(outgoing, incoming, what, tag)()


def begin_exchange(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], what: str,
                   tag: int) -> Callable[[], None]:
    """Begin that; the function that is returned waits for it."""
    staged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    if world().staged:
        outgoing = {r: t.cpu() for r, t in outgoing.items()}
        staged = {r: (t, torch.empty_like(t, device="cpu")) for r, t in incoming.items() if t.device.type != "cpu"}
    moves: list[tuple[Callable[..., Any], torch.Tensor, int]] = []
    moves += [(dist.irecv, staged[r][1] if r in staged else t, r) for r, t in incoming.items()]
    moves += [(dist.isend, t, r) for r, t in outgoing.items()]
    if not moves:
        return lambda: None
    peers = tuple(sorted({*outgoing, *incoming}))
    with waiting_for(what, peers, tag):              # sending to a rank that has ended raises at once
        if moves[0][1].device.type == "cpu":
            works = [move(t, r, world().control, tag) for move, t, r in moves]
        else:                                        # engines of devices need to know of all of them at once
            works = dist.batch_isend_irecv([dist.P2POp(move, t, r, None, tag) for move, t, r in moves])

    def finish() -> None:
        with waiting_for(what, peers, tag) as lost:
            wait_for_works([((peer,), work) for (_, _, peer), work in zip(moves, works)], lost)
        for target, source in staged.values():
            target.copy_(source)

    return keep_until_done(finish)


_unfinished: dict[Callable[[], None], None] = {}     # in the order in which they were begun


def keep_until_done(finish: Callable[[], None]) -> Callable[[], None]:
    """The same wait for messages, which keeps what it holds until it is done, also where nobody waits or the wait was
    given up: gloo goes on to send and to receive, and finds no end where the memory of a message is gone."""
    _end_with_messages_sent()
    _unfinished[finish] = None

    def finish_once() -> None:
        finish()
        _unfinished.pop(finish, None)

    return finish_once


@cache
def _end_with_messages_sent() -> None:
    at_end(finish_all)                               # before all that was registered earlier, which ends connections
    before_threads(finish_all)                       # and before the others are told that this rank has ended


def finish_all() -> None:
    """A process that ends well sends first what it has begun to send, which others may need."""
    for finish in list(_unfinished):
        if has_heard_of_a_loss():
            return
        with suppress(GlobalTensorError):            # a rank was lost meanwhile: who needs anything of it will say so
            finish()
            _unfinished.pop(finish, None)            # a thread of the program may wait for it, too
    for device in () if world().staged else world().used_devices:          # whose waits return before they are over
        done = torch.accelerator.current_stream(device).record_event()
        while not done.query() and known_loss() is None:
            time.sleep(0.02)


def post(buffer: torch.Tensor, peer: int, what: str, receive: bool = False) -> dist.Work:
    """Start sending a flat buffer on the CPU to a rank, or filling it from there, without waiting. Messages between two
    ranks are matched by order. The buffer must not be touched before `wait` returns.

    Raises TransportError where the connection to the rank has closed."""
    move: Callable[..., Any] = dist.irecv if receive else dist.isend
    try:
        return move(buffer, peer, group=world().control, tag=_POST)
    except RuntimeError as error:
        raise _transport_error(what, [peer], error) from None


def wait(works: Mapping[int, dist.Work], what: str, peers: tuple[int, ...]) -> None:
    """Wait until what was posted has arrived. `works` by rank; `peers` are all ranks that take part in `what`.

    Raises TransportError where a peer died or did not take part in time.
    """
    with waiting_for(what, peers, zlib.crc32(what.encode()) | 8) as lost:
        wait_for_works([((peer,), work) for peer, work in works.items()], lost)


def wait_for_works(works: Sequence[tuple[tuple[int, ...], dist.Work]], lost: list[int]) -> None:
    """Inside `waiting_for`: wait for works of torch, each with its ranks, which are in `lost` meanwhile."""
    deadlock.waits_for([work for _, work in works])
    for peers, work in works:
        lost[:] = peers
        if not work.wait():
            raise RuntimeError("the wait was given up")


@contextmanager
def waiting_for(what: str, peers: tuple[int, ...], tag: int) -> Iterator[list[int]]:
    """Around every wait for other processes: the deadlock watch knows who waits for whom, and errors name the peers.

    Yields the peers to blame for an error; a caller that knows which one it is narrows the list.
    """
    lost = list(peers)
    began = time.perf_counter() if counters.counting() else None
    try:
        with deadlock.waiting(what, peers, tag):
            yield lost
    except RuntimeError as error:
        raise _transport_error(what, lost, error) from None
    finally:
        if began is not None:
            counters.add(waiting=time.perf_counter() - began)


def _transport_error(what: str, lost: Sequence[int], error: RuntimeError) -> Exception:
    """What to raise where torch has failed, as one of these ranks did."""
    # a rank that finds a deadlock may end, so that a lost connection may mean just that
    if (verdict := deadlock.detected()) is not None:
        return error if is_end(error) else error_after_end(what) or mark_as_end(verdict)
    if len(lost) > 1:                                # before others of them end, too
        lost = broken_connections(lost) or lost
    loss = lost_connection(lost, first_sentence(error))
    deadlock.keep_store()
    others = [loss.rank] if loss is not None and loss.rank != rank() else lost     # they may have given this one up
    names, how = deadlock.rank_names(others), loss.how if loss is not None else (
        f"{first_sentence(error)}: a rank ended, or runs another program")
    return TransportError(f"rank {rank()} lost touch with {names} in {what}", how, advice_after(how))
