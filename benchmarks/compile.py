"""What does torch.compile gain on global tensors, beside eager, plain compiled torch, and DTensor and DDP compiled?

The GPT of the train benchmark with its loss, compiled by inductor as one function, and its backward; AdamW, fused, is
not compiled. One process per rank with one thread each; plain torch is one process with as many threads, and "lone" one
process of two threads that drives dp 2 x tp 2. DTensor's plan, and tp 2, have the last layer and the loss whole on
every rank; "logits split", and "lone", split the vocabulary there too. Every arm lives in processes of its own, with an
empty cache on disk and one thread that compiles. One after the other, they compile (the first step, `cold s`), must get
plain torch's losses, and then train in turns while the others wait. Tokens by the median step, of the slowest rank.

`over plain` is the time of a step over that of plain torch compiled; target: 1.05 at most. `cold` is the first step's
over plain torch's; target: 2 at most.
"""
from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import train
from benchmarks.processes import Workers
from benchmarks.timing import show
from benchmarks.train import VOCAB, Trainer, in_turns, made, turns, verify


class Arm(NamedTuple):
    """A way to train: `kind` is one of train.KINDS. `beside`: the arm of torch's that does the same, compiled."""

    kind: str
    dp: int
    tp: int
    compiled: bool
    lone: bool = False
    beside: str = ""

    @property
    def processes(self) -> int:
        return 1 if self.lone or self.kind == "plain" else self.dp * self.tp


def arms_of(quick: bool) -> dict[str, Arm]:
    """Eager and compiled of each."""
    kinds = {"plain": Arm("plain", 2, 1, False), "DTensor 2": Arm("dtensor", 1, 2, False),
             "tp 2": Arm("ours", 1, 2, False, beside="DTensor 2"),
             "tp 2, logits split": Arm("ours_to_the_loss", 1, 2, False), "DDP 2": Arm("ddp", 2, 1, False),
             "dp 2": Arm("ours", 2, 1, False, beside="DDP 2"),
             "lone, dp 2 x tp 2": Arm("ours_to_the_loss", 2, 2, False, True)}
    if quick:
        kinds = {name: kinds[name] for name in ("plain", "dp 2")}
    return {f"{name}{suffix}": arm._replace(compiled=compiled) for name, arm in kinds.items()
            for suffix, compiled in (("", False), (" compiled", True))}


def main(json: bool = False, quick: bool = False, hidden: int | None = None) -> None:
    sizes = [hidden] if hidden else [64] if quick else [128, 256]
    rows = [row for size in sizes for row in compare(arms_of(quick), size, *(1, 2) if quick else (5, 6), quick)]
    show("compile: tokens per second, eager and compiled", rows, json)


def compare(arms: dict[str, Arm], hidden: int, rounds: int, steps: int, quick: bool) -> list[dict[str, Any]]:
    """All arms: each compiles alone, then turns of so many steps."""
    with ExitStack() as stack:
        workers, cold, losses = {}, {}, {}
        for name, arm in arms.items():
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            settings = {"arm": arm, "hidden": hidden, "steps": steps, "quick": quick}
            own = [{"TORCHINDUCTOR_CACHE_DIR": os.path.join(cache, str(r)), "TORCHINDUCTOR_COMPILE_THREADS": "1",
                    **({"GLOBALTENSOR_RANKS": str(arm.dp * arm.tp)} if arm.lone else {})}
                   for r in range(arm.processes)]
            threads = 2 if arm.processes == 1 else 1
            some = workers[name] = stack.enter_context(
                Workers("benchmarks.compile:worker", arm.processes, settings, threads, own=own))
            facts = some.hear()
            cold[name], losses[name] = max(one["cold"] for one in facts), [one["losses"] for one in facts]
            verify(name, losses[name], losses["plain"][0])
        speed = in_turns(workers, rounds)
    return [_row(name, arm, hidden, speed, cold) for name, arm in arms.items()]


def _row(name: str, arm: Arm, hidden: int, speed: dict[str, float], cold: dict[str, float]) -> dict[str, Any]:
    beside = f"{arm.beside}{' compiled' * arm.compiled}"
    ours = arm.kind.startswith("ours")
    return {"hidden": hidden, "arm": f"globaltensor {name}" if ours else name, "tokens/s": speed[name],
            "of eager": speed[name] / speed[name.removesuffix(" compiled")],
            "over plain": speed["plain compiled"] / speed[name] if arm.compiled else None,
            "beside": f"{speed[name] / speed[beside]:.2f} x {beside}" if beside in speed else "",
            "cold s": cold[name], "cold": cold[name] / cold["plain compiled"] if arm.compiled else None}


# -------------------------------------------------------------------------------------------------------- a worker


def worker(settings: dict[str, Any]) -> Iterator[Any]:
    """How long its first step took, and the losses of the first ones; then, at every turn, the seconds of some more."""
    arm = Arm(*settings["arm"])
    if arm.lone:                                     # no launcher's: it drives all ranks
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    trainer = train.KINDS[arm.kind](*made(settings["hidden"]), arm.dp, arm.tp)
    backend = "aot_eager" if settings["quick"] else "inductor"
    own = CompiledTrainer(*trainer)
    own.loss = torch.compile(trainer_loss, backend=backend, dynamic=False) if arm.compiled else trainer_loss
    began = time.perf_counter()
    losses = [own.read(own.step(0).detach())]
    cold = time.perf_counter() - began
    losses += [own.read(own.step(k).detach()) for k in range(1, train.CHECKED)]
    yield {"cold": cold, "losses": losses}
    yield from turns(own, settings["steps"])


def trainer_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).view(-1, VOCAB), targets.view(-1))


class CompiledTrainer(Trainer):
    """The same training, whose loss is one function."""

    loss: Any

    def step(self, k: int) -> Tensor:
        inputs, targets = self.batches[k % len(self.batches)]
        loss = self.loss(self.model, inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


if __name__ == "__main__":
    main()
