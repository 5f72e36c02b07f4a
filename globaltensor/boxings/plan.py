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

from array import array
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain, pairwise, product
from math import prod
from typing import NamedTuple, TypeVar

from globaltensor.boxings import native_prices
from globaltensor.boxings.group_step import separate_axes
from globaltensor.boxings.levels import boxings_in_levels
from globaltensor.boxings.route import reduced_innermost
from globaltensor.boxings.traffic import (
    BROADCAST,
    SUM,
    axis_codes,
    elements_received,
    even_traffic,
    least_received,
    least_traffic,
    traffic,
)
from globaltensor.layouts.layout import Layout, Shape, layout
from globaltensor.layouts.placement import placement
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.layouts.recent import remembered
from globaltensor.layouts.sbp import Sbp, split
from globaltensor.runtime.machine import Machine

T = TypeVar("T")

State = tuple[int, ...]                              # an nd-sbp as numbers (`axis_codes`)
OF_STEP = 1e-9                                       # seconds; among equals, the path of the fewest steps


class BoxingPlan(NamedTuple):
    """`layouts` from src to dst, a step between each two; `rate` and `fixed` give its seconds for a number of bytes.

    Of a boxing in two levels (levels.py), `levels` are such paths one after the other, for the view of the tensor that
    has the shape `view`: where one ends and the next begins, every rank has the same.
    """

    layouts: tuple[Layout, ...]
    fixed: float
    rate: float
    levels: tuple[tuple[Layout, ...], ...] = ()
    view: Shape | None = None

    @property
    def steps(self) -> list[tuple[Layout, Layout]]:
        """The steps one after the other."""
        return [step for path in self.levels or (self.layouts,) for step in pairwise(path)]

    def seconds(self, nbytes: int) -> float:
        return self.fixed + self.rate * nbytes


def plan(src: Layout, dst: Layout, shape: Shape, nbytes: int, machine: Machine) -> BoxingPlan:
    """The cheapest steps from src to dst for a tensor of this shape and size on this machine."""
    if src is dst:
        return BoxingPlan((src,), 0.0, 0.0)
    if _has_rank_regions(src, dst):
        return BoxingPlan((src, dst), 0.0, 0.0)      # one step: nothing is chosen, and pricing asks all ranks
    magnitude = nbytes.bit_length()
    best = _search(src, dst, _nominal(src, dst, shape), magnitude, machine)
    return best if not machine.hosts or src.placement != dst.placement else _best_over_hosts(
        src, dst, shape, magnitude, machine, best)


def _has_rank_regions(src: Layout, dst: Layout) -> bool:
    """Has either a region of its own for each rank?"""
    return isinstance(src, RankRegions) or isinstance(dst, RankRegions)


def _nominal(src: Layout, dst: Layout, shape: Shape) -> Shape:
    """No dim is split into more parts than this, so that longer ones count as evenly divisible."""
    return nominal_shape(shape, _num_ranks(src) * (1 if src.placement == dst.placement else _num_ranks(dst)))


def nominal_shape(shape: Shape, most: int) -> Shape:
    """The same, where no dim is split into more parts than `most`."""
    return tuple(n if n < most else most for n in shape)


@remembered
def _best_over_hosts(src: Layout, dst: Layout, shape: Shape, magnitude: int, machine: Machine,
                     best: BoxingPlan) -> BoxingPlan:
    """The best of a plan in one level and those in two."""
    for view, ends in boxings_in_levels(src, dst, shape, machine.hosts):
        parts = [_search(a, b, _nominal(a, b, view), magnitude, machine) for a, b in ends if a is not b]
        in_levels = BoxingPlan((src, dst), sum(part.fixed for part in parts), sum(part.rate for part in parts),
                               tuple(part.layouts for part in parts), view)
        if in_levels.seconds(1 << magnitude) + OF_STEP < best.seconds(1 << magnitude):
            best = in_levels
    return best


def boxing_cost(src: Layout, dst: Layout, shape: Shape, nbytes: int, machine: Machine) -> tuple[float, float]:
    """How long the boxing takes, by its plan: seconds until its steps have started, and those of its bytes."""
    if _has_rank_regions(src, dst):
        fixed, rate = _cost(src, dst, shape, machine)
        return fixed, rate * nbytes
    best = plan(src, dst, shape, nbytes, machine)
    return best.fixed, best.rate * nbytes


def plan_cost(of: BoxingPlan, shape: Shape, machine: Machine) -> tuple[float, float]:
    """What a plan takes on another machine than it was made for: seconds until its steps have started, and seconds for
    each byte."""
    costs = [_cost(*step, of.view or shape, machine) for step in of.steps]
    return sum(fixed for fixed, _ in costs), sum(rate for _, rate in costs)


def least_cost(src: Layout, dst: Layout, shape: Shape, nbytes: int, machine: Machine) -> tuple[float, float]:
    """`boxing_cost` or less, without a plan: what no plan can do better. 0 where that is not known."""
    if src is dst or _has_rank_regions(src, dst) or (
            machine.hosts or src.placement != dst.placement):
        return 0.0, 0.0
    shape = _nominal(src, dst, shape)
    received = least_received(axis_codes(src.sbp), axis_codes(dst.sbp), src.placement.shape, shape)
    if received <= 0:
        return 0.0, 0.0
    latency, bandwidth = machine.link(src.placement)
    return latency, received / max(prod(shape), 1) / bandwidth * nbytes


def plan_bytes(of: BoxingPlan, shape: Shape, itemsize: int) -> dict[int, int]:
    """Bytes that each rank receives from others over all steps of a plan for a tensor of this shape."""
    total: dict[int, int] = {}
    for path in of.levels or (of.layouts,):
        for rank, n in bytes_received(path, of.view or shape, itemsize).items():
            total[rank] = total.get(rank, 0) + n
    return total


def bytes_received(layouts: tuple[Layout, ...], shape: Shape, itemsize: int) -> dict[int, int]:
    """Bytes that each rank receives from others over all steps of a path."""
    total: dict[int, int] = {}
    for src, dst in pairwise(layouts):
        for rank, n in elements_received(src, dst, shape).items():
            total[rank] = total.get(rank, 0) + n * itemsize
    return total


@remembered
def _search(src: Layout, dst: Layout, shape: Shape, magnitude: int, machine: Machine) -> BoxingPlan:
    between = reduced_innermost(src) if src is not dst else None
    if between is dst:
        return BoxingPlan((src, dst), *_cost(src, dst, shape, machine))
    if between is not None:
        first, then = (_search(a, b, shape, magnitude, machine) for a, b in ((src, between), (between, dst)))
        return BoxingPlan(first.layouts + then.layouts[1:], first.fixed + then.fixed, first.rate + then.rate)
    if src.placement == dst.placement:
        return _search_between(src, dst, shape, magnitude, machine)
    paths = _paths(src, dst, len(shape))
    costs = {step: _cost(*step, shape, machine) for step in _unique(step for path in paths for step in pairwise(path))}
    plans = [BoxingPlan(path, sum(costs[step][0] for step in pairwise(path)),
                        sum(costs[step][1] for step in pairwise(path))) for path in paths]
    return min(plans, key=lambda plan: plan.seconds(1 << magnitude) + OF_STEP * len(plan.layouts))


def _search_between(src: Layout, dst: Layout, shape: Shape, magnitude: int, machine: Machine) -> BoxingPlan:
    """The straight path on one placement, or that over the best state between, the first of equals."""
    a, b, where = axis_codes(src.sbp), axis_codes(dst.sbp), src.placement
    codes = dict(zip((*a, *b), (*src.sbp, *dst.sbp))) | {d: split(d) for d in range(len(shape))}
    fixed, rate, state = (
        native_prices.search_between(a, b, where.shape, shape, magnitude, _memory_and_links(where, machine),
                                     bool(machine.hosts))
        or search_states(src, dst, codes, shape, magnitude, machine))
    if state is None:
        return BoxingPlan((src, dst), fixed, rate)
    return BoxingPlan((src, src.with_sbp(tuple(codes[code] for code in state)), dst), fixed, rate)


@lru_cache(1_000)
def _memory_and_links(where: placement, machine: Machine) -> array[float]:
    """The rate of memory, and latency and bandwidth of the placement; where ranks are on several hosts, of steps that
    change certain axes too, a bit each. They are those of hosts where one of the axes leads to another host."""
    links = [machine.link(where)]
    if machine.hosts:
        of_axis = [machine.link_along(where, (axis,)) for axis in range(where.ndim)]
        for changed in range(1, 1 << where.ndim):
            own = [link for axis, link in enumerate(of_axis) if changed >> axis & 1]
            between = (machine.host_latency, machine.host_bandwidth)
            links.append(between if between in own else own[0])
    return array("d", (machine.memory, *chain(*links)))


def search_states(src: Layout, dst: Layout, codes: Mapping[int, Sbp], shape: Shape, magnitude: int, machine: Machine
                  ) -> tuple[float, float, State | None]:
    """The same without native code: seconds that are fixed and those per byte, and the state between. There may be
    hundreds of states, so they are not layouts yet but numbers; and those that cost least at least are priced first, so
    that most others are never."""
    a, b, where = axis_codes(src.sbp), axis_codes(dst.sbp), src.placement
    whole = max(prod(shape), 1)

    def cost(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[float, float]:
        moved = even_traffic(one, other, where.shape, shape) or traffic(
            *(src.with_sbp(tuple(codes[code] for code in state)) for state in (one, other)), shape)
        return _step_seconds(*moved, whole, *_link(where, one, other, machine), machine)

    def least(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[float, float]:
        moved = least_traffic(one, other, where.shape, shape)
        return _step_seconds(*moved, whole, *_link(where, one, other, machine), machine)

    fixed, rate = cost(a, b)
    limit, best = fixed + rate * (1 << magnitude), tuple[float, float, State | None]((fixed, rate, None))
    bounds: list[tuple[float, int, State]] = []
    dims = range(len(shape))
    choices = [tuple(dict.fromkeys((*dims, x, y) if x < BROADCAST and x != y else (x, y))) for x, y in zip(a, b)]
    for nth, state in enumerate(product(*choices)):
        if state in (a, b) or _shares_while_moving(a, state) or _shares_while_moving(state, b):
            continue
        bound = _total(least(a, state), least(state, b), magnitude)
        if bound < limit:
            bounds.append((bound, nth, state))
    priced: list[tuple[int, State, float, float]] = []
    lowest = limit
    for bound, nth, state in sorted(bounds):
        if bound > lowest * (1 + 1e-9):
            break
        first = cost(a, state)
        if _total(first, least(state, b), magnitude) > lowest * (1 + 1e-9):
            continue
        then = cost(state, b)
        priced.append((nth, state, first[0] + then[0], first[1] + then[1]))
        lowest = min(lowest, _total(first, then, magnitude))
    for _, state, fixed, rate in sorted(priced):
        if (seconds := fixed + rate * (1 << magnitude) + OF_STEP) < limit:
            limit, best = seconds, (fixed, rate, state)
    return best


def _total(first: tuple[float, float], then: tuple[float, float], magnitude: int) -> float:
    """Seconds of two steps."""
    return (first[0] + then[0]) + (first[1] + then[1]) * (1 << magnitude) + OF_STEP


def _link(where: placement, src: tuple[int, ...], dst: tuple[int, ...], machine: Machine) -> tuple[float, float]:
    """Latency and bandwidth of a step on one placement: of its groups, where these do not need each other."""
    axes = separate_axes(src, dst, where.shape) if machine.hosts else None
    return machine.link_along(where, axes) if axes else machine.link(where)


def _shares_while_moving(src: tuple[int, ...], dst: tuple[int, ...]) -> bool:
    """Does a split become a pending sum in the same step in which another axis changes? Alone, it moves nothing."""
    return sum(x != y for x, y in zip(src, dst)) > 1 and any(x >= 0 and y == SUM for x, y in zip(src, dst))


def _cost(src: Layout, dst: Layout, shape: Shape, machine: Machine) -> tuple[float, float]:
    """Seconds of one step: a fixed part, and seconds per byte of the whole tensor."""
    link = (machine.link(src.placement, dst.placement) if _has_rank_regions(src, dst) or src.placement != dst.placement
            else _link(src.placement, axis_codes(src.sbp), axis_codes(dst.sbp), machine))
    return _step_seconds(*traffic(src, dst, shape), max(prod(shape), 1), *link, machine)


def _step_seconds(crossing: float, touched: float, whole: int, latency: float, bandwidth: float, machine: Machine
                  ) -> tuple[float, float]:
    local = touched / whole / machine.memory
    if not crossing:
        return 0.0, local
    # a link carries both directions at once, so the busier one counts
    return latency, crossing / whole / bandwidth + local


def _paths(src: Layout, dst: Layout, ndim: int) -> list[tuple[Layout, ...]]:
    """Paths between two placements that are worth pricing: straight, or over one state on either side."""
    dims = [split(d) for d in range(ndim)]
    between = [_states(src, [_unique([*dims, a]) if a.is_partial else [a] for a in src.sbp]),
               _states(dst, [_unique([*dims, b]) if b.is_broadcast else [b] for b in dst.sbp])]
    return _unique(tuple(_unique([src, *states, dst])) for states in product(*between))


def _states(like: Layout, choices: list[list[Sbp]]) -> list[Layout]:
    return [layout(like.placement, sbp) for sbp in product(*choices)]


def _unique(choices: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(choices))


def _num_ranks(of: Layout) -> int:
    return prod(of.placement.shape)


