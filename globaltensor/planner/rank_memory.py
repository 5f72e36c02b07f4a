"""Bytes that a rank of a pipeline holds at its peak, of some units in a row or of all such at once.

    always            parameters, the state of the optimizer, buffers, the batch, what ZeRO 3 gathers
    first backward    activations of the micro-batches that the rank keeps; from unit to unit they go and gradients come
    later ones        the same, with all gradients there: only where another forward follows a first backward
    step              gradients, and what the optimizer computes with or ZeRO gathers

A stage also keeps what it received and what it gives, and a packed copy of this until its gradient comes; beside the
micro-batch in work there are one that is received, a gradient that is, and one that is sent. Where a block recomputes,
what it has is there again while its backward goes on. Not counted: a second copy of gradients while they are reduced.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from globaltensor.planner.mesh_costs import MeshCosts, StateBytes, UnitArrays

_MASTER = 4                                          # bytes of an element of what ZeRO steps


class BatchBytes(NamedTuple):
    """Of a sample: what the first stage takes, and what the loss does."""

    inputs: float = 0.0
    targets: float = 0.0


class PeakBytes(NamedTuple):
    """What a rank holds at its peak: gradients and activations of units that backward is not in; and all of it."""

    gradients: float
    activations: float
    total: float


@dataclass(frozen=True)
class UnitBytes:
    """By unit. `kept` of a micro-batch, and the part of it, `beside`, that stays while the unit's backward goes on;
    `first`, `later`: then (unit_memory.py). `held`: parameters, optimizer, buffers. `stepped`: gradients when the
    optimizer steps; `temporaries`: of it, one parameter after another; `gathered`: after it. `ahead`: what ZeRO 3
    gathers in the passes. [units + 1], by where a stage begins or ends: `received` and `unsaved` of a micro-batch, and
    what `crosses` there; of a step the rank's `inputs` and `targets`. `batch`: as it was handed over."""

    kept: np.ndarray
    beside: np.ndarray
    first: np.ndarray
    later: np.ndarray
    gradients: np.ndarray
    held: np.ndarray
    stepped: np.ndarray
    gathered: np.ndarray
    temporaries: np.ndarray
    ahead: np.ndarray
    received: np.ndarray
    unsaved: np.ndarray
    crosses: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray
    batch: float

    @classmethod
    def of_units(cls, mesh: MeshCosts, of: UnitArrays, states: StateBytes, kept: np.ndarray, again: np.ndarray,
                 zero: int, dp: int, pp: int, batch: BatchBytes) -> UnitBytes:
        """Of a mesh, where units keep so much and some run `again`; `batch`: of a whole step."""
        none, before = np.zeros(len(kept)), np.concatenate([[0.0], of.passed[:-1]])
        ways = dp if zero else 1
        wide = _MASTER / mesh.itemsize if ways > 1 else 1.0
        wraps = 0.0 if mesh.itemsize >= _MASTER else 1 / ways    # parts as they are sent
        ahead = (mesh.sizes if pp == 1 else mesh.largest) if zero == 3 and ways > 1 else none
        first, last = np.eye(len(kept) + 1)[[0, -1]]
        return cls(
            kept, np.where(again, np.minimum(before, of.kept), 0.0), of.first, of.later,
            mesh.learned * states.gradients, mesh.sizes * states.parameters + mesh.learned * states.optimizer
            + mesh.buffers, mesh.learned / ways * wide, mesh.learned * (wraps + (zero < 3)) if ways > 1 else none,
            mesh.temporaries / ways * wide, ahead, np.append(np.where(again, 0.0, before), 0.0),
            np.concatenate([[0.0], np.where(again, of.passed, of.unsaved)[:-1], [0.0]]), np.append(before, 0.0),
            first * batch.inputs / dp, last * batch.targets / dp, sum(batch))

    def of_rank(self, stages: Sequence[np.ndarray], peak: Fraction | int, micro_batches: int) -> PeakBytes:
        """Of a rank with these stages, units in a row each, which keeps so many micro-batches at its peak."""
        units = np.concatenate(stages)
        begins, ends = [int(one[0]) for one in stages], [int(one[-1]) + 1 for one in stages]
        beside = float(self.received[begins].sum() + self.unsaved[ends].sum() + self.crosses[ends].sum())
        always = 2 * float(self.ahead[units].max()) + float(self.inputs[begins].max() + self.targets[ends].max())
        always += float(self.crosses[ends].sum() + 2 * self.crosses[begins].sum())
        kept, gradients = self.kept[units], self.gradients[units]
        n, of_all, of_gradients = float(peak), float(kept.sum()), float(gradients.sum())
        before = np.cumsum(kept) - kept if len(stages) == 1 else of_all - kept
        live = (n - 1) * of_all + before + n * beside + always
        later = live + self.beside[units] + self.later[units] + of_gradients
        step = float(self.stepped[units].sum())
        most = PeakBytes(step, 0.0, step + max(float(self.gathered[units].sum()), float(self.temporaries[units].max())))
        several: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        if micro_batches > n or len(stages) > 1:
            several.append((later, np.full(len(units), of_gradients), live))
        else:
            behind = of_gradients - np.cumsum(gradients)
            several.append((live + self.beside[units] + self.first[units] + behind, behind, live))
            if n > 1:
                less = of_all + beside
                several.append((later - less, np.full(len(units), of_gradients), live - less))
        for total, own, activations in several:
            k = int(np.argmax(total))
            if total[k] > most.total:
                most = PeakBytes(float(own[k]), float(activations[k]), float(total[k]))
        return most._replace(total=most.total + self.batch + float(self.held[units].sum()))

    def of_ranges(self, n: float, micro_batches: int) -> np.ndarray:
        """Of a rank with one stage, the units from b to e, for all [b, e]: the same, or with a peak of more than n
        micro-batches at least this."""
        kept, beside, first, later, step = self._parts_of_ranges
        if micro_batches > n:
            most = np.maximum(step, (n - 1) * kept + n * beside + later)
        else:
            most = np.maximum(step, (n - 1) * kept + n * beside + first)
            if n > 1:
                most = np.maximum(most, (n - 2) * kept + (n - 1) * beside + later)
        return most + self.batch + sums_of_units(self.held)

    @cached_property
    def _parts_of_ranges(self) -> tuple[np.ndarray, ...]:
        """Of all ranges: bytes that are kept of a micro-batch, and beside these; at the peak of the first backward, and
        of a later one, of a single micro-batch; of the optimizer's step."""
        kept = sums_of_units(self.kept)
        beside = self.received[:, None] + (self.unsaved + self.crosses)[None, :]
        always = 2 * largest_of_units(self.ahead) + (self.inputs + 2 * self.crosses)[:, None] + (
            self.targets + self.crosses)[None, :] - kept[0][:, None]
        before, coming = np.cumsum(self.kept) - self.kept + self.beside, np.cumsum(self.gradients)
        first = always + largest_of_units(before + self.first - coming) + np.concatenate([[0.0], coming])[None, :]
        later = always + largest_of_units(before + self.later) + sums_of_units(self.gradients)
        step = sums_of_units(self.stepped) + np.maximum(sums_of_units(self.gathered),
                                                        largest_of_units(self.temporaries))
        return kept, beside, first, later, step


def sums_of_units(each: np.ndarray) -> np.ndarray:
    """Of the units from b to e [b, e]."""
    ends = np.concatenate([[0.0], np.cumsum(each)])
    return ends[None, :] - ends[:, None]


def largest_of_units(each: np.ndarray) -> np.ndarray:
    """The largest of the units from b to e [b, e]; 0 of none."""
    n = len(each)
    several = np.zeros((n + 1, n + 1))
    for b in range(n):
        several[b, b + 1:] = np.maximum.accumulate(each[b:])
    return several
