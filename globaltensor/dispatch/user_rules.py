"""Rules that users give: `gt.rule(op, "m k, k n -> m n", "a*b")` lets any op run split.

An op that is not in the table runs on broadcast operands: right, and gathered first. With a rule it runs on the shards
as the ops of the table do. What the op returns is told by its fake kernel. Where it has none, the rule tells the
shapes, and the op is run once on tiny operands to see the dtypes.
"""
from __future__ import annotations

from math import prod
from typing import Any

import torch

from globaltensor.errors import RuleError, expect
from globaltensor.layouts.layout import Spec
from globaltensor.op_table.line import TABLE, Line
from globaltensor.op_table.variants import line_of
from globaltensor.rules.call import Call, arguments
from globaltensor.rules.families import fixed
from globaltensor.rules.language import Rule, label_sizes
from globaltensor.rules.parse import Parsed, check_leaves, parse_rule
from globaltensor.runtime.custom_ops import overload_of
from globaltensor.runtime.torch_internals import OpOverload, is_composite, tree_flatten

_given: set[OpOverload] = set()                      # ops whose rule a user gave
# not 1, which broadcasts: a dim that the rule has wrong would not show
_TINY = 2                                            # the size of every dim of the operands that show the dtypes


def give(op: Any, dims: str, algebra: str = "", *, leaves: str = "sum", nonempty: str = "") -> OpOverload:
    """Put the line of a user's op into the table; returns the op.

    Raises RuleError where the rule is malformed or does not fit the op's schema, or the op is torch's own.
    """
    func = overload_of(op)
    for text in (dims, algebra):
        expect(text, str, f"a rule of {text!r}", 'gt.rule(op, "m k, k n -> m n", "a*b")')
    parsed = parse_rule(dims, algebra)
    check_leaves(leaves, dims)
    _check_fits(func, parsed, dims)
    TABLE[func] = Line(fixed(dims, algebra, leaves=leaves, nonempty=nonempty))
    _given.add(func)
    line_of.cache_clear()                            # it remembers which variants have no line
    return func


def _check_fits(func: OpOverload, parsed: Parsed, dims: str) -> None:
    """Is this a rule for this op, and may the op have one?"""
    name = func._schema.name
    if func in TABLE and func not in _given:
        raise RuleError(f"{name} has a line in the table already", "its rule is tested, and other ops rely on it",
                        "a custom op of your own that calls it")
    if is_composite(func):
        raise RuleError(f"{name} needs no rule", "torch makes it of other ops, which have rules of their own")
    if func._schema.is_mutable:
        raise RuleError(f"{name} writes into its operands", "a rule says how results depend on operands",
                        "an op that returns its result")
    operands = [a.name for a in arguments(func) if a.tensor]
    lists = [a.name for a in arguments(func) if a.tensors]
    if lists:
        raise RuleError(f"{name} takes a list of tensors, {lists[0]}",
                        "the rule of such an op depends on how many there are", "an op that takes them one by one")
    if len(operands) != len(parsed.inputs):
        raise RuleError(f"{dims!r} has {len(parsed.inputs)} operands, {name} has {len(operands)}: "
                        f"{', '.join(operands)}", "every tensor argument has its dims, in the order of the schema")
    returned = [str(r.type) for r in func._schema.returns]
    if returned.count("Tensor") != len(returned) or len(returned) != len(parsed.outputs):
        raise RuleError(f"{dims!r} has {len(parsed.outputs)} results, {name} returns "
                        f"{', '.join(returned) or 'nothing'}", "every result is a tensor and has its dims")


def results_by_rule(call: Call, line: Line, operands: list[Spec], device: torch.device) -> list[torch.Tensor] | None:
    """What an op without a fake kernel returns, as meta tensors; None for an op whose rule no user gave.

    Raises RuleError, with the fake kernel to add, where the rule does not tell the shapes or tiny operands will not do.
    """
    if call.func not in _given:
        return None
    of = line.rule(call)
    sizes = label_sizes(of, [own.shape for own in operands])
    tiny = dict.fromkeys(sizes, _TINY)
    try:
        shapes = [_shape(dims, sizes) for dims in of.outputs]
        results = _run_tiny(call, of, tiny, operands, device)
    except (LookupError, RuntimeError, ValueError, TypeError) as error:
        raise _needs_fake(call, f"its rule does not tell them: {error}") from error
    for dims, result in zip(of.outputs, results):
        if tuple(result.shape) != _shape(dims, tiny):
            raise RuleError(f"the rule of {call.func._schema.name} does not fit what it returns",
                            f"for dims of size {_TINY} it gave {list(result.shape)}, the rule says "
                            f"{list(_shape(dims, tiny))}", "gt.rule(...) with the dims that it returns")
    return [torch.empty(shape, dtype=result.dtype, device="meta") for shape, result in zip(shapes, results)]


def _shape(dims: Any, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(prod(1 if label == "1" else sizes[label.rstrip("!")] for label in dim) for dim in dims)


def _run_tiny(call: Call, of: Rule, tiny: dict[str, int], operands: list[Spec], device: torch.device
              ) -> list[torch.Tensor]:
    """The op's results for operands of ones whose dims all have size 2."""
    ones = [torch.ones(_shape(dims, tiny), dtype=own.dtype, device=device) for dims, own in zip(of.inputs, operands)]
    args, kwargs = call.arguments_with(ones)
    with torch.no_grad():
        return tree_flatten(call.func(*args, **kwargs))[0]


def _needs_fake(call: Call, why: str) -> RuleError:
    name = call.func._schema.name
    parameters = ", ".join(a.name for a in arguments(call.func))
    return RuleError(f"{name} has a rule but no fake kernel, so the shapes of its results are not known", why,
                     f'@torch.library.register_fake("{name}")\n           def _({parameters}): return '
                     f"torch.empty_like({call.operand(0)})")
