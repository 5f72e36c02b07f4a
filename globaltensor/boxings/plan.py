"""The steps from one layout to another: the shortest path, by seconds on a machine.

One step does any boxing (`route.py`), but seldom the cheapest: a pending sum that becomes broadcast moves
(n - 1) * T in one step and 2 (n - 1) / n * T by way of a split. So the states in between are:

    on the source's placement    each pending axis split along any dim, or left;
    the same placement           other axes as in src, or as in dst;
    on the destination's         each broadcast axis split along any dim, so that no sender sends a byte twice.

So a path has at most three steps, and pricing them all finds the cheapest. That is done for a nominal shape (every dim
that is long enough counts as evenly divisible) and a size rounded to a power of two: new shapes seldom need it again.
"""
from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import NamedTuple, TypeVar

from globaltensor.boxings.route import elements_received, reduced_innermost, traffic
from globaltensor.layouts.layout import Layout, Shape, layout
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.layouts.sbp import Sbp, split
from globaltensor.runtime.machine import Machine

T = TypeVar("T")


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
    paths = _paths(src, dst, len(shape))
    costs = {step: _cost(*step, shape, machine) for step in _unique(step for path in paths for step in pairwise(path))}
    plans = [BoxingPlan(path, *map(sum, zip(*(costs[step] for step in pairwise(path))))) for path in paths]
    of_steps = 1e-9                                  # among equals, the path of the fewest steps
    return min(plans, key=lambda plan: plan.seconds(1 << magnitude) + of_steps * len(plan.layouts))


def _cost(src: Layout, dst: Layout, shape: Shape, machine: Machine) -> tuple[float, float]:
    """Seconds of one step: a fixed part, and seconds per byte of the whole tensor."""
    moved = traffic(src, dst, shape)
    whole = max(prod(shape), 1)
    local = moved.touched / whole / machine.memory
    if not moved.received:
        return 0.0, local
    latency, bandwidth = machine.link((*src.placement.flat, *dst.placement.flat))
    # a link carries both directions at once, so the busier one counts
    return latency, max(moved.received, moved.sent) / whole / bandwidth + local


def _paths(src: Layout, dst: Layout, ndim: int) -> list[tuple[Layout, ...]]:
    """Paths worth pricing: straight, over one state between, and between placements over one on either side."""
    dims = [split(d) for d in range(ndim)]
    if src.placement == dst.placement:
        between = [_states(src, [_unique([*dims, a, b] if a.is_partial and a != b else [a, b])
                                 for a, b in zip(src.sbp, dst.sbp)])]
    else:
        between = [_states(src, [_unique([*dims, a]) if a.is_partial else [a] for a in src.sbp]),
                   _states(dst, [_unique([*dims, b]) if b.is_broadcast else [b] for b in dst.sbp])]
    return _unique(tuple(_unique([src, *states, dst])) for states in product(*between))


def _states(like: Layout, choices: list[list[Sbp]]) -> list[Layout]:
    return [layout(like.placement, sbp) for sbp in product(*choices)]


def _unique(choices: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(choices))


def _num_ranks(of: Layout) -> int:
    return prod(of.placement.shape)


