"""The texts of rules: what they mean, and that a malformed one is answered at the character at fault."""
from __future__ import annotations

import re

import pytest

from globaltensor.errors import GlobalTensorError, RuleError
from globaltensor.rules.language import NUMBER
from globaltensor.rules.parse import parse_rule, rule

MM = "m k, k n -> m n"

# dims, algebra, what is told, and where in which text the caret stands: > is put before the character
MALFORMED = [
    ("m k k n", "", "without '->'", "m k k n>"),
    ("", "", "without '->'", ">"),
    ("m k -> m -> k", "", "a second '->'", "m k -> m >-> k"),
    ("m k, k n -> m x", "a*b", "label 'x' is in no operand", "m k, k n -> m >x"),
    ("m k, k n -> m, n x*", "", "label 'x' is in no operand", "m k, k n -> m, n >x*"),
    ("i i -> i", "", "label 'i' twice", "i >i -> i"),
    ("a (h a) -> a", "", "label 'a' twice", "a (h >a) -> a"),
    ("k -> k!", "", "label 'k' is written k before", "k -> >k!"),
    ("k*, k! -> k*", "", "label 'k' is written k* before", "k*, >k! -> k*"),
    ("m-k -> m", "", "'-' in the dims", "m>-k -> m"),
    ("m k; k n -> m n", "", "';' in the dims", "m k>; k n -> m n"),
    ("m 2 -> m", "", "a dim of size 2", "m >2 -> m"),
    ("m 16 -> m", "", "a dim of size 16", "m >16 -> m"),
    ("!k -> k", "", "'!' without a label", ">!k -> k"),
    ("* -> m", "", "'*' without a label", ">* -> m"),
    ("k!! -> k", "", "'!' behind '!'", "k!>! -> k"),
    ("k!* -> k", "", "'*' behind '!'", "k!>* -> k"),
    ("(h w)! -> h", "", "'!' behind ')'", "(h w)>! -> h"),
    ("(h! w) -> h", "", "'!' within brackets", "(h>! w) -> h"),
    ("(1 w) -> w", "", "a 1 within brackets", "(>1 w) -> w"),
    ("(h w -> h", "", "a '(' that is not closed", ">(h w -> h"),
    ("(h, w) -> h", "", "a '(' that is not closed", ">(h, w) -> h"),
    ("h w) -> h", "", "a ')' that closes nothing", "h w>) -> h"),
    ("() -> ", "", "a dim made of nothing", "(>) -> "),
    ("((h) w) -> h", "", "a bracket within a bracket", "(>(h) w) -> h"),
    (MM, "a*c", "'c' is operand 2", "a*>c"),
    (MM, "A*b + D", "'D' is operand 3", "A*b + >D"),
    (MM, "ab", "a factor 'ab'", "a>b"),
    (MM, "a*2", "a factor '2'", "a*>2"),
    (MM, "a*b+", "a factor is missing", "a*b+>"),
    (MM, "a**b", "a factor is missing", "a*>*b"),
    (MM, "a*b;a", "an algebra for output 1", "a*b>;a"),
    ("m -> m, m, m", "a;a", "no algebra for output 2", "a;a>"),
]


@pytest.mark.parametrize("dims, algebra, what, marked", MALFORMED, ids=[f"{m[0]} | {m[1]}" for m in MALFORMED])
def test_a_malformed_rule_is_answered_at_the_character(dims, algebra, what, marked):
    with pytest.raises(RuleError, match=re.escape(what)) as told:
        rule(dims, algebra)
    first, text, caret, *rest = str(told.value).split("\n")
    at = next(i for i, c in enumerate(marked) if c == ">" and marked[:i] + marked[i + 1:] in (dims, algebra))
    assert (text, caret) == ("  " + marked[:at] + marked[at + 1:], "  " + " " * at + "^"), str(told.value)
    assert "test_rule_language.py" in rest[0] and rest[1].startswith("  why:") and len(rest) >= 2
    assert isinstance(told.value, GlobalTensorError) and isinstance(told.value, ValueError)


@pytest.mark.parametrize("dims, options, what", [
    (MM, {"leaves": "mean"}, "leaves='mean'"),
    ("b* k -> b*", {}, "how many dims a '*' stands for"),
    (MM, {"ndims": (2,)}, "a rule of 2 operands for 1"),
    (MM, {"ndims": (2, 3)}, "operand b has 3 dims, its rule 2"),
    ("b* k -> b*", {"ndims": (0,)}, "operand a has 0 dims, its rule at least 1"),
])
def test_a_rule_that_does_not_fit_a_call(dims, options, what):
    with pytest.raises(RuleError, match=re.escape(what)) as told:
        rule(dims, **options)
    assert f"\n  {dims}\n" in str(told.value)


def test_what_a_text_means():
    inputs, outputs, algebra = parse_rule("b* (h w) k!, 1 w -> b* h, o!", "A*b + b; ")
    assert inputs == ((("b*",), ("h", "w"), ("k!",)), (("1",), ("w",)))
    assert outputs == ((("b*",), ("h",)), (("o!",),))
    assert algebra == ((((0, False), (1, True)), ((1, True),)), ())


def test_absent_operands_and_numbers_are_told_apart():
    """Of a + b*c: an absent operand leaves nothing, a number leaves a term that is the same on every rank."""
    text = "m, m, m -> m", "a+b*c"
    assert rule(*text, ndims=(1, 1, None)).algebra == ((((0, True),), ((1, True),)),)
    assert rule(*text, ndims=(None, 1, 1)).algebra == ((((0, True), (1, True)),),)
    assert rule(*text, ndims=(NUMBER, 1, 1)).algebra == (((), ((0, True), (1, True))),)
