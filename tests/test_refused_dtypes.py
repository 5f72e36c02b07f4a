"""Dtypes that torch's kernels refuse, of ops that are done by others, which may take them: they are refused here too.

Oracle: plain torch, for every op with a decomposition and every dtype whose values torch can make.
"""
from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from rule_samples import ELSEWHERE, SAMPLES, made, name_of
from torch.utils._pytree import tree_map_only

import globaltensor as gt
from globaltensor.op_table.table import TABLE
from globaltensor.runtime.dtypes import FLOAT8

TWO = gt.placement("cpu", [0, 1])
S, B = gt.sbp.split, gt.sbp.broadcast
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
          torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
          torch.complex128, *FLOAT8]
DIVIDES = {"smooth_l1_loss_backward"}                # of integers by 0, which ends the process of plain torch
DECOMPOSED = [func for func, line in TABLE.items() if line.decomposition is not None and func.namespace == "aten"
              and name_of(func) in SAMPLES and name_of(func) not in ELSEWHERE | DIVIDES]


def laid_out(t, sbp):
    return gt.from_full(t, TWO, sbp if t.dim() > (sbp.dim if sbp.is_split else 0) else B)


def outcome(func, args, kwargs, where):
    torch.manual_seed(1)
    try:
        return func(*tree_map_only(torch.Tensor, where, args), **tree_map_only(torch.Tensor, where, kwargs))
    except Exception as error:                       # of whichever type it is
        return error


def cases(func):
    """Samples with all tensors of the first one's dtype in another, and what they are."""
    for number, dtype in itertools.product(range(len(SAMPLES[name_of(func)]))[:2], DTYPES):
        args, kwargs = (made(x, torch.Generator().manual_seed(7)) for x in SAMPLES[name_of(func)][number])
        own = next(t.dtype for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        yield f"sample {number} {dtype}", *tree_map_only(
            torch.Tensor, lambda t: t.to(dtype) if t.dtype is own else t, (args, kwargs))


@pytest.mark.parametrize("func", DECOMPOSED, ids=name_of)
def test_what_torch_refuses_is_refused(func):
    wrong, refused = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for what, args, kwargs in cases(func):
            theirs = outcome(func, args, kwargs, lambda t: t)
            if not isinstance(theirs, NotImplementedError) and "Unsupported dtype" not in str(theirs):
                continue
            refused += 1
            for sbp in (S(0), S(1)):
                ours = outcome(func, args, kwargs, lambda t: laid_out(t, sbp))
                if not isinstance(ours, Exception):
                    wrong.append(f"{what} {sbp}: {theirs}, and we give {ours}"[:200])
    print(f"{name_of(func)}: {refused} refused")
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:12])
