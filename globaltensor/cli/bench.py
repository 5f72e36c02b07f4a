"""Run benchmarks, each in a process of its own.

    globaltensor bench                       all of them
    globaltensor bench dispatch              one, or several by name
    globaltensor bench boxing --ranks 4      what some of them may be told besides
    globaltensor bench --list                their names and questions
"""
from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from globaltensor.cli.problem import Problem, positive
from globaltensor.runtime.text_table import aligned

PACKAGE = Path(__file__).resolve().parents[1]
BUNDLED = PACKAGE / "bundled" / "benchmarks"         # of an installed package; a checkout has its own
FOLDER = BUNDLED if BUNDLED.is_dir() else PACKAGE.parent / "benchmarks"


class Benchmark(NamedTuple):
    """A file in benchmarks/ that has a `main`."""

    question: str
    takes: tuple[str, ...]                           # the names of main's parameters


def options(of: argparse.ArgumentParser) -> None:
    """The command line of `globaltensor bench`."""
    of.add_argument("names", nargs="*", metavar="name", help="which (default: all)")
    of.add_argument("--json", action="store_true", help="one JSON object each, with all numbers and the machine")
    of.add_argument("--list", action="store_true", help="only say which there are")
    own = of.add_argument_group("options of some benchmarks")
    own.add_argument("--quick", action="store_true", default=None, help="few and small: to see that it works")
    own.add_argument("--ranks", type=positive, metavar="N",
                     help="processes (boxing; default 2. pipeline; default 2, then 4)")
    own.add_argument("--fresh", action="store_true", default=None, help="write what is moved anew each time (boxing)")
    own.add_argument("--hidden", type=positive, metavar="N",
                     help="hidden size of the model (train; default 128, then 256. pipeline; default 256)")
    own.add_argument("--minutes", type=float, metavar="N", help="how long training is disturbed (soak; default 2)")
    own.add_argument("--seed", type=int, metavar="N", help="of the moments at which that happens (soak; default 0)")
    own.add_argument("--min-ranks", type=positive, metavar="N",
                     help="ranks that fail are left out, as long as so many are left (soak; default: none are)")
    own.add_argument("--runs", type=positive, metavar="N", help="of each fault (faults; default 20)")
    own.add_argument("--rows", metavar="REGEX", help="only faults whose names have a match (faults; default: all)")
    own.add_argument("--plot", metavar="FILE", help="a picture of the steps, measured above simulated (pipeline)")


def command(chosen: argparse.Namespace) -> int:
    """Run them in the order of their names; 1 where one failed."""
    known = benchmarks()
    unknown = [name for name in chosen.names if name not in known]
    if unknown:
        raise Problem(f"there is no benchmark {unknown[0]!r}\n  there are: {', '.join(known)}")
    names = chosen.names or list(known)
    if chosen.list:
        print("\n".join(aligned([(name, known[name].question) for name in names])))
        return 0
    keywords = {name: getattr(chosen, name) for name in (
        "quick", "ranks", "fresh", "hidden", "plot", "minutes", "seed", "min_ranks", "runs", "rows")}
    keywords = {name: value for name, value in keywords.items() if value is not None}
    for option in keywords:
        if not any(option in known[name].takes for name in names):
            raise Problem(f"{', '.join(names)} does not know --{option.replace('_', '-')}")
    failed = [name for name in names if not _run(name, {"json": chosen.json, **{
        option: value for option, value in keywords.items() if option in known[name].takes}})]
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
