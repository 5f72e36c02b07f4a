"""What the library says when it cannot do what was asked: what, where, why, and what to type.

A user's mistake is an exception of a class named here; a mistake of ours is an `assert`. `where()` finds the user's
own line: the innermost frame that is neither this package's nor torch's, nor a graph that torch has written.

Every message ends with its anchor in the error index (docs/reference/errors.md): the function that raises it, such as
`layouts.placement.placement`. `anchor_of` derives it, so no message has to name its own.
"""
from __future__ import annotations

import copyreg
import math
import os
import re
import sys
import threading
import traceback
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any, NamedTuple

import torch

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# Files of torch between the program and us: a rank may run under a dispatch mode, to count or to debug, alone.
BETWEEN = tuple(TORCH + os.path.join(*name) for name in (("autograd", "function.py"), ("_ops.py",), ("utils", "")))
_SKIPPED_MODULES = ("torch.", "multiprocessing.", "typing_extensions",    # that is around what torch calls deprecated
                    "transformers.trainer", "accelerate.", "lightning.", "pytorch_lightning.", "lightning_fabric.")
_SKIP = (OURS, TORCH, os.path.dirname(os.__file__) + os.sep + "contextlib", "<frozen", "<string>", "<eval_with_key>",
         "<subclass_wrapper>", "<backward_subclass_", "<dedup_wrapper>", "<debug_assert_wrapper>")     # of torch 2.12
_PACKAGES = ("site-packages", "dist-packages")       # folders of libraries
_COMPILED = "_orig_mod."                             # what torch.compile has before the names of what it wraps


def line_of_program() -> str:
    """`file:line` of the innermost frame of the program that is in no installed library, where these ask on its behalf;
    `where()` if there is none."""
    frame = inner = _call_of_program(sys._getframe(1))
    while frame is not None and any(f"{os.sep}{folder}{os.sep}" in frame.f_code.co_filename for folder in _PACKAGES):
        frame = _call_of_program(frame.f_back)
    return where(frame or inner)


_thread = threading.local()                          # `line`: of the program, on whose behalf the thread runs


def act_for(line: str) -> None:
    """This thread is one of ours, and has no frame of the program: `where()` is this line from now on."""
    _thread.line = line


def where(frame: FrameType | None = None) -> str:
    """`file:line` of the user's innermost frame, at or above `frame` (default: the caller)."""
    if frame is None and (line := getattr(_thread, "line", "")):
        return str(line)
    frame = _call_of_program(sys._getframe(1) if frame is None else frame)
    return f"{_name_to_show(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else "<unknown>"


def _call_of_program(at: FrameType | None) -> FrameType | None:
    while at is not None and (at.f_code.co_filename.startswith(_SKIP) or str(
            at.f_globals.get("__name__")).startswith(_SKIPPED_MODULES)):
        at = at.f_back
    return at


def _name_to_show(file: str) -> str:
    """A file as seen from here; of a notebook the cell, as IPython's own tracebacks name it: `Cell In[3]`."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    if cell:
        return " ".join(cell)
    with suppress(OSError):                          # the folder that this runs in may be gone
        return os.path.relpath(file) if os.path.isabs(file) else file
    return file


def raised_at(error: BaseException, default: str = "") -> str:
    """`file:line` of the program, where an error that has been raised comes from; where no step of it is the program's,
    `default`, or the call that led to them."""
    steps = list(traceback.walk_tb(error.__traceback__))
    own = [(frame, line) for frame, line in steps if not frame.f_code.co_filename.startswith(_SKIP)]
    if not own and default:
        return default
    called = _call_of_program(steps[0][0]) if steps else None
    if not own and called is not None:
        own = [(called, called.f_lineno)]
    if not (own or steps):
        return "<unknown>:0"
    frame, line = (own or steps)[-1]
    return f"{_name_to_show(frame.f_code.co_filename)}:{line}"


def message_of(error: BaseException) -> str:
    """What it says; whatever its class does when it is asked."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"            # as Python says it


def in_short(text: str, most: int = 500) -> str:
    """What of a text others are told, who do not need all of it: an error may quote a file, or a tensor."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} more characters)"


def in_brief(error: BaseException) -> str:
    """Its class and the first line of what it says; of a DataLoader's worker, that of the error there."""
    lines = message_of(error).splitlines() or ["without a message"]
    of_worker = re.match(r"Caught \w+ in .*worker", lines[0]) and [
        line for line in lines if re.match(rf"([\w.]+\.)?{type(error).__name__}\b", line)]
    return in_short(of_worker[-1] if of_worker else f"{type(error).__name__}: {lines[0]}")


def warn(text: str, kind: type[Warning] = UserWarning) -> None:
    """A warning at the user's line, and of the user's module, which Python shows once for each line."""
    frame = _call_of_program(sys._getframe(1))
    if frame is None:
        warnings.warn_explicit(text, kind, "<unknown>", 1)
    else:
        warnings.warn_explicit(text, kind, _name_to_show(frame.f_code.co_filename), frame.f_lineno,
                               frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {}))


_NO_CONTEXT = nullcontext()


def warnings_at_program(due: bool = True) -> AbstractContextManager[None]:
    """Inside, what torch warns of is told at the program's line, and not at ours, which calls torch. Only where it is
    `due`: Python forgets what it has shown before, and takes what other threads warn of at that time for ours."""
    return _told_at_program() if due else _NO_CONTEXT


@contextmanager
def _told_at_program() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield
    for kind, text in dict.fromkeys((one.category, str(one.message)) for one in heard):
        warn(text, kind)


def call_site() -> int:
    """A number for the instruction of the program that led here, by its file's name: the same on every host."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((OURS, *BETWEEN)):
        frame = frame.f_back
    if frame is None:
        return 0
    return zlib.crc32(f"{os.path.basename(frame.f_code.co_filename)} {frame.f_lasti}".encode())


def counted(n: int, one: str, many: str = "") -> str:
    """`1 axis`, `2 axes`: a number and its noun."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def with_articles(text: str) -> str:
    """`a int` becomes `an int`: what a message puts in may begin with a vowel. One letter or two may be a formula."""
    sounds = r"(?i:(?!eu|one\b|once|uni|unet|url|us[aeiu]|uti)[aeiou]\w\w)"
    return re.sub(rf"(?<![\w`'\"(\[{{./\\-])a (?={sounds})", "an ", text)


def anchor_of(module: str, qualname: str) -> str:
    """The anchor of the messages of one function: `parallel.zero.zero`; leading underscores are left out."""
    outermost = qualname.partition(".<locals>")[0].removesuffix(".__init__")
    parts = [*module.removeprefix("globaltensor.").split("."), *outermost.split(".")]
    return ".".join(part.strip("_<>") for part in parts)


def _anchor_of_raiser(error: GlobalTensorError) -> str:
    """That of the function of this package that makes the error; of another's, the name of its class."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is error:
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(OURS):
        return type(error).__name__
    return anchor_of(frame.f_globals["__name__"], frame.f_code.co_qualname)


def first_sentence(error: Exception) -> str:
    """The first sentence of what torch says, without the place in its source."""
    return re.sub(r"^\[\S+\.(cc|cpp|h):\d+\] ", "", str(error).splitlines()[0]).split(". ")[0]


class GlobalTensorError(RuntimeError):
    """The root of all errors of this library. `what` in one line; `why` and `fix` (what to type) where they help; `at`
    is the user's line, where another thread than the user's raises. `anchor` is the message's in the error index.
    `follows`: another rank has raised, and told this one, which can't go on."""

    follows = False

    def __init__(self, what: str, why: str = "", fix: str = "", at: str = "") -> None:
        what, why = with_articles(what), with_articles(why)
        self.what, self.why, self.fix, self.where = what, why, fix, at or where()
        self.anchor = _anchor_of_raiser(self)
        lines = [what, f"  where: {self.where}"]
        lines += [f"  why:   {why}"] if why else []
        lines += [f"  try:   {fix}"] if fix else []
        lines += [f"  docs:  errors#{self.anchor}"]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, in this process or another one, says what this one does: it is not raised anew where it is made."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        """In lines: torch.compile tells of an error by its repr."""
        return f"{type(self).__name__}: {self}"


class PlacementError(GlobalTensorError, ValueError):
    """A placement that cannot be: ranks outside the world, duplicates, ragged lists, a device that is not there."""


class SbpError(GlobalTensorError, ValueError):
    """An sbp that cannot be: a wrong number of them, a split dim out of range, the sbp of a plain tensor."""


class PlainTensorError(SbpError, AttributeError):
    """The sbp or the placement of a plain tensor, which has neither: `hasattr(t, "sbp")` is False."""


class ArgumentError(GlobalTensorError, TypeError):
    """A keyword that a function does not take, or does not take beside the others."""


class ShapeError(GlobalTensorError, ValueError):
    """Shards or operands whose shapes do not fit together."""


class OutOfRangeError(GlobalTensorError, IndexError):
    """An index, or a class, that the whole tensor does not have."""


class RuleError(GlobalTensorError, ValueError):
    """A rule that does not fit its op, or is unsound."""


class RuleSyntaxError(RuleError):
    """A malformed rule. Prints the rule, with a caret under the character `at` fault."""

    def __init__(self, what: str, rule: str, at: int | None, why: str, fix: str = "") -> None:
        caret = "" if at is None else f"\n  {' ' * at}^"
        super().__init__(f"{what}\n  {rule}{caret}", why, fix)


class MixedPlacementError(GlobalTensorError, ValueError):
    """Operands of one op on different placements."""


class InPlaceError(GlobalTensorError):
    """An in-place op that would have to change its target in a way it cannot."""


class BoxingError(GlobalTensorError):
    """A boxing that `gt.boxing("forbid")` or its budget does not allow."""


class DisagreementError(GlobalTensorError):
    """Ranks that run the same program but do not say the same thing."""


class TransportError(GlobalTensorError):
    """Bytes that could not be moved: a peer that died, a device or a launcher that is not there."""


class ErrorNote(NamedTuple):
    """An error as one rank tells others of it, who raise it too."""

    kind: str                                        # the name of its class; "" for what is none of ours
    what: str
    why: str
    fix: str

    @classmethod
    def of(cls, error: BaseException, doing: str) -> ErrorNote:
        """What there is to tell of an error that came up while `doing` something."""
        if isinstance(error, GlobalTensorError):
            return cls(type(error).__name__, error.what, error.why, error.fix)
        what = f"{doing} failed: {type(error).__name__}: {in_short(message_of(error), 2000)}"
        if isinstance(error, OSError):
            return cls("", what, "the system did not allow it", "a path where this program may read and write, on a "
                       "disk with room")
        return cls("", what, "it was raised by code that was called for it", "look at that error, of the rank that had "
                   "it")

    def class_of(self, *kinds: type[GlobalTensorError]) -> type[GlobalTensorError]:
        """Its class, where that is one of these; else the last of them."""
        return next((each for each in kinds if each.__name__ == self.kind), kinds[-1])


def expect(value: object, kind: type, role: str, fix: str) -> None:
    """Raise ArgumentError where an argument, in this role, is of another kind."""
    if not isinstance(value, kind):
        what = value.__name__ if isinstance(value, type) else repr(value)
        raise ArgumentError(f"{role}: {what if len(what) < 40 else type(value).__name__}",
                            f"it is a {type(value).__name__}, where a {kind.__name__} is wanted", fix)


def closest(word: object, words: Iterable[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """Those of some words that are most like another, whatever the case of their letters; the likeliest first."""
    by_letters = {each.lower(): each for each in words}
    return [by_letters[each] for each in get_close_matches(str(word).lower(), by_letters, n, cutoff)]


def keyword_fix(key: str, valid: Iterable[str], before: str = "") -> str:
    """What to type in place of a keyword (or of a name with something `before` it) that is not taken: the valid one
    that is most like it, or none."""
    near = closest(key, valid)
    return f"{before}{near[0]}=..." if near else f"the same without {before}{key}="


def compiled_fix(name: str, others: Iterable[str]) -> str:
    """What to type where a name, or a pattern as in fnmatch, fits one of the others but for what torch.compile has in
    the names of what it wraps; else ""."""
    plain = name.replace(_COMPILED, "")
    fits = any(_COMPILED in name + other and fnmatchcase(other.replace(_COMPILED, ""), plain) for other in others)
    return "model._orig_mod for a compiled model; or model.compile(), which leaves names as they are" if fits else ""


def expect_path(value: object, role: str, fix: str) -> None:
    """Raise ArgumentError where what is to name a file or folder names none."""
    name = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise ArgumentError(f"{role}: {value!r:.60}", "a file or folder is named by a text, or by a pathlib.Path", fix)


@contextmanager
def writing_to(path: Any, role: str, fix: str) -> Iterator[None]:
    """Raise ArgumentError where what is to name a file names none, or one that cannot be written."""
    expect_path(path, role, fix)
    try:
        yield
    except OSError as error:
        raise ArgumentError(f"{os.fspath(path)} could not be written", error.strerror or str(error),
                            "a name in a folder that is there and may be written") from None


def expect_amount(value: object, role: str, fix: str) -> None:
    """Raise ArgumentError where what is to be a number above 0, and finite, is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ArgumentError(f"{role}: {value!r:.60}", "it is a number above 0", fix)
