"""Runs the cells of a notebook of docs/learn in one process: python tests/run_notebook.py PAGE ANSWERS

ANSWERS is JSON: for each exercise a list of answers that are wrong, as they would be typed. The last line printed is
JSON: for each cell its tags, whether it shows a picture, and, of a check, what it says of `...` and of those answers.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))

from builder.notebooks import Cell, cells, run


def rows_of(page: Path, answers: list[list[str]]) -> list[dict[str, Any]]:
    names: dict[str, Any] = {"__name__": "__main__"}
    left = iter(answers)
    rows = []
    for cell in cells(page.read_text()):
        row = _row(cell, run(cell, names, page.name))
        if "check" in cell.tags:
            row["of wrong ones"] = [_judgement(names["exercise"].check(eval(text, names))) for text in next(left)]
        rows.append(row)
    assert next(left, None) is None, "there are more lists of answers than exercises"
    return rows


def _row(cell: Cell, value: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"tags": cell.tags, "line": cell.line}
    if {"check", "solution"} & {*cell.tags}:
        row["judgement"] = _judgement(value)
    row["picture"] = "<svg" in value._repr_html_() if hasattr(value, "_repr_html_") else False
    return row


def _judgement(value: Any) -> tuple[bool, str]:
    assert "class=\"chip\"" in value._repr_html_() and str(value).endswith(value.text)
    return value.right, value.text


if __name__ == "__main__":
    print(json.dumps(rows_of(Path(sys.argv[1]), json.loads(sys.argv[2]))))
