"""How many tokens a second does a small GPT train at, beside torch's DDP, its DTensor plan, and plain torch?

One model in all arms: examples/gpt.py with torch's fused attention (scaled_dot_product_attention, causal), 4 layers,
heads of 32, batches of 8 x 128 tokens of 512; AdamW, fused, a rate of 1e-3. One process per rank with one thread each;
plain torch is one process with as many threads. Every arm lives in processes of its own, trains in turns while the
others wait, and must get plain torch's losses first. Tokens by the median step, of the slowest rank. The peak of memory
is that of the steps before, of the rank that has most, without what the process had before its model was spread: the
kernel's VmHWM, less pages of other ranks that it reads in place, which are counted where they belong.

    DDP        torch's DistributedDataParallel over gloo
    DTensor    torch's plan over gloo: q, k, v and up by columns, o and down by rows, the rest on every rank. Attention
               sees a rank's own heads, as plain tensors; AdamW has a group of its own for what is not a DTensor
    dp 2       ours: the batch split, parameters broadcast
    tp 2       ours: the same plan as DTensor's
"""
from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import globaltensor as gt
from benchmarks.processes import Workers
from benchmarks.timing import show

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, Attention

LAYERS, BATCH, SEQ, VOCAB, HEAD = 4, 8, 128, 512, 32
CHECKED, TOLERANCE = 4, 1e-4                         # losses that are compared, and their relative difference
COLUMNS, ROWS = {"tp": gt.sbp.split(0)}, {"tp": gt.sbp.split(1)}
PLAN = {"*.q.*": COLUMNS, "*.k.*": COLUMNS, "*.v.*": COLUMNS, "*.o.weight": ROWS, "*.up.*": COLUMNS,
        "*.down.weight": ROWS}


class Arm(NamedTuple):
    """A way to train: `kind` is a function below. `beside`: the arm of torch's that does the same."""

    kind: str
    dp: int
    tp: int
    beside: str = ""

    @property
    def ranks(self) -> int:
        return self.dp * self.tp


ARMS = {"plain, 2 threads": Arm("plain", 2, 1), "DDP 2": Arm("ddp", 2, 1), "dp 2": Arm("ours", 2, 1, "DDP 2"),
        "DTensor 2": Arm("dtensor", 1, 2), "tp 2": Arm("ours", 1, 2, "DTensor 2"),
        "plain, 4 threads": Arm("plain", 4, 1), "dp 2 x tp 2": Arm("ours", 2, 2)}


def main(json: bool = False, quick: bool = False, hidden: int | None = None) -> None:
    sizes = [hidden] if hidden else [64] if quick else [128, 256]
    arms = {name: ARMS[name] for name in list(ARMS)[:5]} if quick else ARMS
    rows = [row for size in sizes for row in compare(arms, size, *(1, 2) if quick else (6, 8))]
    show("train: tokens per second", rows, json)


def compare(arms: dict[str, Arm], hidden: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """All arms, in turns of so many steps."""
    with ExitStack() as stack:
        workers = {}
        for name, arm in arms.items():
            alone = arm.kind == "plain"
            settings = {"kind": arm.kind, "dp": arm.dp, "tp": arm.tp, "hidden": hidden, "steps": steps}
            workers[name] = stack.enter_context(Workers("benchmarks.train:worker", 1 if alone else arm.ranks, settings,
                                                        arm.ranks if alone else 1))
        losses = {name: some.hear() for name, some in workers.items()}
        for name, found in losses.items():
            verify(name, found, next(iter(losses.values()))[0])
        peaks = {name: max(some.hear()) for name, some in workers.items()}
        speed = in_turns(workers, rounds)
    return [row(name, arm, hidden, speed, peaks) for name, arm in arms.items()]


def in_turns(workers: dict[str, Workers], rounds: int) -> dict[str, float]:
    """Tokens per second of each, by the median step of its slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name, some in workers.items():
            some.tell()
            times[name] += map(max, zip(*some.hear()))
    return {name: BATCH * SEQ / statistics.median(found) for name, found in times.items()}


def row(name: str, arm: Arm, hidden: int, speed: dict[str, float], peaks: dict[str, float]) -> dict[str, Any]:
    ours = arm.kind == "ours"
    return {"hidden": hidden, "arm": f"globaltensor {name}" if ours else name, "tokens/s": speed[name],
            "of plain": speed[name] / speed[f"plain, {arm.ranks} threads"],
            "beside": f"{speed[name] / speed[arm.beside]:.2f} x {arm.beside}" if arm.beside else "",
            "peak MB": peaks[name],
            "beside, peak": f"{peaks[name] / peaks[arm.beside]:.2f} x {arm.beside}" if arm.beside else ""}


def verify(name: str, found: list[list[float]], plain: list[float]) -> None:
    """End where the losses of one of the ranks are not those of plain torch."""
    for losses in found:
        if not all(abs(a - b) < TOLERANCE * abs(b) for a, b in zip(losses, plain, strict=True)):
            raise SystemExit(f"{name} does not train as plain torch does: losses {losses}, not {plain}")


# -------------------------------------------------------------------------------------------------------- a worker


class Trainer(NamedTuple):
    """A model, its optimizer, its batches, and how to read a loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Tensor, Tensor]]             # inputs and targets, [b, t] each
    read: Any = Tensor.item

    def step(self, k: int) -> Tensor:
        inputs, targets = self.batches[k % len(self.batches)]
        loss = F.cross_entropy(self.model(inputs).view(-1, VOCAB), targets.view(-1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def worker(settings: dict[str, Any]) -> Iterator[Any]:
    """The losses of the first steps, and the peak of memory in MB; then, at every turn, the seconds of some more."""
    model, batches = made(settings["hidden"])
    before = _kilobytes("status", "VmRSS")
    trainer = KINDS[settings["kind"]](model, batches, settings["dp"], settings["tp"])
    yield first_losses(trainer)
    of_others = _kilobytes("status", "RssShmem") - _kilobytes("smaps_rollup", "Pss_Shmem")
    yield (_kilobytes("status", "VmHWM") - of_others - before) / 1024
    yield from turns(trainer, settings["steps"])


def _kilobytes(file: str, field: str) -> int:
    """What the kernel says of this process."""
    lines = (Path("/proc/self") / file).read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def made(hidden: int, layers: int = LAYERS) -> tuple[GPT, list[tuple[Tensor, Tensor]]]:
    """The model and its batches, the same in every process."""
    torch.manual_seed(0)
    model = GPT(VOCAB, SEQ, layers, hidden, hidden // HEAD)
    ids = torch.randint(VOCAB, (CHECKED, BATCH, SEQ + 1))
    return model, [(some[:, :-1].contiguous(), some[:, 1:].contiguous()) for some in ids]


def first_losses(trainer: Trainer) -> list[float]:
    return [trainer.read(trainer.step(k).detach()) for k in range(CHECKED)]


def turns(trainer: Trainer, steps: int) -> Iterator[list[float]]:
    """At every turn the seconds of so many steps; one more before them only warms the caches."""
    for _ in sys.stdin:
        laps = []
        for k in range(steps + 1):
            began = time.perf_counter()
            trainer.step(k)
            laps.append(time.perf_counter() - began)
        yield laps[1:]


def adamw(*groups: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3, fused=True)


def plain(model: GPT, batches: list[tuple[Tensor, Tensor]], dp: int, tp: int) -> Trainer:
    return Trainer(model, adamw(list(model.parameters())), batches)


def ddp(model: GPT, batches: list[tuple[Tensor, Tensor]], dp: int, tp: int, bucket: int | None = None) -> Trainer:
    dist.init_process_group("gloo")
    return of_torch(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket), batches, dp, tp)


def of_torch(model: nn.Module, batches: list[tuple[Tensor, Tensor]], dp: int, tp: int) -> Trainer:
    """Every `tp` ranks train on a part of a batch."""
    def read(loss: Tensor) -> float:
        """The mean over these parts."""
        dist.all_reduce(loss)
        return loss.item() / (dp * tp)

    part, groups = dist.get_rank() // tp, {}
    for p in model.parameters():
        groups.setdefault(type(p), []).append(p)     # AdamW takes no DTensors together with others
    parts = [(a.chunk(dp)[part], b.chunk(dp)[part]) for a, b in batches]
    return Trainer(model, adamw(*groups.values()), parts, read)


def dtensor(model: GPT, batches: list[tuple[Tensor, Tensor]], dp: int, tp: int, bucket: int | None = None) -> Trainer:
    """Where there is more than one part of a batch, DDP adds up gradients across the parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"}, "attention.o": RowwiseParallel(),
            "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
        block.attention.__class__ = OwnHeads
    whole = model if dp == 1 else nn.parallel.DistributedDataParallel(
        model, device_mesh=mesh["dp"], bucket_cap_mb=bucket)
    return of_torch(whole, batches, dp, tp)


class OwnHeads(Attention):
    """The same attention where q, k and v give the heads of this rank only."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (linear(x).view(b, t, -1, HEAD).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(b, t, -1))


def ours(model: GPT, batches: list[tuple[Tensor, Tensor]], dp: int, tp: int, plan: Any = PLAN) -> Trainer:
    where = gt.placement("cpu", torch.arange(dp * tp).view(dp, tp).tolist(), axis_names=("dp", "tp"))
    gt.to_global(model, where, plan)
    rows = {"dp": gt.sbp.split(0)}
    parts = [(gt.from_full(a, where, rows), gt.from_full(b, where, rows)) for a, b in batches]
    return Trainer(model, adamw(list(model.parameters())), parts)


def ours_to_the_loss(model: GPT, batches: list[tuple[Tensor, Tensor]], dp: int, tp: int) -> Trainer:
    """The vocabulary is split too, as the loss can be."""
    return ours(model, batches, dp, tp, PLAN | {"head.weight": COLUMNS})


KINDS = {"plain": plain, "ddp": ddp, "dtensor": dtensor, "ours": ours, "ours_to_the_loss": ours_to_the_loss}


if __name__ == "__main__":
    main()
