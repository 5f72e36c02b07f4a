"""Kernels that give what they write another shape, which no schema tells: every op of torch that writes, run split.

Oracle: plain torch. A shard that a kernel has resized unseen is state that is lost, or memory that is not its own; so
the cases run in child processes (programs/resized.py).
"""
from __future__ import annotations

import json
import os
from collections import Counter

import pytest
import torch
from harness import PROGRAMS, PYTHON, environment, good

import globaltensor as gt
from globaltensor.errors import InPlaceError

SEED = int(os.environ.get("SEED") or 20_261_129)
print(f"tests/test_resized.py: SEED={SEED}")
S, B = gt.sbp.split(0), gt.sbp.broadcast
# What torch itself does wrongly, or takes by an oddity of its kernels: it adds to an `out`, or leaves an empty one so.
ODD = {"aten._compute_linear_combination.out sized", "aten._embedding_bag_dense_backward.out sized",
       "aten._embedding_bag_dense_backward.out empty", "aten.bernoulli_.Tensor empty",
       "aten.binary_cross_entropy_backward.grad_input empty", "aten.normal.Tensor_float_out empty"}


def check(every: int) -> Counter[str]:
    command = [PYTHON, PROGRAMS / "resized.py", every, SEED % every]
    said = json.loads(good(command, environment(GLOBALTENSOR_RANKS="3"), timeout=600).splitlines()[-1])
    wrong = {case: came for case, came in said.items() if case not in ODD and not came.startswith("plain torch")
             and came not in ("right", "refused", "no arguments")}
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(f"{case}: {came}" for case, came in wrong.items())
    counts = Counter(came for came in said.values() if came in ("right", "refused", "no arguments"))
    print(dict(counts))
    return counts


def test_some_ops_that_write():
    assert check(20)["right"] > 50


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ops_that_write():
    assert check(1)["right"] > 1200


def observed(weight, lay, steps=2):
    """Results, and the buffers of a fresh observer per channel."""
    buffers = [torch.tensor([]), torch.tensor([]), torch.ones(1), torch.zeros(1, dtype=torch.int32)]
    on = torch.ones(1, dtype=torch.uint8)
    weight, on, *buffers = (lay(i, t) for i, t in enumerate((weight, on, *buffers)))
    results = [torch.fused_moving_avg_obs_fake_quant(weight, on, on, *buffers, 0.01, -128, 127, 0, True, True)
               for _ in range(steps)]
    return [*results, *buffers]


@pytest.mark.parametrize("ranks", [[0], [1, 0], [0, 1, 2]])
@pytest.mark.parametrize("split", [(), (0,), (2,), (3,), (4,), (2, 3, 4, 5), (0, 2, 3, 4, 5)])
def test_a_fresh_observer_per_channel(ranks, split):
    weight = torch.randn(5, 6)
    on = gt.placement("cpu", ranks)
    expected = observed(weight, lambda i, t: t)
    for ours, theirs in zip(observed(weight, lambda i, t: gt.from_full(t, on, S if i in split else B)), expected):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.full_tensor(), theirs)


@pytest.mark.parametrize("sbp", [S, B])
def test_a_target_that_a_kernel_resizes_is_refused_and_stays(sbp):
    on = gt.placement("cpu", [0, 1])
    x, mean, var, *outs = (gt.from_full(t, on, sbp) for t in (torch.rand(4, 3), torch.rand(3), torch.rand(3),
                                                              *torch.empty(3, 0)))
    for _ in range(2):
        with pytest.raises(InPlaceError, match="change the shape of its target"):
            torch.ops.aten._native_batch_norm_legit.out(x, None, None, mean, var, True, 0.1, 1e-5, out=outs[0],
                                                        save_mean=outs[1], save_invstd=outs[2])
        assert all(t.shape == t.full_tensor().shape == (0,) for t in outs)
