"""What a traceback shows: the lines of the program, not ours below them.

An error leaves this package through a function that the program called, an *API boundary*. There it is folded: our
frames are taken out of its traceback, and torch's between them; the frames of functions that the program gave us stay.
So are those between the program and a signal handler that raises while our code waits, such as one of a time-out. So
printed errors, pytest, notebooks and debuggers all show the line that was wrong. It costs nothing where there is no
error. GLOBALTENSOR_TRACEBACK=full leaves everything in, as does an error that is a mistake of ours.
"""
from __future__ import annotations

import functools
import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from types import CodeType, TracebackType
from typing import Any, TypeVar

from globaltensor.errors import OURS, TORCH, GlobalTensorError, closest, where

T = TypeVar("T", bound=Callable[..., Any])

_PYTHON = sysconfig.get_path("stdlib") + os.sep
_OF_TORCH = "_globaltensor_of_torch"                 # set on errors of torch's and Python's that are of the program
_KERNEL_CALLS = f"{OURS}runtime{os.sep}torch_internals.py"


def api_boundary(function: T) -> T:
    """Decorate a function that programs call, or a generator that they iterate: errors that leave it are folded."""
    if inspect.isgeneratorfunction(function):
        return _boundary_of_generator(function)  # type: ignore[return-value]
    return _boundary(function, _tell_of_arguments)


def torch_boundary(function: T) -> T:
    """Decorate one that hands its call on to torch, or to Python: what is raised there, by code in C++ that has no
    frames, is folded, too. An error from a function of ours further down is not: it may be a mistake of ours."""
    return _boundary(function, _tell_of_what_is_handed_on)


def _boundary(function: T, tell: Callable[[BaseException, Callable[..., Any]], None]) -> T:
    @functools.wraps(function)
    def boundary(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:               # a handler may raise any
            tell(error, function)
            fold(error)
            raise                                    # bare: the frame of this function stays out as well
    return boundary  # type: ignore[return-value]  # it takes and gives what the function does


def _tell_of_what_is_handed_on(error: BaseException, function: Callable[..., Any]) -> None:
    within = None if error.__traceback__ is None else error.__traceback__.tb_next
    if within is None:
        _tell_of_arguments(error, function)
    elif within.tb_next is None and isinstance(error, Exception) and not isinstance(error, GlobalTensorError):
        note_on_torch_error(error, f"  where: {where()}")


def _tell_of_arguments(error: BaseException, function: Callable[..., Any]) -> None:
    """Python names the argument that a call lacks, or has too much; add what the function takes, in a line."""
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return                                       # they did fit: something of ours has run
    if not isinstance(error, TypeError) or not inspect.isfunction(function) or "<" in function.__qualname__:
        setattr(error, _OF_TORCH, True)
        return
    name = function.__qualname__.removesuffix(".__init__")
    taken = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    first = [p.name for p in taken if p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    named = [f"{p.name}=..." for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
             and p.name not in first]
    short = ", ".join([*first, *named])
    word = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    near = closest(word[1], [p.name for p in taken]) if word else []
    short = short if len(short) < 100 else ", ".join([*first, *(f"{one}=..." for one in near), "..."])
    note_on_torch_error(error, f"  where: {where()}\n  try:   {name}({short})")


def _boundary_of_generator(function: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def boundary(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        try:
            return (yield from function(*args, **kwargs))
        except BaseException as error:
            fold(error)
            raise
    return boundary


def fold(error: BaseException) -> None:
    """Take frames that are not the program's out of the traceback, and out of those of its causes. For an error that is
    neither ours nor torch's, nor of a signal handler, nothing."""
    if not (isinstance(error, GlobalTensorError) or hasattr(error, _OF_TORCH) or _raised_by_handler(error)):
        return
    if os.environ.get("GLOBALTENSOR_TRACEBACK") == "full":
        return
    for one in _chain(error):
        one.__traceback__ = _of_program(one.__traceback__)


def _raised_by_handler(error: BaseException) -> bool:
    """Did a signal handler of the program raise it? Python hands one the frame in which it came."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(value is within or type(value) is tuple and within in value
               for within, frame in pairwise(frames) if _is_ours(within.f_code) or _is_library(within.f_code)
               for value in ([] if _is_ours(frame.f_code) else frame.f_locals.values()))


def raised_by_torch(error: BaseException) -> bool:
    """Did torch raise it, and not a mistake of ours? RuntimeErrors are; of others the last frame tells."""
    if _raised_by_handler(error):
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = "" if last is None else last.tb_frame.f_code.co_filename
    return isinstance(error, RuntimeError) or where.startswith(TORCH) or where == _KERNEL_CALLS


def note_on_torch_error(error: BaseException, note: str) -> None:
    """Add what is known here to an error of torch's, once; it is folded from then on."""
    if not hasattr(error, _OF_TORCH):
        setattr(error, _OF_TORCH, True)
        error.add_note(note)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, and what was being handled when it was raised."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [other for other in (one.__cause__, one.__context__) if other is not None]


def _of_program(at: TracebackType | None) -> TracebackType | None:
    """The entries of the program's own frames. Those of torch and of Python stay where the program called them."""
    entries, within = [], True
    while at is not None:
        code = at.tb_frame.f_code
        within = _is_ours(code) or within and _is_library(code)
        if not within:
            entries.append(at)
        at = at.tb_next
    inner = None
    for entry in reversed(entries):
        inner = TracebackType(inner, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return inner


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(OURS)


def _is_library(code: CodeType) -> bool:
    """Is it torch's, or Python's own?"""
    name = code.co_filename
    return name.startswith((TORCH, "<frozen", "<string>")) or name.startswith(_PYTHON) and "-packages" not in name
