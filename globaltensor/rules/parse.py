"""From the text of a rule to the `Rule`; a malformed one is a RuleError that points at the character at fault.

    rule      tensor, tensor, ... -> tensor, ...       algebra   the terms of output 0; those of output 1; ...
    tensor    dims, with spaces between                terms     term + term + ...; none where values do not matter
    dim       label, (label label ...), or 1           term      letter * letter * ...; a is the first operand
    label     a name, * behind it where it stands for any number of dims, ! behind that where it stays whole

`parse_rule` reads a text, once; `rule` adds what follows from a call: how many dims each operand has, and which are
absent. `language.py` explains what labels and letters mean.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple, NoReturn

from globaltensor.errors import RuleSyntaxError
from globaltensor.rules.language import LEAVES, NUMBER, Dims, Rule, Term

_TOKEN = re.compile(r"\s+|(?P<label>[A-Za-z_][\w.]*\*?!?)|(?P<one>1(?!\w))|(?P<mark>[()])")


class Parsed(NamedTuple):
    """A rule as it is written, before anything is known of a call: stars stand for any number of dims."""

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    algebra: tuple[tuple[Term, ...], ...]


@lru_cache(10_000)
def parse_rule(dims: str, algebra: str = "") -> Parsed:
    """Read both texts. Raises RuleError for what is malformed."""
    inputs, outputs = _Dims(dims).sides()
    if not algebra:                                  # every operand enters every output nonlinearly
        all_nonlinear: Term = tuple((q, False) for q in range(len(inputs)))
        return Parsed(inputs, outputs, ((all_nonlinear,),) * len(outputs))
    return Parsed(inputs, outputs, _algebra(algebra, dims, len(inputs), len(outputs)))


class _Dims:
    """Reads the dims of a rule from left to right, once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.marks: dict[str, str] = {}              # name -> how it was first written: "", "*", "!" or "*!"
        self.inner: set[str] = set()                 # names within brackets, but for the first
        self.known: set[str] | None = None           # the names that an output may have; None while operands are read

    def fail(self, at: int, what: str, why: str, fix: str = "") -> NoReturn:
        raise RuleSyntaxError(what, self.text, at, why, fix)

    def sides(self) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
        """The dims of the operands, and those of the outputs."""
        arrow = self.text.find("->")
        if arrow < 0:
            self.fail(len(self.text), "a rule without '->'", "the dims of the operands stand before it, those of the "
                      "outputs behind", f"{self.text.strip()} -> ...")
        second = self.text.find("->", arrow + 2)
        if second >= 0:
            self.fail(second, "a second '->'", "a rule has one: operands before it, outputs behind",
                      "a comma between tensors")
        inputs = self.tensors(0, arrow)
        self.known = {*self.marks, *self.inner}
        return inputs, self.tensors(arrow + 2, len(self.text))

    def tensors(self, start: int, stop: int) -> tuple[Dims, ...]:
        """The tensors between two places."""
        commas = [at for at in range(start, stop) if self.text[at] == ","]
        return tuple(self.tensor(a, b) for a, b in zip([start, *(at + 1 for at in commas)], [*commas, stop]))

    def tensor(self, at: int, stop: int) -> Dims:
        dims: list[tuple[str, ...]] = []
        names: set[str] = set()                      # that this tensor has so far
        group: list[str] | None = None               # the labels of a dim in brackets, while that is open
        opened = at
        while at < stop:
            token = _TOKEN.match(self.text, at, stop)
            if token is None:
                self.refuse(at)
            if token["mark"] == "(":
                if group is not None:
                    self.fail(at, "a bracket within a bracket", "a dim is made of labels, outermost first", "(h w c)")
                group, opened = [], at
            elif token["mark"]:
                if not group:
                    self.fail(at, "a ')' that closes nothing" if group is None else "a dim made of nothing",
                              "brackets hold the labels that one dim is made of, outermost first", "(h w)")
                dims.append(tuple(group))
                group = None
            elif token["one"]:
                if group is not None:
                    self.fail(at, "a 1 within brackets", "brackets hold the labels that one dim is made of",
                              "leave it out")
                dims.append(("1",))
            elif token["label"]:
                self.check_label(token["label"], at, names, group)
                if group is None:
                    dims.append((token["label"],))
                else:
                    group.append(token["label"])
            at = token.end()
        if group is not None:
            self.fail(opened, "a '(' that is not closed", "brackets hold the labels that one dim is made of", "(h w)")
        return tuple(dims)

    def check_label(self, label: str, at: int, names: set[str], group: list[str] | None) -> None:
        """May a label stand there? Once in a tensor, written alike everywhere, and in an output only if an operand has
        it or it is whole."""
        name = label.rstrip("*!")
        mark = label[len(name):]
        if group is not None and mark:
            self.fail(at + len(name), f"{mark!r} within brackets", "a dim made of several labels is cut at the first "
                      "or not at all", f"{name}! for a whole dim")
        if name in names:
            self.fail(at, f"label {name!r} twice in one tensor", "a label names one dim; a diagonal cannot be cut",
                      f"{name}!, and another label for the other dim")
        names.add(name)
        if group:                                    # an inner label is never cut there, so the rest does not matter
            self.inner.add(name)
            return
        if self.known is not None and name not in self.known and not mark.endswith("!"):
            self.fail(at, f"label {name!r} is in no operand", "an output's dim can be cut only where operands are",
                      f"{label}! for a dim that the op makes itself")
        if self.marks.setdefault(name, mark) != mark:
            self.fail(at, f"label {name!r} is written {name}{self.marks[name]} before", "a label is one thing in all "
                      "tensors: cut or whole, one dim or several", f"{name}{self.marks[name]}, or another label")

    def refuse(self, at: int) -> NoReturn:
        """What stands there is nothing that the language has."""
        sign = self.text[at]
        if sign in "!*" and at and (self.text[at - 1].isalnum() or self.text[at - 1] in ")!*_"):
            self.fail(at, f"{sign!r} behind {self.text[at - 1]!r}", "a label is a name, then * where it stands for "
                      "several dims, then ! where it stays whole; a dim in brackets has neither", "b*!  k!  (h w)")
        if sign in "!*":
            self.fail(at, f"{sign!r} without a label", "it stands behind a name", f"k{sign}")
        if sign.isdigit():
            size = "".join(takewhile(str.isdigit, self.text[at:]))
            self.fail(at, f"a dim of size {size}",
                      "a rule knows no sizes, but for 1: a dim that is repeated to fit", "a label")
        self.fail(at, f"{sign!r} in the dims of a rule", "a dim is a label, labels in brackets, or 1; spaces separate "
                  "dims, commas tensors", '"m k, k n -> m n"')


def _algebra(text: str, dims: str, operands: int, outputs: int) -> tuple[tuple[Term, ...], ...]:
    """The terms of every output."""
    parts, at = [], 0
    for k, part in enumerate(text.split(";")):
        if k == outputs:
            raise RuleSyntaxError(f"an algebra for output {k}", text, at - 1, f"{dims!r} has {outputs}", "one less ';'")
        terms, place = [], at
        for term in part.split("+") if part.strip() else ():
            terms.append(_term(text, term, place, dims, operands))
            place += len(term) + 1
        parts.append(tuple(terms))
        at += len(part) + 1
    if len(parts) < outputs:
        raise RuleSyntaxError(f"no algebra for output {len(parts)}", text, len(text), f"{dims!r} has {outputs} outputs",
                              ";".join([text] * outputs) if len(parts) == 1 else f"{text};...")
    return tuple(parts)


def _term(text: str, term: str, at: int, dims: str, operands: int) -> Term:
    """The factors of a term that begins there."""
    factors = []
    for factor in term.split("*"):
        letter = factor.strip()
        place = at + len(factor) - len(factor.lstrip())
        if len(letter) != 1 or not (letter.isascii() and letter.isalpha()):
            place += 1 if letter[:1].isalpha() and letter.isascii() else 0
            raise RuleSyntaxError(f"a factor {letter!r}" if letter else "a factor is missing", text,
                                  min(place, len(text)), "a factor is one letter, a for the first operand: lower case "
                                  "where the output is linear in it, upper case where it is not", "a*B")
        q = ord(letter.lower()) - ord("a")
        if q >= operands:
            raise RuleSyntaxError(f"{letter!r} is operand {q}", text, place, f"{dims!r} has {operands}: "
                                  f"{', '.join(chr(ord('a') + i) for i in range(operands))}",
                                  "one of these, or its dims too")
        factors.append((q, letter.islower()))
        at += len(factor) + 1
    return tuple(factors)


def check_leaves(leaves: str, dims: str) -> None:
    """Raises RuleError where `leaves` of a rule is none of those that there are."""
    if leaves not in LEAVES:
        raise RuleSyntaxError(f"leaves={leaves!r}", dims, None,
                              "a label that is in no result leaves one of these pending",
                              " or ".join(f'leaves="{kind}"' for kind in LEAVES))


@lru_cache(10_000)
def rule(dims: str, algebra: str = "", *, ndims: tuple[int | None, ...] = (), leaves: str = "sum",
         even: tuple[tuple[str, int], ...] = (), nonempty: str = "", stars: tuple[tuple[str, int], ...] = ()) -> Rule:
    """The rule of a call.

    ndims     the number of dims of each operand, None for an absent one (dropped from dims and algebra), NUMBER for a
              Python number (dropped from dims only); needed where a `b*` stands or operands are optional
    leaves    what a reduced label leaves pending: "sum", "max" or "min"
    even      (label, size) of labels that only an even cut keeps in place (the first of a composite dim)
    nonempty  labels of which no part may be empty, since the kernel would not take it; `b*` is all that it stands for
    stars     (name, count) of stars that the numbers of dims do not tell

    Raises RuleError for a malformed rule, and for one that does not fit these numbers.
    """
    inputs, outputs, terms = parse_rule(dims, algebra)
    check_leaves(leaves, dims)
    if not ndims and "*" in dims:
        raise RuleSyntaxError("how many dims a '*' stands for is not known", dims, dims.index("*"),
                              "it follows from the numbers of dims of the operands", "ndims=(3, 2)")
    if ndims:
        if len(ndims) != len(inputs):
            raise RuleSyntaxError(f"a rule of {len(inputs)} operands for {len(ndims)}", dims, None,
                                  "the dims of every tensor argument stand in it, optional ones too", "")
        written = inputs
        inputs, outputs = _expand_stars(inputs, outputs, ndims, dict(stars))
        for q, (tensor, n) in enumerate(zip(inputs, ndims)):
            if n not in (None, NUMBER, len(tensor)):
                least = "at least " if any("*" in dim[0] for dim in written[q]) else ""
                raise RuleSyntaxError(f"operand {chr(ord('a') + q)} has {n} dims, its rule {least}{len(tensor)}", dims,
                                      None, "a rule names every dim", "b* for any number of dims")
    absent = {q for q, n in enumerate(ndims) if n is None}
    away = absent | {q for q, n in enumerate(ndims) if n == NUMBER}
    if away:
        place = {q: i for i, q in enumerate(q for q in range(len(inputs)) if q not in away)}
        inputs = tuple(tensor for q, tensor in enumerate(inputs) if q not in away)
        # a term of absent operands alone is none, of numbers alone is one that is the same on every rank
        terms = tuple(tuple(tuple((place[q], linear) for q, linear in term if q in place) for term in part
                            if any(q not in absent for q, _ in term)) for part in terms)
    return Rule(inputs, outputs, terms, leaves, even, tuple(_named(nonempty, inputs)))


def _named(labels: str, inputs: tuple[Dims, ...]) -> Iterator[str]:
    """The labels of operands that a list of labels names: `b*` all that stand for it."""
    every = dict.fromkeys(label.rstrip("!") for tensor in inputs for dim in tensor for label in dim)
    for label in labels.split():
        name = label.removesuffix("*")
        yield from [x for x in every if x.removeprefix(name).isdigit()] if name != label else [label]


def _expand_stars(inputs: tuple[Dims, ...], outputs: tuple[Dims, ...], ndims: tuple[int | None, ...],
                  counts: dict[str, int]) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Replace every `b*` (and `b*!`) by as many labels as an operand that has it leaves over."""
    preset = dict(counts)
    for tensor, n in [*zip(inputs, ndims)] * 2:      # twice: a later operand may tell what an earlier one needs
        stars = [dim[0].rstrip("*!") for dim in tensor if "*" in dim[0]]
        unknown = [name for name in stars if name not in counts]
        if n is not None and n != NUMBER and (len(unknown) == 1 or len(stars) == 1 and stars[0] not in preset):
            star = unknown[0] if unknown else stars[0]
            counted = sum(counts[name] for name in stars if name != star)
            counts[star] = max(n - (len(tensor) - len(stars)) - counted, counts.get(star, 0))

    def expand(tensor: Dims, n: int | None = None) -> Dims:
        dims: list[tuple[str, ...]] = []
        stars = sum("*" in dim[0] for dim in tensor)
        for dim in tensor:
            name, star, mark = dim[0].partition("*")
            count = counts.get(name, 0)
            # an operand that has fewer dims than another is repeated along the first ones
            first = max(count - (n - len(tensor) + 1), 0) if stars == 1 and n is not None and n != NUMBER else 0
            dims += [(f"{name}{i}{mark}",) for i in range(first, count)] if star else [dim]
        return tuple(dims)

    return tuple(map(expand, inputs, ndims)), tuple(map(expand, outputs))
