"""What the benchmarks share: measuring in turns, and printing rows for people or for machines."""
from __future__ import annotations

import json as _json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


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


def show(title: str, rows: list[dict[str, Any]], json: bool) -> None:
    """One JSON object per benchmark, or a table."""
    if json:
        print(_json.dumps({"title": title, "rows": rows}))
        return
    print(title)
    if not rows:
        return
    text = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    heads = list(rows[0])
    widths = [max(len(h), *(len(line[i]) for line in text)) for i, h in enumerate(heads)]
    for line in [heads, *text]:
        print("  " + "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths))))
