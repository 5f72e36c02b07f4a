"""Expressions of a visitor, such as `torch.softmax(x @ y, 1)`: parsed, checked and computed without running any code.

    names         x, y, and torch's functions that FUNCTIONS lists
    operators     + - * / @ ** and comparisons
    indices       x[0], x[:, 1:3]
    methods       x.sum(0), and x.T: those that METHODS lists
    values        numbers, True, False, None, and tuples or lists of these; a word in keywords, reduction="sum"

Text becomes a tree by Python's parser, which runs nothing. `check_expression` admits the nodes above and nothing
else, and `compute` walks the tree itself: nothing is ever given to eval. Sizes are bounded before each step, so that a
mistake cannot fill the memory: no op here gives more than the square of what it takes.
"""
from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from itertools import zip_longest
from math import prod
from typing import Any

import torch

from globaltensor.errors import GlobalTensorError

LONGEST, DEEPEST, LARGEST = 300, 40, 2048            # characters, nested nodes, elements of any tensor
WIDEST, LARGEST_NUMBER = LARGEST ** 2, 1e12          # elements of what operands are broadcast to; numbers
FUNCTIONS = frozenset("""
abs add amax amin argmax argmin bmm cat clamp cos cumsum diag div dot eq exp flatten flip ge gt le log log_softmax
logsumexp lt matmul max mean min mm movedim mul mv ne neg norm ones_like outer permute relu roll rsqrt sigmoid sign
sin softmax sort split sqrt square squeeze stack std sub sum t tanh topk transpose tril triu unsqueeze var where
zeros_like
""".split())
OF_NN = frozenset("gelu layer_norm mse_loss silu softplus normalize".split())
METHODS = FUNCTIONS - {"cat", "stack", "where", "zeros_like", "ones_like"} | {"view", "reshape"}
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.MatMult: operator.matmul, ast.Pow: operator.pow, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge}


class ExpressionError(GlobalTensorError, ValueError):
    """An expression that cannot be read, or that has something in it that the playground does not admit."""


def parse_expression(text: str) -> ast.expr:
    """The tree of an expression, checked. Raises ExpressionError."""
    if len(text) > LONGEST:
        raise ExpressionError(f"an expression of {len(text)} letters", f"it has {LONGEST} at most")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ExpressionError(f"{text!r} is not an expression", why, "x @ y") from None
    check_expression(tree, DEEPEST)
    return tree


def check_expression(node: ast.expr, depth: int) -> None:
    """Raise ExpressionError for a node that is not admitted, however deep."""
    if depth == 0:
        raise ExpressionError("an expression nested too deep", f"it has {DEEPEST} levels at most")
    parts: list[ast.expr | None]
    match node:
        case ast.Constant(value) if value is None or isinstance(value, (bool, int, float)):
            if value is not None and not abs(value) <= 1e6:
                raise ExpressionError(f"the number {ast.unparse(node)}", "numbers are a million at most")
            parts = []
        case ast.Name("x" | "y"):
            parts = []
        case ast.UnaryOp(ast.USub() | ast.UAdd(), operand):
            parts = [operand]
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            if isinstance(op, ast.Pow) and not _is_exponent(right):
                raise ExpressionError(f"the power {ast.unparse(node)}", "exponents are numbers from -4 to 4", "x ** 2")
            parts = [left, right]
        case ast.Compare(left, [op], [right]) if type(op) in _BINARY:
            parts = [left, right]
        case ast.Tuple(elements) | ast.List(elements):
            parts = [*elements]
        case ast.Subscript(value, index):
            parts = [value, *(part for one in (index.elts if isinstance(index, ast.Tuple) else [index])
                              for part in ([one.lower, one.upper, one.step] if isinstance(one, ast.Slice) else [one]))]
        case ast.Attribute(value, "T" | "mT"):
            parts = [value]
        case ast.Call(func, arguments, keywords):
            _check_function(func)
            if any(one.arg is None for one in keywords):
                raise ExpressionError(f"{ast.unparse(node)!r} is not admitted here", "keywords are written out",
                                      "dim=1")
            parts = [func.value] if isinstance(func, ast.Attribute) and _torch_function(func) is None else []
            words = [one.value for one in keywords if not _is_word(one.value)]
            parts += [one for k, one in enumerate(arguments) if not (k == 0 and _is_word(one))] + words
        case _:
            raise ExpressionError(f"{ast.unparse(node)!r} is not admitted here", "an expression is made of x, y, "
                                  "numbers, operators, indices and torch's functions", "torch.relu(x @ y)")
    for part in parts:
        if part is not None:
            check_expression(part, depth - 1)


def _is_exponent(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and abs(node.value) <= 4


def _is_word(node: ast.expr) -> bool:
    """A short text, as for `reduction` or einsum."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) <= 40


def _torch_function(func: ast.expr) -> Callable[..., Any] | None:
    """torch.relu, F.gelu or torch.nn.functional.gelu; None for anything else."""
    name = ast.unparse(func)
    for prefix, names, home in (("torch.nn.functional.", OF_NN, torch.nn.functional),
                                ("F.", OF_NN | FUNCTIONS, torch.nn.functional), ("torch.", FUNCTIONS, torch)):
        rest = name.removeprefix(prefix)
        if rest != name and rest in names:
            return getattr(home, rest, None) or getattr(torch, rest)
    return None


def _check_function(func: ast.expr) -> None:
    if _torch_function(func) is None and not (
            isinstance(func, ast.Attribute) and func.attr in METHODS and not _is_torch(func.value)):
        raise ExpressionError(f"the function {ast.unparse(func)} is not admitted here",
                              f"of torch there are {', '.join(sorted(FUNCTIONS)[:12])}, ...", "torch.softmax(x, 1)")


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "F")


def compute(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a checked expression. Raises what torch raises, and ExpressionError for a tensor too large."""
    value = _value_of(node, names)
    for one in value if isinstance(value, (tuple, list)) else [value]:
        if isinstance(one, torch.Tensor) and one.numel() > LARGEST:
            raise ExpressionError(f"a tensor of {one.numel():,} elements", f"here they have {LARGEST:,} at most")
    return value


def _value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return names[name]
        case ast.UnaryOp(op, operand):
            return -compute(operand, names) if isinstance(op, ast.USub) else compute(operand, names)
        case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]):
            return _bounded(_BINARY[type(op)], [compute(left, names), compute(right, names)], {})
        case ast.Tuple(parts):
            return tuple(compute(part, names) for part in parts)
        case ast.List(parts):
            return [compute(part, names) for part in parts]
        case ast.Subscript(value, index):
            return compute(value, names)[_index_of(index, names)]
        case ast.Attribute(value, name):
            return getattr(compute(value, names), name)
        case ast.Call(func, arguments, keywords):
            function = _torch_function(func)
            if function is None:
                assert isinstance(func, ast.Attribute)
                function = getattr(compute(func.value, names), func.attr)
            return _bounded(function, [compute(one, names) for one in arguments],
                            {str(one.arg): compute(one.value, names) for one in keywords})
    raise AssertionError(f"{ast.dump(node)} was not checked")


def _bounded(function: Callable[..., Any], values: list[Any], named: dict[str, Any]) -> Any:
    """Call a function of tensors and numbers. Operators on tuples would repeat them; several operands may be broadcast
    to far more than each of them has."""
    tensors = [one for one in [*values, *named.values()] if isinstance(one, torch.Tensor)]
    if function in _BINARY.values():
        if not all(isinstance(one, (torch.Tensor, int, float)) for one in values):
            raise ExpressionError("an operator on what is neither a tensor nor a number", "", "x + y")
        if not tensors:
            number = function(*values)
            if not abs(number) <= LARGEST_NUMBER:
                raise ExpressionError(f"the number {number:.3g}", f"here numbers are {LARGEST_NUMBER:.0e} at most")
            return number
    wide = [max(sizes) for sizes in zip_longest(*(reversed(one.shape) for one in tensors), fillvalue=1)]
    if prod(wide) > WIDEST:
        raise ExpressionError(f"operands that are broadcast to {prod(wide):,} elements", f"here at most to {WIDEST:,}")
    return function(*values, **named)


def _index_of(index: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(index, ast.Tuple):
        return tuple(_index_of(one, names) for one in index.elts)
    if isinstance(index, ast.Slice):
        parts = (index.lower, index.upper, index.step)
        return slice(*(None if part is None else compute(part, names) for part in parts))
    return compute(index, names)
