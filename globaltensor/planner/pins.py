"""Pins: rows of a plan that are given, not chosen: `*.up.weight=tp:S(0)`.

Each fits a parameter, buffer or module of the model. Two that fit the same one and say different things contradict
each other.
"""
from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from globaltensor.errors import GlobalTensorError, closest
from globaltensor.layouts.sbp import read_sbp
from globaltensor.parallel.plan import OF_MODULES

_AXES = ("dp", "tp")


class PinError(GlobalTensorError, ValueError):
    """Pins that cannot be: of no name, of no sbp, of a dim that is not there, or against each other."""


def read_pins(pins: Sequence[str] | Mapping[str, Any], model: nn.Module) -> dict[str, dict[str, Any]]:
    """Rows by pattern, checked against the model. A text is `pattern=axis:sbp,axis:sbp`."""
    rows: dict[str, dict[str, Any]] = {}
    for pattern, row in pins.items() if isinstance(pins, Mapping) else map(_pin_of_text, pins):
        if not isinstance(row, Mapping):
            raise PinError(f"the pin {pattern!r} is {row!r}", "it says how along each axis", '{"tp": "S(0)"}')
        for axis, how in row.items():
            if axis not in _AXES:
                raise PinError(f"the pin {pattern}={axis}:{how}", f"the axes are {', '.join(_AXES)}",
                               f"{pattern}=tp:{how}")
            if read_sbp(how) is None:
                raise PinError(f"the pin {pattern}={axis}:{how}", f"{how!r} is not an sbp", f"{pattern}={axis}:S(0)")
        if pattern in rows:
            _check_pair(pattern, rows[pattern], pattern, row, pattern)
        rows[pattern] = rows.get(pattern, {}) | {axis: read_sbp(how) for axis, how in row.items()}
    _check_against(rows, model)
    return rows


def pin_text(pattern: str, row: Mapping[str, Any]) -> str:
    """A pin as it is typed."""
    return f"{pattern}={','.join(f'{axis}:{how}' for axis, how in row.items())}"


def _pin_of_text(text: str) -> tuple[str, dict[str, str]]:
    pattern, equals, row = str(text).partition("=")
    parts = [part.partition(":") for part in row.split(",")]
    if not equals or not pattern.strip() or not all(colon and how.strip() for _, colon, how in parts):
        raise PinError(f"the pin {text!r} cannot be read", "it is a pattern of names, and how they lie along an axis",
                       "'blocks.*.up.weight=tp:S(0)'")
    return pattern.strip(), {axis.strip(): how.strip() for axis, _, how in parts}


def _check_against(rows: Mapping[str, Mapping[str, Any]], model: nn.Module) -> None:
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    modules = [name for name, _ in model.named_modules()]
    by_name: dict[str, str] = {}
    for pattern, row in rows.items():
        suffix = next((suffix for suffix in OF_MODULES if pattern.endswith(suffix)), "")
        known = modules if suffix else list(tensors)
        fitting = [name for name in known if fnmatch.fnmatchcase(name, pattern.removesuffix(suffix))]
        if not fitting:
            raise PinError(f"the pin {pattern!r} fits no name", "it is that of a parameter, a buffer or a module",
                           *closest(pattern, known, 1, 0.4))
        for name in fitting:
            for axis, how in row.items() if not suffix else ():
                dims = tensors[name].dim()
                if how.is_partial or how.is_split and not -dims <= how.dim < dims:
                    raise PinError(f"the pin {pattern}={axis}:{how}", f"no rule allows it: {name} has {dims} dims, and "
                                   "is stored whole or split along one of them", f"{pattern}={axis}:B")
            other = by_name.setdefault(f"{name}{suffix}", pattern)
            if other != pattern:
                _check_pair(other, rows[other], pattern, row, name)


def _check_pair(first: str, row: Mapping[str, Any], second: str, other: Mapping[str, Any], name: str) -> None:
    for axis in row.keys() & other.keys():
        if read_sbp(row[axis]) != read_sbp(other[axis]):
            raise PinError(f"the pins {first}={axis}:{row[axis]} and {second}={axis}:{other[axis]} contradict each "
                           "other", f"both are about {name}", "one of them")
