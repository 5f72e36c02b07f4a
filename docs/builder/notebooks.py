"""The cells of a notebook that is written as Markdown (MyST): docs/learn. Sphinx runs them for the site; tests do, too.

    ```{code-cell}
    :tags: [hide-input, check]

    exercise.check(answer)
    ```

The tags that the tests know: `exercise` is a cell in which the reader puts an answer, `check` judges it, and `solution`
gives the right one to the same judge.
"""
from __future__ import annotations

import ast
import linecache
import re
from typing import Any, NamedTuple


class Cell(NamedTuple):
    """A cell of code, and where in the page its code begins."""

    tags: tuple[str, ...]
    code: str
    line: int


def cells(text: str) -> list[Cell]:
    """Those of a page, in order."""
    return [_cell(match[1], text.count("\n", 0, match.start(1)) + 1)
            for match in re.finditer(r"(?ms)^```\{code-cell\}[^\n]*\n(.*?)^```$", text)]


def _cell(body: str, line: int) -> Cell:
    options = re.match(r"(?::.*\n)*\n*", body)[0]                # type: ignore[index]
    tags = re.search(r":tags: \[(.*)\]", options)
    return Cell(tuple(tags[1].split(", ")) if tags else (), body[len(options):], line + options.count("\n"))


def run(cell: Cell, names: dict[str, Any], page: str) -> Any:
    """Run a cell among the names of those before it. What its last line gives, as a notebook would show."""
    name = f"{page}, line {cell.line}"
    linecache.cache[name] = len(cell.code), None, cell.code.splitlines(keepends=True), name
    tree = ast.parse(cell.code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    return eval(compile(ast.Expression(last.value), name, "eval"), names) if last else None
