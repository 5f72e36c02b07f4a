"""Nothing in the README and in docs/ that is not so: programs print what they say, commands exist, files are listed.

`python tests/test_readme.py` writes docs/files.md anew.
"""
from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys

import pytest
from harness import ROOT
from pages import is_followed

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
FILES = ROOT / "docs" / "files.md"


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def programs() -> dict[str, tuple[str, str]]:
    """Page and number -> a block of Python, and the block of text after it: what it prints. Pages that are followed
    block by block have a test of their own, test_followed.py."""
    found = {}
    for page in [page for page in PAGES if not is_followed(page)]:
        blocks = [*re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.S), ("", "")]
        python = [(code, after if kind == "text" else "") for (name, code), (kind, after) in itertools.pairwise(blocks)
                  if name == "python"]
        name = str(page.relative_to(ROOT / "docs").with_suffix("")) if page != README else "README"
        found |= {f"{name} {n}": pair for n, pair in enumerate(python)}
    return found


PROGRAMS = programs()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_print_what_the_page_says(name, tmp_path):
    code, output = PROGRAMS[name]
    (tmp_path / "program.py").write_text(code)
    run = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True, timeout=120, cwd=tmp_path,
                         env=environment())
    assert run.returncode == 0, run.stderr
    assert run.stdout == output


@pytest.mark.processes
@pytest.mark.parametrize("launcher", [
    ["globaltensor", "run", "-n"], pytest.param(["torchrun", "--nproc-per-node"], marks=pytest.mark.long)],
                         ids=lambda words: words[0])
def test_the_first_program_runs_with_either_launcher(launcher, tmp_path):
    code, output = PROGRAMS["README 0"]
    once = "import globaltensor as gt\nif gt.rank():\n    def print(*words): pass\n"      # outputs may interleave
    program = tmp_path / "program.py"
    program.write_text(once + code)
    run = subprocess.run([f"{os.path.dirname(sys.executable)}/{launcher[0]}", *launcher[1:], "2", program],
                         capture_output=True, text=True, timeout=120, env=environment())
    assert run.returncode == 0, run.stderr
    assert run.stdout == output


def test_commands_exist():
    help_text = subprocess.run([sys.executable, "-m", "globaltensor.cli", "--help"], capture_output=True, text=True,
                               timeout=60).stdout
    for page in PAGES:
        for command in set(re.findall(r"(?m)(?:^|`|srun )globaltensor ([a-z]+)", page.read_text())):
            assert re.search(rf"(?m)^    {command}\s", help_text), f"{page.name}: globaltensor {command}"


def test_environment_variables_are_the_documented_ones():
    read = {name for folder in ("globaltensor", "csrc") for path in (ROOT / folder).rglob("*.*")
            if path.suffix in (".py", ".cpp", ".h") for name in re.findall(r"\bGLOBALTENSOR_[A-Z_]+", path.read_text())}
    internal = {"GLOBALTENSOR_RUN_FOLDER", "GLOBALTENSOR_FORK_LINK"}     # between the launcher and its ranks
    page = ROOT / "docs" / "running.md"
    assert set(re.findall(r"(?m)^\| `(GLOBALTENSOR_[A-Z_]+)", page.read_text())) == read - internal


def test_the_readme_is_read_in_one_go():
    assert len(README.read_text().splitlines()) <= 250


# ----------------------------------------------------------------------------------------------------- the files


def first_line_of_python(text: str) -> str:
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def first_sentence_of_cpp(text: str) -> str:
    """Of the comment that the file begins with, up to a blank or indented line."""
    lines = itertools.takewhile(lambda line: re.match(r"// ?\S", line), text.splitlines())
    return re.split(r"(?<=[.?:]) ", " ".join(line.removeprefix("//").strip() for line in lines))[0].rstrip(":")


def ideas(folder: str) -> list[str]:
    """A line per file, with a link and its idea: the first line of a docstring, the first sentence of a comment. A
    .cpp without one is told of by its .h."""
    rows = []
    for path in sorted((ROOT / folder).iterdir()):
        if path.suffix == ".py":
            idea = first_line_of_python(path.read_text())
        elif path.suffix in (".cpp", ".h", ".cu"):
            idea = first_sentence_of_cpp(path.read_text())
        else:
            continue
        if idea and path.name != "__init__.py":
            rows.append(f"- [{path.name}](../{folder}/{path.name}): {idea}")
    return rows


def room(folder: str) -> str:
    """A folder with its own idea and its files."""
    face = ROOT / folder / "__init__.py"
    idea = [first_line_of_python(face.read_text()), ""] if face.exists() else []
    return "\n".join([f"## {folder}/", "", *idea, *ideas(folder), ""])


def files() -> str:
    folders = ["globaltensor", *(f"globaltensor/{path.parent.name}" for path in
                                 sorted((ROOT / "globaltensor").glob("*/__init__.py"))),
               *(f"csrc/{path.name}" for path in sorted((ROOT / "csrc").iterdir()) if path.is_dir()),
               "examples", "benchmarks"]
    head = "Every file with its idea, as its first line tells it. Written by `python tests/test_readme.py`."
    return f"# Files\n\n{head}\n\n" + "\n".join(room(folder) for folder in folders)


def test_every_file_is_listed():
    assert FILES.read_text() == files(), "type: python tests/test_readme.py"


if __name__ == "__main__":
    FILES.write_text(files())
