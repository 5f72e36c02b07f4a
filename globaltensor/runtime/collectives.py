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
never gets it, and the deadlock watch tells all ranks what each of them does.
"""
from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from globaltensor.runtime.exchange import wait_for_works, waiting_for
from globaltensor.runtime.torch_internals import all_gather_flat, default_store, reduce_scatter_flat
from globaltensor.runtime.world import rank, world

_groups: dict[tuple[tuple[int, ...], str], Any] = {}       # by ranks and device type: backends of torch.distributed


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


def begin_collectives(calls: Sequence[Collective], what: str, tag: int) -> Callable[[], None]:
    """Begin these collectives; the function that is returned waits for all of them, and fills their results.

    `what` they are for goes into errors; `tag`, of 8 or more, must be the same on all ranks of each group. Raises
    TransportError where a peer died or did not take part in time.
    """
    on_device = [_staged(call) for call in calls]
    peers = tuple(sorted({r for call in calls for r in call.ranks} - {rank()}))
    with waiting_for(what, peers, tag):
        for ranks, type in sorted({(call.ranks, call.source.device.type) for call in on_device}):
            _group_of(ranks, type)
        checks = [_check_next(call.ranks, tag) for call in on_device]
        works = [_start(call) for call in on_device]

    def finish() -> None:
        with waiting_for(what, peers, tag) as lost:
            # First what cannot be mistaken: a collective that others take for another one may fail in any way.
            wait_for_works([(peers, work) for check in checks for work in check] + [(peers, work) for work in works],
                           lost)
        for call, done in zip(calls, on_device):
            if done.result is not call.result:
                call.result.copy_(done.result)

    return finish


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
        if not _groups:
            atexit.register(_end_groups)
        store = dist.PrefixStore(f"globaltensor {type} {ranks}/", default_store())
        if type == "cpu":
            known = dist.ProcessGroupGloo(store, ranks.index(rank()), len(ranks), world().timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            known = dist.ProcessGroupNCCL(store, ranks.index(rank()), len(ranks), options)
        _groups[ranks, type] = known
    return known


def _end_groups() -> None:
    time.sleep(0.05)                                 # lets gloo's threads end first: agreement.py says why
    _groups.clear()


def _check_next(ranks: tuple[int, ...], tag: int) -> list[dist.Work]:
    """A message to the next rank of the group, and one from the rank before, which arrive where all mean the same."""
    at, control = ranks.index(rank()), world().control
    buffers = torch.zeros(1, dtype=torch.uint8, device="cpu"), torch.empty(1, dtype=torch.uint8, device="cpu")
    ops = [dist.P2POp(dist.isend, buffers[0], ranks[(at + 1) % len(ranks)], control, tag),
           dist.P2POp(dist.irecv, buffers[1], ranks[at - 1], control, tag)]
    return dist.batch_isend_irecv(ops)


def _start(call: Collective) -> dist.Work:
    group = _group_of(call.ranks, call.source.device.type)
    match call.name:
        case "all_reduce":
            return group.allreduce([call.result])
        case "reduce_scatter":
            return reduce_scatter_flat(group, call.result, call.source)
        case "all_gather":
            return all_gather_flat(group, call.result, call.source)
        case "all_to_all":
            return group.alltoall_base(call.result, call.source, list(call.received), list(call.sent))
    raise AssertionError(call.name)
