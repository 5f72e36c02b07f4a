"""What do the parallel strategies move, keep and cost, beside what the literature says of them?

The GPT of the train benchmark (hidden 128, 4 layers) on 2 ranks, under one plan after another. Bytes are those that a
rank receives in a step, recorded; kept are a rank's bytes of parameters and of AdamW's state. Tokens by the median step
of the slowest rank, all strategies taking turns. Each must get plain torch's losses first.

With N ranks, P bytes of parameters, A bytes of one activation [batch, sequence, hidden] and L layers:

    dp             2 (N-1)/N P                    keeps 3 P        parameters and two of AdamW
    ZeRO 1, 2      2 (N-1)/N P                    keeps P + 3 P/N  the parts that are stepped and two of AdamW
    ZeRO 3         3 (N-1)/N P                    keeps 3 P/N
    tp             (4 L + 2) 2 (N-1)/N A          embedding and head cut along the vocabulary; plus the loss's few sums
    tp, sequence   the same
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import globaltensor as gt
from benchmarks.processes import Workers
from benchmarks.timing import show
from benchmarks.train import BATCH, LAYERS, SEQ, Trainer, adamw, first_losses, in_turns, made, plain, turns, verify

# axis, axis of the sequence, stage of ZeRO
STRATEGIES = {"dp": ("dp", "", 0), "ZeRO 1": ("dp", "", 1), "ZeRO 2": ("dp", "", 2), "ZeRO 3": ("dp", "", 3),
              "tp": ("tp", "", 0), "tp, sequence": ("tp", "tp", 0)}
RANKS = 2


def main(json: bool = False, quick: bool = False, hidden: int | None = None) -> None:
    hidden = hidden or (64 if quick else 128)
    rounds, steps = (1, 2) if quick else (6, 8)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Workers("benchmarks.strategies:worker", RANKS,
                                                     {"how": how, "hidden": hidden, "steps": steps}))
                   for name, how in STRATEGIES.items()}
        expected = first_losses(plain(*made(hidden), 1, 1))
        facts = {name: some.hear() for name, some in workers.items()}
        for name, told in facts.items():
            verify(name, [one["losses"] for one in told], expected)
        speed = in_turns(workers, rounds)
    size = sum(p.numel() * 4 for p in made(hidden)[0].parameters())
    show(f"strategies: hidden {hidden}, {RANKS} ranks",
         [_row(name, facts[name], speed, size, hidden) for name in STRATEGIES], json)


def _row(name: str, told: list[dict[str, Any]], speed: dict[str, float], size: int, hidden: int) -> dict[str, Any]:
    axis, _, stage = STRATEGIES[name]
    share = (RANKS - 1) / RANKS
    activation = BATCH * SEQ * hidden * 4
    moved = max(one["moved"] for one in told)
    formula = share * ((3 if stage == 3 else 2) * size if axis == "dp" else (4 * LAYERS + 2) * 2 * activation)
    row = {"strategy": name, "tokens/s": speed[name], "of dp": speed[name] / speed["dp"], "bytes moved": moved,
           "of formula": moved / formula, "bytes kept": max(one["kept"] for one in told)}
    if axis == "dp":
        kept = {0: 3 * size, 3: 3 * size / RANKS}.get(stage, size + 3 * size / RANKS)
        row["of formula, kept"] = row["bytes kept"] / kept
    return row


def worker(settings: dict[str, Any]) -> Iterator[Any]:
    """What it found out, then at every turn the seconds of some steps."""
    axis, sequence, stage = settings["how"]
    model, batches = made(settings["hidden"])
    where = gt.placement("cpu", list(range(RANKS)), axis_names=(axis,))
    gt.parallelize(model, where, gt.Plan.of(model, axis if axis == "tp" else "", sequence))
    rows = gt.sbp.split(0) if axis == "dp" else gt.sbp.broadcast
    trainer = Trainer(model, adamw(list(model.parameters())),
                      [(gt.from_full(a, where, rows), gt.from_full(b, where, rows)) for a, b in batches])
    if stage:
        gt.zero(trainer.optimizer, axis, stage)
    found = first_losses(trainer)
    with gt.record() as moves:
        trainer.step(0)
    stepped = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    state = [t for each in trainer.optimizer.state.values() for t in each.values() if t.dim()]
    kept = {id(t): sum(s.nbytes for s in t.shards.values()) for t in [*model.parameters(), *stepped, *state]}
    yield {"losses": found, "moved": sum(m.bytes for m in moves), "kept": sum(kept.values())}
    yield from turns(trainer, settings["steps"])


if __name__ == "__main__":
    main()
