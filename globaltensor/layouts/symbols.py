"""Sizes that are symbols: torch.compile has them where it traces one graph for many sizes.

A symbol computes as a number does. What is asked of it (`n % 2 == 0`, `n == m`) becomes a condition of the graph, and
`int(n)` the condition that it has this size; torch traces anew where a condition does not hold. It has no hash.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

_Symbol = torch.SymInt


def has_symbols(sizes: Sequence[Any]) -> bool:
    """Is any of these a symbol?"""
    return _Symbol in map(type, sizes)


def known_sizes(sizes: Sequence[Any]) -> tuple[int, ...]:
    """The sizes, as plain ints where torch knows the number by now. A size that only values tell ends the graph."""
    return tuple(map(_known, sizes)) if has_symbols(sizes) else tuple(map(int, sizes))


def _known(n: Any) -> Any:
    if type(n) is not _Symbol:
        return int(n)
    return int(n) if n.node.maybe_as_int() is not None or not n.node.has_hint() else n


def expected(sizes: Sequence[Any]) -> tuple[int, ...]:
    """The numbers that torch traces with; asks for no condition."""
    return tuple(_expected(n) if type(n) is _Symbol else n for n in sizes)


def _expected(n: Any) -> int:
    return n.node.hint if n.node.has_hint() else expected_of(n.node.expr, n.node.shape_env)


def expected_of(expression: Any, env: Any) -> int:
    """The number that torch traces with, for an expression of a trace's symbols. Raises torch's own error where only
    values tell it."""
    number = getattr(env, "guarding_hint_or_throw", None) or env.size_hint       # the latter is torch 2.11's
    return int(number(expression))


def surely_equal(a: Any, b: Any) -> bool:
    """Are these equal whatever the symbols are? Asks for no condition."""
    return _torchs().statically_known_true(a == b) if has_symbols((a, b)) else bool(a == b)


def tell_symbol_by(n: Any, size: Any) -> None:
    """Let a size be told by another one that it is equal to, wherever it is a symbol of its own.

    Of two equal symbols torch keeps one, by their names, and then reads that from the tensor that it came from.
    """
    if type(n) is _Symbol and type(size) is _Symbol and n.node.expr.is_Symbol and expected((n,)) == expected((size,)):
        n.node.shape_env._set_replacement(n.node.expr, size.node.expr, "")


def _torchs() -> Any:
    """What torch offers for symbols, which it has imported where there are some."""
    return sys.modules["torch.fx.experimental.symbolic_shapes"]
