"""The cheapest legal way to run an op, all placement axes together.

The price of a choice is, in seconds on the machine:

    the boxing of every operand into the layout the choice wants
  + the work that each rank does (what no axis cuts is done by every rank)
  + for an output left pending, what it will cost to reduce it later. Free if the operands are laid out like that
    already, or are whole: a layout that asks for a pending sum (a row-parallel linear, a gradient over a split batch)
    gets it.

Dispatch never starts a split of its own: a label may be cut on an axis only if an operand is split there. So
broadcast operands stay broadcast, and where the split dim of an operand must be whole another one takes its place.
Where a rule names an operand that leads (the indices of an embedding), its splits stay.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import inf, prod
from typing import NamedTuple

from globaltensor.boxings.plan import boxing_seconds, least_seconds
from globaltensor.layouts.layout import Layout, Shape, Spec, layout
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import Sbp, broadcast
from globaltensor.rules.language import Rule, Signature, Sizes, fits, label_sizes, signatures
from globaltensor.runtime.machine import Machine

Size = tuple[tuple[int, ...], int]                   # shape and bytes of an output

Seconds = Callable[[Layout, Layout, Shape, int, Machine], float]      # of a boxing of a tensor of a shape and bytes

_EQUAL = 1e-15                                       # seconds by which sums differ that are equal but for rounding
_NUDGE = 1e-9                                        # seconds; settles ties, below any real cost


class _Question(NamedTuple):
    """What is to be chosen: a signature per axis, from the candidates on each, for operands and outputs like these."""

    rule: Rule
    operands: list[Spec]
    outputs: list[Size]
    machine: Machine
    axes: list[list[Signature]]
    sizes: Sizes

    def fitting(self) -> Iterator[tuple[Signature, ...]]:
        """The choices that these sizes allow."""
        return (nd for nd in product(*self.axes) if self.fits(nd))

    def fits(self, nd: tuple[Signature, ...]) -> bool:
        return fits(self.rule, nd, self.operands[0].placement.shape, self.sizes)

    def price(self, nd: tuple[Signature, ...], limit: float = inf) -> float:
        return _price(nd, self.operands, self.outputs, self.sizes, self.machine, limit)

    def cheapest(self) -> tuple[Signature, ...] | None:
        """The best choice, the first of equals; None where there is none. What a choice costs at least is known without
        a plan of its boxings: so those that may be cheap are priced first, and most others never."""
        choices = list(self.fitting())
        bounds = [_price(nd, self.operands, self.outputs, self.sizes, self.machine, inf, least_seconds)
                  for nd in choices]
        prices, least = [inf] * len(choices), inf
        for nth in sorted(range(len(choices)), key=bounds.__getitem__):
            if bounds[nth] > least * (1 + 1e-9):
                break
            prices[nth] = self.price(choices[nth], least + _EQUAL)
            least = min(least, prices[nth])
        return next((nd for nd, price in zip(choices, prices) if price <= least + _EQUAL), None)

    def unmoved(self) -> tuple[Signature, ...] | None:
        """The choice that moves nothing, where it cannot be beaten: no operand is pending, or it is the only one and
        what comes out is no larger, so that the sum may as well be reduced later."""
        carries = len(self.operands) == 1 and sum(nbytes for _, nbytes in self.outputs) <= self.operands[0].nbytes
        nd = []
        for axis, candidates in enumerate(self.axes):
            states = tuple(own.sbp[axis] for own in self.operands)
            if any(s.is_partial for s in states) and not carries:
                return None
            same = next((sig for sig in candidates if sig.inputs == states), None)
            if same is None:
                return None
            nd.append(same)
        return tuple(nd) if self.fits(tuple(nd)) else None


def _questions(rule: Rule, operands: list[Spec], outputs: list[Size], machine: Machine, target: int | None
               ) -> Iterator[_Question]:
    """The question, strictly; and for an op that writes, once more with its target free to move.

    The target and output 0 are one memory. So it is written as it is laid out, if that is legal; else it is moved to
    where that is legal, written, and moved back.
    """
    sizes = label_sizes(rule, [own.shape for own in operands])
    for may_move in (False, True) if target is not None else (True,):
        axes = [_candidates(rule, [own.sbp[axis] for own in operands], target, may_move)
                for axis in range(operands[0].placement.ndim)]
        yield _Question(rule, operands, outputs, machine, axes, sizes)


def choose(rule: Rule, operands: list[Spec], outputs: list[Size], machine: Machine, target: int | None = None
           ) -> tuple[Signature, ...]:
    """The cheapest legal signature of each axis. `target` is the operand that output 0 is written into."""
    for question in _questions(rule, operands, outputs, machine, target):
        unmoved = question.unmoved()
        if unmoved is not None:
            return unmoved
        best = question.cheapest()
        if best is not None:
            return best
    raise AssertionError(f"all-B is always legal: {rule}")


def rank_choices(rule: Rule, operands: list[Spec], outputs: list[Size], machine: Machine, target: int | None = None
                 ) -> list[tuple[float, tuple[Signature, ...]]]:
    """What `choose` chooses from: the seconds of every choice, the cheapest first."""
    for question in _questions(rule, operands, outputs, machine, target):
        choices = [(question.price(nd), nd) for nd in question.fitting()]
        if choices:
            return sorted(choices, key=lambda choice: choice[0])
    raise AssertionError(f"all-B is always legal: {rule}")


def _candidates(rule: Rule, states: list[Sbp], target: int | None, may_move: bool) -> list[Signature]:
    """Signatures worth pricing on one axis, where the operands have these sbps now."""
    split = any(s.is_split for s in states)
    pending = any(s.is_partial for s in states)
    leader = rule.leads if rule.leads is not None and states[rule.leads].is_split else None
    worthwhile = []
    for sig in signatures(rule):
        if sig.label is not None and not split or leader is not None and sig.inputs[leader] != states[leader]:
            continue                                 # dispatch starts no split; a leading operand keeps its own
        if target is not None and (sig.inputs[target] != sig.outputs[0]
                                   or not may_move and sig.outputs[0] != states[target]):
            continue
        if not pending and not split and any(s.is_partial for s in sig.inputs):
            continue                                 # nothing but whole operands: all-B costs nothing
        worthwhile.append(sig)
    return worthwhile


def _price(nd: tuple[Signature, ...], operands: list[Spec], outputs: list[Size], sizes: Sizes, machine: Machine,
           limit: float, seconds: Seconds = boxing_seconds) -> float:
    """Seconds of one choice; stops counting beyond `limit`."""
    where = operands[0].placement
    cut = prod(parts for sig, parts in zip(nd, where.shape) if sig.label is not None)
    total = prod(sizes.values()) / cut / machine.work
    moved_on = [False] * where.ndim                  # was an operand boxed there that was not broadcast?
    carried = [False] * where.ndim                   # does an operand stay pending there?
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
    return total + _debt(nd, where, outputs, machine, carried, moved_on, seconds)


def _debt(nd: tuple[Signature, ...], where: placement, outputs: list[Size], machine: Machine,
          carried: list[bool], moved_on: list[bool], seconds: Seconds) -> float:
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
