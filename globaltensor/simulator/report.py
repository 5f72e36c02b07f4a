"""A simulated step as the data of a report's page, and a measured one beside its simulation.

The starts of a run are lists of numbers, one for each rank; here they become columns at once, so that a step of
millions of actions takes seconds.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from globaltensor.pictures.report import (
    MemoryCurves,
    Panel,
    Report,
    Table,
    bubble_table,
    idle_times,
    spelled_bytes,
    spelled_time,
    time_by_name,
)
from globaltensor.schedules.check import activations_held
from globaltensor.schedules.communication import routes
from globaltensor.schedules.schedule import COMPUTE, F, Schedule
from globaltensor.schedules.timetable import ACTION_NAMES, Event
from globaltensor.simulator.costs import Costs, Hop
from globaltensor.simulator.engine import SimulatedRun, durations_of, simulate
from globaltensor.simulator.training import SimulatedStep

_KINDS = tuple(ACTION_NAMES)[:len(COMPUTE)]          # of the codes F, B, I, W
_PARTS = 256                                         # into which the time of memory is divided


def simulation_report(run: SimulatedRun, step: SimulatedStep | None, facts: Mapping[str, str]) -> Report:
    """The report of a run that was recorded; `step` where it is one of training, with times in seconds."""
    unit = "s" if step else ""
    panel = simulated_panel(run, f"{run.schedule.name}, simulated")
    flows = link_flows(run.schedule, step.stage.crossing if step else None)
    return Report(f"Simulation of {run.schedule.name}: {run.schedule.ranks} ranks, {run.schedule.micro_batches} "
                  "micro-batches", list(facts.items()), [panel], unit, flows, "bytes" if step else "transfers",
                  memory_of_run(run, step), [bubble_table(panel, unit), time_by_name(panel, unit),
                                              *([_traffic_table(step)] if step else [])], [bubble_text(run)])


def simulated_panel(run: SimulatedRun, title: str) -> Panel:
    """The timeline of a run."""
    schedule, scale = run.schedule, float(run.unit)
    took = np.array(durations_of(run.costs), np.float64)                   # [kind, stage]
    kinds = [np.frombuffer(row.kinds, np.uint8) for row in schedule.actions]
    keys = [np.frombuffer(row.keys, np.int64) for row in schedule.actions]
    kind, key = np.concatenate(kinds), np.concatenate(keys)
    stage = key % schedule.stages
    start = np.concatenate([np.array(one, np.float64) for one in run.starts])
    codes = np.unique(kind)
    names = [(f"{ACTION_NAMES[_KINDS[code]]}, stage {s}", ACTION_NAMES[_KINDS[code]])
             for s in range(schedule.stages) for code in codes]
    exact = all(isinstance(one, int) for row in run.starts for one in row[:2])
    begin = start.min(initial=np.inf) if len(start) else 0.0
    return Panel(title, [f"rank {rank}" for rank in range(schedule.ranks)], range(schedule.ranks),
                 np.concatenate([[0], np.cumsum([len(row) for row in kinds])]).astype(np.int64),
                 (start - begin) * scale, took[kind, stage] * scale,
                 stage * len(codes) + np.searchsorted(codes, kind),
                 key // schedule.stages, names, tick=scale if exact else 0.0)


def bubble_text(run: SimulatedRun) -> str:
    """Why ranks wait, in words."""
    ranks, micro_batches, chunks = run.schedule.ranks, run.schedule.micro_batches, run.schedule.chunks
    text = (f"A rank waits for {float(run.bubble_rate):.1%} of the step. The first micro-batch has to come down "
            f"{ranks} ranks before the last can begin, and the last gradient has to come back up.")
    if run.schedule.name in ("1f1b", "gpipe"):
        ideal = (ranks - 1) / (micro_batches + ranks - 1)
        text += (f" With stages of equal length and free transfers that is (p - 1) / (m + p - 1) = {ideal:.1%} for p = "
                 f"{ranks} ranks and m = {micro_batches} micro-batches: more micro-batches make it smaller.")
    elif chunks > 1:
        text += f" With {chunks} stages on each rank it comes back sooner."
    return text


def link_flows(schedule: Schedule, nbytes: int | None) -> dict[tuple[int, int], int]:
    """What goes between pipeline ranks in a step: bytes, or transfers where it is not known how large they are."""
    flows: dict[tuple[int, int], int] = {}
    for targets in routes(schedule.rank_of):
        for rank, target in zip(schedule.rank_of, targets):
            if target >= 0:
                flows[rank, target] = flows.get((rank, target), 0) + schedule.micro_batches * (
                    1 if nbytes is None else nbytes)
    return flows


def memory_of_run(run: SimulatedRun, step: SimulatedStep | None) -> MemoryCurves:
    """What each rank keeps: bytes with the model's states, or activations of whole micro-batches."""
    end, scale, first = float(run.makespan) or 1.0, float(run.unit), float(min(run.first))
    took = np.array(durations_of(run.costs), np.float64)
    peaks = np.zeros((run.schedule.ranks, _PARTS))
    edges = np.arange(_PARTS) * (end / _PARTS)
    for rank, (row, starts, (held, unit)) in enumerate(zip(run.schedule.actions, run.starts,
                                                           activations_held(run.schedule, Fraction(1)))):
        always, each = 0.0, 1.0
        if step:                                     # what an action works with beside what it keeps is always counted
            each, most = step.per_micro_batch[rank], float(held.max(initial=0)) / unit
            always = step.states[rank] + max(step.activations[rank] - each * most, 0.0)
        kind = np.frombuffer(row.kinds, np.uint8)
        stage = np.frombuffer(row.keys, np.int64) % run.schedule.stages
        start = np.array(starts, np.float64)
        when = np.where(kind == F, start, start + took[kind, stage])       # a forward adds as it begins
        times, values = (when - first) * scale, always + each * held / unit
        before = np.searchsorted(times, edges, side="right") - 1
        peaks[rank] = np.where(before >= 0, values[np.maximum(before, 0)], always)
        np.maximum.at(peaks[rank], np.minimum((times / end * _PARTS).astype(np.int64), _PARTS - 1), values)
    names = [f"rank {rank}" for rank in range(run.schedule.ranks)]
    return MemoryCurves(names, range(run.schedule.ranks), peaks, end, "bytes" if step else "activations")


def _traffic_table(step: SimulatedStep) -> Table:
    purposes = (("within layers (tensor parallel)", step.tensor), ("between stages, each transfer", step.stage),
             ("gradients (data parallel)", step.data))
    rows = [[name, spelled_bytes(one.bytes), spelled_time(one.seconds, "s")] for name, one in purposes]
    return Table("Bytes by purpose, of one device in a step", ("what", "bytes", "time"), rows, (1, 2))


# ------------------------------------------------------------------------------------------- a run and its simulation


def simulation_of_events(events: Sequence[Event], schedule: Schedule) -> SimulatedRun:
    """The schedule of a measured step, simulated with the mean time that each kind of action took on each stage."""
    sums = np.zeros((len(_KINDS), schedule.stages))
    counts = np.zeros_like(sums)
    for e in events:
        if e.kind in _KINDS:
            sums[_KINDS.index(e.kind), e.stage] += e.end - e.start
            counts[_KINDS.index(e.kind), e.stage] += 1
    forward, whole, inputs, weights = sums / np.maximum(counts, 1)
    both = inputs + weights
    share = np.where(both > 0, inputs / np.where(both > 0, both, 1.0), 1.0)
    total = np.where(whole > 0, whole, both)           # a stage has B; or I and W; or these for some micro-batches only
    costs = Costs(tuple(forward.tolist()), tuple((total * share).tolist()), tuple((total * (1 - share)).tolist()),
                  (Hop(),) * max(schedule.stages - 1, 0))
    return simulate(schedule, costs, True)


def with_simulation(of: Report, schedule: Schedule) -> Report:
    """A report that has the panel of a pipeline, with what its schedule gives by itself beside it."""
    at = next((k for k, panel in enumerate(of.panels) if panel.is_pipeline), None)
    if at is None:
        return of
    measured = of.panels[at]
    run = simulation_of_events(_events_of(measured), schedule)
    simulated = simulated_panel(run, "the same schedule, simulated with the mean times of its actions")
    idle, ideal = (1 - float(idle_times(panel).work.mean()) / (panel.end or 1.0) for panel in (measured, simulated))
    note = (f"The pipeline took {spelled_time(measured.end, 's')}, of which its ranks waited {idle:.1%} on average. "
            f"The schedule alone, with actions that always take their mean time and transfers that take none, needs "
            f"{spelled_time(simulated.end, 's')} and waits for {ideal:.1%}. What is between the two are transfers, "
            "overheads and actions that took longer than others.")
    return replace(of, panels=[*of.panels[:at + 1], simulated, *of.panels[at + 1:]], notes=[*of.notes, note],
                   tables=[*of.tables, bubble_table(measured, "s"), bubble_table(simulated, "s")])


def _events_of(panel: Panel) -> list[Event]:
    """The actions of a panel; its names tell kind and stage."""
    codes = {name: code for code, name in ACTION_NAMES.items()}
    measured_as = [(codes[kind], int(text.rpartition(" ")[2])) for text, kind in panel.names]
    rank = np.repeat(np.array(panel.ranks), np.diff(panel.offsets))
    return [Event(int(r), measured_as[n][1], measured_as[n][0], int(item), float(start), float(start + length))
            for r, n, item, start, length in zip(rank, panel.name, panel.item, panel.start, panel.length)]
