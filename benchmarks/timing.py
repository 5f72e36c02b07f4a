"""What the benchmarks share: measuring in turns, and printing rows for people or for machines."""
from __future__ import annotations

import json as _json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from globaltensor.runtime.text_table import aligned


def alternating(cases: Sequence[Callable[[], Any]], calls: int = 300, rounds: int = 15) -> list[float]:
    """Median microseconds per call of each case, taken in turns so that the machine's drift hits all alike."""
    for case in cases:
        for _ in range(max(calls // 10, 3)):
            case()
    found: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        for case, times in zip(cases, found):
            began = time.perf_counter()
            for _ in range(calls):
                case()
            times.append((time.perf_counter() - began) / calls * 1e6)
    return [statistics.median(times) for times in found]


def dtensor_mesh(shape: tuple[int, ...]) -> Any:
    """A torch DTensor mesh of that shape over torch's fake process group, which moves nothing."""
    import math

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=math.prod(shape), store=FakeStore())
    return init_device_mesh("cpu", shape)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """On what it was measured."""
    import torch

    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cores": cores(), "cpu": models[0] if models else platform.processor() or platform.machine(),
            "torch": torch.__version__}


def show(title: str, rows: list[dict[str, Any]], json: bool, tables: Sequence[Sequence[str]] = (),
         **more: Any) -> None:
    """One JSON object with all there is, or tables of the rows: one of all columns, or one of each list of them, with
    the rows that have any of these."""
    if json:
        print(_json.dumps({"title": title, "machine": machine(), **more, "rows": rows}))
        return
    print(title)
    print("  {cores} cores of {cpu}, torch {torch}".format(**machine()))
    for name, value in more.items():
        print(f"  {name}: {value}")
    for columns in tables or [list(rows[0])]:
        _table(columns, [[_cell(row.get(column)) for column in columns] for row in rows
                         if not row.keys().isdisjoint(columns)])


def _table(heads: Sequence[str], lines: list[list[str]]) -> None:
    """The first column to the left, the others to the right."""
    print()
    for line in aligned([heads, *lines], right=range(1, len(heads))):
        print(f"  {line}")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
