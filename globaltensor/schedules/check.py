"""A schedule is checked before it runs: what would be a hang or a wrong gradient is an error that names an action.

In this order, each with the first action that offends:

    complete   every stage runs F and then B, or I and then W, once for every micro-batch, and on its own rank
    matched    for every ordered pair of ranks the receives are the sends, in the same order; a value is received
               before it is used and sent after it is made
    live       no rank waits for ever, with as many values on the way as the transport takes (`capacity`)

A schedule that passes ends, with no activation kept and no value on its way; and what it keeps at most on each rank
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
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    B,
    F,
    I,
    Schedule,
    ScheduleError,
    W,
    decode,
    encode,
)

# Of the same stage and micro-batch: what must have been done before an action, and what must not.
_AFTER = {B: (F,), I: (F,), W: (F, I)}
_INSTEAD = {B: (I, W), I: (B,), W: (B,)}


@dataclass(frozen=True)
class Checked:
    """What is known of a schedule that passed. `program` has its sends and receives; `peak_activations`, per rank, is
    in units of all activations that the rank's stages keep of one micro-batch."""

    program: Schedule
    peak_activations: tuple[Fraction, ...]


def check(schedule: Schedule, capacity: int | None = None, weight_share: Fraction | int | str = 1) -> Checked:
    """Raise ScheduleError where the schedule cannot be run.

    capacity       how many values of a channel (an ordered pair of ranks) a sender may be ahead of the receiver
                   before its send waits; 0: a send waits for its receive; None: sends never wait
    weight_share   how much of its activations an action I leaves for W
    """
    _complete(schedule)
    program = schedule if communicates(schedule) else communicate(schedule)
    if program is schedule:
        _matched(schedule)
    _live(schedule, program, capacity)
    return Checked(program, peak_activations(schedule, weight_share))


def peak_activations(schedule: Schedule, weight_share: Fraction | int | str = 1) -> tuple[Fraction, ...]:
    """Per rank the most activations kept at a time: from F to B or W, of which I leaves `weight_share`."""
    return tuple(Fraction(int(held.max(initial=0)), unit) for held, unit in _held(schedule, Fraction(weight_share)))


def kept(schedule: Schedule, weight_share: Fraction | int | str = 1) -> Iterator[list[Fraction]]:
    """For each rank, what it keeps after each of its actions, in the units of `Checked.peak_activations`."""
    for held, unit in _held(schedule, Fraction(weight_share)):
        yield [Fraction(n, unit) for n in held.tolist()]


def _held(schedule: Schedule, share: Fraction) -> Iterator[tuple[np.ndarray, int]]:
    """The same as integers, and the unit that they are parts of."""
    change, whole = np.zeros(8, np.int64), share.denominator
    change[[F, B, I, W]] = whole, -whole, share.numerator - whole, -share.numerator
    for row, stages in zip(schedule.actions, schedule.stages_of):
        yield np.cumsum(change[np.frombuffer(row.codes, np.int64) & 7]), whole * max(len(stages), 1)


def least_capacity(schedule: Schedule) -> int:
    """The smallest `capacity` with which the schedule ends."""
    capacity = 0
    while True:
        try:
            check(schedule, capacity)
            return capacity
        except ScheduleError:
            check(schedule)                           # not for want of capacity: say so
            capacity += 1


def _complete(schedule: Schedule) -> None:
    stages = schedule.stages
    seen: set[int] = set()
    for rank, row in enumerate(schedule.actions):
        for position, code in enumerate(row.codes):
            if code & 7 < SEND_F:
                wrong = _misplaced(schedule, rank, code, seen)
                if wrong:
                    _raise(schedule, rank, position, *wrong)
                seen.add(code)
    for key in range(stages * schedule.micro_batches):
        forward, whole, inputs, weights = (key << 3 | kind in seen for kind in (F, B, I, W))
        if not (forward and (whole or inputs and weights)):
            missing = decode(key << 3 | (F if not forward else W if inputs else B), stages)
            rank = schedule.rank_of[missing.stage]
            raise ScheduleError(f"rank {rank} never does {missing}", f"each of the {schedule.micro_batches} "
                                "micro-batches passes every stage forward and back",
                                f"{missing} in the list of rank {rank}", at=schedule.source)


def _misplaced(schedule: Schedule, rank: int, code: int, seen: set[int]) -> tuple[str, str, str] | None:
    """What is wrong with this action after those `seen`: what, why, and what to do."""
    stages, kind, rest = schedule.stages, code & 7, code & ~7
    home = schedule.rank_of[(code >> 3) % stages]
    if home != rank:
        return "stands on the wrong rank", f"the weights of its stage are on rank {home}", f"move it to rank {home}"
    if code in seen:
        return "is done twice", "its part of the gradient would count twice", "remove one of the two"
    for other in _INSTEAD.get(kind, ()):
        if rest | other in seen:
            return f"does again what {decode(rest | other, stages)} did", "B is I and W in one", "B, or I and W"
    for before in _AFTER.get(kind, ()):
        if rest | before not in seen:
            first = decode(rest | before, stages)
            return f"comes before {first}", "it needs what that leaves behind", f"{first} before it"
    return None


def _matched(schedule: Schedule) -> None:
    """Sends and receives that the schedule itself has: each where it belongs, and in the same order on both sides."""
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}       # channel -> (the receive that fits, position)
    received: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, row in enumerate(schedule.actions):
        done: set[int] = set()
        for position, code in enumerate(row.codes):
            wrong = _untimely(schedule, rank, code, done)
            if wrong:
                _raise(schedule, rank, position, *wrong)
            done.add(code)
            if code & 7 >= SEND_F:
                peer, receive = _other_side(schedule, code)
                if code & 7 in (SEND_F, SEND_B):
                    sent.setdefault((rank, peer), []).append((receive, position))
                else:
                    received.setdefault((peer, rank), []).append((code, position))
        _all_sent(schedule, rank, done)
    for channel in sorted(sent.keys() | received.keys()):
        _alike(schedule, channel, sent.get(channel, []), received.get(channel, []))


def _untimely(schedule: Schedule, rank: int, code: int, done: set[int]) -> tuple[str, str, str] | None:
    """What is wrong with a send or a receive, or with an action that needs one, after those `done` on this rank."""
    stages, kind, rest = schedule.stages, code & 7, code & ~7
    stage = (code >> 3) % stages
    if kind < SEND_F:
        before = stage + (-1 if kind == F else 1)
        receive = rest | (RECV_F if kind == F else RECV_B)
        if kind != W and 0 <= before < stages and schedule.rank_of[before] != rank and receive not in done:
            name = decode(receive, stages)
            return f"comes before {name}", "it needs the value that this receives", f"{name} before it"
        return None
    if schedule.rank_of[stage] != rank:
        return "stands on the wrong rank", f"its stage lives on rank {schedule.rank_of[stage]}", "move it there"
    if code in done:
        return "is done twice", "the value is sent and received once", "remove one of the two"
    if _other_side(schedule, code)[0] in (-1, rank):
        return "moves nothing", "no stage on another rank is on the other side", "remove it"
    made = {SEND_F: (F,), SEND_B: (B, I)}.get(kind)
    if made and not any(rest | maker in done for maker in made):
        return "sends what is not made yet", "a value is sent after the action that makes it", "move it behind that"
    return None


def _other_side(schedule: Schedule, code: int) -> tuple[int, int]:
    """The rank on the other side of a send or receive (-1: none), and the receive that fits a send."""
    kind, key = code & 7, code >> 3
    step = 1 if kind in (SEND_F, RECV_B) else -1
    stage = key % schedule.stages + step
    rank = schedule.rank_of[stage] if 0 <= stage < schedule.stages else -1
    return rank, (key + step) << 3 | (RECV_F if kind == SEND_F else RECV_B)


def _all_sent(schedule: Schedule, rank: int, done: set[int]) -> None:
    to = routes(schedule.rank_of)
    for stage in schedule.stages_of[rank]:
        for target, kind in ((to.forward[stage], "SEND_F"), (to.backward[stage], "SEND_B")):
            for micro_batch in range(schedule.micro_batches if target >= 0 else 0):
                if encode(stage, kind, micro_batch, schedule.stages) not in done:
                    raise ScheduleError(f"rank {rank} never does {stage}{kind}{micro_batch}",
                                        f"rank {target} waits for the value", at=schedule.source)


def _alike(schedule: Schedule, channel: tuple[int, int], sent: list[tuple[int, int]],
           received: list[tuple[int, int]]) -> None:
    for (fits, at), (code, position) in zip(sent, received):
        if fits != code:
            _raise(schedule, channel[1], position, "would get another value",
                   f"what comes from rank {channel[0]} at this place is sent by {schedule.at(channel[0], at)}",
                   f"receive in the order of the sends: {decode(fits, schedule.stages)} here")
    if len(received) > len(sent):
        _raise(schedule, channel[1], received[len(sent)][1], "is never sent", f"rank {channel[0]} sends "
               f"{len(sent)} values to rank {channel[1]}", "a send on the other side")
    if len(sent) > len(received):
        _raise(schedule, channel[0], sent[len(received)][1], "is never received", f"rank {channel[1]} receives "
               f"{len(received)} values from rank {channel[0]}", "a receive on the other side")


def _live(schedule: Schedule, program: Schedule, capacity: int | None) -> None:
    """Run the lists without time. A send counts as sent at once and waits until it is no more than `capacity` ahead."""
    codes = [row.codes for row in program.actions]
    most = len(program) if capacity is None else capacity
    position, ahead = [0] * program.ranks, dict[tuple[int, int], int]()   # ahead: values sent and not yet received
    posted, ready = [False] * program.ranks, deque(range(program.ranks))
    while ready:
        rank = ready.popleft()
        at, row = position[rank], codes[rank]
        while at < len(row):
            code = row[at]
            if code & 7 >= SEND_F:
                peer = _other_side(program, code)[0]
                if code & 7 in (SEND_F, SEND_B):
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
    _stuck(schedule, program, position, capacity)


def _stuck(schedule: Schedule, program: Schedule, position: list[int], capacity: int | None) -> None:
    stuck = [rank for rank, at in enumerate(position) if at < len(program.actions[rank])]
    if not stuck:
        return
    waits = []
    for rank in stuck:
        code = program.actions[rank].codes[position[rank]]
        verb = "to be taken by" if code & 7 in (SEND_F, SEND_B) else "from"
        waits.append(f"rank {rank} waits at {decode(code, program.stages)} {verb} rank {_other_side(program, code)[0]}")
    rank = stuck[0]
    at = position[rank]
    if program is not schedule:                       # sends and receives were put in: name the action beside them
        before = sum(code & 7 < SEND_F for code in program.actions[rank].codes[:at])
        at = max(before - (program.actions[rank].codes[at] & 7 in (SEND_F, SEND_B)), 0)
    room = "" if capacity is None else f", with room for {capacity} values in a channel"
    raise ScheduleError(f"{schedule.at(rank, at)} waits for ever{room}", "; ".join(waits[:8])
                        + (f"; and {len(waits) - 8} more" if len(waits) > 8 else ""),
                        "put it later, or what it waits for earlier", at=_line(schedule, rank, at))


def _raise(schedule: Schedule, rank: int, position: int, what: str, why: str, fix: str) -> NoReturn:
    raise ScheduleError(f"{schedule.at(rank, position)} {what}", why, fix, at=_line(schedule, rank, position))


def _line(schedule: Schedule, rank: int, position: int) -> str:
    return f"{schedule.source}:{schedule.lines[rank][position]}" if schedule.lines else schedule.source
