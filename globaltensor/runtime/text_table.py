"""Text in aligned columns, no wider than the terminal: one function for all that print tables."""
from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

_NARROWEST = 16                                      # characters in which a text can still be read


def aligned(rows: Sequence[Sequence[str]], gap: str = "  ", right: Collection[int] = (),
            columns: int | None = None) -> list[str]:
    """A line per row, each column as wide as its widest cell; the columns in `right` are aligned to the right.

    Where `columns` tells the width of the terminal, the last cell of a row goes on below itself, or where there is no
    room beside the others, below the row.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [gap.join(cell.rjust(width) if k in right else cell.ljust(width)
                      for k, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]
    if columns is None or all(len(line) <= columns for line in lines):
        return lines
    start = sum(widths[:-1]) + len(gap) * (len(widths) - 1)
    return [part for row, line in zip(rows, lines) for part in _folded(row[-1], line, start, columns)]


def _folded(last: str, line: str, start: int, columns: int) -> list[str]:
    """A line whose text from `start` on is its last cell, in as many lines as it takes."""
    if len(line) <= columns:
        return [line]
    if columns - start >= _NARROWEST:
        first, *rest = textwrap.wrap(last, columns - start, break_on_hyphens=False)
        return [line[:start] + first, *(" " * start + more for more in rest)]
    head = textwrap.wrap(line[:start], columns, subsequent_indent="  ", break_on_hyphens=False)
    indent = " " * min(4, columns // 4)
    return [*head, *textwrap.wrap(last, columns, initial_indent=indent, subsequent_indent=indent,
                                  break_on_hyphens=False)]


def terminal_columns() -> int | None:
    """How wide the terminal is that output goes to; None for a file or a program, which want whole lines."""
    return max(20, shutil.get_terminal_size().columns) if sys.stdout and sys.stdout.isatty() else None
