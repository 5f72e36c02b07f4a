"""Gradients handed on early: backward passes in two halves where the rank before has nothing else to do.

At the end of 1F1B no forwards are left to fill the wait for a gradient: the last backward passes run down the ranks
one after the other. A rank that hands on the gradient of its input before it makes those of its weights takes its
weights out of that chain, (p-1) TW of a step. Elsewhere B stays whole, since two halves cost a little more than one.

    rank 0  F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2           F0 F1 .. .. B0 B0 F2 B1 B1 B2 B2
    rank 1  .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..           .. F0 B0 B0 F1 B1 B1 F2 I2 W2 ..

Who would wait is found at unit times, from the end of each rank's list.
"""
from __future__ import annotations

from array import array
from collections import deque

from globaltensor.schedules.schedule import Actions, B, F, I, Schedule, W


def early(schedule: Schedule) -> Schedule:
    """The same, with I and W for each B whose gradient the rank before waits for, idle, in the end."""
    stages, split = schedule.stages, set[int]()
    for row, waits in zip(schedule.actions, _waits(schedule)):
        for code, idle in zip(reversed(row.codes), reversed(waits)):
            if code & 7 in (B, I):
                stage = (code >> 3) % stages
                if stage + 1 == stages or not idle:
                    break
                split.add((code >> 3) + 1 << 3 | B)

    def halves(row: Actions) -> Actions:
        return Actions(array("q", (half for code in row.codes for half in (
            (code & ~7 | I, code & ~7 | W) if code in split else (code,)))), stages)

    return Schedule(schedule.name, schedule.rank_of, schedule.micro_batches, tuple(map(halves, schedule.actions)))


def _waits(schedule: Schedule) -> list[list[int]]:
    """How long the rank of each action is idle before it, where F, I and W take a unit each and B takes two."""
    stages, rows = schedule.stages, [row.codes for row in schedule.actions]
    waits: list[list[int]] = [[] for _ in rows]
    free, made, asleep = [0] * len(rows), dict[int, int](), dict[int, int]()     # made: code of an F or B -> its end
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        for code in rows[rank][len(waits[rank]):]:
            kind, key = code & 7, code >> 3
            stage = key % stages
            wanted = -1 if kind == W or stage == (0 if kind == F else stages - 1) else (
                key - 1 << 3 | F if kind == F else key + 1 << 3 | B)
            if wanted >= 0 and wanted not in made:
                asleep[wanted] = rank
                break
            idle = max(made.get(wanted, 0) - free[rank], 0)
            waits[rank].append(idle)
            free[rank] += idle + (2 if kind == B else 1)
            if kind != W:
                done = key << 3 | (F if kind == F else B)
                made[done] = free[rank]
                if done in asleep:
                    ready.append(asleep.pop(done))
    return waits
