"""Which cases of tests/moves.py torch's DTensor runs without communication, and rightly, as JSON: [op, layouts, debt].

The debt is the bytes that reducing its pending results would move.

Its process group is torch's fake one, which moves nothing: what counts is which collectives it is asked for. So each
rank can be run after the other; what they hold is put together, and compared with what plain torch gives.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Iterator
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
from rule_samples import VALUELESS

Parts = list[tuple[torch.Tensor, object]]            # of every result what a rank holds, and how it is laid out


def lay(t: torch.Tensor, sbp: str, mesh: object, rank: int) -> DTensor:
    """The DTensor of which a rank has its part, or its term."""
    if sbp.startswith("S"):
        dim = int(sbp[2])
        chunks = t.chunk(moves.RANKS, dim)
        local, how = chunks[rank] if rank < len(chunks) else t.narrow(dim, 0, 0), Shard(dim)
    else:
        local, how = (t * (0.25, 0.75)[rank], Partial()) if sbp == "P" else (t, Replicate())
    return DTensor.from_local(local.contiguous(), mesh, [how], run_check=False, shape=t.shape, stride=t.stride())


def quiet_cases(rank: int) -> Iterator[tuple[str, tuple[str, ...], Parts | None]]:
    """Every case that DTensor takes: what the rank then holds, None where it communicates."""
    dist.init_process_group("fake", rank=rank, world_size=moves.RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (moves.RANKS,))
    for name, func, arguments, tensors, layouts in moves.cases():
        for sbps in layouts:
            args, kwargs = arguments([lay(t.clone(), sbp, mesh, rank) for t, sbp in zip(tensors, sbps)])
            watch = CommDebugMode()
            try:
                with watch, torch.no_grad():
                    results = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, DTensor)]
            except Exception:                        # of whatever kind: it does not run the case
                continue
            quiet = watch.get_total_counts() == 0
            yield name, sbps, [(t.to_local(), t.placements[0]) for t in results] if quiet else None
    dist.destroy_process_group()


def joined(parts: list[torch.Tensor], how: object) -> torch.Tensor:
    """The value of which ranks hold these parts."""
    if isinstance(how, Shard):
        return torch.cat(parts, how.dim)
    if not isinstance(how, Partial):
        return parts[0]
    reduce = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}.get(how.reduce_op)
    return reduce(*parts) if reduce else sum(parts) / len(parts)


def is_right(name: str, results: list[torch.Tensor], of_ranks: list[Parts]) -> bool:
    """Do the ranks hold what plain torch gives?"""
    if name in VALUELESS or any(type(how) not in (Shard, Replicate, Partial) for _, how in of_ranks[0]):
        return True                                  # its pending norms have a way of their own
    values = [joined([parts[k][0] for parts in of_ranks], how) for k, (_, how) in enumerate(of_ranks[0])]
    return len(values) == len(results) and all(
        a.shape == b.shape and torch.allclose(a.to(torch.complex128), b.to(torch.complex128), equal_nan=True)
        for a, b in zip(values, results))


def main() -> None:
    of_ranks = [{(name, sbps): parts for name, sbps, parts in quiet_cases(rank)} for rank in range(moves.RANKS)]
    quiet, tried, wrong = [], 0, []
    for name, func, arguments, tensors, layouts in moves.cases():
        tried += len(layouts)
        for case in [(name, sbps) for sbps in layouts]:
            parts = [known.get(case) for known in of_ranks]
            if None in parts:
                continue
            args, kwargs = arguments([t.clone() for t in tensors])
            results = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            if not is_right(name, results, parts):
                wrong.append(case)
                continue
            quiet.append((*case, sum(t.numel() * t.itemsize for t, how in parts[0] if how.is_partial())))
    print(json.dumps({"tried": tried, "refused": tried - len(of_ranks[0]), "wrong": wrong, "quiet": quiet}))


if __name__ == "__main__":
    main()
