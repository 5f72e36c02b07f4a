"""docs/performance.md shows what benchmarks/results says: neither its tables nor its plots are stale."""
from __future__ import annotations

import importlib.util
import re

import pytest
from harness import ROOT

from globaltensor.runtime.text_table import aligned

matplotlib = pytest.importorskip("matplotlib")
SCRIPT = ROOT / "docs" / "pictures" / "performance.py"
ANEW = "type: python docs/pictures/performance.py"


def script() -> object:
    spec = importlib.util.spec_from_file_location("performance", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


performance = script()
PAGE = performance.PAGE.read_text()


def test_tables_are_those_of_the_results():
    assert performance.filled(PAGE) == PAGE, ANEW


def test_every_result_is_on_the_page():
    shown = {*re.findall(r"<!-- table ([\w-]+) -->", PAGE), *re.findall(r"results/([\w-]+)\.txt", PAGE)}
    assert shown == {path.stem for path in performance.RESULTS.glob("*.txt")}
    assert set(re.findall(r"pictures/(performance-\w+)\.svg", PAGE)) == performance.PLOTS.keys()


@pytest.mark.parametrize("name", performance.PLOTS)
def test_a_plot_was_made_from_the_results_as_they_are(name):
    text = (SCRIPT.parent / f"{name}.svg").read_text()
    assert performance.source_hash(performance.PLOTS[name]) in text, ANEW
    assert "var(--ink)" in text and performance.INK not in text and "prefers-color-scheme" in text
    if f"matplotlib {matplotlib.__version__}<" in text:
        assert with_numbered_ids(performance.drawn(name)) == with_numbered_ids(text), ANEW


def with_numbered_ids(svg: str) -> str:
    """The ids of matplotlib are hashes of floats, whose last digits differ between processors: with AVX-512 or not."""
    numbers: dict[str, str] = {}
    return re.sub(r"\b[mp][0-9a-f]{10}\b", lambda each: numbers.setdefault(each[0], f"id{len(numbers)}"), svg)


def test_a_table_is_read_as_it_was_printed(tmp_path, monkeypatch):
    rows = aligned([("what", "of us", "ms"), ("x y", "-", "1,5"), ("z", "3 (2)", "")], right={1, 2})
    (tmp_path / "a.txt").write_text("a: title\n  machine\n\n" + "".join(f"  {row}\n" for row in rows))
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    assert performance.tables("a") == [[{"what": "x y", "of us": "-", "ms": "1,5"},
                                        {"what": "z", "of us": "3 (2)", "ms": ""}]]
    assert performance.number("3 (2)") == 3.0 and performance.size("16 KB") == 16 << 10
