"""Simulating a schedule without its tensors: when does each action begin, and where does a rank wait?

Event-driven: a rank goes on through its list until it needs a value that is not computed yet, and is woken by the
action that computes it. What an action waits for depends on the order of the lists alone, so each action is visited
once and its time is final, in whatever order ranks are advanced. There is no global clock and no event queue: it takes
about half a microsecond per action.

A value is sent when it is computed; its rank goes on at once. Ranks that do the same at the same time (data-parallel
replicas of a pipeline, the ranks of a tensor-parallel stage) are simulated as one: what holds for one of them holds
for all, exactly.
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from html import escape

from globaltensor.errors import counted
from globaltensor.pictures.timetable_picture import Timetable, timetable_picture
from globaltensor.runtime.progress import progress
from globaltensor.schedules.check import check_order
from globaltensor.schedules.communication import communicates, routes
from globaltensor.schedules.schedule import COMPUTE, F, Schedule, ScheduleError, W
from globaltensor.schedules.timetable import Event
from globaltensor.simulator.costs import Costs, Number


@dataclass(frozen=True)
class SimulatedRun:
    """The times of a simulated step. The fields count in `unit`; the properties are in the caller's unit.

    first, last   per rank, the begin of its first action and the end of its last
    busy          per rank, the time it worked
    done          per stage, the end of its last action
    starts        per rank, the begin of each action (empty unless recorded)
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
        """From the first action of any rank to the last."""
        return (max(self.last) - min(self.first)) * self.unit

    @property
    def spans(self) -> list[Fraction | float]:
        """Per rank, from its own first action to its own last."""
        return [(last - first) * self.unit for first, last in zip(self.first, self.last)]

    @property
    def span(self) -> Fraction | float:
        """The longest of the ranks' spans. Shorter than the makespan where ranks do not begin and end together."""
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

    def events(self) -> Timetable:
        """Every action with its times: prints as a timetable, which a notebook shows as a picture."""
        durations = durations_of(self.costs)
        return Timetable(Event(rank, *action, float(start * self.unit),
                               float((start + durations[kind][action.stage]) * self.unit))
                         for rank, (row, starts) in enumerate(zip(self.schedule.actions, self.starts))
                         for kind, action, start in zip(row.kinds, row, starts))

    def __str__(self) -> str:
        of = self.schedule
        return (f"{of.name}: {counted(of.stages, 'stage')} on {counted(of.ranks, 'rank')}, "
                f"{counted(of.micro_batches, 'micro-batch', 'micro-batches')}; makespan {float(self.makespan):.6g}, "
                f"bubble {float(self.bubble_rate):.1%}")

    def _repr_html_(self) -> str:
        if not self.starts:
            return escape(str(self))
        return timetable_picture({str(self): self.events()})._repr_html_()


def simulate(schedule: Schedule, costs: Costs, record: bool = False) -> SimulatedRun:
    """One step of this schedule. `record` also keeps when each action began. Raises ScheduleError where a backward pass
    comes before its forward pass, and where an action never begins."""
    if communicates(schedule):                        # values are sent when computed and wait where they are needed
        schedule = schedule.only(COMPUTE)
    check_order(schedule)
    state = _State(schedule, costs)
    ready = deque(range(schedule.ranks))
    starts: list[list[Number]] = [[] for _ in range(schedule.ranks)]
    with progress("simulating", len(schedule), "actions") as advance:
        while ready:
            rank = ready.popleft()
            before = state.position[rank]
            state.advance(rank, ready, starts[rank] if record else None)
            advance(state.position[rank] - before)
    _check_finished(schedule, state.position)
    last = [state.clock[rank] for rank in range(schedule.ranks)]
    first = [last[rank] if begin is None else begin for rank, begin in enumerate(state.first)]
    return SimulatedRun(schedule, costs, first, last, state.busy, state.done, starts if record else [])


class _State:
    """Where every rank is: its position and clock, which values have arrived, and what it waits for (-1: nothing).

    Values are numbered: the output of a stage for a micro-batch by its key, the gradient of its input by `keys` + key.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.stages, self.ranks = schedule, schedule.stages, schedule.ranks
        self.keys = schedule.stages * schedule.micro_batches
        self.arrival: list[Number] = [-1] * (2 * self.keys)   # of each value, on the rank that needs it; -1: not yet
        self.position, self.waits = [0] * self.ranks, [-1] * self.ranks
        self.clock: list[Number] = [0] * self.ranks
        self.busy: list[Number] = [0] * self.ranks
        self.first: list[Number | None] = [None] * self.ranks
        self.done: list[Number] = [0] * self.stages
        self.durations, self.to = durations_of(costs), routes(schedule.rank_of)
        none = [(0, 0)]
        self.hops = ([*costs.hops] + none, none + [*costs.hops])
        self.wire: dict[tuple[int, int], Number] = {}         # (from, to) -> when it is free again

    def advance(self, rank: int, ready: deque[int], starts: list[Number] | None) -> None:
        """Run this rank until it waits or its list ends; add ranks that need not wait any more to `ready`."""
        # Locals and a single loop, without calls per action: this is where a simulation of millions spends its time.
        row, now, stages, keys = self.schedule.actions[rank], self.clock[rank], self.stages, self.keys
        kinds, row_keys, forward_to, backward_to = row.kinds, row.keys, self.to.forward, self.to.backward
        arrival, durations, done, waits = self.arrival, self.durations, self.done, self.waits
        position, last_stage, worked = self.position[rank], stages - 1, self.busy[rank]
        while position < len(kinds):
            kind, key = kinds[position], row_keys[position]
            stage = key % stages
            if kind == F:
                needs = key - 1 if stage else -1
                value, target = key, forward_to[stage]
            # needs the I before it only, which the same rank has done
            elif kind == W:
                needs, value, target = -1, -1, -1
            else:
                needs = keys + key + 1 if stage < last_stage else -1
                value, target = keys + key, backward_to[stage]
            if needs >= 0:
                arrived = arrival[needs]
                # not simulated event by event: a rank runs until a value is missing, and whoever makes it wakes the
                # rank
                if arrived < 0:
                    waits[rank] = needs
                    break
                if arrived > now:
                    now = arrived
            if self.first[rank] is None:
                self.first[rank] = now
            if starts is not None:
                starts.append(now)
            took = durations[kind][stage]
            now += took
            worked += took
            done[stage] = now
            position += 1
            if value >= 0:
                if target < 0:
                    arrival[value] = now
                else:
                    arrival[value] = self._transferred(now, kind != F, stage, rank, target)
                    if waits[target] == value:
                        waits[target] = -1
                        ready.append(target)
        self.position[rank], self.clock[rank], self.busy[rank] = position, now, worked

    def _transferred(self, now: Number, back: bool, stage: int, rank: int, target: int) -> Number:
        """When a value that is sent now arrives."""
        latency, busy = self.hops[back][stage]
        if busy:
            now = self.wire[rank, target] = max(now, self.wire.get((rank, target), 0)) + busy
        return now + latency


def durations_of(costs: Costs) -> tuple[tuple[Number, ...], ...]:
    """By the code of a kind, for each stage."""
    return costs.forward, costs.backward, costs.inputs, costs.weights


def _check_finished(schedule: Schedule, position: list[int]) -> None:
    for rank, (row, reached) in enumerate(zip(schedule.actions, position)):
        if reached < len(row):
            raise ScheduleError(f"{schedule.at(rank, reached)} never begins", "the value it needs is never computed, "
                                "or only after it", "globaltensor.schedules.check says which action is wrong")
