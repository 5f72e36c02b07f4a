"""Attention over a split sequence, forward and backward; every process writes what it sees to FOLDER/<rank>.json."""
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import globaltensor as gt
from globaltensor.runtime.machine import gloo

S, B = gt.sbp.split, gt.sbp.broadcast
SEED = 20_261_121

MASK = torch.rand(400, 300, generator=torch.Generator().manual_seed(SEED)) < 0.5

# name -> shape of q, shape of k and v, sbp of all, mask, options
CASES = {
    "causal": ((1, 1, 7, 4), (1, 1, 7, 4), S(2), None, {"is_causal": True}),
    "shared heads": ((1, 3, 7, 4), (1, 1, 7, 4), S(2), None, {"is_causal": True, "enable_gqa": True}),
    "more keys": ((1, 1, 5, 4), (1, 1, 9, 4), S(2), None, {"is_causal": True}),
    "all keys": ((1, 1, 400, 64), (1, 1, 300, 64), S(2), None, {}),
    "masked": ((1, 1, 400, 64), (1, 1, 300, 64), S(2), MASK, {}),
    "heads dealt": ((1, 2, 6, 4), (1, 2, 6, 4), S(2), None, {"is_causal": True}),
}


def attention(q_shape, k_shape, sbp, mask, options):
    """The result and the gradients, each as global tensors and as plain ones."""
    generator = torch.Generator().manual_seed(SEED)
    plain = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
             for shape in (q_shape, k_shape, k_shape)]
    where = gt.placement.all("cpu")
    lying = [gt.from_full(t.detach(), where, sbp).requires_grad_() for t in plain]
    weight = torch.randn(q_shape, generator=generator, dtype=torch.float64)
    results = []
    for operands, upstream in ((plain, weight), (lying, gt.from_full(weight, where, sbp))):
        out = F.scaled_dot_product_attention(*operands, attn_mask=mask, **options)
        out.backward(upstream)
        results.append([out.detach(), *(t.grad for t in operands)])
    return results


def main(folder):
    gt.init(machine=gloo)                            # the same rates however it is run, so the same plans
    print(f"seed {SEED}")
    moved, lies = {}, {}
    for name, case in CASES.items():
        with gt.record() as moves:
            plain, ours = attention(*case)
        for want, got in zip(plain, ours):
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-10, atol=1e-12)
        moved[name] = [[m.op, m.bytes, m.tensors, str(m.src), str(m.dst)] for m in moves if m.bytes]
        lies[name] = [str(t.sbp) for t in ours]
    Path(folder, f"{gt.rank()}.json").write_text(json.dumps({"moved": moved, "lies": lies}))


if __name__ == "__main__":
    main(sys.argv[1])
