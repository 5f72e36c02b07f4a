"""Running a schedule without its tensors: when does each action begin, and where does a rank wait?

Event-driven: a rank goes on through its list until it needs a value that is not made yet, and is woken by the action
that makes it. What an action waits for depends on the order of the lists alone, so each action is looked at once and
its time is final, in whatever order ranks are taken up. There is no clock and no queue of events by time: about half a
microsecond an action.

A value leaves when it is made; its rank goes on at once. Ranks that do the same at the same time, replicas of a
pipeline in data parallelism and the parts of a tensor-parallel stage, are one rank here: what holds for one of them
holds for all, exactly.
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from fractions import Fraction

from globaltensor.schedules.communication import COMPUTE, communicates, routes
from globaltensor.schedules.schedule import F, Schedule, ScheduleError, W
from globaltensor.schedules.timetable import Event
from globaltensor.simulator.costs import Costs, Number


@dataclass(frozen=True)
class Run:
    """What a simulated step was like. Times are raw numbers of `unit`; the properties are in the caller's unit.

    first, last   per rank, when it began its first and ended its last action
    busy          per rank, the time it worked
    done          per stage, when its last action ended
    starts        per rank, when each action began (empty unless recorded)
    """

    schedule: Schedule
    costs: Costs
    first: list[Number]
    last: list[Number]
    busy: list[Number]
    done: list[Number]
    starts: list[list[Number]]

    @property
    def unit(self) -> Fraction | float:
        return self.costs.unit

    @property
    def makespan(self) -> Fraction | float:
        """From the first action of all ranks to the last."""
        return (max(self.last) - min(self.first)) * self.unit

    @property
    def spans(self) -> list[Fraction | float]:
        """Per rank, from its own first action to its own last."""
        return [(last - first) * self.unit for first, last in zip(self.first, self.last)]

    @property
    def span(self) -> Fraction | float:
        """The longest of the ranks' spans. Shorter than the makespan where ranks begin and end one after the other."""
        return max(self.spans)

    @property
    def work(self) -> list[Fraction | float]:
        """Per rank, the time it worked."""
        return [busy * self.unit for busy in self.busy]

    @property
    def bubble_rate(self) -> Fraction | float:
        """The share of the longest span in which its rank did not work."""
        span, work = max(zip(self.spans, self.work), key=lambda both: (both[0], -both[1]))
        return (span - work) / span if span else span

    def events(self) -> list[Event]:
        """Every action with its times, as a timetable wants them."""
        lengths = _lengths(self.costs)
        return [Event(rank, *action, float(start * self.unit),
                      float((start + lengths[code & 7][action.stage]) * self.unit))
                for rank, (row, starts) in enumerate(zip(self.schedule.actions, self.starts))
                for code, action, start in zip(row.codes, row, starts)]


def simulate(schedule: Schedule, costs: Costs, record: bool = False) -> Run:
    """One step of this schedule. `record` also keeps when each action began."""
    if communicates(schedule):                        # values leave when they are made and wait where they are needed
        schedule = schedule.only(COMPUTE)
    state = _State(schedule, costs)
    ready = deque(range(schedule.ranks))
    starts: list[list[Number]] = [[] for _ in range(schedule.ranks)]
    while ready:
        rank = ready.popleft()
        state.advance(rank, ready, starts[rank] if record else None)
    _finished(schedule, state.position)
    last = [state.clock[rank] for rank in range(schedule.ranks)]
    first = [last[rank] if begin is None else begin for rank, begin in enumerate(state.first)]
    return Run(schedule, costs, first, last, state.busy, state.done, starts if record else [])


class _State:
    """Where every rank is: its position and clock, what is there for it, and what it waits for (-1: nothing)."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.stages, self.ranks = schedule, schedule.stages, schedule.ranks
        self.keys = schedule.stages * schedule.micro_batches
        self.there: list[Number] = [-1] * (2 * self.keys)     # when a stage's output, or its input's gradient, is there
        self.position, self.waits = [0] * self.ranks, [-1] * self.ranks
        self.clock: list[Number] = [0] * self.ranks
        self.busy: list[Number] = [0] * self.ranks
        self.first: list[Number | None] = [None] * self.ranks
        self.done: list[Number] = [0] * self.stages
        self.lengths, self.to = _lengths(costs), routes(schedule.rank_of)
        none = [(0, 0)]
        self.hops = ([*costs.hops] + none, none + [*costs.hops])
        self.wire: dict[tuple[int, int], Number] = {}         # (from, to) -> when it is free again

    def advance(self, rank: int, ready: deque[int], starts: list[Number] | None) -> None:
        """Run this rank until it waits, or its list ends; put ranks that need not wait any more into `ready`."""
        codes, now, stages, keys = self.schedule.actions[rank].codes, self.clock[rank], self.stages, self.keys
        there, lengths, done, waits = self.there, self.lengths, self.done, self.waits
        position, top, worked = self.position[rank], stages - 1, self.busy[rank]
        while position < len(codes):
            code = codes[position]
            kind, key = code & 7, code >> 3
            stage = key % stages
            if kind == F:
                needs = key - 1 if stage else -1
                token, target = key, self.to.forward[stage]
            elif kind == W:
                needs, token, target = -1, -1, -1
            else:
                needs = keys + key + 1 if stage < top else -1
                token, target = keys + key, self.to.backward[stage]
            if needs >= 0:
                arrived = there[needs]
                if arrived < 0:
                    waits[rank] = needs
                    break
                if arrived > now:
                    now = arrived
            if self.first[rank] is None:
                self.first[rank] = now
            if starts is not None:
                starts.append(now)
            took = lengths[kind][stage]
            now += took
            worked += took
            done[stage] = now
            position += 1
            if token >= 0:
                if target < 0:
                    there[token] = now
                else:
                    there[token] = self._moved(now, kind != F, stage, rank, target)
                    if waits[target] == token:
                        waits[target] = -1
                        ready.append(target)
        self.position[rank], self.clock[rank], self.busy[rank] = position, now, worked

    def _moved(self, now: Number, back: bool, stage: int, rank: int, target: int) -> Number:
        """When a value that leaves now is there."""
        latency, busy = self.hops[back][stage]
        if busy:
            now = self.wire[rank, target] = max(now, self.wire.get((rank, target), 0)) + busy
        return now + latency


def _lengths(costs: Costs) -> tuple[tuple[Number, ...], ...]:
    return costs.forward, costs.backward, costs.inputs, costs.weights


def _finished(schedule: Schedule, position: list[int]) -> None:
    for rank, (row, reached) in enumerate(zip(schedule.actions, position)):
        if reached < len(row):
            raise ScheduleError(f"{schedule.at(rank, reached)} never begins", "what it needs is made by nobody, or "
                                "only after it", "globaltensor.schedules.check says which action is wrong")
