"""Boxings that the native kernel does: programs compiled once per spec and destination.

It takes what lies on CPUs, between ranks that share this process's memory or this host's. The rest, and everything
where the extension is not built, goes the way of `run.py`.
"""
from __future__ import annotations

from functools import lru_cache
from typing import Any

from globaltensor.boxings.kernel_program import DIMS, compile_program, direct_steps
from globaltensor.errors import DisagreementError, TransportError, where
from globaltensor.layouts.layout import Layout, Spec, spec
from globaltensor.runtime import deadlock
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.world import local_ranks_of, world


@lru_cache(20_000)
def find_boxing(of: Spec, dst: Layout) -> Any:
    """The native boxing of a tensor of this spec to `dst`; None where there is none."""
    if torch_ext is None or of.ndim > DIMS or not _near(of.layout, dst):
        return None
    here = world()
    first = 0 if here.single_process else min(here.host_peers)
    index = {r: r - first for r in (*of.placement.flat, *dst.placement.flat)}
    chain = direct_steps(of.layout, dst)
    steps = []
    for a, b in zip(chain, chain[1:]):
        program = compile_program(a, b, of.shape, of.dtype.itemsize, here.local_ranks, index, True)
        ranks = local_ranks_of(b.placement)
        steps.append({"regions": program.regions, "corners": program.corners, "op": program.op,
                      "partners": program.partners, "ties": program.ties, "result": spec(b, of.shape, None, of.dtype),
                      "sizes": [list(b.local_shape(of.shape, r)) for r in ranks]})
    return torch_ext.Boxing(of, steps, f"{' -> '.join(map(str, chain))} {of.shape} {of.dtype}")


def _near(src: Layout, dst: Layout) -> bool:
    """Can all ranks concerned read each other's memory?"""
    if src.placement.type != "cpu" or dst.placement.type != "cpu":
        return False
    here = world()
    return here.single_process or here.host_peers.issuperset((*src.placement.flat, *dst.placement.flat))


def _failed(how: str, what: str, rank: int, text: str) -> None:
    """Raise what a failed call of the transport means. `rank` is the one to blame, -1 for none."""
    if how == "lost" and (error := deadlock.detected()):  # if none stopped: it may keep the store to ask
        raise error
    torch_ext.report(f"{what}   at {where()}")
    replies = torch_ext.collect_reports(len(world().host_peers), 0.5)
    ranks = sorted(world().host_peers)
    rows = "".join(f"\n    rank {r}: {reply or 'elsewhere'}" for r, reply in zip(ranks, replies))
    if how == "disagreed":
        raise DisagreementError("the ranks disagree about what to do" + rows,
                                f"{text}: every rank runs the same program",
                                "no global op under a condition that differs between ranks, such as gt.rank() == 0")
    lost = f"rank {ranks[rank]}" if rank >= 0 else "the others"
    raise TransportError(f"rank {world().rank} lost touch with {lost} in the boxing for {what}" + rows, text,
                         "look at the first error of the other ranks")


if torch_ext is not None:
    torch_ext.on_failure(_failed)
