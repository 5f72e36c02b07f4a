"""Symbols of sizes, with their place in the graph that torch traces.

A symbol that was computed while nothing was traced, or came from outside the graph, has none: the graph would lack the
steps that lead to it. So it is computed again, from the sizes of the graph's own inputs.
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from globaltensor.layouts.symbols import expected_of
from globaltensor.runtime.torch_internals import graph_inputs_by_symbol


def in_graph(value: Any) -> Any:
    """A size, or sizes in lists, tuples and dicts, by the graph that is being traced; as they are where none is."""
    known = graph_inputs_by_symbol()
    return value if known is None else _again(value, known)


def _again(value: Any, known: dict[Any, Any]) -> Any:
    if type(value) is torch.SymInt:
        return _computed(value.node.expr, value.node.shape_env, known)
    if isinstance(value, dict):
        return {key: _again(one, known) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_again(one, known) for one in value])
    return value


def _computed(expression: Any, sizes: Any, known: dict[Any, Any]) -> Any:
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        if expression in known:
            return known[expression].value
        return sizes.create_symintnode(expression, hint=expected_of(expression, sizes))
    step = _STEPS[type(expression).__name__]
    return reduce(step, [_computed(part, sizes, known) for part in expression.args])


_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add, "Mul": operator.mul, "Pow": operator.pow, "PowByNatural": operator.pow,
    "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod,
    "Max": torch.sym_max, "Min": torch.sym_min}
