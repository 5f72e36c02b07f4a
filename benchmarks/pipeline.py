"""How long is a step of a small GPT in a pipeline, by schedule, beside torch.distributed.pipelining and the simulator?

One model in all arms: examples/gpt.py, its layers cut into stages alike, 2 ranks of one thread each, a batch of 8
micro-batches of 2 x 128 tokens; forward and backward, no optimizer. Ours and torch's live in processes of their own and
take turns, a schedule at a time; losses must agree first. A step is that of the slower rank, the median of all.

    step         ours, milliseconds; torch's beside it where torch has the schedule
    bubble       share of a rank's span in which it did not work, of the rank with the longest span, measured
    simulated    the same by the simulator, told the median time of each action of each stage as measured
    simulated step   its makespan; what is longer in the measured one is between the actions
"""
from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import globaltensor as gt
from benchmarks.processes import Workers
from benchmarks.timing import show
from globaltensor.pipeline.timetable import Event
from globaltensor.simulator.costs import Costs, Hop
from globaltensor.simulator.engine import simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT  # noqa: E402

RANKS, MICRO_BATCHES, BATCH, SEQ, VOCAB, LAYERS, HEADS = 2, 8, 16, 128, 512, 6, 4
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}    # name -> stages on a rank
TORCHS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
          "zb-v": "ScheduleZBVZeroBubble"}


def main(json: bool = False, quick: bool = False, hidden: int = 256) -> None:
    """Measure and print. `quick`: few steps, of a narrow model."""
    hidden, rounds, steps = (64, 2, 2) if quick else (hidden, 5, 4)
    rows: list[dict[str, Any]] = []
    settings = {"hidden": hidden, "rounds": rounds, "steps": steps}
    with Workers("benchmarks.pipeline:ours", RANKS, settings) as own, \
            Workers("benchmarks.pipeline:torchs", RANKS, settings) as other:
        for name in SCHEDULES:
            both = [own] if name not in TORCHS else [own, other]
            losses = []
            laps: list[list[float]] = [[] for _ in both]
            for workers in both:
                workers.tell()
                losses.append(max(loss for loss in workers.hear() if loss is not None))
            if max(losses) - min(losses) > 1e-4 * max(losses):
                raise SystemExit(f"{name}: losses differ, {losses}")
            for _ in range(rounds):
                for workers, found in zip(both, laps):
                    workers.tell()
                    found += [max(of_a_step) for of_a_step in zip(*workers.hear())]
            own.tell()
            rows.append({"schedule": name, "step ms": 1e3 * statistics.median(laps[0]),
                         "torch's ms": 1e3 * statistics.median(laps[1]) if len(both) > 1 else None,
                         **own.hear()[0]})
    for row in rows:
        row["tokens/s"] = BATCH * SEQ / row["step ms"] * 1e3
    show(__doc__.splitlines()[0], rows, json, hidden=hidden, layers=LAYERS, ranks=RANKS, micro_batches=MICRO_BATCHES)


# ------------------------------------------------------------------------------------------------------------- a worker


class Front(nn.Module):
    """ids [b, t] -> [b, t, hidden]."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position.weight[:ids.shape[1]]


def made(hidden: int, stages: int) -> tuple[list[nn.Module], Tensor, Tensor]:
    """Stages, inputs and targets, the same in every process: blocks dealt out evenly, the ends with the outer ones."""
    torch.manual_seed(0)
    model = GPT(VOCAB, SEQ, LAYERS, hidden, HEADS)
    ids = torch.randint(VOCAB, (BATCH, SEQ + 1))
    starts = [round(k * LAYERS / stages) for k in range(stages + 1)]
    cut = [list(model.blocks[a:b]) for a, b in zip(starts, starts[1:])]
    cut[0].insert(0, Front(model))
    cut[-1] += [model.norm, model.head]
    return [nn.Sequential(*layers) for layers in cut], ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


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
    for name, chunks in SCHEDULES.items():
        stages, inputs, targets = made(settings["hidden"], RANKS * chunks)
        runner = gt.pipeline(stages, [gt.placement("cpu", [r]) for r in range(RANKS)], name, MICRO_BATCHES, loss_of)
        sys.stdin.readline()
        yield runner.step(inputs, targets).item()
        runs: list[list[Event]] = []

        def step() -> None:
            runner.step(inputs, targets)
            runs.append(runner.events)

        yield from turns(stages, step, settings)
        sys.stdin.readline()
        yield bubbles(runner, runs)


def bubbles(runner: Any, runs: list[list[Event]]) -> dict[str, float]:
    """The measured bubble, and the simulated one with the measured times of actions."""
    everything = []
    for own in runs[1:]:
        runner.events = own
        everything.append(runner.gathered_events())
    shares = []
    for events in everything:
        spans = [(max(e.end for e in row) - min(e.start for e in row), sum(e.end - e.start for e in row))
                 for row in ([e for e in events if e.rank == rank] for rank in range(RANKS))]
        span, work = max(spans)
        shares.append((span - work) / span)
    lengths: dict[tuple[str, int], list[float]] = {}
    for e in (e for events in everything for e in events):
        lengths.setdefault((e.kind, e.stage), []).append(e.end - e.start)

    def taken(kind: str) -> tuple[float, ...]:
        return tuple(statistics.median(lengths.get((kind, s), [0.0])) for s in range(runner.schedule.stages))

    backward = tuple(b or i for b, i in zip(taken("B"), taken("I")))     # B is I and W in one: W is nothing then
    plan = runner.schedule.only([0, 1, 2, 3])
    run = simulate(plan, Costs(taken("F"), backward, taken("W"), (Hop(),) * (plan.stages - 1)))
    return {"bubble": statistics.median(shares), "simulated": run.bubble_rate, "simulated step ms": 1e3 * run.makespan}


def torchs(settings: dict[str, Any]) -> Iterator[Any]:
    import torch.distributed.pipelining as pipelining

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, kind in TORCHS.items():
        total = RANKS * SCHEDULES[name]
        modules, inputs, targets = made(settings["hidden"], total)
        mine = [rank] if total == RANKS else [rank, total - 1 - rank] if name == "zb-v" else [rank, RANKS + rank]
        stages = [pipelining.PipelineStage(modules[k], k, total, torch.device("cpu")) for k in mine]
        schedule = getattr(pipelining.schedules, kind)(stages if total > RANKS else stages[0], MICRO_BATCHES, loss_of)
        losses: list[Tensor] = []

        def step() -> None:
            losses.clear()
            first, last = 0 in mine, total - 1 in mine
            schedule.step(*([inputs] if first else []), **({"target": targets, "losses": losses} if last else {}),
                          return_outputs=False)

        sys.stdin.readline()
        step()
        yield torch.stack(losses).mean().item() if losses else None
        yield from turns([modules[k] for k in mine], step, settings)


if __name__ == "__main__":
    main()
