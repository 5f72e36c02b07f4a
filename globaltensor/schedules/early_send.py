"""Gradients sent early: backward passes split in two where the rank before has nothing else to do.

At the end of 1F1B no forwards are left to fill the wait for a gradient: the last backward passes run down the ranks
one after the other. A rank that sends the gradient of its input before it computes those of its weights takes its
weights out of that chain, (p-1) TW of a step. Elsewhere B stays whole, since two parts cost a little more than one.

    rank 0  F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2           F0 F1 .. .. B0 B0 F2 B1 B1 B2 B2
    rank 1  .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..           .. F0 B0 B0 F1 B1 B1 F2 I2 W2 ..

Which ranks would wait is found at unit times, from the end of each rank's list.
"""
from __future__ import annotations

from array import array
from collections import deque

from globaltensor.schedules.schedule import Actions, B, F, I, Schedule, W


def send_gradients_early(schedule: Schedule) -> Schedule:
    """The same with I and W for each B, at the end of a step, for whose gradient the rank before would wait idle."""
    stages, split = schedule.stages, set[int]()       # keys of the Bs to split
    for row, waits in zip(schedule.actions, _waits(schedule)):
        for kind, key, idle in zip(reversed(row.kinds), reversed(row.keys), reversed(waits)):
            if kind in (B, I):
                if key % stages + 1 == stages or not idle:
                    break                             # a gradient arrived in time: this rank's final waits end here
                split.add(key + 1)                    # the next stage's, whose input gradient this action waited for

    def with_splits(row: Actions) -> Actions:
        kinds, keys = bytearray(), array("q")
        for kind, key in zip(row.kinds, row.keys):
            parts = (I, W) if kind == B and key in split else (kind,)
            kinds.extend(parts)
            keys.extend([key] * len(parts))
        return Actions(kinds, keys, stages)

    return Schedule(schedule.name, schedule.rank_of, schedule.micro_batches, tuple(map(with_splits, schedule.actions)))


def _waits(schedule: Schedule) -> list[list[int]]:
    """How long the rank of each action is idle before it, where F, I and W take one unit each and B takes two."""
    stages, rows = schedule.stages, schedule.actions
    waits: list[list[int]] = [[] for _ in rows]
    free = [0] * len(rows)                            # when each rank is done with what it has begun
    ends: tuple[dict[int, int], dict[int, int]] = {}, {}       # key -> when that output, or that gradient, is ready
    asleep: dict[tuple[int, int], int] = {}           # (direction, key) -> the rank that waits for it
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        begin = len(waits[rank])
        for kind, key in zip(rows[rank].kinds[begin:], rows[rank].keys[begin:]):
            direction = int(kind != F)                # 0: outputs go to the next stage, 1: gradients to the one before
            at_end = key % stages == (stages - 1 if direction else 0)
            needed = None if kind == W or at_end else key + 1 if direction else key - 1
            if needed is not None and needed not in ends[direction]:
                asleep[direction, needed] = rank
                break
            idle = 0 if needed is None else max(ends[direction][needed] - free[rank], 0)
            waits[rank].append(idle)
            free[rank] += idle + (2 if kind == B else 1)
            if kind != W:
                ends[direction][key] = free[rank]
                if (direction, key) in asleep:
                    ready.append(asleep.pop((direction, key)))
    return waits
