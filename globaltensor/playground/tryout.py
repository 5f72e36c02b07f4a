"""One try: a placement, x and y with their sbps, an expression; and what it does, as HTML with pictures.

    show_tryout(Tryout((2, 2), "x @ y", (8, 6), ("S(0)", "B"), (6, 4), ("B", "S(1)")))

The expression really runs, on ranks that this process drives, under `gt.explain`: signatures, boxings and bytes are
those that a program of these lines has.
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import prod
from typing import Any

import torch

from globaltensor.debug.explain import Explanation, Row, explain
from globaltensor.errors import GlobalTensorError, ShapeError
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import code_of, nd_sbp
from globaltensor.pictures.layout_picture import layout_picture
from globaltensor.pictures.markup import html_table
from globaltensor.playground.expression import LARGEST, compute, parse_expression
from globaltensor.tensors.factories import rand
from globaltensor.tensors.global_tensor import GlobalTensor

MOST_RANKS, MOST_AXES, MOST_DIMS = 16, 2, 3
AXES = ("dp", "tp")
_SHAPE = re.compile(r"[\d ,]*")


@dataclass(frozen=True)
class Tryout:
    """What a visitor has set: how many ranks along each axis, the expression, shapes, and an sbp for each axis."""

    axes: tuple[int, ...]
    expression: str
    x_shape: tuple[int, ...]
    x_sbp: tuple[str, ...]
    y_shape: tuple[int, ...]
    y_sbp: tuple[str, ...]

    @property
    def program(self) -> str:
        """The lines that do the same."""
        ranks: Any = list(range(prod(self.axes)))
        if len(self.axes) == 2:
            ranks = [ranks[k:k + self.axes[1]] for k in range(0, len(ranks), self.axes[1])]
        lines = [f'P = gt.placement("cpu", {ranks}, axis_names={AXES[:len(self.axes)]})']
        for name, shape, sbp in (("x", self.x_shape, self.x_sbp), ("y", self.y_shape, self.y_sbp)):
            if re.search(rf"\b{name}\b", self.expression):
                explained = code_of(nd_sbp(list(sbp), (), len(self.axes)))
                lines.append(f"{name} = gt.rand({', '.join(map(str, shape))}, placement=P, sbp={explained})")
        return "\n".join([*lines, f"print(gt.explain(lambda: {self.expression}))"])


def read_tryout(query: Mapping[str, str]) -> Tryout:
    """From the fields of the page. Raises ShapeError or SbpError for what does not fit."""
    axes = _read_sizes(query.get("axes", "4"), "the axes")
    if not 1 <= len(axes) <= MOST_AXES or prod(axes) > MOST_RANKS or not all(axes):
        raise ShapeError(f"{' x '.join(map(str, axes)) or 'no'} ranks", "here a placement has one or two axes and at "
                         f"most {MOST_RANKS} ranks", "2, 2")
    shapes = []
    for name in ("x", "y"):
        shape = _read_sizes(query.get(f"{name}_shape", "8, 8"), f"the shape of {name}")
        if len(shape) > MOST_DIMS or prod(shape) > LARGEST:
            raise ShapeError(f"the shape {list(shape)} of {name}", f"here a tensor has at most {MOST_DIMS} dims and "
                             f"{LARGEST:,} elements", "8, 8")
        shapes.append(shape)
    sbps = [tuple(query.get(f"{name}_sbp", "B").split(" ")) for name in ("x", "y")]
    for sbp in sbps:
        nd_sbp(list(sbp), (), len(axes))             # raises: what is not an sbp, or too few
    return Tryout(axes, query.get("expression", "x @ y"), shapes[0], sbps[0], shapes[1], sbps[1])


def _read_sizes(text: str, what: str) -> tuple[int, ...]:
    if len(text) > 40 or not _SHAPE.fullmatch(text):
        raise ShapeError(f"{what}: {text[:40]!r}", "sizes are numbers with commas between", "8, 8")
    return tuple(int(part) for part in text.replace(",", " ").split())


def show_tryout(of: Tryout) -> str:
    """What it does, as HTML. Raises ExpressionError for an expression that is not admitted, and what torch and the
    library raise for tensors that do not fit."""
    tree = parse_expression(of.expression)
    where = placement("cpu", torch.arange(prod(of.axes), device="cpu").view(of.axes).tolist(), AXES[:len(of.axes)])
    torch.manual_seed(0)
    names = {name: rand(*shape, placement=where, sbp=nd_sbp(list(sbp), (), len(of.axes)))
             for name, shape, sbp in (("x", of.x_shape, of.x_sbp), ("y", of.y_shape, of.y_sbp))
             if re.search(rf"\b{name}\b", of.expression)}
    explained = explain(lambda: compute(tree, names))
    results = explained.result if isinstance(explained.result, (tuple, list)) else [explained.result]
    pictures = [_figure(name, x) for name, x in names.items()]
    pictures += [_figure("the result" if len(results) == 1 else f"result {k}", x) for k, x in enumerate(results[:4])]
    return "".join(["<h2>Tensors</h2>", *pictures, "<h2>Ops</h2>", _ops_html(explained.rows), *_boxings_html(explained),
                    "<h2>The program</h2><pre>", escape(of.program), "</pre>"])


def _figure(name: str, x: Any) -> str:
    if not isinstance(x, GlobalTensor):
        drawn = f"<p>{escape(repr(x)[:200])}, on every rank</p>"
    else:
        drawn = layout_picture(x.spec)._repr_html_()
    return f"<figure><figcaption>{escape(name)}</figcaption>{drawn}</figure>"


def _ops_html(rows: Sequence[Row]) -> str:
    head = ("op", "its rule", "chosen", "boxed for it", "bytes", "next best")
    cells = [[row.op, row.rule or "-", row.chosen, row.boxed or "-", f"{row.bytes:,}", row.second or "-"]
             for row in rows]
    note = ("" if any(row.rule for row in rows) else
            "<p>No op here has a rule: each ran on what the ranks hold, or on broadcast operands.</p>")
    return html_table(head, [list(map(escape, row)) for row in cells], numbers=(4,)) + note


def _boxings_html(explained: Explanation) -> list[str]:
    moves = [move for row in explained.rows for move in row.moves if move.bytes][:8]
    if not moves:
        return ["<h2>Boxings</h2><p>Nothing has to move.</p>"]
    return ["<h2>Boxings</h2>", f"<p>{explained.bytes:,} bytes come to the rank that receives most.</p>",
            *(f"<figure>{move._repr_html_()}</figure>" for move in moves)]


def told_error(error: Exception) -> str:
    """An error as HTML: ours in its parts, torch's in its first line."""
    if isinstance(error, GlobalTensorError):
        parts = [("why", error.why), ("try", error.fix)]
        return f"<p class='error'>{escape(error.what)}</p>" + "".join(
            f"<p>{name}: {escape(text)}</p>" for name, text in parts if text)
    return f"<p class='error'>{escape(str(error).splitlines()[0] if str(error) else type(error).__name__)}</p>"


EXAMPLES = {
    "Data parallel: the batch is split, the weight is the same everywhere":
        Tryout((4,), "x @ y", (8, 6), ("S(0)",), (6, 4), ("B",)),
    "Column parallel, then row parallel: a pending sum":
        Tryout((4,), "torch.relu(x) @ y", (8, 8), ("S(1)",), (8, 4), ("S(0)",)),
    "A pending sum is reduced before what is not linear":
        Tryout((4,), "torch.relu(x)", (8, 6), ("P",), (6, 4), ("B",)),
    "Data x tensor parallel on a grid":
        Tryout((2, 2), "x @ y", (8, 6), ("S(0)", "B"), (6, 8), ("B", "S(1)")),
    "Softmax along the dim that is split":
        Tryout((4,), "torch.softmax(x, 1)", (4, 12), ("S(1)",), (6, 4), ("B",)),
    "Seven rows on four ranks, and a transpose":
        Tryout((4,), "x.T + y", (7, 5), ("S(0)",), (5, 7), ("S(0)",)),
}
