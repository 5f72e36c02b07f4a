"""The notebooks of docs/learn run, begin with a picture, and judge answers: right ones, wrong ones, and none."""
from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from builder.notebooks import cells
from harness import ROOT

import globaltensor as gt
from globaltensor.errors import where
from globaltensor.playground.exercise import Exercise

LEARN = ROOT / "docs" / "learn"
PAGES = sorted(path for path in LEARN.glob("*.md") if path.name != "index.md")
needs_sphinx = pytest.mark.skipif(not importlib.util.find_spec("myst_nb"),
                                  reason="MyST-NB is not installed: pip install 'globaltensor[docs]'")

# Of each exercise, wrong answers as a reader may type them, and what the check has to say of each.
WRONG: dict[str, list[dict[str, str]]] = {
    "sbp": [
        {"72": "rank 0", "60": "half a column", "240.0": "whole", "47": "larger", "'48'": "is a str"},
        {"gt.sbp.broadcast": "its own rows", "gt.sbp.split(0)": "no dim", "'P'": "Sbp"},
        {"(gt.sbp.split(0), gt.sbp.split(1))": "rank 1 has rows 0 to 4", "(gt.sbp.broadcast,)": "two sbps",
         "(gt.sbp.split(1), gt.sbp.partial_sum)": "not the value", "gt.sbp.split(1)": "tuple"},
        {"1024": "what it has", "256": "the rest", "3072": "about one", "5000": "smaller"},
    ],
    "matmul": [
        {"(S(0), B)": "The product is S(0)", "(S(0), S(1))": "The product is S(0)", "(B, sum_of)": "The product is B",
         "(S(1),)": "Two layouts", "'S(1)'": "tuple"},
        {"262144": "already", "65536": "the rest", "393216": "gathered", "786432": "together", "'many'": "is a str"},
        {"(S(0), S(1))": "h is P, and the first product moves 0 bytes, the second", "(B, S(0))": "split",
         "(S(1), S(1))": "h is S(1), and the first product moves 0 bytes, the second"},
    ],
    "data-parallel": [
        {"4 * 10**9": "reduce-scatter and an all-gather", "8 * 10**9": "its own 64th", "3937500000": "one half",
         "252 * 10**9": "small tensors"},
        {"2 / 3": "other way round", "1": "Rank 0 has three"},
        {"8": "pending until", "1 / 8": "about a step", "4": "smaller"},
    ],
    "tensor-parallel": [
        {"2102272": "whole block", "525568": "not split", "524288": "biases"},
        {"458752": "backward pass", "786432": "four ranks", "1048576": "what it has"},
        {"4": "one of them is right", "0": "larger"},
    ],
    "sequence": [
        {"1": "nothing is split", "4": "two heads each", "16": "smaller"},
        {"524288": "already", "229376": "values", "65536": "one step", "688128": "queries stay"},
        {"lambda out1, log1, out2, log2: (out1 + out2, log1 + log2)": "adds in logarithms",
         "lambda out1, log1, out2, log2: (out1 + out2, torch.logaddexp(log1, log2))": "weigh each block",
         "lambda out1, log1, out2, log2: out1": "gives a pair", "5": "function"},
    ],
    "pipelines": [
        {"7 / 24": "beside the work", "8 / 32": "p - 1, not p", "24 / 31": "share of the work"},
        {"70": "beside the 7", "64": "One fewer", "62": "larger"},
        {"64": "GPipe", "8": "rank 0", "3": "2 GB"},
        {"text": "It cannot run", "'F0 B0'": "not an action", "'0F0 0B0 0F1 0B1\\n1F0 1B0 1F1 1B1'": "and 1F1B takes 9",
         "4": "a str"},
    ],
    "zero": [
        {"5": "without ZeRO", "20": "remain", "320": "stage 3"},
        {"0": "208.0 GB. That does not fit", "2": "a lower one", "3": "a lower one"},
        {"12": "7/8", "7": "stage 1 or 2", "3.5": "three passes", "10": "exact"},
    ],
    "cluster": [
        {"6.45": "gathered, too", "13.76": "own sixteenth", "6.88": "themselves", "25.8": "2 bytes"},
        {"(4, 1, 4)": "neither a bubble", "(1, 4, 4)": "neither a bubble", "(2, 8, 1)": "not right", "16": "tuple"},
        {"(8, 8, 1)": "product is 8", "(1, 8, 1)": "longer than the best"},
    ],
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_notebook_runs_and_judges_answers(page, tmp_path):
    exercises = WRONG[page.stem]
    run = subprocess.run([sys.executable, str(ROOT / "tests" / "run_notebook.py"), str(page),
                          json.dumps([[*answers] for answers in exercises])], capture_output=True, text=True,
                         timeout=120, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout.splitlines()[-1])
    assert rows[0]["picture"], "a notebook begins with a picture"

    checks = [row for row in rows if "check" in row["tags"]]
    assert 2 <= len(checks) <= 4
    for check, answers in zip(checks, exercises, strict=True):
        assert check["judgement"] == [False, "No answer yet. Put yours in the place of ..., and run both cells again."]
        for (answer, phrase), (right, text) in zip(answers.items(), check["of wrong ones"], strict=True):
            assert not right and phrase in text, f"{answer}: {text}"
    solutions = [row["judgement"] for row in rows if "solution" in row["tags"]]
    assert len(solutions) == len(checks)
    for right, text in solutions:
        assert right, text
        assert len(text) > 30, f"{text}: says no reason"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_exercises_are_cells_in_order_and_pages_are_small(page):
    text = page.read_text()
    tags = [cell.tags for cell in cells(text) if cell.tags]
    count = len(WRONG[page.stem])
    assert tags == [("exercise",), ("hide-input", "check"), ("hide-cell", "solution")] * count
    assert re.findall(r"(?m)^\*\*(\d)\.\*\*", text) == [str(n) for n in range(1, count + 1)]
    assert text.count("\n") <= 260
    shown = [line for cell in cells(text) if not cell.tags for line in cell.code.splitlines()]
    assert [line for line in shown if len(line) > 88] == [], "it would scroll"


def test_the_index_names_all_in_order():
    names, = re.findall(r"(?ms)^```\{toctree\}\n(?::.*?\n)*\n(.*?)^```", (LEARN / "index.md").read_text())
    assert sorted(names.split()) == [page.stem for page in PAGES]
    titles = [re.search(r"(?m)^# (\d)\. ", (LEARN / f"{name}.md").read_text())[1] for name in names.split()]
    assert titles == [str(n) for n in range(1, len(PAGES) + 1)]


@needs_sphinx
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_cells_are_those_that_sphinx_runs(page):
    from myst_nb.core.read import read_myst_markdown_notebook
    notebook = read_myst_markdown_notebook(page.read_text())
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    ours = cells(page.read_text())
    assert [cell.source.strip() for cell in code] == [cell.code.strip() for cell in ours]
    assert [tuple(cell.metadata.get("tags", ())) for cell in code] == [cell.tags for cell in ours]
    lines = page.read_text().splitlines()
    assert [lines[cell.line - 1] for cell in ours] == [cell.code.splitlines()[0] for cell in ours]


def test_an_exercise_says_what_is_wrong():
    exercise = Exercise(right=0.25, why="One in four.", hints={4: "The other way round."})
    cases = {0.25: "One in four.", 0.2501: "One in four.", 4: "The other way round.", 0.26: "smaller", 0.24: "larger",
             "0.25": "is a str. The answer is a number.", True: "is a bool"}
    for answer, phrase in cases.items():
        judgement = exercise.check(answer)
        assert phrase in judgement.text and judgement.right == (phrase == "One in four."), judgement
    assert not exercise.check(...).right
    assert "<b>" not in Exercise(right="<b>", why="<b>").check("<b>")._repr_html_()
    pair = Exercise(right=(gt.sbp.split(0), gt.sbp.broadcast), why="yes")
    assert pair.check((gt.sbp.split(0), gt.sbp.broadcast)).right and not pair.check((gt.sbp.broadcast,) * 2).right
    judged = Exercise(judge=lambda n: "too small" if n < 3 else "", kind=int, why="yes")
    assert [judged.check(n).text for n in (2, 3, "3")] == ["too small", "yes", "'3' is a str. The answer is an int."]


def test_a_line_of_a_notebook_has_the_number_of_its_cell(monkeypatch):
    """As IPython names it, not as the file that it compiles."""
    names = {"/tmp/ipykernel_7/41.py": ("Cell", "In[3]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=names.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    for file, shown in (("/tmp/ipykernel_7/41.py", "Cell In[3]:2"), (str(ROOT / "a.py"), "a.py:2")):
        names_of_cell = {"where": where}
        exec(compile("\nplace = where()", file, "exec"), names_of_cell)
        assert names_of_cell["place"].endswith(shown) and "ipykernel" not in names_of_cell["place"]


@needs_sphinx
def test_jupyter_gets_notebooks_with_folded_solutions(tmp_path):
    run = subprocess.run([sys.executable, str(ROOT / "docs" / "builder" / "jupyter.py"), str(tmp_path / "a" / "b")],
                         capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    files = sorted((tmp_path / "a" / "b").iterdir())
    assert [file.name for file in files] == [f"{page.stem}.ipynb" for page in PAGES]
    for page, file in zip(PAGES, files):
        book = json.loads(file.read_text())
        folded = [cell for cell in book["cells"] if cell["metadata"].get("jupyter", {}).get("source_hidden")]
        assert len(folded) == 2 * len(WRONG[page.stem])
        assert all({"check", "solution"} & {*cell["metadata"]["tags"]} for cell in folded)
        links = re.findall(r"\]\(([\w-]+\.\w+)\)", json.dumps(book))
        assert all((file.parent / link).exists() for link in links), links


@needs_sphinx
@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_kernel_shows_pictures_and_writes_no_warning(page, tmp_path):
    """In a real kernel, as the site and a reader run it."""
    from builder.jupyter import as_jupyter
    from nbclient import NotebookClient
    notebook = as_jupyter(page)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
                   ).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "<svg" in code[0].outputs[0]["data"]["text/html"]
    for cell in code:
        assert not [out for out in cell.outputs if out.get("name") == "stderr"], cell.source
        assert len([out for out in cell.outputs if out.output_type != "stream"]) <= 1, cell.source
        assert "ipykernel" not in str(cell.outputs), cell.source
