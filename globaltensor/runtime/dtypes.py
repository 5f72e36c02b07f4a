"""The dtype that sums are accumulated in."""
from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of numbers of this dtype are accumulated in: float32 for floats of 16 bits and fewer, complex64 for
    pairs of such, else the dtype itself."""
    if dtype.itemsize > 2 * (1 + dtype.is_complex):
        return dtype
    return torch.complex64 if dtype.is_complex else torch.float32 if dtype.is_floating_point else dtype
