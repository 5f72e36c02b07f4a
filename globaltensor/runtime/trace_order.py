"""Which boxings of a graph that is being traced may meet: those of which none leads to another one.

Ranks have graphs of their own, in which what one computes from a value may be a constant for the next (it has the
zeros of a pending sum). So graphs cannot be asked. The program can: it is the same on all ranks. Boxings are counted
while it is traced, and a tensor knows how many there were when it was made: no later one leads to it. Where an op moves
nothing, what it gives comes of no more boxings than its operands. A write, by whatever alias, may lead anywhere.

A tensor of a trace has the number plus one as `made_after`, and a move has it where it has a lineage elsewhere, which
those tensors lack (lineage.py). 0: not known.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_boxings = 0                                         # that were traced in this process
_last_write = 0                                      # how many there were at the last write to a tensor of a trace


def so_far() -> int:
    """The number of a tensor that is made now."""
    return _boxings + 1


def of(t: Any) -> int:
    """What a move says of this tensor: its number, or its lineage outside of traces."""
    number: int = t.made_after if t.traced else t.lineage
    return number


def note_traced_write() -> None:
    """A tensor of a trace is written to."""
    global _last_write
    _last_write = _boxings


def made_after(numbers: Iterable[int]) -> int:
    """The number of what is computed from tensors of these numbers, and moves nothing."""
    known = [n if 0 < n <= _boxings + 1 else _boxings + 1 for n in numbers]
    return max([_last_write + 1, *known])


def next_boxing(numbers: Iterable[int]) -> int:
    """A boxing of tensors of these numbers is traced: how many of those just before it do not lead to it."""
    global _boxings
    unrelated = _boxings + 1 - made_after(numbers)
    _boxings += 1
    return unrelated
