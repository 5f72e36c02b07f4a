"""Which values travel between ranks, and when: sends and receives follow from the order of the actions.

A stage's output goes to the next stage, its input's gradient to the stage before; where both stages live on one rank
nothing travels. A rank sends a value right after the action that made it. It receives **in the order in which the
peer sends**: what it wants next may stand behind other values in the channel, and then it takes those first and keeps
them. So for each ordered pair of ranks the receives are the sends, by construction. (Receiving in the order of use
instead looks the same for simple schedules. On a V, where activations of one direction and gradients of the other
share a channel, the two orders differ, and the receiver takes one value for another.)

Taking earlier values first never waits longer: the peer has sent them before the wanted one.
"""
from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

from globaltensor.schedules.schedule import RECV_B, RECV_F, SEND_B, SEND_F, Actions, B, F, I, Schedule, W

COMPUTE = (F, B, I, W)


class Routes(NamedTuple):
    """Per stage, the rank that gets its output and the one that gets its input's gradient; -1: nobody elsewhere."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def routes(rank_of: tuple[int, ...]) -> Routes:
    """Where the values of each stage go."""
    forward = [b if a != b else -1 for a, b in zip(rank_of, rank_of[1:])]
    backward = [a if a != b else -1 for a, b in zip(rank_of, rank_of[1:])]
    return Routes((*forward, -1), (-1, *backward))


def communicates(schedule: Schedule) -> bool:
    """Whether a schedule already says when its values are moved."""
    return any(code & 7 >= SEND_F for row in schedule.actions for code in row.codes)


def communicate(schedule: Schedule) -> Schedule:
    """The same schedule with sends and receives put in."""
    to = routes(schedule.rank_of)
    waiting = _channels(schedule, to)
    rows = tuple(_row(schedule, rank, to, waiting) for rank in range(schedule.ranks))
    return Schedule(schedule.name, schedule.rank_of, schedule.micro_batches, rows)


def _channels(schedule: Schedule, to: Routes) -> dict[tuple[int, int], deque[int]]:
    """For each ordered pair of ranks the receives that fit its sends, in order."""
    stages, found = schedule.stages, {}
    for rank, row in enumerate(schedule.actions):
        for code in row.codes:
            kind, key = code & 7, code >> 3
            peer = (to.forward if kind == F else to.backward)[key % stages] if kind != W else -1
            if peer >= 0:
                receive = (key + 1) << 3 | RECV_F if kind == F else (key - 1) << 3 | RECV_B
                found.setdefault((rank, peer), deque()).append(receive)
    return found


def _row(schedule: Schedule, rank: int, to: Routes, waiting: dict[tuple[int, int], deque[int]]) -> Actions:
    stages, rank_of = schedule.stages, schedule.rank_of
    row, here = array("q"), set()                     # `here`: received before its turn
    for code in schedule.actions[rank].codes:
        kind, key = code & 7, code >> 3
        stage = key % stages
        if kind == W:
            row.append(code)
            continue
        source = stage - 1 if kind == F else stage + 1
        if 0 <= source < stages and rank_of[source] != rank:
            wanted = key << 3 | (RECV_F if kind == F else RECV_B)
            channel = waiting.get((rank_of[source], rank), deque())
            while wanted not in here and channel:
                here.add(channel[0])
                row.append(channel.popleft())
            here.discard(wanted)
        row.append(code)
        if (to.forward if kind == F else to.backward)[stage] >= 0:
            row.append(key << 3 | (SEND_F if kind == F else SEND_B))
    return Actions(row, stages)
