"""The cheapest choice of signatures by native code: what `choose` works out in Python, of the same numbers.

An op of three operands on four axes has thousands of choices, and each a price. Where an algorithm competes, or ranks
are on several hosts, or a layout has a region per rank, Python prices them.
"""
from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_int64

from globaltensor.boxings.native_prices import bind, is_small
from globaltensor.boxings.plan import nominal_shape
from globaltensor.boxings.traffic import axis_codes
from globaltensor.layouts.layout import Shape, Spec
from globaltensor.layouts.placement import placement
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.rules.language import Signature
from globaltensor.runtime.machine import Machine

_cheapest = bind("gt_cheapest", 3, c_int64)


def number_of_cheapest(axes: Sequence[Sequence[Signature]], operands: Sequence[Spec],
                       outputs: Sequence[tuple[Shape, int]], machine: Machine, work: Iterable[float],
                       fits: bytes | None) -> int | None:
    """Which of the choices of a candidate per axis is the cheapest, counted with the last axis fastest; None where
    native code does not tell. `work` are seconds by the axes that are cut, a bit each; `fits` says of each choice
    whether sizes allow it, and is None where they allow all."""
    where = operands[0].placement
    shapes = [*(own.shape for own in operands), *(shape for shape, _ in outputs)]
    if _cheapest is None or machine.hosts or any(isinstance(own.layout, RankRegions) for own in operands) or not all(
            is_small(where.shape, shape) for shape in shapes):
        return None
    numbers = array("q", _as_numbers(axes, operands, outputs, where))
    rates = array("d", (machine.memory, *machine.link(where), *work))
    number = _cheapest(numbers.buffer_info()[0], rates.buffer_info()[0], fits)
    assert number >= 0                               # one fits at least: who asks has looked
    return int(number)


def _as_numbers(axes: Sequence[Sequence[Signature]], operands: Sequence[Spec], outputs: Sequence[tuple[Shape, int]],
             where: placement) -> list[int]:
    """The question as csrc/pricing/pricing.cpp reads it."""
    most = len(where.flat)
    numbers = [where.ndim, *where.shape, len(operands), len(outputs)]
    for own in operands:
        numbers += (own.ndim, *nominal_shape(own.shape, most), own.nbytes, *axis_codes(own.sbp))
    for shape, nbytes in outputs:
        numbers += (len(shape), *nominal_shape(shape, most), nbytes, *(-1,) * where.ndim)
    for candidates in axes:
        numbers.append(len(candidates))
        for sig in candidates:
            numbers += (sig.label is not None, *axis_codes(sig.inputs), *axis_codes(sig.outputs))
    return numbers
