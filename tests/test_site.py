"""The site: every page is in the navigation, every public name in the reference, every message in the error index.

`make docs` builds it; that is a long test, and so are the notebooks as notebooks.
"""
from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builder import docstrings, source_pages
from harness import ROOT

import globaltensor as gt
from globaltensor.playground.tryout import EXAMPLES

DOCS = ROOT / "docs"
if importlib.util.find_spec("sphinx"):
    from builder import reference

needs_sphinx = pytest.mark.skipif(not importlib.util.find_spec("sphinx"),
                                  reason="Sphinx is not installed: pip install 'globaltensor[docs]'")
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md"), *ROOT.glob("*.md")])


# -------------------------------------------------------------------------------------------------------- navigation


def entries(page: Path) -> list[Path]:
    """The pages that the tables of contents of a page name."""
    blocks = re.findall(r"(?ms)^```\{toctree\}\n(.*?)^```", page.read_text())
    lines = [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]
    names = [re.sub(r".*<(.*)>", r"\1", line) for line in lines]
    return [(ROOT if name.startswith("/") else page.parent) / f"{name.lstrip('/')}.md" for name in names]


def test_every_page_is_in_the_navigation_once():
    named = [file.resolve() for page in PAGES for file in entries(page)]
    assert sorted(named) == sorted(page for page in PAGES if page != DOCS / "index.md")


# --------------------------------------------------------------------------------------------- links into the code


def test_links_into_the_code_get_the_scheme():
    text = "[a](../globaltensor/errors.py) [b](guide.md) [c](#here)\n```\n[d](../setup.py)\n```\n[e](../Makefile)"
    expected = text.replace("../globaltensor", "source:globaltensor").replace("[e](../", "[e](source:")
    assert source_pages.to_sources(text, DOCS / "x.md") == expected


def test_a_page_of_code_has_an_anchor_at_each_definition():
    pytest.importorskip("pygments")
    page = source_pages.page_of("globaltensor/errors.py").splitlines()
    line, = (k for k, text in enumerate(page) if '<span id="where"></span>' in text)
    assert "where" in re.sub(r"<[^>]+>", "", page[line]) and page[line].count("id=") == 1
    assert '<span id="_softmax"></span>' in source_pages.page_of("globaltensor/op_table/table.py")
    assert '<span id="gt_reduce"></span>' in source_pages.page_of("csrc/kernels/reduce.cpp")


# --------------------------------------------------------------------------------------------------------- reference


def documented() -> list[str]:
    blocks = [names for page in (DOCS / "reference").glob("*.md")
              for names in re.findall(r"(?ms)^```names\n(.*?)^```", page.read_text())]
    return [name for block in blocks for name in block.split()]


def public() -> set[str]:
    """Ours: the names of the face, of its public rooms, and the methods of classes that have their own section."""
    rooms = {f"gt.{room}.{name}" for room in ("data", "rules", "dtensor") for name in getattr(gt, room).__all__}
    of_torch = {f"gt.dtensor.{name}" for name in ("Shard", "Replicate", "Partial", "Placement")}
    of_classes = {f"gt.{kind}.{name}" for kind in ("Plan", "Strategy") for name in vars(getattr(gt, kind))
               if not name.startswith("_")}
    errors = {f"gt.{name}" for name in gt.FACE if name.endswith("Error")}
    return ({f"gt.{name}" for name in gt.FACE if name != "sbp"} | rooms | of_classes) - of_torch - errors


def test_every_public_name_has_its_place():
    names = documented()
    assert len(names) == len(set(names))
    ours = {name for name in public() if not name.startswith("gt.dtensor.")}
    missing = ours - {*names}
    assert not missing, sorted(missing)
    of_torch = {"Shard", "Replicate", "Partial", "Placement"}
    assert {f"gt.dtensor.{name}" for name in gt.dtensor.__all__ if name not in of_torch} <= {*names}


def functions() -> list[str]:
    return [name for name in documented() if inspect.isfunction(reference.resolve(name)) and
            not name.startswith("gt.dtensor.")] if importlib.util.find_spec("sphinx") else []


# Those that take nothing that could be wrong.
RAISE_NOTHING = {"gt.rank", "gt.world_size", "gt.record", "gt.preempted", "gt.show", "gt.metrics", "gt.from_mesh",
                 "gt.placement.all", "gt.Plan.save", "gt.Strategy.save", "gt.Strategy.as_text", "gt.Plan.parse"}


@needs_sphinx
def test_every_function_says_whether_it_is_collective_and_what_it_raises():
    kinds = r"[Cc]ollective|[Ee]very (process|rank)|each process|[Nn]othing is communicated|[Mm]oves nothing"
    names = [name for name in functions() if name.count(".") == 1]
    assert len(names) > 45
    silent = [name for name in names if not re.search(kinds, inspect.getdoc(reference.resolve(name)))]
    assert not silent, f"collective or not? {silent}"
    quiet = [name for name in names if name not in RAISE_NOTHING
             and not re.search(r"[Rr]aises", inspect.getdoc(reference.resolve(name)))]
    assert not quiet, f"raises what? {quiet}"


@needs_sphinx
@pytest.mark.parametrize("page", sorted((DOCS / "reference").glob("*.md")), ids=lambda path: path.stem)
def test_blocks_are_replaced_by_what_they_ask_for(page):
    text = reference.with_reference(page.read_text())
    assert not reference.BLOCK.search(text)
    assert text.count("```") % 2 == 0


@needs_sphinx
def test_the_examples_of_the_playground_are_on_a_page():
    text = reference.with_reference((DOCS / "how-to" / "try-layouts.md").read_text())
    for title in EXAMPLES:
        drawn = text.partition(f"### {title}\n")[2].partition("\n### ")[0]
        assert "<svg" in drawn and "print(gt.explain(lambda:" in drawn and "<h2" not in drawn and "<script" not in drawn


@needs_sphinx
def test_a_signature_is_as_it_is_called():
    assert reference.signature("gt.zero", gt.zero).startswith("gt.zero(optimizer: O, axis: str = 'dp', stage: int = 1")
    assert reference.signature("gt.GlobalTensor.tolist", gt.GlobalTensor.tolist) == "gt.GlobalTensor.tolist() -> Any"


def test_a_docstring_becomes_markdown():
    text = "What it does.\n\naxis    along which,\n        if at all\nsize    n | m\n\n    gt.f(x)\n\nRaises nothing."
    assert docstrings.as_markdown(text).split() == [
        *"What it does. | argument or key | | | --- | --- | | `axis` | along which, if at all |".split(),
        *"| `size` | n \\| m | ```text gt.f(x) ``` Raises nothing.".split()]


# ------------------------------------------------------------------------------------------------------------ errors


@needs_sphinx
def test_every_place_that_raises_is_in_the_index():
    """As many messages as the code has calls of a class of errors, and every class."""
    names = "|".join(reference.kinds())
    call = rf"(?<![\w\"'])(?:{names})\((?!GlobalTensorError|[A-Z]\w+\)|[A-Z]\w+, )"
    calls = sum(len(re.findall(call, path.read_text())) for path in (ROOT / "globaltensor").rglob("*.py"))
    assert 0.95 * calls <= len(reference.messages()) <= calls
    assert {name for name in gt.FACE if name.endswith("Error")} <= reference.kinds().keys()


@needs_sphinx
@pytest.mark.parametrize("mistake", [
    lambda: gt.placement("cpu", [0, 99]), lambda: gt.placement("cpu", [0, 0]), lambda: gt.sbp.split("rows"),
    lambda: gt.ones(2, placement=gt.placement("cpu", [0])), lambda: gt.boxing(budget=-1), lambda: gt.show(3),
    lambda: gt.Plan({"a": 3}), lambda: gt.Strategy.load("nowhere.json"), lambda: gt.rule("aten::mm", "m k, k n -> m n"),
    lambda: gt.zero(3), lambda: gt.load({}, "nowhere"), lambda: gt.from_full(3, None, None)])
def test_the_anchor_of_a_message_is_in_the_index(mistake):
    with pytest.raises(gt.GlobalTensorError) as caught:
        mistake()
    error = caught.value
    assert str(error).splitlines()[-1] == f"  docs:  errors#{error.anchor}"
    known = {(message.anchor, message.kind) for message in reference.messages()}
    assert (error.anchor, type(error).__name__) in known
    assert f'<span id="{error.anchor}"></span>' in reference.index_of_messages()


def test_the_anchor_of_an_error_of_a_program_is_its_class():
    class MyError(gt.GlobalTensorError):
        pass

    assert MyError("mine").anchor == "MyError" and gt.SbpError("x").anchor == "SbpError"


# ------------------------------------------------------------------------------------------------------ the whole of it


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sphinx", "--fail-on-warning", "-q", "-c", str(DOCS), "-d",
                           str(folder / "doctrees"), "-b", "html", *options, str(ROOT), str(folder / "site")],
                          capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"})


@needs_sphinx
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path):
    run = build(tmp_path)
    assert run.returncode == 0, run.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        text = page.read_text()
        assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="https?:', text), f"{page}: loads from the network"
    errors = (tmp_path / "site/docs/reference/errors.html").read_text()
    for message in reference.messages():
        assert f'id="{message.anchor}"' in errors, message.anchor
