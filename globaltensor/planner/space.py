"""All plans of a GPT on a cluster: what can be chosen, and in which ways layers are cut into stages.

    shape     dp x tp (with or without sequence parallelism) x pp, and samples in a micro-batch
    variant   of a shape: stage of ZeRO, schedule, chunks
    cut       of a variant: layers in each stage; what each rank recomputes follows from its memory

dp x tp x pp need not be all devices: some may stay idle. tp divides the heads, dp x micro-batch the global batch. Of
the ways to cut, all where there are few; else those in which the first and the last stage have some layers fewer or
more than the others, which are as even as can be.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from math import comb
from typing import NamedTuple

from globaltensor.errors import GlobalTensorError
from globaltensor.schedules.generators import GENERATORS
from globaltensor.simulator.gpt import GPT, RECOMPUTE

ALL_CUTS = 128                                       # so many are few
MANY_CUTS = 4096                                     # more than these are not gone through
_MOST_CHUNKS = 8                                     # stages on a rank
_FEWER_FIRST, _FEWER_LAST = 3, 10                    # than the even cut: the last stage also has the output layer


class BatchError(GlobalTensorError, ValueError):
    """A global batch, or fixed sizes, with which there is no plan at all."""


@dataclass(frozen=True)
class Fixed:
    """What is not to be chosen, but given; None: chosen. `excluded`: pairs of a name and a value that may not be
    chosen, the name being one of these, or "cut": how many layers each stage has."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    sequence_parallel: bool | None = None
    micro_batch: int | None = None
    zero: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    chunks: int | None = None
    excluded: frozenset[tuple[str, object]] = frozenset()

    def allows(self, name: str, value: object) -> bool:
        """May this be chosen?"""
        wanted = getattr(self, name, None)
        return (wanted is None or wanted == value) and (name, value) not in self.excluded

    @property
    def recomputes(self) -> tuple[str, ...]:
        """What a rank may recompute, the fastest first."""
        return RECOMPUTE if self.recompute is None else (self.recompute,)


class MeshShape(NamedTuple):
    """Ranks along each axis, and samples in a micro-batch."""

    dp: int
    tp: int
    sequence_parallel: bool
    pp: int
    micro_batch: int


class Variant(NamedTuple):
    """A shape with all but its cut."""

    shape: MeshShape
    zero: int
    schedule: str
    chunks: int


def shapes(gpt: GPT, devices: int, global_batch: int, fixed: Fixed) -> list[MeshShape]:
    """All of them. Raises BatchError, or ShapeError for tp, where there is none, and says which choice leaves none."""
    several = list(_all_shapes(gpt, devices, global_batch, fixed))
    if several:
        return several
    splits = (fixed.dp or 1) * (fixed.micro_batch or 1)
    if global_batch % splits:
        raise BatchError(f"a global batch of {global_batch} in micro-batches of {fixed.micro_batch or 1} on dp "
                         f"{fixed.dp or 1}", "dp x micro-batch divides the global batch",
                         f"--global-batch {max(global_batch // splits, 1) * splits}")
    gpt.check_tensor_parallel(fixed.tp or 1)
    if fixed.pp and fixed.pp > gpt.layers:
        raise BatchError(f"pp {fixed.pp} with {gpt.layers} layers", "a stage has at least one layer",
                         f"--pp {gpt.layers}")
    ranks = (fixed.dp or 1) * (fixed.tp or 1) * (fixed.pp or 1)
    raise BatchError(f"{ranks} ranks on {devices} devices", "dp x tp x pp are at most as many as the devices",
                     f"--devices {ranks}")


def _all_shapes(gpt: GPT, devices: int, global_batch: int, fixed: Fixed) -> Iterator[MeshShape]:
    for tp in divisors(gpt.heads):
        for dp in divisors(global_batch):
            most = min(devices // (dp * tp), gpt.layers)
            if most < 1 or not (fixed.allows("tp", tp) and fixed.allows("dp", dp)):
                continue
            sizes = [b for b in divisors(global_batch // dp) if fixed.allows("micro_batch", b)]
            parallel = [sp for sp in (False, True) if fixed.allows("sequence_parallel", sp) and (tp > 1 or not sp)]
            if tp == 1 and fixed.sequence_parallel:
                parallel = [False]                   # there is nothing to split the sequence over
            for pp in range(1, most + 1):
                if fixed.allows("pp", pp):
                    yield from (MeshShape(dp, tp, sp, pp, b) for sp in parallel for b in sizes)


def variants(gpt: GPT, shape: MeshShape, fixed: Fixed) -> Iterator[Variant]:
    """All of a shape. One stage alone has one schedule, and one replica nothing that ZeRO could split."""
    zeros = [zero for zero in range(4) if fixed.allows("zero", zero)] if shape.dp > 1 else [0]
    for schedule, chunks in kinds_of_schedules(shape.pp, gpt.layers):
        if shape.pp == 1 or fixed.allows("schedule", schedule) and fixed.allows("chunks", chunks):
            yield from (Variant(shape, zero, schedule, chunks) for zero in zeros)


@lru_cache(1_000)
def kinds_of_schedules(pp: int, layers: int) -> tuple[tuple[str, int], ...]:
    if pp == 1:
        return (("1f1b", 1),)
    several: list[tuple[str, int]] = []
    for name in GENERATORS:
        several += [(name, v) for v in chunks_of(name) if pp * v <= layers]
    return tuple(several)


def chunks_of(schedule: str) -> Sequence[int]:
    """The stages on each rank with which a schedule is tried."""
    chunks = GENERATORS[schedule][1]
    few = 1 if schedule == "zb-h1" else 2            # with one, interleaved is 1f1b and bfs is gpipe
    return [chunks] if chunks else range(few, _MOST_CHUNKS + 1)


@lru_cache(1_000)
def cuts(layers: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Ways to cut so many layers into stages: layers of each. The even one is among them."""
    if is_complete(layers, stages):
        return all_cuts(layers, stages)
    several, each = dict.fromkeys([_even(layers, stages)]), layers // stages
    for last in range(max(each - _FEWER_LAST, 1), each + 3):
        for first in range(max(each - _FEWER_FIRST, 1), each + 3):
            between = layers - first - last
            if between >= stages - 2 and (stages > 2 or not between):
                rest = _even(between, stages - 2)
                several |= dict.fromkeys([(first, *rest, last), (first, *rest[::-1], last)])
    return tuple(several)


@lru_cache(100)
def all_cuts(layers: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """All ways to cut so many layers into stages."""
    ends = [(0, *between, layers) for between in combinations(range(1, layers), stages - 1)]
    return tuple(tuple(b - a for a, b in pairwise(end)) for end in ends)


def is_complete(layers: int, stages: int, most: int = ALL_CUTS) -> bool:
    """Are the cuts all there are, and these no more than so many?"""
    return comb(layers - 1, stages - 1) <= most


def even_cut(layers: int, stages: int) -> tuple[int, ...]:
    """As even as can be, the first stages having one more."""
    return _even(layers, stages)


def _even(layers: int, stages: int) -> tuple[int, ...]:
    each, more = divmod(layers, stages) if stages else (0, 0)
    return (each + 1,) * more + (each,) * (stages - more)


def divisors(n: int) -> list[int]:
    """Of a number, in order."""
    small = [k for k in range(1, int(n ** 0.5) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})

