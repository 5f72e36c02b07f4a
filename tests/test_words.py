"""docs/words.md defines every word that the code coins, and words that were given up do not come back."""
from __future__ import annotations

import ast
import builtins
import inspect
import keyword
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
import torch
from builder.definitions import definitions as defined_at, in_cpp
from harness import ROOT

PAGE = ROOT / "docs" / "words.md"
ORDINARY = ROOT / "tests" / "data" / "ordinary_words.txt"
OFTEN = 3                                            # definitions that have a word in their name

# Words that had a second sense or that nobody else uses, and what stands in their place.
RETIRED = {
    "aimed": "set_grad_layout", "drive": "local_ranks", "driven": "local_ranks", "halves": "split_backward",
    "lone": "single_process", "mail": "p2p", "neighbour": "host_peers", "neighbours": "host_peers", "parcel": "bundle",
    "rewrite": "decomposition", "windowed": "gather_regions", "windows": "rank_regions",
}

# Names that do not say what was found, made or told.
VAGUE = {"found", "given", "made", "said", "there", "told", "way"}


def words_of(name: str) -> set[str]:
    """`FlatRecipe` and `_flat_recipe` are made of flat and recipe; single letters say nothing."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name) if len(word) > 1}


def sources() -> list[Path]:
    python, native = (ROOT / "globaltensor").rglob("*.py"), (ROOT / "csrc").rglob("*")
    return sorted([*python, *(path for path in native if path.suffix in (".cpp", ".h", ".cu"))])


def definitions(path: Path) -> Iterator[tuple[str, str]]:
    """(place in the file, name) of a file itself and of all that it defines, parameters included."""
    yield "", path.parent.name if path.stem == "__init__" else path.stem
    if path.suffix == ".py":
        yield from _in_python(ast.parse(path.read_text()).body, "")
    else:
        yield from ((name, name) for name in in_cpp(path.read_text()))


def _in_python(body: list[ast.stmt], within: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield within + node.name, node.name
        if isinstance(node, ast.ClassDef):
            yield from _in_python(node.body, f"{within}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            takes = node.args
            for one in [*takes.posonlyargs, *takes.args, *takes.kwonlyargs, takes.vararg, takes.kwarg]:
                if one is not None:
                    yield f"{within}{node.name}({one.arg}", one.arg
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            yield from ((within + name, name) for name in names)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _in_python([*node.body, *getattr(node, "orelse", [])], within)


def words_in_use() -> dict[str, set[str]]:
    """word -> the definitions that have it in their name."""
    used = defaultdict(set)
    for path in sources():
        for place, name in definitions(path):
            if not name.startswith("__"):
                for word in words_of(name):
                    used[word].add(f"{path.relative_to(ROOT)}:{place}")
    return used


def words_of_torch_and_python() -> set[str]:
    """The words of names that are not ours. We add some to torch's classes, which do not count."""
    names = {*keyword.kwlist, *dir(builtins), *sys.stdlib_module_names}
    for api in (torch, torch.Tensor, torch.autograd, torch.distributed, torch.library, torch.nn, torch.nn.Module,
                torch.nn.functional, torch.optim, torch.utils.checkpoint, torch.utils.data):
        names |= {name for name in dir(api)
                  if not name.startswith("_") and not _is_ours(inspect.getattr_static(api, name, None))}
    return {word for name in names for word in words_of(name)}


def _is_ours(value: object) -> bool:
    value = value.fget if type(value) is property else value     # isinstance would wake torch's deprecated ones
    return issubclass(type(value), (FunctionType, type)) and value.__module__.partition(".")[0] == "globaltensor"


def tables() -> tuple[list[list[str]], list[list[str]]]:
    """The rows of the page: our words, and the field's."""
    ours, field = PAGE.read_text().split("\n## ")[1:]
    return tuple([re.split(r" *\| *", line)[1:-1] for line in part.splitlines() if line.startswith("| ")][2:]
                 for part in (ours, field))


def defined_words() -> set[str]:
    return {word for row in tables()[0] for word in words_of(re.sub(r"\(.*", "", row[0]))}


def is_known(word: str, known: set[str]) -> bool:
    """A word or what it is the plural of: ranks, boxes, entries, axes."""
    plurals = (("s", ""), ("es", ""), ("ies", "y"), ("es", "is"))
    return word in known or any(word.removesuffix(end) + one in known for end, one in plurals if word.endswith(end))


def test_every_word_that_the_code_coins_is_defined():
    known = defined_words() | words_of_torch_and_python() | set(ORDINARY.read_text().split())
    missing = {word: places for word, places in words_in_use().items()
               if len(places) >= OFTEN and not is_known(word, known)}
    assert not missing, "\n".join(
        f"{word} ({', '.join(sorted(places)[:3])}, ...) is in neither docs/words.md nor tests/data/ordinary_words.txt"
        for word, places in sorted(missing.items()))


def test_an_ordinary_word_has_no_row():
    ordinary = ORDINARY.read_text().split()
    assert ordinary == sorted(set(ordinary)), "tests/data/ordinary_words.txt is sorted, each word once"
    both = defined_words() & set(ordinary)
    assert not both, f"{sorted(both)}: defined in docs/words.md, so not ordinary"


@pytest.mark.parametrize("which", [0, 1], ids=["ours", "the field's"])
def test_rows_are_in_order_and_each_word_has_one(which):
    rows = tables()[which]
    assert len(rows) > 40 and all(len(row) == 3 and all(row) for row in rows)
    words = [row[0].lower() if which == 0 else (row[0].lower(), row[1].lower()) for row in rows]
    assert words == sorted(set(words)), [b for a, b in zip(words, words[1:]) if a >= b]


def test_a_word_with_several_senses_says_of_what_in_each():
    words = [row[0] for row in tables()[0]]
    bare = {word for word in words if "(" not in word}
    assert not bare & {word.partition(" (")[0] for word in words if "(" in word}


def test_every_row_leads_into_the_code():
    """That a name after # is defined there, test_docs.py checks for every page; it does so for the same links."""
    for word, _, where in tables()[0]:
        (text, path, name), = re.findall(r"^\[([^]]*)\]\(\.\./([^)#]*)#?([^)]*)\)$", where)
        assert (ROOT / path).is_file() and (not name or name in defined_at(ROOT / path)), f"{word}: {where}"
        assert text == path.removeprefix("globaltensor/") + (f"#{name}" if name else ""), f"{word}: {where}"


def test_the_field_s_words_lead_to_ours():
    ours = defined_words()
    lost = [row for row in tables()[1] if "`" not in row[2] and "no word" not in row[2]
            and ours.isdisjoint({word.rstrip("s") for word in words_of(row[2])} | words_of(row[2]))]
    assert not lost, lost


def identifiers(path: Path) -> Iterator[str]:
    """All names in a file, local ones too, but nothing of comments and strings."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from re.findall(r"[A-Za-z_]\w*", re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', "", text, flags=re.S))
        return
    for node in ast.walk(ast.parse(text)):
        for field in ("id", "arg", "attr", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name


def test_words_that_were_given_up_do_not_come_back():
    back = {f"{path.relative_to(ROOT)}: {name}: say {RETIRED[word]}" for path in sources()
            for name in [path.stem, *identifiers(path)] for word in words_of(name) & RETIRED.keys()}
    assert not back, "\n".join(sorted(back))


def test_names_say_what_was_found_or_made():
    vague = {f"{path.relative_to(ROOT)}: {name}" for path in sources() for name in identifiers(path) if name in VAGUE}
    assert not vague, "\n".join(sorted(vague))


def test_names_are_taken_apart_into_words():
    assert words_of("FlatRecipe") == words_of("_flat_recipe") == {"flat", "recipe"}
    assert words_of("GPTSizes2") == {"gpt", "sizes"} and words_of("kMostStaged") == {"most", "staged"}
    assert is_known("entries", {"entry"}) and is_known("axes", {"axis"}) and not is_known("bus", {"bush"})
    assert {"matmul", "lambda"} <= words_of_torch_and_python() and "sbp" not in words_of_torch_and_python()
