"""Run the benchmarks, each in a process of its own.

    globaltensor bench                       all of them
    globaltensor bench dispatch              one benchmark, or several, by name
    globaltensor bench boxing --ranks 4      with an option of that benchmark
    globaltensor bench --list                their names, and the question that each one answers
"""
from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from globaltensor.cli.problem import Problem
from globaltensor.runtime.progress import is_shown
from globaltensor.runtime.text_table import aligned, terminal_columns

PACKAGE = Path(__file__).resolve().parents[1]
BUNDLED = PACKAGE / "bundled" / "benchmarks"         # of an installed package; a checkout has its own
FOLDER = BUNDLED if BUNDLED.is_dir() else PACKAGE.parent / "benchmarks"


class Benchmark(NamedTuple):
    """A file in benchmarks/ that has a `main`."""

    question: str
    takes: tuple[str, ...]                           # the names of main's parameters



def command(chosen: argparse.Namespace) -> int:
    """Run them in the order of their names; 1 where one failed."""
    known = benchmarks()
    unknown = [name for name in chosen.names if name not in known]
    if unknown:
        raise Problem(f"there is no benchmark {unknown[0]!r}\n  there are: {', '.join(known)}")
    names = chosen.names or list(known)
    if chosen.list:
        questions = {name: known[name].question for name in names}
        print(json.dumps(questions, indent=2) if chosen.json else
              "\n".join(aligned(list(questions.items()), columns=terminal_columns())))
        return 0
    keywords = {name: getattr(chosen, name) for name in (
        "quick", "ranks", "fresh", "hidden", "plot", "minutes", "seed", "min_ranks", "runs", "rows")}
    keywords = {name: value for name, value in keywords.items() if value is not None}
    for option in keywords:
        if not any(option in known[name].takes for name in names):
            raise Problem(f"{', '.join(names)} does not know --{option.replace('_', '-')}")
    failed = []
    for number, name in enumerate(names, 1):
        if is_shown() and len(names) > 1:            # a bar would mix with what the benchmark prints
            print(f"{number} of {len(names)}: {name}", file=sys.stderr)
        own = {option: value for option, value in keywords.items() if option in known[name].takes}
        failed += [] if _run(name, {"json": chosen.json, **own}) else [name]
    if failed:
        raise Problem(f"failed: {', '.join(failed)}", 1)
    return 0


def benchmarks() -> dict[str, Benchmark]:
    """By name, every file in benchmarks/ that has a `main`."""
    if not FOLDER.is_dir():
        raise Problem(f"there are no benchmarks in {FOLDER.parent}\n"
                      "  they come with a checkout, and with a package that pip installed", 1)
    by_name = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "main":
                question = (ast.get_docstring(tree) or "").partition("\n")[0]
                by_name[path.stem] = Benchmark(question, tuple(a.arg for a in node.args.args))
    return by_name


def _run(name: str, keywords: dict[str, Any]) -> bool:
    code = f"from benchmarks.{name} import main; main(**{keywords})"
    paths = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, "-c", code], env=env).returncode == 0
