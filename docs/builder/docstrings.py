"""Our docstrings as Markdown.

A docstring of this project is paragraphs, indented code, and tables without lines, where a name is followed by at least
two blanks and what it means:

    axis        along which state is split
    offload     where the state is while it is not stepped,
                in files or in the host's memory
"""
from __future__ import annotations

import re
from itertools import groupby

_ROW = re.compile(r"(\S[^`]*?)  +(\S.*)")            # `name   meaning`, at the left margin


def as_markdown(text: str) -> str:
    """The same text, its tables and code marked up."""
    kinds = _kinds(text.splitlines())
    blocks = [(kind, [line for _, line in group]) for kind, group in groupby(kinds, key=lambda pair: pair[0])]
    return "\n".join("\n".join(_RENDER[kind](lines)) for kind, lines in blocks)


def _kinds(lines: list[str]) -> list[tuple[str, str]]:
    """Each line with what it is part of: prose, a row of a table, or code."""
    kinds: list[tuple[str, str]] = []
    kind = "prose"
    for line in lines:
        if not line.strip():
            kind = kind if kind == "code" else "prose"
        elif line.startswith(" "):
            kind = "row" if kind == "row" else "code"
        else:
            kind = "row" if _ROW.fullmatch(line) else "prose"
        kinds.append((kind, line))
    return kinds


def _rows(lines: list[str]) -> list[str]:
    rows: list[list[str]] = []
    for line in lines:
        if found := _ROW.fullmatch(line):
            rows.append([found[1], found[2]])
        else:
            rows[-1][1] += f" {line.strip()}"
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return ["", "| argument or key | |", "| --- | --- |", *(f"| `{name}` | {text} |" for name, text in cells), ""]


def _code(lines: list[str]) -> list[str]:
    return ["", "```text", *(line[4:] for line in lines), "```", ""]


_RENDER = {"prose": lambda lines: lines, "row": _rows, "code": _code}
