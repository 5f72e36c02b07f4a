"""Checking a schedule before it runs: a deadlock or a wrong gradient becomes an error that names an action.

In this order, each with the first action that offends:

    complete   every stage runs F and then B, or I and then W, once for every micro-batch, and on its own rank
    matched    for every ordered pair of ranks the receives are the sends, in the same order; a value is received
               before it is used and sent after it is computed
    live       no deadlock, with as many values in flight as the transport takes (`capacity`)

A schedule that passes ends with no activation kept and no value in flight. How much each rank keeps at its peak
follows from the order alone, so it is known before anything has run.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn

import numpy as np

from globaltensor.schedules.communication import communicate, communicates, routes
from globaltensor.schedules.schedule import (
    COMPUTE,
    KINDS,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    SENDS,
    Action,
    B,
    F,
    I,
    Schedule,
    ScheduleError,
    W,
    action_of,
)

Done = tuple[set[int], ...]                          # for each kind, the keys of the actions seen so far

# Of the same stage and micro-batch: the kinds that must precede an action, and those that exclude it.
_REQUIRES = {B: (F,), I: (F,), W: (F, I)}
_EXCLUDES = {B: (I, W), I: (B,), W: (B,)}


@dataclass(frozen=True)
class CheckedSchedule:
    """What is known of a schedule that passed. `program` has its sends and receives; `peak_activations`, per rank, is
    in units of all activations that the rank's stages keep of one micro-batch."""

    program: Schedule
    peak_activations: tuple[Fraction, ...]


def check_schedule(schedule: Schedule, capacity: int | None = None,
                   weight_share: Fraction | int | str = 1) -> CheckedSchedule:
    """Raise ScheduleError where the schedule cannot be run.

    capacity       how many values of a channel (an ordered pair of ranks) a sender may be ahead of the receiver
                   before its send blocks; 0: a send waits for its receive; None: sends never block
    weight_share   how much of its activations an action I leaves for W
    """
    _check_complete(schedule)
    program = schedule if communicates(schedule) else communicate(schedule)
    if program is schedule:
        _check_matched(schedule)
    _check_live(schedule, program, capacity)
    return CheckedSchedule(program, peak_activations(schedule, weight_share))


def peak_activations(schedule: Schedule, weight_share: Fraction | int | str = 1) -> tuple[Fraction, ...]:
    """Per rank the most activations kept at a time: from F to B or W, of which I leaves `weight_share`."""
    per_rank = activations_held(schedule, Fraction(weight_share))
    return tuple(Fraction(int(held.max(initial=0)), unit) for held, unit in per_rank)


def activation_history(schedule: Schedule, weight_share: Fraction | int | str = 1) -> Iterator[list[Fraction]]:
    """For each rank, what it keeps after each of its actions, in the units of `CheckedSchedule.peak_activations`."""
    for held, unit in activations_held(schedule, Fraction(weight_share)):
        yield [Fraction(n, unit) for n in held.tolist()]


def activations_held(schedule: Schedule, share: Fraction) -> Iterator[tuple[np.ndarray, int]]:
    """The same as integers, and the unit that they are parts of: sums of integers are exact, and fast in numpy."""
    change, whole = np.zeros(len(KINDS), np.int64), share.denominator
    change[[F, B, I, W]] = whole, -whole, share.numerator - whole, -share.numerator
    for row, stages in zip(schedule.actions, schedule.stages_of):
        yield np.cumsum(change[np.frombuffer(row.kinds, np.uint8)]), whole * max(len(stages), 1)


def least_capacity(schedule: Schedule) -> int:
    """The smallest `capacity` with which the schedule does not deadlock."""
    capacity = 0
    while True:
        try:
            check_schedule(schedule, capacity)
            return capacity
        except ScheduleError:
            check_schedule(schedule)                      # raises if the schedule is wrong at any capacity
            capacity += 1


# -------------------------------------------------------------------------------------------------------- complete


def _check_complete(schedule: Schedule) -> None:
    done: Done = tuple(set() for _ in KINDS)
    for rank, row in enumerate(schedule.actions):
        for position, (kind, key) in enumerate(zip(row.kinds, row.keys)):
            if kind in COMPUTE:
                mistake = _mistake_in_compute(schedule, rank, kind, key, done)
                if mistake:
                    _raise(schedule, rank, position, *mistake)
                done[kind].add(key)
    for key in range(schedule.stages * schedule.micro_batches):
        forward, whole, inputs, weights = (key in done[kind] for kind in (F, B, I, W))
        if not (forward and (whole or inputs and weights)):
            missing = action_of(F if not forward else W if inputs else B, key, schedule.stages)
            rank = schedule.rank_of[missing.stage]
            raise ScheduleError(f"rank {rank} never does {missing}", f"each of the {schedule.micro_batches} "
                                "micro-batches passes every stage forward and back",
                                f"add {missing} to the list of rank {rank}", at=schedule.source)


def _mistake_in_compute(schedule: Schedule, rank: int, kind: int, key: int, done: Done) -> tuple[str, str, str] | None:
    """What is wrong with this F, B, I or W after those `done`: what, why, and what to do."""
    stages = schedule.stages
    owner = schedule.rank_of[key % stages]
    if owner != rank:
        return "is on the wrong rank", f"the weights of its stage are on rank {owner}", f"move it to rank {owner}"
    if key in done[kind]:
        return "is repeated", "its part of the gradient would count twice", "remove one of the two"
    for other in _EXCLUDES.get(kind, ()):
        if key in done[other]:
            return f"repeats what {action_of(other, key, stages)} did", "B is I and W in one", "B, or I and W"
    for before in _REQUIRES.get(kind, ()):
        if key not in done[before]:
            return _too_early(action_of(before, key, stages))
    return None


def _too_early(first: Action) -> tuple[str, str, str]:
    return f"comes before {first}", f"it needs the result of {first}", f"{first} before it"


def check_order(schedule: Schedule) -> None:
    """Raise ScheduleError where a backward action comes before what it needs of its own stage, or without it. Actions
    may be missing: that of a million takes some hundredths of a second, where `check_schedule` takes one."""
    kinds = np.frombuffer(b"".join(row.kinds for row in schedule.actions), np.uint8)
    keys = np.concatenate([np.frombuffer(row.keys, np.int64) for row in schedule.actions]) if len(kinds) else kinds
    at, early = np.arange(len(kinds)), len(kinds)    # rank after rank: a stage is on one rank, in the order of its list
    for kind, needs in _REQUIRES.items():
        late = at[kinds == kind]
        for before in needs if len(late) else ():
            first = np.full(schedule.stages * schedule.micro_batches, len(kinds))
            those = at[kinds == before][::-1]        # of several, the first is written last
            first[keys[those]] = those
            early = min(early, int(late[first[keys[late]] > late].min(initial=len(kinds))))
    if early == len(kinds):
        return
    ends = np.cumsum([len(row) for row in schedule.actions])
    rank = int(np.searchsorted(ends, early, "right"))
    position = early - (int(ends[rank - 1]) if rank else 0)
    done: Done = tuple(set() for _ in KINDS)
    for kind, key in zip(kinds[:early].tolist(), keys[:early].tolist()):
        done[kind].add(key)
    kind, key = int(kinds[early]), int(keys[early])
    missing = next(before for before in _REQUIRES[kind] if key not in done[before])
    _raise(schedule, rank, position, *_too_early(action_of(missing, key, schedule.stages)))


# --------------------------------------------------------------------------------------------------------- matched


def _check_matched(schedule: Schedule) -> None:
    """The schedule's own sends and receives: each where it belongs, and in the same order on both sides."""
    sent: dict[tuple[int, int], list[tuple[int, int, int]]] = {}       # channel -> (kind, key of the receive, position)
    received: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for rank, row in enumerate(schedule.actions):
        done: Done = tuple(set() for _ in KINDS)
        for position, (kind, key) in enumerate(zip(row.kinds, row.keys)):
            mistake = _mistake_in_order(schedule, rank, kind, key, done)
            if mistake:
                _raise(schedule, rank, position, *mistake)
            done[kind].add(key)
            if kind in SENDS:
                peer, receive, received_key = _other_side(schedule, kind, key)
                sent.setdefault((rank, peer), []).append((receive, received_key, position))
            elif kind not in COMPUTE:
                peer = _other_side(schedule, kind, key)[0]
                received.setdefault((peer, rank), []).append((kind, key, position))
        _check_all_sent(schedule, rank, done)
    for channel in sorted(sent.keys() | received.keys()):
        _check_channel(schedule, channel, sent.get(channel, []), received.get(channel, []))


def _mistake_in_order(schedule: Schedule, rank: int, kind: int, key: int, done: Done) -> tuple[str, str, str] | None:
    """What is wrong with a send or a receive, or with an action that needs one, after those `done` on this rank."""
    stages = schedule.stages
    stage = key % stages
    if kind in COMPUTE:
        source, receive = (stage - 1, RECV_F) if kind == F else (stage + 1, RECV_B)
        remote = 0 <= source < stages and schedule.rank_of[source] != rank
        if kind != W and remote and key not in done[receive]:
            name = action_of(receive, key, stages)
            return f"comes before {name}", f"it needs the value that {name} receives", f"{name} before it"
        return None
    if schedule.rank_of[stage] != rank:
        return "is on the wrong rank", f"its stage is on rank {schedule.rank_of[stage]}", "move it there"
    if key in done[kind]:
        return "is repeated", "a value is sent and received once", "remove one of the two"
    if _other_side(schedule, kind, key)[0] in (-1, rank):
        return "transfers nothing", "there is no stage on another rank at the other end", "remove it"
    producers = {SEND_F: (F,), SEND_B: (B, I)}.get(kind)
    if producers and not any(key in done[producer] for producer in producers):
        return ("sends a value that is not computed yet", "a value is sent after the action that computes it",
                "move it after that action")
    return None


def _other_side(schedule: Schedule, kind: int, key: int) -> tuple[int, int, int]:
    """The rank at the other end of a send or receive (-1: none), and kind and key of the receive that fits a send."""
    step = 1 if kind in (SEND_F, RECV_B) else -1      # activations go to the next stage, gradients to the one before
    stage = key % schedule.stages + step
    rank = schedule.rank_of[stage] if 0 <= stage < schedule.stages else -1
    return rank, RECV_F if kind == SEND_F else RECV_B, key + step


def _check_all_sent(schedule: Schedule, rank: int, done: Done) -> None:
    to = routes(schedule.rank_of)
    for stage in schedule.stages_of[rank]:
        for target, kind in ((to.forward[stage], SEND_F), (to.backward[stage], SEND_B)):
            for micro_batch in range(schedule.micro_batches if target >= 0 else 0):
                key = micro_batch * schedule.stages + stage
                if key not in done[kind]:
                    raise ScheduleError(f"rank {rank} never does {action_of(kind, key, schedule.stages)}",
                                        f"rank {target} waits for the value", at=schedule.source)


def _check_channel(schedule: Schedule, channel: tuple[int, int], sent: list[tuple[int, int, int]],
                   received: list[tuple[int, int, int]]) -> None:
    sender, receiver = channel
    for (kind, key, sent_at), (actual_kind, actual_key, position) in zip(sent, received):
        if (kind, key) != (actual_kind, actual_key):
            _raise(schedule, receiver, position, "would receive the wrong value",
                   f"the next value from rank {sender} is that of {schedule.at(sender, sent_at)}",
                   f"receive in the order of the sends: {action_of(kind, key, schedule.stages)} here")
    if len(received) > len(sent):
        _raise(schedule, receiver, received[len(sent)][-1], "is never sent",
               f"rank {sender} sends {len(sent)} values to rank {receiver}", f"add the send on rank {sender}")
    if len(sent) > len(received):
        _raise(schedule, sender, sent[len(received)][-1], "is never received",
               f"rank {receiver} receives {len(received)} values from rank {sender}",
               f"add the receive on rank {receiver}")


# ------------------------------------------------------------------------------------------------------------ live


def _check_live(schedule: Schedule, program: Schedule, capacity: int | None) -> None:
    """Run the lists without times. A send counts as sent at once, and blocks while it is more than `capacity` ahead."""
    most = len(program) if capacity is None else capacity
    position, ahead = [0] * program.ranks, dict[tuple[int, int], int]()   # ahead: values sent and not yet received
    posted = [False] * program.ranks                  # has the send that this rank blocks at been counted in `ahead`?
    ready = deque(range(program.ranks))
    while ready:
        rank = ready.popleft()
        at, row = position[rank], program.actions[rank]
        while at < len(row):
            kind = row.kinds[at]
            if kind not in COMPUTE:
                peer = _other_side(program, kind, row.keys[at])[0]
                if kind in SENDS:
                    channel = rank, peer
                    if not posted[rank]:
                        posted[rank] = True
                        ahead[channel] = ahead.get(channel, 0) + 1
                        ready.append(peer)
                    if ahead[channel] > most:
                        break
                    posted[rank] = False
                else:
                    channel = peer, rank
                    if not ahead.get(channel):
                        break
                    ahead[channel] -= 1
                    ready.append(peer)
            at += 1
        position[rank] = at
    _check_all_ended(schedule, program, position, capacity)


def _check_all_ended(schedule: Schedule, program: Schedule, position: list[int], capacity: int | None) -> None:
    stuck = [rank for rank, at in enumerate(position) if at < len(program.actions[rank])]
    if not stuck:
        return
    waits = []
    for rank in stuck:
        kind, key = program.actions[rank].kinds[position[rank]], program.actions[rank].keys[position[rank]]
        waits_for = "for a receive by" if kind in SENDS else "for a send by"
        waits.append(f"rank {rank} waits at {action_of(kind, key, program.stages)} {waits_for} rank "
                     f"{_other_side(program, kind, key)[0]}")
    rank = stuck[0]
    at = position[rank]
    if program is not schedule:                       # sends and receives were inserted: name the action beside them
        kinds = program.actions[rank].kinds
        before = sum(kind in COMPUTE for kind in kinds[:at])
        at = max(before - (kinds[at] in SENDS), 0)
    room = "" if capacity is None else f" with room for {capacity} values per channel"
    raise ScheduleError(f"{schedule.at(rank, at)} deadlocks{room}", "; ".join(waits[:8])
                        + (f"; and {len(waits) - 8} more" if len(waits) > 8 else ""),
                        "move it later, or what it waits for earlier", at=_line(schedule, rank, at))


def _raise(schedule: Schedule, rank: int, position: int, what: str, why: str, fix: str) -> NoReturn:
    raise ScheduleError(f"{schedule.at(rank, position)} {what}", why, fix, at=_line(schedule, rank, position))


def _line(schedule: Schedule, rank: int, position: int) -> str:
    return f"{schedule.source}:{schedule.lines[rank][position]}" if schedule.lines else schedule.source
