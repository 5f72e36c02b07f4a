"""What an algorithm would take for a call, so that `choose` weighs it beside the signatures of the op's rule.

A signature boxes the operands, and then every rank runs the op. An algorithm does otherwise: it boxes statistics, or
passes parts around while it computes. What it moves follows from the layouts, so its price needs no trial:

    turns       boxings one after the other; those of one turn go together, and their latency counts once
    exchanges   what is not a boxing of whole tensors: so many starts, and bytes that the busiest rank receives
    work        elementary operations of the busiest rank

Both are weighed by what they take until the results lie where the algorithm leaves them, which is where the operands
lie: else a softmax whose operand is moved to other ranks, and stays there, would look cheaper than it is. And memory
may be the reason for an algorithm: it holds parts where a gathering signature holds all. So it may take `extra` more.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, prod
from typing import NamedTuple

from globaltensor.layouts.layout import Layout, Shape, Spec
from globaltensor.rules.call import Call
from globaltensor.runtime.machine import Machine


class PricedBoxing(NamedTuple):
    """A boxing that an algorithm does, of a tensor of this shape and so many bytes."""

    src: Layout
    dst: Layout
    shape: Shape
    nbytes: int


Cost = Callable[[Layout, Layout, Shape, int, Machine], tuple[float, float]]
"""Seconds of a boxing: those that it takes to start, and those that its bytes take."""


@dataclass(frozen=True)
class Offer:
    """An algorithm for one call.

    name       how it is told: "ring attention"
    wants      the layout in which it takes each operand
    gives      the layout in which it leaves each result
    turns      boxings, those of one turn together
    exchanges  starts of other messages, `received` bytes in all by the rank that receives most
    work       elementary operations of the busiest rank; `op_work` those of the op on one rank, where the sizes of the
               rule's labels do not tell
    extra      it may take this share more time than a signature under which a rank holds more of an operand
    returns    is a signature to pay for moving its results to where the algorithm leaves them?
    """

    name: str
    wants: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    work: float
    turns: tuple[tuple[PricedBoxing, ...], ...] = ()
    exchanges: int = 0
    received: float = 0.0
    op_work: float = 0.0
    extra: float = inf
    returns: bool = True

    def seconds(self, machine: Machine, cost: Cost) -> float:
        """Of all of it."""
        latency, bandwidth = machine.link(self.wants[0].placement)
        total = self.work / machine.work + self.exchanges * latency + self.received * (1 / bandwidth +
                                                                                       1 / machine.memory)
        for turn in self.turns:
            total += seconds_together([cost(*boxing, machine) for boxing in turn])
        return total


Offers = Callable[[Call, list[Spec]], Offer | None]
"""What an algorithm offers for a call with operands of these specs; None where it cannot do it."""


def seconds_together(costs: list[tuple[float, float]]) -> float:
    """Seconds of boxings that go together: they start together."""
    return max((start for start, _ in costs), default=0.0) + sum(moving for _, moving in costs)


def largest_part(of: Layout, shape: Shape) -> int:
    """Elements of the largest part that a rank holds."""
    parts = [1] * len(shape)
    for s, n in zip(of.sbp, of.placement.shape):
        if s.is_split:
            parts[s.dim] *= n
    return prod(-(-n // k) for n, k in zip(shape, parts))


def boxings_to(operands: list[Spec], wants: tuple[Layout, ...]) -> tuple[PricedBoxing, ...]:
    """The turn in which operands get to the layouts in which an algorithm takes them."""
    return tuple(PricedBoxing(own.layout, want, own.shape, own.nbytes) for own, want in zip(operands, wants)
                 if own.layout is not want)
