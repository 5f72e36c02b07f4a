"""The steps from one layout to another: the shortest path, by seconds on a machine.

One step does any boxing (`route.py`), but seldom the cheapest: a pending sum that becomes broadcast moves
(n - 1) * T in one step and 2 (n - 1) / n * T by way of a split. So the states in between are:

    on the source's placement    each pending axis split along any dim, or left;
    the same placement           other axes as in src, or as in dst;
    on the destination's         each broadcast axis split along any dim, so that no sender sends a byte twice.

The path is found with networkx on a nominal shape (every dim that is long enough counts as evenly divisible) and a
size rounded to a power of two, so that new shapes seldom need a new search.
"""
from __future__ import annotations

from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from globaltensor.boxings.route import elements_received, reduced_innermost, traffic
from globaltensor.layouts.layout import Layout, Shape, layout
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.layouts.sbp import Sbp, split
from globaltensor.runtime.machine import Machine


class BoxingPlan(NamedTuple):
    """`layouts` from src to dst, a step between each two; `rate` and `fixed` give its seconds for a number of bytes."""

    layouts: tuple[Layout, ...]
    fixed: float
    rate: float

    def seconds(self, nbytes: int) -> float:
        return self.fixed + self.rate * nbytes


def plan(src: Layout, dst: Layout, shape: Shape, nbytes: int, machine: Machine) -> BoxingPlan:
    """The cheapest steps from src to dst for a tensor of this shape and size on this machine."""
    if src is dst:
        return BoxingPlan((src,), 0.0, 0.0)
    if isinstance(src, RankRegions) or isinstance(dst, RankRegions):
        return BoxingPlan((src, dst), *_cost(src, dst, shape, machine))
    # No dim is split into more parts than this, so that longer ones count as evenly divisible.
    most = _num_ranks(src) * (1 if src.placement == dst.placement else _num_ranks(dst))
    return _search(src, dst, tuple(n if n < most else most for n in shape), nbytes.bit_length(), machine)


def boxing_seconds(src: Layout, dst: Layout, shape: Shape, nbytes: int, machine: Machine) -> float:
    """How long the boxing takes, by its plan."""
    return plan(src, dst, shape, nbytes, machine).seconds(nbytes)


def bytes_received(layouts: tuple[Layout, ...], shape: Shape, itemsize: int) -> dict[int, int]:
    """Bytes that each rank receives from others over all steps of a plan."""
    total: dict[int, int] = {}
    for src, dst in pairwise(layouts):
        for rank, n in elements_received(src, dst, shape).items():
            total[rank] = total.get(rank, 0) + n * itemsize
    return total


@lru_cache(100_000)
def _search(src: Layout, dst: Layout, shape: Shape, magnitude: int, machine: Machine) -> BoxingPlan:
    between = reduced_innermost(src) if src is not dst else None
    if between is dst:
        return BoxingPlan((src, dst), *_cost(src, dst, shape, machine))
    if between is not None:
        first, then = (_search(a, b, shape, magnitude, machine) for a, b in ((src, between), (between, dst)))
        return BoxingPlan(first.layouts + then.layouts[1:], first.fixed + then.fixed, first.rate + then.rate)
    import networkx as nx  # type: ignore[import-untyped]  # here, as it takes 0.1 s to import

    graph = nx.DiGraph()
    nbytes = 1 << magnitude
    for a, b in _edges(src, dst, len(shape)):
        fixed, rate = _cost(a, b, shape, machine)
        graph.add_edge(a, b, cost=fixed + rate * nbytes + 1e-9, fixed=fixed, rate=rate)
    path = nx.shortest_path(graph, src, dst, weight="cost")
    steps = [graph.edges[edge] for edge in pairwise(path)]
    return BoxingPlan(tuple(path), sum(s["fixed"] for s in steps), sum(s["rate"] for s in steps))


def _cost(src: Layout, dst: Layout, shape: Shape, machine: Machine) -> tuple[float, float]:
    """Seconds of one step: a fixed part, and seconds per byte of the whole tensor."""
    moved = traffic(src, dst, shape)
    whole = max(prod(shape), 1)
    local = moved.touched / whole / machine.memory
    if not moved.received:
        return 0.0, local
    latency, bandwidth = machine.link((*src.placement.flat, *dst.placement.flat))
    return latency, max(moved.received, moved.sent) / whole / bandwidth + local


def _edges(src: Layout, dst: Layout, ndim: int) -> list[tuple[Layout, Layout]]:
    """Steps worth looking at: straight, over one state between, and between placements over one on either side."""
    dims = [split(d) for d in range(ndim)]
    if src.placement == dst.placement:
        between = _states(src, [_unique([*dims, a, b] if a.is_partial and a != b else [a, b])
                                for a, b in zip(src.sbp, dst.sbp)])
        return [(src, dst), *((src, m) for m in between if m is not src), *((m, dst) for m in between if m is not dst)]
    before = _states(src, [_unique([*dims, a]) if a.is_partial else [a] for a in src.sbp])
    after = _states(dst, [_unique([*dims, b]) if b.is_broadcast else [b] for b in dst.sbp])
    return [*((src, m) for m in before if m is not src), *((m, dst) for m in after if m is not dst),
            *((m, n) for m in before for n in after)]


def _states(like: Layout, choices: list[list[Sbp]]) -> list[Layout]:
    return [layout(like.placement, sbp) for sbp in product(*choices)]


def _unique(choices: list[Sbp]) -> list[Sbp]:
    return list(dict.fromkeys(choices))


def _num_ranks(of: Layout) -> int:
    return prod(of.placement.shape)


