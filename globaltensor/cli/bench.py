"""Run benchmarks of a checkout, each in a process of its own.

    globaltensor bench                 all of them
    globaltensor bench dispatch        one, or several by name
    globaltensor bench --list          their names and questions
"""
from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path

from globaltensor.cli.problem import Problem

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def options(of: argparse.ArgumentParser) -> None:
    """The command line of `globaltensor bench`."""
    of.add_argument("names", nargs="*", metavar="name", help="which (default: all)")
    of.add_argument("--json", action="store_true", help="a line of JSON per table")
    of.add_argument("--list", action="store_true", help="only say which there are")


def command(chosen: argparse.Namespace) -> int:
    """Run them in the order of their names; 1 where one failed."""
    known = benchmarks()
    unknown = [name for name in chosen.names if name not in known]
    if unknown:
        raise Problem(f"there is no benchmark {unknown[0]!r}\n  there are: {', '.join(known)}")
    names = chosen.names or list(known)
    if chosen.list:
        print("\n".join(f"{name.ljust(max(map(len, names)))}  {known[name]}" for name in names))
        return 0
    failed = [name for name in names if not _run(name, chosen.json)]
    if failed:
        raise Problem(f"failed: {', '.join(failed)}", 1)
    return 0


def benchmarks() -> dict[str, str]:
    """Name -> the question it answers, of every file in benchmarks/ that has a `main`."""
    if not FOLDER.is_dir():
        raise Problem(f"there are no benchmarks in {FOLDER.parent}\n"
                      "  they are part of a checkout, not of an installed package", 1)
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def _run(name: str, as_json: bool) -> bool:
    code = f"from benchmarks.{name} import main; main(json={as_json})"
    paths = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, "-c", code], env=env).returncode == 0
