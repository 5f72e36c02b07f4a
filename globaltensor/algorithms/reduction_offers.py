"""What reductions, softmax and scans along a split dim offer (offer.py): only statistics of the parts are boxed.

The statistics are as long as the operand in each dim but those that are worked along: one long there, or a summary per
part (scans.py).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from globaltensor.algorithms.decompositions import reduces_split
from globaltensor.algorithms.offer import Offer, Offers, PricedBoxing, boxings_to, largest_part
from globaltensor.layouts.layout import Layout, Shape, Spec
from globaltensor.layouts.sbp import Sbp, broadcast, partial_max, partial_sum, split
from globaltensor.rules.call import Call
from globaltensor.rules.families import dims_of, option
from globaltensor.runtime.dtypes import accumulation_dtype

Turns = Sequence[Sequence[PricedBoxing]]


def _along(call: Call, own: Spec) -> tuple[Layout, list[int]]:
    """The operand's layout without pending sums, and the dims that are worked along."""
    return own.layout.without_partials, dims_of(call, own.ndim)


def _where_split(home: Layout, dims: list[int], becomes: Sbp) -> Layout:
    """The layout with something else where one of these dims is split."""
    return home.with_sbp(tuple(becomes if s.is_split and s.dim in dims else s for s in home.sbp))


def _without_dims(home: Layout, dims: list[int], keep: bool, becomes: Sbp) -> Layout:
    """The layout of what is left when these dims are reduced."""
    left = _where_split(home, dims, becomes)
    return left if keep else left.with_sbp(tuple(split(s.dim - sum(d < s.dim for d in dims)) if s.is_split else s
                                                 for s in left.sbp))


def _statistic(call: Call, own: Spec, pending: Sbp = partial_sum) -> PricedBoxing:
    """The boxing of one number for what is reduced to one: each rank has a term of it."""
    home, dims = _along(call, own)
    shape: Shape = tuple(1 if d in dims else n for d, n in enumerate(own.shape))
    nbytes = math.prod(shape) * accumulation_dtype(own.dtype).itemsize
    return PricedBoxing(_where_split(home, dims, pending), _where_split(home, dims, broadcast), shape, nbytes)


def _offer(operands: list[Spec], name: str, turns: Turns, passes: int,
           gives: tuple[Layout, ...], like: int = 0) -> Offer:
    """An offer to do these boxings, with all operands laid out as one of them, going over its part so often."""
    home = operands[like].layout.without_partials
    wants = (home,) * len(operands)
    return Offer(name, wants, gives, passes * largest_part(home, operands[0].shape),
                 (boxings_to(operands, wants), *map(tuple, turns)))


def of_softmax(*, backward: bool = False) -> Offers:
    """Of softmax and log_softmax: a maximum and a sum for each row; their gradients: a sum."""

    def offer(call: Call, operands: list[Spec]) -> Offer | None:
        like = _split_along(call, operands)
        if like is None or not operands[0].numel:
            return None
        own = operands[like]
        turns = [[_statistic(call, own)]] if backward else [[_statistic(call, own, partial_max)],
                                                            [_statistic(call, own)]]
        return _offer(operands, "sums of the parts" if backward else "maxima and sums of the parts", turns, 5,
                      (own.layout.without_partials,), like)

    return offer


def _split_along(call: Call, operands: list[Spec]) -> int | None:
    """The first operand that is split along a dim that is worked along, where the others need no more than to be cut,
    or reduced, to lie like it: whole ones are, as the gradient of a `gather`."""
    for like, own in enumerate(operands):
        if any(s.is_split and s.dim in dims_of(call, own.ndim) for s in own.sbp):
            fit = all(s == at or not s.is_split for other in operands for s, at in zip(other.sbp, own.sbp))
            return like if like == 0 or fit else None
    return None


def of_reduction(statistics: Callable[[Call], Sequence[Sbp]] = lambda call: (), *,
                 left: Sequence[Sbp] = (broadcast,), passes: int = 4,
                 applies: Callable[[Call], bool] = reduces_split) -> Offers:
    """Of a reduction that boxes these statistics, one after the other, and leaves its results so where a dim that is
    reduced was split."""

    def offer(call: Call, operands: list[Spec]) -> Offer | None:
        if not applies(call):
            return None
        (home, dims), keep = _along(call, operands[0]), bool(call.get("keepdim", False))
        turns = [[_statistic(call, operands[0], pending)] for pending in statistics(call)]
        return _offer(operands, "sums of the parts" if turns else "results of the parts", turns, passes,
                      tuple(_without_dims(home, dims, keep, sbp) for sbp in left))

    return offer


def of_logsumexp() -> Offers:
    """Of logsumexp: a maximum and a sum for each result; of complex numbers, which have no maximum, nothing."""
    return of_reduction(lambda call: (partial_max, partial_sum),
                        applies=lambda call: reduces_split(call) and not call.tensors[0].dtype.is_complex)


def of_norm(call: Call) -> Sequence[Sbp]:
    """What is boxed of the parts' norms: their sums of powers, before the root; the largest or smallest number may stay
    pending, and so may a sum without a root."""
    p = float(option(call, "ord", option(call, "p", 2)))
    return () if math.isinf(p) or p in (0, 1) else (partial_sum,)


def of_scan(*, kept: Callable[[Call], int] = lambda call: 1, summaries: int = 1,
            reduces: bool = False, resized: bool = False,
            applies: Callable[[Call], bool] = reduces_split) -> Offers:
    """Of an op that gathers `summaries` of each part, so long each along the dim (scans.py). Its results are as the
    operand; `resized`: but whole along the dim; `reduces`: or without it."""

    def offer(call: Call, operands: list[Spec]) -> Offer | None:
        if not applies(call):
            return None
        own = operands[0]
        home, dims = _along(call, own)
        shape = tuple(home.num_parts(d) * kept(call) if d in dims else n for d, n in enumerate(own.shape))
        whole, nbytes = _where_split(home, dims, broadcast), math.prod(shape) * 8
        gives = whole if resized else home
        if reduces:
            gives = _without_dims(home, dims, bool(call.get("keepdim", False)), broadcast)
        return _offer(operands, "summaries of the parts", [[PricedBoxing(home, whole, shape, nbytes)] * summaries], 2,
                      (gives,) * len(call.func._schema.returns))

    return offer
