"""`out=`: what torch writes there, and what it refuses, by its operator database and by a table.

Oracle: plain torch on the same arguments. Which dtypes an `out` may have is the kernel's own affair, so all are tried.
`make test` tries a twentieth of the entries; SEED turns which.
"""
from __future__ import annotations

import itertools
import os
import warnings

import pytest
import torch
from harness import TORCHRUN, environment, good
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_map_only

import globaltensor as gt

SEED = int(os.environ.get("SEED") or 20_261_128)
print(f"tests/test_out.py: SEED={SEED}")
S, B = gt.sbp.split, gt.sbp.broadcast
ON = gt.placement("cpu", [0, 1])
OPERANDS = (torch.float32, torch.int64, torch.bool, torch.complex64)
OUTS = (*OPERANDS, torch.float64, torch.uint8)
RANDOM = ("randn", "multinomial", "normal", "bernoulli")
# Where torch's kernels are odd: a uint8 for a bool; imaginary parts that are dropped; kernels that know no such dtype.
ODD = ("all", "any", "logsumexp", "nansum", "bernoulli", "mean", "nanmean", "std", "var")


def entries():
    return [op for op in op_db if op.supports_out]


def to_global(t):
    return gt.from_full(t, ON, B) if t.layout is torch.strided else t


def outcome(op, sample, shapes, dtype, where):
    """The outputs, or the error."""
    args, kwargs = tree_map_only(torch.Tensor, where, ((sample.input, *sample.args), dict(sample.kwargs)))
    outs = tuple(where(torch.zeros(shape, dtype=dtype)) for shape in shapes)
    try:
        op(*args, **kwargs, out=outs if len(outs) > 1 else outs[0])
    except (RuntimeError, TypeError) as error:
        return error
    return outs


def differences(op):
    """Cases of an entry, and those that plain torch decides otherwise or gives other values for."""
    cases, wrong = 0, []
    for operand in OPERANDS:
        if not op.supports_dtype(operand, "cpu"):
            continue
        for sample in itertools.islice(op.sample_inputs("cpu", operand), 1):
            results = op(sample.input, *sample.args, **sample.kwargs)
            results = results if isinstance(results, (tuple, list)) else (results,)
            if not all(isinstance(r, torch.Tensor) and r.numel() for r in results):
                continue
            for dtype in OUTS:
                plain, ours = (outcome(op, sample, [r.shape for r in results], dtype, where)
                               for where in (lambda t: t, to_global))
                cases += 1
                refused = isinstance(plain, Exception), isinstance(ours, Exception)
                if refused[0] != refused[1]:
                    wrong += [(op.name, operand, dtype, plain, ours)] if op.name not in ODD else []
                elif not refused[0] and op.name not in RANDOM:
                    for a, b in zip(plain, ours):
                        torch.testing.assert_close(b.full_tensor(), a, equal_nan=True, rtol=1e-4, atol=1e-4)
    return cases, wrong


def check(some):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counted = [differences(op) for op in some]
    wrong = [row for _, rows in counted for row in rows]
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(map(str, wrong[:20]))
    return sum(cases for cases, _ in counted)


def test_a_twentieth_of_the_operator_database():
    assert check(entries()[SEED % 20::20]) > 150


@pytest.mark.long
def test_the_operator_database():
    assert check(entries()) > 4500


# calls with x of 4 x 3, of which `o(*shape)` makes an out
CALLS = {
    "double to half": lambda x, o: torch.add(x, x, out=o(4, 3, dtype=torch.float16)),
    "sum in double": lambda x, o: torch.sum(x, 0, out=o(3, dtype=torch.float64)),
    "sum in integers": lambda x, o: torch.sum(x * 1.7, 0, out=o(3, dtype=torch.int64)),
    "mean in double": lambda x, o: torch.mean(x, 0, out=o(3, dtype=torch.float64)),
    "truncated": lambda x, o: torch.add(x, x, out=o(4, 3, dtype=torch.int64)),
    "imaginary": lambda x, o: torch.add(x, 1j, out=o(4, 3)),
    "product in double": lambda x, o: torch.mm(x.t(), x, out=o(3, 3, dtype=torch.float64)),
    "product of batches": lambda x, o: torch.matmul(x.view(2, 2, 3), x.t(), out=o(2, 2, 4)),
    "product of two batches": lambda x, o: torch.matmul(x.view(2, 1, 2, 3), x.view(2, 3, 2), out=o(2, 2, 2, 2)),
    "product with a vector": lambda x, o: torch.linalg.matmul(x.view(2, 2, 3), x[0], out=o(2, 2)),
    "product of batches into nothing": lambda x, o: torch.matmul(x.view(2, 2, 3), x.t(), out=o(0)),
    "product of batches in double": lambda x, o: torch.matmul(x[None], x.t(), out=o(1, 4, 4, dtype=torch.float64)),
    "values and indices": lambda x, o: torch.max(x, 0, out=(o(3), o(3, dtype=torch.int64))),
    "indices in floats": lambda x, o: torch.max(x, 0, out=(o(3), o(3))),
    "into nothing": lambda x, o: torch.cat([x, x], out=o(0)),
    "into nothing, truncated": lambda x, o: torch.cat([x, x], out=o(0, dtype=torch.int64)),
    "into nothing, turned": lambda x, o: torch.mm(x.t(), x, out=o(0)).t_(),
    "list": lambda x, o: torch.unbind_copy(x, 1, out=[o(4), o(4), o(4)]) or o(1),
    "rank of a matrix": lambda x, o: torch.linalg.matrix_rank(x, out=o(dtype=torch.int64)),
    "inverse": lambda x, o: torch.linalg.inv(x.t() @ x, out=o(3, 3)),
    "sorted": lambda x, o: torch.msort(x, out=o(4, 3)),
    "expanded": lambda x, o: torch.add(x, 1, out=o(1, 3).expand(4, 3)),
    "expanded view": lambda x, o: torch.add(x, 1, out=o(4, 3)[:1].expand(4, 3)),
    "copied to an expanded view": lambda x, o: o(4, 3)[:1].expand(4, 3).copy_(x),
    "an expanded view filled": lambda x, o: o(4, 3)[:1].expand(4, 3).fill_(2),
}


def values_or_error(call, x, where):
    outs = []

    def out(*shape, **options):
        outs.append(where(torch.zeros(shape, **options)))
        return outs[-1]

    try:
        call(x, out)
    except (RuntimeError, TypeError):
        return None
    return outs


@pytest.mark.parametrize("sbp", [S(0), B], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_calls(name, sbp):
    torch.manual_seed(SEED)
    x = torch.rand(4, 3)
    plain = values_or_error(CALLS[name], x, lambda t: t)
    ours = values_or_error(CALLS[name], gt.from_full(x, ON, sbp), lambda t: gt.from_full(t, ON, sbp if t.dim() else B))
    assert (plain is None) == (ours is None)
    for a, b in zip(plain or (), ours or ()):
        torch.testing.assert_close(b.full_tensor(), a)


@pytest.mark.processes
def test_in_processes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import copy, torch, globaltensor as gt
on = gt.placement("cpu", [0, 1])
x, o = (gt.from_full(t, on, gt.sbp.split(0)) for t in (torch.eye(4) * 2, torch.zeros(0)))
torch.linalg.inv(x, out=o)
assert o.full_tensor().equal(torch.eye(4) / 2), o
assert copy.copy(x).full_tensor().equal(torch.eye(4) * 2)
u = x.to(torch.uint16)
assert torch.cat([u, u]).full_tensor().sum() == 16
""")
    good([*TORCHRUN, "--nproc-per-node", 2, program], environment())


def test_a_plain_result_gives_no_global_tensor_its_shape():
    with pytest.raises(gt.InPlaceError, match="of shape"):
        torch.add(torch.ones(3), 1, out=gt.zeros(0, placement=ON, sbp=S(0)))
