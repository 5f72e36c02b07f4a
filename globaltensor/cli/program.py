"""The function of a program that gives what is to be planned: `--program train.py:build`.

The file runs as an import does, with its own folder first on the path; what it prints goes to stderr. So whatever is
wrong with it, it is said what, at which line, and what to write instead.
"""
from __future__ import annotations

import contextlib
import difflib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from globaltensor.cli.problem import Problem
from globaltensor.errors import in_short, message_of, raised_at

_RETURN = "return model, torch.zeros(8, 128), loss"


class LoadedProgram(NamedTuple):
    """What a program's function gave."""

    module: nn.Module
    batch: Any
    loss: Callable[..., Any] | None
    targets: Any


def load_program(text: str) -> LoadedProgram:
    """Call FILE.py:FUNCTION."""
    file, colon, name = text.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise Problem(f"--program {text} names no function\n  why: it is FILE.py:FUNCTION\n"
                      f"  try: --program {text.strip(':').removesuffix('.py') or 'train'}.py:build")
    path = Path(file)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], 1)
        raise Problem(f"there is no file {file}\n  try: --program " + (
            f"{path.with_name(near[0])}:{name}" if near else "the path of a Python file, and :" + name))
    with contextlib.redirect_stdout(sys.stderr):     # stdout is for the plan
        with _problems_at(path, f"{file} cannot be imported", "a file that can be imported: what it runs as a program "
                          'stands below `if __name__ == "__main__":`'):
            module = _imported(path)
        function = getattr(module, name, None)
        if not callable(function):
            own = [key for key, value in vars(module).items() if callable(value)
                   and getattr(value, "__module__", "") == module.__name__]
            near = difflib.get_close_matches(name, own, 1) or own[:1]
            raise Problem(f"{file} has no function {name!r}\n  why: {_list_text(own)}\n  try: " + (
                f"--program {file}:{near[0]}" if near else f"def {name}(): ... {_RETURN}"))
        code = getattr(function, "__code__", None)   # of what is not called, as it needs arguments, this is the line
        with _problems_at(path, f"{name}() of {file} raises", f"a function that needs no arguments and ends with: "
                          f"{_RETURN}", f"{file}:{code.co_firstlineno}" if code else file):
            value = function()
    return _checked_program(value, f"{name}() of {file}")


def _imported(path: Path) -> ModuleType:
    name = re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_loader(name, importlib.machinery.SourceFileLoader(name, str(path.resolve())))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module                       # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _problems_at(path: Path, what: str, fix: str, default: str = "") -> Iterator[None]:
    """Whatever the program raises, with its line; with `default` or its file where no line of it has run."""
    try:
        yield
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""            # none of a null byte
        raise Problem(f"{what}\n  where: {error.filename or path}{line}\n  why: SyntaxError: {error.msg}\n"
                      f"  try: python {path}") from None
    except (Exception, SystemExit) as error:
        message = in_short((message_of(error).splitlines() or [""])[0])
        place = raised_at(error, default or str(path))
        raise Problem(f"{what}\n  where: {place}\n  why: {type(error).__name__}: {message}\n  try: {fix}") from None


def _checked_program(value: Any, what: str) -> LoadedProgram:
    def wrong(gives: str, why: str) -> Problem:
        return Problem(f"{what} returns {gives}\n  why: {why}\n  try: {_RETURN}")

    if not isinstance(value, tuple) or len(value) not in (3, 4):
        gives = f"{len(value)} values" if isinstance(value, tuple) else _kind_text(value)
        raise wrong(gives, "it is (module, example batch, loss), or these and targets")
    module, batch, loss, *targets = value
    if not isinstance(module, nn.Module):
        raise wrong(f"{_kind_text(module)} first", "the first is the model, a torch.nn.Module")
    if loss is not None and not callable(loss):
        raise wrong(f"{_kind_text(loss)} third", "the third is a loss, a function of what the model returns; or "
                    "None, where the model returns its loss")
    return LoadedProgram(module, batch, loss, *(targets or [None]))


def _kind_text(value: Any) -> str:
    name = type(value).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def _list_text(names: list[str]) -> str:
    return f"it has {', '.join(names[:8])}" if names else "it defines none"


def as_options(fix: str) -> str:
    """What to type, for a command line: `dp=2` is `--dp 2` there."""
    fix = re.sub(r"pins=\[(.*?)\]", r"--pin \1", fix)
    return re.sub(r"\b(dp|tp|pp|zero|recompute|schedule|chunks|micro_batch|global_batch|devices)=(\S+)",
                  lambda m: f"--{m[1].replace('_', '-')} {m[2]}", fix)
