"""How does training scale: the example on 1 to 8 ranks, measured, and on up to 1,024, simulated; and how do loaders?

    strong    as many sequences in a step whatever the ranks; ideal is ranks times as fast
    weak      as many sequences for each rank; ideal is as fast a step

One process per rank, of one thread. All numbers of ranks take turns, and get the losses of one rank first. Ranks that
outnumber cores share them. So efficiency is against what cores allow: samples/s / (those of one rank x the smaller of
ranks and cores); the other share of a step, what ranks do not compute, is split into

    dp, tp    moving bytes along this axis: of each boxing, the time of the rank that came last and so waited for nobody
    waiting   what the other ranks took longer for it
    compute   all the rest: also what a rank that shares a core stands in line for it

Simulated are a step of this model at the rates of this machine's processes, each with a core of its own (one rank's
measured speed, links as `runtime/machine.py` has them), and GPTs of 1.3 billion parameters on dgx-h100. Replicas are
alike there and wait for nobody.

The loaders read windows of the example's text, shuffled, a batch for all ranks: samples/s of all ranks together.
"""
from __future__ import annotations

import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import globaltensor as gt
from benchmarks.processes import Workers
from benchmarks.timing import cores, show
from globaltensor.boxings.watch import BoxingRecord
from globaltensor.runtime.machine import shared_memory
from globaltensor.simulator.cluster import KNOWN, Cluster, Link
from globaltensor.simulator.gpt import GPT as Sizes
from globaltensor.simulator.training import TrainingPlan, simulate_training

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import train_gpt

BATCH, SEQ, LAYERS, HIDDEN, HEADS = 16, 64, 4, 128, 4        # of the example, as it is
TOLERANCE = 1e-4                                     # of losses, relative
LOADED, WINDOW = 64, 257                             # samples of a loader's batch, bytes of each
LARGE = Sizes(24, 2048, 16, 2048)
KINDS = ("strong", "weak")
AXES = ("dp", "tp")


def main(json: bool = False, quick: bool = False) -> None:
    """Measure, simulate and print. `quick`: on 1 and 2 ranks, few steps."""
    counts, rounds, steps = ((1, 2), 1, 2) if quick else ((1, 2, 4, 8), 5, 4)
    measured = train(counts, rounds, steps)
    one = next(row for row in measured if row["ranks"] == 1)
    simulated = [*example_simulated(one["samples/s"]), *large_simulated()]
    loaders = load(counts[:2], 2 if quick else 6, 8 if quick else 40)
    heads = [["measured", "ranks", "dp x tp", "samples/s", "efficiency", "compute", "waiting", *AXES],
             ["simulated", "devices", "dp x tp", "seconds", "efficiency", "compute", "waiting", *AXES],
             ["loader", "ranks", "workers", "samples/s", "of torch's"]]
    rows = [*measured, *simulated, *loaders]
    if json:
        show(__doc__.splitlines()[0], rows, json, cores=cores())
        return
    note = f"{cores()}; ranks beyond that share them, and efficiency counts so many"
    for columns, some, more in zip(heads, (measured, simulated, loaders), ({"cores": note}, {}, {})):
        show(f"scaling: {columns[0]}", some, json, [columns], **more)
        print()


def arranged(ranks: int) -> tuple[int, int]:
    """dp and tp: from 4 ranks on, two of them share each layer."""
    return (ranks, 1) if ranks < 4 else (ranks // 2, 2)


# --------------------------------------------------------------------------------------------------------- measured


def train(counts: tuple[int, ...], rounds: int, steps: int) -> list[dict[str, Any]]:
    """A row for each kind and number of ranks."""
    laps: dict[tuple[str, int], list[float]] = defaultdict(list)
    splits: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    with ExitStack() as stack:
        all_workers = {n: stack.enter_context(Workers("benchmarks.scaling:worker", n, {"ranks": n, "steps": steps}))
                       for n in counts}
        losses = {n: workers.hear() for n, workers in all_workers.items()}
        expected = losses[counts[0]][0]
        for n, found in losses.items():
            if not all(abs(a - b) < TOLERANCE * abs(b) for own in found for a, b in zip(own, expected, strict=True)):
                raise SystemExit(f"{n} ranks do not train as one does: losses {found[0]}, not {expected}")
        for _ in range(rounds):
            for n, workers in all_workers.items():
                for kind in KINDS:
                    workers.tell()
                    told = workers.hear()
                    laps[kind, n] += map(max, zip(*(one["laps"] for one in told)))
                    splits[kind, n].append(split_up(told))
    speed = {(kind, n): BATCH * (n if kind == "weak" else 1) / statistics.median(found)
             for (kind, n), found in laps.items()}
    return [{"measured": kind, "ranks": n, "dp x tp": "{} x {}".format(*arranged(n)), "samples/s": speed[kind, n],
             "efficiency": speed[kind, n] / speed[kind, counts[0]] / min(n, cores()),
             **{name: statistics.mean(one[name] for one in splits[kind, n])
                for name in ("compute", "waiting", *AXES)}} for kind in KINDS for n in counts]


def split_up(told: list[dict[str, Any]]) -> dict[str, float]:
    """The shares of a recorded step, of the mean rank. A boxing waits for nobody on the rank that it takes least."""
    whole = statistics.mean(one["step"] for one in told)
    shares = dict.fromkeys(("compute", "waiting", *AXES), 0.0)
    for same in zip(*(one["moves"] for one in told), strict=True):
        assert len({axis for axis, _ in same}) == 1, same        # ranks record the same boxings in the same order
        least, mean = min(s for _, s in same), statistics.mean(s for _, s in same)
        shares[same[0][0]] += least / whole
        shares["waiting"] += (mean - least) / whole
    return shares | {"compute": 1 - sum(shares.values())}


def worker(settings: dict[str, Any]) -> Iterator[Any]:
    """The first losses, of as many sequences as all have; then by turns the steps of each kind."""
    n = settings["ranks"]
    dp, tp = arranged(n)
    text = train_gpt.read_text(None)
    trainers = {}
    for kind in KINDS:
        batch = BATCH * (n if kind == "weak" else 1)
        options = train_gpt.parse(["--dp", str(dp), "--tp", str(tp), "--batch", str(batch), "--seq", str(SEQ),
                                   "--layers", str(LAYERS), "--hidden", str(HIDDEN), "--heads", str(HEADS)])
        torch.manual_seed(0)
        model = train_gpt.GPT(train_gpt.VOCAB, SEQ, LAYERS, HIDDEN, HEADS, 0.0, False)
        places = train_gpt.stages(options)
        train_gpt.spread(model, places)
        trainers[kind] = train_gpt.Trainer(model, options), options, places
    generator = torch.Generator().manual_seed(0)

    def step(kind: str) -> float:
        trainer, options, places = trainers[kind]
        return trainer.step(train_gpt.global_batch(train_gpt.batch(text, options, generator), places))

    yield [step("strong") for _ in range(3)]
    kinds = list(KINDS)
    for _ in sys.stdin:
        kind = kinds[0]
        kinds.append(kinds.pop(0))
        step(kind)                                   # it only warms the caches
        yield timed(lambda: step(kind), settings["steps"])


def timed(step: Any, steps: int) -> dict[str, Any]:
    """Seconds of some steps, and of one more that is recorded, with its boxings."""
    laps = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        laps.append(time.perf_counter() - began)
    began = time.perf_counter()
    with gt.record() as moves:
        step()
    return {"laps": laps, "step": time.perf_counter() - began,
            "moves": [(axis_of(move), move.seconds) for move in moves if move.bytes]}


def axis_of(move: BoxingRecord) -> str:
    """Along which axis a boxing moves bytes; of several, the outermost."""
    return next((name for name, parts, a, b in zip(AXES, move.src.placement.shape, move.src.sbp, move.dst.sbp)
                 if a != b and parts > 1), AXES[0])


# -------------------------------------------------------------------------------------------------------- simulated


def example_simulated(samples: float) -> list[dict[str, Any]]:
    """This model where one rank trains so many samples a second. The simulator counts two bytes a number, and here they
    have four: links carry half as many."""
    sizes = Sizes(LAYERS, HIDDEN, HEADS, SEQ, train_gpt.VOCAB)
    link = Link(shared_memory.latency, shared_memory.bandwidth / 2)
    rate = float(sizes.operations(1, "none")) * samples
    own = Cluster("this machine", 8, rate, 1.0, 1e12, shared_memory.memory, link,
                  Link(shared_memory.host_latency, shared_memory.host_bandwidth / 2))
    return [row for kind in KINDS for row in simulated(f"{kind}, this machine", kind, sizes, own, BATCH * 64, 16, 0)]


def large_simulated() -> list[dict[str, Any]]:
    return [row for kind in KINDS
            for row in simulated(f"{kind}, 1.3B on dgx-h100", kind, LARGE, KNOWN["dgx-h100"], 2048, 2, 1)]


def simulated(name: str, kind: str, sizes: Sizes, on: Cluster, most: int, each: int, zero: int) -> list[dict[str, Any]]:
    """1 to 1,024 devices: strong with `most` samples in a step, weak with `each` for a device."""
    rows: list[dict[str, Any]] = []
    for n in (1, 2, 8, 64, 256, 1024):
        dp, tp = arranged(n)
        batch = most if kind == "strong" else each * n
        plan = TrainingPlan(max(1, min(each * tp, batch // dp)), batch, dp, tp, zero=zero, recompute="none")
        step = simulate_training(sizes, plan, on)
        speed = batch / step.seconds
        along = {"dp": step.data.seconds / step.seconds, "tp": step.tensor.seconds / step.seconds * (tp > 1)}
        base = rows[0]["speed"] if rows else speed
        rows.append({"simulated": name, "devices": n, "dp x tp": f"{dp} x {tp}", "seconds": step.seconds,
                     "speed": speed, "efficiency": speed / base / n, "compute": 1 - sum(along.values()),
                     "waiting": 0.0, **along})
    return rows


# ---------------------------------------------------------------------------------------------------------- loaders


class Windows(Dataset):
    """Windows of a text, each with its shift by one."""

    def __init__(self) -> None:
        self.text = train_gpt.read_text(None)

    def __len__(self) -> int:
        return len(self.text) - WINDOW

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[i:i + WINDOW].long()
        return window[:-1], window[1:]


def load(counts: tuple[int, ...], rounds: int, batches: int) -> list[dict[str, Any]]:
    """Samples a second of our loader and of torch's."""
    rows = []
    for n in counts:
        for workers in (0, 2):
            speed: dict[str, list[float]] = {"torch's": [], "globaltensor's": []}
            with ExitStack() as stack:
                arms = {name: stack.enter_context(Workers(
                    "benchmarks.scaling:loader", n, {"ranks": n, "workers": workers, "batches": batches,
                                                     "ours": name != "torch's"})) for name in speed}
                for _ in range(rounds):
                    for name, some in arms.items():
                        some.tell()
                        speed[name].append(LOADED * batches / max(some.hear()))
            medians = {name: statistics.median(found) for name, found in speed.items()}
            rows += [{"loader": name, "ranks": n, "workers": workers, "samples/s": found,
                      "of torch's": found / medians["torch's"]} for name, found in medians.items()]
    return rows


def loader(settings: dict[str, Any]) -> Iterator[float]:
    """At every turn the seconds of so many batches, once workers have begun."""
    n, data = settings["ranks"], Windows()
    batches = loaded(data, **settings) if settings["ours"] else torchs(data, **settings)
    for _ in sys.stdin:
        next(batches)
        began = time.perf_counter()
        for _ in range(settings["batches"]):
            inputs, _ = next(batches)
        assert inputs.shape[0] == (LOADED if settings["ours"] else LOADED // n)
        yield time.perf_counter() - began


def loaded(data: Dataset, ranks: int, workers: int, **_: Any) -> Iterator[Any]:
    where = gt.placement("cpu", list(range(ranks)))
    while True:
        yield from gt.data.DataLoader(data, LOADED, where, gt.sbp.split(0), shuffle=True, seed_samples=False,
                                      num_workers=workers, persistent_workers=workers > 0)


def torchs(data: Dataset, ranks: int, workers: int, **_: Any) -> Iterator[Any]:
    sampler = DistributedSampler(data, ranks, int(os.environ["RANK"]), shuffle=True)
    while True:
        yield from DataLoader(data, LOADED // ranks, sampler=sampler, num_workers=workers,
                              persistent_workers=workers > 0)


if __name__ == "__main__":
    main()
