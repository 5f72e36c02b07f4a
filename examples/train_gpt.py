"""Train a small GPT (gpt.py) on bytes of real text, spread over ranks as data x tensor x pipeline parallel.

    python examples/train_gpt.py                                one process drives all ranks
    globaltensor run -n 4 examples/train_gpt.py                 one process per rank
    torchrun --nproc-per-node 4 examples/train_gpt.py           likewise

With --checkpoint FOLDER it saves every --every steps, goes on from the last step saved when it is started again, on as
many ranks or others, and when a scheduler ends it (SIGTERM, SIGUSR1) it saves first, and asks to be started again:

    globaltensor run -n 4 --max-restarts 3 examples/train_gpt.py --checkpoint run

With --report FILE.html it records the last step and writes a page of it, for a browser: which boxings, how many bytes,
from which line. FILE.json is the record itself, for `globaltensor report`.

With --tensorboard FOLDER it writes the loss and `gt.metrics` (tokens/s, MFU, communication, waiting, memory) for
TensorBoard: pip install 'globaltensor[tensorboard]', then tensorboard --logdir FOLDER.

The parallelism is all in two functions, `spread` and `global_batch`; the model and the training loop are what they
would be for one device. `--verify` trains the same model on plain torch beside it.

    stage     a placement of dp x tp ranks that holds its share of the blocks; --pp of them, one after the other
    plan      how the parameters lie along tp; what no row fits is broadcast. Along dp all are broadcast
    --sp      what lies between the layers is split along the sequence, over the ranks of tp
    --zero    the optimizer's state (1), gradients (2) and parameters (3) are split along dp
    batch     split along dp
"""
from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint

    import globaltensor as gt
    from globaltensor.runtime.text_table import aligned
    from globaltensor_command import main as globaltensor
except ModuleNotFoundError as error:
    sys.exit(f"train_gpt.py needs {error.name}, which is not installed: make train")

from gpt import GPT

Parts = list[tuple[Tensor, Tensor]]                  # inputs and targets, [b, t] each

VOCAB = 256                                          # every byte is a token
TOLERANCE = 1e-4                                     # of --verify, relative; with --amp, as numbers of 8 bits allow
TOLERANCE_AMP = 2e-2
NOTED = 10                                           # steps between two notes of --tensorboard
TEXT_BYTES = 1_000_000                               # of the standard library's sources, when no --data is given


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    ranks = options.dp * options.tp * options.pp
    try:
        gt.init(ranks=ranks)
    except gt.GlobalTensorError as error:
        fail(f"--dp {options.dp} x --tp {options.tp} x --pp {options.pp} = {ranks} ranks: {error.what}")
    _, difference = train(options)
    tolerance = TOLERANCE_AMP if options.amp else TOLERANCE
    if difference > tolerance:
        fail(f"global and plain losses differ by {difference:.1e}, more than {tolerance:.0e}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; a bad one ends the program with one line."""
    parser = argparse.ArgumentParser(description="Train a small GPT on bytes of text, spread over ranks.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail  # type: ignore[method-assign]  # one line instead of the usage
    for name, default, text in [
            ("tp", 2, "ranks along which the layers are split"),
            ("pp", 1, "stages of blocks"), ("steps", 300, "optimizer steps"), ("layers", 4, "blocks"),
            ("hidden", 128, "hidden size"), ("heads", 4, "attention heads"), ("seq", 64, "bytes in a sequence"),
            ("batch", 16, "sequences in a step"), ("accumulate", 1, "parts in which a step's batch is run")]:
        parser.add_argument(f"--{name}", type=positive, default=default, help=text, metavar="N")
    parser.add_argument("--dp", type=positive, help="ranks along which the batch is split (default: as many as a "
                        "launcher has started, else 2)", metavar="N")
    parser.add_argument("--checkpoint", help="save into this folder or URL, and go on from there", metavar="FOLDER")
    parser.add_argument("--every", type=positive, default=50, help="steps between two saves", metavar="N")
    parser.add_argument("--log", type=Path, help="add a line of JSON per step to this file", metavar="FILE")
    parser.add_argument("--tensorboard", help="write metrics for TensorBoard into this folder", metavar="FOLDER")
    parser.add_argument("--report", type=Path, help="write a page (.html) or a record (.json) of the last step",
                        metavar="FILE")
    parser.add_argument("--sp", action="store_true", help="split the sequence between the layers over the ranks of tp")
    parser.add_argument("--zero", type=int, choices=range(4), default=0, help="stage of ZeRO along dp", metavar="STAGE")
    parser.add_argument("--device", default="cpu", help="type of the ranks' devices, such as cuda", metavar="TYPE")
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 where that is enough")
    parser.add_argument("--recompute", action="store_true", help="run blocks again in backward, and keep less")
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--dropout", type=float, default=0.0, help="share of activations that is dropped")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout")
    parser.add_argument("--tied", action="store_true", help="the head's weight is the embedding's")
    parser.add_argument("--sample", type=int, default=200, help="bytes of text to write at the end", metavar="N")
    parser.add_argument("--data", type=Path, help="a file to learn (default: Python's standard library)")
    parser.add_argument("--verify", action="store_true", help="train on plain torch beside it and compare the losses")
    options = parser.parse_args(argv)
    options.dp = options.dp or max(1, int(os.environ.get("WORLD_SIZE", 4)) // (options.tp * options.pp))
    for wrong, text in [
            (options.hidden % options.heads, f"--heads {options.heads} does not divide --hidden {options.hidden}"),
            (options.batch % options.accumulate,
             f"--accumulate {options.accumulate} does not divide --batch {options.batch}"),
            (options.pp > options.layers, f"--pp {options.pp} stages of --layers {options.layers}"),
            (options.pp > 1 and options.tied, "--tied needs the embedding and the head on one stage: --pp 1"),
            (not 0 <= options.dropout < 1, f"--dropout {options.dropout} is not in [0, 1)"),
            (options.verify and options.dropout, "--verify needs --dropout 0: plain torch draws other random numbers"),
            (options.verify and options.checkpoint, "--verify compares from the first step: no --checkpoint"),
            (options.tensorboard and find_spec("tensorboard") is None,
             "--tensorboard needs tensorboard, which is not installed: pip install 'globaltensor[tensorboard]'"),
            (options.report and options.report.suffix not in (".html", ".json", ".gz"),
             f"--report {options.report}: the name of a page ends in .html, that of a record in .json"),
            (options.data and not options.data.is_file(), f"--data {options.data} is not a file")]:
        if wrong:
            fail(text)
    return options


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def fail(message: str) -> NoReturn:
    """End the program; one rank says why."""
    sys.exit(f"train_gpt.py: {message}" if os.environ.get("RANK", "0") == "0" else 2)


def say(*words: Any) -> None:
    """Print, once."""
    if gt.rank() == 0:
        print(*words, flush=True)


# ------------------------------------------------------------------------------------------------------ parallelism


def stages(options: argparse.Namespace) -> list[gt.placement]:
    """One placement of dp x tp ranks per pipeline stage."""
    ranks = torch.arange(options.pp * options.dp * options.tp).view(options.pp, options.dp, options.tp)
    return [gt.placement(options.device, stage.tolist(), axis_names=("dp", "tp")) for stage in ranks]


def spread(model: GPT, places: list[gt.placement], sequence: bool = False) -> None:
    """Make the parameters global: laid out by a plan, the blocks dealt out over the stages in order."""
    gt.parallelize(model, places[0], gt.Plan.of(model, "tp", sequence="tp" if sequence else ""))
    homes = {model.token: places[0], model.norm: places[-1], model.head: places[-1]}
    for i, block in enumerate(model.blocks):
        homes[block] = places[i * len(places) // len(model.blocks)]
    for module, home in homes.items() if len(places) > 1 else ():
        gt.to_global(module, home, lambda name, parameter: parameter.sbp)
        module.register_forward_pre_hook(                # what comes in goes where the parameters are
            lambda _, args, home=home: (args[0].to_global(home) if args[0].is_global else args[0],))


def global_batch(parts: Parts, places: list[gt.placement]) -> Parts:
    """Inputs [b, t] on the first stage and targets [b, t] on the last, split along dp."""
    lie = {"dp": gt.sbp.split(0)}
    return [(gt.from_full(inputs, places[0], lie), gt.from_full(targets, places[-1], lie)) for inputs, targets in parts]


# --------------------------------------------------------------------------------------------------------- training


class Trainer:
    """A model, its optimizer and its learning rate: plain torch, global or not."""

    def __init__(self, model: GPT, options: argparse.Namespace) -> None:
        self.model, self.device, self.amp = model, options.device, options.amp
        for block in model.blocks if options.recompute else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1,
                                           fused=True)
        if options.zero and isinstance(model.token.weight, gt.GlobalTensor):
            gt.zero(self.optimizer, "dp", options.zero)
        warm_up = max(1, options.steps // 10)

        def share(step: int) -> float:
            """Of the highest rate: up in a line, down in half a cosine to a tenth."""
            done = min(1.0, (step + 1 - warm_up) / max(1, options.steps - warm_up))
            return (step + 1) / warm_up if step < warm_up else 0.55 + 0.45 * math.cos(math.pi * done)

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, share)

    def state(self) -> dict[str, Any]:
        """All that it remembers from one step to the next."""
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def step(self, parts: Parts) -> float:
        """One optimizer step on the parts of a batch; the loss before it."""
        total = 0.0
        for inputs, targets in parts:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.amp):
                logits = self.model(inputs)                                                  # [b, t, vocab]
            loss = F.cross_entropy(logits.float().view(-1, VOCAB), targets.view(-1)) / len(parts)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return total


def train(options: argparse.Namespace) -> tuple[list[float], float]:
    """Train and report. The losses, and with --verify the largest relative difference to those of plain torch."""
    text = read_text(options.data)
    if len(text) < options.seq + 2:
        fail(f"{len(text)} bytes of text are too few for --seq {options.seq}")
    torch.manual_seed(options.seed)
    model = GPT(VOCAB, options.seq, options.layers, options.hidden, options.heads, options.dropout, options.tied)
    plain = Trainer(copy.deepcopy(model).to(options.device), options) if options.verify else None
    places = stages(options)
    spread(model, places, options.sp)
    trainer = Trainer(model, options)
    size = sum(p.numel() for p in model.parameters())
    say(f"{size:,} parameters, {len(text):,} bytes of text, dp {options.dp} x tp {options.tp} x pp {options.pp}")

    generator = torch.Generator().manual_seed(options.seed)
    state: dict[str, Any] = {"trainer": trainer.state(), "generator": generator.get_state(), "step": 0}
    if options.checkpoint:
        state = gt.resume(state, options.checkpoint)
        generator.set_state(state["generator"])
    losses: list[float] = []
    moves, worst = [], 0.0
    with progress(options) as show, board(options, size) as note:
        for step in range(state["step"] + 1, options.steps + 1):
            parts = batch(text, options, generator)
            last = step == options.steps
            watched: AbstractContextManager[list[Any]] = recorded(options) if last else nullcontext([])
            with watched as moves:
                losses.append(trainer.step(global_batch(parts, places)))
            show(step, losses[-1])
            note(step, losses[-1])
            if plain is not None:
                expected = plain.step([(a.to(options.device), b.to(options.device)) for a, b in parts])
                difference = abs(losses[-1] - expected) / abs(expected)
                worst = max(worst, difference) if math.isfinite(difference) else math.inf
                say(f"step {step:4}   global {losses[-1]:.6f}   plain {expected:.6f}   difference {difference:.1e}")
            state |= {"generator": generator.get_state(), "step": step}
            log(options, step, losses[-1])
            if options.checkpoint:
                save(state, options, step)
    if losses:                                       # else the checkpoint was that of the last step
        report(model, moves, losses)
    if options.sample:
        prompt = text[:options.seq].long().unsqueeze(0).to(options.device)
        written = model.generate(prompt, options.sample)
        assert isinstance(written, gt.GlobalTensor)
        say(f"\nA sample:\n{bytes(written.full_tensor()[0, options.seq:].tolist()).decode(errors='replace')}")
    if plain is not None:
        say(f"\nThe largest relative difference to plain torch: {worst:.1e}")
    return losses, worst


def read_text(path: Path | None) -> Tensor:
    """The bytes to learn, [n] of uint8. Every rank reads the same."""
    if path is not None:
        data = path.read_bytes()
    else:
        data = b""
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            data += source.read_bytes()
            if len(data) >= TEXT_BYTES:
                break
    return torch.frombuffer(bytearray(data[:TEXT_BYTES] if path is None else data), dtype=torch.uint8)


def batch(text: Tensor, options: argparse.Namespace, generator: torch.Generator) -> Parts:
    """Inputs and targets [b, t] of the next step, in --accumulate parts, the same on every rank."""
    starts = torch.randint(len(text) - options.seq, (options.batch, 1), generator=generator)
    window = text[starts + torch.arange(options.seq + 1)].long()
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in window.chunk(options.accumulate)]


def save(state: dict[str, Any], options: argparse.Namespace, step: int) -> None:
    """Save now and then, and at the end; end the program where a scheduler wants that."""
    asked_to_end = gt.preempted()
    if asked_to_end or step % options.every == 0 or step == options.steps:
        gt.save(state, options.checkpoint, keep=2)
    if asked_to_end:
        say(f"asked to end: saved step {step} in {options.checkpoint}")
        sys.exit(gt.REQUEUE)


def log(options: argparse.Namespace, step: int, loss: float) -> None:
    """A line for programs that read what this one did: the loss to the last bit, and who computed it."""
    if options.log and gt.rank() == 0:
        with open(options.log, "a") as file:
            file.write(json.dumps({"step": step, "loss": loss.hex(), "pid": os.getpid()}) + "\n")


# -------------------------------------------------------------------------------------------------------- reporting


@contextmanager
def recorded(options: argparse.Namespace) -> Iterator[list[Any]]:
    """The boxings of a step; with --report rank 0 writes them to a file, and a page of it."""
    page = options.report if options.report and options.report.suffix == ".html" else None
    with gt.record(file=page.with_suffix(".json") if page else options.report) as moves:
        yield moves
    if page and gt.rank() == 0:
        globaltensor(["report", str(page.with_suffix(".json")), "-o", str(page)])


@contextmanager
def progress(options: argparse.Namespace) -> Iterator[Any]:
    """A function show(step, loss): a bar on a terminal if rich is there, else a line now and then; rank 0 only."""
    start = time.perf_counter()
    tokens = options.batch * options.seq

    def speed(step: int) -> str:
        return f"{step * tokens / (time.perf_counter() - start):,.0f} tokens/s"

    def line(step: int, loss: float) -> None:
        every = max(1, options.steps // 15)
        if step == 1 or step % every == 0 or step == options.steps:
            say(f"step {step:4}/{options.steps}   loss {loss:.4f}   {speed(step)}")

    if gt.rank() != 0 or options.verify:
        yield lambda step, loss: None
    elif not sys.stdout.isatty() or find_spec("rich") is None:
        yield line
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        with Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]:.4f}"),
                      TextColumn("{task.fields[speed]}"), TimeRemainingColumn()) as bar:
            task = bar.add_task("", total=options.steps, loss=math.nan, speed="")
            yield lambda step, loss: bar.update(task, completed=step, loss=loss, speed=speed(step))


@contextmanager
def board(options: argparse.Namespace, parameters: int) -> Iterator[Any]:
    """A function note(step, loss), which every rank calls: now and then rank 0 writes the metrics of all of them."""
    if not options.tensorboard:
        yield lambda step, loss: None
        return
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(options.tensorboard) if gt.rank() == 0 else None
    noted = 0                                        # steps since the last note

    def note(step: int, loss: float) -> None:
        nonlocal noted
        noted += 1
        if step % NOTED == 0 or step == options.steps:
            tokens = noted * options.batch * options.seq
            now = gt.metrics(tokens=tokens, flops=6 * parameters * tokens, every_rank=True)
            noted = 0
            if writer is not None:
                for name, value in ({"loss": loss} | now).items():
                    writer.add_scalar(name, value, step)

    gt.metrics()                                     # begins to count
    yield note
    if writer is not None:
        writer.close()


def report(model: GPT, moves: list[Any], losses: list[float]) -> None:
    """The layout of every parameter, the bytes that one step moved, and the loss."""
    blocks: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, p in model.named_parameters():
        match = re.fullmatch(r"(blocks\.)?(\d+)?(.*)", name)
        assert match is not None and isinstance(p, gt.GlobalTensor)
        start, block, rest = match.groups(default="")
        blocks[start, rest, str(list(p.shape)), str(p.sbp), " ".join(map(str, p.placement.flat))].append(block)
    rows: list[tuple[str, ...]] = [("parameter", "shape", "sbp (dp, tp)", "ranks")]
    for (start, rest, *how), found in blocks.items():
        rows.append((f"{start}{'-'.join(sorted({found[0], found[-1]}, key=found.index))}{rest}", *how))
    table("Where the parameters are", rows)

    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for move in moves:
        if move.bytes:
            kinds[kind(move), move.op.removeprefix("aten.").removesuffix(".default")].append(move.bytes)
    rows = [("boxing", "for", "times", "bytes")]
    rows += [(what, op, str(len(sizes)), f"{sum(sizes):,}") for (what, op), sizes in sorted(kinds.items())]
    rows.append(("all", "", str(sum(map(len, kinds.values()))), f"{sum(map(sum, kinds.values())):,}"))
    table("What the last step moved (bytes that the busiest rank received)", rows)
    say(f"\nLoss: {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")


def kind(move: Any) -> str:
    """What a boxing does along each axis; of several that moved together, what the first does."""
    if move.src.placement != move.dst.placement:
        return "to another stage"
    axes = zip(("dp", "tp"), move.src.sbp, move.dst.sbp)
    return ", ".join(f"{a} -> {b} along {axis}" for axis, a, b in axes if a != b) + ", ..." * (move.tensors > 1)


def table(title: str, rows: list[tuple[str, ...]]) -> None:
    """Print rows in aligned columns, those of numbers to the right."""
    numbers = {k for k, cell in enumerate(rows[-1]) if cell.replace(",", "").isdigit()}
    say(f"\n{title}")
    for line in aligned(rows, gap="   ", right=numbers):
        say("   ", line)


if __name__ == "__main__":
    main()
