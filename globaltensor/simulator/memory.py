"""The memory of a rank for parameters, gradients and optimizer state, and how much of it ZeRO saves.

For each parameter, mixed-precision Adam keeps 2 bytes of it, 2 of its gradient, and 12 of optimizer state: a copy in
32 bits, momentum, variance. Over N data-parallel ranks ZeRO (arXiv:1910.02054) shards

    stage 1   the optimizer state     2 + 2 + 12/N
    stage 2   and gradients           2 + (2 + 12)/N
    stage 3   and parameters          (2 + 2 + 12)/N
"""
from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from globaltensor.errors import ShapeError


class ModelStates(NamedTuple):
    """Bytes on one rank."""

    parameters: Fraction
    gradients: Fraction
    optimizer: Fraction

    @property
    def total(self) -> Fraction:
        return self.parameters + self.gradients + self.optimizer


def model_states(parameters: int | Fraction, zero: int = 0, ranks: int = 1,
                 bytes_each: tuple[int, int, int] = (2, 2, 12)) -> ModelStates:
    """Bytes on each of `ranks` data-parallel ranks; `bytes_each`: of a parameter, its gradient, its optimizer state."""
    if zero not in range(4):
        raise ShapeError(f"ZeRO stage {zero}", "the stages are 0 (nothing is sharded), 1, 2 and 3")
    if ranks < 1 or parameters < 0:
        raise ShapeError(f"{parameters} parameters over {ranks} ranks", "there is at least one rank")
    totals = [Fraction(parameters) * size for size in bytes_each]
    return ModelStates(*(size / ranks if zero >= from_stage else size for size, from_stage in zip(totals, (3, 2, 1))))
