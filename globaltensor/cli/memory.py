"""Estimate the memory of a rank: parameters, gradients, optimizer state, activations.

    globaltensor memory --params 7.5e9 --zero 2 --dp 64
    globaltensor memory --model gpt --layers 96 --hidden 12288 --heads 96 --seq 2048 --micro-batch 1 --tp 8 --sp \\
        --recompute selective

All sizes are per rank; GB are 10^9 bytes. A parameter takes 2 bytes, its gradient 2, its state of mixed-precision Adam
12 (--bytes for others). In a pipeline, 1F1B keeps the activations of as many micro-batches on the first rank as there
are ranks: together those of all layers, however many ranks there are.
"""
from __future__ import annotations

import argparse
import json
from fractions import Fraction
from typing import Any

from globaltensor.cli.problem import Problem, positive
from globaltensor.errors import GlobalTensorError
from globaltensor.runtime.text_table import aligned
from globaltensor.simulator.costs import exact
from globaltensor.simulator.gpt import GPT, RECOMPUTE
from globaltensor.simulator.memory import model_states

_SIZES = {"K": 10 ** 3, "M": 10 ** 6, "B": 10 ** 9, "T": 10 ** 12}


def options(of: argparse.ArgumentParser) -> None:
    """The command line of `globaltensor memory`."""
    of.add_argument("--params", type=_count, metavar="N", help="parameters of the model: 7.5e9, or 7.5B")
    model_options(of)
    of.add_argument("--micro-batch", type=positive, default=1, metavar="N", help="samples at a time (default 1)")
    of.add_argument("--bytes", type=_bytes, default=(2, 2, 12), metavar="P,G,O",
                    help="of a parameter, its gradient, its optimizer state (default 2,2,12)")
    of.add_argument("--json", action="store_true", help="as one JSON object, in bytes")
    parallel_options(of, recompute="none")


def model_options(of: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The sizes of a model."""
    of.add_argument("--model", choices=["gpt"], help="a model by its sizes")
    for name, what in (("layers", "layers"), ("hidden", "hidden size"), ("heads", "heads of attention"),
                       ("seq", "length of a sequence")):
        of.add_argument(f"--{name}", type=positive, metavar="N", help=what)
    of.add_argument("--vocab", type=positive, default=51200, metavar="N", help="vocabulary (default 51200)")
    of.add_argument("--flash", action="store_true", help="flash attention, which keeps no seq x seq matrix")


def parallel_options(of: argparse.ArgumentParser | argparse._ArgumentGroup, recompute: str) -> None:
    """How it is spread."""
    for name, what in (("dp", "data"), ("tp", "tensor"), ("pp", "pipeline")):
        of.add_argument(f"--{name}", type=positive, default=1, metavar="N", help=f"{what}-parallel ranks (default 1)")
    of.add_argument("--sp", action="store_true", help="sequence parallel, along the tensor-parallel ranks")
    of.add_argument("--zero", type=int, choices=range(4), default=0, help="stage of ZeRO over dp (default 0)")
    of.add_argument("--recompute", choices=RECOMPUTE, default=recompute,
                    help=f"which activations are computed again (default {recompute})")


def model(chosen: argparse.Namespace) -> GPT:
    """The model that is asked for."""
    missing = [name for name in ("layers", "hidden", "heads", "seq") if getattr(chosen, name) is None]
    if missing:
        raise Problem(f"--model {chosen.model} needs --{missing[0]}\n  try: --layers 24 --hidden 2304 --heads 24 "
                      "--seq 2048")
    return GPT(chosen.layers, chosen.hidden, chosen.heads, chosen.seq, chosen.vocab, chosen.flash)


def problem(error: GlobalTensorError, source: str = "") -> Problem:
    """An error of the library as a command says it; `source` is a file that its place is in."""
    lines = [error.what]
    lines += [f"  where: {error.where}"] if source and error.where.startswith(source) else []
    lines += [f"  why: {error.why}"] if error.why else []
    lines += [f"  try: {error.fix}"] if error.fix else []
    return Problem("\n".join(lines))


def command(chosen: argparse.Namespace) -> int:
    """Print what a rank keeps."""
    if (chosen.params is None) == (chosen.model is None):
        raise Problem("how large is the model?\n  try: --params 7.5e9, or --model gpt --layers ...")
    try:
        summary = estimate(chosen)
    except GlobalTensorError as error:
        raise problem(error) from None
    print(json.dumps(summary, indent=2) if chosen.json else _memory_text(summary))
    return 0


def estimate(chosen: argparse.Namespace) -> dict[str, Any]:
    """Bytes on one rank, by what they are for."""
    gpt = model(chosen) if chosen.model else None
    parameters = gpt.parameters if gpt else chosen.params
    states = model_states(Fraction(parameters) / (chosen.tp * chosen.pp), chosen.zero, chosen.dp, chosen.bytes)
    summary: dict[str, Any] = {
        "parameters": number(parameters),
        "model_states": {**{name: number(size) for name, size in states._asdict().items()},
                         "total": number(states.total)},
        "model_states_gb": float(states.total / 10 ** 9)}
    total = states.total
    if gpt:
        layer = gpt.activations_per_layer(chosen.micro_batch, chosen.tp, chosen.sp, chosen.recompute)
        summary |= {"activations_per_layer": number(layer), "activations": number(layer * gpt.layers),
                  "activations_gb": float(layer * gpt.layers / 10 ** 9)}
        total += layer * gpt.layers
    return summary | {"total": number(total), "total_gb": float(total / 10 ** 9)}


def number(value: int | float | Fraction) -> int | float:
    """As JSON has it: whole numbers stay whole."""
    return int(value) if value == int(value) else float(value)


def _memory_text(summary: dict[str, Any]) -> str:
    rows = [("parameters of the model", f"{summary['parameters']:,}")]
    rows += [(f"a rank's {name}" if name != "total" else "together", f"{size / 1e9:,.4g} GB")
             for name, size in summary["model_states"].items()]
    if "activations" in summary:
        rows += [("activations of a layer", f"{summary['activations_per_layer'] / 1e9:,.4g} GB"),
                 ("activations of all layers", f"{summary['activations_gb']:,.4g} GB"),
                 ("all together", f"{summary['total_gb']:,.4g} GB")]
    return "\n".join(aligned(rows, right={1}))


def _count(text: str) -> Fraction:
    digits, scale = (text[:-1], _SIZES[text[-1].upper()]) if text[-1:].upper() in _SIZES else (text, 1)
    try:
        count = exact(digits) * scale
    except (ValueError, ArithmeticError):
        count = Fraction(0)
    if count < 1 or count.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters: 7.5e9, or 7.5B")
    return count


def _bytes(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if len(sizes) != 3 or not all(size.isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers of bytes: 2,2,12")
    return tuple(map(int, sizes))
