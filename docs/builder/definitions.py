"""Where a name is defined: what the fragment of a link such as `plan.py#Plan.of` may say, and the line it means.

`definitions(file)` serves the tests, which follow the links in all pages, and the site, whose pages of code have these
anchors.
"""
from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path


@lru_cache
def definitions(file: Path) -> dict[str, int]:
    """name -> line, of a file of Python, C++, or Markdown (its headings, as GitHub names them)."""
    text = file.read_text()
    if file.suffix == ".py":
        found = {**dict(_in_python(text)), **(lines_of_the_table(text) if file.name == "table.py" else {})}
    elif file.suffix in (".cpp", ".h", ".cu"):
        found = in_cpp(text)
    else:
        found = _headings(text)
    return found


def _headings(text: str) -> dict[str, int]:
    without_code = re.sub(r"```.*?```", lambda match: "\n" * match[0].count("\n"), text, flags=re.S)
    return {re.sub(r"[^\w -]", "", found[1].lower()).replace(" ", "-"): without_code.count("\n", 0, found.start()) + 1
            for found in re.finditer(r"(?m)^#+ (.+)", without_code)}


def _in_python(text: str) -> Iterator[tuple[str, int]]:
    """Functions, classes, their members as Class.member, and names that the module assigns."""
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{one.name}", one.lineno) for one in node.body
                        if isinstance(one, ast.FunctionDef))
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node.lineno) for target in targets if isinstance(target, ast.Name))


def lines_of_the_table(text: str) -> dict[str, int]:
    """The ops that have a line in the op table: the words of what is given to `lines`."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Name) and node.func.id == "lines" and isinstance(node.args[0], ast.Constant)]
    return {word: call.lineno for call in calls for word in call.args[0].value.split()}


def in_cpp(text: str) -> dict[str, int]:
    """Functions with a body, structs (those of a typedef, too), classes, enums, aliases, macros and constants."""
    text = re.sub(r'//[^\n]*|/\*.*?\*/|extern "C"', lambda match: "\n" * match[0].count("\n"), text, flags=re.S)
    named = (r"(?:\b(?:struct|class|enum|enum class|using|constexpr \w+|namespace)|#define)"
             r"\s+(?:alignas\(\w+\)\s+)?(\w+)")
    functions = r"(?m)^[\w:<>,&*\s]*?[\s&*](?:\w+::)?(\w+)\([^;{}]*\)(?: const)?(?: override)?\s*(?::[^;{]*)?\{"
    typedefs = r"typedef struct \w*\s*\{[^{}]*\}\s*(\w+);"
    return {found[1]: text.count("\n", 0, found.start(1)) + 1
            for pattern in (named, functions, typedefs) for found in re.finditer(pattern, text)}
