"""How long is a step of a small GPT in a pipeline, by schedule, beside torch.distributed.pipelining and the simulator?

One model in all arms: examples/gpt.py, its 8 layers cut into stages alike, ranks of one thread each, a batch of 8
micro-batches of 2 x 128 tokens; forward and backward, no optimizer. Ours and torch's live in processes of their own and
take turns, a schedule at a time; losses must agree first. A step is that of the slower rank, the median of all.

    step         ours, milliseconds; torch's beside it where torch has the schedule; torch's / ours: above 1 is ahead
    bubble       share of a rank's span in which it did not work, of the rank with the longest span, measured
    simulated    the same by the simulator, told the median time of each action of each stage as measured, with that of
                 sending and taking in what lies between two actions
    makespan     the measured one / the simulated one, from the first action of all ranks to the last
    idle, held, between     what the bubble is made of, milliseconds: nothing there that the rank could compute;
                 something there, but later in its list; its next action could begin, but a value was still under way
    peak         the most that a rank keeps between its actions, MB, measured by malloc
    predicted    the same by the schedule, of what the first forward and backward of each of its stages kept and let go

Where ranks outnumber cores they share them: action times then say how long each took beside the others.
"""
from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import globaltensor as gt
from benchmarks.processes import Workers
from benchmarks.timing import show
from globaltensor.pipelining import actions
from globaltensor.schedules.schedule import COMPUTE, Action
from globaltensor.schedules.timetable import Event, draw, makespan_of
from globaltensor.simulator.costs import Costs, Hop
from globaltensor.simulator.engine import simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT

MICRO_BATCHES, BATCH, SEQ, VOCAB, LAYERS, HEADS = 8, 16, 128, 512, 8, 4
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "bfs": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe-v": 2}
NEEDS = {"F": [(-1, "F")], "B": [(0, "F"), (1, "B"), (1, "I")], "I": [(0, "F"), (1, "B"), (1, "I")], "W": [(0, "I")]}
TORCHS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
          "bfs": "ScheduleLoopedBFS", "zb-v": "ScheduleZBVZeroBubble", "dualpipe-v": "ScheduleDualPipeV"}


def main(json: bool = False, quick: bool = False, ranks: int | None = None, hidden: int = 256,
         plot: str | None = None) -> None:
    """Measure and print, on 2 and then on 4 ranks or on so many. `quick`: few steps, of a narrow model. `plot`: a
    picture, measured above simulated."""
    hidden, rounds, steps = (64, 2, 2) if quick else (hidden, 5, 4)
    rows: list[dict[str, Any]] = []
    runs: dict[str, list[Event]] = {}
    for n in (2, 4) if ranks is None else (ranks,):
        for row, pair in measured(n, {"hidden": hidden, "rounds": rounds, "steps": steps}):
            rows.append(row)
            runs |= {f"{row['schedule']}, {n} ranks, {how}": [Event(*e) for e in events]
                     for how, events in pair.items()}
    show(__doc__.splitlines()[0], rows, json, hidden=hidden, layers=LAYERS, micro_batches=MICRO_BATCHES)
    if plot:
        draw(plot, runs, "ms")


def measured(ranks: int, settings: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """A row for each schedule, and the events of a step, measured and simulated."""
    with Workers("benchmarks.pipeline:ours", ranks, settings) as own, \
            Workers("benchmarks.pipeline:torchs", ranks, settings) as other:
        for name in SCHEDULES:
            both = [own] if name not in TORCHS else [own, other]
            losses = []
            laps: list[list[float]] = [[] for _ in both]
            for workers in both:
                workers.tell()
                losses.append(max(loss for loss in workers.hear() if loss is not None))
            if max(losses) - min(losses) > 1e-4 * max(losses):
                raise SystemExit(f"{name}: losses differ, {losses}")
            for _ in range(settings["rounds"]):
                for workers, found in zip(both, laps):
                    workers.tell()
                    found += [max(of_a_step) for of_a_step in zip(*workers.hear())]
            own.tell()
            said = own.hear()
            step, *torchs = (1e3 * statistics.median(found) for found in laps)
            peak = max(range(ranks), key=lambda r: said[r]["peak"])
            yield {"schedule": name, "ranks": ranks, "step ms": step, "torch's": torchs[0] if torchs else None,
                   "torch's / ours": torchs[0] / step if torchs else None, **said[0]["figures"],
                   "peak MB": said[peak]["peak"] / 1e6, "predicted": said[peak]["predicted"] / 1e6,
                   "tokens/s": BATCH * SEQ / step * 1e3}, said[0]["events"]


# ------------------------------------------------------------------------------------------------------------- a worker


class Front(nn.Module):
    """ids [b, t] -> [b, t, hidden]."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position.weight[:ids.shape[1]]


def made(hidden: int, stages: int) -> tuple[list[nn.Module], Tensor, Tensor]:
    """Stages, inputs and targets, the same in every process."""
    torch.manual_seed(0)
    model = GPT(VOCAB, SEQ, LAYERS, hidden, HEADS)
    ids = torch.randint(VOCAB, (BATCH, SEQ + 1))
    return cut(model, stages), ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def cut(model: GPT, stages: int) -> list[nn.Module]:
    """Blocks dealt out evenly, the ends with the outer ones."""
    starts = [round(k * len(model.blocks) / stages) for k in range(stages + 1)]
    parts = [list(model.blocks[a:b]) for a, b in zip(starts, starts[1:])]
    parts[0].insert(0, Front(model))
    parts[-1] += [model.norm, model.head]
    return [nn.Sequential(*layers) for layers in parts]


def by_ours(name: str, stages: list[nn.Module]) -> Any:
    ranks = [gt.placement("cpu", [r]) for r in range(gt.world_size())]
    return gt.pipeline(stages, ranks, name, MICRO_BATCHES, loss_of)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))


def turns(modules: Sequence[nn.Module], step: Any, settings: dict[str, Any]) -> Iterator[list[float]]:
    """At every turn the seconds of some steps; one more before them only warms the caches."""
    for _ in range(settings["rounds"]):
        sys.stdin.readline()
        laps = []
        for _ in range(settings["steps"] + 1):
            dist.barrier()
            began = time.perf_counter()
            step()
            laps.append(time.perf_counter() - began)
            for module in modules:
                module.zero_grad()
        yield laps[1:]


def ours(settings: dict[str, Any]) -> Iterator[Any]:
    gt.init()
    ranks = gt.world_size()
    for name, chunks in SCHEDULES.items():
        stages, inputs, targets = made(settings["hidden"], ranks * chunks)
        runner = by_ours(name, stages)
        sys.stdin.readline()
        yield runner.step(inputs, targets).item()
        runs: list[list[Event]] = []

        def step() -> None:
            runner.step(inputs, targets)
            runs.append(runner.events)

        yield from turns(stages, step, settings)
        sys.stdin.readline()
        runner.step(inputs, targets)                 # from here on the weights have gradients
        kept = Kept()
        with kept.watching():
            runner.step(inputs, targets)
        yield {**told(runner, runs[1:]), "peak": max(kept.held), "predicted": kept.predicted()}
        for module in stages:
            module.zero_grad()


class MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                     "fsmblks", "uordblks", "fordblks", "keepcost")]


def in_use() -> int:
    """Bytes that malloc has given out."""
    call = ctypes.CDLL(None).mallinfo2
    call.restype = MallInfo
    found = call()
    return found.uordblks + found.hblkhd


class Kept:
    """What this process keeps after each of its actions, above what it had before the first."""

    def __init__(self) -> None:
        self.before, self.actions, self.held = in_use(), [], [0]

    @contextmanager
    def watching(self) -> Iterator[None]:
        run_action = actions.PipelineStep._run_action

        def watched(step: Any, rank: int, action: Action) -> None:
            run_action(step, rank, action)
            if action.kind in "FBIW":
                self.actions.append(action)
                self.held.append(in_use() - self.before)

        actions.PipelineStep._run_action = watched
        try:
            yield
        finally:
            actions.PipelineStep._run_action = run_action

    def predicted(self) -> int:
        """The peak, if every action changed what is kept as the first of its kind and stage did."""
        change: dict[tuple[int, str], int] = {}
        held = most = 0
        for action, before, after in zip(self.actions, self.held, self.held[1:]):
            held += change.setdefault((action.stage, action.kind), after - before)
            most = max(most, held)
        return most


def told(runner: Any, runs: list[list[Event]]) -> dict[str, Any]:
    """Of the middle one of the steps of all processes: figures, and its events beside the simulated ones."""
    everything = []
    for own in runs:
        runner.events = own
        everything.append(runner.gathered_events())
    costs, own_times = calibrated(runner.schedule.stages, everything)
    simulated = [e._replace(start=max(e.start, e.end - own_times[e.kind, e.stage])) for e in
                 simulate(runner.schedule.only(COMPUTE), costs, record=True).events()]
    steps = sorted(((makespan_of(events), k) for k, events in enumerate(everything)))
    makespan, middle = steps[len(steps) // 2]
    shares = [gaps(events) for events in everything]
    span, *parts = gaps(simulated)
    figures = {"bubble": statistics.median(sum(parts) / span for span, *parts in shares),
               "simulated": sum(parts) / span, "makespan": makespan / makespan_of(simulated),
               **{name: 1e3 * statistics.median(share[k] for share in shares)
                  for k, name in enumerate(("idle ms", "held", "between"), 1)}}
    begin = min(e.start for e in everything[middle])
    runs = (("measured", begin, everything[middle]), ("simulated", 0.0, simulated))
    return {"figures": figures, "events": {
        how: [[*e[:4], 1e3 * (e.start - start), 1e3 * (e.end - start)] for e in events] for how, start, events in runs}}


def rows(events: Sequence[Event]) -> list[list[Event]]:
    """The computing of each rank, in order."""
    return [sorted((e for e in events if e.rank == rank and e.kind in NEEDS), key=lambda e: e.start)
            for rank in sorted({e.rank for e in events})]


def ready(events: Sequence[Event]) -> dict[Event, float]:
    """When what an action needs was made."""
    ends = {(e.stage, e.kind, e.micro_batch): e.end for e in events}
    return {e: max((ends.get((e.stage + by, kind, e.micro_batch), 0.0) for by, kind in NEEDS[e.kind]), default=0.0)
            for row in rows(events) for e in row}


def gaps(events: Sequence[Event]) -> tuple[float, float, float, float]:
    """Of the rank with the longest span: this span, and of the time between its actions how long it had nothing to
    compute, had something that stands later in its list, and could have begun with what comes next."""
    at, row = ready(events), max(rows(events), key=makespan_of)
    idle = held = between = 0.0
    for k, (before, e) in enumerate(zip(row, row[1:]), 1):
        begins = max(before.end, min(at[e], e.start))
        other = max(before.end, min(begins, *(at[later] for later in row[k:])))
        idle, held, between = idle + other - before.end, held + begins - other, between + e.start - begins
    return makespan_of(row), idle, held, between


def calibrated(stages: int, runs: list[list[Event]]) -> tuple[Costs, dict[tuple[str, int], float]]:
    """What the actions of each stage take, in the median: from when they could begin, so with what is sent and taken
    in before; and, by kind and stage, without."""
    whole: dict[tuple[str, int], list[float]] = {}
    own: dict[tuple[str, int], list[float]] = {}
    for events in runs:
        at = ready(events)
        for row in rows(events):
            for free, e in zip((row[0].start, *(before.end for before in row)), row):
                whole.setdefault((e.kind, e.stage), []).append(e.end - max(free, min(at[e], e.start)))
                own.setdefault((e.kind, e.stage), []).append(e.end - e.start)

    def taken(kind: str) -> tuple[float, ...]:
        return tuple(statistics.median(whole.get((kind, s), [0.0])) for s in range(stages))

    both, first, second = taken("B"), taken("I"), taken("W")
    share = [i / (i + w) if i + w else 0.5 for i, w in zip(first, second)]
    parts = [(b * x, b * (1 - x)) if b else (i, w) for b, i, w, x in zip(both, first, second, share)]
    costs = Costs(taken("F"), tuple(i for i, _ in parts), tuple(w for _, w in parts), (Hop(),) * (stages - 1))
    return costs, {which: statistics.median(found) for which, found in own.items()}


def torchs(settings: dict[str, Any]) -> Iterator[Any]:
    dist.init_process_group("gloo")
    for name in TORCHS:
        modules, inputs, targets = made(settings["hidden"], dist.get_world_size() * SCHEDULES[name])
        own, step = by_torch(name, modules)
        sys.stdin.readline()
        losses = step(inputs, targets)
        yield torch.stack(losses).mean().item() if losses else None
        yield from turns(own, lambda: step(inputs, targets), settings)


def by_torch(name: str, modules: list[nn.Module]) -> tuple[list[nn.Module], Callable[[Tensor, Tensor], list[Tensor]]]:
    """This rank's stages, and a step: the losses of the micro-batches, where the last stage is."""
    import torch.distributed.pipelining as pipelining

    rank, ranks, total = dist.get_rank(), dist.get_world_size(), len(modules)
    mine = [rank] if total == ranks else [rank, total - 1 - rank if name.endswith("-v") else ranks + rank]
    stages = [pipelining.PipelineStage(modules[k], k, total, torch.device("cpu")) for k in mine]
    kind = getattr(pipelining.schedules, TORCHS[name])
    schedule = kind(stages if total > ranks else stages[0], MICRO_BATCHES, loss_of)

    def step(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        first, last = 0 in mine, total - 1 in mine
        schedule.step(*([inputs] if first else []), **({"target": targets, "losses": losses} if last else {}),
                      return_outputs=False)
        return losses

    return [modules[k] for k in mine], step


if __name__ == "__main__":
    main()
