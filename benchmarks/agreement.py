"""What does it cost a training step that ranks notice when they go apart?

The model and its training are those of train.py, one process per rank with one thread each. Every op hashes all that
made its value, and every boxing compares that in the word that it sends anyway (runtime/lineage.py). Steps with and
without these hashes take turns in the same processes, so a drift of the machine hits both alike; each pair begins with
the other one. The slowest rank counts.

    ms, ms without    the median step
    cost %, +-        the median, over pairs of neighbours, of how much longer the one with hashes took; and its
                      standard error (of a median of normal values)
    audit ms          what `GLOBALTENSOR_AUDIT=100` does every 100 steps, once: a sample of all that the optimizer holds
    audit %           its share of 100 steps
"""
from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from benchmarks import train
from benchmarks.processes import Workers
from benchmarks.timing import show
from globaltensor.debug.audit import SAMPLE, audit
from globaltensor.runtime import lineage

ARMS = {"dp 2": (2, 1), "tp 2": (1, 2)}
AUDITS, EVERY = 5, 100


def main(json: bool = False, quick: bool = False, hidden: int | None = None) -> None:
    sizes = [hidden] if hidden else [64] if quick else [128, 256]
    rounds, pairs = (2, 2) if quick else (10, 40)
    rows = [_row(size, name, rounds, pairs) for size in sizes for name in ARMS]
    show("agreement: what a training step pays for it", rows, json)


def _row(hidden: int, name: str, rounds: int, pairs: int) -> dict[str, Any]:
    dp, tp = ARMS[name]
    laps: list[tuple[float, float]] = []
    audits: list[float] = []
    with Workers("benchmarks.agreement:worker", dp * tp,
                 {"hidden": hidden, "dp": dp, "tp": tp, "pairs": pairs}) as workers:
        workers.hear()                               # they are ready
        for _ in range(rounds):
            workers.tell()
            told = workers.hear()
            kept, paused = ([max(steps) for steps in zip(*(one[k] for one in told))] for k in (0, 1))
            laps += zip(kept, paused)
            audits += [max(seconds) for seconds in zip(*(one[2] for one in told))]
    cost = [100 * (kept / paused - 1) for kept, paused in laps]
    ms, without = (statistics.median(column) * 1e3 for column in zip(*laps))
    error = 1.2533 * statistics.stdev(cost) / len(cost)**0.5
    audit_ms = statistics.median(audits) * 1e3
    return {"hidden": hidden, "arm": name, "ms": ms, "ms without": without, "cost %": statistics.median(cost),
            "+-": error, "audit ms": audit_ms, "audit %": 100 * audit_ms / (EVERY * ms), "pairs": len(cost)}


# -------------------------------------------------------------------------------------------------------- a worker


def worker(settings: dict[str, Any]) -> Iterator[Any]:
    """When ready, None; then at every turn the seconds of steps with hashes, of as many without, and of some audits."""
    model, batches = train.made(settings["hidden"])
    trainer = train.ours(model, batches, settings["dp"], settings["tp"])
    train.first_losses(trainer)
    yield None
    for _ in sys.stdin:
        seconds: dict[bool, list[float]] = {True: [], False: []}
        trainer.step(0)                              # only warms the caches
        for k in range(settings["pairs"]):
            for kept in (True, False) if k % 2 else (False, True):
                with nullcontext() if kept else lineage.paused():
                    began = time.perf_counter()
                    trainer.step(k)
                    seconds[kept].append(time.perf_counter() - began)
        audits = []
        for _ in range(AUDITS):
            began = time.perf_counter()
            audit(None, trainer.optimizer, sample=SAMPLE)
            audits.append(time.perf_counter() - began)
        yield [seconds[True], seconds[False], audits]


if __name__ == "__main__":
    main()
