"""torchrun's flags, in both of its spellings: what they are here, and what to type for those that are nothing.

    --nproc_per_node, --nproc-per-node     every flag with a - may have _ instead
    --nproc-per-node gpu | auto | cpu      a rank per GPU; the default; a rank per core
    --master-addr HOST --master-port 29500     --rdzv-endpoint HOST:29500
    --standalone, --rdzv-backend c10d | static     what is done anyway
    --shutdown-timeout SECONDS             --grace SECONDS
"""
from __future__ import annotations

import argparse
from typing import Any

from globaltensor.cli.info import cores
from globaltensor.cli.problem import Problem, positive
from globaltensor.runtime.accelerators import accelerator_count

_PLAIN = "torchrun, which runs the same program"
_OUTPUT = "globaltensor run ... 2>&1 | tee FILE: all ranks write to one output, and the first error is shown once"
# flag -> what to type instead
_REFUSED = {
    "--rdzv-conf": "--rdzv-endpoint HOST:PORT alone: the hosts wait for each other as long as it takes",
    "--monitor-interval": "nothing: ranks are looked at ten times a second",
    "--start-method": "nothing: each rank is a process of its own",
    "--event-log-handler": _PLAIN, "--logs-specs": _PLAIN, "--numa-binding": _PLAIN, "--signals-to-handle": _PLAIN,
    "--virtual-local-rank": _PLAIN, "--role": "nothing: all ranks have one role",
    "--no-python": "the Python program itself, or torchrun --no-python for another one",
    "--run-path": "globaltensor run program.py: it is run as a script",
    "--log-dir": _OUTPUT, "--redirects": _OUTPUT, "-r": _OUTPUT, "--tee": _OUTPUT, "-t": _OUTPUT,
    "--local-ranks-filter": _OUTPUT, "--duplicate-stdout-filters": _OUTPUT, "--duplicate-stderr-filters": _OUTPUT,
}


def add_flag(to: Any, *names: str, **how: Any) -> None:
    """Add an option to a parser or group of options, with a second spelling that its help leaves out."""
    to.add_argument(*names, **how)
    others = [f"--{name[2:].replace('-', '_')}" for name in names if "-" in name[2:]]
    if others:
        to.add_argument(*others, **{"dest": others[0][2:], **how, "help": argparse.SUPPRESS,
                                    "default": argparse.SUPPRESS})


def add_torchrun_flags(of: argparse.ArgumentParser) -> None:
    """Add the flags that are not ours, which the help leaves out."""
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
        known = flag.replace("_", "-")
        parser.error(f"{flag} is torchrun's, and does nothing here\n  try: {_REFUSED[known]}")


def rank_count(text: str) -> int:
    """The type of --nproc-per-node: a number, or what to count."""
    if text == "gpu" and not accelerator_count():
        raise argparse.ArgumentTypeError("'gpu' on a host without one; a rank can have a core instead: cpu")
    counts = {"gpu": accelerator_count, "cpu": cores, "auto": lambda: accelerator_count() or 2}
    return counts[text]() if text in counts else positive(text)


def host_count(text: str) -> int:
    """The type of --nnodes. A range of torchrun's is said in ranks here."""
    fewest, _, most = text.partition(":")
    if most:
        raise argparse.ArgumentTypeError(f"{text!r} is a range; try: --nnodes {most} --min-ranks R, where {fewest} "
                                         "hosts have R ranks")
    return positive(text)


def translate(chosen: argparse.Namespace) -> None:
    """Put what torchrun's flags mean into our own. Raises Problem where they contradict each other."""
    if chosen.standalone and (chosen.nnodes > 1 or chosen.rdzv_endpoint):
        raise Problem("--standalone is for one host\n  try: globaltensor run -n N program.py, without --nnodes and "
                      "--rdzv-endpoint")
    if chosen.master_addr and not chosen.rdzv_endpoint and chosen.nnodes > 1:
        chosen.rdzv_endpoint = f"{chosen.master_addr}:{chosen.master_port}"
