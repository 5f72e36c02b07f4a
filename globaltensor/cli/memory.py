"""Estimate the memory of a rank: parameters, gradients, optimizer state, activations.

    globaltensor memory --params 7.5e9 --zero 2 --dp 64
    globaltensor memory --model gpt --layers 96 --hidden 12288 --heads 96 --seq 2048 --micro-batch 1 --tp 8 --sp \\
        --recompute selective

All sizes are per rank; 1 GB is 10^9 bytes. A parameter takes 2 bytes, its gradient 2, and its state in
mixed-precision Adam 12; --bytes sets others. In a pipeline with the 1F1B schedule, the first rank keeps the
activations of as many micro-batches as there are ranks. Together these are the activations of all layers, whatever
the number of ranks.
"""
from __future__ import annotations

import argparse
import json
from fractions import Fraction
from typing import Any

from globaltensor.cli.problem import Problem
from globaltensor.errors import GlobalTensorError
from globaltensor.runtime.text_table import aligned, terminal_columns
from globaltensor.runtime.units import bytes_text
from globaltensor.simulator.costs import exact
from globaltensor.simulator.gpt import GPT
from globaltensor.simulator.memory import model_states

_VOCAB = 51200
_SIZES = {"K": 10 ** 3, "M": 10 ** 6, "B": 10 ** 9, "T": 10 ** 12}


def model(chosen: argparse.Namespace) -> GPT:
    """The model that is asked for."""
    missing = [name for name in ("layers", "hidden", "heads", "seq") if getattr(chosen, name) is None]
    if missing:
        raise Problem(f"--model {chosen.model} needs --{missing[0]}\n  try: --layers 24 --hidden 2304 --heads 24 "
                      "--seq 2048")
    return GPT(chosen.layers, chosen.hidden, chosen.heads, chosen.seq, chosen.vocab or _VOCAB, chosen.flash)


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
        raise Problem(f"{'how large is the model' if chosen.params is None else 'both --params and --model'}?\n"
                      "  try: --params 7.5e9, or --model gpt --layers ...")
    try:
        summary = estimate(chosen)
    except GlobalTensorError as error:
        raise problem(error) from None
    print(json.dumps(summary, indent=2) if chosen.json else _memory_text(summary))
    return 0


def estimate(chosen: argparse.Namespace) -> dict[str, Any]:
    """Bytes on one rank, by what they are for."""
    gpt = model(chosen) if chosen.model else None
    parameters = gpt.parameters if gpt else _count(chosen.params)
    states = model_states(Fraction(parameters) / (chosen.tp * chosen.pp), chosen.zero, chosen.dp, chosen.bytes)
    summary: dict[str, Any] = {
        "parameters": number(parameters),
        "model_states": {**{name: number(size) for name, size in states._asdict().items()},
                         "total": number(states.total)},
        "model_states_gb": float(states.total / 10 ** 9)}
    total = states.total
    if gpt:
        gpt.check_tensor_parallel(chosen.tp)
        gpt.check_stages(chosen.pp)
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
    rows += [(f"a rank's {name}" if name != "total" else "together", bytes_text(size))
             for name, size in summary["model_states"].items()]
    if "activations" in summary:
        rows += [("activations of a layer", bytes_text(summary["activations_per_layer"])),
                 ("activations of all layers", bytes_text(summary["activations"])),
                 ("all together", bytes_text(summary["total"]))]
    return "\n".join(aligned(rows, right={1}, columns=terminal_columns()))


def _count(text: str) -> Fraction:
    digits, scale = (text[:-1], _SIZES[text[-1].upper()]) if text[-1:].upper() in _SIZES else (text, 1)
    try:
        count = exact(digits) * scale
    except (ValueError, ArithmeticError):
        count = Fraction(0)
    if count < 1 or count.denominator != 1:
        raise Problem(f"--params {text} is not a number of parameters\n  try: --params 7.5e9, or 7.5B")
    return count
