"""The cheapest legal way to run an op, all placement axes together.

The price of a choice is, in seconds on the machine:

    the boxing of every operand into the layout the choice wants
  + the work that each rank does (what no axis cuts is done by every rank)
  + for an output left pending, what it will cost to reduce it later. Free where the operands lie just so already, or
    are whole: a layout that asks for a pending sum (a row-parallel linear, a gradient over a split batch) gets it.

Dispatch never starts a split of its own: a label may be cut on an axis only if an operand is split there. So
broadcast operands stay broadcast, and where the split dim of an operand must be whole another one takes its place.
Where a rule names an operand that leads, the indices of an embedding, its splits stay.
"""
from __future__ import annotations

from itertools import product
from math import prod

from globaltensor.boxings.plan import seconds
from globaltensor.layouts.layout import Layout, Spec, layout
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import Sbp, broadcast
from globaltensor.rules.language import Rule, Signature, Sizes, fits, label_sizes, signatures
from globaltensor.runtime.machine import Machine

Size = tuple[tuple[int, ...], int]                   # shape and bytes of an output

_NUDGE = 1e-9                                        # seconds; settles ties, below any real cost


def choose(of: Rule, operands: list[Spec], outputs: list[Size], machine: Machine, target: int | None = None,
           moved: bool = False) -> tuple[Signature, ...] | None:
    """One signature per axis. `outputs`: shape and bytes of each.

    `target` is the operand that output 0 is written into: both lie alike, and as the target does now, unless it may
    be `moved`. None where that leaves no legal choice.
    """
    where = operands[0].placement
    sizes = label_sizes(of, [spec.shape for spec in operands])
    limits = dict(of.even)
    axes = [_candidates(of, [spec.sbp[axis] for spec in operands], target, moved) for axis in range(where.ndim)]
    if not all(axes):
        return None
    carries = len(operands) == 1 and sum(nbytes for _, nbytes in outputs) <= operands[0].nbytes
    now = tuple(_as_it_lies(found, [spec.sbp[axis] for spec in operands], carries) for axis, found in enumerate(axes))
    if None not in now and fits(now, where.shape, sizes, limits, of.nonempty):
        return now
    best: tuple[float, tuple[Signature, ...]] | None = None
    for nd in product(*axes):
        if not fits(nd, where.shape, sizes, limits, of.nonempty):
            continue
        price = _price(nd, operands, outputs, sizes, machine, best[0] if best else float("inf"))
        if best is None or price < best[0] - 1e-15:
            best = price, nd
    return best[1] if best else None


def rank_choices(of: Rule, operands: list[Spec], outputs: list[Size], machine: Machine, target: int | None = None,
                 moved: bool = False) -> list[tuple[float, tuple[Signature, ...]]]:
    """What `choose` chooses from: the seconds of every choice worth pricing, the cheapest first."""
    where = operands[0].placement
    sizes = label_sizes(of, [spec.shape for spec in operands])
    limits = dict(of.even)
    axes = [_candidates(of, [spec.sbp[axis] for spec in operands], target, moved) for axis in range(where.ndim)]
    found = [(_price(nd, operands, outputs, sizes, machine, float("inf")), nd)
             for nd in product(*axes) if fits(nd, where.shape, sizes, limits, of.nonempty)]
    return sorted(found, key=lambda choice: choice[0])


def _as_it_lies(found: list[Signature], states: list[Sbp], carries: bool) -> Signature | None:
    """The candidate that moves nothing, where it cannot be beaten: no operand is pending, or it is the only one and
    what comes out is no larger, so that the sum may as well be settled later."""
    if any(s.is_partial for s in states) and not carries:
        return None
    wanted = tuple(states)
    return next((sig for sig in found if sig.inputs == wanted), None)


def _candidates(of: Rule, states: list[Sbp], target: int | None, moved: bool) -> list[Signature]:
    """Signatures worth pricing on one axis."""
    split = any(s.is_split for s in states)
    pending = any(s.is_partial for s in states)
    led = of.leads is not None and states[of.leads].is_split
    found = []
    for sig in signatures(of):
        if sig.label is not None and not split or led and sig.inputs[of.leads] != states[of.leads]:
            continue
        if target is not None and (sig.inputs[target] != sig.outputs[0]
                                   or not moved and sig.outputs[0] != states[target]):
            continue
        if not pending and not split and any(s.is_partial for s in sig.inputs):
            continue
        found.append(sig)
    return found


def _price(nd: tuple[Signature, ...], operands: list[Spec], outputs: list[Size], sizes: Sizes, machine: Machine,
           limit: float) -> float:
    """Seconds of one choice; stops counting beyond `limit`."""
    where = operands[0].placement
    cut = prod(parts for sig, parts in zip(nd, where.shape) if sig.label is not None)
    total = prod(sizes.values()) / cut / machine.work
    moved_on = [False] * where.ndim
    carried = [False] * where.ndim
    for q, spec in enumerate(operands):
        want = tuple(sig.inputs[q] for sig in nd)
        if want != spec.sbp:
            total += seconds(spec.layout, layout(where, want), spec.shape, spec.nbytes, machine)
            if total > limit:
                return total
        for axis, (s, w) in enumerate(zip(spec.sbp, want)):
            moved_on[axis] |= s != w and not s.is_broadcast
            carried[axis] |= s.is_partial and w.is_partial
            total += _NUDGE * ((w.is_partial and not s.is_partial) + 0.01 * (s != w))
    return total + _debt(nd, where, outputs, machine, carried, moved_on)


def _debt(nd: tuple[Signature, ...], where: placement, outputs: list[Size], machine: Machine,
          carried: list[bool], moved_on: list[bool]) -> float:
    """What reducing the pending outputs will cost, on the axes where that is the choice's own doing."""
    total = 0.0
    for k, (shape, nbytes) in enumerate(outputs):
        states = tuple(sig.outputs[k] if carried[axis] or moved_on[axis] or not sig.outputs[k].is_partial else broadcast
                       for axis, sig in enumerate(nd))
        if nbytes and any(s.is_partial for s in states):
            done = tuple(broadcast if s.is_partial else s for s in states)
            total += seconds(layout(where, states), layout(where, done), shape, nbytes, machine)
    return total


def layouts(nd: tuple[Signature, ...], operands: list[Spec], outputs: int) -> tuple[list[Layout], list[Layout]]:
    """The layouts that a choice wants of the operands and gives to the outputs."""
    where = operands[0].placement
    return ([layout(where, tuple(sig.inputs[q] for sig in nd)) for q in range(len(operands))],
            [layout(where, tuple(sig.outputs[k] for sig in nd)) for k in range(outputs)])
