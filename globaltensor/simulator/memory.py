"""The memory of a rank for parameters, gradients and optimizer state, and how much of it ZeRO saves.

For each parameter, mixed-precision Adam keeps 2 bytes of it, 2 of its gradient, and 12 of optimizer state: a copy in
32 bits, momentum, variance. Over N data-parallel ranks ZeRO (arXiv:1910.02054) shards

    stage 1   the optimizer state     2 + 2 + 12/N
    stage 2   and gradients           2 + (2 + 12)/N
    stage 3   and parameters          (2 + 2 + 12)/N
"""
from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple, Protocol

from globaltensor.errors import ShapeError
from globaltensor.tensors import gradients


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


class Mesh(Protocol):
    """What is asked of a plan."""

    @property
    def dp(self) -> int:
        """Ranks along it."""

    @property
    def tp(self) -> int:
        """Likewise."""

    @property
    def pp(self) -> int:
        """Likewise."""

    @property
    def zero(self) -> int:
        """Its stage."""


def splits_gradients_early(plan: Mesh, parameters: int) -> bool:
    """Are gradients of a rank split in every backward? Those of a pipeline wait for the last one, and so do a few."""
    return plan.zero > 1 and plan.dp > 1 and plan.pp == 1 and 2 * parameters * plan.tp >= gradients.EARLY


def model_bytes(plan: Mesh, stages: list[tuple[int, ...]]) -> float:
    """Bytes of parameters, gradients and optimizer state on a rank with stages of such parts, at the most."""
    # of the part that is computed and of the next
    gathered = 2 * max(map(sum, (pair for parts in stages for pair in pairwise((*parts, 0)))))
    gathered = gathered if plan.zero == 3 and plan.dp > 1 else 0
    return float(held_states(plan, sum(map(sum, stages))).total + gathered)


def held_states(plan: Mesh, parameters: int, of_rank: int = 0) -> ModelStates:
    """Bytes of so many parameters, their gradients and the optimizer's state on a rank, which has `of_rank` in all."""
    states = model_states(parameters, plan.zero, plan.dp)
    if splits_gradients_early(plan, of_rank or parameters):
        return states
    return states._replace(gradients=Fraction(2 * parameters))   # sharded after the last backward only
