"""One dim split along several axes, one after the other: its parts, by arithmetic.

    sizes (2, 3), digits (1, 0)      [0:10) is split in two, the second half [5:10) in three: part [5:7)
    sizes (2, 3), digits (1, None)   all three parts of the second half

*Sizes* say into how many parts each axis splits, outermost first, and *digits* which part is meant on each; None stands
for every one. No function here lists the parts that it does not return.
"""
from __future__ import annotations

from collections.abc import Sequence

from globaltensor.layouts.regions import Range, split_range

Digits = Sequence[int | None]


def part_at(n: int, sizes: Sequence[int], digits: Sequence[int]) -> Range:
    """The part of [0:n) with these digits."""
    start, stop = 0, n
    for parts, index in zip(sizes, digits):
        first, last = split_range(stop - start, parts, index)
        start, stop = start + first, start + last
    return start, stop


def index_at(n: int, parts: int, at: int) -> int:
    """In which of its parts element `at` of n is."""
    size, more = divmod(n, parts)
    return at // (size + 1) if at < more * (size + 1) else (at - more) // size


def parts_within(whole: Range, sizes: Sequence[int], digits: Digits, within: Range
                 ) -> list[tuple[Range, tuple[int, ...]]]:
    """What the parts with these digits share with the range `within`, each with all of its digits; no empty ones."""
    (start, stop), (low, high) = whole, within
    low, high = max(start, low), min(stop, high)
    if low >= high:
        return []
    if not sizes:
        return [((low, high), ())]
    n, parts = stop - start, sizes[0]
    first, last = (index_at(n, parts, at - start) for at in (low, high - 1))
    if digits[0] is not None:
        first, last = max(first, digits[0]), min(last, digits[0])
    shared = []
    for index in range(first, last + 1):
        a, b = split_range(n, parts, index)
        shared += [(ends, (index, *rest)) for ends, rest in
                   parts_within((start + a, start + b), sizes[1:], digits[1:], within)]
    return shared


def overlap(n: int, sizes: Sequence[int], digits: Digits, within: Range) -> int:
    """How many elements of the range `within` are in the parts of [0:n) with these digits."""
    low, high = max(within[0], 0), min(within[1], n)
    if low >= high:
        return 0
    if all(digit is None for digit in digits):
        return high - low
    parts, digit, sizes, digits = sizes[0], digits[0], sizes[1:], digits[1:]
    if digit is not None:
        start, stop = split_range(n, parts, digit)
        return overlap(stop - start, sizes, digits, (low - start, high - start))
    first, last = index_at(n, parts, low), index_at(n, parts, high - 1)
    start, stop = split_range(n, parts, first)
    total = overlap(stop - start, sizes, digits, (low - start, high - start))
    if last > first:
        start, stop = split_range(n, parts, last)
        total += overlap(stop - start, sizes, digits, (0, high - start))
    size, more = divmod(n, parts)
    large = max(min(last, more) - first - 1, 0)      # whole parts between the two, of the larger size and of the other
    small = max(last - first - 1, 0) - large
    if large:
        total += large * overlap(size + 1, sizes, digits, (0, size + 1))
    if small:
        total += small * overlap(size, sizes, digits, (0, size))
    return total
