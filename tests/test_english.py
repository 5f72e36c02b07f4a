"""Plain English: a list of words not to write, doubled words, and "a" and "an", in pages, docstrings, help and errors.

`python tests/test_english.py` also lists the sentences of pages that have more than 40 words: read them, and cut them
where they hold two ideas.
"""
from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import ROOT

LIST = ROOT / "tests" / "data" / "plain_words.txt"
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/results/*.md")}
               - {ROOT / "docs" / "files.md"})       # whose words are those of docstrings
CODE = sorted(path for folder in ("globaltensor", "examples", "benchmarks", "docs/builder", "docs/pictures")
              for path in (ROOT / folder).rglob("*.py"))
LONG = 40                                            # words of a sentence
TWICE = {"that", "had", "is"}                        # "that that" may be right
VOWEL_SOUND = re.compile(r"(?!eu|one\b|once|uni|us[aeiu]|uti)[aeiou]|hour|honest|heir")


class Text(NamedTuple):
    """A piece of prose, and where it stands."""

    place: str
    text: str


def words_to_avoid() -> dict[re.Pattern[str], str]:
    lines = [line.partition(" -> ") for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return {re.compile(rf"(?<![\w./-])(?:{pattern})(?![\w/=-])", re.I): instead for pattern, _, instead in lines}


def prose(text: str) -> str:
    """Without code, formulas and the targets of links; lines stay where they are."""
    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n") + ("`" if match[0].startswith("`") else "")

    return re.sub(r"(?s)```.*?```|``.*?``|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", blank, text)


def pages() -> Iterator[Text]:
    for path in PAGES:
        for number, line in _paragraphs(prose(path.read_text())):
            yield Text(f"{path.relative_to(ROOT)}:{number}", line)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    number = 1
    for block in re.split(r"(\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.)))", text):
        if block.strip():
            yield number, " ".join(block.split())
        number += block.count("\n")


def strings() -> Iterator[Text]:
    """Docstrings, help and messages: what of a program is meant for people is a few words long."""
    for path in CODE:
        if path.name in ("table.py", "parse.py"):    # whose strings are names of ops, and a grammar
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 3:
                yield Text(f"{path.relative_to(ROOT)}:{node.lineno}", prose(node.value))


@cache
def texts() -> list[Text]:
    return [*pages(), *strings()]


@pytest.mark.check
def test_words_are_plain():
    wrong = [f"{place}: {match[0]!r}: {instead}" for pattern, instead in words_to_avoid().items()
             for place, text in texts() for match in pattern.finditer(text)]
    assert not wrong, "\n".join(wrong)


def doubled(text: str) -> list[str]:
    return [match[0] for match in re.finditer(r"(?<![\w-])([a-z]{2,})[ \n]\1(?![\w-])", text) if match[1] not in TWICE]


def articles(text: str) -> list[str]:
    """`a` before a vowel that is heard, `an` before a consonant; abbreviations, which are spelled, are left out."""
    wrong = re.finditer(r"(?<![\w`'\"({\[./-])([Aa]n?) ([a-z][\w-]{3,})(?![\w(=.\[])", text)
    return [match[0] for match in wrong
            if bool(VOWEL_SOUND.match(match[2])) == (match[1].lower() == "a")]


def test_no_word_is_doubled():
    wrong = [f"{place}: {words}" for place, text in texts() for words in doubled(text)]
    assert not wrong, "\n".join(wrong)


def test_articles_fit_the_word_behind_them():
    wrong = [f"{place}: {words}" for place, text in texts() if ".md:" in place for words in articles(text)]
    assert not wrong, "\n".join(wrong)


def test_mistakes_are_found():
    assert doubled("of the the layout, and had had it") == ["the the"]
    assert articles("a axis, an rank, an hour, a user, an MLP, a unit, an sbp, a euro") == ["a axis", "an rank"]
    text = "Utilize it, in order to e.g. recognize"
    assert {match[0] for pattern in words_to_avoid() for match in pattern.finditer(text)} == {
        "Utilize", "in order to", "e.g.", "recognize"}
    assert prose("say `in order to`\n```\nvery\n```\n[very](very.md)").split() == ["say", "`", "`", "[very"]


def long_sentences() -> Iterator[tuple[int, Text]]:
    for place, text in pages():
        for sentence in re.split(r"(?<=[.:;?!]) +", text):
            if not sentence.startswith("|") and (size := len(sentence.split())) > LONG:
                yield size, Text(place, sentence)


if __name__ == "__main__":
    for size, (place, sentence) in sorted(long_sentences(), reverse=True):
        print(f"{size} words, {Path(place)}: {sentence}")
