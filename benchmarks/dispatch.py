"""How much does an op cost on top of plain torch, when everything about it is known (a cache hit)?

One rank, 16 x 16 float32, one thread: microseconds per op for plain torch, this library and torch DTensor, measured
in turns in one process; medians. The target for the Python path is at most 3x DTensor's time per op.
"""
from __future__ import annotations

import torch
from torch.nn import functional as F

import globaltensor as gt
from benchmarks.timing import alternating, dtensor_mesh, show

OPS = {
    "add": lambda x, w, b: x + w,
    "mul": lambda x, w, b: x * w,
    "mm": lambda x, w, b: x @ w,
    "softmax": lambda x, w, b: torch.softmax(x, -1),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (16,), b, b),
    "scalar": lambda x, w, b: x * 0.5,
    "view": lambda x, w, b: x.view(4, 64),
    "linear": lambda x, w, b: F.linear(x, w, b),
}


def main(json: bool = False) -> None:
    torch.set_num_threads(1)
    gt.init(ranks=1)
    mesh = dtensor_mesh((1,))
    from torch.distributed.tensor import Replicate, distribute_tensor

    where = gt.placement("cpu", [0])
    plain = [torch.randn(16, 16), torch.randn(16, 16), torch.randn(16)]
    ours = [gt.from_full(t, where, gt.sbp.broadcast) for t in plain]
    theirs = [distribute_tensor(t, mesh, [Replicate()]) for t in plain]
    rows = []
    for name, op in OPS.items():
        a, b, c = alternating([lambda: op(*plain), lambda: op(*ours), lambda: op(*theirs)])
        rows.append({"op": name, "plain us": a, "globaltensor us": b, "dtensor us": c, "ratio to dtensor": b / c})
    rows.append(_mlp(where, mesh))
    show("dispatch: microseconds per op on a cache hit", rows, json)


def _mlp(where: gt.placement, mesh: object) -> dict:
    """Forward and backward of a four-layer MLP."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    weights = [torch.randn(16, 16) for _ in range(4)]
    x = torch.randn(16, 16)

    def step(x, weights):
        h = x
        for w in weights:
            h = torch.relu(torch.mm(h, w))
        torch.autograd.grad(h.sum(), weights)

    def of(make):
        return make(x), [make(w).requires_grad_() for w in weights]

    cases = [of(lambda t: t.clone()), of(lambda t: gt.from_full(t, where, gt.sbp.broadcast)),
             of(lambda t: distribute_tensor(t, mesh, [Replicate()]))]
    a, b, c = alternating([lambda case=case: step(*case) for case in cases], calls=60)
    return {"op": "MLP forward+backward", "plain us": a, "globaltensor us": b, "dtensor us": c,
            "ratio to dtensor": b / c}


if __name__ == "__main__":
    main()
