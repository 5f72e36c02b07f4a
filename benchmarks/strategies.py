"""What do the parallel strategies move, keep and cost, beside what the literature says of them?

The GPT of the train benchmark (hidden 128, 4 layers) under one plan after another, those that so many ranks can be
arranged for (2; more by --ranks 4 and 8). Bytes are those that a rank receives in a step, recorded; kept are a rank's
bytes of parameters and of AdamW's state. Tokens by the median step of the slowest rank, all strategies taking turns.
Each must get plain torch's losses first.

With N ranks, P bytes of parameters, and X, W, Y those of the input, weight and output of a linear layer:

    dp             2 (N-1)/N P                       keeps 3 P        parameters and two of AdamW
    ZeRO 1, 2      2 (N-1)/N P                       keeps P + 3 P/N  the parts that are stepped and two of AdamW
    ZeRO 3         3 (N-1)/N P                       keeps 3 P/N
    tp             2 (N-1)/N, 4 times a layer + 2    of [batch, sequence, hidden]; keeps 3 P/N, but norms, positions
    tp, sequence   the same
    sp             8 (N-1)/N^2 a layer of [batch, sequence, hidden], and as dp (DeepSpeed-Ulysses); keeps 3 P
    2D             3 (q-1)/q^2 (X + W) a linear, or less where another matrix rests       keeps 3 P/N
    2.5D           3 (q-1)/q^2 (X/d + W) a linear, and 2 (d-1)/d P/q^2                    keeps 3 P/q^2
    3D             2 (q-1)/q^3 (X + W + Y) a linear; q, k and v share their X             keeps 3 P/N

The formulas of the grids are of the linear layers alone: norms, embedding and loss come on top. With sp dispatch may
move less than published: it splits the batch instead, once samples can be dealt out.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple

import torch

import globaltensor as gt
from benchmarks.processes import Workers
from benchmarks.timing import show
from benchmarks.train import (
    BATCH,
    LAYERS,
    SEQ,
    VOCAB,
    Trainer,
    adamw,
    first_losses,
    in_turns,
    made,
    plain,
    turns,
    verify,
)


class Strategy(NamedTuple):
    """Axes and their sizes, which of them cut layers, which the sequence between them, and ZeRO's stage."""

    axes: dict[str, int]
    cut: str | tuple[str, ...] = ""
    sequence: str = ""
    stage: int = 0
    data: dict[str, int] = {}                        # the axes that split the batch, and which dim of it

    @property
    def ranks(self) -> int:
        return prod(self.axes.values())


def strategies(ranks: int) -> dict[str, Strategy]:
    """Those that fit so many ranks."""
    dp, tp = {"dp": ranks}, {"tp": ranks}
    found = {"dp": Strategy(dp, data={"dp": 0})}
    found |= {f"ZeRO {stage}": Strategy(dp, stage=stage, data={"dp": 0}) for stage in (1, 2, 3)}
    found |= {"tp": Strategy(tp, "tp"), "tp, sequence": Strategy(tp, "tp", "tp")}
    found["sp"] = Strategy({"sp": ranks}, data={"sp": 1})
    if ranks == 4:
        found["dp x tp"] = Strategy({"dp": 2, "tp": 2}, "tp", data={"dp": 0})
        found["2D"] = Strategy({"row": 2, "column": 2}, ("row", "column"), data={"row": 0})
    if ranks == 8:
        found["2.5D"] = Strategy({"depth": 2, "row": 2, "column": 2}, ("row", "column"), data={"depth": 0, "row": 0})
        found["3D"] = Strategy({"j": 2, "i": 2, "l": 2}, ("j", "i", "l"), data={"i": 0})
    return found


def main(json: bool = False, quick: bool = False, hidden: int | None = None, ranks: int | None = None) -> None:
    hidden, known = hidden or (64 if quick else 128), strategies(ranks or 2)
    rounds, steps = (1, 2) if quick else (6, 8)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Workers("benchmarks.strategies:worker", how.ranks,
                                                     {"how": how, "hidden": hidden, "steps": steps}))
                   for name, how in known.items()}
        expected = first_losses(plain(*made(hidden), 1, 1))
        facts = {name: some.hear() for name, some in workers.items()}
        for name, told in facts.items():
            verify(name, [one["losses"] for one in told], expected)
        speed = in_turns(workers, rounds)
    size = sum(p.numel() * 4 for p in made(hidden)[0].parameters())
    show(f"strategies: hidden {hidden}, {ranks or 2} ranks",
         [_row(name, how, facts[name], speed, size, hidden) for name, how in known.items()], json)


def _row(name: str, how: Strategy, told: list[dict[str, Any]], speed: dict[str, float], size: int, hidden: int
         ) -> dict[str, Any]:
    moved, kept = (max(one[what] for one in told) for what in ("moved", "kept"))
    formulas = moves(how, size, hidden), keeps(how, size)
    return {"strategy": name, "tokens/s": speed[name], "of dp": speed[name] / speed["dp"], "bytes moved": moved,
            "of formula": moved / formulas[0], "bytes kept": kept, "of formula, kept": kept / formulas[1]}


def moves(how: Strategy, size: int, hidden: int) -> float:
    """Bytes that a rank receives in a step, as published."""
    n, dp = how.ranks, how.axes.get("dp", 1)
    activation = BATCH * SEQ * hidden * 4
    if isinstance(how.cut, tuple):
        return _on_grid(how, hidden)
    tp, sp = how.axes.get("tp", 1), how.axes.get("sp", 1)
    if sp > 1:
        return LAYERS * 8 * (sp - 1) / sp**2 * activation + 2 * (sp - 1) / sp * size
    reduced = (4 * LAYERS + 2) * 2 * (tp - 1) / tp * activation / dp
    return reduced + (3 if how.stage == 3 else 2) * (dp - 1) / dp * size * dp / n


def _on_grid(how: Strategy, hidden: int) -> float:
    """The linear layers of a GPT on a square, a slab or a cube of ranks, 2 to a side."""
    rows, q, total = BATCH * SEQ, 2, 0.0
    depth = how.axes.get("depth", 1)
    shapes = [(hidden, hidden)] * 4 + [(hidden, 4 * hidden), (4 * hidden, hidden)]
    for inputs, outputs in shapes * LAYERS + [(hidden, VOCAB)]:
        x, w, y = 4 * rows * inputs, 4 * inputs * outputs, 4 * rows * outputs
        if len(how.cut) == 3:
            total += 2 * (q - 1) / q**3 * (x + w + y)
        else:
            total += 3 * (q - 1) / q**2 * (x / depth + w) + 2 * (depth - 1) / depth * w / q**2
    shared = 2 * LAYERS * 2 * (q - 1) / q**3 * 4 * rows * hidden     # q, k and v read one input
    return total - (shared if len(how.cut) == 3 else 0)


def keeps(how: Strategy, size: int) -> float:
    """Bytes of parameters and of AdamW's two moments on a rank, as published."""
    n = prod(parts for axis, parts in how.axes.items() if axis in how.cut)
    dp = how.axes.get("dp", 1)
    return {0: 3 * size, 3: 3 * size / dp}.get(how.stage, size + 3 * size / dp) / n


def worker(settings: dict[str, Any]) -> Iterator[Any]:
    """What it found out, then at every turn the seconds of some steps."""
    how, (model, batches) = Strategy(*settings["how"]), made(settings["hidden"])
    ranks = torch.arange(how.ranks).view(*how.axes.values()).tolist()
    where = gt.placement("cpu", ranks, axis_names=tuple(how.axes))
    cut = tuple(how.cut) if isinstance(how.cut, list) else how.cut           # settings come as JSON
    gt.parallelize(model, where, gt.Plan.of(model, cut, how.sequence))
    rows = {axis: gt.sbp.split(dim) for axis, dim in how.data.items()}
    trainer = Trainer(model, adamw(model.parameters()),
                      [(gt.from_full(a, where, rows), gt.from_full(b, where, rows)) for a, b in batches])
    if how.stage:
        gt.zero(trainer.optimizer, "dp", how.stage, model if how.stage == 3 else None)
    found = first_losses(trainer)
    with gt.record() as moved:
        trainer.step(0)
    stepped = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    state = [t for each in trainer.optimizer.state.values() for t in each.values() if t.dim()]
    kept = {id(t): sum(s.nbytes for s in t.shards.values()) for t in [*model.parameters(), *stepped, *state]}
    yield {"losses": found, "moved": sum(m.bytes for m in moved), "kept": sum(kept.values())}
    yield from turns(trainer, settings["steps"])


if __name__ == "__main__":
    main()
