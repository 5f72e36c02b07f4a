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
import signal
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


# what asks a process to end: the terminal, a scheduler, a terminal that is closed. On Windows a benchmark makes nothing
# that outlives it, and hears of Ctrl-C by itself
_ENDS = [int(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] if sys.platform != "win32" else []
# a process of a benchmark: once it is asked to end, even by the death of the one that started it, it leaves its `with`
# and `finally` blocks, which a second signal does not disturb
_CODE = """\
import importlib, signal, sys

def end(number, frame):
    for each in {ends}:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)

for each in {ends}:
    if signal.getsignal(each) != signal.SIG_IGN:
        signal.signal(each, end)
from globaltensor.cli.worker import end_with_launcher
end_with_launcher()
importlib.import_module("benchmarks.{name}").main(**{keywords})
"""


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
    """Did it end well? A signal that asks this process to end goes on to that of the benchmark, which is waited for: it
    may have made what outlives it."""
    code = _CODE.format(ends=_ENDS, name=name, keywords=keywords)
    paths = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    asked: list[int] = []

    def hand_on(number: int, _: object) -> None:
        asked.append(number)
        for child in started:
            child.send_signal(number)

    started: list[subprocess.Popen[bytes]] = []
    before = {each: signal.signal(each, hand_on) for each in _ENDS if signal.getsignal(each) != signal.SIG_IGN}
    try:
        started.append(subprocess.Popen([sys.executable, "-c", code], env=env))
        for number in asked:                         # before there was anybody to tell
            started[0].send_signal(number)
        ended = started[0].wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if asked:
        sys.exit(128 + asked[0])
    return ended == 0
