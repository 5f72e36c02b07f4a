"""The reference, from the code itself: every public name, every command, and every message of an error.

A page asks for it by a block whose language says what is wanted, with a name a line:

    ```names
    gt.placement
    gt.GlobalTensor.to_global
    ```

The blocks are `names` (docstrings), `modules` (the docstrings of modules, which describe formats of files), `commands`
(what `--help` says), `messages` (the error index, of all rooms) and `examples` (those of `globaltensor play`, drawn).
"""
from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from sphinx.application import Sphinx

import globaltensor as gt
from builder.docstrings import as_markdown
from globaltensor.cli.options import OPTIONS
from globaltensor.cli.parser import Help, parser
from globaltensor.errors import GlobalTensorError, anchor_of
from globaltensor.playground.tryout import EXAMPLES, show_tryout

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "globaltensor"

# What has no docstring of its own, as it is a number or a value.
VALUES = {
    "gt.GlobalTensor.to_dtensor": "The same value as torch's DTensor, in the memory of this rank's part; "
                                  "differentiable. Collective. Raises GlobalTensorError in a process that drives "
                                  "several ranks, PlacementError for a mesh of other ranks. `x.to_dtensor(mesh)` names "
                                  "the mesh.",
    "gt.REQUEUE": "The exit code, 99, by which a scheduler starts a job again: `sys.exit(gt.REQUEUE)` after `gt.save`. "
                  "[Jobs that go on by themselves](../running.md#jobs-that-go-on-by-themselves) shows it.",
    "gt.sbp.broadcast": "Every rank holds the whole. Prints B.",
    "gt.sbp.partial_sum": "The value is the sum of what the ranks hold. Prints P.",
    "gt.sbp.partial_max": "The value is the maximum of what the ranks hold, element by element. Prints P(max).",
    "gt.sbp.partial_min": "The value is the minimum of what the ranks hold, element by element. Prints P(min).",
}


# ------------------------------------------------------------------------------------------------------- the names


def resolve(name: str) -> Any:
    """The object of a name such as `gt.Plan.of`."""
    value: Any = gt
    for part in name.split(".")[1:]:
        value = inspect.getattr_static(value, part) if isinstance(value, type) else getattr(value, part)
    return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value


def signature(name: str, value: Any) -> str:
    """As it is called, with types as they are written; "" for what is not called."""
    if isinstance(value, (property, int)) or inspect.ismodule(value) or not callable(value) or name in VALUES:
        return name
    try:
        told = inspect.signature(value)
    except ValueError:
        return name
    parameters = [one.replace(annotation=_Written(one.annotation)) if isinstance(one.annotation, str) else one
                  for one in told.parameters.values() if one.name not in ("self", "cls")]
    gives = _Written(told.return_annotation) if isinstance(told.return_annotation, str) else told.return_annotation
    return f"{name}{told.replace(parameters=parameters, return_annotation=gives)}"


class _Written(str):
    """An annotation that prints as it is written."""

    def __repr__(self) -> str:
        return str(self)


def entry(name: str) -> str:
    """One name: a heading, how it is called, and its docstring."""
    value = resolve(name)
    doc = VALUES.get(name) or as_markdown(inspect.getdoc(value) or "")
    assert doc, f"{name} has no docstring"
    return f"### {name}\n\n```python\n{signature(name, value)}\n```\n\n{doc}\n"


# ---------------------------------------------------------------------------------------------------- the commands


def command(name: str) -> str:
    """What `globaltensor NAME --help` says, at the width of a page."""
    one = subcommand(name)
    one.formatter_class = lambda prog: Help(prog, width=96)
    return f"### {name}\n\n```text\n{one.format_help()}```\n"


def subcommand(name: str) -> argparse.ArgumentParser:
    """The parser of one command."""
    top = parser(name)
    (choices,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    found: argparse.ArgumentParser = choices.choices[name]
    return found


# ---------------------------------------------------------------------------------------------------- the messages


class Message(NamedTuple):
    """What one place in the code says: `…` stands for what is known only then."""

    anchor: str
    kind: str
    what: str
    why: str
    fix: str


@lru_cache
def kinds() -> dict[str, type[GlobalTensorError]]:
    """Every class of error, by name."""
    for path in PACKAGE.rglob("*.py"):
        if re.search(r"(?m)^class \w+\(.*Error", path.read_text()):
            importlib.import_module(_module(path))
    found: dict[str, type[GlobalTensorError]] = {}
    waiting: list[type[GlobalTensorError]] = [GlobalTensorError]
    while waiting:
        one = waiting.pop()
        if one.__module__.startswith("globaltensor"):
            found[one.__name__] = one
        waiting += one.__subclasses__()
    return found


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@lru_cache
def messages() -> tuple[Message, ...]:
    """Of the whole package, in the order of the anchors."""
    found = [message for path in PACKAGE.rglob("*.py") if "bundled" not in path.parts
             for message in _of_file(_module(path), ast.parse(path.read_text()))]
    return tuple(sorted(found))


def _of_file(module: str, tree: ast.Module) -> Iterator[Message]:
    for qualname, node in _functions(tree.body, ""):
        yield from _of_function(module, qualname, node)


def _functions(body: list[ast.stmt], within: str) -> Iterator[tuple[str, ast.stmt]]:
    """The functions of a module and of its classes, also below an `if`, by their qualified names."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{within}{node.name}.")
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _functions([*node.body, *node.orelse], within)
        elif isinstance(node, ast.FunctionDef):
            yield within + node.name, node


def _of_function(module: str, qualname: str, node: ast.stmt) -> Iterator[Message]:
    for call in ast.walk(node):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if name in kinds():
            given = {key.arg: key.value for key in call.keywords}
            order = ("what", "rule", "at", "why", "fix") if name == "RuleSyntaxError" else ("what", "why", "fix")
            given |= dict(zip(order, call.args, strict=False))
            what, why, fix = (_template(given.get(part)) for part in ("what", "why", "fix"))
            yield Message(anchor_of(module, qualname), name, what, why, fix)


def _template(node: ast.expr | None) -> str:
    """The text of an expression, with `…` for what it puts in."""
    match node:
        case None:
            return ""
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_template(part) if isinstance(part, ast.Constant) else "…" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _template(left) + _template(right)
        case ast.IfExp(body=body, orelse=other):
            either = [text for text in (_template(body), _template(other)) if text]
            return " / ".join(either)
        case ast.BoolOp(op=ast.Or(), values=each):
            return " / ".join(map(_template, each))
        case _:
            return "…"


def index_of_messages() -> str:
    """The classes, and then the messages: a section for each room, in it an anchor for each function that raises."""
    parts = ["## Classes\n"]
    for name, kind in sorted(kinds().items()):
        bases = ", ".join(base.__name__ for base in kind.__bases__)
        parts.append(f'<span id="{name}"></span>\n\n### {name}\n\n{inspect.getdoc(kind)} Also a {bases}.\n')
    for room, own in groupby(messages(), key=lambda message: message.anchor.partition(".")[0]):
        parts.append(f"## Messages of {room}\n")
        for anchor, group in groupby(own, key=lambda message: message.anchor):
            parts += [f'<span id="{anchor}"></span>\n\n### {anchor}\n', *map(_shown, group)]
    return "\n".join(parts)


def _shown(message: Message) -> str:
    rows = [("why:", message.why), ("try:", message.fix)]
    known = [f"  {label}  {text}" for label, text in rows if text.strip(" …")]
    return "\n".join(["```text", f"{message.kind}: {message.what}", *known, "```", ""])


def example(title: str) -> str:
    """An example of the playground, which needs no script. Its headings become paragraphs of the page."""
    drawn = re.sub(r"<h2>(.*?)</h2>", r"<p><strong>\1</strong></p>", show_tryout(EXAMPLES[title]))
    return f'### {title}\n\n````{{raw}} html\n<div class="gt-picture">{drawn}</div>\n````\n'


# ----------------------------------------------------------------------------------------------- blocks of the pages


WRITERS: dict[str, Callable[[list[str]], str]] = {
    "names": lambda lines: "\n".join(map(entry, lines)),
    "modules": lambda lines: "\n\n".join(as_markdown(inspect.getdoc(importlib.import_module(name)) or "")
                                         for name in lines),
    "commands": lambda _: "\n".join(map(command, OPTIONS)),
    "messages": lambda _: index_of_messages(),
    "examples": lambda _: "\n".join(map(example, EXAMPLES)),
}
BLOCK = re.compile(r"(?ms)^```(names|modules|commands|messages|examples)\n(.*?)^```$")


def with_reference(text: str) -> str:
    """The text of a page, its blocks replaced by what they ask for."""
    return BLOCK.sub(lambda block: WRITERS[block[1]](block[2].split()), text)


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = with_reference(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read, priority=400)  # before the links into the code
    return {"parallel_read_safe": True}
