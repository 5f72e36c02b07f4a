"""What `repr` prints of a global tensor: its value, its layout, and what autograd knows of it.

One process that has all ranks prints the value, as torch prints it; of a large tensor only the items at the edges are
moved, which are all that torch's print options let one see. One of several processes moves nothing, as it may be the
only one that prints: it shows the value where it holds it whole, else the layout and its own part.
"""
from __future__ import annotations

from itertools import product
from typing import Any

import torch

from globaltensor.boxings.redistribute import Move, move_shards
from globaltensor.boxings.watch import PRINTED
from globaltensor.layouts.layout import Spec, sbp_text
from globaltensor.layouts.placement import placement
from globaltensor.layouts.rank_regions import rank_regions
from globaltensor.layouts.regions import Range, volume
from globaltensor.runtime.torch_internals import PRINT_OPTIONS, print_options
from globaltensor.runtime.world import world
from globaltensor.tensors.full_value import gather_full
from globaltensor.tracebacks import torch_boundary


def text_of(x: Any) -> str:
    """What `repr` prints."""
    with torch.no_grad():
        value = _text_of_value(x)
    grad = f", grad_fn=<{type(x.grad_fn).__name__}>" if x.grad_fn else ", requires_grad=True" if x.requires_grad else ""
    return f"{value.removesuffix(')')}, placement={x.placement}, sbp={sbp_text(x.sbp)}{grad})"


@torch_boundary
def format_of(x: Any, format_spec: str) -> str:
    """A 0-dim tensor as the number that it is, as torch formats its own. Where a format is named, the number is needed,
    so that it is collective, as `item()`; else as `repr`, where this process does not know the number."""
    if x.dim() or x.placement.type == "meta" or not (format_spec or known_here(x)):
        return object.__format__(x, format_spec)
    return format(x.detach().item() if format_spec else known_value(x).item(), format_spec)


def known_here(x: Any) -> bool:
    """Does this process know the value without asking others?"""
    return world().single_process or x.origin is None and all(s.is_broadcast for s in x.sbp) and bool(x.shards)


def known_value(x: Any) -> torch.Tensor:
    """That value, or a shard that is all of it."""
    x = x.detach()
    return next(iter((gather_full(x, PRINTED) if world().single_process else x.shards).values()))


def _text_of_value(x: Any) -> str:
    what = f"tensor(shape={list(x.shape)}, dtype={x.dtype}"
    if x.placement.type == "meta" or x.traced:
        return what
    if not known_here(x):
        return f"{what}, a view whose value other ranks hold" if x.origin is not None else f"{what}, shards={x.shards}"
    if world().single_process and x.numel() > PRINT_OPTIONS.threshold and PRINT_OPTIONS.edgeitems > 0:
        with print_options(threshold=0):             # what stands for the whole is small
            return repr(_edges(x.spec, x.detach().shards))
    return repr(known_value(x).cpu())                # the placement says where it is


def _edges(of: Spec, shards: dict[int, torch.Tensor]) -> torch.Tensor:
    """A small tensor that torch prints as it would the whole: of a long dim the items at both ends, and between them
    one more, for which it prints dots."""
    rank, count = world().rank, PRINT_OPTIONS.edgeitems
    here = placement(of.placement.type, [rank])
    corners = list(product(*(_edge_ranges(n, count) for n in of.shape)))
    moves = [Move(of, shards, rank_regions(here, {rank: tuple(region for region, _ in corner)})) for corner in corners]
    edges = torch.zeros([min(n, 2 * count + 1) for n in of.shape], dtype=of.dtype, device="cpu")
    for corner, moved in zip(corners, move_shards(moves, PRINTED)):
        if volume(tuple(region for region, _ in corner)):
            edges[tuple(slice(*at) for _, at in corner)] = moved[rank].cpu()
    return edges


def _edge_ranges(n: int, count: int) -> list[tuple[Range, Range]]:
    """Of a dim of n items the first and the last `count`, or all: where they are, and where in the small tensor."""
    if n <= 2 * count:
        return [((0, n), (0, n))]
    return [((0, count), (0, count)), ((n - count, n), (count + 1, 2 * count + 1))]
