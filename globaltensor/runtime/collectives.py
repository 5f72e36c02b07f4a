"""Collectives of torch.distributed, on groups of ranks: begun together, waited for together.

    reduction = Collective("all_reduce", (0, 2), buffer, buffer)
    finish = begin_collectives([reduction], "the boxing for ...", tag)       returns at once
    ...
    finish()                                                     the buffer holds the sum

A group is made when it is first needed, by its own ranks alone. No two ranks can wait for each other in vain there: all
members of a group need it in the same boxing, and of the groups of one boxing every rank makes those that are its own
in ascending order of their ranks. So the least group that is not made yet has all its members waiting for it.
(`dist.new_group` cannot do that: with `use_local_synchronization` it names a group by the number of groups that a
process has, and members of different numbers never meet; without, it needs all ranks of the world.)

torch.distributed does not notice that ranks call different collectives, but hands over wrong numbers. So each rank
sends the next one in the group, beside the collective, a message with the boxing's tag: one that expects another tag
never gets it, and the deadlock watch tells all ranks what each of them does. Collectives that are waited for much later
share such a message: its tag is a hash of all that were begun in the group since the last one. Where lengths differ, a
thread of gloo fails, which would end the process: native code stops that thread instead, so that the watch has its say.
Without native code a collective begins after that message.

Over gloo, few ranks gather by messages to each other, each with the tag. gloo's ring takes a round for each rank, and
its thread waits for a core in every one, beside the threads that serve that message and compute.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from globaltensor.runtime import deadlock
from globaltensor.runtime.accelerators import engine_class
from globaltensor.runtime.exchange import finish_all, keep_until_done, wait_for_works, waiting_for
from globaltensor.runtime.gloo import gloo_error, keep_for_ever, yield_cores
from globaltensor.runtime.liveness import tell_end
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.process_end import at_end
from globaltensor.runtime.store_tree import looks
from globaltensor.runtime.torch_internals import all_gather_flat, default_store, reduce_scatter_flat
from globaltensor.runtime.world import rank, world

_LOOK = timedelta(seconds=0.2)
_FEW = 4                                             # ranks
_groups: dict[tuple[tuple[int, ...], str], Any] = {}       # by ranks and what moves in them: backends of torch's
_lost_groups: set[tuple[int, ...]] = set()           # in which torch still works on a collective that was given up
_unchecked: dict[tuple[int, ...], int] = {}          # by ranks: a hash of the tags of which no message was sent yet


class Collective(NamedTuple):
    """One call: `name` is that of torch.distributed's function, `ranks` ascending, both buffers flat. Reductions add.

    An all_reduce has one buffer, its source and its result. `sent` and `received` of an all_to_all are how many
    elements go to and come from each rank.
    """

    name: str
    ranks: tuple[int, ...]
    source: torch.Tensor
    result: torch.Tensor
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


def begin_collectives(calls: Sequence[Collective], what: str, tag: int, check: bool = True) -> Callable[[], None]:
    """Begin these collectives; the function that is returned waits for all of them, and fills their results.

    `what` they are for goes into errors; `tag`, of 8 or more, must be the same on all ranks of each group. That is
    checked at once, or, without `check`, with the next collectives of the group that are, or that are waited for.
    Raises TransportError where a peer died or did not take part in time.
    """
    on_device = [_staged(call) for call in calls]
    of_engine = [call for call in on_device if not _goes_by_messages(call)]
    peers = tuple(sorted({r for call in calls for r in call.ranks} - {rank()}))
    with waiting_for(what, peers, tag):
        for ranks, type in sorted({(call.ranks, call.source.device.type) for call in of_engine}):
            _group_of(ranks, type)
        for ranks in {call.ranks for call in of_engine}:
            _unchecked[ranks] = _join_tags(_unchecked[ranks], tag) if ranks in _unchecked else tag
        checked = _check_tags(of_engine) if check or torch_ext is None else None
        if checked and torch_ext is None:
            wait_for_works([(peers, work) for work in checked[1]], list(peers))
            checked[1].clear()
        works = [_start(call) for call in of_engine]
        messages = [sent for call in on_device if _goes_by_messages(call) for sent in _gather_by_messages(call, tag)]

    def finish() -> None:
        joined, checks = checked or _check_tags(of_engine)
        with waiting_for(what, peers, joined or tag) as lost:
            try:
                # First what cannot be mistaken: a collective that others take for another one may fail in any way.
                wait_for_works([*messages, *((peers, work) for work in checks)], lost)
                for call, work in zip(of_engine, works):
                    _wait_for_collective(call, work)
            except RuntimeError:
                _abandon(zip(of_engine, works))
                raise
        for call, done in zip(calls, on_device):
            if done.result is not call.result:
                call.result.copy_(done.result)

    return keep_until_done(finish)


def _goes_by_messages(call: Collective) -> bool:
    return call.name == "all_gather" and call.source.device.type == "cpu" and len(call.ranks) <= _FEW


def _gather_by_messages(call: Collective, tag: int) -> list[tuple[tuple[int, ...], dist.Work]]:
    """Send to all others what they gather, and receive what they send: works, each with the rank that it waits for."""
    if not call.source.numel():
        return []
    row, control = call.source.view(torch.uint8), world().control
    rows = dict(zip(call.ranks, call.result.view(torch.uint8).view(len(call.ranks), -1)))
    rows.pop(rank()).copy_(row)
    works = [(r, dist.irecv(theirs, r, control, tag)) for r, theirs in rows.items()]
    works += [(r, dist.isend(row, r, control, tag)) for r in rows]
    return [((r,), work) for r, work in works if work is not None]


def _staged(call: Collective) -> Collective:
    """The call with buffers that the transport can send: on the CPU, where several ranks share a GPU."""
    if not world().staged or call.source.device.type == "cpu":
        return call
    source = call.source.cpu()
    in_place = call.result is call.source
    return call._replace(source=source, result=source if in_place else torch.empty_like(call.result, device="cpu"))


def _group_of(ranks: tuple[int, ...], type: str) -> Any:
    known = _groups.get((ranks, type))
    if known is None:
        if ranks in _lost_groups:
            raise RuntimeError("an earlier wait for these ranks was given up")
        if not _groups:
            at_end(_end_groups)
        store = dist.PrefixStore(f"globaltensor {type} {ranks}/", default_store())
        _await_members(store, len(ranks))
        if type == "cpu":
            known = dist.ProcessGroupGloo(store, ranks.index(rank()), len(ranks), world().timeout)
            yield_cores()
        else:
            group = engine_class(world().engine)     # such as NCCL's
            options = group.Options()
            options._timeout = world().timeout
            known = group(store, ranks.index(rank()), len(ranks), options)
        _groups[ranks, type] = known
    return known


def _wait_for_collective(call: Collective, work: dist.Work) -> None:
    """Until it is done. Nobody can end a collective of gloo: where the watch over waits finds that this one is waited
    for in vain, its error is raised."""
    if call.source.device.type != "cpu":
        work.wait()
        return
    while not work.is_completed():
        with suppress(RuntimeError):                 # it failed, or was not done in time, or has been done since
            work.wait(_LOOK)
            return
        deadlock.raise_if_in_vain()
    work.wait()                                      # raises why it failed, if it did


def _abandon(begun: Iterable[tuple[Collective, dist.Work]]) -> None:
    """Leave torch alone with what it still works on. Ending a group would wait for the thread that does so, and that
    thread would need the interpreter to free the others, which may have ended by then."""
    for call, work in begun:
        if call.source.device.type == "cpu" and not work.is_completed():
            keep_for_ever([_groups.pop((call.ranks, "cpu"), None), work, call.source, call.result])
            _lost_groups.add(call.ranks)


def open_channel(source: int, target: int, device: torch.device) -> Any:
    """The group in which one rank sends to another what lies on devices, and nothing goes the other way: a message that
    nobody takes yet holds up none that comes from there. Collective between the two, which send a word at once: an
    engine connects where it is first needed, and would wait there."""
    group = _group_of((source, target), f"{device.type} channel")        # not the one of their collectives
    word = torch.zeros(16, dtype=torch.uint8, device=device)
    (group.send([word], 1, 0) if rank() == source else group.recv([word], 0, 0)).wait()
    return group


def _await_members(store: dist.Store, size: int) -> None:
    """Until all members of a group have come to make it: inside torch, nothing would end the wait for one that does not
    come."""
    store.add("members", 1)
    for _ in looks(deadlock.raise_if_in_vain):
        if store.add("members", 0) >= size:
            return


def _end_groups() -> None:
    finish_all()                                     # in these groups, too
    tell_end(rank())
    if gloo_error():
        keep_for_ever(_groups.values())
    time.sleep(0.05)                                 # lets gloo's threads end first: agreement.py says why
    _groups.clear()


def _join_tags(one: int, other: int) -> int:
    """A tag that depends on both and their order."""
    return (one * 31 + other) & 0x3FFFFFFF | 8


def _check_tags(calls: Sequence[Collective]) -> tuple[int, list[dist.Work]]:
    """Send the tags of all that was begun in the groups of these calls; with one tag for all of them, 0 for none."""
    tags = {ranks: _unchecked.pop(ranks) for ranks in sorted({call.ranks for call in calls}) if ranks in _unchecked}
    return (reduce(_join_tags, tags.values()) if tags else 0,
            [work for ranks, tag in tags.items() for work in _check_next(ranks, tag)])


def _check_next(ranks: tuple[int, ...], tag: int) -> list[dist.Work]:
    """A message to the next rank of the group, and one from the rank before, which arrive where all mean the same."""
    at, control = ranks.index(rank()), world().control
    buffers = torch.zeros(1, dtype=torch.uint8, device="cpu"), torch.empty(1, dtype=torch.uint8, device="cpu")
    works = (dist.isend(buffers[0], ranks[(at + 1) % len(ranks)], control, tag),
             dist.irecv(buffers[1], ranks[at - 1], control, tag))
    return [work for work in works if work is not None]


def _start(call: Collective) -> dist.Work:
    group = _group_of(call.ranks, call.source.device.type)
    match call.name:
        case "all_reduce":
            return group.allreduce([call.result])
        case "reduce_scatter":
            return reduce_scatter_flat(group, call.result, call.source)
        case "all_gather":                           # bytes: not every engine knows every dtype
            return all_gather_flat(group, call.result.view(torch.uint8), call.source.view(torch.uint8))
        case "all_to_all":
            received, sent = ([n * call.source.itemsize for n in counts] for counts in (call.received, call.sent))
            return group.alltoall_base(call.result.view(torch.uint8), call.source.view(torch.uint8), received, sent)
    raise AssertionError(call.name)
