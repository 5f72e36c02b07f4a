"""An exercise of a notebook (docs/learn): it judges an answer, and says in plain words what is wrong with it.

    exercise = Exercise(right=48, hints={72: "That is what rank 0 holds."}, why="Rank 3 has 2 of the 10 columns.")
    exercise.check(answer)

Where there is more than one right answer, a function judges instead: it returns what is wrong, or nothing.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from math import isclose
from typing import Any, NamedTuple

from globaltensor.pictures.markup import COLOURS, STYLE, chip, element

CLOSE = 5e-3                                         # relative: 27.3% is right where 3/11 is
_CHIPS = {True: ("right", COLOURS[2]), False: ("not yet", COLOURS[5])}


class Judgement(NamedTuple):
    """What a check says. A notebook shows it as a line with a colour."""

    right: bool
    text: str

    def __repr__(self) -> str:
        return f"{_CHIPS[self.right][0]}: {self.text}"

    def _repr_html_(self) -> str:
        line = f"{chip(*_CHIPS[self.right])} {escape(self.text)}"
        return f"<style>{STYLE}</style>" + element("p", line, class_="gt-picture", style="font-family:inherit")


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """A question that a notebook asks.

    right    the answer: a number, an sbp, a text, a tuple of these
    judge    in its place: answer -> what is wrong with it, or ""
    kind     what type of answer `judge` takes
    hints    a wrong answer -> where it comes from
    why      shown when the answer is right
    """

    why: str
    right: Any = None
    judge: Callable[[Any], str] | None = None
    kind: type | tuple[type, ...] = object
    hints: Mapping[Any, str] = field(default_factory=dict)

    def check(self, answer: Any) -> Judgement:
        """Is the answer right? `...` is none."""
        if answer is ...:
            return Judgement(False, "No answer yet. Put yours in the place of ..., and run both cells again.")
        complaint = self._complaint(answer)
        return Judgement(not complaint, complaint or self.why)

    def _complaint(self, answer: Any) -> str:
        kind = self.kind if self.judge else _kind_of(self.right)
        if not isinstance(answer, kind) or isinstance(answer, bool):
            return f"{answer!r} is a {type(answer).__name__}. The answer is {_named_type(kind)}."
        if self.judge:
            return self.judge(answer)
        if _equal(answer, self.right):
            return ""
        return next((hint for value, hint in self.hints.items() if _equal(answer, value)),
                    f"{answer} is not right." + _comparison(answer, self.right))


def _kind_of(right: Any) -> type | tuple[type, ...]:
    return (int, float) if isinstance(right, (int, float)) else type(right)


def _named_type(kind: type | tuple[type, ...]) -> str:
    if isinstance(kind, tuple):
        return "a number" if kind == (int, float) else " or ".join(map(_named_type, kind))
    return f"a{'n' if kind.__name__[0].lower() in 'aeiou' else ''} {kind.__name__}"


def _equal(answer: Any, right: Any) -> bool:
    if isinstance(answer, float) or isinstance(right, float):
        return isinstance(answer, (int, float)) and isclose(answer, right, rel_tol=CLOSE)
    return bool(answer == right)


def _comparison(answer: Any, right: Any) -> str:
    if not isinstance(right, (int, float)):
        return ""
    return " The right number is larger." if answer < right else " The right number is smaller."
