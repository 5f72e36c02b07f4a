"""Which values travel between ranks, and when: sends and receives follow from the order of the actions.

A stage's output goes to the next stage, its input's gradient to the stage before; where both stages are on one rank
nothing travels. A rank sends a value right after the action that computed it. It receives **in the order in which the
peer sends**: if other values are ahead of the wanted one in the channel, it takes those first and keeps them. So for
each ordered pair of ranks the receives are the sends, by construction. (Receiving in the order of use instead looks
the same for simple schedules. On a V, where activations of one direction and gradients of the other share a channel,
the two orders differ, and the receiver takes one value for another.) Taking earlier values first never waits longer:
the peer has sent them before the wanted one.
"""
from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

from globaltensor.schedules.schedule import (
    COMPUTE,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Actions,
    F,
    Schedule,
    W,
)

Receive = tuple[int, int]                            # the kind of a receive, and its key


class Routes(NamedTuple):
    """Per stage, the rank that receives its output and the one that receives its input's gradient; -1: none, or the
    stage's own rank."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def routes(rank_of: tuple[int, ...]) -> Routes:
    """Where the values of each stage go."""
    forward = [b if a != b else -1 for a, b in zip(rank_of, rank_of[1:])]
    backward = [a if a != b else -1 for a, b in zip(rank_of, rank_of[1:])]
    return Routes((*forward, -1), (-1, *backward))


def communicates(schedule: Schedule) -> bool:
    """Whether a schedule already says when its values are transferred."""
    return any(kind not in COMPUTE for row in schedule.actions for kind in row.kinds)


def communicate(schedule: Schedule) -> Schedule:
    """The same schedule with sends and receives inserted."""
    to = routes(schedule.rank_of)
    unreceived = _channels(schedule, to)
    rows = tuple(_with_transfers(schedule, rank, to, unreceived) for rank in range(schedule.ranks))
    return Schedule(schedule.name, schedule.rank_of, schedule.micro_batches, rows)


def _channels(schedule: Schedule, to: Routes) -> dict[tuple[int, int], deque[Receive]]:
    """For each ordered pair of ranks the receives that fit its sends, in order."""
    channels: dict[tuple[int, int], deque[Receive]] = {}
    for rank, row in enumerate(schedule.actions):
        for kind, key in zip(row.kinds, row.keys):
            peer = (to.forward if kind == F else to.backward)[key % schedule.stages] if kind != W else -1
            if peer >= 0:
                receive = (RECV_F, key + 1) if kind == F else (RECV_B, key - 1)
                channels.setdefault((rank, peer), deque()).append(receive)
    return channels


def _with_transfers(schedule: Schedule, rank: int, to: Routes,
                    unreceived: dict[tuple[int, int], deque[Receive]]) -> Actions:
    stages, rank_of = schedule.stages, schedule.rank_of
    kinds, keys, early = bytearray(), array("q"), set[Receive]()       # `early`: received before its turn

    def append(kind: int, key: int) -> None:
        kinds.append(kind)
        keys.append(key)

    for kind, key in zip(schedule.actions[rank].kinds, schedule.actions[rank].keys):
        stage = key % stages
        source = stage if kind == W else stage - 1 if kind == F else stage + 1     # whose value the action needs
        if 0 <= source < stages and rank_of[source] != rank:
            wanted = (RECV_F if kind == F else RECV_B), key
            channel = unreceived.get((rank_of[source], rank), deque())
            while wanted not in early and channel:
                early.add(channel[0])
                append(*channel.popleft())
            early.discard(wanted)
        append(kind, key)
        if kind != W and (to.forward if kind == F else to.backward)[stage] >= 0:
            append(SEND_F if kind == F else SEND_B, key)
    return Actions(kinds, keys, stages)
