"""Ops in place by their results: what an op in place would take if it ran out of place, and its result was copied back.

A write ends where its target lies, so no signature of it leaves a sum pending: `t.index_add_(0, i, rows)` of rows that
are split and a whole t gathers them all. Out of place each rank adds up its own rows, and what crosses ranks is the
result. Where that is less, `variants.write_result` does it.
"""
from __future__ import annotations

from math import inf, prod

from globaltensor.algorithms.offer import Offer, PricedBoxing, boxings_to, largest_part
from globaltensor.dispatch.choose import Contest, layouts, work_share
from globaltensor.layouts.layout import Layout
from globaltensor.rules.language import label_sizes

NAME = "its result, copied"


def may_move_result(contest: Contest) -> bool:
    """Is it a write that must move operands, of which there is more than of its result?"""
    if contest.target is None:
        return False
    others = sum(own.nbytes for q, own in enumerate(contest.operands)
                 if q != contest.target and not all(s.is_broadcast for s in own.sbp))
    return others > contest.operands[contest.target].nbytes and contest.unmoved() is None


def landing(contest: Contest, dst: Layout) -> Contest:
    """The contest of signatures alone, in which each pays for moving result 0 to where it must lie in the end."""
    stays = tuple(own.layout for own in contest.operands)
    return contest._replace(offer=Offer(NAME, stays, (dst,), inf, extra=0.0))


def offer_result(contest: Contest, free: Contest) -> Offer | None:
    """What a write takes by `free`, the contest of the op out of place; None where that leaves its result where the
    target lies, as the write itself would, or where the op would not do it so."""
    assert contest.target is not None
    dst, operands = contest.operands[contest.target].layout, free.operands
    nd = landing(free, dst).choice()
    assert not isinstance(nd, Offer)                 # which takes forever
    wants, gives = layouts(nd, operands, len(free.rule.outputs))
    moved = [own.moved(want) for own, want in zip(operands, wants)]
    then = free._replace(operands=moved).choice()
    if isinstance(then, Offer) or gives[0] is dst or layouts(then, moved, 1)[1][0] is not gives[0]:
        return None
    sizes = label_sizes(free.rule, [own.shape for own in operands])
    back = PricedBoxing(gives[0], dst, *free.outputs[0])
    work = prod(sizes.values()) * work_share(nd, dst.placement.shape, sizes) + largest_part(dst, free.outputs[0][0])
    turns = boxings_to(operands, tuple(wants)), (back,)
    return Offer(NAME, tuple(wants), (dst,), work, turns, extra=0.0)
