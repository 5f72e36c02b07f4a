"""Check the installation and this host, and say what to type where something is missing.

    globaltensor doctor                    this host
    globaltensor run -n 1 --nnodes 2 --rdzv-endpoint host0:29400 -m globaltensor.cli doctor
        the same command on each of 2 hosts: also compares their versions

Each line is one of these:

    ok         as it should be
    warning    works, but may be slow or fail later
    wrong      does not work, or is much slower than it could be: the exit code is 1

Kernels for GPUs are compiled if they were not, and tested on each device.
"""
from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

from globaltensor.runtime.text_table import aligned, terminal_columns


def command(chosen: argparse.Namespace) -> int:
    """Print the findings."""
    # imported here: the help of this command does not wait for torch
    findings = importlib.import_module("globaltensor.cli.findings").all_findings()
    if findings is None:                             # another rank prints those of all
        return 0
    print(json.dumps({one.name: {"status": one.status, "state": one.state, "try": one.fix} for one in findings},
                     indent=2) if chosen.json else _findings_text(findings))
    return int(any(one.status == "wrong" for one in findings))


def _findings_text(findings: list[Any]) -> str:
    columns = terminal_columns()
    lines = aligned([(one.status, one.name, one.state) for one in findings], columns=columns)
    for one in findings:
        if one.fix:
            lines += ["", *aligned([(f"{one.name}:", one.state)], gap=" ", columns=columns),
                      *aligned([("  try:  ", one.fix)], gap=" ", columns=columns)]
    counts = [f"{number} {status}" for status in ("wrong", "warning")
              if (number := sum(one.status == status for one in findings))]
    return "\n".join([*lines, "", ", ".join(counts).replace("2 warning", "2 warnings") or "all is well"])
