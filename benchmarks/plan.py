"""How fast is the search for a plan, and how well does it agree with what is measured?

    searched     seconds of the search for four models, the least of what any plan takes, and the gap to it
    published    rates fitted to a half of the published plans (tests/data/measured_plans.csv), the others predicted:
                 the mean error, the rank correlation within groups of plans for the same work, and the measured time
                 of the plan ranked first / the best measured
    here         plans of four small models (planned.py) on processes of this machine: the cluster is measured first (as
                 by `globaltensor calibrate --here`), then each plan is predicted, trained and timed. Bytes of live
                 tensors are counted by a dispatch mode at their peak, bytes received within stages by gt.record

`--ranks N` is the last part alone, on N processes. A step's time is that of the slower rank, the median of 12, which
all plans take in turns. The machine's speed changes within minutes, so it is measured and plans are timed in five
rounds, and medians of these are shown: "off" is that of each round's predicted / measured - 1.
"""
from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import globaltensor as gt
from benchmarks.planned import PLANS, strategy_of
from benchmarks.processes import Workers
from benchmarks.timing import show
from globaltensor.cli.calibrate import measure, memory_of_rank
from globaltensor.cli.cores import cores
from globaltensor.cli.small_models import small_models
from globaltensor.planner.measured_cluster import cluster_of_measurements
from globaltensor.planner.pricing import Task
from globaltensor.planner.search import search
from globaltensor.simulator.calibration import calibrate, quality
from globaltensor.simulator.cluster import KNOWN
from globaltensor.simulator.evaluation import evaluate, read_rows
from globaltensor.simulator.gpt import GPT

_ROUNDS = 5
TABLE = Path(__file__).resolve().parents[1] / "tests" / "data" / "measured_plans.csv"
A100 = KNOWN["dgx-a100"]
SEARCHED = {                                         # model, devices, samples in a step
    "GPT of 96 layers on 1,024": (GPT(96, 12288, 96, 2048), 1024, 1536),
    "GPT-39B on 64": (GPT(48, 8192, 64, 1024), 64, 1024), "nanoGPT on 8": (GPT(12, 768, 12, 1024, 50304), 8, 512)}
LLAMA = "Llama-3-8B on 64"
COLUMNS = ["plan", "ranks", "predicted ms", "measured ms", "off", "predicted MB", "live MB", "off, bytes",
           "predicted B", "received B"]


def main(json: bool = False, quick: bool = False, ranks: int | None = None) -> None:
    """Everything, or what is measured here on so many ranks. `quick`: small models, few steps."""
    rows: list[dict[str, Any]] = []
    tables = [COLUMNS]
    if ranks is None and not quick:
        rows += [*searched(), *published()]
        tables = [["search", "seconds", "goal s", "step s", "gap %"],
                  ["calibrated by", "predicted", "error %", "choice", "rank"], COLUMNS]
    for n in (1, 2, 4) if ranks is None else (ranks,):
        rows += here(n, quick)
    own = [row for row in rows if "measured ms" in row]
    show(__doc__.splitlines()[0], rows, json, tables, **agreement(own))


def agreement(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the plans that were measured here, all of them and those on each number of ranks."""
    of_ranks = {n: [row for row in rows if row["ranks"] == n] for n in sorted({row["ranks"] for row in rows})}
    bytes_off = [row["off, bytes"] for row in rows]
    return {"steps": _steps_text(rows),
            **({f"steps on {n}": _steps_text(own) for n, own in of_ranks.items()} if len(of_ranks) > 1 else {}),
            "bytes of live tensors": f"from {min(bytes_off):+.1%} to {max(bytes_off):+.1%}",
            "bytes received": f"{sum(row['predicted B'] == row['received B'] for row in rows)} of {len(rows)} exact"}


def _steps_text(rows: list[dict[str, Any]]) -> str:
    chosen = []
    for n, name in {(row["ranks"], row["model"]) for row in rows}:
        own = [row for row in rows if (row["ranks"], row["model"]) == (n, name)]
        if len(own) > 1:
            first = min(own, key=lambda row: row["predicted ms"])
            chosen.append(first["measured ms"] / min(row["measured ms"] for row in own))
    off = statistics.median(abs(row["off"]) for row in rows)
    return (f"{len(rows)}, off by {off:.1%} in the median; rank correlation {_rank_correlation(rows):.2f}; the plan "
            f"ranked first takes {statistics.mean(chosen or [1.0]):.3f} of the best on average, at most "
            f"{max(chosen or [1.0]):.3f}")


def _rank_correlation(rows: list[dict[str, Any]]) -> float:
    """Spearman's, of predicted and measured times."""
    if len(rows) < 3:
        return 1.0
    places = [np.argsort(np.argsort([row[name] for row in rows])) for name in ("predicted ms", "measured ms")]
    return float(np.corrcoef(*places)[0, 1])


def searched() -> Iterator[dict[str, Any]]:
    """The time of a search, of GPTs by their sizes and of a module."""
    for (name, (gpt, devices, batch)), goal in zip(SEARCHED.items(), (60, 15, 3)):
        began = time.perf_counter()
        result = search(Task(gpt, A100, devices, batch))
        seconds = time.perf_counter() - began
        assert result.best is not None
        yield {"search": name, "seconds": seconds, "goal s": goal, "step s": result.best.seconds,
               "gap %": 100 * (1 - result.lower_bound / result.best.seconds)}
    model, ids = llama()
    if model is not None:
        began = time.perf_counter()
        one = gt.strategy(model, {"input_ids": ids, "labels": ids}, A100, 64, 1024)
        yield {"search": LLAMA, "seconds": time.perf_counter() - began, "goal s": 10, "step s": one["step_time"],
               "gap %": 100 * one["gap"]}


def llama() -> tuple[Any, torch.Tensor]:
    """Llama-3-8B on the meta device; None without transformers."""
    ids = torch.zeros(1, 8192, dtype=torch.long)
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None, ids
    config = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                         num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False)
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16), ids


def published() -> Iterator[dict[str, Any]]:
    """Half of the published plans of one host predicted by the other half; those of many hosts, too."""
    sources = [line["source"] for line in csv.DictReader(TABLE.open())]
    measured = [row for row, source in zip(read_rows(str(TABLE)), sources, strict=True) if source == "vTrain"]
    one_host = [row for row in measured if row.plan.devices <= 8]
    groups = sorted({repr(row.group) for row in one_host})
    for first in (0, 1):
        half = set(groups[first::2])
        fitted = calibrate([row for row in one_host if repr(row.group) in half], A100)
        for what, rest in (("the other half", [row for row in one_host if repr(row.group) not in half]),
                           ("64 and 256 GPUs", [row for row in measured if row.plan.devices > 8])):
            agreed = quality(rest, [evaluate(row, fitted).step_time for row in rest])
            yield {"calibrated by": f"half {first + 1} of one host", "predicted": what, "error %": 100 * agreed.error,
                   "choice": agreed.choice, "rank": agreed.rank}


def here(ranks: int, quick: bool) -> list[dict[str, Any]]:
    """Each plan on so many processes, predicted and measured: medians of several rounds."""
    rounds = [list(_round(ranks, quick)) for _ in range(1 if quick else _ROUNDS)]
    return [{key: statistics.median(row[key] for row in rows) if isinstance(value, float) else value
             for key, value in rows[0].items()} for rows in zip(*rounds)]


def _round(ranks: int, quick: bool) -> Iterator[dict[str, Any]]:
    """The machine is measured, then each plan predicted and trained."""
    cluster = cluster_of_measurements(measure(ranks), ranks, memory_of_rank(ranks), small_models(), cores=cores())
    plans = PLANS.get(ranks, [])[:2 if quick else None]
    strategies = [(name, strategy_of(name, fixed, cluster, ranks, quick)) for name, fixed in plans]
    settings = {"strategies": strategies, "small": quick, "laps": 4 if quick else 12}
    threads = max(1, cores() // ranks)               # as `globaltensor run` sets them, where it is measured too
    with Workers("benchmarks.planned:measure", ranks, settings, threads) as workers:
        for (name, fixed), (_, strategy) in zip(plans, strategies):
            told = workers.hear()
            taken = 1e3 * statistics.median(max(laps) for laps in zip(*(one["laps"] for one in told)))
            live, expected = max(one["live"] for one in told), max(strategy["memory"]["per_rank"])
            firsts = [stage["ranks"][0] for stage in strategy["stages"]]     # a rank of each stage tells of it
            received = sum(told[rank]["received"] for rank in dict.fromkeys(firsts))
            predicted = 1e3 * strategy["step_time"]
            words = ", ".join([name, *(f"{key} {value}" for key, value in fixed.items() if key != "pins")])
            yield {"plan": words, "model": name, "ranks": ranks,
                   "predicted ms": predicted, "measured ms": taken, "off": predicted / taken - 1,
                   "predicted MB": expected / 1e6, "live MB": live / 1e6, "off, bytes": expected / live - 1,
                   "predicted B": sum(stage["bytes"][axis] for stage in strategy["stages"] for axis in ("tp", "dp")),
                   "received B": received, "time": strategy["time"]}


if __name__ == "__main__":
    main()
