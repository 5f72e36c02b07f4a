"""Nothing in the README that is not so: its programs print what it says, its commands exist, its tree is the tree."""
from __future__ import annotations

import ast
import itertools
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
PROGRAMS = [(code, BLOCKS[i + 1][1]) for i, (kind, code) in enumerate(BLOCKS) if kind == "python"]


@pytest.mark.parametrize("code, output", PROGRAMS, ids=range(len(PROGRAMS)))
def test_programs_print_what_it_says(code, output, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(code)
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, cwd=tmp_path,
                         env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    assert run.stdout == output


@pytest.mark.processes
def test_the_first_program_runs_in_every_way(tmp_path):
    program = tmp_path / "program.py"
    once = "import globaltensor as gt\nif gt.rank():\n    def print(*words): pass\n"      # outputs may interleave
    program.write_text(once + PROGRAMS[0][0].replace("print(y)", "").replace("print(grad)", ""))
    expected = [line for line in PROGRAMS[0][1].splitlines() if line.startswith(("(P,)", "gradient", "aten"))]
    for command in (["globaltensor", "run", "-n", "2"], ["torchrun", "--nproc-per-node", "2"]):
        tool = pathlib.Path(sys.executable).parent / command[0]
        run = subprocess.run([tool, *command[1:], program], capture_output=True, text=True, timeout=120,
                             env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert run.returncode == 0, run.stderr
        assert [line for line in run.stdout.splitlines() if line] == expected


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?m)(?:^|`)make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target}"
    help_text = subprocess.run([sys.executable, "-m", "globaltensor.cli", "--help"], capture_output=True, text=True,
                               timeout=60).stdout
    for command in set(re.findall(r"`globaltensor ([a-z]+)", README)) | {"run"}:
        assert command in help_text, f"globaltensor {command}"


def tree() -> str:
    """Every Python file of the package with the first line of its docstring, what else stands at the top, and the
    native sources with the first sentence of their first comment (a .cpp without one is told of by its .h)."""
    rows = []
    for folder in ("globaltensor", "examples", "benchmarks"):
        rows.append(f"{folder}/")
        for path in sorted((ROOT / folder).rglob("*.py"), key=lambda p: (p.parent != ROOT / folder, p)):
            name = str(path.relative_to(ROOT / folder))
            first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
            rows.append(f"  {name:<26} {first}")
    rows.append("csrc/")
    for path in sorted((ROOT / "csrc").rglob("*"), key=lambda p: (p.parent != ROOT / "csrc", p)):
        comment = itertools.takewhile(lambda line: line.startswith("//"), path.read_text().splitlines()
                                      if path.suffix in (".cpp", ".h", ".cu") else ())
        text = " ".join(line.removeprefix("//").strip() for line in comment)
        if text:
            rows.append(f"  {str(path.relative_to(ROOT / 'csrc')):<26} {re.split(r'(?<=[.?]) ', text)[0]}")
    return "\n".join(rows) + "\n"


def test_the_tree_is_the_tree():
    assert tree() in README, f"the README's tree should read:\n{tree()}"


if __name__ == "__main__":                           # writes the tree into the README
    new = re.sub(r"(## The files\n\n```text\n).*?(```)", lambda m: m[1] + tree() + m[2], README, flags=re.S)
    (ROOT / "README.md").write_text(new)
