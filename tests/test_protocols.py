"""What Python and NumPy ask of a tensor beside its ops: to be formatted, converted, counted, iterated, hashed, copied.

torch answers some of it by `type(self) is Tensor`, and so differently for a subclass. A line is a question; a global
tensor answers it as the plain tensor of its value does, with the same kind of error where there is no answer.
"""
from __future__ import annotations

import cmath
import copy
import decimal
import itertools
import json
import math
import operator
import pickle
import statistics

import numpy as np
import pytest
import torch

import globaltensor as gt
from globaltensor.layouts.sbp import broadcast, partial_max, partial_sum, split

QUESTIONS = {
    **{f"format {spec!r}": lambda x, spec=spec: format(x, spec)
       for spec in (".4f", "5d", ">10", ".2e", "+", "_", ".1%", "x", "s", "nonsense")},
    "f-string": lambda x: (f"{x:.4f}", f"{x:>{12}}", str.format("{:.2e}", x), str.format("{0:8.3f}|{0}", x)),
    **{f"percent {spec}": lambda x, spec=spec: operator.mod(spec, x) for spec in ("%.3f", "%d", "%5.1e")},
    "int": int, "float": float, "complex": complex, "bool": bool, "index": operator.index, "decimal": decimal.Decimal,
    "list[x]": lambda x: [0, 1, 2, 3][x], "range": lambda x: list(range(x)), "slice": lambda x: "abcd"[:x],
    "tensor[:x]": lambda x: torch.arange(5)[:x], "str * x": lambda x: "ab" * x, "hex": hex,
    "round": round, "round to 1": lambda x: round(x, 1), "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc,
    "isnan": math.isnan, "isclose": lambda x: math.isclose(x, 2), "sqrt": math.sqrt, "cmath": cmath.sqrt,
    "fsum": lambda x: math.fsum([x, x]), "fmean": lambda x: statistics.fmean([x, 1]), "json": json.dumps,
    "divmod": lambda x: divmod(x, 2), "2 divmod": lambda x: divmod(2, x), "abs": abs, "pow": lambda x: (x ** 2, 2 ** x),
    "invert": operator.invert, "neg": operator.neg, "pos": operator.pos,
    "shift": lambda x: (1 << x, torch.bitwise_right_shift(x, 1)),
    "and": lambda x: (3 & x, x | 1, x ^ 2), "matmul": lambda x: torch.ones(2) @ x,
    "len": len, "iter": list, "reversed": reversed, "unpack": lambda x: [*x],
    "enumerate": lambda x: len(list(enumerate(x))),
    "zip": lambda x: [a + b for a, b in zip(x, x)], "max": max, "min of two": lambda x: min(x, 7), "sum": sum,
    "sorted": sorted, "any": any, "all": all,
    "contains": lambda x: 3.5 in x, "contains tensor": lambda x: torch.tensor(2.0) in x,
    "contains text": lambda x: "a" in x,
    "hash": lambda x: hash(x) == id(x), "dict key": lambda x: {x: 1}[x], "in list": lambda x: x in [x],
    "== None": lambda x: (x == None, x != "a"),                          # noqa: E711
    "dir": lambda x: sorted(set(dir(torch.Tensor)) - set(dir(x))),
    "tolist": lambda x: x.tolist(), "item": lambda x: x.item(), "numpy": lambda x: x.numpy(),
    "asarray": np.asarray, "float32": lambda x: np.asarray(x, dtype=np.float32),
    "copied": lambda x: np.array(x, copy=True),
    "np.sqrt": np.sqrt, "np.sum": np.sum, "array of two": lambda x: np.array([x, x]),
    "deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "ndim": lambda x: (x.ndim, x.shape, x.numel(), x.nbytes, x.itemsize, x.element_size(), x.dim_order(), x.stride()),
    "type": lambda x: (x.type(), x.dtype, x.device, x.layout, x.names, x.is_leaf, x.requires_grad, x.is_shared()),
    "T": lambda x: (x.mT, x.mH), "real": lambda x: x.real, "torch.tensor": torch.tensor, "as_tensor": torch.as_tensor,
    "full": lambda x: torch.full((2,), x), "alpha": lambda x: torch.add(torch.ones(2), torch.ones(2), alpha=x),
    "arange": torch.arange, "ones(x)": torch.ones,
}
VALUES = (
    torch.tensor(2.0), torch.tensor(2), torch.tensor(True), torch.tensor(1 + 2j), torch.tensor(torch.nan),
    torch.tensor(2.0, requires_grad=True), torch.tensor(2.5, dtype=torch.bfloat16), torch.tensor([[2.0]]),
    torch.tensor([2.0, 3.5]), torch.tensor([[2, 3], [0, 1]]), torch.tensor([]),
)


def answer(question, x):
    """What came out in plain terms: values of tensors and arrays, the type of an error."""
    try:
        return plain(question(x))
    except Exception as error:
        assert not isinstance(error, gt.GlobalTensorError), error
        return type(error)


def plain(value):
    if isinstance(value, torch.Tensor):
        full = value.full_tensor() if value.is_global else value
        return "tensor", str(full.dtype), value.requires_grad, repr(full.tolist())
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), repr(value.tolist())
    return [plain(v) for v in value] if isinstance(value, (tuple, list)) else repr(value)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.filterwarnings("ignore")
def test_answers_as_a_plain_tensor(question):
    for value, sbp in itertools.product(VALUES, (broadcast, partial_sum, split(0), partial_max)):
        if sbp.is_split and not value.dim() or sbp.is_partial and value.dtype == torch.bool:
            continue
        if sbp.op == "max" and not value.dtype.is_floating_point:
            continue
        x = gt.from_full(value.detach(), gt.placement("cpu", [0, 1]), sbp).requires_grad_(value.requires_grad)
        assert answer(QUESTIONS[question], x) == answer(QUESTIONS[question], value), f"{question} of {value} in {sbp}"


def test_a_format_without_a_specification_is_the_representation_of_a_tensor_with_dims():
    x = gt.from_full(torch.tensor([2.0, 3.5]), gt.placement("cpu", [0, 1]), split(0))
    assert f"{x}" == str(x) == repr(x)
    with pytest.raises(TypeError, match="unsupported format string passed to GlobalTensor.__format__"):
        format(x, ".4f")


def test_formatting_a_number_moves_what_item_moves():
    where = gt.placement("cpu", [0, 1])
    for sbp in (broadcast, partial_sum):
        loss = gt.from_full(torch.tensor(2.0), where, sbp)
        with gt.record() as formatted:
            assert f"{loss:.4f}" == "2.0000"
        assert f"{loss:.1e}" == "2.0e+00"
        again = gt.from_full(torch.tensor(2.0), where, sbp)
        with gt.record() as asked:
            again.item()
        assert [(e.op, e.bytes) for e in formatted] == [(e.op, e.bytes) for e in asked]
