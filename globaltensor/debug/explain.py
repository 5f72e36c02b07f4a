"""Why an op ran as it did: `gt.explain(fn, *args)` runs a function once and tells of every op

    where  op  the signature chosen  what was boxed for it, bytes  the next best choice, and what it would cost more

Prices are the planner's: seconds it expects on the machine at hand, boxing and work together. Ops of the backward are
among them where `fn` calls backward. What is compiled runs uncompiled for that: a graph is traced by the same choices.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from globaltensor.algorithms.offer import Offer
from globaltensor.boxings.watch import BoxingRecord, recorded
from globaltensor.dispatch.choose import Choice, Contest, Ranked, layouts
from globaltensor.dispatch.decide import contest_of, decide
from globaltensor.dispatch.decision_log import signature_text
from globaltensor.dispatch.foreach import is_foreach
from globaltensor.dispatch.recipe import Decision, Recipe, spec_of_plain
from globaltensor.errors import ArgumentError, counted, where
from globaltensor.layouts.layout import sbp_text
from globaltensor.layouts.placement import placement
from globaltensor.layouts.rank_regions import RankRegions
from globaltensor.pictures.markup import breakable, html_table
from globaltensor.rules.call import Call
from globaltensor.runtime.custom_ops import LINEAR_MAPS
from globaltensor.runtime.text_table import aligned
from globaltensor.runtime.torch_internals import TorchDispatchMode, tree_leaves
from globaltensor.runtime.units import seconds_text
from globaltensor.tensors.global_tensor import GlobalTensor
from globaltensor.tracebacks import api_boundary


@dataclass(frozen=True)
class Row:
    """One op, or one boxing that was asked for.

    chosen      the signature: sbp of the operands -> of the results
    moves       the boxings done for it
    boxed       the operands that were boxed, and how
    second      the next best signature or algorithm, empty where there is none; `dearer` by so many seconds, or by less
                than none, where a rank would hold more of an operand
    algorithm   its name, where no signature was chosen
    rule        that of the op, as it is written in the op table; empty where it has none
    """

    where: str
    op: str
    placement: placement
    chosen: str
    boxed: str
    moves: tuple[BoxingRecord, ...] = field(compare=False, default=())
    second: str = ""
    dearer: float = 0.0
    algorithm: str = ""
    rule: str = ""

    @property
    def bytes(self) -> int:
        """What the boxings moved to the rank that received most."""
        return sum(move.bytes for move in self.moves)


@dataclass(frozen=True)
class Explanation:
    """What `gt.explain` returns: `result` of the function, and the `rows`, in order; prints as a table."""

    result: Any = field(repr=False)
    rows: tuple[Row, ...]

    @property
    def bytes(self) -> int:
        """What all boxings moved."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        return _table(self.rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows, total = _cells_of(self.rows)
        return html_table(_HEAD, ([breakable(cell) for cell in row] for row in rows), total, numbers=[4])


@api_boundary
def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call `fn(*args, **kwargs)` once and tell how each of its ops on global tensors ran, and why.

    Collective, as its ops are. Raises ArgumentError for what is not a function, and what `fn` raises.
    """
    if not callable(fn):
        raise ArgumentError(f"gt.explain of a {type(fn).__name__}", "it calls a function, and explains the ops in it",
                            "gt.explain(lambda: x @ w), or gt.explain(torch.matmul, x, w)")
    with _all_eager(), recorded() as moves, _Seeing(moves) as seeing:
        result = fn(*args, **kwargs)
        seeing.between()
    return Explanation(result, tuple(seeing.rows))


def _all_eager() -> AbstractContextManager[Any]:
    """Inside, what torch.compile made runs as it was written. (Without dynamo there is no such thing.)"""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _Seeing(TorchDispatchMode):
    """Sees every op just before it is dispatched, those of the backward too."""

    def __init__(self, moves: list[BoxingRecord]) -> None:
        super().__init__()
        self.moves, self.explained = moves, 0        # so many of the moves have their row
        self.rows: list[Row] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        # a boxing that was asked for has a row of its own; autograd detaches what it saves, which does nothing to it
        without_row = func in LINEAR_MAPS or func is torch.ops.aten.detach.default
        if without_row or not any(type(t) is GlobalTensor for t in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        self.between()
        decision = decide(GlobalTensor, func, args, kwargs)
        before = [t.spec.sbp for t in tree_leaves((args, kwargs)) if type(t) is GlobalTensor]
        call = Call(func, args, kwargs)
        row = _row(decision, call)                   # before an op that writes changes its operands
        result = func(*args, **kwargs)
        done, self.explained = tuple(self.moves[self.explained:]), len(self.moves)
        self.rows.append(_finished(row, before, result, done))
        return result

    def between(self) -> None:
        """Boxings since the last op: those that the user asked for, and gradients."""
        for move in self.moves[self.explained:]:
            self.rows.append(Row(move.where, move.op, move.src.placement, _move_text(move), "", (move,)))
        self.explained = len(self.moves)


def _move_text(move: BoxingRecord) -> str:
    far = f" on {move.dst.placement}" if move.dst.placement != move.src.placement else ""
    many = f" of {move.tensors} tensors" if move.tensors > 1 else ""
    src, dst = ("windows" if isinstance(at, RankRegions) else sbp_text(at.sbp) for at in (move.src, move.dst))
    return f"{src} -> {dst}{far}{many}"


def _row(decision: Decision, call: Call) -> Row:
    """What can be told before the op runs."""
    home = next(t.spec.placement for t in call.tensors if type(t) is GlobalTensor)
    name = str(call.func).removeprefix("aten.").removesuffix(".default")
    if is_foreach(call.func):
        return Row(where(), name, home, "", "")
    contest = contest_of(GlobalTensor, call)
    if not isinstance(decision, Recipe):
        if contest is None or contest.offer is None:
            return Row(where(), name, home, "", "")
        return Row(where(), name, home, "", "", (), *_second(contest, contest.offer), contest.offer.name,
                   str(contest.rule))
    operands = [t.spec if type(t) is GlobalTensor else spec_of_plain(t, home) for t in call.tensors]
    boxed = ", ".join(f"{call.operand(q)}: {sbp_text(own.sbp)} -> {sbp_text(want.sbp)}"
                      for q, (own, want) in enumerate(zip(operands, decision.wants))
                      if want is not None and want is not own.layout)
    chosen = signature_text([(want or own.layout).sbp for own, want in zip(operands, decision.wants)],
                        [o.sbp for o in decision.outputs or () if o is not None])
    if contest is None or not decision.signature:
        return Row(where(), name, home, chosen + "   (no rule)", boxed)
    return Row(where(), name, home, chosen, boxed, (), *_second(contest, decision.signature), "", str(contest.rule))


def _finished(row: Row, before: list[Any], result: Any, moves: tuple[BoxingRecord, ...]) -> Row:
    """With the boxings that it took; a decomposed op tells its layouts only now, and its boxings itself."""
    chosen, boxed = row.chosen, row.boxed
    if not chosen:
        after = [t.spec.sbp for t in tree_leaves(result) if type(t) is GlobalTensor]
        chosen = signature_text(before, after)
        chosen += f" by {row.algorithm}" if row.algorithm else ""
        boxed = ", ".join(dict.fromkeys(_move_text(move) for move in moves))
    return replace(row, chosen=chosen, boxed=boxed, moves=moves)


def _second(contest: Contest, taken: Choice) -> tuple[str, float]:
    """The best choice that is not the one taken, and by how much it is dearer: less than 0 where memory decided."""
    best: dict[Any, Ranked] = {}
    for one in contest.ranking():
        best.setdefault(_kind(one.choice), one)
    own = best.pop(_kind(taken), None)
    if not best:
        return "", 0.0
    second = min(best.values(), key=lambda one: one[:2])
    # a slice that stays split, of which rows at the seams move (view_reads.py), is not in the contest
    dearer = second.seconds - (own.seconds if own is not None else 0.0)
    if isinstance(second.choice, Offer):
        return _offer_text(second.choice), dearer
    wants, gives = layouts(second.choice, contest.operands, len(contest.rule.outputs))
    return signature_text([w.sbp for w in wants], [g.sbp for g in gives]), dearer


def _offer_text(offer: Offer) -> str:
    return f"{signature_text([w.sbp for w in offer.wants], [g.sbp for g in offer.gives])} by {offer.name}"


def _kind(choice: Choice) -> Any:
    """Choices of the same layouts are one choice, whatever label they cut."""
    return None if isinstance(choice, Offer) else tuple((sig.inputs, sig.outputs) for sig in choice)


_HEAD = ("where", "op", "chosen", "boxed for it", "bytes", "next best")


def _table(rows: tuple[Row, ...]) -> str:
    lines, total = _cells_of(rows)
    return "\n".join([*aligned([_HEAD, *lines], right={4}), total])


def _cells_of(rows: tuple[Row, ...]) -> tuple[list[list[str]], str]:
    """The cells of the table, and what stands below it. Rows that are the same follow each other as one, counted."""
    folded: list[tuple[Row, int, int]] = []
    for row in rows:
        if folded and folded[-1][0] == row and folded[-1][2] == row.bytes * folded[-1][1]:
            folded[-1] = row, folded[-1][1] + 1, folded[-1][2] + row.bytes
        else:
            folded.append((row, 1, row.bytes))
    places = list(dict.fromkeys(row.placement for row in rows))
    lines = []
    for row, count, nbytes in folded:
        on = f"   on {row.placement}" if len(places) > 1 else ""
        second = f"{row.second}   {_dearer(row.dearer)}" if row.second else "-"
        lines.append([row.where, row.op + (f" x{count}" if count > 1 else ""), row.chosen + on, row.boxed or "-",
                      f"{nbytes:,}", second])
    moved = [move for row in rows for move in row.moves if move.bytes]
    total = f"{counted(len(rows), 'row')}; {counted(len(moved), 'boxing')} moved {sum(m.bytes for m in moved):,} bytes"
    if len(places) == 1:
        total += f"; all on {places[0]}"
    return lines, total


def _dearer(seconds: float) -> str:
    if abs(seconds) < 1e-9:                          # what settles ties is not a cost
        return "costs the same"
    if seconds < -1e-9:
        return f"{seconds_text(-seconds)} sooner, but ranks would hold more"
    return f"+ {seconds_text(seconds)}"
