"""The time that each action takes: what a simulation adds up.

Times are exact where possible: `Costs.exact` reads "18.522" or "1/3" as fractions and keeps all of them as integers of
one unit, so that a simulation neither rounds nor pays for fractions. Times from a cluster are floats, in seconds.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from globaltensor.schedules.schedule import ScheduleError

Number = int | float | Fraction


class Hop(NamedTuple):
    """A transfer of a stage's output to the next stage, or of a gradient back: it occupies the link for `busy`, and
    arrives `latency` later. Transfers of one ordered pair of ranks take the link one after the other."""

    latency: Number = 0
    busy: Number = 0


@dataclass(frozen=True)
class Costs:
    """Per stage, in units of `unit`: forward, input gradient, weight gradient; hops[s] is the transfer between stages
    s and s + 1, where these are on different ranks."""

    forward: tuple[Number, ...]
    inputs: tuple[Number, ...]
    weights: tuple[Number, ...]
    hops: tuple[Hop, ...]
    unit: Fraction | float = 1.0

    @property
    def backward(self) -> tuple[Number, ...]:
        """The whole backward: I and W."""
        return tuple(i + w for i, w in zip(self.inputs, self.weights))

    @staticmethod
    def exact(times: Sequence[str | Number], stages: int, chunks: int = 1) -> Costs:
        """From TF, TB, TW and Tcomm: the times of a whole rank for one micro-batch, TB without the weight gradient. A
        stage takes 1 / `chunks` of them. Tcomm is the delay between two ranks, whatever the size of the stage."""
        if not 3 <= len(times) <= 4:
            raise ScheduleError(f"{len(times)} times", "they are TF,TB,TW,Tcomm: forward, input gradient, weight "
                                "gradient, and one transfer between ranks", "1,1,1,0")
        parsed = [_fraction(time) for time in times] + [Fraction(0)] * (4 - len(times))
        per_stage = [time / chunks for time in parsed[:3]] + parsed[3:]
        # the unit in which all times are whole: sums of ints are exact
        scale = lcm(*(time.denominator for time in per_stage))
        forward, inputs, weights, hop = (int(time * scale) for time in per_stage)
        return Costs((forward,) * stages, (inputs,) * stages, (weights,) * stages,
                     (Hop(latency=hop),) * max(stages - 1, 0), Fraction(1, scale))


def _fraction(time: str | Number) -> Fraction:
    try:
        known = exact(time)
    except (ValueError, ArithmeticError):
        known = Fraction(-1)
    if known < 0:
        raise ScheduleError(f"{time!r} is not a time", "a time is a number, 0 or more", "18.522, or 1/3")
    return known


def exact(number: str | Number) -> Fraction:
    """A number as it is written. Raises ValueError or ArithmeticError where it is none, or has more than 30 digits
    before or behind the point: 1e999999999 would be written out."""
    if isinstance(number, str) and "/" not in number:
        digits = Decimal(number)
        if not digits.is_finite() or digits.adjusted() > 30 or int(digits.as_tuple().exponent) < -30:
            raise ValueError(number)
    return Fraction(number)
