"""Which cases of tests/moves.py torch's DTensor runs without communication, as JSON: [op, layouts, debt] each.

The debt is the bytes that reducing its pending results would move.

Its process group is torch's fake one, which moves nothing: what counts is which collectives it is asked for.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent.parent))
import moves


def lay(t: torch.Tensor, sbp: str, mesh: object) -> DTensor:
    """The DTensor of which rank 0 has the first part, or a term."""
    if sbp.startswith("S"):
        dim = int(sbp[2])
        local, how = t.chunk(moves.RANKS, dim)[0], Shard(dim)
    else:
        local, how = t, Replicate() if sbp == "B" else Partial()
    return DTensor.from_local(local.contiguous(), mesh, [how], run_check=False, shape=t.shape, stride=t.stride())


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=moves.RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (moves.RANKS,))
    quiet, tried, refused = [], 0, 0
    for name, func, arguments, tensors, layouts in moves.cases():
        for sbps in layouts:
            tried += 1
            args, kwargs = arguments([lay(t.clone(), sbp, mesh) for t, sbp in zip(tensors, sbps)])
            watch = CommDebugMode()
            try:
                with watch, torch.no_grad():
                    results = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, DTensor)]
            except Exception:                        # of whatever kind: it does not run the case
                refused += 1
                continue
            if watch.get_total_counts() == 0:
                debt = sum(t.numel() * t.itemsize for t in results if t.placements[0].is_partial())
                quiet.append((name, sbps, debt))
    print(json.dumps({"tried": tried, "refused": refused, "quiet": quiet}))


if __name__ == "__main__":
    main()
