"""How long does it take to decide how an op runs on a shape that was never seen, all else cached?

Milliseconds of the first call on a new shape, less a call on a known one, medians over shapes; on placements of 1 and
of 4 axes, beside torch DTensor over a process group that moves nothing. Targets: 0.2 ms on 1 axis, 1 ms on 4 axes.
"""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import globaltensor as gt
from benchmarks.timing import dtensor_mesh, show

OPS: dict[str, Callable[[Any, Any], Any]] = {"mm": lambda x, w: x @ w, "add": lambda x, w: x + x,
                                             "sum": lambda x, w: x.sum(0), "softmax": lambda x, w: x.softmax(1)}
WARM = 6                                             # shapes that warm up everything that does not depend on the shape


def first_less_known(op: Callable[[Any, Any], Any], make: Callable[[torch.Tensor, int], Any], shapes: int) -> float:
    """Milliseconds."""
    times = []
    for k in range(WARM + shapes):
        m, n = 16 * (5 + k), 16 * (3 + k % 7)
        x, w = make(torch.randn(m, n), 0), make(torch.randn(n, m), 1)
        laps = []
        for _ in range(4):
            began = time.perf_counter()
            op(x, w)
            laps.append(time.perf_counter() - began)
        if k >= WARM:
            times.append((laps[0] - statistics.median(laps[1:])) * 1e3)
    return statistics.median(times)


def verify(op: Callable[[Any, Any], Any], make: Callable[[torch.Tensor, int], Any]) -> None:
    """Raise where the op does not give what plain torch gives."""
    x, w = torch.randn(48, 32), torch.randn(32, 48)
    torch.testing.assert_close(op(make(x, 0), make(w, 1)).full_tensor(), op(x, w))


def main(json: bool = False, quick: bool = False) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    gt.init(ranks=16)
    mesh = dtensor_mesh((2, 2, 2, 2))
    rows = []
    for axes in (1, 4):
        where = gt.placement("cpu", torch.arange(2 ** axes).reshape((2,) * axes))
        part = mesh if axes == 4 else mesh["mesh_dim_0"] if mesh.mesh_dim_names else dtensor_mesh((16,))
        split, whole = gt.sbp.split(0), gt.sbp.broadcast

        def ours(t: torch.Tensor, which: int) -> Any:
            return gt.from_full(t, where, [split if a == 0 and not which else whole for a in range(axes)])

        def theirs(t: torch.Tensor, which: int) -> Any:
            return distribute_tensor(t, part, [Shard(0) if a == 0 and not which else Replicate()
                                               for a in range(part.ndim)])

        for name, op in OPS.items():
            verify(op, ours)
            shapes = 1 if quick else 18
            rows.append({"op": name, "axes": axes, "globaltensor ms": first_less_known(op, ours, shapes),
                         "dtensor ms": first_less_known(op, theirs, shapes)})
    show("decision: milliseconds for a new shape", rows, json)


if __name__ == "__main__":
    main()
