"""Prices of boxings on one placement by native code: what traffic.py and plan.py work out, of the same numbers.

An op that was never seen is decided by hundreds of prices, most of them of steps that are not even: by arithmetic that
takes Python milliseconds. Layouts go there as numbers (`axis_codes`), so nothing is known there of ranks.
"""
from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int, c_void_p
from math import prod
from typing import Any

from globaltensor.runtime.native import core_lib

LIMITS = (8, 16)                                     # axes and dims: kAxes and kDims of csrc/pricing/traffic.h
_EXACT = 1 << 53                                     # below, integers and the doubles of both languages are alike


def bind(name: str, pointers: int, result: Any) -> Any:
    """A function of csrc/pricing, of pointers; None without the native code, or where it is too old to have it."""
    function = getattr(core_lib, name, None)
    if function is not None:
        function.argtypes, function.restype = [c_void_p] * pointers, result
    return function


_step_traffic = bind("gt_step_traffic", 2, None)
_search_between = bind("gt_search_between", 4, c_int)


def is_small(sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Do the numbers of a tensor of this shape on axes of these sizes have room in native ones?"""
    return len(sizes) <= LIMITS[0] and len(shape) <= LIMITS[1] and prod(sizes) * max(prod(shape), 1) < _EXACT


def step_traffic(src: Sequence[int], dst: Sequence[int], sizes: Sequence[int], shape: Sequence[int]
                 ) -> tuple[int, int] | None:
    """What `traffic` tells of a step, None where native code does not."""
    if _step_traffic is None or not is_small(sizes, shape):
        return None
    numbers, moved = array("q", (len(sizes), *sizes, len(shape), *shape, *src, *dst)), array("q", (0, 0))
    _step_traffic(numbers.buffer_info()[0], moved.buffer_info()[0])
    return moved[0], moved[1]


def search_between(src: Sequence[int], dst: Sequence[int], sizes: Sequence[int], shape: Sequence[int], magnitude: int,
                   rates: array[float], by_axes: bool) -> tuple[float, float, tuple[int, ...] | None] | None:
    """Seconds of the best path, those that are fixed and those per byte, and the state between; None where native code
    does not tell. `rates` are that of memory, and links: see csrc/pricing/search.h."""
    if _search_between is None or not is_small(sizes, shape):
        return None
    numbers = array("q", (len(sizes), *sizes, len(shape), *shape, *src, *dst, magnitude, by_axes))
    seconds, between = array("d", (0, 0)), array("q", (0,) * len(sizes))
    via = _search_between(numbers.buffer_info()[0], rates.buffer_info()[0], seconds.buffer_info()[0],
                          between.buffer_info()[0])
    return seconds[0], seconds[1], tuple(between) if via else None
