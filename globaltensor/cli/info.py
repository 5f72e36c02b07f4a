"""Show versions, devices, transports, and the world that a program would see.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

import globaltensor
from globaltensor.cli.cores import cores
from globaltensor.runtime import native
from globaltensor.runtime.accelerators import GLOO, accelerator, accelerator_count, engine_of
from globaltensor.runtime.text_table import aligned, terminal_columns
from globaltensor.runtime.units import bytes_text
from globaltensor.runtime.world import world_size


def command(chosen: argparse.Namespace) -> int:
    """Print what is here."""
    sections = facts()
    print(json.dumps(sections, indent=2) if chosen.json else _info_text(sections))
    return 0


def facts() -> dict[str, dict[str, Any]]:
    """What is here, by section."""
    return {"versions": _versions(), "host": _host(), "transports": _transports(), "world": _world()}


def _versions() -> dict[str, str]:
    versions = {"globaltensor": globaltensor.__version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "rich", "matplotlib"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    versions["native extension"] = "built" if native.torch_ext is not None else (
        "not built: plain torch does its work" if native.WANTED else "turned off by GLOBALTENSOR_NATIVE=0")
    return versions


def _host() -> dict[str, Any]:
    host: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}", "cores": cores(),
                            "memory": _memory_size(),
                            "accelerators": accelerator_count()}
    type = accelerator()
    for index in range(accelerator_count()):
        host[f"{type}:{index}"] = _device_text(f"{type}:{index}")
    return host


def _memory_size() -> str:
    """Of this host, where the system tells."""
    names = getattr(os, "sysconf_names", {})         # Windows has none
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= names.keys():
        return "not told by this system"
    return bytes_text(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _device_text(device: str) -> str:
    """Name and memory, where the backend's module tells them."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(device)
    memory = getattr(properties, "total_memory", None)
    return getattr(properties, "name", "there") + (f", {bytes_text(memory)}" if memory else "")


def _transports() -> dict[str, str]:
    """In the order in which they are tried."""
    built, type = dist.is_available(), accelerator()
    return {
        "memory of one process": "yes: a lone process drives all ranks",
        "shared memory": "no: it is native code" if native.torch_ext is None else "yes, between the ranks of a host",
        "torch.distributed, devices": "no: it needs accelerators, and a torch built for them" if type is None else
                                      "no: torch has no engine for them, so bytes go through the CPU"
                                      if engine_of(type) == GLOO else f"yes, by {engine_of(type)}",
        "torch.distributed gloo": "yes" if built and dist.is_gloo_available() else "no: torch was built without it",
    }


def _world() -> dict[str, Any]:
    """What a program started here finds; a launcher's process group is not started for that."""
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return {"ranks": int(os.environ["WORLD_SIZE"]), "driven by this process": os.environ["RANK"],
                "because": "a launcher set RANK and WORLD_SIZE"}
    size = world_size()
    why = ("GLOBALTENSOR_RANKS is set" if "GLOBALTENSOR_RANKS" in os.environ else
           "one for each accelerator" if accelerator_count() else
           "no launcher, no accelerator: GLOBALTENSOR_RANKS sets another")
    return {"ranks": size, "driven by this process": "all", "because": why}


def _info_text(sections: dict[str, dict[str, Any]]) -> str:
    lines = []
    for section, rows in sections.items():
        lines += [section, *aligned([(f"  {name}", str(value)) for name, value in rows.items()],
                                    columns=terminal_columns())]
    return "\n".join(lines)
