"""The command line of every command: its options, and what each of them takes and means.

Only the standard library is imported here, so that help and completion come at once: the commands themselves import
torch. `OPTIONS` lists the commands in the order in which the help shows them. A command is a file of this folder with
the same name; its docstring is its description, and its function `command` does it.
"""
from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCHEDULES = ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
RECOMPUTED = ("none", "selective", "full")
CLUSTERS = "dgx-a100, dgx-h100, or a JSON file (default dgx-a100)"
_MOST_DIGITS = 15                                    # of any size: products of several are still exact
SHELLS = ("bash", "zsh", "fish")

_PLAIN = "torchrun, which runs the same program"
_OUTPUT = "globaltensor run ... 2>&1 | tee FILE: all ranks write to one output, and the first error is shown once"
# a flag of torchrun -> what to type instead
_REFUSED = {
    "--rdzv-conf": "--rdzv-endpoint HOST:PORT alone: the hosts wait for each other as long as it takes",
    "--monitor-interval": "nothing: ranks are checked ten times a second",
    "--event-log-handler": _PLAIN, "--logs-specs": _PLAIN, "--numa-binding": _PLAIN, "--signals-to-handle": _PLAIN,
    "--virtual-local-rank": _PLAIN, "--role": "nothing: all ranks have one role",
    "--no-python": "the Python program itself, or torchrun --no-python for another one",
    "--run-path": "globaltensor run program.py: it is run as a script",
    "--log-dir": _OUTPUT, "--redirects": _OUTPUT, "-r": _OUTPUT, "--tee": _OUTPUT, "-t": _OUTPUT,
    "--log-line-prefix-template": _OUTPUT, "--local-ranks-filter": _OUTPUT, "--duplicate-stdout-filters": _OUTPUT,
    "--duplicate-stderr-filters": _OUTPUT, "--print-completion": "globaltensor completion bash, or zsh, or fish",
}


# ----------------------------------------------------------------------------------------------- types of arguments


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return _number_of_at_least(text, 1)


def at_most_100_000(text: str) -> int:
    """A whole number from 1 on, of what is gone through one by one: more would take minutes."""
    number = positive(text)
    if number > 100_000:
        raise argparse.ArgumentTypeError(f"{text} is too large: at most 100,000")
    return number


def natural(text: str) -> int:
    """A whole number from 0 on."""
    return _number_of_at_least(text, 0)


def _number_of_at_least(text: str, least: int) -> int:
    if not text.isdecimal() or len(text) <= _MOST_DIGITS and int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    if len(text) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"{text:.40} is too large: it has {len(text)} digits")
    return int(text)


def above_zero(text: str) -> float:
    """A number above 0, and finite."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def byte_count(text: str) -> float:
    """Bytes, with a unit or without: 80e9, 80GB, 80GiB."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) *(?:([KMGT])(i?))?B?", text, re.IGNORECASE)
    try:
        value = float(match[1]) if match else -1.0
    except ValueError:
        value = -1.0
    if match is None or not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0: 80e9, 80GB or 80GiB")
    unit = (1024 if match[3] else 1000) ** ("KMGT".index(match[2].upper()) + 1 if match[2] else 0)
    return float(round(value * unit))


def port_number(text: str) -> int:
    """A port, or 0 for a free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)


def pattern(text: str) -> str:
    """A regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


def rank_count(text: str) -> int | str:
    """A number of ranks, or what to count: gpu, cpu, auto."""
    if text == "p":                                  # of -np 2, as mpirun has it
        raise argparse.ArgumentTypeError("-np is two flags here; did you mean -n?")
    return text if text in ("gpu", "cpu", "auto") else positive(text)


def host_count(text: str) -> int:
    """A number of hosts. A range, which torchrun takes, is given in ranks here."""
    fewest, _, most = text.partition(":")
    if most:
        have = "1 host has" if fewest == "1" else f"{fewest} hosts have"
        raise argparse.ArgumentTypeError(f"{text!r} is a range; try: --nnodes {most} --min-ranks R, where {have} R "
                                         "ranks")
    return positive(text)


def sizes_in_bytes(text: str) -> tuple[int, ...]:
    """Bytes of a parameter, its gradient, its optimizer state."""
    sizes = text.split(",")
    if len(sizes) != 3 or not all(size.isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers of bytes: 2,2,12")
    return tuple(map(int, sizes))


# -------------------------------------------------------------------------------------------- what commands share


def add_json(to: Any, what: str = "print one JSON object") -> None:
    """Add --json, for programs that read the output."""
    to.add_argument("--json", action="store_true", help=what)


def add_flag(to: Any, *names: str, **how: Any) -> None:
    """Add an option with a second spelling, as torchrun has it, that the help leaves out: --a_b for --a-b."""
    to.add_argument(*names, **how)
    others = [f"--{name[2:].replace('-', '_')}" for name in names if "-" in name[2:]]
    if others:
        to.add_argument(*others, **{"dest": others[0][2:], **how, "help": argparse.SUPPRESS,
                                    "default": argparse.SUPPRESS})


def add_model_sizes(to: Any) -> None:
    """Add the options that describe a model."""
    to.add_argument("--model", choices=["gpt"], help="a model, described by its sizes")
    for name, of, what in (("layers", at_most_100_000, "number of layers"), ("hidden", positive, "hidden size"),
                           ("heads", at_most_100_000, "attention heads"),
                           ("seq", positive, "sequence length, in tokens")):
        to.add_argument(f"--{name}", type=of, metavar="N", help=what)
    to.add_argument("--vocab", type=positive, metavar="N", help="vocabulary size (default 51200)")
    to.add_argument("--flash", action="store_true", help="use flash attention, which keeps no seq x seq matrix")


def add_parallelism(to: Any, recompute: str) -> None:
    """Add the options that say how a model is spread."""
    for name, what in (("dp", "data"), ("tp", "tensor"), ("pp", "pipeline")):
        to.add_argument(f"--{name}", type=positive, default=1, metavar="N", help=f"{what}-parallel ranks (default 1)")
    to.add_argument("--sp", action="store_true", help="split the sequence along the tensor-parallel ranks")
    to.add_argument("--zero", type=int, choices=range(4), default=0, help="ZeRO stage over dp (default 0)")
    to.add_argument("--recompute", choices=RECOMPUTED, default=recompute,
                    help=f"which activations to recompute in the backward pass (default {recompute})")


# -------------------------------------------------------------------------------------------------- the commands


def new_options(of: argparse.ArgumentParser) -> None:
    """globaltensor new"""
    of.add_argument("folder", help="the project's folder, which must be new or empty; its last part is the project's "
                    "name")
    add_json(of, "print the folder and its files as one JSON object")


def run_options(of: argparse.ArgumentParser) -> None:
    """globaltensor run"""
    of.usage = ("globaltensor run [-n N] [--nnodes N --rdzv-endpoint HOST:PORT] [--max-restarts N [--min-ranks N]] "
                "[--grace SECONDS] [-m] program [argument ...]")
    of.allow_abbrev = False                          # a program's own --log is not short for --log-dir
    add_flag(of, "-n", "--nproc-per-node", dest="ranks", type=rank_count, metavar="N",
             help="ranks on this host (default: one per GPU, or 2 without GPUs)")
    add_flag(of, "--grace", type=positive, default=30, metavar="SECONDS",
             help="time between SIGTERM or Ctrl-C and SIGKILL, in which ranks can save their work (default 30)")
    add_flag(of, "--shutdown-timeout", dest="grace", type=positive, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add_flag(of, "--start-method", choices=("spawn", "fork"), default="spawn",
             help="fork: from one process that has imported torch, for many ranks (default spawn)")
    add_flag(of, "--max-restarts", type=natural, default=0, metavar="N",
             help="restart the program up to N times when a rank fails; gt.resume continues from the last checkpoint "
             "(default 0)")
    add_flag(of, "--min-ranks", type=positive, metavar="N", help="on a restart, leave out ranks or hosts that failed, "
             "as long as N ranks of the job remain (default: restart all)")
    _add_torchrun_flags(of)
    of.add_argument("-m", "--module", action="store_true", help="run a module, as python -m does")
    hosts = of.add_argument_group("several hosts", "Run the same command on each host.")
    add_flag(hosts, "--nnodes", type=host_count, default=1, metavar="N", help="number of hosts (default 1)")
    add_flag(hosts, "--rdzv-endpoint", metavar="HOST:PORT", help="where the hosts meet: the address of one of them")
    add_flag(hosts, "--rdzv-id", default="globaltensor", metavar="ID",
             help="a name that tells apart jobs that meet at one endpoint")
    add_flag(hosts, "--node-rank", type=natural, metavar="I", help="this host's number, from 0; host 0 must be the "
             "endpoint's (default: hosts are numbered by their names)")
    add_flag(hosts, "--local-addr", metavar="ADDRESS", help="this host's address, if its name does not resolve to it")
    of.add_argument("program", help="a Python file; with -m, a module")
    of.add_argument("args", nargs=argparse.REMAINDER, metavar="argument", help="the program's own arguments")


def _add_torchrun_flags(of: argparse.ArgumentParser) -> None:
    """Add torchrun's other flags, which the help leaves out."""
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS}
    add_flag(of, "--standalone", action="store_true", **hidden)
    add_flag(of, "--rdzv-backend", choices=("c10d", "static"), **hidden)
    add_flag(of, "--master-addr", **hidden)
    add_flag(of, "--master-port", type=positive, default=29500, **hidden)
    for flag in _REFUSED:
        add_flag(of, flag, action=_Refused, nargs="?", **hidden)


class _Refused(argparse.Action):
    """A flag that would do nothing here."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        flag = option_string or self.option_strings[0]
        parser.error(f"{flag} is torchrun's, and does nothing here\n  try: {_REFUSED[flag.replace('_', '-')]}")


def ps_options(of: argparse.ArgumentParser) -> None:
    """globaltensor ps"""
    add_json(of, "print a JSON list with one object per job")


def stacks_options(of: argparse.ArgumentParser) -> None:
    """globaltensor stacks"""
    add_json(of, "print a JSON list with one object per job")


def info_options(of: argparse.ArgumentParser) -> None:
    """globaltensor info"""
    add_json(of)


def doctor_options(of: argparse.ArgumentParser) -> None:
    """globaltensor doctor"""
    add_json(of)


def bench_options(of: argparse.ArgumentParser) -> None:
    """globaltensor bench"""
    of.usage = "globaltensor bench [option ...] [name ...]"
    of.add_argument("names", nargs="*", metavar="name", help="the benchmarks to run (default: all)")
    add_json(of, "print one JSON object per benchmark, with all numbers and the machine")
    of.add_argument("--list", action="store_true", help="list the benchmarks, and run none")
    own = of.add_argument_group("options of some benchmarks")
    own.add_argument("--quick", action="store_true", default=None, help="small sizes and few runs: only to see that it "
                     "works")
    own.add_argument("--ranks", type=positive, metavar="N",
                     help="processes (boxing: default 2; pipeline: default 2, then 4; plan: 1, 2, then 4)")
    own.add_argument("--fresh", action="store_true", default=None,
                     help="write the data anew before each move (boxing)")
    own.add_argument("--hidden", type=positive, metavar="N",
                     help="hidden size of the model (train: default 128, then 256; pipeline: default 256)")
    own.add_argument("--minutes", type=above_zero, metavar="N", help="how long to disturb training (soak; default 2)")
    own.add_argument("--seed", type=natural, metavar="N", help="seed of the moments of disturbance (soak; default 0)")
    own.add_argument("--min-ranks", type=positive, metavar="N",
                     help="leave out ranks that fail, as long as N remain (soak; default: restart all)")
    own.add_argument("--runs", type=positive, metavar="N", help="runs of each fault (faults; default 20)")
    own.add_argument("--rows", type=pattern, metavar="REGEX",
                     help="run only the faults whose names match (faults; default: all)")
    own.add_argument("--plot", metavar="FILE", help="draw the measured steps above the simulated ones (pipeline)")


def simulate_options(of: argparse.ArgumentParser) -> None:
    """globaltensor simulate"""
    of.usage = "globaltensor simulate [option ...]"
    of.add_argument("--schedule", metavar="NAME", help=f"{', '.join(SCHEDULES)}, or a file with your own")
    of.add_argument("--list", action="store_true", help="list the schedules, and exit")
    of.add_argument("--chunks", type=positive, metavar="V", help="stages per rank, for schedules that leave it open")
    add_json(of)
    of.add_argument("--text", action="store_true", help="also print the timetable as text")
    of.add_argument("--plot", metavar="FILE", help="draw the timetable (needs matplotlib)")
    of.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    of.add_argument("--report", type=Path, metavar="FILE", help="write a page for a browser: timeline, bubbles, memory")
    times = of.add_argument_group("with given times")
    times.add_argument("--stages", type=positive, metavar="P", help="ranks of the pipeline")
    times.add_argument("--micro-batches", type=positive, metavar="M", help="micro-batches per step")
    times.add_argument("--times", metavar="TF,TB,TW,TCOMM",
                       help="numbers or fractions, such as 18.522 or 1/3; TB does not include TW, and TCOMM is 0 "
                       "where there are three")
    times.add_argument("--weight-share", default="1", metavar="SHARE", help="the share of the activations that must be "
                       "kept from the input gradient to the weight gradient (default 1)")
    own = of.add_argument_group("with a model")
    add_model_sizes(own)
    add_parallelism(own, recompute="full")
    own.add_argument("--micro-batch", type=positive, default=1, metavar="N", help="samples per micro-batch (default 1)")
    own.add_argument("--global-batch", type=positive, metavar="N", help="samples per step, over all pipelines")
    own.add_argument("--cluster", default="dgx-a100", metavar="NAME", help=CLUSTERS)


def report_options(of: argparse.ArgumentParser) -> None:
    """globaltensor report"""
    of.add_argument("run", type=Path, metavar="RUN", help="what gt.record(file=...) wrote: .json or .json.gz")
    of.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (default: beside RUN, as .html)")
    add_json(of, "print what was written as one JSON object")


def play_options(of: argparse.ArgumentParser) -> None:
    """globaltensor play"""
    of.usage = "globaltensor play [option ...]"
    of.add_argument("--port", type=port_number, default=0, metavar="N", help="port of the page (default: a free one)")
    of.add_argument("--export", type=Path, metavar="FOLDER", help="write the examples as pages, and exit")
    add_json(of, "print the address, or with --export the pages, as one JSON object")


def memory_options(of: argparse.ArgumentParser) -> None:
    """globaltensor memory"""
    of.usage = "globaltensor memory [option ...]"
    of.add_argument("--params", metavar="N", help="number of parameters: 7.5e9, or 7.5B")
    add_model_sizes(of)
    of.add_argument("--micro-batch", type=positive, default=1, metavar="N", help="samples per micro-batch (default 1)")
    of.add_argument("--bytes", type=sizes_in_bytes, default=(2, 2, 12), metavar="P,G,O",
                    help="bytes of a parameter, its gradient and its optimizer state (default 2,2,12)")
    add_json(of, "print one JSON object, with sizes in bytes")
    add_parallelism(of, recompute="none")


def plan_options(of: argparse.ArgumentParser) -> None:
    """globaltensor plan"""
    of.usage = "globaltensor plan [option ...]"
    of.add_argument("--program", metavar="FILE.py:NAME", help="a function that gives (module, example batch, loss)")
    of.add_argument("--evaluate", metavar="FILE", help="a CSV file with one plan per row")
    of.add_argument("--cluster", default="dgx-a100", metavar="NAME", help=CLUSTERS)
    add_json(of, "print the strategy as one JSON object; with --evaluate, a list of objects")
    own = of.add_argument_group("a model")
    add_model_sizes(own)
    own.add_argument("--devices", type=positive, metavar="N", help="devices in the cluster; some may stay idle")
    own.add_argument("--global-batch", type=positive, metavar="N", help="samples per step")
    own.add_argument("--memory", type=byte_count, metavar="BYTES",
                     help="memory per device, such as 80e9, 80GB or 80GiB (default: the cluster's)")
    own.add_argument("--seconds", type=above_zero, default=60.0, metavar="N",
                     help="stop after N seconds, with the best plan so far and its bound (default 60)")
    own.add_argument("-o", "--save", metavar="FILE", help="write the strategy to FILE, for gt.Strategy.load")
    own.add_argument("--explain", action="store_true", help="compare each choice with the fastest plan without it")
    own.add_argument("--plot", metavar="FILE", help="draw stages, timetable and candidates to FILE, a .png, .svg or "
                     ".pdf (needs matplotlib)")
    fixed = of.add_argument_group("choices that you make yourself")
    for name, what in (("dp", "data-parallel ranks"), ("tp", "tensor-parallel ranks"), ("pp", "pipeline ranks"),
                       ("chunks", "stages per rank"), ("micro-batch", "samples per micro-batch")):
        fixed.add_argument(f"--{name}", type=positive, metavar="N", help=what)
    fixed.add_argument("--zero", type=int, choices=range(4), help="ZeRO stage over dp")
    fixed.add_argument("--recompute", choices=RECOMPUTED, help="which activations to recompute in the backward pass")
    fixed.add_argument("--schedule", choices=SCHEDULES, metavar="NAME",
                       help=f"the pipeline schedule: {', '.join(SCHEDULES)}")
    fixed.add_argument("--sp", action=argparse.BooleanOptionalAction,
                       help="split the sequence along the tensor-parallel ranks, or do not")
    fixed.add_argument("--pin", action="append", metavar="ROW", help="a row that every plan of a --program has, such "
                       "as 'blocks.*.up.weight=tp:S(0)'; may be given again")


def calibrate_options(of: argparse.ArgumentParser) -> None:
    """globaltensor calibrate"""
    of.usage = "globaltensor calibrate FILE [option ...]\n       globaltensor calibrate --here [option ...]"
    of.add_argument("rows", nargs="?", metavar="FILE", help="a CSV file with a plan and its measured_ms in each row")
    of.add_argument("--here", action="store_true", help="measure this machine instead, in less than a minute")
    of.add_argument("--ranks", type=positive, metavar="N", help="with --here: how many ranks measure, each a process "
                    "(default: one per core)")
    of.add_argument("--cluster", metavar="NAME", help=f"with FILE: where to start from: {CLUSTERS}")
    of.add_argument("--name", help="a name for the result (default: that of --cluster, or here)")
    add_json(of, "print the cluster alone, and no summary to stderr")


def recipe_options(of: argparse.ArgumentParser) -> None:
    """globaltensor recipe"""
    of.usage = "globaltensor recipe {slurm,k8s,ray} [--nodes N] [--gpus N] [--image NAME] program [argument ...]"
    of.add_argument("cluster", choices=("k8s", "ray", "slurm"), help="what schedules the cluster's jobs")
    of.add_argument("--nodes", type=positive, default=1, metavar="N", help="number of hosts (default 1)")
    of.add_argument("--gpus", type=positive, metavar="N", help="GPUs per host, one rank each (default: one rank per "
                    "host)")
    of.add_argument("--image", metavar="NAME", help="k8s: an image that contains the program, torch and globaltensor "
                    "(default python:3.12)")
    of.add_argument("program", help="a Python file, at its path on the cluster's hosts")
    of.add_argument("args", nargs=argparse.REMAINDER, metavar="argument", help="the program's own arguments")


def completion_options(of: argparse.ArgumentParser) -> None:
    """globaltensor completion"""
    of.add_argument("shell", choices=SHELLS, help="the shell to complete for")


OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "new": new_options, "run": run_options, "ps": ps_options, "stacks": stacks_options, "info": info_options,
    "doctor": doctor_options, "bench": bench_options, "simulate": simulate_options, "report": report_options,
    "play": play_options, "memory": memory_options,
    "plan": plan_options, "calibrate": calibrate_options, "recipe": recipe_options, "completion": completion_options,
}
