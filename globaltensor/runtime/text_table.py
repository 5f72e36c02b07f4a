"""Text in aligned columns: one function for all that print tables."""
from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], gap: str = "  ", right: Collection[int] = ()) -> list[str]:
    """A line per row, each column as wide as its widest cell; the columns in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [gap.join(cell.rjust(width) if k in right else cell.ljust(width)
                     for k, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]
