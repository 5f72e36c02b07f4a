"""torchrun's flags, in both of its spellings: what they mean here.

    --nproc_per_node, --nproc-per-node     every flag with a - may have _ instead
    --nproc-per-node gpu | auto | cpu      a rank per GPU; the default; a rank per core
    --master-addr HOST --master-port 29500     --rdzv-endpoint HOST:29500
    --standalone, --rdzv-backend c10d | static     what is done anyway
    --shutdown-timeout SECONDS             --grace SECONDS

options.py lists those that mean nothing here, with what to type instead.
"""
from __future__ import annotations

import argparse
import importlib

from globaltensor.cli.cores import cores
from globaltensor.cli.problem import Problem


def accelerators() -> int:
    """How many this host has. Asked for only where the number of ranks depends on it, as it imports torch."""
    return int(importlib.import_module("globaltensor.runtime.accelerators").accelerator_count())


def translate(chosen: argparse.Namespace) -> None:
    """Put what torchrun's flags mean into our own. Raises Problem where they contradict each other, or this host."""
    if chosen.ranks == "gpu" and not accelerators():
        raise Problem("-n gpu on a host without a GPU\n  try: -n cpu, for a rank per core")
    if isinstance(chosen.ranks, str):
        chosen.ranks = {"cpu": cores(), "gpu": accelerators()}.get(chosen.ranks)
    if chosen.standalone and (chosen.nnodes > 1 or chosen.rdzv_endpoint):
        raise Problem("--standalone is for one host\n  try: globaltensor run -n N program.py, without --nnodes and "
                      "--rdzv-endpoint")
    if chosen.master_addr and not chosen.rdzv_endpoint and chosen.nnodes > 1:
        chosen.rdzv_endpoint = f"{chosen.master_addr}:{chosen.master_port}"
