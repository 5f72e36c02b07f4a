"""Where gloo has failed: its threads keep what they work on, so nothing of that may be freed.

A peer that does something else than this rank may send more than it asked for. gloo then throws in the thread that
serves its connections, which would end the process before anybody has said what the ranks do. Native code stops that
thread instead. The watch over waits finds what the ranks wait for, and all of them raise.
"""
from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from globaltensor.runtime.native import torch_ext


def gloo_error() -> str:
    """Why a thread of gloo was stopped in this process; "" where none was."""
    return "" if torch_ext is None else torch_ext.gloo_error()


def keep_for_ever(objects: Iterable[Any]) -> None:
    """Never free these, on which a thread of torch works that does not end: to end a group waits for that thread, which
    needs an interpreter that may have ended to free the others."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
