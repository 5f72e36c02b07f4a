"""Of dtypes: what sums are accumulated in, the signed one of unsigned numbers, the least and the greatest value."""
from __future__ import annotations

import torch

# torch adds and fills none of these. Seen as signed ones, their sums have the same bits.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
FLOAT8 = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
# What holds all values of a dtype that torch only moves, and only in some layouts.
WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64,        # as bits, and back
         torch.complex32: torch.complex64, **dict.fromkeys(FLOAT8, torch.float32)}


def is_inexact(dtype: torch.dtype) -> bool:
    """Is it one of real or complex floats?"""
    return dtype.is_floating_point or dtype.is_complex


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of numbers of this dtype are accumulated in: float32 for floats of 16 bits and fewer, complex64 for
    pairs of such, else the dtype itself."""
    if dtype.itemsize > 2 * (1 + dtype.is_complex):
        return dtype
    return torch.complex64 if dtype.is_complex else torch.float32 if dtype.is_floating_point else dtype


def lowest_value(dtype: torch.dtype) -> float | int:
    """The value that no other is below; of complex numbers, which have none, any."""
    if dtype.is_floating_point:
        return -torch.inf
    return 0 if dtype == torch.bool or dtype.is_complex else torch.iinfo(dtype).min


def highest_value(dtype: torch.dtype) -> float | int:
    """The value that no other is above; of complex numbers, which have none, any."""
    if dtype.is_floating_point:
        return torch.inf
    return 1 if dtype == torch.bool or dtype.is_complex else torch.iinfo(dtype).max
