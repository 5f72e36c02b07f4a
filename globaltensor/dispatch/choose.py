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

An algorithm for the op (ring attention, a softmax of maxima and sums) competes with the signatures by what it offers
(algorithms/offer.py). Where nothing would have to move, it is not asked.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import inf, prod
from typing import NamedTuple

from globaltensor.algorithms.offer import Cost, Offer, largest_part, seconds_together
from globaltensor.boxings.plan import boxing_cost, least_cost
from globaltensor.dispatch.native_choice import number_of_cheapest
from globaltensor.layouts.layout import Layout, Spec, layout
from globaltensor.layouts.sbp import Sbp, broadcast
from globaltensor.rules.language import Dims, Rule, Signature, Sizes, fits, label_sizes, signatures_from
from globaltensor.runtime.machine import Machine

Size = tuple[tuple[int, ...], int]                   # shape and bytes of an output
Moved = Counter[tuple[Layout, Layout, Dims, int]]    # boxings: from, to, of which labels, bytes of an element

_EQUAL = 1e-15                                       # seconds by which sums differ that are equal but for rounding
_NUDGE = 1e-9                                        # seconds; settles ties, below any real cost


class _Question(NamedTuple):
    """What is to be chosen: a signature per axis, from the candidates on each, for operands and outputs like these; or
    the algorithm that is offered."""

    rule: Rule
    operands: list[Spec]
    outputs: list[Size]
    machine: Machine
    axes: list[list[Signature]]
    sizes: Sizes
    offer: Offer | None = None

    def fitting(self) -> Iterator[tuple[Signature, ...]]:
        """The choices that these sizes allow."""
        return (nd for nd in product(*self.axes) if self.fits(nd))

    def fits(self, nd: tuple[Signature, ...]) -> bool:
        return fits(self.rule, nd, self.operands[0].placement.shape, self.sizes)

    def price(self, nd: tuple[Signature, ...], limit: float = inf, parts: _Parts | None = None) -> float:
        """What the choice counts as: its seconds, or more, where a rank would hold more than by the algorithm."""
        if self.offer is None or not self.holds_more(nd):
            return self.seconds(nd, limit, parts)
        return inf if self.offer.extra == inf else self.seconds(nd, limit, parts) * (1 + self.offer.extra)

    def seconds(self, nd: tuple[Signature, ...], limit: float = inf, parts: _Parts | None = None) -> float:
        parts = parts or _Parts(self, boxing_cost)
        if self.offer is not None:
            return _price_beside(self.offer, nd, self, parts)
        return _price(nd, self, limit, parts)

    def holds_more(self, nd: tuple[Signature, ...]) -> bool:
        """Would a rank hold a larger part of an operand than it has now, or than the algorithm takes?"""
        assert self.offer is not None
        return any(largest_part(layout(own.placement, tuple(sig.inputs[q] for sig in nd)), own.shape)
                   > max(largest_part(at, own.shape) for at in (own.layout, other))
                   for q, (own, other) in enumerate(zip(self.operands, self.offer.wants)))

    def cheapest(self, below: float = inf) -> tuple[Signature, ...] | None:
        """The best choice, the first of equals; None where none is below a price."""
        if self.offer is not None:
            return self.cheapest_by_parts(below)
        parts = self.operands[0].placement.shape
        work = (self.work(prod([n for axis, n in enumerate(parts) if axes_cut >> axis & 1]))
                for axes_cut in range(1 << len(parts)))
        some_fit = bool(self.rule.even or self.rule.nonempty)
        number = number_of_cheapest(self.axes, self.operands, self.outputs, self.machine, work,
                                    bytes(map(self.fits, product(*self.axes))) if some_fit else None)
        return self.cheapest_by_parts() if number is None else self.choice(number)

    def moved(self, nd: tuple[Signature, ...]) -> Moved:
        """The boxings of a choice, now and of what it leaves pending, at any size: from where to where, of which labels
        and how many bytes an element."""
        where, moved, own = self.operands[0].placement, Moved(), 0
        for q, x in enumerate(self.operands):
            want = tuple(sig.inputs[q] for sig in nd)
            for axis, (s, t) in enumerate(zip(x.sbp, want)):
                own |= (s != t and not s.is_broadcast or s.is_partial and t.is_partial) << axis
            moved[x.layout, layout(where, want), self.rule.inputs[q], x.dtype.itemsize] += want != x.sbp
        for k, (shape, nbytes) in enumerate(self.outputs):
            left = tuple(s if not s.is_partial or own >> axis & 1 else broadcast
                         for axis, s in enumerate(sig.outputs[k] for sig in nd))
            done = tuple(broadcast if s.is_partial else s for s in left)
            if left != done:
                of = layout(where, left), layout(where, done)
                moved[(*of, self.rule.outputs[k], nbytes // max(prod(shape), 1))] += 1
        return moved

    def choice(self, number: int) -> tuple[Signature, ...]:
        """Choice `number` of `product(*axes)`."""
        nd = []
        for candidates in reversed(self.axes):
            number, at = divmod(number, len(candidates))
            nd.append(candidates[at])
        return tuple(reversed(nd))

    def work(self, cut: int) -> float:
        """Seconds of the work that each rank does, where labels are cut into so many parts."""
        return prod(self.sizes.values()) / cut / self.machine.work

    def cheapest_by_parts(self, below: float = inf) -> tuple[Signature, ...] | None:
        """The same without native code. What a choice costs at least is known without a plan of its boxings: so those
        that may be cheap are priced first, and most others never."""
        choices, bound, exact = list(self.fitting()), _Parts(self, least_cost), _Parts(self, boxing_cost)
        bounds = [self.price(nd, inf, bound) for nd in choices]
        prices, least = [inf] * len(choices), below
        for nth in sorted(range(len(choices)), key=bounds.__getitem__):
            if bounds[nth] > least * (1 + 1e-9) or bounds[nth] == inf:
                break
            prices[nth] = self.price(choices[nth], least + _EQUAL, exact)
            least = min(least, prices[nth])
        if least == below:
            return None
        return next(nd for nd, price in zip(choices, prices) if price <= least + _EQUAL)

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


def _questions(rule: Rule, operands: list[Spec], outputs: list[Size], machine: Machine, target: int | None,
               offer: Offer | None = None) -> Iterator[_Question]:
    """The question, strictly; and for an op that writes, once more with its target free to move.

    The target and output 0 are one memory. So it is written as it is laid out, if that is legal; else it is moved to
    where that is legal, written, and moved back. Beside an algorithm, axes stay on which nothing must move.
    """
    sizes = label_sizes(rule, [own.shape for own in operands])
    for may_move in (False, True) if target is not None else (True,):
        axes = [_candidates(rule, operands, axis, target, may_move) for axis in range(operands[0].placement.ndim)]
        question = _Question(rule, operands, outputs, machine, axes, sizes, offer)
        if offer is not None:
            settled = question._replace(axes=[_settled(candidates, tuple(own.sbp[axis] for own in operands))
                                              for axis, candidates in enumerate(axes)])
            if next(settled.fitting(), None) is not None:
                question = settled
        yield question


Choice = tuple[Signature, ...] | Offer               # the signature of each axis, or an algorithm


class Ranked(NamedTuple):
    """A choice and its seconds; it `counts` as more, where a rank would hold more than by the algorithm beside it."""

    counts: float
    seconds: float
    choice: Choice


class Contest(NamedTuple):
    """What a choice is made of: the rule, the operands, shapes and bytes of what comes out. `target` is the operand
    that output 0 is written into, `offer` that of the op's algorithm."""

    rule: Rule
    operands: list[Spec]
    outputs: list[Size]
    machine: Machine
    target: int | None = None
    offer: Offer | None = None

    def choice(self) -> Choice:
        """The cheapest legal signature of each axis; or the algorithm, where none is cheaper."""
        for question in _questions(*self):
            if (unmoved := question.unmoved()) is not None:
                return unmoved
            if next(question.fitting(), None) is not None:
                below = inf if self.offer is None else self.offer.seconds(self.machine, boxing_cost)
                best = question.cheapest(below) or self.offer
                assert best is not None              # there is one that fits
                return best
        raise AssertionError(f"all-B is always legal: {self.rule}")

    def unmoved(self) -> tuple[Signature, ...] | None:
        """The choice that moves nothing, where there is one that cannot be beaten."""
        return next(_questions(*self)).unmoved()

    def wins_at_any_size(self, choice: tuple[Signature, ...]) -> bool:
        """Does this choice move nothing but what each other one moves too, if no part is empty? Then none is cheaper at
        any size, as a boxing that is left out takes longer to start than what settles ties."""
        if self.offer is not None or self.target is not None or self.rule.even or self.rule.nonempty:
            return False
        if self.machine.link(self.operands[0].placement)[0] < 100 * _NUDGE:
            return False
        question, = _questions(*self)
        where, mine = self.operands[0].placement, question.moved(choice)
        for nd in product(*question.axes):
            cut = [prod([n for sig, n in zip(of, where.shape) if sig.label is not None]) for of in (choice, nd)]
            if nd != choice and not (cut[0] >= cut[1] and _moves_no_more(mine, question.moved(nd))):
                return False
        return True

    def ranking(self) -> list[Ranked]:
        """All that is chosen from, the best first."""
        for question in _questions(*self):
            choices = [Ranked(question.price(nd), question.seconds(nd), nd)
                       for nd in question.fitting()]
            if choices and self.offer is not None:
                seconds = self.offer.seconds(self.machine, boxing_cost)
                choices.insert(0, Ranked(seconds, seconds, self.offer))
            if choices:
                return sorted(choices, key=lambda one: one[:2])
        raise AssertionError(f"all-B is always legal: {self.rule}")


def choose(rule: Rule, operands: list[Spec], outputs: list[Size], machine: Machine, target: int | None = None
           ) -> tuple[Signature, ...]:
    """The cheapest legal signature of each axis."""
    best = Contest(rule, operands, outputs, machine, target).choice()
    assert not isinstance(best, Offer)               # as there was none
    return best


def _moves_no_more(mine: Moved, other: Moved) -> bool:
    """Is all of `mine` in `other`, but for a cut of what is whole? That needs no message, and takes less than to gather
    as large a tensor, or to cut it in another way and to move parts of it."""
    rest, others = list((mine - other).elements()), list((other - mine).elements())
    if len(rest) != 1:
        return not rest
    src, dst, *of = rest[0]
    alike = [(a.sbp, b.sbp) for a, b, *item in others if item == of]
    gathered = any(a != b and not any(t.is_split for t in b) for a, b in alike)
    cut = [any(b[axis].is_split for _, b in alike) for axis in range(len(dst.sbp))]
    turned = len(alike) > 1 and any(s.is_split and t.is_split and s != t for a, b in alike for s, t in zip(a, b))
    return (all(s == t or s.is_broadcast and t.is_split for s, t in zip(src.sbp, dst.sbp))
            and (gathered or turned and all(t.is_split for t, has in zip(dst.sbp, cut) if has)))


def _candidates(rule: Rule, operands: list[Spec], axis: int, target: int | None, may_move: bool) -> list[Signature]:
    """Signatures worth pricing on one axis, where the operands are laid out like this now."""
    states = [own.sbp[axis] for own in operands]
    split, pending = any(s.is_split for s in states), any(s.is_partial for s in states)
    leader = rule.leads if rule.leads is not None and states[rule.leads].is_split else None
    worthwhile = []
    for sig in signatures_from(rule, states, [own.dtype for own in operands]):
        if sig.label is not None and not split or leader is not None and sig.inputs[leader] != states[leader]:
            continue                                 # dispatch starts no split; a leading operand keeps its own
        if target is not None and (sig.inputs[target] != sig.outputs[0]
                                   or not may_move and sig.outputs[0] != states[target]):
            continue
        if not pending and not split and any(s.is_partial for s in sig.inputs):
            continue                                 # nothing but whole operands: all-B costs nothing
        worthwhile.append(sig)
    return worthwhile


def _settled(candidates: list[Signature], states: tuple[Sbp, ...]) -> list[Signature]:
    """The candidate that moves nothing, if there is one and nothing is pending; else all."""
    same = [] if any(s.is_partial for s in states) else [sig for sig in candidates if sig.inputs == states]
    return same[:1] or candidates


class _OfOperand(NamedTuple):
    """What a choice does to one operand: the seconds of its boxing; on which axes it is boxed and was not broadcast,
    and on which it stays pending, a bit each; and the seconds by which that settles ties."""

    seconds: float
    moves: int
    carries: int
    nudge: float


class _Parts:
    """What choices cost by their parts, by one kind of `cost`: hundreds of choices want few layouts of each operand,
    and give few. Each part is known by the states of the axes in it, as numbers: those hash faster."""

    def __init__(self, question: _Question, cost: Cost) -> None:
        self.operands, self.outputs, self.machine, self.cost = (
            question.operands, question.outputs, question.machine, cost)
        self.where = question.operands[0].placement
        first: dict[Sbp, int] = {}
        self._numbers = {id(s): first.setdefault(s, len(first)) for candidates in question.axes for sig in candidates
                         for s in (*sig.inputs, *sig.outputs)}
        self._of_operand: list[dict[tuple[int, ...], _OfOperand]] = [{} for _ in question.operands]
        self._debts: list[dict[tuple[int, ...], float]] = [{} for _ in question.outputs]

    def of_operand(self, q: int, nd: tuple[Signature, ...]) -> _OfOperand:
        known, numbers = self._of_operand[q], self._numbers
        key = tuple([numbers[id(sig.inputs[q])] for sig in nd])
        part = known.get(key)
        if part is None:
            part = known[key] = self._price_operand(self.operands[q], tuple(sig.inputs[q] for sig in nd))
        return part

    def _price_operand(self, own: Spec, want: tuple[Sbp, ...]) -> _OfOperand:
        moves, carries, nudge = 0, 0, 0.0
        for axis, (s, t) in enumerate(zip(own.sbp, want)):
            moves |= (s != t and not s.is_broadcast) << axis
            carries |= (s.is_partial and t.is_partial) << axis
            nudge += _NUDGE * ((t.is_partial and not s.is_partial) + 0.01 * (s != t))
        seconds = 0.0 if want == own.sbp else sum(
            self.cost(own.layout, layout(self.where, want), own.shape, own.nbytes, self.machine))
        return _OfOperand(seconds, moves, carries, nudge)

    def changes(self, nd: tuple[Signature, ...]) -> tuple[int, float]:
        """The axes on which what is pending in the end is the choice's own doing, and the seconds that settle ties."""
        parts = [self.of_operand(q, nd) for q in range(len(self.operands))]
        own = 0
        for part in parts:
            own |= part.moves | part.carries
        return own, sum(part.nudge for part in parts)

    def debt(self, nd: tuple[Signature, ...], own: int) -> float:
        """What reducing the pending outputs will cost, on the axes where that is the choice's own doing."""
        total = 0.0
        for k, (shape, nbytes) in enumerate(self.outputs):
            states_after = [sig.outputs[k] for sig in nd]
            if not nbytes or not any(s.is_partial for s in states_after):
                continue
            key = (own, *[self._numbers[id(s)] for s in states_after])
            if key not in self._debts[k]:
                states = tuple(s if not s.is_partial or own >> axis & 1 else broadcast
                               for axis, s in enumerate(states_after))
                done = tuple(broadcast if s.is_partial else s for s in states)
                self._debts[k][key] = 0.0 if states == done else sum(self.cost(
                    layout(self.where, states), layout(self.where, done), shape, nbytes, self.machine))
            total += self._debts[k][key]
        return total


def _price(nd: tuple[Signature, ...], question: _Question, limit: float, parts: _Parts) -> float:
    """Seconds of one choice; stops counting beyond `limit`."""
    total = question.work(prod([n for sig, n in zip(nd, parts.where.shape) if sig.label is not None]))
    own, nudge = 0, 0.0
    for q in range(len(question.operands)):
        seconds, moves, carries, more = parts.of_operand(q, nd)
        total += seconds
        if seconds and total > limit:
            return total
        own |= moves | carries
        nudge += more
    return total + nudge + parts.debt(nd, own)


def _price_beside(offer: Offer, nd: tuple[Signature, ...], question: _Question, parts: _Parts) -> float:
    """Seconds of a choice beside an algorithm: until its results lie where the algorithm leaves them, if they must. As
    an algorithm tells what goes together, operands do, and so do results; and the work is that of the largest part."""
    _, operands, outputs, machine, _, sizes, _ = question
    where, (own_doing, nudge), cost = parts.where, parts.changes(nd), parts.cost
    wants, gives = layouts(nd, operands, len(outputs))
    total = (offer.op_work or prod(sizes.values())) * work_share(nd, where.shape, sizes) / machine.work
    total += nudge + seconds_together([cost(own.layout, want, own.shape, own.nbytes, machine)
                                       for own, want in zip(operands, wants) if own.layout is not want])
    if not offer.returns:
        return total + parts.debt(nd, own_doing)
    return total + seconds_together([cost(gets, wanted, shape, nbytes, machine) for gets, wanted, (shape, nbytes)
                                     in zip(gives, offer.gives, outputs) if gets is not wanted and nbytes])


def split_ways(nd: tuple[Signature, ...], axes: tuple[int, ...]) -> dict[str, int]:
    """Into how many parts each label is split."""
    ways: dict[str, int] = {}
    for sig, parts in zip(nd, axes):
        if sig.label is not None:
            ways[sig.label] = ways.get(sig.label, 1) * parts
    return ways


def work_share(nd: tuple[Signature, ...], axes: tuple[int, ...], sizes: Sizes) -> float:
    """The part of the work that the rank does that does most."""
    return prod(-(-sizes[label] // n) / sizes[label] if sizes.get(label) else 1 / n
                for label, n in split_ways(nd, axes).items())


def layouts(nd: tuple[Signature, ...], operands: list[Spec], outputs: int) -> tuple[list[Layout], list[Layout]]:
    """The layouts that a choice wants of the operands and gives to the outputs."""
    where = operands[0].placement
    return ([layout(where, tuple(sig.inputs[q] for sig in nd)) for q in range(len(operands))],
            [layout(where, tuple(sig.outputs[k] for sig in nd)) for k in range(outputs)])
