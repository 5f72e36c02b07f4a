"""Check what an installation lacks: compiler, native code, torch, GPUs and the kernels for them; and say what to type.

Kernels for accelerators are compiled where they were not, and tried on each device. The exit code is 1 where something
is wrong or missing that would make programs faster.
"""
from __future__ import annotations

import argparse
import json
import platform
import shutil
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist

import globaltensor
from globaltensor.runtime import device_kernels, native
from globaltensor.runtime.accelerators import GLOO, accelerator, accelerator_count, engine_of
from globaltensor.runtime.kernel_build import find_nvcc
from globaltensor.runtime.text_table import aligned


class Finding(NamedTuple):
    """What is there of one thing; `fix` says what to type where something is missing."""

    name: str
    state: str
    fix: str = ""


def options(of: argparse.ArgumentParser) -> None:
    """The command line of `globaltensor doctor`."""
    of.add_argument("--json", action="store_true", help="as one JSON object")


def command(chosen: argparse.Namespace) -> int:
    """Print the findings."""
    findings = [*_software(), *_devices()]
    if chosen.json:
        print(json.dumps({one.name: {"state": one.state, "try": one.fix} for one in findings}, indent=2))
    else:
        print("\n".join(aligned([(one.name, one.state) for one in findings])))
        for one in findings:
            if one.fix:
                print(f"\n{one.name}: {one.state}\n  try:   {one.fix}")
    return int(any(one.fix for one in findings))


def _software() -> list[Finding]:
    cuda = f", built for CUDA {torch.version.cuda}" if torch.version.cuda else ", built without CUDA"
    trouble = native.why_slow()
    gxx, nvcc = shutil.which("g++"), find_nvcc()
    return [Finding("globaltensor", f"{globaltensor.__version__}, Python {platform.python_version()}"),
            Finding("torch", torch.__version__ + cuda),
            Finding("compiler", gxx or "no g++, which is needed only where native code is built"),
            Finding("native code", trouble or "used", native.how_to_build() if trouble and native.WANTED else ""),
            Finding("nvcc", nvcc or "none, which is needed only for the kernels for GPUs")]


def _devices() -> list[Finding]:
    type = accelerator()
    if type is None:
        return [Finding("accelerators", "torch sees none")]
    engine = engine_of(type) if dist.is_available() else GLOO
    between = "through the CPU: torch has no engine for them" if engine == GLOO else f"by {engine}"
    findings = [Finding("accelerators", f"{accelerator_count()} of type {type}"), Finding("between processes", between)]
    if not device_kernels.WANTED:
        return [*findings, Finding("kernels", "turned off by GLOBALTENSOR_GPU_KERNELS=0 or GLOBALTENSOR_NATIVE=0")]
    if not device_kernels.are_provided(type):
        return [*findings, Finding("kernels", f"none for {type} devices: torch ops do their work")]
    return [*findings, *(_kernels_on(torch.device(type, i)) for i in range(accelerator_count()))]


def _kernels_on(device: torch.device) -> Finding:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        verdict = device_kernels.kernel_verdict(device)
    name = f"kernels on {device}"
    if verdict is None:
        missing = device_kernels.why_missing(device.type)
        return Finding(name, missing.why, missing.fix) if missing else Finding(name, f"{caught[0].message}")
    fix = "GLOBALTENSOR_GPU_KERNELS=0 to use none of them; and please report this" if verdict.failed else ""
    return Finding(name, str(verdict), fix)
