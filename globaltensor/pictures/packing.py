"""Columns of whole numbers as text of a page, small: differences, in planes of bytes, deflated, in base64.

    pack_column(np.array([1000, 2003, 3001]))     differences 1000, 1003, 998; all low bytes, then all high ones; zlib

Times of a schedule are nearly evenly spaced, so their differences hardly vary and their high bytes not at all. The page
undoes it: `DecompressionStream` has been in all browsers since 2023. `unpack_column` is the same in Python, for tests.
"""
from __future__ import annotations

import base64
import zlib
from typing import Any, NamedTuple

import numpy as np

Numbers = np.ndarray[Any, Any]


class PackedColumn(NamedTuple):
    """`length` numbers of `width` bytes each; `differences`: each is told by what it is more than the one before."""

    length: int
    width: int
    differences: bool
    text: str


def pack_column(values: Numbers, differences: bool = False) -> PackedColumn:
    """Pack numbers from 0 to 2**32 - 1. Differences are taken modulo 2**32, so they may be of any sign."""
    column = np.ascontiguousarray(values, dtype=np.uint32)
    if differences and len(column):
        column = np.diff(column, prepend=np.uint32(0)).astype(np.uint32)
        column = ((column << np.uint32(1)) ^ np.where(column >> np.uint32(31), np.uint32(0xFFFFFFFF), np.uint32(0)))
    width = max(1, (int(column.max(initial=0)).bit_length() + 7) // 8)
    planes = np.ascontiguousarray(column.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width].T)
    return PackedColumn(len(column), width, differences, base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode())


def unpack_column(packed: PackedColumn) -> Numbers:
    """The numbers again."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed.text)), np.uint8).reshape(packed.width, -1)
    column = np.zeros(packed.length, np.uint32)
    for nth, plane in enumerate(planes):
        column |= plane.astype(np.uint32) << np.uint32(8 * nth)
    if packed.differences:
        odd = np.where(column & np.uint32(1), np.uint32(0xFFFFFFFF), np.uint32(0))
        column = np.cumsum((column >> np.uint32(1)) ^ odd, dtype=np.uint32)
    return column
