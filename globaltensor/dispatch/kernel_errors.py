"""What torch's kernels say of a mistake, where shape functions and rules say less of it, or nothing."""
from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from globaltensor.dispatch.recipe import written_operands
from globaltensor.errors import RuleError
from globaltensor.layouts.layout import Spec
from globaltensor.op_table.line import Line
from globaltensor.rules.call import Call, values_of
from globaltensor.rules.language import Rule
from globaltensor.runtime.torch_internals import is_composite, tree_map_only

_MOST_ZEROS, _FEW_ZEROS = 2**24, 2**20
_TAKEN = {torch.float32, torch.float64}              # by all kernels that have a decomposition, with any others
_OFTEN = {torch.float16, torch.bfloat16}             # so large that it would take long to ask
_taken: set[tuple[Any, ...]] = set()                 # by kernels, as they have shown: ops, dtypes, numbers


def of_zeros(call: Call, operands: list[Spec]) -> Any:
    """What the op itself returns for zeros, or raises. Of an empty operand torch's kernels take what its shape
    functions refuse, such as a product of two dtypes, or rows that no index names."""
    zeros = [torch.zeros(own.shape if own.numel <= _FEW_ZEROS else (), dtype=own.dtype, device="cpu").expand(own.shape)
             for own in operands]
    for i in written_operands(call):                 # to memory of their own
        zeros[i] = torch.zeros(operands[i].shape, dtype=operands[i].dtype, device="cpu")
    args, kwargs = call.arguments_with(zeros)
    with torch.no_grad():
        return tree_map_only(torch.Tensor, lambda t: t.to("meta"), call.func(*args, **kwargs))


def refuse_by_kernel(call: Call, operands: list[Spec]) -> None:
    """Raise what the kernel says of a call that something else has refused: it says more, of sizes and of dtypes.
    It is not asked about so many elements that it would take long where it refuses nothing."""
    if call.func.namespace != "aten" or operands[0].placement.type == "meta" or (
            sum(own.numel for own in operands) > _MOST_ZEROS):
        return
    try:
        of_zeros(call, operands)
    except NotImplementedError as error:             # of a CPU, on which the call need not run
        if operands[0].placement.type == "cpu" and "not implemented for" in str(error):
            raise error from None
    except Exception as error:
        if "INTERNAL ASSERT" not in str(error):      # a kernel that did not think of it
            raise error from None


def refuse_dtypes(call: Call, operands: list[Spec]) -> None:
    """Raise what the kernel says of dtypes that it does not take, before the op is done by others, which may take them:
    softmax of integers by their maximum and a sum, a mean of float8 by a sum in float32. It is asked once for an op,
    dtypes and numbers; not of dtypes that kernels take, and of no op that would draw random numbers."""
    func, dtypes = call.func, tuple(own.dtype for own in operands)
    if dtypes[0] in _TAKEN or func.namespace != "aten" or is_composite(func) or (
            torch.Tag.nondeterministic_seeded in func.tags or operands[0].placement.type != "cpu"):
        return
    numbers = tuple(str(value) for value in call.values.values() if isinstance(value, (int, float, str, list, tuple))
                    and not any(isinstance(v, torch.Tensor) for v in values_of((value,))))
    if (key := (func, dtypes, numbers)) in _taken:
        return
    most = _FEW_ZEROS if set(dtypes) & _OFTEN else _MOST_ZEROS
    if any(own.symbolic or not own.numel or own.numel > most for own in operands):
        return                                       # of an empty one kernels take any dtype
    try:
        of_zeros(call, operands)
    except Exception as error:                       # or of zeros, such as a matrix that has no inverse
        if any(text in str(error) for text in ("not implemented for", "Unsupported dtype")):
            raise error from None
        return
    _taken.add(key)


def name_element_of_whole(error: BaseException, a: torch.Tensor, rank: int, outputs: Sequence[Spec | None]) -> None:
    """In an error of a rank's kernel that names an element of a batch of matrices `a`, name that of the whole batch."""
    named, batch = re.search(r"\(Batch element (\d+)\)", str(error)), a.shape[:-2]
    own = next((out for out in outputs if out is not None and out.shape[:len(batch)] == batch), None)
    if named is None or own is None or len(error.args) != 1:
        return
    region, nth, element = own.region(rank)[:len(batch)], int(named[1]), 0
    for d, (start, stop) in enumerate(region):
        after = math.prod(end - begin for begin, end in region[d + 1:])
        element = element * batch[d] + start + nth // after % (stop - start)
    error.args = (str(error).replace(named[0], f"(Batch element {element})"),)


def rule_of(line: Line, call: Call, operands: list[Spec]) -> Rule:
    """The rule of a call. Where none fits, by a mistake that torch's shape functions let pass, torch says which."""
    try:
        return line.rule(call)
    except RuleError as error:
        refuse_by_kernel(call, operands)
        raise error from None
