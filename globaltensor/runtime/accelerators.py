"""The accelerators of this host, of whatever kind: what torch tells of GPUs, XPUs, NPUs, and of backends of others.

No kind is named here. `torch.accelerator` knows which there is, each backend has a module of its own
(`torch.get_device_module`), and torch.distributed knows which engine moves its tensors between processes.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

GLOO = "gloo"


def accelerator() -> str | None:
    """The type of the devices beside the CPU, such as "cuda", "xpu" or one of a backend of its own; None without."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def accelerator_count() -> int:
    """How many of them this host has."""
    return torch.accelerator.device_count() if accelerator() is not None else 0


def engine_of(type: str) -> str:
    """What torch.distributed moves tensors on such devices with, such as "nccl" or "xccl"; "gloo" where it has nothing
    for them, and they travel through the CPU."""
    engine = dist.Backend.default_device_backend_map.get(type, GLOO) if dist.is_available() else GLOO
    return engine if dist.is_available() and dist.is_backend_available(engine) else GLOO


def engine_class(engine: str) -> Any:
    """The class of its groups; None for an engine that is not torch's own. Only groups of torch's own are made here."""
    return getattr(dist.distributed_c10d, f"ProcessGroup{engine.upper()}", None)


def engine_in(backends: str, type: str | None) -> str:
    """The engine for devices of a type in what `dist.get_backend_config()` says, such as "cpu:gloo,cuda:nccl"."""
    return dict(pair.split(":") for pair in backends.split(",") if ":" in pair).get(type or "", GLOO)


def is_capturing(type: str) -> bool:
    """Does the current stream of such a device note what it is given, for a graph, instead of doing it?"""
    if type in ("cpu", "meta"):
        return False
    capturing = getattr(torch.get_device_module(type), "is_current_stream_capturing", None)
    return capturing is not None and capturing()


def before_captures(do: Callable[[], None]) -> None:
    """Call this whenever a stream is about to be captured: inside, nothing that began before can be waited for."""
    for module, name in ((torch.cuda, "CUDAGraph"), (torch.xpu, "XPUGraph"), (torch.accelerator, "Graph")):
        if (graph := getattr(module, name, None)) is not None:           # which this torch may not have
            graph.capture_begin = _doing_first(do, graph.capture_begin)


def _doing_first(do: Callable[[], None], begin: Callable[..., None]) -> Callable[..., None]:
    @wraps(begin)
    def capture_begin(graph: Any, *args: Any, **options: Any) -> None:
        do()
        begin(graph, *args, **options)

    return capture_begin


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Do what is inside on this stream, and what comes next on the current one of its device after it."""
    if stream is None or (current := torch.accelerator.current_stream(stream.device)) == stream:
        yield
        return
    index = torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)             # which makes its device the current one
    try:
        yield
    finally:
        torch.accelerator.set_stream(current)
        torch.accelerator.set_device_index(index)
    current.wait_stream(stream)
