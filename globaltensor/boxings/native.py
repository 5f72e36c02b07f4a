"""Boxings that the native kernel does: programs compiled once per spec and destination.

It moves shards on CPUs, between ranks that share the memory of this process or of this host. All other boxings, and all
of them where the extension is not built, are done by torch_program.py.
"""
from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch

from globaltensor.boxings.kernel_program import DIMS, compile_program, direct_steps
from globaltensor.errors import DisagreementError, TransportError, where
from globaltensor.layouts.layout import Layout, Spec, completes, contiguous, dense
from globaltensor.layouts.recent import remembered
from globaltensor.runtime import deadlock, lineage
from globaltensor.runtime.dtypes import FLOAT8, SIGNED
from globaltensor.runtime.ended import error_after_end, mark_as_end
from globaltensor.runtime.liveness import Loss, advice_after, first_lost, process_of, stopped_rank
from globaltensor.runtime.native import torch_ext
from globaltensor.runtime.process_limits import why_unmapped
from globaltensor.runtime.world import local_ranks_of, world
from globaltensor.tracebacks import api_boundary

# Of these the kernel moves bytes, but adds no numbers.
NOT_REDUCED = {torch.complex32, *SIGNED, *FLOAT8}


@remembered
def find_boxing(of: Spec, dst: Layout) -> Any:
    """The native boxing of a tensor of this spec to `dst`; None where there is none."""
    if torch_ext is None or of.ndim > DIMS or not reachable(of.layout, dst):
        return None
    if any(s.is_partial for s in of.sbp) and of.dtype in NOT_REDUCED:
        return None
    here = world()
    first = 0 if here.single_process else min(here.host_peers)      # the kernel counts the ranks of a host from 0
    index = {r: r - first for r in (*of.placement.flat, *dst.placement.flat)}
    layouts = direct_steps(of.layout, dst)
    steps = []
    for a, b in pairwise(layouts):
        program = compile_program(a, b, of.shape, of.dtype.itemsize, here.local_ranks, index, True)
        result = of.moved(b)
        sizes = [b.local_shape(of.shape, r) for r in local_ranks_of(b.placement)]
        in_order = result.stride == contiguous(of.shape)
        steps.append({"regions": program.regions, "corners": program.corners, "op": program.op,
                      "partners": program.partners, "ties": program.ties, "result": result, "sizes": sizes,
                      "strides": [] if in_order else [dense(own, result.stride) for own in sizes],
                      "reusable": program.reusable, "unmoved": program.unmoved})
    return torch_ext.Boxing(of, steps, f"{' -> '.join(map(str, layouts))} {of.shape} {of.dtype}",
                            completes(of.layout, dst))


def reachable(src: Layout, dst: Layout) -> bool:
    """Can all ranks of the two placements read each other's memory?"""
    if src.placement.type != "cpu" or dst.placement.type != "cpu":
        return False
    here = world()
    return here.single_process or here.host_peers.issuperset((*src.placement.flat, *dst.placement.flat))


def _failed(how: str, what: str, rank: int, text: str) -> None:
    """Raise the error for a failed call of the transport: `how` it failed (lost, stopped, disagreed), `what` it was for
    ("": ranks only connected), the `rank` to blame (-1: none), and what the transport says."""
    what = what or "connecting over shared memory"
    if (own := process_of(world().rank)) is not None and own.pid != os.getpid():
        raise TransportError(f"{what} in a process that rank {world().rank} has forked",
                             "the rank alone is connected to the others",
                             "global tensors in the rank itself, and plain ones in what it forks")
    if (later := error_after_end(what)) is not None:
        raise later
    if how == "lost" and (error := deadlock.detected()):  # else a stopped rank may keep the store
        raise mark_as_end(error)
    apart = lineage.difference(world().rank, sorted(world().host_peers)) if how == "disagreed" else ""
    torch_ext.report(f"{what.removeprefix('the boxing for ')}   at {where()}{apart}")
    replies = torch_ext.collect_reports(0.5)
    ranks = sorted(world().host_peers)
    rows = "".join(f"\n    rank {r}: {reply or 'elsewhere'}" for r, reply in zip(ranks, replies))
    if how == "disagreed":
        why, fix = lineage.advice_of_apart(rows) or (text, deadlock.SAME_PROGRAM)
        raise mark_as_end(DisagreementError("the ranks disagree about what to do" + rows,
                                            f"{why}: every rank runs the same program", fix))
    lost = "the others"
    if rank >= 0:                                    # it may have ended because of another, or given this one up
        known = process_of(ranks[rank])
        loss = Loss(ranks[rank], text)
        if how == "stopped" and known is not None:
            loss = stopped_rank(ranks[rank], known.pid)
        first = first_lost(loss)
        other, text = ranks[rank] if first.rank == world().rank else first.rank, first.how
        lost = "the others" if other == world().rank else f"rank {other}"
    fix = advice_after(text)
    if text.endswith(" finished"):
        fix = "this call on every rank, not under `if gt.rank() == 0`"
    elif text.endswith("on another host?"):
        fix = "LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them: ranks of one host share memory"
    elif "cannot be mapped" in text:
        why, fix = why_unmapped(text)
        text += f": {why}"
    raise mark_as_end(TransportError(f"rank {world().rank} lost touch with {lost} in {what}" + rows, text, fix))


if torch_ext is not None:
    torch_ext.on_failure(api_boundary(_failed))
