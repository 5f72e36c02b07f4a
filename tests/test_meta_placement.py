"""Split tensors on the meta device: each op gives the shapes and dtypes that plain torch gives there.

Oracle: plain torch on the meta device, by its operator database and by a table of ops that look at values elsewhere.
`make test` tries a twentieth of the entries; SEED turns which.
"""
from __future__ import annotations

import itertools
import os
import warnings

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

import globaltensor as gt

SEED = int(os.environ.get("SEED") or 20_261_130)
print(f"tests/test_meta_placement.py: SEED={SEED}")
ON = gt.placement("meta", [0, 1])
S, B = gt.sbp.split, gt.sbp.broadcast
# Statistics of no use, of which torch tells other shapes on the meta device than on a CPU; and memory around operands.
ODD = ("native_batch_norm", "_native_batch_norm_legit", "as_strided")


def described(result):
    return [(tuple(t.shape), t.dtype) for t in tree_leaves(result) if isinstance(t, torch.Tensor)]


def on_meta(t):
    if t.layout is not torch.strided:
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def laid_out(dim, all_of_them):
    """Put tensors on ranks: the first one, or each, split along the dim."""
    number = itertools.count()

    def lay(t):
        split = dim is not None and dim < t.dim() and (next(number) == 0 or all_of_them)
        return gt.from_full(t.detach(), ON, S(dim) if split else B) if t.layout is torch.strided else t

    return lay


def differences(op):
    """Cases of an entry, and those that raise or have other shapes where plain torch has some."""
    cases, wrong = 0, []
    for dtype in (torch.float32, torch.int64):
        for sample in itertools.islice(op.sample_inputs("cpu", dtype), 3) if op.supports_dtype(dtype, "cpu") else ():
            arguments = (sample.input, *sample.args), sample.kwargs | (
                {"device": "meta"} if "device" in sample.kwargs else {})
            try:
                args, kwargs = tree_map_only(torch.Tensor, on_meta, arguments)
                wanted = described(op(*args, **kwargs))
            except Exception:
                continue                             # torch needs values there
            dims = max((t.dim() for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)), default=0)
            for dim, every in [(None, True), *itertools.product(range(min(dims, 4)), (True, False))]:
                cases += 1
                args, kwargs = tree_map_only(torch.Tensor, laid_out(dim, every), arguments)
                try:
                    given = described(op(*args, **kwargs))
                except Exception as error:
                    given = error
                if given != wanted:
                    wrong.append((op.name, dtype, dim, every, wanted, given))
    return cases, wrong


def check(some):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counted = [differences(op) for op in some if op.name not in ODD]
    wrong = [row for _, rows in counted for row in rows]
    assert not wrong, f"{len(wrong)} wrong, SEED={SEED}\n" + "\n".join(map(str, wrong[:20]))
    return sum(cases for cases, _ in counted)


def test_a_twentieth_of_the_operator_database():
    assert check(op_db[SEED % 20::20]) > 150


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_operator_database():
    assert check(op_db) > 10_000


def zeros(*shape, dtype=torch.float32, sbp=S(0)):
    return gt.zeros(shape, dtype=dtype, placement=ON, sbp=sbp)


def numbers(n, sbp=B):
    return zeros(n, dtype=torch.int64, sbp=sbp)


def gradient(x, index):
    x = x.clone().requires_grad_()
    x[index].sum().backward()
    return x.grad


def products(rows, experts):
    return torch._grouped_mm(zeros(*rows, dtype=torch.bfloat16), zeros(*experts, dtype=torch.bfloat16),
                             offs=zeros(4, dtype=torch.int32, sbp=B))


CALLS = {
    "index_select": (lambda x: x.index_select(0, numbers(3)), (3, 5)),
    "rows": (lambda x: x[numbers(3)], (3, 5)),
    "rows by parts": (lambda x: x[numbers(4, S(0))], (4, 5)),
    "rows by plain numbers": (lambda x: x[torch.empty(2, dtype=torch.int64, device="meta")], (2, 5)),
    "index_add": (lambda x: x.index_add(0, numbers(4), zeros(4, 5)), (8, 5)),
    "index_add_": (lambda x: x.index_add_(0, numbers(4), zeros(4, 5)), (8, 5)),
    "index_put": (lambda x: x.index_put((numbers(4),), zeros(4, 5), accumulate=True), (8, 5)),
    "index_put_": (lambda x: x.index_put_((numbers(4),), zeros(4, 5), accumulate=True), (8, 5)),
    "gradient": (lambda x: gradient(x, numbers(4, S(0))), (8, 5)),
    "experts": (lambda x: products((16, 8), (4, 8, 8)), (16, 8)),
    "experts' gradient": (lambda x: products((8, 16), (16, 8)), (4, 8, 8)),
    "narrow experts": (lambda x: products((16, 3), (4, 3, 5)), (16, 5)),
    "mean of integers": (lambda x: torch.nn.functional.avg_pool1d(zeros(2, 3, 9, dtype=torch.int64, sbp=S(2)), 3, 2, 1,
                                                                  count_include_pad=False), (2, 3, 5)),
}


@pytest.mark.parametrize("name", CALLS)
def test_ops_that_look_at_values_elsewhere(name):
    """Twice and thrice: then the native code has seen the call."""
    call, shape = CALLS[name]
    for _ in range(3):
        result = call(zeros(8, 5))
        assert result.is_global and result.is_meta and tuple(result.shape) == shape
